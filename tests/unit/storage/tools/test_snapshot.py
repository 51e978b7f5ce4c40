"""Manifests of snapshots: what is believed of them, and what is not."""

from __future__ import annotations

import json
import os

import pytest
from harness.indexed_store import IndexedStore
from harness.snapshots import take_snapshot

from mqmesh.errors import ConfigError, CorruptRecord
from mqmesh.message import Message
from mqmesh.storage.tools.snapshot import (
    MANIFEST,
    FileKind,
    Manifest,
    delete_snapshot,
    is_sound,
    list_snapshots,
    load_manifest,
    seal_manifest,
)


@pytest.fixture
def taken(tmp_path):
    """A snapshot of several segments with an index."""
    store = IndexedStore(tmp_path / "store")
    try:
        for number in range(80):
            store.put([Message("topic", bytes(1000), keys=[f"key-{number}"])])
        store.catch_up()
        yield take_snapshot(store, tmp_path / "store", tmp_path / "snapshots")
    finally:
        store.close()


def change(directory, edit):
    path = directory / MANIFEST
    document = json.loads(path.read_text())
    edit(document)
    path.write_bytes(seal_manifest(json.dumps(document).encode()))


def test_a_manifest_is_read_as_it_was_written(taken):
    directory, manifest = taken
    assert load_manifest(directory) == manifest
    assert {file.kind for file in manifest.files} >= {FileKind.SEGMENT, FileKind.INDEX}
    assert all(is_sound(directory, file) for file in manifest.files)
    assert manifest.start_offset == 0 < manifest.end_offset


def test_a_directory_without_manifest_is_no_snapshot(tmp_path):
    with pytest.raises(ConfigError, match=r"not a snapshot: .* has no manifest.json"):
        load_manifest(tmp_path)


def test_a_later_format_is_refused_by_its_number(taken):
    change(taken[0], lambda document: document.update(format=3, files=None))
    with pytest.raises(ConfigError, match="snapshot of format 3; this mqmesh reads 2"):
        load_manifest(taken[0])


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "commitlog/../../x",
        "commitlog/00000000000000000000/../x",
        "commitlog/1",
        "config/../topics.json",
        "index/00000000000000000000.sealed/../../x",
        "commitlog/00000000000000000000\n",
    ],
)
@pytest.mark.parametrize("kind", list(FileKind))
def test_a_path_that_is_not_of_a_snapshot_is_refused(taken, path, kind):
    entry = {"path": path, "size": 1, "kind": kind.value, "crc32": 0}
    change(taken[0], lambda document: document["files"].append(entry))
    with pytest.raises(CorruptRecord, match="no file of ours"):
        load_manifest(taken[0])


def test_a_link_in_place_of_a_file_is_not_followed(taken, tmp_path):
    directory, manifest = taken
    path = directory / manifest.files[0].path
    outside = tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(CorruptRecord, match="no plain file"):
        load_manifest(directory)


def test_a_link_in_place_of_a_directory_is_not_followed(taken, tmp_path):
    directory, _ = taken
    (directory / "commitlog").rename(tmp_path / "elsewhere")
    (directory / "commitlog").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptRecord, match="no plain file"):
        load_manifest(directory)


def test_a_pipe_in_place_of_a_file_is_not_opened(taken):
    directory, manifest = taken
    path = directory / manifest.files[0].path
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptRecord, match="no plain file"):
        load_manifest(directory)


def test_a_file_of_another_size_or_a_missing_one_is_told(taken):
    directory, manifest = taken
    path = directory / manifest.files[0].path
    os.truncate(path, 10)
    with pytest.raises(CorruptRecord, match="10 bytes instead of"):
        load_manifest(directory)
    path.unlink()
    with pytest.raises(CorruptRecord, match="is missing"):
        load_manifest(directory)


@pytest.mark.parametrize(
    "field", [{"end_offset": 1}, {"start_offset": 1}, {"end_offset": 2**62}, {"files": []}]
)
def test_a_manifest_that_contradicts_itself_is_refused(taken, field):
    change(taken[0], lambda document: document.update(field))
    with pytest.raises(CorruptRecord):
        load_manifest(taken[0])


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"format": 2}', '{"format": "2"}', "[" * 100_000, "\udc80"]
)
def test_what_is_no_manifest_is_refused(taken, text):
    (taken[0] / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CorruptRecord):
        load_manifest(taken[0])


def test_a_flipped_bit_in_a_manifest_is_seen_wherever_it_is(taken):
    path = taken[0] / MANIFEST
    text = path.read_bytes()
    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises((CorruptRecord, ConfigError)):
            load_manifest(taken[0])
    path.write_bytes(text)
    assert load_manifest(taken[0]) == taken[1]


def test_a_broker_name_that_could_be_a_path_is_refused(taken):
    change(taken[0], lambda document: document.update(broker_name="../x"))
    with pytest.raises(CorruptRecord, match="names no broker"):
        load_manifest(taken[0])


def test_snapshots_are_listed_with_what_is_wrong_with_them(taken, tmp_path):
    directory, manifest = taken
    bad = tmp_path / "snapshots" / "bad"
    bad.mkdir()
    (bad / MANIFEST).write_text("{")
    (tmp_path / "snapshots" / "other").mkdir()
    listed = list_snapshots(tmp_path / "snapshots")
    assert [path for path, _ in listed] == [bad, directory]
    assert isinstance(listed[0][1], CorruptRecord)
    assert listed[1][1] == manifest
    assert isinstance(listed[1][1], Manifest)
    assert list_snapshots(directory) == [(directory, manifest)]
    with pytest.raises(ConfigError):
        list_snapshots(tmp_path / "nowhere")


def test_only_a_snapshot_is_deleted(taken, tmp_path):
    directory, _ = taken
    with pytest.raises(ConfigError, match="not a snapshot"):
        delete_snapshot(tmp_path / "store")
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(ConfigError, match="not a snapshot"):
        delete_snapshot(link)
    delete_snapshot(directory)
    assert list((tmp_path / "snapshots").iterdir()) == []

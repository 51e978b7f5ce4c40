"""Documents are the old or the new one, never empty."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mqmesh.errors import CorruptRecord, DiskFull, StorageError
from mqmesh.storage.files.atomic_file import load_document, save_document, take_room


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "topics"


def test_what_was_saved_is_loaded(path: Path) -> None:
    assert load_document(path) is None
    for document in (b"one", b"", b"three\n" * 1000):
        save_document(path, document)
        assert load_document(path) == document


def test_first_line_can_be_read_by_people(path: Path) -> None:
    save_document(path, b'{"a": 1}')
    assert path.read_bytes() == b'mqmesh-document 1 crc32=fba18e97 size=8\n{"a": 1}'


def test_the_document_before_is_the_backup(path: Path) -> None:
    save_document(path, b"one")
    save_document(path, b"two")
    path.unlink()
    assert load_document(path) == b"one"


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_document_is_kept_aside_and_the_backup_read(
    path: Path, damage: bytes | None
) -> None:
    save_document(path, b"one")
    save_document(path, b"two")
    content = path.read_bytes() if damage is None else damage
    bad = content[:-1] + b"!" if damage is None else damage
    path.write_bytes(bad)
    assert load_document(path) == b"one"
    assert path.with_name("topics.damaged-1").read_bytes() == bad
    save_document(path, b"three")
    assert load_document(path) == b"three"


def test_every_cut_of_a_document_is_noticed(path: Path) -> None:
    save_document(path, b"some text")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptRecord):
            load_document(path)
        for aside in path.parent.glob("*.damaged-*"):
            aside.unlink()


def test_damage_of_both_is_never_taken_for_nothing(path: Path) -> None:
    save_document(path, b"one")
    save_document(path, b"two")
    path.write_bytes(b"")
    path.with_name("topics.bak").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CorruptRecord, match=r"topics\.bak\.damaged-1, topics\.damaged-1"):
            load_document(path)
    for aside in path.parent.glob("*.damaged-*"):
        aside.unlink()
    assert load_document(path) is None


def test_a_kill_at_any_step_leaves_the_old_or_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("write", "fsync", "link", "replace", "unlink")
    real = {name: getattr(os, name) for name in names}
    seen: list[bytes | None] = []

    def watched(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            seen.append(load_document(path))
            return real[name](*arguments, **keywords)

        return call

    save_document(path, b"zero")
    save_document(path, b"one")
    for name in names:
        monkeypatch.setattr(os, name, watched(name))
    save_document(path, b"two")
    assert len(seen) >= 6
    assert set(seen) <= {b"one", b"two"}


def test_what_a_kill_left_behind_is_no_hindrance(path: Path) -> None:
    save_document(path, b"one")
    for name in ("topics.new", "topics.old"):
        path.with_name(name).write_bytes(b"rest of an earlier life")
    save_document(path, b"two")
    assert load_document(path) == b"two"


@pytest.mark.parametrize(
    ("number", "kind"), [(28, DiskFull), (122, DiskFull), (27, DiskFull), (5, StorageError)]
)
def test_trouble_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    save_document(path, b"one")

    def refuse(fd: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="refused") as caught:
        save_document(path, b"two")
    assert type(caught.value) is kind
    monkeypatch.undo()
    assert load_document(path) == b"one"


def test_a_document_that_was_removed_comes_from_its_backup_and_loudly(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_document(path, b"only one")
    path.unlink()
    assert load_document(path) == b"only one"
    assert "its backup was read instead" in caplog.text
    save_document(path, b"second")
    path.unlink()
    assert load_document(path) == b"only one"
    save_document(path, b"third")
    save_document(path, b"fourth")
    path.unlink()
    assert load_document(path) == b"third"


def test_room_for_the_next_document_is_taken_and_changes_nothing(path: Path) -> None:
    new = path.with_name("topics.new")
    assert save_document(path, b"one")
    assert not new.exists()
    for document in (b"a" * 100_000, b"two", b""):
        assert save_document(path, document, room_bytes=65_536)
        assert load_document(path) == document
        assert new.stat().st_blocks * 512 >= 65_536
        assert new.stat().st_mode & 0o777 == 0o600


def test_without_room_for_the_next_document_this_one_is_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, position: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not save_document(path, b"one", room_bytes=65_536)
    assert load_document(path) == b"one"
    assert save_document(path, b"two")


@pytest.mark.parametrize("dies_at", ["replace", "link"])
def test_a_first_save_that_dies_leaves_nothing_to_be_written_over(
    path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    def die(*names: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, dies_at, die)
        save_document(path, b"one", room_bytes=65_536)
    is_saved = dies_at == "link"
    assert take_room(path, 65_536)
    assert load_document(path) == (b"one" if is_saved else None)
    assert save_document(path, b"two", room_bytes=65_536)
    assert load_document(path) == b"two"
    assert take_room(path, 65_536)
    path.unlink()
    assert load_document(path) == (b"one" if is_saved else b"two")

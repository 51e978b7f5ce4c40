"""Offset files of broadcasting consumers."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError
from mqmesh.message import MessageQueue
from mqmesh.sdk.consumer.local_offsets import LocalOffsets

A0, A1 = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-a", 1)


@pytest.fixture
def opened(tmp_path):
    """Opens offsets; all are closed at the end."""
    found = []

    def make(group="g", instance_name="one", folder=tmp_path / "offsets"):
        offsets = LocalOffsets(folder, group, instance_name)
        found.append(offsets)
        offsets.open()
        return offsets

    yield make
    for offsets in found:
        offsets.close()


def fetched(offsets, *queues):
    found = []
    offsets.fetch("broker-a", list(queues), found.append)
    return list(found[0].values())


def test_without_a_file_nothing_is_committed(opened):
    assert fetched(opened(), A0, A1) == [-1, -1]


def test_offsets_are_there_after_a_restart(opened):
    offsets, done = opened(), []
    offsets.commit({A0: 5}, done.append)
    offsets.commit({A1: 7}, done.append)
    offsets.close()
    assert done == [None, None]
    assert fetched(opened(), A0, A1) == [5, 7]


def test_groups_and_instances_have_files_of_their_own(opened):
    offsets = opened()
    offsets.commit({A0: 5}, lambda _: None)
    assert fetched(opened(group="h"), A0) == [-1]
    assert fetched(opened(instance_name="two"), A0) == [-1]


def test_a_file_has_one_user(opened):
    opened()
    with pytest.raises(ConfigError, match="instance_name 'one'"):
        opened()


def test_a_file_that_cannot_be_read_is_never_begun_anew(opened, tmp_path):
    offsets = opened()
    offsets.commit({A0: 5}, lambda _: None)
    offsets.close()
    (path,) = (tmp_path / "offsets").glob("*.json")
    good = path.read_bytes()
    for bad in (b"", good[:-3], good.replace(b'"version":2', b'"version":9'), b"\xff\xfe"):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="cannot be read"):
            opened()
        assert path.read_bytes() == bad
    path.write_bytes(good)
    assert fetched(opened(), A0) == [5]


def test_a_folder_that_cannot_be_used_is_told(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="offsets_dir"):
        opened(folder=tmp_path / "file")


def test_a_save_that_fails_is_told_and_made_up_for(opened, tmp_path):
    offsets, done = opened(), []
    (blocker,) = (path.with_suffix(".new") for path in (tmp_path / "offsets").glob("*.lock"))
    blocker.mkdir()
    offsets.commit({A0: 5}, done.append)
    assert isinstance(done[0], ConfigError)
    blocker.rmdir()
    offsets.commit({A0: 5}, done.append)
    assert done[1] is None
    offsets.close()
    assert fetched(opened(), A0) == [5]


class Killed(BaseException):
    """The process ended here."""


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ("mqmesh.sdk.consumer.local_offsets.open_private", 5),
        ("msgspec.json.encode", 5),
        ("os.fdatasync", 5),
        ("pathlib.Path.replace", 5),
        ("os.fsync", 9),
    ],
)
def test_a_kill_in_any_step_of_saving_leaves_the_old_or_the_new_offsets(
    opened, monkeypatch, step, after
):
    offsets = opened()
    offsets.commit({A0: 5, A1: 1}, lambda _: None)

    def die(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(step, die)
        with pytest.raises(Killed):
            offsets.commit({A0: 9}, lambda _: None)
    offsets.close()
    again = opened()
    assert fetched(again, A0, A1) == [after, 1]
    again.commit({A0: 11}, lambda _: None)  # what was left behind is not in the way
    again.close()
    assert fetched(opened(), A0, A1) == [11, 1]


def test_what_cannot_be_saved_is_told_and_tried_again(opened, monkeypatch):
    offsets, done = opened(), []
    offsets.commit({A0: 5}, done.append)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fdatasync", full)
        offsets.commit({A0: 9}, done.append)
    assert isinstance(done[1], ConfigError)
    assert fetched(offsets, A0) == [5]
    offsets.commit({A0: 9}, done.append)
    offsets.close()
    assert done[2] is None
    assert fetched(opened(), A0) == [9]


def test_the_epoch_in_which_an_offset_is_right_is_kept_beside_it(opened):
    offsets = opened()
    offsets.epochs[A0] = 7
    offsets.commit({A0: 5}, lambda _: None)
    offsets.close()
    again = opened()
    assert fetched(again, A0) == [5]
    assert again.epochs == {A0: 7}

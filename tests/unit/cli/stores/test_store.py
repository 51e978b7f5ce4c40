"""`mqmesh store`, on stores that nobody has open."""

from __future__ import annotations

import errno
import json

import pytest

from mqmesh.cli import main
from mqmesh.storage.backends import open_store
from mqmesh.storage.interface import StoreConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.read_only import refuse_writing
from mqmesh.testing.store_contract import NOW, make_batch
from mqmesh.units import KIB

CONFIG = StoreConfig(mapped_file_size_commit_log=64 * KIB, disk_reserve_bytes=0)


def open_backend(backend, directory):
    return open_store(
        backend,
        directory,
        CONFIG,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
    )


@pytest.fixture(params=["commitlog", "lmdb"])
def directory(request, tmp_path):
    """A stopped store: two topics, 6 messages each in 2 queues."""
    store = open_backend(request.param, tmp_path / "store")
    for topic in ("orders", "other"):
        for number in range(3):
            batch = make_batch(
                [f"{topic}-{number}-a", f"{topic}-{number}-b"],
                topic=topic,
                queue_id=number % 2,
                first_sequence=2 * number,
                tags=["new", "old"],
            )
            store.put([batch], NOW)
    store.close()
    return tmp_path / "store"


def run(capsys, *arguments):
    code = main.main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def bodies(capsys, *arguments):
    code, out, _ = run(capsys, "store", "dump", *arguments, "--json")
    assert code == 0
    return [json.loads(line)["body"] for line in out.splitlines()]


def test_verify_says_that_a_store_is_sound(capsys, directory):
    code, out, err = run(capsys, "store", "verify", directory)
    assert (code, err) == (0, "")
    assert "6 batches, 12 messages, 4 queues" in out
    assert out.endswith("sound\n")
    code, out, err = run(capsys, "store", "verify", directory, "--json")
    assert json.loads(out)["sound"] is True


def test_verify_ends_with_1_and_the_ranges_if_something_is_damaged(capsys, tmp_path):
    store = open_backend("commitlog", tmp_path)
    first, second = store.put([make_batch(["a"]), make_batch(["b"], first_sequence=1)], NOW)
    store.close()
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(first.end_offset - 1)
        file.write(b"\xff")
    code, out, _ = run(capsys, "store", "verify", tmp_path)
    assert code == 1
    assert f"damaged: log {first.commitlog_offset} to {first.end_offset}: " in out
    assert "damaged: queue 0 of topic, offsets 0 to 0: " in out
    assert "sound" not in out
    code, out, _ = run(capsys, "--json", "store", "verify", tmp_path)
    report = json.loads(out)
    assert (code, report["sound"]) == (1, False)
    assert report["log_damage"][0]["end_offset"] == second.commitlog_offset
    code, out, err = run(capsys, "store", "dump", tmp_path, "--json")
    assert code == 1
    assert json.loads(out)["body"] == "b"
    assert json.loads(err)["note"].startswith("damaged: log 0 to ")


def test_dump_prints_messages_and_filters_them(capsys, directory):
    assert len(bodies(capsys, directory)) == 12
    assert bodies(capsys, directory, "-t", "other", "-q", 1) == ["other-1-a", "other-1-b"]
    wanted = ["orders-0-b", "orders-2-a", "orders-2-b"]
    assert bodies(capsys, directory, "--topic", "orders", "--queue", 0, "--offset", 1) == wanted
    assert bodies(capsys, directory, "-t", "orders", "-q", 0, "-o", 1, "-n", 2) == wanted[:2]
    code, out, _ = run(capsys, "store", "dump", directory, "--limit", 1)
    assert code == 0
    assert out.rstrip().endswith("new  orders-0-a")
    assert "orders/0@0" in out


def test_dump_prints_batches(capsys, directory):
    code, out, _ = run(capsys, "store", "dump", directory, "--batches", "--json", "-t", "other")
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [(one["queue_id"], one["queue_offset"], one["messages"]) for one in found] == [
        (0, 0, 2),
        (1, 0, 2),
        (0, 2, 2),
    ]
    code, out, _ = run(capsys, "store", "dump", directory, "--batches", "--limit", 2)
    assert len(out.splitlines()) == 2
    assert "topic=orders" in out


def test_rebuild_index(capsys, directory):
    code, out, err = run(capsys, "store", "rebuild-index", directory)
    if (directory / "lmdb").exists():
        assert code == 2
        assert err == "error: stores of the backend 'lmdb' have no index\n"
    else:
        assert code == 0
        assert out.startswith("the index covers ")
        assert list((directory / "index").glob("*.live"))


@pytest.mark.parametrize("command", ["verify", "dump", "rebuild-index"])
def test_what_cannot_be_opened_is_one_line_and_2(capsys, tmp_path, command):
    for directory in (tmp_path / "nowhere", tmp_path):
        code, out, err = run(capsys, "store", command, directory)
        assert (code, out, err.count("\n")) == (2, "", 1)
    store = open_backend("commitlog", tmp_path / "running")
    code, out, err = run(capsys, "store", command, tmp_path / "running")
    store.close()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "stop the broker first" in err


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_read_only_media_are_read_and_what_cannot_be_read_is_not_called_damaged(
    capsys, directory, monkeypatch, command
):
    refuse_writing(monkeypatch)
    code, _, err = run(capsys, "store", command, directory)
    assert (code, err) == (0, "")
    monkeypatch.undo()
    for unreadable in (directory / "lock", directory / "checkpoint"):
        if not unreadable.exists():
            continue  # the other backend's
        refuse_writing(monkeypatch, errno.EACCES, unreadable=[unreadable])
        code, out, err = run(capsys, "store", command, directory)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{unreadable} cannot be opened: Permission denied" in err
        monkeypatch.undo()

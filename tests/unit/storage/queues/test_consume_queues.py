"""All queues: found, written a few at a time, dropped."""

from pathlib import Path

import pytest

from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.queues import consume_queues
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, VOID_OFFSET
from mqmesh.storage.queues.consume_queues import LARGE_TAIL_ENTRIES, ConsumeQueues
from mqmesh.storage.queues.queue_tail import ROW_BYTES
from mqmesh.testing.clock import ManualClock


@pytest.fixture
def queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConsumeQueues:
    # How much is written at once must not hang on how fast the disk is just now.
    monkeypatch.setattr(consume_queues, "MOST_WRITING_NS", 60_000_000_000)
    root = tmp_path / "consumequeue"
    root.mkdir()
    return ConsumeQueues(
        root, OpenFiles(8), file_entries=1000, most_unwritten_bytes=100_000, clock=ManualClock()
    )


def test_queues_are_found_by_topic_and_id(queues: ConsumeQueues) -> None:
    queue = queues.add("topic", 7, first=3, end=9)
    assert queues.find("topic", 7) is queue
    assert queues.find("topic", 8) is None
    assert queues.find("other", 7) is None
    assert list(queues) == [queue]
    assert len(queues) == 1


def test_queues_are_counted_without_a_look_at_them(queues: ConsumeQueues) -> None:
    for topic in ("one", "other"):
        for number in range(3):
            queues.find_or_add(topic, number)
    assert len(queues) == len(list(queues)) == 6
    assert len({queue.directory for queue in queues}) == 2
    queues.drop_topic("one", 0)
    queues.drop_topic("one", 1)
    assert len(queues) == len(list(queues)) == 3
    queues.clear()
    assert len(queues) == len(list(queues)) == 0


def test_oldest_tails_are_written_first(queues: ConsumeQueues) -> None:
    some = [queues.add("topic", number) for number in range(5)]
    for queue in some:
        queues.append(queue, 0, 1, 10, b"")
    queues.append(some[0], 0, 1, 1, b"")
    assert queues.unwritten_bytes == 6 * ROW_BYTES
    assert queues.write_oldest(2)
    assert [queue.written for queue in some] == [11, 10, 0, 0, 0]
    assert queues.unwritten_bytes == 3 * ROW_BYTES
    assert queues.dirty_count == 3


def test_large_tails_are_written_without_being_asked_twice(queues: ConsumeQueues) -> None:
    queue, small = queues.add("topic", 0), queues.add("topic", 1)
    queues.append(small, 0, 1, 1, b"")
    for _ in range(LARGE_TAIL_ENTRIES // 1000 + 1):
        queues.append(queue, 0, 1, 1000, b"")
    assert queues.write_large()
    assert queue.written == queue.end
    assert small.written == 0


def test_memory_of_tails_is_bounded(queues: ConsumeQueues) -> None:
    queue = queues.add("topic", 0)
    while not queues.crowded:
        queues.append(queue, 0, 1, 2, bytes(16))
    assert 50_000 <= queues.unwritten_bytes < 50_100
    assert not queues.full
    while not queues.full:
        queues.append(queue, 0, 1, 2, bytes(16))
    assert queues.write_oldest(1)
    assert queues.unwritten_bytes == 0


def test_names_of_topics_never_become_paths(queues: ConsumeQueues, tmp_path: Path) -> None:
    for topic in ("../../etc", "%RETRY%group", "a" * 255):
        queue = queues.add(topic, 0)
        parts = Path(queue.directory).relative_to(tmp_path / "consumequeue").parts
        assert [len(part) for part in parts] == [32]
        assert int(parts[0], 16)


def test_a_dropped_topic_leaves_a_directory_to_remove(queues: ConsumeQueues) -> None:
    queue = queues.add("topic", 0)
    queues.append(queue, 0, 1, 10, b"")
    queues.write(queue)
    queues.append(queue, 0, 1, 10, b"")
    aside = queues.drop_topic("topic", 100)
    assert aside is not None
    assert Path(aside).is_dir()
    assert not Path(queue.directory).exists()
    assert (queues.unwritten_bytes, queues.dirty_count, len(queues)) == (0, 0, 0)
    again = queues.add("topic", 0)
    queues.append(again, 0, 1, 1, b"")
    queues.write(again)
    second = queues.drop_topic("topic", 200)
    assert second not in (None, aside)
    assert queues.drop_topic("never there", 300) is None


def test_deletions_are_known_as_long_as_the_log_may_have_what_was_deleted(
    queues: ConsumeQueues,
) -> None:
    queues.drop_topic("a", 100)
    queues.drop_topic("b", 200)
    queues.clear()
    assert [queues.is_deleted("a", at) for at in (0, 99, 100)] == [True, True, False]
    assert not queues.is_deleted("c", 0)
    assert queues.live_deletions(99) == [("a", 100), ("b", 200)]
    assert queues.live_deletions(100) == [("b", 200)]
    assert queues.deletions == {"b": 200}


def test_lost_messages_get_void_entries(queues: ConsumeQueues) -> None:
    queue = queues.add("topic", 0)
    queues.skip_to(queue, 5)
    assert queue.end == 5
    assert queue.tail.row(0)[0] == VOID_OFFSET


def test_lost_entries_are_noticed(queues: ConsumeQueues) -> None:
    queue = queues.add("topic", 0)
    queues.append(queue, 0, 1, 2500, b"")
    queues.write(queue)
    assert queues.lost() is None
    path = Path(queue.file_path(2))
    path.write_bytes(path.read_bytes()[:-1])
    assert queues.lost() is queue
    path.unlink()
    assert queues.lost() is queue


def test_trimming_keeps_what_is_known(queues: ConsumeQueues) -> None:
    queue = queues.add("topic", 0)
    queues.append(queue, 0, 1, 2500, b"")
    queues.write(queue)
    queue.end = queue.written = 1500
    assert queues.trim() == 1000 * ENTRY_SIZE
    assert Path(queue.file_path(1)).stat().st_size == 500 * ENTRY_SIZE
    assert not Path(queue.file_path(2)).exists()
    assert queues.trim() == 0


def test_trimming_leaves_what_is_none_of_ours_alone(queues: ConsumeQueues) -> None:
    queue = queues.add("topic", 0)
    queues.append(queue, 0, 1, 10, b"")
    queues.write(queue)
    directory = Path(queue.directory)
    strangers = [directory / "notes", directory / "0-x", directory.parent / "notes"]
    for path in strangers:
        path.write_text("of the operator")
    (directory.parent / "lost+found").mkdir()
    (directory.parent / f"{'0' * 32}.deleted-1").mkdir()
    assert queues.trim() == 0
    assert all(path.exists() for path in strangers)
    assert sorted(path.name for path in directory.parent.iterdir()) == sorted(
        [directory.name, "lost+found", "notes"]
    )

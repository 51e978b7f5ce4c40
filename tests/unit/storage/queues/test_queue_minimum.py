"""Queues begin where the log does, whatever bit flips in their files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.errors import CorruptRecord
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, VOID_ENTRY, VOID_OFFSET, ConsumeQueue
from mqmesh.storage.queues.queue_minimum import MOST_DAMAGED, advance


@pytest.fixture
def files() -> Iterator[OpenFiles]:
    files = OpenFiles(4)
    yield files
    files.close()


def queue_of(directory: Path, files: OpenFiles, lengths: list[int]) -> tuple[ConsumeQueue, list]:
    """A queue in one file, a batch for each length; and where batches begin, queue and log."""
    queue = ConsumeQueue("topic", 0, str(directory / "q"), first=0, end=0, file_entries=1 << 20)
    starts = []
    place = 1 << 20
    for number, length in enumerate(lengths):
        starts.append((queue.end, place))
        hashes = number.to_bytes(8, "little") * (length if number % 2 else 1)
        queue.tail.append(place, 100 * length, length, hashes)
        queue.end += length
        place += 100 * length
    queue.write_tail(files, set())
    queue.visible = queue.end
    return queue, starts


@pytest.mark.parametrize("lengths", [[1] * 200, [7] * 40, [1, 300, 2, 2, 200, 1, 1, 90, 500]])
def test_a_queue_begins_at_its_first_batch_in_the_log(tmp_path, files, lengths):
    queue, starts = queue_of(tmp_path, files, lengths)
    for queue_offset, place in starts:
        assert advance(queue, files, place) is (queue_offset > 0)
        assert queue.first == queue_offset
    assert advance(queue, files, starts[-1][1] + 1 << 20)
    assert queue.first == queue.end


@pytest.mark.parametrize("lengths", [[1] * 200, [7] * 40, [1, 300, 2, 2, 200, 1, 1, 90, 500]])
def test_a_flipped_bit_sends_it_no_further(tmp_path, files, lengths):
    queue, starts = queue_of(tmp_path, files, lengths)
    chance = random.Random(7)
    fd = os.open(queue.file_path(0), os.O_RDWR)
    for _ in range(1_000):
        wanted = chance.randrange(1, len(starts))
        place = chance.randrange(queue.end)
        position = place * ENTRY_SIZE + chance.randrange(12)
        good = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([good[0] ^ 1 << chance.randrange(8)]), position)
        queue.first = 0
        advance(queue, files, starts[wanted][1])
        os.pwrite(fd, good, position)
        # Where the last batch that is gone is damaged, nobody knows that it is.
        before = starts[wanted - 1][0]
        assert queue.first == starts[wanted][0] or before == queue.first <= place
    os.close(fd)


@pytest.mark.parametrize("lengths", [[1] * 2_000, [7] * 300, [1_000, 3, 700, 300]])
@pytest.mark.parametrize("content", ["zeros", "noise"])
def test_a_block_that_the_disk_lost_sends_it_no_further(tmp_path, files, lengths, content):
    queue, starts = queue_of(tmp_path, files, lengths)
    chance = random.Random(3)
    path = Path(queue.file_path(0))
    good = path.read_bytes()
    for _ in range(200):
        wanted = chance.randrange(1, len(starts))
        position = 4096 * chance.randrange(len(good) // 4096)
        block = bytes(4096) if content == "zeros" else chance.randbytes(4096)
        path.write_bytes(good[:position] + block + good[position + 4096 :])
        queue.first = 0
        advance(queue, files, starts[wanted][1])
        assert queue.first <= starts[wanted][0]
        # Exactly there, unless the last batch that is gone is damaged; noise may look sound.
        last_gone = range(starts[wanted - 1][0], starts[wanted][0])
        first, last = position // ENTRY_SIZE, (position + 4095) // ENTRY_SIZE
        if content == "zeros" and (last < last_gone.start or first >= last_gone.stop):
            assert queue.first == last_gone.stop


def test_where_very_much_is_damaged_nothing_is_moved(tmp_path, files):
    queue, starts = queue_of(tmp_path, files, [1] * (6 * MOST_DAMAGED))
    path = Path(queue.file_path(0))
    good = path.read_bytes()
    noise = random.Random(5).randbytes(3 * MOST_DAMAGED * ENTRY_SIZE)
    path.write_bytes(good[: 300 * ENTRY_SIZE] + noise + good[300 * ENTRY_SIZE + len(noise) :])
    with pytest.raises(CorruptRecord):
        advance(queue, files, starts[350][1])
    assert queue.first == 0


def test_lost_messages_in_front_keep_no_queue_back(tmp_path, files):
    queue, starts = queue_of(tmp_path, files, [5] * 10)
    queue.write_at(files, 0, VOID_ENTRY * 5, set())
    assert not advance(queue, files, starts[1][1])
    assert queue.first == 0
    assert advance(queue, files, starts[2][1])
    assert queue.first == 10


def test_a_queue_of_lost_messages_stays(tmp_path, files):
    queue = ConsumeQueue("topic", 0, str(tmp_path / "q"), first=0, end=0, file_entries=100)
    queue.tail.append(VOID_OFFSET, 0, 30, b"")
    queue.end += 30
    queue.write_tail(files, set())
    assert not advance(queue, files, 1 << 30)
    assert queue.first == 0

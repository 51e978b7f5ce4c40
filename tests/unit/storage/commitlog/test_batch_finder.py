"""Runs of entries become batches, whatever their lengths."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.storage.commitlog import batch_finder
from mqmesh.storage.commitlog.batch_finder import (
    MOST_BATCHES,
    MOST_TAIL_ROWS,
    BatchPlace,
    find_batches,
)
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.queues.consume_queue import VOID_OFFSET, ConsumeQueue


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def files() -> Iterator[OpenFiles]:
    files = OpenFiles(4)
    yield files
    files.close()


def queue_of(
    directory: Path,
    lengths: list[int],
    *,
    void: frozenset[int] = frozenset(),
    written: int = 0,
) -> ConsumeQueue:
    """A queue with a batch of 10 bytes a message for each length; some void, some in files."""
    queue = ConsumeQueue("topic", 0, str(directory / "q"), first=0, end=0, file_entries=100)
    files = OpenFiles(4)
    offset = 0
    for number, length in enumerate(lengths):
        if number == written:
            queue.write_tail(files, set())
        place = (VOID_OFFSET, 0) if number in void else (offset, 10 * length)
        hashes = number.to_bytes(8, "little") * (length if number % 2 else 1)
        queue.tail.append(*place, length, hashes)
        queue.end += length
        offset += 10 * length
    if written >= len(lengths):
        queue.write_tail(files, set())
    files.close()
    queue.visible = queue.end
    return queue


def model(
    lengths: list[int],
    start: int,
    max_bytes: int,
    void: frozenset[int],
    tags: frozenset[int] | None,
    written: int,
) -> tuple[list[BatchPlace], int]:
    runs: list[BatchPlace] = []
    queue_offset = 0
    for number, length in enumerate(lengths):
        stop = queue_offset + length
        wanted = number not in void and (tags is None or number in tags)
        doubtful = False
        if number not in void and number < written and queue_offset < start < stop:
            doubtful, wanted = not wanted, True  # files do not tell of the rest of a batch
        if stop > start and wanted:
            if runs and sum(run.size for run in runs) + 10 * length > max_bytes:
                return runs, queue_offset
            run = BatchPlace(
                10 * queue_offset, 10 * length, max(start, queue_offset), stop, doubtful
            )
            runs.append(run)
        queue_offset = stop
    return runs, queue_offset


@given(st.data())
def test_batches_are_those_of_the_model(directory: Path, data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=40)
    )
    void = data.draw(st.frozensets(st.integers(0, 40), max_size=4))
    tags = data.draw(st.none() | st.frozensets(st.integers(0, 40), max_size=9))
    start = data.draw(st.integers(0, sum(lengths)))
    max_bytes = data.draw(st.integers(1, 10 * sum(lengths)))
    written = data.draw(st.integers(0, len(lengths)))
    queue = queue_of(directory, lengths, void=void, written=written)
    files = OpenFiles(4)
    chunk = batch_finder.CHUNK_ENTRIES
    batch_finder.CHUNK_ENTRIES = data.draw(st.sampled_from([1, 2, 7, 64, 2048]))
    try:
        found = find_batches(queue, files, start, queue.end, max_bytes=max_bytes, tag_hashes=tags)
    finally:
        batch_finder.CHUNK_ENTRIES = chunk
        files.close()
    runs, following = model(lengths, start, max_bytes, void, tags, written)
    assert found[0] == runs
    # A void stretch before a batch that is too much is passed or not.
    passed = model(lengths, found[1], 1 << 60, void, tags, written)[0]
    assert passed == model(lengths, following, 1 << 60, void, tags, written)[0]


@pytest.mark.parametrize("written", [0, 3])
def test_a_batch_larger_than_a_chunk_is_one(
    directory: Path, files: OpenFiles, written: int
) -> None:
    queue = queue_of(directory, [1, 65_536, 3], written=written)
    runs, following = find_batches(queue, files, 0, queue.end, max_bytes=1 << 60, tag_hashes=None)
    assert [run.stop - run.start for run in runs] == [1, 65_536, 3]
    assert following == 65_540


@pytest.mark.parametrize(("written", "passed"), [(0, MOST_TAIL_ROWS), (40_000, 32_768)])
def test_work_of_one_read_is_bounded(
    directory: Path, files: OpenFiles, written: int, passed: int
) -> None:
    queue = queue_of(directory, [1] * 40_000, written=written)
    runs, following = find_batches(queue, files, 0, queue.end, max_bytes=1 << 60, tag_hashes=None)
    assert len(runs) == following == MOST_BATCHES
    wanted = frozenset([1 << 60])
    runs, following = find_batches(queue, files, 0, queue.end, max_bytes=1 << 60, tag_hashes=wanted)
    assert runs == []
    assert following == passed


def test_messages_between_two_lost_stretches_are_found(directory, files):
    lengths = [1] * 300
    good = {0, 40, 41, 42, 100, 299}
    queue = queue_of(directory, lengths, void=frozenset(range(300)) - good, written=300)
    for start in range(300):
        runs, following = find_batches(queue, files, start, 300, max_bytes=1 << 20, tag_hashes=None)
        assert [run.start for run in runs] == [place for place in sorted(good) if place >= start]
        assert following == 300


def test_lost_messages_of_many_chunks_are_passed(directory, files):
    queue = queue_of(directory, [100_000, 1], void=frozenset({0}), written=2)
    for start in (0, 1, 2_047, 2_048, 99_999, 100_000):
        found = find_batches(queue, files, start, 100_001, max_bytes=1, tag_hashes=None)
        assert found == ([BatchPlace(1_000_000, 10, 100_000, 100_001)], 100_001)

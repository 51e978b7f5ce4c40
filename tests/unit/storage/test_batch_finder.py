"""Runs of entries become batches, whatever their lengths."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mqmesh.storage import batch_finder
from mqmesh.storage.batch_finder import MOST_BATCHES, Run, find_batches
from mqmesh.storage.consume_queue import VOID_OFFSET, ConsumeQueue, entries_of
from mqmesh.storage.open_files import OpenFiles

FILES = OpenFiles(4)


def queue_of(lengths: list[int], *, void: frozenset[int] = frozenset()) -> ConsumeQueue:
    """A queue with a batch of 10 bytes a message for each length; some are void."""
    queue = ConsumeQueue("topic", 0, "", first=0, end=0, file_entries=100)
    offset = 0
    for number, length in enumerate(lengths):
        place = (VOID_OFFSET, 0) if number in void else (offset, 10 * length)
        queue.tail += entries_of(*place, length, number.to_bytes(8, "little"))
        queue.end += length
        offset += 10 * length
    queue.visible = queue.end
    return queue


def model(
    lengths: list[int],
    start: int,
    max_bytes: int,
    void: frozenset[int],
    tags: frozenset[int] | None,
) -> tuple[list[Run], int]:
    runs: list[Run] = []
    queue_offset = 0
    for number, length in enumerate(lengths):
        stop = queue_offset + length
        wanted = number not in void and (tags is None or number in tags)
        if stop > start and wanted:
            if runs and sum(run.size for run in runs) + 10 * length > max_bytes:
                return runs, queue_offset
            runs.append(Run(10 * queue_offset, 10 * length, max(start, queue_offset), stop))
        queue_offset = stop
    return runs, queue_offset


@given(st.data())
def test_batches_are_those_of_the_model(data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.one_of(st.just(1), st.integers(1, 70)), min_size=1, max_size=40)
    )
    void = data.draw(st.frozensets(st.integers(0, 40), max_size=4))
    tags = data.draw(st.none() | st.frozensets(st.integers(0, 40), max_size=9))
    start = data.draw(st.integers(0, sum(lengths)))
    max_bytes = data.draw(st.integers(1, 10 * sum(lengths)))
    # Neighbouring void batches look like one; they are passed together.
    queue = queue_of(lengths, void=void)
    chunk = batch_finder.CHUNK_ENTRIES
    batch_finder.CHUNK_ENTRIES = data.draw(st.sampled_from([1, 2, 7, 64, 2048]))
    try:
        found = find_batches(queue, FILES, start, queue.end, max_bytes=max_bytes, tag_hashes=tags)
    finally:
        batch_finder.CHUNK_ENTRIES = chunk
    runs, following = model(lengths, start, max_bytes, void, tags)
    assert found[0] == runs
    # A void stretch before a batch that is too much is passed or not.
    passed = model(lengths, found[1], 1 << 60, void, tags)[0]
    assert passed == model(lengths, following, 1 << 60, void, tags)[0]


def test_a_batch_larger_than_a_chunk_is_one(tmp_path: Path) -> None:
    queue = queue_of([1, 65_536, 3])
    runs, following = find_batches(queue, FILES, 0, queue.end, max_bytes=1 << 60, tag_hashes=None)
    assert [run.stop - run.start for run in runs] == [1, 65_536, 3]
    assert following == 65_540


def test_work_of_one_read_is_bounded() -> None:
    queue = queue_of([1] * 40_000)
    runs, following = find_batches(queue, FILES, 0, queue.end, max_bytes=1 << 60, tag_hashes=None)
    assert len(runs) == following == MOST_BATCHES
    runs, following = find_batches(
        queue, FILES, 0, queue.end, max_bytes=1 << 60, tag_hashes=frozenset([1 << 60])
    )
    assert runs == []
    assert following == batch_finder.MOST_FILTERED_ENTRIES

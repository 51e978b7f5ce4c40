"""Batches one behind the other, as stores read them and brokers return them."""

from collections.abc import Callable, Iterator

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import BatchHeader, read_header


def iter_batches(
    data: Buffer, read: Callable[[Buffer, int], BatchHeader] = read_header
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Batches one behind the other, as stores and brokers return them.

    Args:
        data: Whole batches, and nothing else.
        read: Reads a header where a batch begins: ``read_header``, or a function that checks
            checksums, ``check_stored`` or ``check_batch``.

    Yields:
        Header and bytes of each batch: a view, nothing is copied.

    Raises:
        CorruptBatch: ``read`` found damage; the batches before were yielded.
    """
    view = memoryview(data)
    position = 0
    while position < len(view):
        header = read(view, position)
        end = position + header.total_size
        yield header, view[position:end]
        position = end

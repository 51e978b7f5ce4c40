"""Merges runs of a part, in many short steps: the fewer runs, the quicker a search.

When there is no other work, about sixteen runs of one size become one, and the results are merged
in the same way: each entry is moved once each time that runs get sixteen times as large.
Readers see the old runs until the new one is complete. A crash in between leaves blocks that
belong to no run; they are never read, and sealing leaves them behind.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Final

from mqmesh.errors import CorruptRecord, DiskFull
from mqmesh.storage.index.blocks import BEYOND, BLOCK_ENTRIES, LOWEST, RunReader, encode_run
from mqmesh.storage.index.part import IndexPart, SortedRun

MERGED_AT_ONCE: Final = 16
"""Runs of one tier that are merged into one, of a higher tier."""
TIER_BITS: Final = 4
"""A tier has runs of up to two to the power of this times as many entries as the one before."""
STEP_ENTRIES: Final = 65_536
"""Approximate number of entries merged in one step."""

Stretch = tuple[bytes, bytes, list[bytes]]
"""Start and end of a stretch, and its entries, sorted."""


def runs_to_merge(runs: Sequence[SortedRun]) -> list[SortedRun]:
    """Runs that should be merged into one; none if no tier has enough of them."""
    for _, group in groupby(sorted(runs, key=_tier), key=_tier):
        alike = sorted(group, key=_start)
        if len(alike) >= MERGED_AT_ONCE:
            return alike[:MERGED_AT_ONCE]
    return []


def merge_runs(part: IndexPart, runs: Sequence[SortedRun]) -> Iterator[None]:
    """Merges some runs into one, a step each time it is resumed.

    Args:
        part: Part of the runs; other work may add to it meanwhile, but not merge these runs.
        runs: Runs from ``runs_to_merge``.

    Raises:
        DiskFull: No room; nothing has changed.
        CorruptRecord: The part is damaged.
        StorageError: The part cannot be read or written.
    """
    number = part.reserve_run()
    count = 0
    try:
        for low, high, entries in stretches(part.reader, [run.number for run in runs]):
            part.env.write(encode_run(number, entries, low=low, high=high))
            count += len(entries)
            yield
    except DiskFull:
        part.env.write([], part.reader.keys(number))  # makes room for others
        raise
    if count != sum(run.count for run in runs):
        raise CorruptRecord(f"{count} entries were found in runs of the index that had others")
    kinds = 0
    for run in runs:
        kinds |= run.kinds
    start, stop = min(run.start for run in runs), max(run.stop for run in runs)
    part.replace_runs(runs, SortedRun(number, count, start, stop, kinds))


def stretches(reader: RunReader, numbers: Sequence[int]) -> Iterator[Stretch]:
    """Yield the entries of some runs together, in stretches that follow each other without gaps.

    Args:
        reader: Reader of their environment.
        numbers: Numbers of the runs.

    Raises:
        CorruptRecord: A run is damaged.
        StorageError: A run cannot be read.
    """
    bounds = sorted(reader.lows(numbers))[:: STEP_ENTRIES // BLOCK_ENTRIES]
    bounds = [LOWEST, *(bound for bound in bounds if bound != LOWEST), BEYOND]
    for low, high in pairwise(bounds) if numbers else ():
        if low != high:
            entries = [one for number in numbers for one in reader.entries(number, low, high)]
            entries.sort()
            yield low, high, entries


def _tier(run: SortedRun) -> int:
    return (run.count.bit_length() - 1) // TIER_BITS


def _start(run: SortedRun) -> int:
    return run.start

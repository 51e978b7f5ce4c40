"""Identity of a log and its stretch: two replicas compare these first."""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.units import MAX_OFFSET

MAX_EPOCH: Final = 2**31 - 1
EPOCHS_APART: Final = 10_000
"""A log that goes on beside its original skips so many epochs: as often the original may be started
before both have given one number twice."""


def first_number(epoch: int) -> int:
    """Return the number below all generations and lock tokens of an epoch, above earlier ones."""
    return epoch << 32


class EpochStart(msgspec.Struct, array_like=True, frozen=True):
    """Start of an epoch. Array positions are on disk and never change.

    Attributes:
        epoch: From 1; records before its start are of lower ones.
        start_offset: Commit-log offset of its first record.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    start_offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class LogIdentity(msgspec.Struct, array_like=True, frozen=True):
    """Identity of a log, and the stretch of it that is there. Array positions are on the wire.

    Attributes:
        store_id: Identity of the store.
        key_proof: The same for stores with the same key.
        log_start: Commit-log offset of the oldest record.
        log_end: Of the one that comes next.
        epochs: Of the log, ascending.
    """

    store_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    key_proof: Annotated[bytes, msgspec.Meta(max_length=64)]
    log_start: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
    log_end: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
    epochs: Annotated[list[EpochStart], msgspec.Meta(max_length=10_000)]


class CommonEnd(msgspec.Struct, frozen=True):
    """End of the part that two logs have in common.

    Attributes:
        epoch: The newest one that both have.
        end_offset: Commit-log offset; before it they have the same records.
    """

    epoch: int
    end_offset: int


def common_end(
    ours: Sequence[EpochStart],
    our_end: int,
    theirs: Sequence[EpochStart],
    their_end: int,
    *,
    below: int = MAX_EPOCH + 1,
) -> CommonEnd | None:
    """Find where the histories of two logs part.

    Of an epoch only one leader wrote records, so both logs have the same ones of it, the one
    perhaps fewer than the other. So they are the same up to the shorter end of the newest epoch
    that began at the same place in both.

    Args:
        ours: Epochs of one log, ascending.
        our_end: Commit-log offset where it ends.
        theirs: Of the other log.
        their_end: Where that ends.
        below: Look among epochs before this one: the records before the end of a later one
            were found to differ after all.

    Returns:
        None if they have nothing in common.
    """
    their_ends = dict(zip(theirs, _ends(theirs, their_end), strict=True))
    for start, end in reversed(list(zip(ours, _ends(ours, our_end), strict=True))):
        if start.epoch < below and start in their_ends:
            return CommonEnd(start.epoch, min(end, their_ends[start]))
    return None


def _ends(starts: Sequence[EpochStart], log_end: int) -> list[int]:
    return [start.start_offset for start in starts[1:]] + [log_end] * bool(starts)

"""Whose log somebody has, and which part of it: what two replicas compare first."""

from typing import Annotated, Final

import msgspec

from mqmesh.units import MAX_OFFSET

MAX_EPOCH: Final = 2**31 - 1
EPOCHS_APART: Final = 10_000
"""A log that goes on beside its original skips so many epochs: as often the original may be started
before both have given one number twice."""


def first_number(epoch: int) -> int:
    """Below all generations and lock tokens of an epoch, and above those of earlier ones."""
    return epoch << 32


class EpochStart(msgspec.Struct, array_like=True, frozen=True):
    """Where an epoch begins. Array positions are on disk and never change.

    Attributes:
        epoch: From 1; records before its start are of lower ones.
        start_offset: Commit-log offset of its first record.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    start_offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class LogIdentity(msgspec.Struct, array_like=True, frozen=True):
    """Whose log somebody has, and which part of it. Array positions are on the wire.

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

"""Checkpoint of half messages, written from time to time, so that a start reads little.

The truth is in the half topic and the op topic. The checkpoint says up to where both were read, and
what waited then; a start reads only what came later. With too much to note it says from where
to read again instead. A checkpoint that is lost, or covers what the log has lost since (after a
power cut, or where another replica led, whose records stand there now), means that both topics are
read from their beginnings.
"""

from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptRecord
from mqmesh.roles.broker.features.transactions.half_batches import PARKED, HalfBatch
from mqmesh.roles.broker.features.transactions.transaction_table import Transactions

DOCUMENT_VERSION: Final = 2
MAX_NOTED: Final = 5_000
"""Half batches that are noted one by one."""

_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class NotedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A half batch of which something waits.

    Attributes:
        base: Its queue offset.
        checks: How often its messages were asked about.
        states: A hex digit a message: 0 waits, 1 committed, 2 rolled back, 3 parked. Empty
            when all wait.
    """

    base: _Offset
    checks: int = 0
    states: str = ""


class HalfCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint; a JSON document.

    Attributes:
        version: Of the document.
        store_id: The store that it is about.
        epoch: Of its log then.
        half_queue_offset: The half topic is read from here.
        op_queue_offset: The op topic is read from here.
        batches: Half batches before these offsets that wait.
    """

    version: int
    store_id: int
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    half_queue_offset: _Offset
    op_queue_offset: _Offset
    batches: list[NotedBatch] = []


def dump_checkpoint(table: Transactions, store_id: int, epoch: int) -> bytes:
    """The table as it is now, as a document."""
    noted: list[NotedBatch] = []
    half_from, op_from = table.half_end, table.op_end
    if len(table.batches) > MAX_NOTED:
        oldest = next(iter(table.batches.values()))
        half_from, op_from = oldest.base, oldest.op_floor
    else:
        checks: dict[int, int] = {}
        for watch in table.timetable.watches():
            base = watch.batch.base
            checks[base] = min(watch.checks, checks.get(base, watch.checks))
        noted = [
            NotedBatch(one.base, checks.get(one.base, 0), _states(one))
            for one in table.batches.values()
        ]
    checkpoint = HalfCheckpoint(DOCUMENT_VERSION, store_id, epoch, half_from, op_from, noted)
    return msgspec.json.encode(checkpoint)


def load_checkpoint(document: bytes) -> HalfCheckpoint:
    """Reads what ``dump_checkpoint`` wrote.

    Raises:
        CorruptRecord: It is not that.
    """
    try:
        checkpoint = msgspec.json.decode(document, type=HalfCheckpoint)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"the half checkpoint cannot be read: {error}") from error
    if checkpoint.version != DOCUMENT_VERSION:
        raise CorruptRecord(
            f"the half checkpoint has version {checkpoint.version}; this broker reads version "
            f"{DOCUMENT_VERSION}"
        )
    return checkpoint


def _states(batch: HalfBatch) -> str:
    if not any(batch.states):
        return ""
    # A message with a decision in flight waits until its op record is known to be in the log.
    return "".join(str(state) if state <= PARKED else "0" for state in batch.states)

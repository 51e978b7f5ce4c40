"""A half batch that waits for its decisions, as its table has it. Pure.

Every message of it is

======== ================================================================
state    meaning
======== ================================================================
PENDING  nobody has decided
STAGED   a decision is being written
PARKED   asked about as often as allowed, in vain; may still be decided
ENDED    committed, or rolled back
======== ================================================================
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from mqmesh.protocol.transactions import Decision

PENDING: Final = 0
PARKED: Final = 3
STAGED: Final = 4
"""A bit beside the state to come."""
STATE_OF: Final = {int(Decision.COMMIT): 1, int(Decision.ROLLBACK): 2}
OPEN: Final = (PENDING, PARKED)


class HalfBatch(msgspec.Struct, eq=False):
    """One half batch of which something waits, or did lately.

    Attributes:
        base: Queue offset of its first message in the half topic.
        count: Messages.
        commitlog_offset: Where it begins in the log.
        end_offset: It is on disk when the log is synced to here.
        size: In the log, in bytes.
        store_timestamp: When it was stored.
        producer_id: Instance id of its producer.
        first_sequence: Sequence of its first message.
        group: Producer group.
        topic: Where its messages go.
        queue_id: Queue of that topic.
        producer_crc: Its producer's checksum of it.
        op_floor: Every op record about it stands at or behind this queue offset.
        left: Messages that are not ended.
        parked: Those of them that are parked.
        states: One byte a message.
    """

    base: int
    count: int
    commitlog_offset: int
    end_offset: int
    size: int
    store_timestamp: int
    producer_id: int
    first_sequence: int
    group: str
    topic: str
    queue_id: int
    producer_crc: int = 0
    op_floor: int = 0
    left: int = 0
    parked: int = 0
    states: bytearray = msgspec.field(default_factory=bytearray)

    def open_ordinals(self, among: Iterable[int]) -> list[int]:
        """Return the given ordinals that nobody has decided about and that are not parked."""
        states = self.states
        return [ordinal for ordinal in among if states[ordinal] == PENDING]

    def is_staged(self, among: Iterable[int]) -> bool:
        """True when a decision about one of some messages is being written."""
        states = self.states
        return any(states[ordinal] >= STAGED for ordinal in among)

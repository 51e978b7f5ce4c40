"""Half messages of a running broker: everything that it has beside the table itself."""

import logging
from collections import Counter
from random import Random
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord, MQMeshError
from mqmesh.metrics import Histogram
from mqmesh.protocol.request import PendingReply
from mqmesh.protocol.transactions import Decision, EndOutcome
from mqmesh.roles.broker.features.transactions.check_timetable import Park, TransactionSettings
from mqmesh.roles.broker.features.transactions.half_batches import HalfBatch
from mqmesh.roles.broker.features.transactions.half_checkpoint import (
    dump_checkpoint,
    load_checkpoint,
)
from mqmesh.roles.broker.features.transactions.op_records import Op
from mqmesh.roles.broker.features.transactions.transaction_recovery import (
    HalfRecovery,
    half_batch_of,
)
from mqmesh.roles.broker.features.transactions.transaction_table import DecidedRun, Transactions
from mqmesh.roles.broker.producer_keys import EndProofs
from mqmesh.storage.interface import BatchToPut, MessageStore, PutResult

MAX_STAGED_BYTES: Final = 32 * 1024 * 1024
"""Decisions are written at once when their commits are about so large together."""
MAX_STAGED_RUNS: Final = 100_000
"""Or when there are so many."""
COMMIT_BOUNDS_S: Final = (5.0, 60.0, 600.0, 3_600.0, 43_200.0, 86_400.0)
"""RocketMQ's buckets of how long half messages wait."""

_log = logging.getLogger(__name__)


class OpenEnd(msgspec.Struct, eq=False):
    """A request with decisions that is not answered yet.

    Attributes:
        pending: Answer that it waits for.
        outcomes: One an entry, as far as they are decided.
        bases: The half batch of each entry.
        flights: Writes that hold decisions of it.
        complete: All of its entries were looked at.
        error: Why some could not be written.
        status: ``SendStatus`` of the worst write.
    """

    pending: PendingReply
    outcomes: list[EndOutcome]
    bases: list[int]
    flights: int = 0
    complete: bool = False
    error: MQMeshError | None = None
    status: int = 0

    def lose(self, base: int) -> None:
        """Note that a half batch of the request is gone."""
        for number, one in enumerate(self.bases):
            if one == base:
                self.outcomes[number] = EndOutcome.NOT_PENDING


class Flight(msgspec.Struct, eq=False):
    """Write in flight: one batch of op records, and what it commits and parks.

    Attributes:
        runs: Decisions.
        parks: Half messages that the write parks.
        op_count: Messages in the batch of op records.
        opens: Requests that wait for the write.
    """

    runs: list[DecidedRun]
    parks: list[Park]
    op_count: int
    opens: list[OpenEnd]


class PendingHalfMessages:
    """The table of half messages, and what waits to be written about them.

    Args:
        settings: Timings and limits.
        chance: Makes secrets.

    Attributes:
        table: The half messages.
        opens: Requests that decisions of this tick belong to.
        parks: Half messages to park.
        ops: Further op records to be written.
        proofs: Of who may decide.
        next_sequence: Of the next op record.
        checks_sent: Check-backs that were sent.
        ended: Messages committed and rolled back since the broker leads, by decision and topic.
        took: How long those that were committed had waited, in s, by topic.
        lost: Half messages that were lost with the log or could not be read.
        refused: Ends that could not be carried out.
    """

    def __init__(self, settings: TransactionSettings, chance: Random) -> None:
        self.table = Transactions(settings)
        self.opens: list[OpenEnd] = []
        self.parks: list[Park] = []
        self.ops: list[Op] = []
        self.proofs = EndProofs(chance)
        self._store: MessageStore | None = None
        self.next_sequence = 0
        self.saved_changes = -1
        self.checks_sent = 0
        self.ended: Counter[tuple[Decision, str]] = Counter()
        self.took: dict[str, Histogram] = {}
        self.lost = 0
        self.refused = 0

    def on_visible(self) -> None:
        """Implement ``StoredListener``."""

    def on_stored(self, batch: BatchToPut, result: PutResult, now_ms: int) -> None:
        """A half batch was stored: from now on it waits for its decision.

        Args:
            batch: It.
            result: Where it stands.
            now_ms: Monotonic clock.
        """
        half, immunities_ms = half_batch_of(batch.header, memoryview(batch.data))
        half.base = result.base_queue_offset
        half.commitlog_offset = result.commitlog_offset
        half.end_offset = result.end_offset
        half.store_timestamp = result.store_timestamp
        self.table.on_half(half, 0, now_ms, immunities_ms)

    def recover(
        self,
        store: MessageStore,
        document: bytes | None,
        *,
        wall_ms: int,
        now_ms: int,
    ) -> None:
        """Fills the table from the store.

        Args:
            store: Open.
            document: The last checkpoint, None if there is none.
            wall_ms: Now, wall clock.
            now_ms: Now, monotonic.
        """
        self._store = store
        checkpoint = None
        if document is not None:
            try:
                checkpoint = load_checkpoint(document)
            except CorruptRecord as error:
                # Nothing is lost: the half topic and the op topic say the same, in more words.
                _log.error("%s", error)
        HalfRecovery(store, self.table, wall_ms=wall_ms, now_ms=now_ms).run(checkpoint)

    def count_end(self, run: DecidedRun, wall_ms: int) -> None:
        """Half messages have ended.

        Args:
            run: Which, and how.
            wall_ms: Now, wall clock.
        """
        decision, topic = Decision(run.decision), run.batch.topic
        self.ended[decision, topic] += run.count
        if decision is Decision.COMMIT:
            took = self.took.get(topic)
            if took is None:
                took = self.took[topic] = Histogram(COMMIT_BOUNDS_S)
            took.observe(max(wall_ms - run.batch.store_timestamp, 0) / 1_000, run.count)

    @property
    def is_changed(self) -> bool:
        """The checkpoint is older than the table."""
        return self.table.changes != self.saved_changes

    def dump(self) -> bytes:
        """The checkpoint, see ``half_checkpoint``."""
        assert self._store is not None, "recovered first"
        self.saved_changes = self.table.changes
        return dump_checkpoint(self.table, self._store.stats().store_id, self._store.epoch())

    def lose(self, batch: HalfBatch, why: str) -> None:
        """Gives up a half batch that is not in the log any more."""
        _log.error(
            "%d half messages of producer group %s for topic %s, from %d on, are lost: %s",
            batch.left,
            batch.group,
            batch.topic,
            batch.base,
            why,
        )
        self.lost += batch.left
        self.table.forget(batch)

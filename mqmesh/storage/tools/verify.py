"""Checks a stopped store: every record of the log, and the queues against the log."""

from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.log_identity import EpochStart
from mqmesh.storage.interface import OnProgress, RecoveryProgress
from mqmesh.storage.log.log_start import LOST
from mqmesh.storage.tools.stopped_store import Item, StoppedStore
from mqmesh.units import MIB

PROGRESS_EVERY_BYTES: Final = 4 * MIB
MOST_RANGES: Final = 1_000
"""Ranges reported one by one, of the log and of every queue; further ones are only counted."""

_Queue = tuple[str, int]


class LogDamage(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the log that hold no good record."""

    start_offset: int
    end_offset: int
    reason: str


class QueueDamage(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a queue that consumers cannot get, or not in order.

    Attributes:
        topic: Physical topic.
        queue_id: Number of the queue, from 0.
        first: Queue offset of the first such message.
        end: Queue offset behind the last one.
        reason: Reason why consumers cannot get them.
    """

    topic: str
    queue_id: int
    first: int
    end: int
    reason: str


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a verification.

    Attributes:
        sound: Nothing is damaged.
        backend: Backend of the store.
        clean_stop: The last stop was an orderly one.
        start_offset: Commit-log offset of the oldest record.
        end_offset: Commit-log offset of the log's end.
        torn_bytes: Bytes that a crash left behind, and the next start cuts off; no damage.
        batches: Good batches.
        messages: Messages in these batches.
        queues: Message queues that were compared with the log.
        log_damage: Damaged ranges of the log, ascending.
        queue_damage: Damaged ranges of queues.
        epoch_damage: Differences between the table of epochs and the log, ascending.
        further_damage: Ranges that are not in the two lists because there are too many.
    """

    sound: bool
    backend: str
    clean_stop: bool
    start_offset: int
    end_offset: int
    torn_bytes: int
    batches: int
    messages: int
    queues: int
    log_damage: list[LogDamage]
    queue_damage: list[QueueDamage]
    epoch_damage: list[EpochStart] = []
    further_damage: int = 0


class _Verifier:
    def __init__(self, store: StoppedStore) -> None:
        self.store = store
        self.end = store.start
        self.batches = 0
        self.messages = 0
        self.log_damage: list[LogDamage] = []
        # By topic: batches from before its deletion do not matter.
        self.queue_damage: dict[str, dict[int, list[QueueDamage]]] = {}
        self.epochs = None if store.epochs is None else set(store.epochs)
        self.epoch = 0
        self.epoch_damage: list[EpochStart] = []
        self.further = 0
        self.bounds = {(queue.topic, queue.queue_id): queue for queue in store.queues()}
        # If retention has removed segments, a table that a crash left behind may be older: a
        # queue begins then with the first batch that is met.
        self.begun: set[_Queue] = set() if store.start else set(self.bounds)
        self.expected: dict[_Queue, int] = {key: queue.first for key, queue in self.bounds.items()}

    def take(self, item: Item) -> None:
        self.end = item.end
        if item.epoch > self.epoch:
            self.compare_epoch(EpochStart(item.epoch, item.start))
        if item.wrong is not None:
            self.note_log(item.start, item.end, item.wrong)
        elif item.deleted_topic is not None:
            self.queue_damage.pop(item.deleted_topic, None)
            for key in self.expected:
                if key[0] == item.deleted_topic:
                    self.expected[key] = self.bounds[key].first
        elif item.header is not None and item.meta is not None:
            self.batches += 1
            self.messages += item.header.message_count
            self.compare(item, item.meta.topic)

    def compare_epoch(self, found: EpochStart) -> None:
        # The beginning of the oldest epoch may be removed, and behind damage it may be lost.
        is_first = self.epoch == 0 or bool(self.log_damage)
        self.epoch = found.epoch
        if is_first or self.epochs is None or found in self.epochs:
            return
        if len(self.epoch_damage) == MOST_RANGES:
            self.further += 1
            return
        self.epoch_damage.append(found)

    def compare(self, item: Item, topic: str) -> None:
        header = item.header
        assert header is not None
        if item.start < self.store.deletions.get(topic, 0):
            return
        key = (topic, header.queue_id)
        base, end = header.base_queue_offset, header.next_queue_offset
        reason = self.store.wrong_entry(item)
        if reason is not None:
            self.note_queue(topic, header.queue_id, base, end, reason)
        expected = self.expected.get(key)
        if expected is not None:
            if base > expected and key in self.begun:
                self.note_queue(topic, header.queue_id, expected, base, _NOT_IN_LOG)
            self.begun.add(key)
            self.expected[key] = max(expected, end)

    def finish(self) -> VerifyReport:
        for (topic, queue_id), expected in self.expected.items():
            end = self.bounds[topic, queue_id].end
            if expected < end and (topic, queue_id) in self.begun:
                self.note_queue(topic, queue_id, expected, end, _NOT_IN_LOG)
        queue_damage = [
            one
            for queues in self.queue_damage.values()
            for found in queues.values()
            for one in found
        ]
        return VerifyReport(
            sound=not (self.log_damage or queue_damage or self.epoch_damage),
            backend=self.store.backend,
            clean_stop=self.store.clean,
            start_offset=self.store.start,
            end_offset=self.end,
            torn_bytes=self.store.torn_bytes,
            batches=self.batches,
            messages=self.messages,
            queues=len(self.bounds),
            log_damage=self.log_damage,
            queue_damage=queue_damage,
            epoch_damage=self.epoch_damage,
            further_damage=self.further,
        )

    def note_log(self, start: int, end: int, reason: str) -> None:
        if len(self.log_damage) == MOST_RANGES:
            self.further += 1
            return
        self.log_damage.append(LogDamage(start_offset=start, end_offset=end, reason=reason))

    def note_queue(self, topic: str, queue_id: int, first: int, end: int, reason: str) -> None:
        known = self.queue_damage.setdefault(topic, {}).setdefault(queue_id, [])
        last = known[-1] if known else None
        if last is not None and (last.end, last.reason) == (first, reason):
            known[-1] = msgspec.structs.replace(last, end=end)
            return
        if len(known) == MOST_RANGES:
            self.further += 1
            return
        known.append(
            QueueDamage(topic=topic, queue_id=queue_id, first=first, end=end, reason=reason)
        )


_NOT_IN_LOG: Final = "the log has no good batch with them"


def verify_store(
    store: StoppedStore, on_progress: OnProgress, stopped: Callable[[], bool] = lambda: False
) -> VerifyReport | None:
    """Reads all of a store and checks it.

    Args:
        store: The store.
        on_progress: Called now and then with the progress.
        stopped: Called now and then; True ends the verification.

    Returns:
        Report; None if ``stopped`` ended the verification.

    Raises:
        StorageError: The store cannot be read at all.
    """
    verifier = _Verifier(store)
    if store.kept_from < store.start:
        verifier.note_log(store.kept_from, store.start, LOST)
    reported_at = store.start
    for item in store.items():
        verifier.take(item)
        if item.end - reported_at >= PROGRESS_EVERY_BYTES:
            reported_at = item.end
            if stopped():
                return None
            done = item.end - store.start
            total = max(done, store.likely_end - store.start)
            on_progress(RecoveryProgress("reading the log", done, total))
    return verifier.finish()

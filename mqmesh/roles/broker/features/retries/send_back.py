"""CONSUMER_SEND_MSG_BACK: messages that failed come again later, or become dead letters.

Nothing is answered before the store has what was to be written, so a consumer may take
its message for done then. What was sent back from one place is not sent back from there again,
by any consumer: the retries and the marks of them are one write.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import expires_ms
from mqmesh.batch.record_batch import BatchHeader, read_header
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import BrokerNotAvailable, LocalProtocolError, MQMeshError
from mqmesh.message import SENT_BACK_TOPIC, check_group, dlq_topic, retry_topic
from mqmesh.metrics import counter
from mqmesh.protocol.codes import ResponseCode, code_of, error_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.policies import DROP, KEEP, parse_retry_delays
from mqmesh.protocol.request import Request
from mqmesh.protocol.retries import (
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
    SendBackResult,
)
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.retries.retry_plan import Place, RetryStep, plan_retry
from mqmesh.roles.broker.features.retries.sent_back_marks import (
    DEAD,
    MARKS_QUEUE,
    UNDER_WAY,
    SentBackMark,
    SentBackMarks,
    encode_marks,
)
from mqmesh.roles.broker.features.retries.stored_batches import BatchInStore, StoredBatches
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.broker.writing.writes import Writes, batch_to_put
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import BatchToPut, GetStatus

RETRY_QUEUE: Final = 0
"""Dead-letter topics have one queue on each broker; so have retry topics, but for a queue for each
priority of the topics that messages with priorities are sent back from."""
MARKS_A_BATCH: Final = 10_000

_OK: Final = int(ResponseCode.SUCCESS)


class _Gathering:
    """Writes of a request, and its outcomes."""

    def __init__(
        self,
        core: Core,
        writes: Writes,
        known: SentBackMarks,
        back: SendBackRequest,
        on_done: Callable[[list[SendBackResult]], None],
    ) -> None:
        self._core = core
        self._put = writes.put
        self._known = known
        self._on_done = on_done
        self._results = [SendBackResult(_OK) for _ in back.entries]
        self._writes: list[tuple[int, SentBackMark]] = []
        self._batches: list[BatchToPut] = []

    def add(self, index: int, batch: BatchToPut, mark: SentBackMark) -> None:
        limit = self._core.config.storage.max_batch_bytes
        if batch.header.total_size > limit:
            # The store would refuse it alone, and take the mark that says that it is there.
            raise LocalProtocolError(
                f"a retry of {batch.header.total_size} bytes does not fit a segment of the log, "
                f"which takes {limit} (storage.mapped_file_size_commit_log)"
            )
        mark = msgspec.structs.replace(
            mark,
            topic=batch.topic,
            queue_id=batch.queue_id,
            producer_crc=batch.header.producer_crc,
        )
        self._known.begin(mark)
        self._writes.append((index, mark))
        self._batches.append(batch)

    def note_dead(self, index: int, count: int) -> None:
        result = self._results[index]
        self._results[index] = msgspec.structs.replace(
            result, dead_letters=result.dead_letters + count
        )

    def fail(self, index: int, error: MQMeshError) -> None:
        code = vars(error).get("code") or code_of(error)
        self._results[index] = SendBackResult(code, str(error)[:MAX_REMARK_CHARACTERS])

    def write(self) -> None:
        """Has everything stored at once, then answers."""
        if not self._writes:
            self._answer()
            return
        try:
            self._put(self._with_marks(), self._stored)
        except MQMeshError:
            for _, mark in self._writes:
                self._known.withdraw(mark)
            raise

    def _with_marks(self) -> list[BatchToPut]:
        """Return marks, and behind them the batches that they name; some at a time."""
        batches: list[BatchToPut] = []
        for start in range(0, len(self._writes), MARKS_A_BATCH):
            stop = start + MARKS_A_BATCH
            marks = [mark for _, mark in self._writes[start:stop]]
            now_ms = self._core.clock.wall_ms()
            data = encode_marks(marks, producer_id=self._core.instance_id, now_ms=now_ms)
            batches.append(batch_to_put(data))
            batches += self._batches[start:stop]
        return batches

    def _stored(self, outcomes: list[BatchOutcome]) -> None:
        total = self._core.stats.total
        # One write: the store took all of it or nothing.
        bad = next((outcome for outcome in outcomes if outcome.code != _OK), None)
        for index, mark in self._writes:
            if bad is not None:
                self._known.withdraw(mark)
                self.fail(index, error_of(bad.code, bad.remark))
                continue
            self._known.settle(mark)
            total.sent_back_messages += mark.count
            if mark.is_dead:
                self.note_dead(index, mark.count)
                total.dead_letters += mark.count
        self._answer()

    def _answer(self) -> None:
        self._on_done(self._results)


class SendBackFeature(Feature):
    """Messages that failed: they come again later, or become dead letters.

    Nothing is answered before the store has what was to be written, so a consumer may take
    its message for done then. What was sent back from one place is not sent back from there again,
    by any consumer: the retries and the marks of them are one write.

    Attributes:
        marks: Messages that were sent back.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        offsets: CommittedOffsets,
        writes: Writes,
        place: Place,
    ) -> None:
        self._core = core
        self._store = core.store
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._offsets = offsets
        self._writes = writes
        self._place = place
        self.marks = SentBackMarks()

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, request: Request, back: SendBackRequest) -> Reply | None:
        """Plans the next try of messages that failed, or makes them dead letters."""
        check_group(back.group)
        pending = request.later()
        self.send_back_now(back, lambda results: pending.done(SendBackResponse(results)))
        return None

    def send_back_now(
        self, back: SendBackRequest, on_done: Callable[[list[SendBackResult]], None]
    ) -> None:
        """Plan the next try of messages, or make them dead letters.

        Args:
            back: Which messages.
            on_done: Called with a result for each entry, once that is stored.

        Raises:
            CorruptRecord: The marks cannot be read just now.
            MQMeshError: Nothing can be stored now.
        """
        self.marks.load(self._store, self._offsets.sent_back.counts_from)
        gathering = _Gathering(self._core, self._writes, self.marks, back, on_done)
        batches = StoredBatches(self._store)
        for index, entry in enumerate(back.entries):
            try:
                self._send_back_entry(back, index, entry, batches, gathering)
            except MQMeshError as error:
                gathering.fail(index, error)
        gathering.write()

    def is_sent_back(self, group: str, queue: tuple[str, int], offsets: Iterable[int]) -> bool:
        """Implement ``SendsBack.is_sent_back`` for the messages whose marks are known."""
        self.marks.load(self._store, self._offsets.sent_back.counts_from)
        if not len(self.marks):
            return False
        batch: BatchHeader | None = None
        for offset in offsets:
            if batch is None or offset >= batch.next_queue_offset:
                found = self._store.get(*queue, offset, max_bytes=1)
                if found.status is not GetStatus.FOUND:
                    return False
                batch = read_header(found.data[0])
            at = offset - batch.base_queue_offset
            ((_, _, state),) = self.marks.runs(group, batch.commitlog_offset, at, at + 1)
            if state is not None:
                return True
        return False

    def group_deleting(self, group: str) -> None:
        """Forget what a group sent back, as ``forget_sent_back``."""
        self.forget_sent_back(group)

    def forget_sent_back(self, group: str) -> None:
        """A group's offsets are moved: what it gets once more may be sent back once more.

        Raises:
            CorruptRecord: The marks cannot be read just now; nothing was changed.
        """
        known = self.marks
        known.load(self._store, self._offsets.sent_back.counts_from)
        if known.forget_group(group):
            _, end = self._store.queue_bounds(SENT_BACK_TOPIC, MARKS_QUEUE)
            self._offsets.sent_back.forget(group, end)

    def _send_back_entry(
        self,
        back: SendBackRequest,
        index: int,
        entry: SendBackEntry,
        batches: StoredBatches,
        gathering: _Gathering,
    ) -> None:
        self._topics.require(entry.topic)
        place, end = entry.queue_offset, entry.queue_offset + entry.count
        known = self.marks
        while place < end:
            found = batches.find(entry.topic, entry.queue_id, place)
            header = found.header
            base, behind = header.base_queue_offset, header.next_queue_offset
            whole = found.messages is None
            first, stop = place - base, min(end, behind) - base
            if whole:
                first, stop = 0, header.message_count
            for start, after, state in list(
                known.runs(back.group, header.commitlog_offset, first, stop)
            ):
                if state == UNDER_WAY:
                    raise BrokerNotAvailable("the same messages are being sent back just now")
                if state == DEAD:
                    gathering.note_dead(index, after - start)
                elif state is None and whole:
                    self._bury_whole(back.group, found, index, gathering)
                elif state is None:
                    self._retry(back, index, entry, found, start, after, gathering)
            place = behind

    def _retry(
        self,
        back: SendBackRequest,
        index: int,
        entry: SendBackEntry,
        found: BatchInStore,
        first: int,
        stop: int,
        gathering: _Gathering,
    ) -> None:
        assert found.messages is not None
        steps = plan_retry(
            found.messages[first:stop],
            topic=entry.topic,
            max_reconsume_times=self._group_table.retry_limit(back.group, back.max_reconsume_times),
            delay_level=entry.delay_level,
            delay_ms=entry.delay_ms,
            reconsume_times=entry.reconsume_times,
            reason=entry.reason,
            delays=parse_retry_delays(self._policies(back.group).retry_delays),
            now_ms=self._core.clock.wall_ms(),
        )
        expires = expires_ms(found.data, found.header)
        for step in steps:
            if expires:
                step = msgspec.structs.replace(step, expires_ms=expires)
            self._take_step(back.group, index, entry, step, gathering)

    def _bury_whole(
        self, group: str, found: BatchInStore, index: int, gathering: _Gathering
    ) -> None:
        """Nobody can read the batch: it goes to the dead letters as it is."""
        header = found.header
        if self._drops(group, header.message_count):
            return
        topic = self._topic_of(group, is_dead=True)
        batch = redeliver(found.data, header, topic=topic, queue_id=RETRY_QUEUE)
        mark = SentBackMark(group, header.commitlog_offset, 0, header.message_count, True)
        gathering.add(index, batch_to_put(batch), mark)

    def _policies(self, group: str) -> GroupConfig:
        return self._group_table.get(group) or GroupConfig(group)

    def _drops(self, group: str, count: int) -> bool:
        """Return whether a group drops its dead letters; then these are done, and counted."""
        drops = self._policies(group).dead_letter == DROP
        if drops:
            self._core.stats.total.dropped_dead_letters += count
        return drops

    def _take_step(
        self, group: str, index: int, entry: SendBackEntry, step: RetryStep, gathering: _Gathering
    ) -> None:
        if step.is_dead and self._drops(group, len(step.messages)):
            return
        topic = self._topic_of(group, is_dead=step.is_dead)
        try:
            queue_id = RETRY_QUEUE if step.is_dead else self._retry_queue(topic, entry)
            batch = step.batch(topic, queue_id, self._place)
        except LocalProtocolError:
            # With the reason in each message, a full batch is too large.
            if len(step.messages) == 1:
                raise
            for half in step.halves():
                self._take_step(group, index, entry, half, gathering)
            return
        if not step.is_dead:
            # Now, so that the members have found it when the messages are due.
            self._writes.ensure_topic(topic, queue_id + 1)
        source = step.messages[0]
        mark = SentBackMark(
            group, source.commitlog_offset, source.ordinal, len(step.messages), step.is_dead
        )
        gathering.add(index, batch, mark)

    def _retry_queue(self, retries: str, entry: SendBackEntry) -> int:
        """Return the queue of a retry: that of its priority, which it keeps on all its way."""
        has_priority = entry.topic == retries or self._topics.require(entry.topic).config.priorities
        return entry.queue_id if has_priority else RETRY_QUEUE

    def _topic_of(self, group: str, *, is_dead: bool) -> str:
        name = retry_topic(group)
        if is_dead:
            own = self._policies(group).dead_letter
            if own != KEEP:
                return own
            name = dlq_topic(group)
        if self._group_table.get(group) is None and self._groups.find(group) is None:
            # The topics of groups that are known are bounded by these; anybody may think of names.
            self._topics.check_room(name)
        return name

    metrics = (
        counter(
            "sent_back_messages_total",
            "messages that consumers sent back",
            lambda feature: feature._core.stats.total.sent_back_messages,
            unit="messages",
        ),
        counter(
            "dead_letters_total",
            "of them, messages that became dead letters",
            lambda feature: feature._core.stats.total.dead_letters,
            unit="messages",
        ),
        counter(
            "dropped_dead_letters_total",
            "messages that failed too often and were dropped, as their group's dead_letter says",
            lambda feature: feature._core.stats.total.dropped_dead_letters,
            unit="messages",
        ),
    )

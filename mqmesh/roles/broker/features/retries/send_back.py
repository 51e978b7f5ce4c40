"""CONSUMER_SEND_MSG_BACK: messages that failed come again later, or become dead letters.

The request is answered when the store has all retries, so the consumer may take its message for
done then. A message is sent back from one place only once, by whatever consumer: the retries and
their marks are stored all or none.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import expires_ms
from mqmesh.batch.record_batch import BatchHeader, read_header
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import BrokerNotAvailable, LocalProtocolError, MQMeshError
from mqmesh.message import SENT_BACK_TOPIC, dlq_topic, retry_topic
from mqmesh.metrics import counter
from mqmesh.namespaces import namespace_of
from mqmesh.protocol.codes import ResponseCode, code_of, error_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GroupConfig, check_lasting_group
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
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.group_state.used_groups import UsedGroups
from mqmesh.roles.broker.state_log import PlannedChange
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.broker.writing.writes import Writes, batch_to_put, divided, refusals
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import BatchToPut, GetStatus

RETRY_QUEUE: Final = 0
"""Dead-letter topics have one queue on each broker; so have retry topics, but for a queue for each
priority of the topics that messages with priorities are sent back from."""
MARK_BYTES: Final = 1_280
"""More than a mark takes, and a state record of messages that are settled by it: a group never has
more of them than a batch may."""
MARKS_ROOM: Final = 512
"""More than a batch of marks takes beside them."""

_OK: Final = int(ResponseCode.SUCCESS)


class _Retry(msgspec.Struct, frozen=True):
    """Batch to be stored, a retry or a dead letter.

    Attributes:
        index: Of the entry that it is of.
        first: Queue offset of the first message that it is of.
        mark: Its mark.
        batch: The batch.
    """

    index: int
    first: int
    mark: SentBackMark
    batch: BatchToPut


class _Gathering:
    """Writes of a request, and its outcomes."""

    def __init__(
        self, core: Core, writes: Writes, known: SentBackMarks, back: SendBackRequest
    ) -> None:
        self._core = core
        self._put = writes
        self._known = known
        self._results = [SendBackResult(_OK) for _ in back.entries]
        self._writes: list[_Retry] = []

    def add(self, index: int, first: int, batch: BatchToPut, mark: SentBackMark) -> None:
        limit = self._core.config.storage.max_batch_bytes
        if batch.header.total_size > limit:
            raise LocalProtocolError(
                f"a retry of {batch.header.total_size} bytes does not fit a segment of the log, "
                f"which takes {limit} (storage.mapped_file_size_commit_log)"
            )
        self._known.begin(mark)
        self._writes.append(_Retry(index, first, mark, batch))

    def note_dead(self, index: int, count: int) -> None:
        result = self._results[index]
        self._results[index] = msgspec.structs.replace(
            result, dead_letters=result.dead_letters + count
        )

    def fail(self, index: int, error: MQMeshError) -> None:
        code = vars(error).get("code") or code_of(error)
        self._results[index] = SendBackResult(code, str(error)[:MAX_REMARK_CHARACTERS])

    def write(self, on_done: Callable[[list[SendBackResult]], None]) -> None:
        """Has everything stored at the end of the turn; then calls back, once it is safe."""
        parts = self._divided()

        def stored(outcomes: list[BatchOutcome]) -> None:
            sizes = (1 + len(part) for part in parts)
            for part, bad in zip(parts, refusals(outcomes, sizes), strict=True):
                self._end(part, None if bad is None else error_of(bad.code, bad.remark))
            on_done(self._results)

        if not parts:
            on_done(self._results)
            return
        try:
            self._put.put_groups([self._group(part) for part in parts], stored)
        except MQMeshError:
            self._withdraw()
            raise

    def write_now(
        self, plan: Callable[[list[tuple[int, int, int]]], PlannedChange]
    ) -> list[SendBackResult]:
        """Store everything in this call, with what is planned of it; return the results."""
        parts = self._divided()
        try:
            for part in parts:
                for one in part:
                    topic = self._put.ensure_topic(one.batch.topic, one.batch.queue_id + 1)
                    if topic.is_table:
                        # Revisions of what is staged were compared with what is in front of this.
                        self._put.write()
            if parts:
                self._put.ensure_topic(SENT_BACK_TOPIC)
                self._core.require_state()
        except MQMeshError:
            self._withdraw()
            raise
        for part in parts:
            change = plan([(one.index, one.first, one.mark.count) for one in part])
            try:
                self._put.put_changed(change, self._group(part))
            except MQMeshError as error:
                self._end(part, error)
            else:
                self._end(part, None)
        return self._results

    def _divided(self) -> list[list[_Retry]]:
        return list(divided(self._writes, _size_of, self._put.group_bytes - MARKS_ROOM))

    def _group(self, part: list[_Retry]) -> list[BatchToPut]:
        """Return marks, and behind them the batches that they report."""
        marks = encode_marks(
            [one.mark for one in part],
            producer_id=self._core.instance_id,
            now_ms=self._core.clock.wall_ms(),
        )
        return [batch_to_put(marks), *(one.batch for one in part)]

    def _end(self, part: list[_Retry], error: MQMeshError | None) -> None:
        """Note that a part is stored, or why not."""
        total = self._core.stats.total
        for one in part:
            mark = one.mark
            if error is not None:
                self._known.withdraw(mark)
                self.fail(one.index, error)
                continue
            self._known.settle(mark)
            total.sent_back_messages += mark.count
            size = one.batch.header.total_size
            self._core.quotas.note_stored(namespace_of(mark.group), mark.count, size)
            if mark.is_dead:
                self.note_dead(one.index, mark.count)
                total.dead_letters += mark.count

    def _withdraw(self) -> None:
        for one in self._writes:
            self._known.withdraw(one.mark)


def _size_of(write: _Retry) -> int:
    return MARK_BYTES + write.batch.header.total_size


class SendBackFeature(Feature):
    """Messages that failed: they come again later, or become dead letters.

    The request is answered when the store has all retries, so the consumer may take its message for
    done then. A message is sent back from one place only once, by whatever consumer: the retries
    and their marks are stored all or none.

    Attributes:
        marks: Messages that were sent back.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        group_table: GroupTable,
        used: UsedGroups,
        offsets: CommittedOffsets,
        writes: Writes,
        place: Place,
    ) -> None:
        self._core = core
        self._store = core.store
        self._topics = topics
        self._group_table = group_table
        self._used = used
        self._offsets = offsets
        self._writes = writes
        self._place = place
        self.marks = SentBackMarks()

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, request: Request, back: SendBackRequest) -> Reply | None:
        """Plans the next try of messages that failed, or makes them dead letters.

        Raises:
            GroupNotFound, SystemBusy: The group has no settings, and gets none.
        """
        check_lasting_group(back.group)
        if self._group_table.get(back.group) is None:
            # Its topics are bounded by the groups there may be; anybody may think of names.
            self._used.note(request, back.group)
        gathering = self._gather(back)
        pending = request.later()
        gathering.write(lambda results: pending.done(SendBackResponse(results)))
        return None

    def send_back_now(
        self, back: SendBackRequest, plan: Callable[[list[tuple[int, int, int]]], PlannedChange]
    ) -> list[SendBackResult]:
        """Implement ``SendsBack.send_back_now``."""
        return self._gather(back).write_now(plan)

    def _gather(self, back: SendBackRequest) -> _Gathering:
        """Return what is to be written.

        Raises:
            CorruptRecord: The marks cannot be read just now.
        """
        self.marks.load(self._store, self._offsets.sent_back.counts_from)
        gathering = _Gathering(self._core, self._writes, self.marks, back)
        batches = StoredBatches(self._store)
        for index, entry in enumerate(back.entries):
            try:
                self._send_back_entry(back, index, entry, batches, gathering)
            except MQMeshError as error:
                gathering.fail(index, error)
        return gathering

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
                    self._bury_whole(back.group, entry.topic, found, index, gathering)
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
        self, group: str, origin: str, found: BatchInStore, index: int, gathering: _Gathering
    ) -> None:
        """Move a batch that cannot be read to the dead letters as it is."""
        header = found.header
        if self._drops(group, header.message_count):
            return
        topic = self._dead_letter_topic(group, origin)
        batch = redeliver(found.data, header, topic=topic, queue_id=RETRY_QUEUE)
        mark = SentBackMark(group, header.commitlog_offset, 0, header.message_count, True)
        gathering.add(index, int(header.base_queue_offset), batch_to_put(batch), mark)

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
        if step.is_dead:
            topic = self._dead_letter_topic(group, step.messages[0].topic)
        else:
            topic = retry_topic(group)
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
        gathering.add(index, source.queue_offset, batch, mark)

    def _retry_queue(self, retries: str, entry: SendBackEntry) -> int:
        """Return the queue of a retry: that of its priority, which it keeps on all its way."""
        has_priority = entry.topic == retries or self._topics.require(entry.topic).config.priorities
        return entry.queue_id if has_priority else RETRY_QUEUE

    def _dead_letter_topic(self, group: str, origin: str) -> str:
        """Return the topic for a group's dead letters of a topic, and make it if it is missing."""
        own = self._policies(group).dead_letter
        if own in (KEEP, origin):  # in their own topic, the group would get them for ever
            return dlq_topic(group)
        self._topics.check_room(own)  # no group bounds it
        self._writes.ensure_topic(own)
        return own

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

"""Writes what a turn has staged, once, and answers when the store has it and it is safe.

Nothing is answered before the commit point says that it is safe, or the time for that is over.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, TypeVar

import msgspec

from mqmesh.batch.record_batch import read_header, read_meta
from mqmesh.errors import LocalProtocolError, MQMeshError, StorageError, StoreClosed, SystemBusy
from mqmesh.message import RETRY_PREFIX, is_system_topic
from mqmesh.protocol.codes import ResponseCode, code_of, error_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, ONEWAY, Reply
from mqmesh.protocol.messaging import BatchOutcome, SendStatus, encode_outcomes
from mqmesh.protocol.request import Request
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.commit_point import QueueKey
from mqmesh.roles.broker.core import Core, store_stopped
from mqmesh.roles.broker.staging import (
    OpenSend,
    Outcomes,
    SendStage,
    fill_in,
    fill_in_refusal,
    fill_in_status,
    refusal_of,
)
from mqmesh.roles.broker.state_log import PlannedChange
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable
from mqmesh.roles.broker.writing.send_admission import SendAdmission
from mqmesh.storage.interface import GROUP_BYTES, BatchToPut, PutResult, PutStatus
from mqmesh.units import MAX_OFFSET, TimestampMs

T = TypeVar("T")


class PullsToWake(Protocol):
    """Pulls that wait for messages."""

    @property
    def waited_for(self) -> Mapping[QueueKey, object]:
        """Queues that somebody waits at, by topic and queue id; always the same object."""

    def wake(self, topic: str, queue_id: int) -> None:
        """Answer those who wait at a queue, as far as they want what came."""


class StoredListener(Protocol):
    """A feature that follows what is stored in a system topic."""

    def on_stored(self, batch: BatchToPut, result: PutResult, now_ms: int) -> None:
        """Take note of a batch that the store has; monotonic clock."""

    def on_visible(self) -> None:
        """Take note that more of the topic may be seen than before."""


class TableListener(Protocol):
    """The tables, which follow what is stored in their topics."""

    def on_staged(self, batch: BatchToPut, write: int) -> None:
        """Take note of a batch of the broker's own for a table; ``write`` is its number."""

    def on_stored(self, topic: Topic, batch: BatchToPut, result: PutResult) -> None:
        """Take note of a batch of a table that the store has."""


class StagedHalves(Protocol):
    """Count of half messages on the stage.

    Attributes:
        staged_halves: Those that were let in and are neither put nor refused yet.
    """

    staged_halves: int


class Writes:
    """The writes of a turn of the event loop: staged by features, put into the store at once.

    Args:
        core: The core of the broker.
        topics: Topics.
        pulls: Pulls that wait for what is stored.
        admission: Decides which sends have waited for too long.
        listeners: Features that follow what is stored in a system topic, by topic.
        halves: Counts half messages that are staged, which ends with the stage.
        tables: Tables, which follow what is stored in their topics.

    Attributes:
        stage: Batches and sends of this turn.
        number: Of the write that is being staged.
        max_group_bytes: Most bytes of batches that are stored all or none.
        group_bytes: Most bytes of a group of several batches that could be divided.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        pulls: PullsToWake,
        admission: SendAdmission,
        listeners: Mapping[str, StoredListener],
        halves: StagedHalves,
        tables: TableListener,
    ) -> None:
        self.stage = SendStage()
        self.number = 0
        self.max_group_bytes = core.config.storage.max_group_bytes
        self.group_bytes = min(self.max_group_bytes, GROUP_BYTES)
        self._group = 0
        self._settings = core.settings
        self._clock = core.clock
        # The interpreter's own functions, a call less.
        self._now_ns = core.clock.monotonic_ns
        self._wall_ns = core.clock.wall_ns
        self._store = core.store
        self._commit_point = core.commit_point
        self._note_refusal = core.note_refusal
        self._stats = core.stats
        self._state = core.state
        self._core = core
        self._topics = topics
        self._pulls = pulls
        self._waited_for = pulls.waited_for
        self._listeners = listeners
        self._halves = halves
        self._tables = tables
        self._admission = admission

    def add(
        self,
        request: Request,
        batches: Sequence[BatchToPut],
        outcomes: list[BatchOutcome | None],
        size: int,
        end_offset: int = 0,
    ) -> None:
        """Stages the batches of a SEND_MESSAGE; writes at once when much is staged.

        Args:
            request: To be answered when the batches are stored and safe.
            batches: To be stored, in order: one for each None of ``outcomes``.
            outcomes: One for each batch of the request; None where the store decides.
            size: Of the request's body, in bytes.
            end_offset: Not to be answered before the log is safe to this commit-log offset, since
                the outcomes say what stands before it.
        """
        stage = self.stage
        stage.batches += batches
        stage.sends.append(OpenSend(request.later(), outcomes, end_offset))
        stage.staged_bytes += size
        if stage.staged_bytes >= self._settings.now.max_staged_bytes:
            self.write()

    def put(self, batches: Sequence[BatchToPut], on_stored: Outcomes) -> None:
        """Stages batches of the broker's own: all or none of them are stored, whatever dies.

        They are not refused for a topic's permission. The store may refuse them (full, too slow),
        and a stopping broker never calls back for them: who must have them written tries again. In
        a group that elects its master they are stored once they are confirmed, however long that
        takes; a master that is deposed refuses them.

        Args:
            batches: At least one; a missing topic is created.
            on_stored: Called on the event loop, later, with an outcome for each batch.

        Raises:
            LocalProtocolError: They are over ``max_group_bytes`` together.
            SystemBusy: A topic is missing, and there are more than a broker may have at all.
        """
        self.put_groups([batches], on_stored)

    def put_groups(self, groups: Sequence[Sequence[BatchToPut]], on_stored: Outcomes) -> None:
        """Stages several groups of batches; where a write is cut off, the first ones are stored.

        See ``put``.
        """
        staged: list[BatchToPut] = []
        for batches in groups:
            size = sum(batch.header.total_size for batch in batches)
            if size > self.max_group_bytes:
                raise LocalProtocolError(
                    f"{len(batches)} batches of {size} bytes are to be stored all or none, and "
                    f"{self.max_group_bytes} fit one write (storage.mapped_file_size_commit_log)"
                )
            self._group += 1
            number = self._group if len(batches) > 1 else 0
            staged += [msgspec.structs.replace(one, group=number) for one in batches]
        for batch in staged:
            if self.ensure_topic(batch.topic, batch.queue_id + 1).is_table:
                self._tables.on_staged(batch, self.number)
        outcomes: list[BatchOutcome | None] = [None] * len(staged)
        self.stage.batches += staged
        self.stage.sends.append(OpenSend(None, outcomes, on_stored=on_stored))
        self.stage.staged_bytes += sum(batch.header.total_size for batch in staged)

    def put_changed(self, change: PlannedChange, batches: Sequence[BatchToPut]) -> int:
        """Store batches and make a change of tables in this call, all or none.

        Staged sends come behind the batches. Nothing is confirmed when this returns.

        Args:
            change: The log has all that its tables said before.
            batches: Stored behind the records of the change.

        Returns:
            Commit-log offset where they end.

        Raises:
            MQMeshError: Nothing is stored, and nothing has changed.
        """
        records = self._state.batches_of(change)
        self._group += 1
        grouped = [msgspec.structs.replace(one, group=self._group) for one in (*records, *batches)]
        try:
            results = self._store.put(grouped, TimestampMs(self._wall_ns() // 1_000_000))
        except StoreClosed as error:
            raise store_stopped(error) from error
        count, result = len(records), results[-1]
        if result.status is not PutStatus.PUT_OK:
            self._stats.total.put_refused += len(batches)
            if result.status is PutStatus.DUPLICATE:
                # The batches were stored before, with another change.
                result = msgspec.structs.replace(result, status=PutStatus.SEQUENCE_CONFLICT)
            refusal = refusal_of((batches or records)[0], result)
            raise error_of(refusal.code, refusal.remark, refusal.retry_after_ms)
        self._state.note_put(records, results[:count])
        change.apply()
        high_watermark = self._commit_point.high_watermark()
        for key in self._account(grouped[count:], results[count:], high_watermark):
            self._pulls.wake(*key)
        return int(results[-1].end_offset)

    def put_encoded(self, batches: Sequence[bytes], on_stored: Outcomes) -> None:
        """Stages whole, right batches; see ``put``."""
        self.put([batch_to_put(data) for data in batches], on_stored)

    def ensure_topic(self, name: str, queues: int = 1) -> Topic:
        """Return a topic of the broker's own; create it if it is missing.

        It is created beyond ``max_topics``, too, but not beyond the quota of its namespace.

        Acknowledged messages may need it. The caller bounds how many topics clients can make.

        Args:
            name: System topics are allowed.
            queues: To write and to read, when it is new; a retry topic gets more, too.

        Raises:
            SystemBusy: There are more topics than a broker may have at all, or its namespace may.
        """
        topic = self._topics.get(name)
        may_grow = name.startswith(RETRY_PREFIX)
        if topic is None or (may_grow and topic.config.read_queue_nums < queues):
            config = TopicConfig(name, queues, queues)
            if not is_system_topic(name):
                self._topics.check_quotas([config])
            topic = self._topics.set(config, self._clock.wall_ms())
        return topic

    def write(self) -> None:
        """Writes what is staged, and answers or lets wait; the end of each tick."""
        state = self._state
        if (state.waiters or any(state.urgent)) and state.is_urgent:
            self._core.write_state()  # what is sent may need it, so that it has to stand in front
        self.number += 1  # also without sends: tables keep nothing of commits that were refused
        if not self.stage.sends:
            return
        stage, self.stage = self.stage, SendStage()
        self._halves.staged_halves = 0
        batches, sends = stage.batches, stage.sends
        late = self._admission.count_refused(len(sends), self._now_ns() // 1_000_000)
        if late:
            batches, sends = self._refuse_late(batches, sends, late)
        try:
            store_timestamp = TimestampMs(self._wall_ns() // 1_000_000)
            results = self._store.put(batches, store_timestamp) if batches else []
        except StorageError as error:
            self._stats.total.put_refused += len(batches)
            refused = store_stopped(error) if isinstance(error, StoreClosed) else error
            fill_in_refusal(sends, _outcome_of(refused))
            for send in sends:
                self._answer(send)
            return
        fill_in(sends, batches, results)
        point = self._commit_point
        if point.is_immediate:
            arrived = self._account(batches, results, MAX_OFFSET)
            for send in sends:
                self._answer(send)
        else:
            safe_offset = point.offset()
            arrived = self._account(batches, results, point.high_watermark())
            for send in sends:
                if send.end_offset > safe_offset:
                    self._wait(send)
                else:
                    self._answer_safe(send)
        for key in arrived:
            self._pulls.wake(*key)

    def _refuse_late(
        self, batches: list[BatchToPut], sends: list[OpenSend], count: int
    ) -> tuple[list[BatchToPut], list[OpenSend]]:
        """Refuses the oldest sends; returns what is left.

        Order does not suffer: a producer waits for its answer before it sends to the queue again.
        """
        config = self._settings.now
        late, left = sends[:count], sends[count:]
        refused = sum(send.outcomes.count(None) for send in late)
        self._stats.total.busy_refusals += count
        self._stats.total.put_refused += refused
        error = SystemBusy(
            f"the log is too slow for all sends: some waited for {self._admission.longest_wait_ms} "
            f"ms (wait_time_mills_in_send_queue = {config.wait_time_mills_in_send_queue})",
            retry_after_ms=config.busy_retry_after_ms,
        )
        fill_in_refusal(late, _outcome_of(error))
        for send in late:
            self._answer(send)
        return batches[refused:], left

    def answer_confirmed(self) -> None:
        """More of the log is safe: answers the sends that waited for it, and wakes pulls."""
        for send in self._commit_point.confirmed(self._clock.monotonic_ms()):
            self._answer_safe(send)
        for key in self._commit_point.arrivals():
            listener = self._listeners.get(key[0])
            if listener is not None:
                listener.on_visible()
            if key in self._waited_for:
                self._pulls.wake(*key)

    def answer_expired(self, now_ms: int) -> None:
        """Answers sends that waited for too long; they say who is late.

        None in a group that elects its master: the next election may take back what is not
        confirmed, so no answer could say that it is stored. Those sends wait until they are
        confirmed, or until another replica leads, and their producers no longer than their own
        timeouts.
        """
        point = self._commit_point
        if self._core.leadership is not None:
            return
        for send, late in point.expired(now_ms):
            if late is not None:
                self._stats.note_unsafe(late.status)
                remark = f"{late.name} took over {point.timeout_ms} ms ({late.setting})"
                self._note_refusal(ResponseCode[late.status.name], remark)
                fill_in_status(send, late.status)
            self._answer(send)

    def refuse_all(self, error: MQMeshError) -> None:
        """Answer all waiting sends with an error: this broker leads no more.

        Messages of them that are in the log may be lost or may stay. A producer that repeats them
        at the next master does not store them twice.
        """
        staged, self.stage = self.stage.sends, SendStage()
        self._halves.staged_halves = 0
        fill_in_refusal(staged, _outcome_of(error))
        waiting = self._commit_point.take_all()
        for send in waiting:
            # Sends of the broker itself fail; the client whose request they serve gets an error.
            send.outcomes[:] = [_outcome_of(error)] * len(send.outcomes)
        for send in (*staged, *waiting):
            if send.pending is None:
                self._answer(send)
            elif not send.pending.is_oneway:
                send.pending.fail(error)

    def refuse_waiting(self, error: MQMeshError) -> None:
        """Fail waiting sends of producers; repeating them does not store them twice.

        Sends of the broker itself wait on: they are reported as done, or not at all.
        """
        for send in self._commit_point.take_all():
            if send.pending is not None:
                send.pending.fail(error)
            elif send.is_asked:
                send.outcomes[:] = [_outcome_of(error)] * len(send.outcomes)
                self._answer(send)
            else:
                self._wait(send)

    def _account(
        self,
        batches: list[BatchToPut],
        results: list[PutResult],
        high_watermark: int,
    ) -> dict[QueueKey, None]:
        """Counts what was stored; returns the queues that somebody waits at and can see it."""
        arrived: dict[QueueKey, None] = {}
        total = self._stats.total
        waited_for = self._waited_for
        for batch, result in zip(batches, results, strict=True):
            if result.status is not PutStatus.PUT_OK:
                if result.status is PutStatus.DUPLICATE:
                    total.put_duplicates += 1
                else:
                    total.put_refused += 1
                continue
            name, queue_id, header = batch.topic, batch.queue_id, batch.header
            count, size = header.message_count, header.total_size
            total.put_batches += 1
            total.put_messages += count
            total.put_bytes += size
            topic = self._topics.get(name)
            if topic is not None:
                topic.put_messages += count
                topic.put_bytes += size
                topic.sizes.observe(size / count, count)
                topic.last_update[queue_id] = result.store_timestamp
                if topic.is_table:
                    self._tables.on_stored(topic, batch, result)
            listener = self._listeners.get(name)
            if listener is not None:
                listener.on_stored(batch, result, self._clock.monotonic_ms())
            if result.end_offset > high_watermark:
                self._commit_point.note_arrival((name, queue_id), result.end_offset)
            elif waited_for and (name, queue_id) in waited_for:
                arrived[name, queue_id] = None
        return arrived

    def _wait(self, send: OpenSend) -> None:
        if send.pending is not None and send.pending.is_oneway:
            return
        self._commit_point.wait(send, send.end_offset, self._clock.monotonic_ms())

    def _answer_safe(self, send: OpenSend) -> None:
        """Answers a send that is safe, or that nobody is there to make safer."""
        status = self._commit_point.status_of(send.end_offset)
        if status and send.pending is not None:
            self._stats.note_unsafe(status)
            fill_in_status(send, status)
        self._answer(send)

    def _answer(self, send: OpenSend) -> None:
        pending = send.pending
        outcomes: list[BatchOutcome] = send.outcomes  # type: ignore[assignment]  # all are there
        if pending is not None and pending.flags & ONEWAY:
            self._note_refusals(outcomes)  # nobody else hears of them
            return
        if pending is None:
            assert send.on_stored is not None
            send.on_stored(outcomes)
            return
        header, remarks = encode_outcomes(outcomes)
        if remarks:
            self._note_refusals(outcomes)
        pending.done(Reply(header, (remarks,) if remarks else ()))

    def _note_refusals(self, outcomes: list[BatchOutcome]) -> None:
        for outcome in outcomes:
            if outcome.code:
                self._note_refusal(outcome.code, outcome.remark)

    def refusal_of(self, error: MQMeshError) -> BatchOutcome:
        """Return the outcome of a batch that is not stored, and count it."""
        self._stats.total.put_refused += 1
        return _outcome_of(error)


def _outcome_of(error: MQMeshError) -> BatchOutcome:
    return BatchOutcome(
        vars(error).get("code") or code_of(error),
        int(SendStatus.SEND_OK),
        getattr(error, "retry_after_ms", 0),
        getattr(error, "revision", 0) - 1,
        remark=str(error)[:MAX_REMARK_CHARACTERS].encode(errors="replace").decode(),
    )


def divided(parts: Iterable[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield parts, in order, in lists that have at most so many bytes.

    Args:
        parts: The parts.
        size_of: Returns the bytes of one.
        most_bytes: The limit; a part that is over it comes in a list of its own.
    """
    found: list[T] = []
    left = most_bytes
    for part in parts:
        size = size_of(part)
        if found and size > left:
            yield found
            found, left = [], most_bytes
        found.append(part)
        left -= size
    if found:
        yield found


def refusals(
    outcomes: Sequence[BatchOutcome], sizes: Iterable[int]
) -> Iterator[BatchOutcome | None]:
    """Yield for each group of ``put_groups`` the outcome that refused it, None if it is stored.

    Args:
        outcomes: Outcomes of all batches, in order.
        sizes: Number of batches of each group.
    """
    left = iter(outcomes)
    for size in sizes:
        # The store takes all of a group or nothing of it.
        of_group = list(islice(left, size))
        yield next((one for one in of_group if one.code != ResponseCode.SUCCESS), None)


def batch_to_put(data: bytes) -> BatchToPut:
    """Return what the store needs to know of a whole, right batch."""
    header = read_header(data)
    meta = read_meta(data, header)
    return BatchToPut(meta.topic, header.queue_id, header, data, meta.tag_hashes)

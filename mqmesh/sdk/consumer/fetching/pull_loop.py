"""Pulls one message queue: one long poll after the other, as long as there is room."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Final, Protocol

import msgspec

from mqmesh.batch.record_batch import BatchHeader, check_stored
from mqmesh.errors import (
    CorruptBatch,
    MQMeshError,
    NotMaster,
    RemoteProtocolError,
    StaleGeneration,
    TopicNotFound,
)
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import (
    MAX_PULL_BYTES,
    MAX_SUSPEND_MS,
    PullRequest,
    PullResponse,
    PullStatus,
    Zone,
)
from mqmesh.sdk.client.backoff import Backoff
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch, PullSource
from mqmesh.sdk.consumer.fetching.replica_choice import MASTER_ID, ReplicaChoice, ReplicaNetwork
from mqmesh.transport.interface import OnDone
from mqmesh.units import MIB

BACKOFF_MS: Final = 100
BACKOFF_MAX_MS: Final = 1_000
REPORT_MS: Final = 60_000
"""Interval of log lines about a queue that cannot be pulled."""
CORRUPT_TRIES: Final = 5
"""Most pulls of damaged bytes before the queue is stopped."""
STOPPED_RETRY_MS: Final = 30_000
"""A stopped queue is pulled again after this: damage may have been repaired."""
BEYOND_END_TRIES: Final = 3
"""Answers that place our offset behind the broker's end before they are believed."""
BEYOND_END_RETRY_MS: Final = 1_000

_MESSAGES: Final = frozenset((PullStatus.FOUND, PullStatus.NO_NEW_MSG, PullStatus.NO_MATCHED_MSG))
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Sink of the messages of one queue."""

    @property
    def next_offset(self) -> int:
        """Queue offset to pull next."""

    def has_room(self) -> bool:
        """Return True when more may be pulled."""

    def take(self, batches: list[PulledBatch], next_offset: int, size_bytes: int) -> None:
        """Takes batches, and moves ``next_offset``.

        Args:
            batches: In order; none when all messages were filtered out.
            next_offset: Behind them.
            size_bytes: As stored.
        """

    def move(self, offset: int, *, by_admin: bool = False) -> None:
        """Goes on at another offset, because the broker does not hold ``next_offset``.

        Args:
            offset: Next queue offset.
            by_admin: An administrator moved the group: earlier progress does not count any more.
        """


class QueueSink(Sink, Protocol):
    """Sink of the messages of an assigned queue."""

    def commit_offset(self) -> int:
        """Return the queue offset before which nothing need come again."""

    def held(self) -> tuple[int, int]:
        """Return how many messages are not done, and about how many bytes; from any thread."""

    def drop(self) -> None:
        """Note that the queue was given away."""

    def is_idle(self) -> bool:
        """Return True when nothing is being worked on that the queue's next owner must wait for."""
        return True

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Calls back when ``is_idle`` is true, after ``drop``."""
        callback()

    def polled(self) -> int:
        """Return how many messages polls returned that are not acknowledged."""
        return 0

    def begun_ms(self, offset: int) -> int | None:
        """Return since when a listener has a message, monotonic; None for less than a second."""
        return None


class PullSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of pulls.

    Attributes:
        max_bytes: Size of one answer; at least one batch comes, of any size.
        suspend_ms: Longest wait of a pull that finds nothing at the broker.
        timeout_ms: Longest wait for an answer beyond that.
        zone: Location of the consumer.
    """

    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PULL_BYTES)] = MIB
    suspend_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_SUSPEND_MS)] = 15_000
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 10_000
    zone: Zone = ""


class PullCounters(msgspec.Struct):
    """Counters of a consumer's pulls.

    Attributes:
        pulls: Answers.
        messages: Messages received.
        failures: Pulls without a usable answer.
        corrupt_batches: Batches that failed their checks.
        offsets_moved: Times that a broker did not hold the offset that was due.
        replica_pulls: Answers of followers, which the master had named.
    """

    pulls: int = 0
    messages: int = 0
    failures: int = 0
    corrupt_batches: int = 0
    offsets_moved: int = 0
    replica_pulls: int = 0


class PullMeter(msgspec.Struct):
    """Totals of the pulls of a topic.

    Attributes:
        now_ms: Monotonic clock.
        messages: Messages that came.
        pulls: Answers that brought some.
        waited_ms: From these pulls to their answers, all together.
    """

    now_ms: Callable[[], int] = int
    messages: int = 0
    pulls: int = 0
    waited_ms: int = 0


class PullNetwork(Protocol):
    """Requests of a pull loop to brokers; the client's engine implements them."""

    def request(
        self, broker_name: str, code: int, on_done: OnDone, *, header: bytes, timeout_ms: int
    ) -> None:
        """Asks a broker; the outcome, bad or good, goes to ``on_done``."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        """Calls once, not before ``delay_ms``."""


class PullLoop:
    """The pulls of one queue; used in the client loop only.

    At most one pull is under way. An answer is taken whole; room is looked at before the next.

    Args:
        queue: Queue to pull.
        group: Consumer group.
        sink: Sink of messages.
        network: The client's engine.
        settings: Sizes and times.
        counters: Shared by a consumer's loops.
        selector: Filter of messages.
        source: Facts about the queue that its batches need.
        generation: Generation in which the queue was claimed, 0 if it was not.
        epochs: Of each queue, the epoch in which its place is right; kept up to date.
        replicas: Followers that the master may name; None to pull from the master only.
        on_epoch: Called with the epoch of the broker's log when it is a later one than before.
        on_stale: Called when the queue was given to another member; the loop has ended then.
        on_reset: Called when an administrator moved the group or made the topic anew, or the broker
            lost messages, before the sink is moved.
        meter: Of the topic.

    Attributes:
        waiting_for_room: Call ``resume`` when the sink may have room again.
        paused: By the user; call ``resume`` after setting it back.
        stopped: Damaged bytes hold the queue.
        dropped: The loop has ended.
        max_offset: End of the queue as of the last answer, -1 before the first.
        generation: Generation that pulls carry.
        answered_ms: Time of the last answer, 0 for never.
    """

    def __init__(
        self,
        queue: MessageQueue,
        group: str,
        sink: Sink,
        network: PullNetwork,
        settings: PullSettings,
        counters: PullCounters,
        *,
        selector: MessageSelector | None = None,
        source: PullSource | None = None,
        generation: int = 0,
        epochs: dict[MessageQueue, int] | None = None,
        replicas: ReplicaNetwork | None = None,
        on_epoch: Callable[[int], None] | None = None,
        on_stale: Callable[[StaleGeneration], None] | None = None,
        on_reset: Callable[[], None] | None = None,
        meter: PullMeter | None = None,
    ) -> None:
        self.queue = queue
        self.waiting_for_room = False
        self.paused = False
        self.stopped = False
        self.dropped = False
        self.max_offset = -1
        self.generation = generation
        self.answered_ms = 0
        self._meter = meter or PullMeter()
        self._sent_ms = 0
        self._epochs = {} if epochs is None else epochs
        self._replicas = replicas
        self._choice = None if replicas is None else ReplicaChoice(replicas.clock)
        self._on_epoch = on_epoch
        self._on_stale = on_stale
        self._group = group
        self._sink = sink
        self._network = network
        self._settings = settings
        self._counters = counters
        self._selector = selector or MessageSelector()
        self._source = source or PullSource(queue.broker_name)
        self._on_reset = on_reset
        self._busy = False
        self._backoff_ms = 0
        self._early_ms = min(settings.suspend_ms, BACKOFF_MAX_MS) or BACKOFF_MS
        self._answer_backoff = Backoff(self._meter.now_ms, self._early_ms)
        self._reported_ms = 0
        self._corrupt_tries = 0
        self._beyond_end: list[int] = []
        self._turn = 0
        self._topic_gone = False

    def resume(self) -> None:
        """Pulls, unless a pull is under way or the loop may not; call as often as you like."""
        if self.dropped or self._busy or self.paused:
            return
        # First the flag: only a worker that finds it calls ``resume`` when it makes room.
        self.waiting_for_room = True
        if not self._sink.has_room():
            return
        self.waiting_for_room = False
        self._busy = True
        self._sent_ms = self._meter.now_ms()
        turn = self._turn
        settings = self._settings
        header = encode_header(
            PullRequest(
                self._group,
                self.queue.topic,
                self.queue.queue_id,
                self._sink.next_offset,
                settings.max_bytes,
                settings.suspend_ms,
                self._selector.expression,
                self._selector.expression_type,
                self.generation,
                self._corrupt_tries > 0,
                apart=True,
                epoch=self._epochs.get(self.queue, 0),
                zone=settings.zone,
            )
        )
        replica = self._replica()
        timeout_ms = settings.suspend_ms + settings.timeout_ms
        if self._replicas is not None and replica != MASTER_ID:
            self._replicas.request(
                self.queue.broker_name,
                replica,
                RequestCode.PULL_MESSAGE,
                partial(self._take_of_replica, turn),
                header=header,
                timeout_ms=timeout_ms,
            )
            return
        self._network.request(
            self.queue.broker_name,
            RequestCode.PULL_MESSAGE,
            partial(self._take, turn),
            header=header,
            timeout_ms=timeout_ms,
        )

    def _replica(self) -> int:
        # In doubt only the master's answer counts.
        is_doubtful = self._corrupt_tries or self._beyond_end or self._topic_gone
        return MASTER_ID if self._choice is None or is_doubtful else self._choice.replica()

    def restart(self) -> None:
        """Forgets the pull under way and pulls anew, for the sink was moved."""
        self._restart(0)

    def _restart(self, delay_ms: int) -> None:
        self._turn += 1
        self._topic_gone = False
        self._beyond_end.clear()
        if self._choice is not None:
            self._choice.return_to_master()
        self._go_on(delay_ms)

    def _go_on(self, delay_ms: int) -> None:
        if delay_ms:
            self._busy = True
            self._again(delay_ms)
        else:
            self._busy = False
            self.resume()

    def reset(self, offset: int) -> None:
        """Goes on at an offset that an administrator chose; held messages are dropped."""
        self._reset(offset, 0)

    def _reset(self, offset: int, delay_ms: int) -> None:
        if offset != self._sink.next_offset:
            _log.warning(
                "%s: an administrator moved group %s from offset %d to %d",
                _named(self.queue),
                self._group,
                self._sink.next_offset,
                offset,
            )
        self.stopped = False
        self._backoff_ms = self._corrupt_tries = 0
        if self._on_reset is not None:
            self._on_reset()
        self._sink.move(offset, by_admin=True)
        self._restart(delay_ms)

    def drop(self) -> None:
        """Ends the loop; a pull under way has no effect any more."""
        self.dropped = True

    def _again(self, delay_ms: int) -> None:
        turn = self._turn

        def retry() -> None:
            if turn == self._turn:
                self._busy = False
                self.resume()

        self._network.call_later(delay_ms, retry)

    def _take(self, turn: int, outcome: Command | MQMeshError) -> None:
        if self.dropped or turn != self._turn:
            return
        self._counters.pulls += 1
        self.answered_ms = self._meter.now_ms()
        try:
            if isinstance(outcome, MQMeshError):
                raise outcome
            answer = decode_header(PullResponse, outcome.header)
            if self._choice is not None:
                self._choice.advised(answer.suggest_broker_id)
            self._receive(answer, (outcome.body, *outcome.further))
        except CorruptBatch as error:
            self._corrupt(error)
        except StaleGeneration as error:
            self.drop()
            if self._on_stale is not None:
                self._on_stale(error)
        except MQMeshError as error:
            self._topic_gone |= isinstance(error, TopicNotFound)
            self._fail(error)

    def _take_of_replica(self, turn: int, outcome: Command | MQMeshError) -> None:
        """Take a follower's answer; if it has errors, or no messages, pull from the master."""
        if self.dropped or turn != self._turn:
            return
        self._counters.replica_pulls += 1
        try:
            if isinstance(outcome, MQMeshError):
                raise outcome
            answer = decode_header(PullResponse, outcome.header)
            # It says MESSAGES_LOST where its own disk has a hole: the master may have them.
            if answer.status not in _MESSAGES:
                raise RemoteProtocolError(f"it says {PullStatus(answer.status).name}")
            # Its log may not have come to the epoch yet in which this place is known to be right.
            epoch = max(answer.epoch, self._epochs.get(self.queue, 0))
            answer = msgspec.structs.replace(answer, epoch=epoch)
            self._receive(answer, (outcome.body, *outcome.further))
        except (MQMeshError, ValueError) as error:
            _log.info("%s is pulled from its master again: %s", _named(self.queue), error)
            if self._choice is not None:
                self._choice.disappointed()
            self._busy = False
            self.resume()

    def _receive(self, answer: PullResponse, bodies: Sequence[memoryview]) -> None:
        self.max_offset = answer.max_queue_offset
        if answer.status != PullStatus.OFFSET_ILLEGAL:
            if 0 < self._epochs.get(self.queue, 0) < answer.epoch and self._on_epoch is not None:
                self._on_epoch(answer.epoch)
            self._epochs[self.queue] = answer.epoch
        if self._topic_gone and answer.status != PullStatus.OFFSET_RESET:
            self._begin_anew(answer.min_queue_offset)
            return
        if answer.status == PullStatus.OFFSET_ILLEGAL:
            self._wrong_offset(answer)
            return
        if answer.status == PullStatus.OFFSET_RESET:
            self._reset(answer.next_queue_offset, self._answer_backoff.next_delay_ms())
            return
        if answer.status == PullStatus.OFFSET_CUT:
            self._go_back(answer.next_queue_offset)
            return
        if self._beyond_end:
            self._believe(answer.min_queue_offset)
            return
        wanted = self._sink.next_offset
        if answer.status == PullStatus.FOUND:
            self._meter.pulls += 1
            self._meter.waited_ms += self.answered_ms - self._sent_ms
            self._take_batches(bodies, answer.next_queue_offset)
        elif answer.next_queue_offset > self._sink.next_offset:
            if answer.status == PullStatus.MESSAGES_LOST:
                _log.error(
                    "%s: the broker lost the messages from offset %d on; going on at %d",
                    _named(self.queue),
                    self._sink.next_offset,
                    answer.next_queue_offset,
                )
            self._sink.take([], answer.next_queue_offset, 0)
        if self._backoff_ms:
            _log.info("pulls of %s go on", _named(self.queue))
            self._backoff_ms = 0
        self._corrupt_tries = 0
        self.stopped = False
        moved = self._sink.next_offset > wanted
        if moved or self._meter.now_ms() - self._sent_ms >= self._early_ms:
            self._answer_backoff.reset()
            self._go_on(0)
        else:
            # The broker did not hold the pull, and had nothing: the next one waits here.
            self._go_on(self._answer_backoff.next_delay_ms())

    def _take_batches(self, bodies: Sequence[memoryview], next_reported: int) -> None:
        batches: list[PulledBatch] = []
        wanted = next_offset = self._sink.next_offset
        size = 0
        try:
            for body in bodies:
                position = 0
                while position < len(body):
                    header = check_stored(body, position)
                    self._check_place(header, next_offset)
                    end = header.next_queue_offset
                    if end > next_offset:
                        # The first batch may begin before the requested offset.
                        first = max(next_offset, header.base_queue_offset)
                        batch = PulledBatch(self._source, body, position, header, first)
                        if batch.offsets is not None and not self._source.filtered:
                            self._check_whole(batch)
                        if batch.count:
                            batches.append(batch)
                        next_offset = end
                        self._counters.messages += batch.count
                        self._meter.messages += batch.count
                    position += header.total_size
                    size += header.total_size
            if self._source.filtered:
                next_offset = max(next_offset, next_reported)
        finally:
            # Batches before a damaged one are good, so they are taken in any case.
            if next_offset > wanted:
                self._sink.take(batches, next_offset, size)
        if next_offset == wanted:
            raise RemoteProtocolError(f"{_named(self.queue)}: an answer without the offset asked")

    def _check_place(self, header: BatchHeader, next_offset: int) -> None:
        # Only a filter may leave something out.
        is_gap = header.base_queue_offset > next_offset
        if header.queue_id != self.queue.queue_id or (is_gap and not self._source.filtered):
            raise RemoteProtocolError(
                f"{_named(self.queue)}: a batch of queue {header.queue_id} at offset "
                f"{header.base_queue_offset} instead of {next_offset}"
            )

    def _check_whole(self, batch: PulledBatch) -> None:
        # A group with a rate gets batches that end early, but has all messages of theirs.
        if batch.count != batch.end - batch.first:
            raise RemoteProtocolError(
                f"{_named(self.queue)}: {batch.count} messages from offset {batch.first} to "
                f"{batch.end}, without a filter"
            )

    def _fail(self, error: MQMeshError) -> None:
        self._counters.failures += 1
        now_ms = self._meter.now_ms()
        if not self._backoff_ms or now_ms - self._reported_ms >= REPORT_MS:
            self._reported_ms = now_ms
            _log.warning("%s cannot be pulled; trying again: %s", _named(self.queue), error)
        delay_ms = self._backoff_ms or BACKOFF_MS
        # Another replica will lead in a moment.
        longer_ms = delay_ms if isinstance(error, NotMaster) else delay_ms * 2
        self._backoff_ms = min(longer_ms, BACKOFF_MAX_MS)
        self._again(max(delay_ms, getattr(error, "retry_after_ms", 0)))

    def _corrupt(self, error: CorruptBatch) -> None:
        self._counters.corrupt_batches += 1
        self._corrupt_tries += 1
        where = f"{_named(self.queue)}, offset {self._sink.next_offset}"
        if self._corrupt_tries < CORRUPT_TRIES:
            _log.warning("damaged batch at %s; asking again: %s", where, error)
            self._again(BACKOFF_MS)
            return
        if not self.stopped:
            _log.error(
                "damaged batch at %s, %d times; the queue is stopped, nothing is skipped: %s",
                where,
                self._corrupt_tries,
                error,
            )
        self.stopped = True
        self._again(STOPPED_RETRY_MS)

    def _begin_anew(self, min_queue_offset: int) -> None:
        # Its offsets count other messages: where we were may lie in the middle of them.
        _log.warning(
            "%s: the topic was deleted and made anew; going on at %d, its first message",
            _named(self.queue),
            min_queue_offset,
        )
        self._backoff_ms = 0
        if self._on_reset is not None:
            self._on_reset()
        self._sink.move(min_queue_offset)
        self.restart()

    def _go_back(self, offset: int) -> None:
        # The broker has lost messages that we hold; others have, or will have, their offsets.
        self._counters.offsets_moved += 1
        _log.error(
            "%s: the broker lost messages before offset %d, where we were; going on at %d",
            _named(self.queue),
            self._sink.next_offset,
            offset,
        )
        self._backoff_ms = self._corrupt_tries = 0
        if self._on_reset is not None:
            self._on_reset()
        self._sink.move(offset, by_admin=True)
        self._restart(self._answer_backoff.next_delay_ms())

    def _wrong_offset(self, answer: PullResponse) -> None:
        wanted = self._sink.next_offset
        where = f"{_named(self.queue)}: offset {wanted}"
        self._counters.offsets_moved += 1
        if wanted < answer.min_queue_offset:
            _log.warning(
                "%s is gone; going on at %d, the first that the broker holds",
                where,
                answer.min_queue_offset,
            )
            self._sink.move(answer.min_queue_offset)
            self._again(self._answer_backoff.next_delay_ms())
            return
        self._beyond_end.append(answer.max_queue_offset)
        _log.warning("%s lies behind the end, %d", where, answer.max_queue_offset)
        if len(self._beyond_end) < BEYOND_END_TRIES:
            self._again(BEYOND_END_RETRY_MS)
        else:
            self._believe(answer.min_queue_offset)

    def _believe(self, min_queue_offset: int) -> None:
        # A broker that lost its tail fills the lost offsets with other messages, perhaps before
        # we ask again. To repeat some is allowed, to skip one is not: so the lowest end that it
        # ever reported is where we go on.
        end = max(min(self._beyond_end), min_queue_offset)
        _log.error(
            "%s: the broker lost messages before offset %d, where we were; going on at %d",
            _named(self.queue),
            self._sink.next_offset,
            end,
        )
        self._beyond_end.clear()
        self._sink.move(end)
        self._again(0)


def _named(queue: MessageQueue) -> str:
    return f"{queue.topic}:{queue.broker_name}:{queue.queue_id}"

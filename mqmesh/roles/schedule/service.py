"""The schedule service as a state machine: follows the schedule topic, says what is due.

Pure: connection, timers, clock and timetable are given; ``server.py`` has them. The
states are those of ``State``; a session begins with every connection, and again whenever
a request of it fails for good.
"""

import enum
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from mqmesh.batch.schedule_record import Run, ScheduleAction, decode_record, encode_runs
from mqmesh.clock import Clock
from mqmesh.errors import (
    CorruptBatch,
    CorruptRecord,
    MQMeshError,
    OffsetIllegal,
    RemoteProtocolError,
    StorageError,
    TransportError,
)
from mqmesh.metrics import Measured, counter, gauge, text
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.schedule import (
    MAX_RETRY_GROUPS,
    MAX_RUNS,
    CancelVerdict,
    DeliverDueRequest,
    DeliverDueResponse,
    DueStatus,
    OpenScheduleRequest,
    OpenScheduleResponse,
    PullScheduleRequest,
    PullScheduleResponse,
    RefuseCancelRequest,
    ScheduleNews,
)
from mqmesh.roles.schedule.broker_clock import BrokerClock
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.roles.schedule.retry_counts import ChunkId
from mqmesh.roles.schedule.timetable import Found, Taken, Timetable

IDLE_MS: Final = 1_000
"""Interval at which a silent broker is queried: its clock may have been set."""
BACKLOG_MESSAGES: Final = 1_000
"""Messages in one request from which on the next follows at once."""
CANCEL_AGAIN_MS: Final = 20
CANCEL_TRIES: Final = 100
FORGET_EVERY_MS: Final = 20
REQUEST_TIMEOUT_MS: Final = 30_000

OnAnswer = Callable[[Command | MQMeshError], None]

_log = logging.getLogger(__name__)


class SessionState(enum.Enum):
    """States of a session."""

    AWAY = "away"
    OPENING = "opening"
    CATCHING_UP = "catching up"
    """The service reads what was stored, and done, while it was away."""
    SERVING = "running"


class ScheduleStatus(msgspec.Struct, frozen=True):
    """Status of the service at one moment.

    Attributes:
        state: State of the session.
        sessions: Number of sessions begun.
        pending: Delayed messages that wait.
        late_ms: How long the first of them is due, also while it is being delivered; 0 if none is,
            or unless the session serves.
        in_flight: Deliveries that the broker has not answered yet.
        delivered: Messages.
        refused: Requests that the broker refused.
        rebuilds: Times that the timetable was made anew.
    """

    state: SessionState
    sessions: int
    pending: int
    late_ms: int
    in_flight: int
    delivered: int
    refused: int
    rebuilds: int


class Broker(Protocol):
    """The connection to the broker."""

    def request(
        self,
        code: int,
        on_done: OnAnswer,
        *parts: bytes,
        header: bytes = b"",
        timeout_ms: int = 3_000,
    ) -> None:
        """Sends a request."""

    def oneway(self, code: int, *parts: bytes, header: bytes = b"") -> None:
        """Sends a request that gets no answer."""


class PlannedCall(Protocol):
    """Handle of a planned call."""

    def cancel(self) -> None:
        """Cancels the call."""


class ScheduleService:
    """One service, through all its sessions.

    Args:
        config: Settings.
        clock: Monotonic time.
        call_later: Plans a call, in ms.
        open_table: The timetable as it stands on disk; with True, a new one.
        boot_id: Boot id of the running system.
        on_session_lost: Called when the broker does not go on with a session, or begins none:
            it may lead no more.

    Attributes:
        state: State of the session.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        clock: Clock,
        call_later: Callable[[int, Callable[[], None]], PlannedCall],
        open_table: Callable[[bool], Timetable],
        boot_id: bytes,
        on_session_lost: Callable[[], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._call_later = call_later
        self._open_table = open_table
        self._boot_id = boot_id
        self._on_session_lost = on_session_lost
        self._broker: Broker | None = None
        self.state = SessionState.AWAY
        self._sessions = self._delivered = self._refused = self._rebuilds = 0
        self._table: Timetable | None = None
        self._time = BrokerClock()
        # Answers of an earlier session, or for an earlier table, mean nothing.
        self._era = 0
        self._session = 0
        self._pulling = False
        self._pull_wanted = False
        self._in_flight = 0
        self._rolling = False
        self._rolled_unread = False
        self._roll_before = 0
        self._start_offset = 0
        self._sent_ms = 0
        self._paused_until_ms = 0
        self._work: PlannedCall | None = None
        self._work_due_ms = 0
        self._idle: PlannedCall | None = None
        self._report_anew = True
        self._forgetting = False
        self._suspect = ""

    # ---- Sessions --------------------------------------------------------------------

    def on_connected(self, broker: Broker) -> None:
        """Begins a session on a new connection; earlier requests will not be answered."""
        self._leave()
        self._broker = broker
        self._open()

    def on_disconnected(self) -> None:
        """Ends the session: the connection broke."""
        self._leave()
        self._broker = None

    @property
    def in_session(self) -> bool:
        """True while the broker serves it."""
        return self.state in (SessionState.CATCHING_UP, SessionState.SERVING)

    def status(self) -> ScheduleStatus:
        """Return the status at this moment."""
        table = self._table
        due_ms = None
        if table is not None and self.state is SessionState.SERVING:
            due_ms = table.next_due_ms(also_leaving=True)
        now_ms = self._time.wall_ms(self._clock.monotonic_ms())
        return ScheduleStatus(
            self.state,
            self._sessions,
            0 if table is None else table.state.pending,
            0 if due_ms is None else max(now_ms - due_ms, 0),
            self._in_flight,
            self._delivered,
            self._refused,
            self._rebuilds,
        )

    def close(self) -> Timetable | None:
        """Ends the work; returns the timetable, which is at rest, if it was opened."""
        self._leave()
        self._broker = None
        table, self._table = self._table, None
        return table

    def _leave(self) -> None:
        self._era += 1
        self.state = SessionState.AWAY
        self._in_flight = 0
        self._pulling = self._pull_wanted = self._rolling = self._rolled_unread = False
        for timer in (self._work, self._idle):
            if timer is not None:
                timer.cancel()
        self._work = self._idle = None

    def _begin_again(self, error: MQMeshError) -> None:
        """Ends a session for a reason that waiting may mend."""
        _log.warning("the session with %s is over: %s", self._config.broker_name, error)
        self._leave()
        era = self._era

        def again() -> None:
            if self._era == era and self._broker is not None:
                self._open()

        self._call_later(self._config.retry_ms, again)
        self._on_session_lost()

    def _open(self) -> None:
        self.state = SessionState.OPENING
        header = encode_header(OpenScheduleRequest(self._config.name))
        self._ask(RequestCode.OPEN_SCHEDULE, header, b"", self._opened, self._begin_again)

    def _opened(self, answer: Command) -> None:
        opened = decode_header(OpenScheduleResponse, answer.header)
        self._session = opened.session
        self._sessions += 1
        self._time = BrokerClock()
        self._note_time(opened.now_ms)
        # From disk each time: the state in memory may be ahead of it after an error.
        table = None if self._suspect else self._open_table(False)
        why = self._suspect
        if table is not None:
            why = table.begin(opened.store_id, opened.epoch, self._boot_id)
        if table is None or why:
            _log.warning("the timetable is made anew from the broker's log: %s", why)
            self._rebuilds += 1
            table = self._open_table(True)
            table.begin(opened.store_id, opened.epoch, self._boot_id)
        self._suspect = ""
        self._report_anew = True
        self._table = table
        self.state = SessionState.CATCHING_UP
        self._pull()

    # ---- The schedule topic ------------------------------------------------------------

    def on_command(self, command: Command) -> None:
        """Takes a command that the broker sends by itself.

        Raises:
            RemoteProtocolError: The command is malformed.
        """
        if command.code != RequestCode.NOTIFY_SCHEDULE:
            return
        notice = decode_header(ScheduleNews, command.header)
        if notice.ticket:
            self._cancel(notice, self._era, CANCEL_TRIES)
        elif self.in_session:
            self._pull()

    def _pull(self) -> None:
        if self._pulling:
            self._pull_wanted = True
            return
        table = self._table
        assert table is not None
        self._pulling, self._pull_wanted = True, False
        if self._idle is not None:
            self._idle.cancel()
        serving = self.state is SessionState.SERVING
        lowest = table.lowest_place() if serving else None
        is_anew = serving and self._report_anew
        self._report_anew = self._report_anew and not serving
        request = PullScheduleRequest(
            self._session,
            table.state.cursors,
            -1 if lowest is None else lowest,
            serving,
            table.state.pending if serving else -1,
            table.state.epoch,
            table.state.settled,
            table.retries.report(MAX_RETRY_GROUPS) if serving else [],
            is_anew,
        )
        header = encode_header(request)
        self._ask(RequestCode.PULL_SCHEDULE, header, b"", self._pulled, self._pull_failed)

    def _pull_failed(self, error: MQMeshError) -> None:
        if isinstance(error, OffsetIllegal):
            self._suspect = str(error)  # the log lost messages that the table has
        self._begin_again(error)

    def _pulled(self, answer: Command) -> None:
        table = self._table
        assert table is not None
        found = decode_header(PullScheduleResponse, answer.header)
        self._pulling = False
        self._note_time(found.now_ms)
        table.state.epoch = found.epoch
        moved = found.cursors != table.state.cursors
        if found.entries or found.records or found.cursors != table.state.cursors:
            table.add(found.entries, [_runs_of(body) for body in found.records], found.cursors)
        if found.start_offset > self._start_offset:
            self._start_offset = found.start_offset
            self._forget()
        if self._pull_wanted or (found.more and moved):
            self._pull()
        elif found.more:
            # A damaged queue, which the broker repairs.
            self._idle = self._call_later(IDLE_MS, self._guarded(self._pull))
        else:
            self._rolled_unread = False
            if self.state is SessionState.CATCHING_UP:
                self.state = SessionState.SERVING
                _log.info("%d delayed messages wait", table.state.pending)
                self._pull()  # says what is known now
            self._idle = self._call_later(IDLE_MS, self._guarded(self._pull))
        self._roll_before = found.roll_before
        self._roll()
        self._plan()

    def _forget(self) -> None:
        if not self._forgetting:
            self._forgetting = True
            self._call_later(FORGET_EVERY_MS, self._forget_some)

    def _forget_some(self) -> None:
        self._forgetting = False
        if self._table is not None:
            try:
                if self._table.forget_before(self._start_offset):
                    self._forget()
            except StorageError as error:
                self._fail(error)

    # ---- What is due -------------------------------------------------------------------

    def _plan(self) -> None:
        """Plans the next look at the timetable, if it is not planned for earlier."""
        table = self._table
        if table is None or self.state is not SessionState.SERVING:
            return
        if self._in_flight >= self._config.max_requests_in_flight:
            return
        due_ms = table.next_due_ms()
        if due_ms is None:
            return
        now_ms = self._clock.monotonic_ms()
        wait_ms = max(due_ms - self._time.wall_ms(now_ms), 0)
        wait_ms = max(wait_ms, self._sent_ms + self._config.pace_ms - now_ms)
        wait_ms = max(wait_ms, self._paused_until_ms - now_ms)
        wait_ms = min(wait_ms, IDLE_MS)  # the broker's clock may be set
        if self._work is not None:
            if self._work_due_ms <= now_ms + wait_ms:
                return
            self._work.cancel()
        self._work_due_ms = now_ms + wait_ms
        self._work = self._call_later(wait_ms, self._guarded(self._look))

    def _look(self) -> None:
        self._work = None
        table = self._table
        now_ms = self._clock.monotonic_ms()
        if table is None or now_ms < self._paused_until_ms:
            self._plan()
            return
        while self._in_flight < self._config.max_requests_in_flight:
            taken = table.take(self._time.wall_ms(now_ms))
            if taken is None:
                break
            self._sent_ms = now_ms
            self._in_flight += 1
            self._deliver(taken)
            if sum(count for _, _, count in taken.runs) < BACKLOG_MESSAGES:
                break
        self._plan()

    def _deliver(self, taken: Taken) -> None:
        table = self._table
        assert table is not None
        request = DeliverDueRequest(self._session, ScheduleAction.DELIVER)

        def done(answer: Command) -> None:
            self._in_flight -= 1
            response = decode_header(DeliverDueResponse, answer.header)
            runs = table.settle(taken, response.statuses, response.record_offset)
            self._delivered += sum(count for _, _, count in runs)
            early = DueStatus.NOT_DUE in response.statuses
            self._note_time(response.now_ms, exact=early)
            if len(response.statuses) < len(taken.runs) or len(runs) >= BACKLOG_MESSAGES:
                self._sent_ms = 0  # a backlog: no pace
            self._plan()

        def failed(error: MQMeshError) -> None:
            if isinstance(error, TransportError):
                self._begin_again(error)  # it may still be carried out, so it is not sent again
                return
            self._in_flight -= 1
            self._refused += 1
            _log.warning("deliveries were refused: %s", error)
            table.put_back(taken)
            self._pause(error)
            self._pull()  # shows whether the session stands
            self._plan()

        # Owners are counted from the first run, so the request may be cut.
        body = encode_runs(taken.runs[:MAX_RUNS])
        self._ask(RequestCode.DELIVER_DUE, encode_header(request), body, done, failed)

    def _pause(self, error: MQMeshError) -> None:
        pause_ms = max(getattr(error, "retry_after_ms", 0), self._config.retry_ms)
        self._paused_until_ms = self._clock.monotonic_ms() + pause_ms

    # ---- Retention and cancelling --------------------------------------------------------

    def _roll(self) -> None:
        table = self._table
        if table is None or self._rolling or not self._roll_before:
            return
        if (
            self.state is not SessionState.SERVING
            or self._clock.monotonic_ms() < self._paused_until_ms
        ):
            return
        runs, chunk_ids = table.to_roll(self._roll_before)
        if not runs:
            return
        self._rolling = True

        def done() -> None:
            self._rolling = False
            self._rolled_unread = True
            self._pull()  # they are in the topic anew; and there may be more to roll

        self._change(ScheduleAction.ROLL, runs[:MAX_RUNS], chunk_ids, 0, done)

    def _cancel(self, notice: ScheduleNews, era: int, tries: int) -> None:
        table = self._table
        if self._era != era:
            return
        found = Found.LEAVING
        runs: list[Run] = []
        chunk_ids: list[ChunkId] = []
        if table is not None and self.state is SessionState.SERVING:
            found, runs, chunk_ids = table.find(notice.producer_id, notice.sequence)
            if found is Found.UNKNOWN and self._pulling:
                found = Found.LEAVING  # it may be among what is coming just now
            elif found is Found.OVER and self._rolled_unread:
                found = Found.LEAVING  # or its new place is
        if found is Found.WAITS:
            self._change(ScheduleAction.CANCEL, runs, chunk_ids, notice.ticket, lambda: None)
        elif found is Found.LEAVING and tries:
            again = self._guarded(lambda: self._cancel(notice, era, tries - 1))
            self._call_later(CANCEL_AGAIN_MS, again)
        elif self._broker is not None:
            verdict = {
                Found.UNKNOWN: CancelVerdict.UNKNOWN,
                Found.OVER: CancelVerdict.OVER,
            }.get(found, CancelVerdict.LEAVING)
            refusal = RefuseCancelRequest(self._session, notice.ticket, verdict)
            self._broker.oneway(RequestCode.REFUSE_CANCEL, header=encode_header(refusal))

    def _change(
        self,
        action: ScheduleAction,
        runs: list[Run],
        chunk_ids: list[ChunkId],
        ticket: int,
        then: Callable[[], None],
    ) -> None:
        """Cancels or rolls messages; no other work changes their chunks meanwhile."""
        table = self._table
        assert table is not None
        table.hold(chunk_ids)
        request = DeliverDueRequest(self._session, action, ticket)

        def done(answer: Command) -> None:
            response = decode_header(DeliverDueResponse, answer.header)
            table.remove(runs[: len(response.statuses)], response.record_offset)
            table.release(chunk_ids)
            then()
            self._plan()

        def failed(error: MQMeshError) -> None:
            if isinstance(error, TransportError):
                self._begin_again(error)
                return
            self._refused += 1
            _log.warning("%s was refused: %s", action.name.lower(), error)
            table.release(chunk_ids)
            self._pause(error)
            then()
            self._plan()

        self._ask(RequestCode.DELIVER_DUE, encode_header(request), encode_runs(runs), done, failed)

    # ---- Helpers -----------------------------------------------------------------------

    def _note_time(self, broker_ms: int, *, exact: bool = False) -> None:
        self._time.note(broker_ms, self._clock.monotonic_ms(), exact=exact)

    def _ask(
        self,
        code: RequestCode,
        header: bytes,
        body: bytes,
        on_answer: Callable[[Command], None],
        on_error: Callable[[MQMeshError], None],
    ) -> None:
        era = self._era

        def done(answer: Command | MQMeshError) -> None:
            if self._era != era:
                return
            try:
                if isinstance(answer, MQMeshError):
                    on_error(answer)
                else:
                    on_answer(answer)
            except StorageError as error:
                self._fail(error)
            except RemoteProtocolError as error:
                self._begin_again(error)

        assert self._broker is not None
        self._broker.request(
            code, done, *((body,) if body else ()), header=header, timeout_ms=REQUEST_TIMEOUT_MS
        )

    def _guarded(self, callback: Callable[[], None]) -> Callable[[], None]:
        era = self._era

        def call() -> None:
            if self._era == era:
                try:
                    callback()
                except StorageError as error:
                    self._fail(error)

        return call

    def _fail(self, error: StorageError) -> None:
        """Gives up the table: it is read from disk again, or made anew when it is damaged."""
        self._suspect = str(error) if isinstance(error, CorruptRecord) else ""
        self._table = None
        self._begin_again(error)


def _runs_of(record: bytes) -> list[Run]:
    try:
        return decode_record(record)[1]
    except CorruptBatch as error:
        _log.error("a record of the schedule topic is lost: %s", error)
        return []


SCHEDULE_METRICS: Final[tuple[Measured[ScheduleStatus], ...]] = (
    text(
        "session_state",
        "of the session with the broker: away, opening, catching up, running",
        lambda one: one.state.value,
    ),
    counter("sessions_total", "sessions with the broker that were begun", lambda one: one.sessions),
    gauge(
        "pending_messages",
        "delayed messages that wait",
        lambda one: one.pending,
        unit="messages",
        rocketmq_name="rocketmq_timing_messages",
    ),
    gauge(
        "late_ms",
        "how long the first message that waits is due",
        lambda one: one.late_ms,
        rocketmq_name="rocketmq_timer_dequeue_latency",
    ),
    gauge(
        "deliveries_in_flight",
        "deliveries that the broker has not answered yet",
        lambda one: one.in_flight,
    ),
    counter(
        "delivered_messages_total",
        "delayed messages that went on their way",
        lambda one: one.delivered,
        unit="messages",
        rocketmq_name="rocketmq_timer_dequeue_total",
    ),
    counter(
        "refused_requests_total",
        "deliveries, cancellations and moves that the broker refused",
        lambda one: one.refused,
    ),
    counter(
        "timetable_rebuilds_total",
        "times that the timetable was made anew from the log",
        lambda one: one.rebuilds,
    ),
)

"""One filter of one consumer group: its process, the pulls that wait for it, and its state.

Pure: processes are made by a callable that ``server.py`` gives. Damage that a filter does to its
process affects this filter alone: its pulls are refused for a while, with the reason, and no
message is skipped, so none is lost.
"""

import enum
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import BrokerError, BrokerNotAvailable, FilterFailed, NoPermission, SystemBusy
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.filtersrv.worker_places import RETRY_MS, WorkerPlaces
from mqmesh.sandbox.frames import Answer, Status, failure_text

BACKOFF_MS: Final = 200
BACKOFF_MAX_MS: Final = 5_000
RAISED_RETRY_MS: Final = 1_000
"""Time after which a filter that raised gets the same messages again."""
BUSY_RETRY_MS: Final = 100
LOG_EVERY_MS: Final = 10_000
"""A filter that raises again and again is logged no more often."""

OnMatched = Callable[[bytes | BrokerError], None]
OnLoaded = Callable[[list[str] | BrokerError], None]

_log = logging.getLogger(__name__)


class FilterState(enum.Enum):
    """States of a filter."""

    STOPPED = "stopped"
    """The filter has no process, and gets one with the next messages."""
    LOADING = "loading"
    READY = "ready"
    WAITING = "waiting"
    """The filter's process died a moment ago."""
    PARKED = "parked"
    """The filter's process died again and again."""
    REFUSED = "refused"
    """The filter cannot be loaded, ever."""


class Worker(Protocol):
    """Process of a filter; ``WorkerProcess`` is one."""

    pid: int

    def ask(self, parts: list[bytes | memoryview], messages: int, deadline_ms: int) -> None:
        """Asks about batches."""

    def close(self) -> None:
        """Ends it; its callbacks are called no more."""


StartWorker = Callable[[str, Callable[[Answer], None], Callable[[str], None]], Worker]
"""Function that starts a process for a source; it calls back with answers, and with its death."""


class _Job(msgspec.Struct):
    parts: list[bytes | memoryview]
    messages: int
    size: int
    on_done: OnMatched


class FilterRunner:
    """Runner of one filter.

    Args:
        group: Consumer group.
        filter_id: Name of the filter.
        source: The filter.
        config: Settings.
        start_worker: Starts a process.
        places: Number of processes that may run.
        clock: Source of time.
        user: User that uploaded it.

    Attributes:
        group, filter_id, user: As above.
        pulls: Pulls under way.
        pending_bytes: Messages that wait for it.
        matched, passed_over: Messages.
        deaths: Processes that died.
    """

    def __init__(
        self,
        group: str,
        filter_id: str,
        source: str,
        config: FiltersrvConfig,
        start_worker: StartWorker,
        places: WorkerPlaces,
        clock: Clock,
        *,
        user: str,
    ) -> None:
        self.user = user
        self.group = group
        self.filter_id = filter_id
        self.pulls = 0
        self.matched = 0
        self.passed_over = 0
        self.deaths = 0
        self._source = source
        self._config = config
        self._start_worker = start_worker
        self._places = places
        self._free_since_ms = 0
        self._clock = clock
        self._worker: Worker | None = None
        self._state = FilterState.STOPPED
        self._reason = ""
        self._resume_ms = 0
        self._failures = 0
        self._jobs: deque[_Job] = deque()
        self._current: _Job | None = None
        self.pending_bytes = 0
        self._loading: list[OnLoaded] = []
        self._rungs: list[str] = []
        self._began_ms = 0
        self._busy_ms = 0
        self._used_ms = clock.monotonic_ms()
        self._logged_ms: int | None = None

    @property
    def state(self) -> FilterState:
        """State now; waiting ends by itself."""
        resting = self._state in (FilterState.WAITING, FilterState.PARKED)
        if resting and self._clock.monotonic_ms() >= self._resume_ms:
            self._state = FilterState.STOPPED
        return self._state

    @property
    def name(self) -> str:
        """Name for logs and errors."""
        return f"filter {self.filter_id[:8]} of group {self.group}"

    @property
    def free_ms(self) -> int:
        """Time for which its process has had nothing to do, ms; 0 while it has."""
        if self._state is not FilterState.READY or self._jobs or self._current or self._loading:
            return 0
        return self._clock.monotonic_ms() - self._free_since_ms

    def rest(self) -> None:
        """Ends its process; the next messages get a new one."""
        self._end_worker()
        self._state = FilterState.STOPPED

    def give_way(self) -> None:
        """Ends its process though it has something to do: other users have their share."""
        self.rest()
        self._fail_all(
            SystemBusy(
                f"{self.name} gave its place to a filter of another user, or of another turn "
                "(max_total_worker_memory_bytes)",
                retry_after_ms=RETRY_MS,
            )
        )

    def idle_ms(self) -> int:
        """Return the time since its last request."""
        if self.pulls or self._jobs or self._current or self._loading:
            return 0
        return self._clock.monotonic_ms() - self._used_ms

    def check_usable(self) -> None:
        """Refuses what would be refused anyway.

        Raises:
            FilterFailed: The filter rests after a failure, or cannot be loaded.
            SystemBusy: Too much waits for it.
        """
        self._used_ms = self._clock.monotonic_ms()
        state = self.state
        if state in (FilterState.WAITING, FilterState.PARKED, FilterState.REFUSED):
            raise self._failure()
        if self.pending_bytes >= self._config.max_pending_bytes:
            raise SystemBusy(
                f"{self.pending_bytes} bytes wait for {self.name} (max_pending_bytes)",
                retry_after_ms=BUSY_RETRY_MS,
            )

    def begin_pull(self) -> None:
        """Begins a pull through the filter; ``end_pull`` must follow.

        Raises:
            FilterFailed: As ``check_usable``.
            SystemBusy: As there, or too many do.
        """
        self.check_usable()
        if self.pulls >= self._config.max_pulls_per_filter:
            raise SystemBusy(
                f"{self.pulls} pulls wait for {self.name}, no more may (max_pulls_per_filter)",
                retry_after_ms=BUSY_RETRY_MS,
            )
        self.pulls += 1

    def end_pull(self) -> None:
        """Ends a pull: it is answered."""
        self.pulls -= 1
        self._used_ms = self._clock.monotonic_ms()

    def load(self, on_loaded: OnLoaded) -> None:
        """Has it loaded; calls back with the rungs that confine it, or why it cannot be used.

        Raises:
            FilterFailed, SystemBusy: As ``check_usable``.
        """
        self.check_usable()
        if self.state is FilterState.READY:
            on_loaded(self._rungs)
            return
        self._loading.append(on_loaded)
        self._go_on()

    def match(self, parts: list[bytes | memoryview], messages: int, on_done: OnMatched) -> None:
        """Asks it about messages, behind all that waits.

        Args:
            parts: Whole batches, checked.
            messages: Number of messages that they hold, from 1.
            on_done: Called with one byte a message (1 match, 0 none), or why there is no answer.
        """
        size = sum(map(len, parts))
        try:
            self.check_usable()
        except BrokerError as error:
            on_done(error)
            return
        self.pending_bytes += size
        self._jobs.append(_Job(parts, messages, size, on_done))
        self._go_on()

    def close(self) -> None:
        """Ends its process; waiting requests fail, and their clients try again."""
        self._end_worker()
        self._state = FilterState.STOPPED
        self._fail_all(BrokerNotAvailable(f"{self.name} was stopped"))

    # ---- The process -------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._worker is None:
            self._start()
        elif self._state is FilterState.READY and self._current is None and self._jobs:
            job = self._current = self._jobs.popleft()
            self._began_ms = self._clock.monotonic_ms()
            self._worker.ask(job.parts, job.messages, self._config.match_timeout_ms)

    def _start(self) -> None:
        try:
            self._places.take(self)
        except SystemBusy as error:
            self._fail_all(error)
            return
        self._state = FilterState.LOADING
        self._busy_ms = 0
        try:
            self._worker = self._start_worker(self._source, self._on_answer, self._on_death)
        except OSError as error:
            self._on_death(f"its process cannot be started: {error.strerror or error}")

    def _on_answer(self, answer: Answer) -> None:
        if self._state is FilterState.LOADING:
            self._loaded(answer)
        else:
            self._judged(answer)
        if self._jobs:
            self._go_on()

    def _loaded(self, answer: Answer) -> None:
        if answer.status is not Status.READY:
            unconfined = answer.status is Status.UNCONFINED
            self._refuse(failure_text(answer.body), forbidden=unconfined)
            return
        try:
            self._rungs = msgspec.msgpack.decode(answer.body, type=list[str])
        except msgspec.MsgspecError:
            self._rungs = []
        self._state = FilterState.READY
        self._free_since_ms = self._clock.monotonic_ms()
        assert self._worker is not None
        _log.info("%s runs in process %d: %s", self.name, self._worker.pid, ", ".join(self._rungs))
        waiting, self._loading = self._loading, []
        for on_loaded in waiting:
            on_loaded(self._rungs)

    def _judged(self, answer: Answer) -> None:
        job, self._current = self._current, None
        assert job is not None
        now_ms = self._clock.monotonic_ms()
        self._used_ms = self._free_since_ms = now_ms
        self._busy_ms += now_ms - self._began_ms
        self.pending_bytes -= job.size
        if self._busy_ms > self._config.worker_cpu_s * 500:
            _log.info("%s gets a new process: half of its processor time is used up", self.name)
            self._end_worker()
            self._state = FilterState.STOPPED
        # The callback may ask again at once; so it comes last.
        if answer.status is Status.MATCHED:
            self._failures = 0
            hits = answer.body.count(1)
            self.matched += hits
            self.passed_over += job.messages - hits
            job.on_done(answer.body)
        else:
            text = failure_text(answer.body)
            if self._logged_ms is None or now_ms - self._logged_ms >= LOG_EVERY_MS:
                self._logged_ms = now_ms
                _log.warning("%s failed, its consumers wait: %s", self.name, text)
            job.on_done(FilterFailed(f"{self.name}: {text}", retry_after_ms=RAISED_RETRY_MS))

    def _on_death(self, reason: str) -> None:
        self._worker = None
        self._places.give_back(self)
        self.deaths += 1
        self._failures += 1
        now_ms = self._clock.monotonic_ms()
        self._reason = reason
        if self._failures >= self._config.failures_to_park:
            self._state = FilterState.PARKED
            self._resume_ms = now_ms + self._config.park_ms
            _log.error(
                "%s is parked for %g s, its consumers wait: its process died %d times, at last: %s",
                self.name,
                self._config.park_ms / 1_000,
                self._failures,
                reason,
            )
        else:
            self._state = FilterState.WAITING
            delay_ms = min(BACKOFF_MS << (self._failures - 1), BACKOFF_MAX_MS)
            self._resume_ms = now_ms + delay_ms
            _log.warning("%s lost its process, its consumers wait: %s", self.name, reason)
        self._fail_all(self._failure())

    def _refuse(self, text: str, *, forbidden: bool) -> None:
        self._end_worker()
        self._state = FilterState.REFUSED
        self._reason = text
        _log.warning("%s is refused: %s", self.name, text)
        error = NoPermission(f"{self.name}: {text}") if forbidden else self._failure()
        self._fail_all(error)

    def _failure(self) -> FilterFailed:
        left_ms = max(self._resume_ms - self._clock.monotonic_ms(), 0)
        if self._state is FilterState.REFUSED:
            return FilterFailed(f"{self.name}: {self._reason}")
        verb = "is parked" if self._state is FilterState.PARKED else "waits"
        return FilterFailed(
            f"{self.name} {verb}, {self._failures} failures in a row: {self._reason}",
            retry_after_ms=left_ms,
        )

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            self._places.give_back(self)

    def _fail_all(self, error: BrokerError) -> None:
        jobs = [*([self._current] if self._current else []), *self._jobs]
        loading, self._loading = self._loading, []
        self._current = None
        self._jobs.clear()
        self.pending_bytes = 0
        for job in jobs:
            job.on_done(error)
        for on_loaded in loading:
            on_loaded(error)

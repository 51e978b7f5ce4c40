"""The broker's side of its index process: starts it, sends it the end of the log, asks it.

Pure: processes and connections are made by callables that ``server.py`` gives. The
broker itself never touches the index, and no message waits for it.
"""

import logging
import signal
from collections import deque
from collections.abc import Callable
from pathlib import PurePath
from typing import Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import (
    BrokerNotAvailable,
    ClientError,
    MQMeshError,
    RemoteProtocolError,
    SystemBusy,
    TransportError,
)
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.queries import AdvanceIndexRequest, IndexProgress
from mqmesh.protocol.snapshots import CopyIndexRequest
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.index.index_status import IndexStatus
from mqmesh.roles.helper_process import HelperProcess
from mqmesh.roles.supervisor.restart_policy import RestartPolicy, describe_exit

TICK_MS: Final = 50
"""Interval at which the process is sent the extent of the log while it is behind."""
IDLE_MS: Final = 1_000
"""Interval at which it is asked when nothing has changed."""
REFUSED_MS: Final = 5_000
"""Time for which it is left alone after it refused."""
HANG_MS: Final = 30_000
"""A process that does not answer for so long is killed and started again."""
START_DELAY_MS: Final = 100
SOON_MS: Final = 1_000
"""Queries wait for a process that will be started so soon."""
ANSWER_MARGIN_MS: Final = 500
"""Time that the way to the process and back may add to ``index.query_timeout_ms``."""
MOST_SAMPLES: Final = 2_048

_FAULTS: Final = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
)
"""Exit codes that say: what it had mapped may be damaged."""

OnAnswer = Callable[[Command | MQMeshError], None]

_log = logging.getLogger(__name__)


class LogExtent(msgspec.Struct, frozen=True):
    """Extent of the log.

    Attributes:
        store_id: Of the store.
        min_offset: Commit-log offset before which it is gone.
        visible_offset: To which consumers can see it.
    """

    store_id: int
    min_offset: int
    visible_offset: int


class IndexerClient(Protocol):
    """Connection to an indexer, such as ``CommandClient``."""

    connected: bool

    def request(
        self, code: int, on_done: OnAnswer, *, header: bytes = b"", timeout_ms: int = 3_000
    ) -> None:
        """Sends a request."""

    def oneway(self, code: int, *, header: bytes = b"") -> None:
        """Sends a request that gets no answer."""

    def close(self) -> None:
        """Closes the connection."""


class IndexLag:
    """Lag of the index: the age of the oldest part of the log that it has not reached."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque()
        self._last = -1

    def note(self, visible_offset: int, now_ms: int) -> None:
        """The log goes to an offset."""
        if visible_offset <= self._last:
            return
        self._last = visible_offset
        if len(self._samples) >= MOST_SAMPLES:
            del self._samples[1]  # the oldest must stay: the lag is counted from it
        self._samples.append((visible_offset, now_ms))

    def reached(self, indexed_through: int) -> None:
        """The index goes to an offset."""
        while self._samples and self._samples[0][0] <= indexed_through:
            self._samples.popleft()

    def lag_ms(self, now_ms: int) -> int:
        """Age of the oldest message that is not indexed, at most; 0 if there is none."""
        return now_ms - self._samples[0][1] if self._samples else 0


class IndexerLink:
    """One index process and the connection to it.

    Args:
        start_process: Starts the process; gets whether the one before may have left damage.
        connect: Makes the connection, which finds the process whenever it is there.
        look: Returns the extent of the log; None while there is no store.
        clock: Source of time.
        max_queries: Queries at a time.
        query_timeout_ms: Most time that the process takes for a query.

    Attributes:
        is_behind: The log went on further than is indexed, when it was looked at last; then
            ``tick`` is to be called each ``TICK_MS``.
    """

    def __init__(
        self,
        *,
        start_process: Callable[[bool], HelperProcess],
        connect: Callable[[], IndexerClient],
        look: Callable[[], LogExtent | None],
        clock: Clock,
        max_queries: int,
        query_timeout_ms: int,
    ) -> None:
        self._start_process = start_process
        self._connect = connect
        self._look = look
        self._clock = clock
        self._max_queries = max_queries
        self._answer_ms = query_timeout_ms + ANSWER_MARGIN_MS
        self._process: HelperProcess | None = None
        self._client: IndexerClient | None = None
        self._policy = RestartPolicy()
        self._start_due_ms = clock.monotonic_ms() + START_DELAY_MS
        self._suspect = False
        self._starts = 0
        self.is_behind = False
        self._reported_ms = 0
        self._ask_due_ms = 0
        self._is_asking = False
        self._in_flight = 0
        self._refused = 0
        self._lag = IndexLag()
        self._progress = IndexProgress()

    def tick(self) -> None:
        """Looks after the process, and sends it the extent of the log."""
        now_ms = self._clock.monotonic_ms()
        if self._client is None:
            self._client = self._connect()
        if self._process is None:
            if now_ms < self._start_due_ms:
                return
            self._start(now_ms)
        elif (code := self._process.exit_code()) is not None:
            self._on_exit(code, now_ms)
            return
        extent = self._look()
        if extent is None:
            return
        self._lag.note(extent.visible_offset, now_ms)
        self.is_behind = self._progress.indexed_through < extent.visible_offset
        if self._is_asking or now_ms < self._ask_due_ms:
            return
        if self.is_behind or now_ms - self._reported_ms >= IDLE_MS:
            self._ask(extent, now_ms)

    def query(self, code: int, header: bytes, on_answer: OnAnswer) -> None:
        """Passes a query on; the answer comes later, and in any case.

        Args:
            code: QUERY_MESSAGE or QUERY_MESSAGE_BY_ID.
            header: As the client sent it.
            on_answer: Called with the process's answer, or the reason why there is none.

        Raises:
            BrokerNotAvailable: The process is not there.
            SystemBusy: Too many queries are on their way.
        """
        client, extent = self._client, self._look()
        # While the process is just being started, the query waits with the client for it.
        due_ms = self._start_due_ms - self._clock.monotonic_ms()
        starts_soon = self._process is not None or due_ms < SOON_MS
        if client is None or extent is None or not starts_soon:
            self._refused += 1
            raise BrokerNotAvailable(
                "the index process of this broker is not there at the moment; it is started again",
                retry_after_ms=IDLE_MS,
            )
        if self._in_flight >= self._max_queries:
            self._refused += 1
            raise SystemBusy(
                f"{self._in_flight} queries are being answered, no more may (index.max_queries)",
                retry_after_ms=TICK_MS,
            )

        def done(answer: Command | MQMeshError) -> None:
            self._in_flight -= 1
            if isinstance(answer, TransportError | ClientError):
                answer = BrokerNotAvailable(f"the index process did not answer: {answer}")
            on_answer(answer)

        # So the query sees what was stored a moment ago.
        client.oneway(RequestCode.ADVANCE_INDEX, header=_advance(extent))
        client.request(code, done, header=header, timeout_ms=self._answer_ms)
        self._in_flight += 1

    def copy(self, directory: str, on_done: Callable[[MQMeshError | None], None]) -> None:
        """Has the process copy the parts that are not sealed, for a snapshot.

        Args:
            directory: For the copies; it is there.
            on_done: Called once they are there, or with the reason why not; maybe before this
                returns.
        """

        def done(answer: Command | MQMeshError) -> None:
            on_done(answer if isinstance(answer, MQMeshError) else None)

        client = self._client
        if client is None or self._process is None:
            on_done(BrokerNotAvailable("the index process of this broker is not there"))
            return
        header = encode_header(CopyIndexRequest(directory))
        try:
            client.request(RequestCode.COPY_INDEX, done, header=header, timeout_ms=HANG_MS)
        except MQMeshError as error:
            on_done(error)

    def ask_to_stop(self) -> None:
        """Ask the process to end, and do not wait."""
        if self._process is not None:
            self._process.ask_to_stop()

    def close(self) -> None:
        """Ends the process and the connection; no query is answered any more."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.stop()
            self._process = None

    def status(self) -> IndexStatus:
        """Return the status of the process and of the index."""
        extent, progress = self._look(), self._progress
        visible = extent.visible_offset if extent is not None else 0
        if self._process is None or self._client is None or not self._client.connected:
            state = "down"
        elif progress.waiting:
            state = f"waiting: {progress.waiting}"
        else:
            state = "running"
        return IndexStatus(
            state,
            self._process.pid if self._process is not None else 0,
            self._starts,
            max(0, visible - progress.indexed_through),
            self._lag.lag_ms(self._clock.monotonic_ms()),
            self._refused,
            progress,
        )

    # ---- The process -----------------------------------------------------------------

    def _start(self, now_ms: int) -> None:
        self._policy.on_started(now_ms)
        # A new try later costs little, so no reason of its death ends the tries.
        self._policy.on_ready()
        try:
            self._process = self._start_process(self._suspect)
        except OSError as error:
            _log.error("the index process cannot be started: %s", error)
            self._start_due_ms = now_ms + self._policy.on_exit(1, now_ms).delay_ms
            return
        self._suspect = False
        self._starts += 1
        self._progress = IndexProgress()

    def _on_exit(self, code: int, now_ms: int) -> None:
        decision = self._policy.on_exit(code, now_ms)
        self._process = None
        self._start_due_ms = now_ms + decision.delay_ms
        self._suspect = self._suspect or code in _FAULTS
        _log.error(
            "the index process ended: %s; starting it again in %g s%s",
            describe_exit(code),
            decision.delay_ms / 1_000,
            ", and the index is checked" if self._suspect else "",
        )

    def _ask(self, extent: LogExtent, now_ms: int) -> None:
        assert self._client is not None
        self._reported_ms = now_ms
        try:
            self._client.request(
                RequestCode.ADVANCE_INDEX,
                self._take_progress,
                header=_advance(extent),
                timeout_ms=HANG_MS,
            )
        except MQMeshError as error:
            _log.warning("the end of the log cannot be sent to the index process: %s", error)
        else:
            self._is_asking = True

    def _take_progress(self, answer: Command | MQMeshError) -> None:
        self._is_asking = False
        now_ms = self._clock.monotonic_ms()
        if isinstance(answer, TransportError):
            if self._process is not None and now_ms - self._reported_ms >= HANG_MS:
                _log.error("the index process does not answer; killing it")
                self._suspect = True
                self._process.kill()
        elif isinstance(answer, ClientError):
            return  # we are closing
        elif isinstance(answer, MQMeshError):
            _log.error("the index process refuses: %s", answer)
            self._ask_due_ms = now_ms + REFUSED_MS
        else:
            self._note_progress(answer)

    def _note_progress(self, answer: Command) -> None:
        try:
            self._progress = decode_header(IndexProgress, answer.header)
        except RemoteProtocolError as error:
            _log.error("the index process answers strangely: %s", error)
            return
        self._lag.reached(self._progress.indexed_through)


def indexer_arguments(
    config: BrokerConfig, root: PurePath, endpoint: str, *, suspect: bool
) -> list[str]:
    """The command line of a broker's index process, behind ``mqmesh``.

    Args:
        config: The broker's settings.
        root: The broker's directory, absolute.
        endpoint: Where the process shall listen.
        suspect: The process before may have left damaged files, so this one checks the index.
    """
    settings = {
        "broker_name": config.broker_name,
        "store_path_root_dir": str(root),
        "endpoint": endpoint,
        "suspect": str(suspect).lower(),
        "disk_reserve_bytes": str(2 * config.storage.disk_reserve_bytes),
    }
    for name, value in msgspec.structs.asdict(config.index).items():
        settings[f"index.{name}"] = str(value).lower()
    level = logging.getLevelName(_log.getEffectiveLevel())
    arguments = ["indexer", "--log-level", level]
    for key, text in settings.items():
        arguments += ["--set", f"{key}={text}"]
    return arguments


def _advance(extent: LogExtent) -> bytes:
    request = AdvanceIndexRequest(extent.store_id, extent.visible_offset, extent.min_offset)
    return encode_header(request)

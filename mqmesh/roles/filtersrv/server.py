"""The filter server's process: sockets, timers and workers around its table."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    ConfigError,
    CorruptBatch,
    MQMeshError,
    NotMaster,
    TransportError,
    UnsupportedCommand,
)
from mqmesh.host import host_id, socket_path
from mqmesh.hosts import bindable
from mqmesh.message import check_group
from mqmesh.protocol.command import Command, Reply, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.filters import (
    RegisterFilterServerRequest,
    UploadFilterRequest,
    UploadFilterResponse,
)
from mqmesh.protocol.pulling import ExpressionType, PullRequest, PullResponse, PullStatus
from mqmesh.protocol.request import PendingReply, Request
from mqmesh.protocol.route import BrokerAddress
from mqmesh.roles.descriptors import room_for_connections
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.filtersrv.filter_runner import FilterRunner, FilterState, Worker
from mqmesh.roles.filtersrv.filter_table import FILTER_METRICS, FilterTable
from mqmesh.roles.filtersrv.pipeline import FilterPass, Question
from mqmesh.roles.filtersrv.worker_places import WORKER_METRICS, WorkerPlaces
from mqmesh.roles.shell import RoleShell
from mqmesh.sandbox.frames import Answer, Setup
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Connection, Server, ServerLimits, Transport
from mqmesh.units import MIB

REGISTER_MS: Final = 1_000
MAX_FRAME_BYTES: Final = 1 * MIB
"""Longest frame that a consumer sends here: a filter's source has 64 KiB at most."""
UNREACHABLE_RETRY_MS: Final = 200
PULL_BUDGET_MS: Final = 3_000
"""A pull whose messages take longer than this is answered with those that were judged."""
PULL_MARGIN_MS: Final = 5_000
"""Time that the way to the broker and back may add to the wait of a pull there."""

_FOUND: Final = int(PullStatus.FOUND)

_log = logging.getLogger(__name__)


class StartConfined(Protocol):
    """Function that starts a confined process: ``WorkerProcess``, its loop already given."""

    def __call__(
        self,
        setup: Setup,
        *,
        deadline_ms: int,
        on_answer: Callable[[Answer], None],
        on_death: Callable[[str], None],
    ) -> Worker:
        """Starts a process that gets a setup first."""


class FilterServer:
    """Filter server of one broker group.

    Args:
        config: Settings.
        transport: Transport of the process.
        start_worker: Starts a confined process for a filter.

    Attributes:
        is_taken: The broker has taken its registration; before that it takes no filters.
    """

    def __init__(
        self,
        config: FiltersrvConfig,
        transport: Transport,
        start_worker: StartConfined,
    ) -> None:
        self._config = config
        self._transport = transport
        self._start_confined = start_worker
        self._loop = transport.loop
        self._clock = transport.clock
        self._places = WorkerPlaces(config, transport.clock)
        self._table = FilterTable(config, self._make_runner)
        self._shell = RoleShell(ServedBy.FILTERSRV, "filtersrv", config.name, transport)
        self._broker: Connection | None = None
        self._address = BrokerAddress("")
        self._refusal = ""
        self.is_taken = False

    def start(self) -> str:
        """Listens, and registers with the broker, which need not be there yet.

        Returns:
            The TCP endpoint.

        Raises:
            ConfigError: Filters are not allowed, or a setting cannot be used.
            OSError: The port is taken.
        """
        config = self._config
        if not config.enable:
            raise ConfigError(
                "a filter server runs code that consumers upload; allow it by enable = true "
                "(filter_server.enable = true in a cluster file)"
            )
        handlers: dict[RequestCode, Handler] = {
            RequestCode.REGISTER_MESSAGE_FILTER_CLASS: self._upload,
            RequestCode.PULL_MESSAGE: self._pull,
        }
        limits = ServerLimits(
            max_connections=room_for_connections(
                ServerLimits().max_connections, config.max_filters
            ),
            max_frame_bytes=MAX_FRAME_BYTES,
        )
        server = self._shell.open(handlers, limits=limits)
        self._shell.expose(FILTER_METRICS, self._table.status)
        self._shell.expose(WORKER_METRICS, lambda: self._places)
        endpoint = server.bind(f"tcp://{bindable(config.listen_host)}:{config.listen_port}")
        host = config.advertised_host or bindable(config.listen_host)
        port = endpoint.rpartition(":")[2]
        self._address = BrokerAddress(f"{host}:{port}", self._bind_ipc(server), host_id())
        self._broker = self._transport.connect(
            endpoint_of(config.broker_addr),
            on_connection=self._on_connection,
        )
        self._shell.every(REGISTER_MS, self._register)
        self._shell.every(REGISTER_MS, self._table.tick)
        self._shell.look_after_peers()
        self._shell.ready()
        _log.warning("this process runs code of consumers, each filter in a confined worker")
        return endpoint

    def stop(self) -> None:
        """Ends all workers and closes everything; also what a failed ``start`` left open."""
        self._shell.stopping()
        self._table.close()
        if self._broker is not None:
            self._broker.close()
            self._broker = None
        self._shell.close()

    def _bind_ipc(self, server: Server) -> str:
        config = self._config
        if not config.enable_ipc:
            return ""
        # The same at each start: the next life takes the path from the former one.
        place = Path("filtersrv", config.broker_addr, config.name)
        try:
            path = socket_path(place)
            server.bind(f"ipc://{path}")
        except (ConfigError, OSError) as error:
            _log.warning("no local socket, clients use TCP: %s", error)
            return ""
        return str(path)

    # ---- Its broker --------------------------------------------------------------------

    def _on_connection(self, up: bool) -> None:
        if up:
            self._register()
        else:
            _log.warning("the connection to broker %s broke", self._config.broker_addr)

    def _register(self) -> None:
        broker = self._broker
        if broker is None or not broker.connected:
            return
        status = self._table.status()
        request = RegisterFilterServerRequest(
            self._config.name,
            self._address,
            len(self._table),
            status.filters.get(FilterState.PARKED, 0),
            status.matched,
            status.passed_over,
        )
        broker.request(
            RequestCode.REGISTER_FILTER_SERVER,
            self._registered,
            header=encode_header(request),
            timeout_ms=REGISTER_MS,
        )

    def _registered(self, answer: Command | MQMeshError) -> None:
        self.is_taken = not isinstance(answer, MQMeshError)
        refusal = str(answer) if isinstance(answer, BrokerError) else ""
        if refusal and refusal != self._refusal:
            # Beside a follower it waits until that one leads.
            level = logging.INFO if isinstance(answer, NotMaster) else logging.ERROR
            _log.log(level, "broker %s does not take us: %s", self._config.broker_addr, refusal)
        self._refusal = refusal

    # ---- Requests ----------------------------------------------------------------------

    def _upload(self, request: Request, header: UploadFilterRequest) -> None:
        check_group(header.group)
        if not self.is_taken:
            # One without keys beside a secured broker serves no client, and runs no user's code.
            raise BrokerNotAvailable(
                f"broker {self._config.broker_name} at {self._config.broker_addr} has not taken "
                "this filter server",
                retry_after_ms=UNREACHABLE_RETRY_MS,
            )
        source = bytes(request.command.body)
        pending = request.later()

        def loaded(outcome: list[str] | BrokerError) -> None:
            if isinstance(outcome, BrokerError):
                pending.fail(outcome)
            else:
                pending.done(UploadFilterResponse(outcome))

        user = _user_of(request, header.group)
        self._table.upload(user, header.group, header.filter_id, source, loaded)

    def _pull(self, request: Request, pull: PullRequest) -> None:
        if pull.expression_type != ExpressionType.PYTHON:
            raise UnsupportedCommand("this is a filter server; pull without a filter at the broker")
        runner = self._table.get(pull.group, pull.expression)
        broker = self._broker
        assert broker is not None
        if broker.unreachable:
            raise BrokerNotAvailable(
                f"broker {self._config.broker_name} cannot be reached from its filter server",
                retry_after_ms=UNREACHABLE_RETRY_MS,
            )
        runner.begin_pull()
        try:
            self._pull_at_broker(request.later(), pull, runner)
        except MQMeshError:
            runner.end_pull()
            raise

    def _pull_at_broker(
        self, pending: PendingReply, pull: PullRequest, runner: FilterRunner
    ) -> None:
        def answered(answer: Command | MQMeshError) -> None:
            self._take_pulled(pending, pull, runner, answer)

        plain = msgspec.structs.replace(
            pull, expression="*", expression_type=ExpressionType.TAG.value, apart=False
        )
        assert self._broker is not None
        self._broker.request(
            RequestCode.PULL_MESSAGE,
            answered,
            header=encode_header(plain),
            timeout_ms=pull.suspend_timeout_ms + PULL_MARGIN_MS,
        )

    def _take_pulled(
        self,
        pending: PendingReply,
        pull: PullRequest,
        runner: FilterRunner,
        answer: Command | MQMeshError,
    ) -> None:
        def done(outcome: Reply | MQMeshError) -> None:
            runner.end_pull()
            if isinstance(outcome, MQMeshError):
                pending.fail(outcome)
            else:
                pending.done(outcome)

        try:
            if isinstance(answer, TransportError):
                raise BrokerNotAvailable(f"the broker cannot be reached: {answer}")
            if isinstance(answer, MQMeshError):
                raise answer
            header = decode_header(PullResponse, answer.header)
            if header.status != _FOUND:
                done(Reply(bytes(answer.header)))
                return
            self._table.check_room(runner.user, len(answer.body))
            try:
                passage = FilterPass(header, answer.body, pull.queue_offset)
            except CorruptBatch as error:
                _log.error("the broker sent a damaged batch: %s", error)
                if pull.verify:
                    raise BrokerNotAvailable(f"the broker sent a damaged batch: {error}") from error
                # The broker looks again, and passes it if it is lost.
                again = msgspec.structs.replace(pull, verify=True)
                self._pull_at_broker(pending, again, runner)
                return
        except MQMeshError as error:
            done(error)
        else:
            self._ask_next(runner, passage, passage.questions(), done)

    def _ask_next(
        self,
        runner: FilterRunner,
        passage: FilterPass,
        questions: list[Question],
        done: Callable[[Reply | MQMeshError], None],
        began_ms: int | None = None,
    ) -> None:
        now_ms = self._clock.monotonic_ms()
        began_ms = now_ms if began_ms is None else began_ms
        if not questions or now_ms - began_ms >= PULL_BUDGET_MS:
            try:
                reply = passage.reply()
            except MQMeshError as error:
                done(error)
            else:
                done(reply)
            return
        first, *rest = questions

        def judged(outcome: bytes | BrokerError) -> None:
            if isinstance(outcome, BrokerError):
                done(outcome)
                return
            passage.take(outcome)
            self._ask_next(runner, passage, rest, done, began_ms)

        runner.match(first.parts, first.messages, judged)

    def _make_runner(self, user: str, group: str, filter_id: str, source: str) -> FilterRunner:
        return FilterRunner(
            group,
            filter_id,
            source,
            self._config,
            self._start_worker,
            self._places,
            self._clock,
            user=user,
        )

    def _start_worker(
        self, source: str, on_answer: Callable[[Answer], None], on_death: Callable[[str], None]
    ) -> Worker:
        config = self._config
        setup = Setup(
            source,
            config.worker_memory_bytes,
            config.worker_cpu_s,
            config.require_seccomp,
            config.broker_name,
        )
        return self._start_confined(
            setup,
            deadline_ms=config.load_timeout_ms,
            on_answer=on_answer,
            on_death=on_death,
        )


def _user_of(request: Request, group: str) -> str:
    """Return whose share a filter takes: without security a group's, as all have one user."""
    principal = request.peer.principal
    return f"user {principal.name}" if principal.key else f"group {group}"

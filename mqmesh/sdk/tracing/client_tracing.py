"""Tracing of a client: its hooks, and parts that start and close with it."""

from collections.abc import Callable, Sequence
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import MAX_GROUP_LENGTH
from mqmesh.metrics import MetricBoard
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.hooks import HOOK_METRICS, Hooks, make_hook_calls
from mqmesh.sdk.tracing.message_trace import MessageTrace
from mqmesh.sdk.tracing.sampling import Sampler
from mqmesh.sdk.tracing.trace_dispatcher import TRACE_METRICS, TraceDispatcher, TraceProducer
from mqmesh.sdk.tracing.tracing_options import Telemetry, TracingOptions

_GROUP: Final = "_INNER_TRACE_PRODUCER-"


class ClientTracing:
    """The hooks of one client: the user's, and those that its options ask for.

    Args:
        group: The client's.
        hooks: The user's.
        options: The client's.
        engine: Returns the client's engine, once that is made.
        make_producer: Makes a producer of a group, by the client's settings of the connection; None
            where the client was given a transport, which is for one loop alone.
        timeout_ms: A listener's call of so long is too long; None for no limit.
        most_retries: After so many a message that fails is a dead letter; None for never.
        hooks_polls: It consumes by polls, around which hooks are called.

    Attributes:
        hooks: Calls them; None when there are none.
        message_trace: Records sends; None without message trace. It is among the hooks for
            all else.

    Raises:
        InvalidArgument: They are no hooks, or too many, or there is no message trace here, or the
            package of OpenTelemetry is missing.
    """

    def __init__(
        self,
        group: str,
        hooks: Sequence[Hooks],
        options: TracingOptions,
        engine: Callable[[], ClientEngine],
        make_producer: Callable[[str], TraceProducer] | None,
        *,
        timeout_ms: int | None = None,
        most_retries: int | None = None,
        hooks_polls: bool = False,
    ) -> None:
        self._engine = engine
        self._dispatcher: TraceDispatcher | None = None
        self._telemetry: Telemetry | None = None
        own: list[Hooks] = []
        self.message_trace: MessageTrace | None = None
        if options.msg_trace:
            self.message_trace = self._trace(group, options, make_producer, timeout_ms)
            own.append(self.message_trace)
        if options.telemetry:
            self._telemetry = self._make_telemetry(group, options, most_retries)
            if not hooks_polls:  # a poll's span is around it
                own.append(self._telemetry)
        self.hooks = make_hook_calls(hooks, group, own)

    def instrument(self, client: object) -> None:
        """Instrument the client's public methods for OpenTelemetry, if that is wanted."""
        if self._telemetry is not None:
            self._telemetry.instrument(client)

    def start(self, metrics: MetricBoard, *, at_exit: bool = False) -> None:
        """Start with the client.

        Args:
            metrics: Metrics of the client.
            at_exit: Tracing closes itself at the end of the program, since its client does not.
        """
        hooks, dispatcher = self.hooks, self._dispatcher
        if hooks is not None:
            metrics.add(HOOK_METRICS, lambda: hooks)
        if dispatcher is not None:
            metrics.add(TRACE_METRICS, lambda: dispatcher)
            dispatcher.start(self._engine().transport, at_exit=at_exit)

    def close(self) -> None:
        """Close, as the client is closed: nothing more is reported; takes some seconds at most."""
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _trace(
        self,
        group: str,
        options: TracingOptions,
        make_producer: Callable[[str], TraceProducer] | None,
        timeout_ms: int | None,
    ) -> MessageTrace:
        if make_producer is None:
            raise InvalidArgument("msg_trace needs a client that makes its transport by itself")
        make, own_group = make_producer, (_GROUP + group)[:MAX_GROUP_LENGTH]
        self._dispatcher = TraceDispatcher(options.trace_topic, lambda: make(own_group))
        return MessageTrace(
            group,
            self._dispatcher,
            options.trace_topic,
            Sampler(options.msg_trace),
            lambda: self._engine().loop.clock.wall_ms(),
            self._host_of,
            lambda: self._engine().transport.random.randbytes(16).hex().upper(),
            timeout_ms=timeout_ms,
        )

    def _make_telemetry(
        self, group: str, options: TracingOptions, most_retries: int | None
    ) -> Telemetry:
        try:
            from mqmesh.sdk.tracing.otel import Otel
        except ModuleNotFoundError as error:
            raise InvalidArgument(
                f"telemetry = 'otel' needs the package opentelemetry-api, which is not installed "
                f"({error}): pip install 'mqmesh[otel]'"
            ) from error
        return Otel(
            group,
            options,
            lambda: self._engine().loop.clock,
            lambda: self._engine().client_id,
            self._host_of,
            most_retries=most_retries,
        )

    def _host_of(self, broker_name: str) -> str:
        address = self._engine().routes.address(broker_name)
        return "" if address is None else address.tcp

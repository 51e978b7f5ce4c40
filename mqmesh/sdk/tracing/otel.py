"""Spans and metrics of OpenTelemetry, of one client. The SDK's only file that knows the package.

A send's span begins where the user calls, in the caller's context, and not where a batch is made:
messages of one batch may belong to different traces.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode

from mqmesh.clock import Clock
from mqmesh.errors import Reject
from mqmesh.failure_text import error_to_log
from mqmesh.message import Message, StoredMessage, describe
from mqmesh.protocol.transactions import Decision
from mqmesh.sdk import otel_names as names
from mqmesh.sdk.hooks import ConsumeContext, TransactionContext
from mqmesh.sdk.tracing.tracing_options import Telemetry, TracingOptions
from mqmesh.version import VERSION

MAX_LINKS: Final = 128
"""Most links of one span."""
MAX_TOPICS: Final = 10_000
"""Operations on topics whose labels are kept."""

_NS_PER_MS: Final = 1_000_000
_LATER: Final = "RECONSUME_LATER"
_TRANSACTION: Final = "transaction"
_NONE: Final[dict[str, str]] = {}

Attributes = dict[str, Any]
Outcome = tuple[Any, BaseException | None]
"""Result of a send, which has a ``message_queue``, or the error that it ended with."""


class Sending(msgspec.Struct, frozen=True):
    """A send that is under way.

    Attributes:
        messages: Messages to be sent.
        end: To be called with its outcome.
    """

    messages: list[Message]
    end: Callable[[Outcome], None]


class Otel(Telemetry):
    """Spans and metrics of a client for OpenTelemetry.

    Args:
        group: The client's.
        options: The client's.
        clock: Returns its clock; called once the clock is needed.
        client_id: Returns the client's id at brokers.
        address_of: Returns a broker group's ``host:port``; "" for unknown.
        most_retries: After so many a message that fails is a dead letter; None for never.
    """

    def __init__(
        self,
        group: str,
        options: TracingOptions,
        clock: Callable[[], Clock],
        client_id: Callable[[], str],
        address_of: Callable[[str], str],
        *,
        most_retries: int | None = None,
    ) -> None:
        self._group = group
        self._creates = options.otel_create_spans
        self._by_message = options.otel_parent == "message"
        self._clock = clock
        self._client_id = client_id
        self._address_of = address_of
        self._most_retries = most_retries
        self._known_labels: dict[tuple[str, str], Attributes] = {}
        self._tracer = trace.get_tracer("mqmesh", VERSION)
        meter = metrics.get_meter("mqmesh", VERSION)
        self._durations = meter.create_histogram(
            names.OPERATION_DURATION, "s", "Duration of sends and receives"
        )
        self._process_durations = meter.create_histogram(
            names.PROCESS_DURATION, "s", "Duration of listeners' calls"
        )
        self._sent = meter.create_counter(
            names.SENT_MESSAGES, "{message}", "Messages that were sent, or should have been"
        )
        self._consumed = meter.create_counter(
            names.CONSUMED_MESSAGES, "{message}", "Messages that the application was given"
        )

    @property
    def clock(self) -> Clock:
        """The client's."""
        return self._clock()

    # ---- Sends -----------------------------------------------------------------------

    def begin(
        self, messages: Sequence[Message], operation: str = names.SEND, kind: str = ""
    ) -> Sending:
        """Begin the span of a send, in the caller's context; its messages get its context.

        Args:
            messages: At least one, of one topic.
            operation: Its name.
            kind: Kind of the messages, where they do not say it themselves.
        """
        first = messages[0]
        labels = self._labels(operation, names.SEND, first.topic)
        attributes = {**labels, names.CLIENT_ID: self._client_id(), **facts_of(messages, kind)}
        # A context that the user put there stays; there is a span that made the message already.
        owned = [one for one in messages if _has_context(one)]
        links = _links(owned) if owned else []
        carriers: list[Mapping[str, str]] = [_NONE] * len(messages)
        if self._creates:
            for index, one in enumerate(messages):
                if not _has_context(one):
                    carriers[index], link = self._create(one, kind)
                    links.append(link)
        made = bool(owned) or self._creates
        span = self._tracer.start_span(
            f"{operation} {first.topic}",
            kind=SpanKind.CLIENT if made else SpanKind.PRODUCER,
            attributes=attributes,
            links=links[:MAX_LINKS],
        )
        if not self._creates:
            carrier = _injected(span)
            carriers = [_NONE if _has_context(one) else carrier for one in messages]
        given = [_with(one, more) for one, more in zip(messages, carriers, strict=True)]
        return Sending(
            given, functools.partial(self._sent_out, span, labels, self.clock.monotonic_ns(), given)
        )

    def _sent_out(
        self,
        span: Span,
        labels: Attributes,
        began_ns: int,
        messages: list[Message],
        outcome: Outcome,
    ) -> None:
        result, error = outcome
        if error is not None:
            labels = {**labels, **_failed(span, error)}
        elif span.is_recording():
            span.set_attributes(self._place_of(result, len(messages)))
        self._durations.record((self.clock.monotonic_ns() - began_ns) / 1e9, labels)
        self._sent.add(len(messages), labels)
        span.end()

    def _place_of(self, result: Any, count: int) -> Attributes:
        queue = getattr(result, "message_queue", None)
        if queue is None:
            return {}
        place: Attributes = {names.PARTITION_ID: str(queue.queue_id)}
        if count == 1:
            place[names.MESSAGE_ID] = result.message_id
        return {**place, **_server(self._address_of(queue.broker_name))}

    def _create(self, message: Message, kind: str) -> tuple[Mapping[str, str], Link]:
        span = self._tracer.start_span(
            f"{names.CREATE} {message.topic}",
            kind=SpanKind.PRODUCER,
            attributes={
                **self._labels(names.CREATE, names.CREATE, message.topic),
                **facts_of((message,), kind),
            },
        )
        span.end()
        return _injected(span), Link(span.get_span_context())

    # ---- Consumers -------------------------------------------------------------------

    def before_consume(self, batch: ConsumeContext) -> None:
        """Begin the span of a listener's call, as its context until the call has ended."""
        labels = self._labels(names.PROCESS, names.PROCESS, batch.topic)
        # Not the context in which the consumer was started; the trace of a message only if wanted.
        context = otel_context.Context()
        if self._by_message:
            context = propagate.extract(batch.messages[0].properties or {}, context)
        span = self._tracer.start_span(
            f"{names.PROCESS} {batch.topic}",
            context,
            kind=SpanKind.CONSUMER,
            attributes=self._received(labels, batch.messages),
            links=_links(batch.messages),
        )
        times = max(one.reconsume_times for one in batch.messages)
        if times:
            span.add_event(names.EVENT_RETRY, {names.RECONSUME_TIMES: times})
        self._consumed.add(len(batch.messages), labels)
        token = otel_context.attach(trace.set_span_in_context(span, context))
        batch.state[self] = span, token, self.clock.monotonic_ns(), labels

    def after_consume(self, batch: ConsumeContext) -> None:
        """End the span of a listener's call."""
        begun = batch.state.get(self)
        if begun is None:
            return
        span, token, began_ns, labels = begun
        otel_context.detach(token)
        if batch.again:
            failed = {names.ERROR_TYPE: _LATER}
            if batch.error is not None:
                span.record_exception(error_to_log(batch.error))
                failed = _failed(span, batch.error)
            else:
                span.set_status(StatusCode.ERROR, "the listener wants it again")
                span.set_attributes(failed)
            labels = {**labels, **failed}
            self._note_failure(span, batch)
        self._process_durations.record((self.clock.monotonic_ns() - began_ns) / 1e9, labels)
        span.end()

    def received(self, messages: list[StoredMessage], began_ms: int, began_ns: int) -> None:
        """Record the messages that a poll has returned.

        Args:
            messages: At least one.
            began_ms, began_ns: When it was called, by the wall clock and the monotonic one.
        """
        took_s = (self.clock.monotonic_ns() - began_ns) / 1e9
        by_topic: dict[str, list[StoredMessage]] = {}
        for one in messages:
            by_topic.setdefault(one.topic, []).append(one)
        for topic, some in by_topic.items():
            labels = self._labels(names.RECEIVE, names.RECEIVE, topic)
            self._tracer.start_span(
                f"{names.RECEIVE} {topic}",
                kind=SpanKind.CLIENT,
                attributes=self._received(labels, some),
                links=_links(some),
                start_time=began_ms * _NS_PER_MS,
            ).end()
            self._durations.record(took_s, labels)
            self._consumed.add(len(some), labels)

    def after_transaction(self, transaction: TransactionContext) -> None:
        """Record the end of a transaction that was sent to a broker."""
        message = transaction.message
        is_commit = transaction.decision is Decision.COMMIT
        operation = names.COMMIT if is_commit else names.ROLLBACK
        span = self._tracer.start_span(
            f"{operation} {message.topic}",
            kind=SpanKind.CLIENT,
            attributes={
                **self._labels(operation, names.SETTLE, message.topic),
                names.CLIENT_ID: self._client_id(),
                names.MESSAGE_ID: message.message_id,
                **facts_of((message,), _TRANSACTION),
                **_server(self._address_of(message.broker_name)),
            },
            links=_links((message,)),
            start_time=transaction.began_ms * _NS_PER_MS,
        )
        if transaction.error is not None:
            _failed(span, transaction.error)
        span.end()

    def _received(self, labels: Attributes, messages: Sequence[StoredMessage]) -> Attributes:
        attributes = {
            **labels,
            names.CONSUMER_GROUP: self._group,
            names.CLIENT_ID: self._client_id(),
            **facts_of(messages),
        }
        if len(messages) == 1:
            attributes[names.MESSAGE_ID] = messages[0].message_id
        queues = {messages[0].message_queue, messages[-1].message_queue}
        if len(queues) == 1:
            queue = queues.pop()
            attributes[names.PARTITION_ID] = str(queue.queue_id)
            attributes.update(_server(self._address_of(queue.broker_name)))
        return attributes

    def _note_failure(self, span: Span, batch: ConsumeContext) -> None:
        times = max(one.reconsume_times for one in batch.messages)
        rejected = isinstance(batch.error, Reject) and len(batch.messages) == 1
        is_dead = self._most_retries is not None and (rejected or times >= self._most_retries)
        event = names.EVENT_DEAD if is_dead else names.EVENT_BACK
        span.add_event(event, {names.RECONSUME_TIMES: times})

    def _labels(self, operation: str, kind: str, topic: str) -> Attributes:
        """Return the attributes that spans and measurements share; not to be changed."""
        labels = self._known_labels.get((operation, topic))
        if labels is None:
            if len(self._known_labels) >= MAX_TOPICS:
                self._known_labels.clear()
            labels = self._known_labels[operation, topic] = {
                names.MESSAGING_SYSTEM: names.SYSTEM,
                names.OPERATION_NAME: operation,
                names.OPERATION_TYPE: kind,
                names.DESTINATION_NAME: topic,
            }
        return labels

    # ---- Clients ---------------------------------------------------------------------

    def instrument(self, client: object) -> None:
        """Puts spans around a client's methods, by attributes in front of them.

        So a client without OpenTelemetry does not even ask whether it has it.
        """
        for name, wrap in _WRAPS.items():
            method = getattr(client, name, None)
            if method is not None:
                setattr(client, name, functools.wraps(method)(wrap(self, method)))


def _around_send(
    otel: Otel,
    method: Callable[..., Any],
    ended: Callable[[Sending, Any], None],
    kind: str = "",
) -> Callable[..., Any]:
    """Wrap a method whose first argument is the message, or the batch, that it sends.

    Args:
        otel: Makes the span.
        method: The client's.
        ended: Gets the span and the method's result, and ends the one by the other.
        kind: Of the messages, where they do not say it themselves.
    """

    def call(what: Any, *args: Any, **kwargs: Any) -> Any:
        messages = _messages_of(what)
        if not messages:
            return method(what, *args, **kwargs)  # which raises the error
        sending = otel.begin(messages, kind=kind)
        with _failing(sending):
            result = method(_like(what, sending), *args, **kwargs)
        ended(sending, result)
        return result

    return call


def _around_reply(otel: Otel, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``reply_async``, whose reply is made of its arguments."""

    def call(request: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
        topic = getattr(request, "topic", None)
        if not isinstance(topic, str):
            return method(request, body, *args, **kwargs)
        properties = kwargs.pop("properties", None)
        sending = otel.begin([Message(topic, b"", properties=properties)], names.REPLY)
        kwargs["properties"] = sending.messages[0].properties
        with _failing(sending):
            future = method(request, body, *args, **kwargs)
        _when_done(sending, future)
        return future

    return call


@contextmanager
def _failing(sending: Sending) -> Iterator[None]:
    """End the span with the error that the block raises."""
    try:
        yield
    except BaseException as error:
        sending.end((None, error))
        raise


def _at_once(sending: Sending, result: Any) -> None:
    sending.end((result, None))


def _when_done(sending: Sending, future: Any) -> None:
    future.add_done_callback(lambda done: sending.end(_outcome(done)))


def _with_half(sending: Sending, transaction: Any) -> None:
    sending.end((transaction.send_result, None))


def _around_poll(otel: Otel, method: Callable[..., Any]) -> Callable[..., Any]:
    def poll(*args: Any, **kwargs: Any) -> Any:
        began_ms, began_ns = otel.clock.wall_ms(), otel.clock.monotonic_ns()
        found = method(*args, **kwargs)
        if found:
            otel.received(found, began_ms, began_ns)
        return found

    return poll


_CALL: Final = functools.partial(_around_send, ended=_at_once)
_FUTURE: Final = functools.partial(_around_send, ended=_when_done)
_WRAPS: Final[dict[str, Callable[[Otel, Callable[..., Any]], Callable[..., Any]]]] = {
    "send": _CALL,
    "send_oneway": _CALL,
    "send_batch": _CALL,
    "send_async": _FUTURE,
    "send_batch_async": _FUTURE,
    "reply_async": _around_reply,
    "transaction": functools.partial(_around_send, ended=_with_half, kind=_TRANSACTION),
    "send_message_in_transaction_async": functools.partial(_FUTURE, kind=_TRANSACTION),
    "poll": _around_poll,
}


def _messages_of(what: object) -> Sequence[Message]:
    """Return the messages of a send's first argument; none when it is refused anyway."""
    if isinstance(what, Message):
        what = (what,)
    if not isinstance(what, Sequence) or not all(
        isinstance(one, Message) and isinstance(one.topic, str) for one in what
    ):
        return ()
    return what


def _like(what: object, sending: Sending) -> Any:
    return sending.messages[0] if isinstance(what, Message) else sending.messages


def _outcome(future: Any) -> Outcome:
    if future.cancelled() if hasattr(future, "cancelled") else False:
        return None, InterruptedError("cancelled")
    error = future.exception()
    if error is not None:
        return None, error
    result = future.result()
    return getattr(result, "send_result", result), None


def _has_context(message: Message) -> bool:
    return bool(message.properties) and names.TRACEPARENT in message.properties  # type: ignore[operator]


def _with(message: Message, more: Mapping[str, str]) -> Message:
    if not more:
        return message
    if isinstance(message, StoredMessage):
        message = message.to_message()  # a consumed message that is sent on
    properties = {**(message.properties or {}), **more}
    return msgspec.structs.replace(message, properties=properties)


def _injected(span: Span) -> Mapping[str, str]:
    if not span.get_span_context().is_valid:
        return _NONE  # nothing is traced
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    return carrier


def _links(messages: Iterable[Message]) -> list[Link]:
    links = []
    for one in messages:
        if _has_context(one):
            found = propagate.extract(one.properties or {}, otel_context.Context())
            origin = trace.get_current_span(found).get_span_context()
            if origin.is_valid:
                links.append(Link(origin))
                if len(links) == MAX_LINKS:
                    break
    return links


def facts_of(messages: Sequence[Message], kind: str = "") -> Attributes:
    """Return the attributes of messages; of several, those that all share.

    Args:
        messages: At least one.
        kind: Their kind, where they do not say it themselves.
    """
    first = messages[0]
    facts: Attributes = {names.MESSAGE_TYPE: kind or _kind_of(first)}
    if len(messages) > 1:
        facts[names.BATCH_COUNT] = len(messages)
        return facts
    if first.tag is not None:
        facts[names.MESSAGE_TAG] = first.tag
    if first.keys:
        facts[names.MESSAGE_KEYS] = list(first.keys)
    if first.delay_level:
        facts[names.DELAY_LEVEL] = first.delay_level
    if first.deliver_at_ms:
        facts[names.DELIVERY_TIMESTAMP] = first.deliver_at_ms
    return facts


def _kind_of(message: Message) -> str:
    if message.delay_level or message.deliver_at_ms:
        return "delay"
    return "normal" if message.sharding_key is None else "fifo"


def _server(address: str) -> Attributes:
    host, _, port = address.rpartition(":")
    return {names.SERVER_ADDRESS: host, names.SERVER_PORT: int(port)} if port.isdecimal() else {}


def _failed(span: Span, error: BaseException) -> Attributes:
    attributes = {names.ERROR_TYPE: type(error).__qualname__}
    span.set_status(StatusCode.ERROR, describe(error))
    span.set_attributes(attributes)
    return attributes

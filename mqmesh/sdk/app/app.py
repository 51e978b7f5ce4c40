"""An application of typed handlers and publishers, in threads."""

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack, overload

from mqmesh.errors import InvalidArgument
from mqmesh.message import StoredMessage
from mqmesh.sdk.app.bodies import Codec
from mqmesh.sdk.app.message_maker import MessageFields, MessageMaker
from mqmesh.sdk.app.results import ResultMaker
from mqmesh.sdk.app.subscriptions import (
    Errors,
    Subscriptions,
    TypedHandler,
    TypedSubscription,
    in_order,
)
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr
from mqmesh.sdk.client.run import run
from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords
from mqmesh.sdk.consumer.fetching.message_selector import Wanted
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.hooks import Hooks
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture, SendResult
from mqmesh.sdk.tracing.tracing_options import TracingKeywords
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


class TopicPublisher(MessageMaker[T]):
    """Publisher of values of one type to one topic; made by ``App.publisher``.

    Args:
        topic: Topic.
        kind: Type of the values.
        producer: Sends them.
        codec: Form of the bodies.
    """

    def __init__(
        self, topic: str, kind: type[T], producer: Producer, codec: Codec | None = None
    ) -> None:
        super().__init__(topic, kind, codec)
        self._producer = producer

    def send(
        self,
        value: T,
        *,
        priority: int | None = None,
        ttl_ms: int | None = None,
        **fields: Unpack[MessageFields],
    ) -> SendResult:
        """Sends a value and waits until it is stored.

        Args:
            value: Becomes the body.
            priority, ttl_ms: As for ``Producer.send``.
            fields: As for ``message``.

        Raises:
            InvalidArgument: The value is none of the type.
            MQMeshError: As for ``Producer.send``.
        """
        message = self.message(value, **fields)
        return self._producer.send(message, priority=priority, ttl_ms=ttl_ms)

    def send_async(
        self,
        value: T,
        *,
        priority: int | None = None,
        ttl_ms: int | None = None,
        **fields: Unpack[MessageFields],
    ) -> SendFuture:
        """Send the same way without waiting for the outcome."""
        message = self.message(value, **fields)
        if priority is None and ttl_ms is None:
            return self._producer.send_async(message)  # the fast path has no choices
        return self._producer.send_async(message, priority=priority, ttl_ms=ttl_ms)


class App:
    """Handlers that get decoded bodies, and publishers that send them, as one program::

        app = App("shop")
        orders = app.publisher("orders", Order)

        @app.subscriber("orders", group="billing", dead_letter_on=(UnknownCustomer,))
        @app.publisher("bills")
        def bill(order: Order) -> Bill: ...

        app.run()

    A handler stays the function it was. A body that is none of its type is a dead letter at once,
    as is one whose handler raises ``Reject`` or an error of ``dead_letter_on``; after any other
    error the message comes again, as for ``PushConsumer``.

    Args:
        name: Producer group of its publishers.
        namesrv_addr, credentials, namespace, client, transport, hooks, tracing: As for
            ``PushConsumer``, for all of its clients.

    Raises:
        InvalidArgument: The name or an option is out of bounds.
    """

    def __init__(
        self,
        name: str,
        *,
        namesrv_addr: NamesrvAddr | None = None,
        credentials: str | Credentials | None = None,
        namespace: str | None = None,
        client: ClientOptions | None = None,
        transport: Transport | None = None,
        hooks: Sequence[Hooks] = (),
        **tracing: Unpack[TracingKeywords],
    ) -> None:
        self._common: dict[str, Any] = {
            "namesrv_addr": namesrv_addr,
            "credentials": credentials,
            "namespace": namespace,
            "client": client,
            "transport": transport,
            "hooks": hooks,
            **tracing,
        }
        self._subscriptions = Subscriptions()
        self._results: dict[Callable[..., Any], list[ResultMaker]] = {}
        self._handlers: set[Callable[..., Any]] = set()
        self._producer = Producer(name, **self._common)
        self._publishes = False
        self._started: list[PushConsumer | Producer] = []

    def subscriber(
        self,
        topic: str,
        *,
        group: str,
        expression: Wanted = "*",
        dead_letter_on: Errors = (),
        codec: Codec | None = None,
        exactly_once: bool = False,
        **options: Unpack[PushConsumerKeywords],
    ) -> Callable[[Function], Function]:
        """Registers a function as handler of a topic's messages; before ``start``.

        Args:
            topic: Topic; it need not exist yet.
            group: Consumer group.
            expression: As for ``PushConsumer.subscribe``.
            dead_letter_on: Errors that make a dead letter at once; others are retried.
            codec: Form of the bodies; None for JSON, bytes and text, by the parameter's type. A
                message whose property ``CONTENT_TYPE`` names another form is a dead letter.
            exactly_once: The function's results, sent by ``publisher`` below it, are stored
                together with the progress of the group: both or neither. The group consumes in
                order (``consume_orderly``), or one by one (``delivery``).
            options: Of the group's consumer; the same for all topics of a group.

        Raises:
            InvalidArgument: A name or option is out of bounds, the function's parameters are not
                as ``TypedHandler`` wants them, or it is a coroutine function: for these there is
                ``mqmesh.aio.App``.
        """

        def decorate(function: Function) -> Function:
            handler = TypedHandler(function, dead_letter_on, codec)
            if handler.is_coroutine:
                raise InvalidArgument("a coroutine function is handled by App of mqmesh.aio")
            self._handlers.add(function)
            makers = self._results.get(function, [])
            if exactly_once:
                check_results(makers)
                self._subscriptions.add(
                    TypedSubscription(
                        topic,
                        group,
                        expression,
                        handler.listen,
                        in_order(options),
                        bind=partial(_processing, handler, makers),
                        outputs=[one.topic for one in makers],
                    )
                )
                return function
            listener = handler.listen
            if makers:
                self._publishes = True
                listener = partial(_send_results, handler, makers, self._producer)
            self._subscriptions.add(TypedSubscription(topic, group, expression, listener, options))
            return function

        return decorate

    @overload
    def publisher(
        self, topic: str, kind: type[T], *, codec: Codec | None = None
    ) -> TopicPublisher[T]: ...

    @overload
    def publisher(
        self, topic: str, *, codec: Codec | None = None
    ) -> Callable[[Function], Function]: ...

    def publisher(
        self, topic: str, kind: type[T] | None = None, *, codec: Codec | None = None
    ) -> TopicPublisher[T] | Callable[[Function], Function]:
        """Sends values of a type to a topic; once the application is started.

        Without a type it decorates a function, below its ``subscriber``: the function's results are
        sent before the message counts as done; see ``ResultMaker`` for their allowed types.

        Args:
            topic: Topic.
            kind: Type of the values.
            codec: Form of the bodies, which messages name in the property ``CONTENT_TYPE``; None
                for JSON, bytes and text, by the type, without the property.

        Raises:
            InvalidArgument: The topic's name is illegal, values of this type cannot be sent, or the
                function has a ``subscriber`` already.
        """
        if kind is None:

            def decorate(function: Function) -> Function:
                check_below(function, self._handlers)
                maker = ResultMaker(topic, function, codec)
                self._results.setdefault(function, []).append(maker)
                return function

            return decorate
        self._publishes = True
        return TopicPublisher(topic, kind, self._producer, codec)

    def start(self) -> None:
        """Connects; handlers are called from now on, from several threads at once.

        It may be started again after ``close``; further calls do nothing.

        Raises:
            NoRoute: A handler's results cannot be stored with its messages (``exactly_once``).
            MQMeshError: As for ``PushConsumer.start``; nothing is left running.
        """
        if self._started and not self.closed:
            return
        self._started = []
        try:
            # A handler that publishes finds the producer at work.
            if self._publishes:
                self._started.append(self._producer)
                self._producer.start()
            for group, subscriptions in self._subscriptions.by_group().items():
                self._start_group(group, subscriptions)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the calls that run, commits and disconnects; idempotent."""
        for client in reversed(self._started):
            client.close()
        self._producer.close()

    @property
    def closed(self) -> bool:
        """True when all of its clients are closed."""
        return bool(self._started) and all(client.closed for client in self._started)

    def run(self) -> None:
        """Starts, handles messages until SIGINT or SIGTERM, and closes; as ``mqmesh.run``."""
        run(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _start_group(self, group: str, subscriptions: list[TypedSubscription]) -> None:
        consumer = PushConsumer(group, **{**self._common, **subscriptions[0].options})
        self._started.append(consumer)
        for one in subscriptions:
            consumer.subscribe(one.topic, one.expression, listener=one.listener_of(consumer))
        consumer.start()
        for one in subscriptions:
            consumer.check_outputs(*one.outputs)


def check_results(makers: Sequence[ResultMaker]) -> None:
    """Check that a handler with ``exactly_once`` sends its results.

    Raises:
        InvalidArgument: It does not.
    """
    if not makers:
        raise InvalidArgument(
            "exactly_once stores what the function returns with its progress: put "
            '@app.publisher("topic") below @app.subscriber'
        )


def check_below(function: Callable[..., Any], handlers: Container[Callable[..., Any]]) -> None:
    """Check that a publisher decorates a function before a subscriber does.

    Raises:
        InvalidArgument: It does not, so that nothing would be sent.
    """
    if function in handlers:
        raise InvalidArgument(
            "put @app.publisher below @app.subscriber: above it, nothing would be sent"
        )


def _processing(
    handler: TypedHandler, makers: Sequence[ResultMaker], consumer: PushConsumer
) -> Callable[[list[StoredMessage]], None]:
    def listen(messages: list[StoredMessage]) -> None:
        with consumer.processing(messages) as out:
            result = handler.listen(messages)
            for maker in makers:
                for message in maker.messages(result):
                    out.send(message)

    return listen


def _send_results(
    handler: TypedHandler,
    makers: Sequence[ResultMaker],
    producer: Producer,
    messages: list[StoredMessage],
) -> None:
    result = handler.listen(messages)
    for maker in makers:
        for message in maker.messages(result):
            producer.send(message)

"""An application of typed handlers and publishers, for asyncio programs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack, overload

from mqmesh.errors import InvalidArgument
from mqmesh.message import StoredMessage
from mqmesh.sdk.aio.consumer import PushConsumer
from mqmesh.sdk.aio.producer import Producer
from mqmesh.sdk.aio.signatures import signed_as
from mqmesh.sdk.app.app import App as BlockingApp
from mqmesh.sdk.app.app import check_below, check_results
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
from mqmesh.sdk.client.run import run_async
from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords
from mqmesh.sdk.consumer.fetching.message_selector import Wanted
from mqmesh.sdk.producer.send_result import SendResult

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

    async def send(
        self,
        value: T,
        *,
        priority: int | None = None,
        ttl_ms: int | None = None,
        **fields: Unpack[MessageFields],
    ) -> SendResult:
        """Send as a publisher of ``mqmesh.App`` does."""
        message = self.message(value, **fields)
        return await self._producer.send(message, priority=priority, ttl_ms=ttl_ms)


class App:
    """Application of coroutine functions that get decoded bodies; else as ``mqmesh.App``::

        app = App("shop")

        @app.subscriber("orders", group="billing")
        async def bill(order: Order) -> None: ...

        asyncio.run(app.run())

    Args:
        name, namesrv_addr, credentials, namespace, client, transport, hooks, tracing: As for
            ``mqmesh.App``.
    """

    @signed_as(BlockingApp.__init__)
    def __init__(self, name: str, **options: Any) -> None:
        self._common = options
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
        """Register a coroutine function, as ``mqmesh.App.subscriber`` does.

        Raises:
            InvalidArgument: As there, or it is no coroutine function.
        """

        def decorate(function: Function) -> Function:
            handler = TypedHandler(function, dead_letter_on, codec)
            if not handler.is_coroutine:
                raise InvalidArgument("a handler must be a coroutine function (async def) here")
            self._handlers.add(function)
            makers = self._results.get(function, [])
            if exactly_once:
                check_results(makers)
                self._subscriptions.add(
                    TypedSubscription(
                        topic,
                        group,
                        expression,
                        handler.listen_async,
                        in_order(options),
                        bind=partial(_processing, handler, makers),
                        outputs=[one.topic for one in makers],
                    )
                )
                return function
            listener: Callable[[list[StoredMessage]], Any] = handler.listen_async
            if makers:
                self._publishes = True
                listener = _sending(handler, makers, self._producer)
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
        """Return a publisher or a decorator, as ``mqmesh.App.publisher`` does."""
        if kind is None:

            def decorate(function: Function) -> Function:
                check_below(function, self._handlers)
                maker = ResultMaker(topic, function, codec)
                self._results.setdefault(function, []).append(maker)
                return function

            return decorate
        self._publishes = True
        return TopicPublisher(topic, kind, self._producer, codec)

    async def start(self) -> None:
        """Connects; handlers are awaited from now on, several at once.

        It may be started again after ``close``; further calls do nothing.

        Raises:
            MQMeshError: As for ``PushConsumer.start``; nothing is left running.
        """
        if self._started and not self.closed:
            return
        self._started = []
        try:
            if self._publishes:
                self._started.append(self._producer)
                await self._producer.start()
            for group, subscriptions in self._subscriptions.by_group().items():
                consumer = PushConsumer(group, **{**self._common, **subscriptions[0].options})
                self._started.append(consumer)
                for one in subscriptions:
                    listener = one.listener_of(consumer)
                    await consumer.subscribe(one.topic, one.expression, listener=listener)
                await consumer.start()
                for one in subscriptions:
                    await consumer.check_outputs(*one.outputs)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the calls that run, commits and disconnects; idempotent."""
        for client in reversed(self._started):
            await client.close()
        await self._producer.close()

    @property
    def closed(self) -> bool:
        """True when all of its clients are closed."""
        return bool(self._started) and all(client.closed for client in self._started)

    async def run(self) -> None:
        """Run as ``mqmesh.App.run`` does."""
        await run_async(self)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()


def _processing(
    handler: TypedHandler, makers: Sequence[ResultMaker], consumer: PushConsumer
) -> Callable[[list[StoredMessage]], Any]:
    async def listen(messages: list[StoredMessage]) -> None:
        async with consumer.processing(messages) as out:
            result = await handler.listen_async(messages)
            for maker in makers:
                for message in maker.messages(result):
                    out.send(message)

    return listen


def _sending(
    handler: TypedHandler, makers: Sequence[ResultMaker], producer: Producer
) -> Callable[[list[StoredMessage]], Any]:
    async def listen(messages: list[StoredMessage]) -> None:
        result = await handler.listen_async(messages)
        for maker in makers:
            for message in maker.messages(result):
                await producer.send(message)

    return listen

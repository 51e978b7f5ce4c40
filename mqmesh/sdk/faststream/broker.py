"""The broker of a FastStream application, and routers that it includes."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, TypedDict, Unpack

from fast_depends.dependencies import Dependant
from fast_depends.library.serializer import SerializerProto
from faststream import AckPolicy, ContextRepo, PublishType
from faststream._internal.basic_types import LoggerProto
from faststream._internal.broker import BrokerRouter, BrokerUsecase
from faststream._internal.broker.router import ArgsContainer, SubscriberRoute
from faststream._internal.constants import EMPTY
from faststream._internal.di import FastDependsConfig
from faststream._internal.logger import DefaultLoggerStorage, LoggerState
from faststream._internal.logger.logging import get_broker_logger
from faststream._internal.logger.params_storage import make_logger_storage
from faststream._internal.parser import CodecProto
from faststream._internal.types import BrokerMiddleware, CustomCallable
from faststream.specification.schema import BrokerSpec
from faststream.specification.schema.extra import Tag, TagDict

from mqmesh.errors import InvalidArgument, MQMeshError, Reject
from mqmesh.failure_text import cut, error_to_log, one_line
from mqmesh.sdk.aio.admin import AdminClient
from mqmesh.sdk.aio.consumer import PullConsumer, PushConsumer
from mqmesh.sdk.aio.producer import Producer
from mqmesh.sdk.app.message_maker import SendFields
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr, client_options
from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords
from mqmesh.sdk.faststream.config import MQMeshBrokerConfig
from mqmesh.sdk.faststream.group_consumers import GroupConsumers
from mqmesh.sdk.faststream.message import Delivery, MQMeshMessage, dead_letter_on, is_of_body
from mqmesh.sdk.faststream.publishing import MessageEncoder, MQMeshProducer, MQMeshPublishCommand
from mqmesh.sdk.faststream.registrator import MQMeshRegistrator
from mqmesh.sdk.hooks import Hooks
from mqmesh.sdk.producer.send_result import SendResult
from mqmesh.sdk.tracing.tracing_options import TracingKeywords
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport

_PING_S: Final = 3.0


class SharedKeywords(TypedDict, total=False):
    """FastStream's options of brokers and routers."""

    decoder: CustomCallable | None
    parser: CustomCallable | None
    dependencies: Sequence[Dependant]
    middlewares: Sequence[BrokerMiddleware[Any, Any]]
    routers: Iterable[MQMeshRegistrator]
    ack_policy: AckPolicy


class BrokerKeywords(SharedKeywords, total=False):
    """FastStream's options of brokers."""

    codec: CodecProto | None
    graceful_timeout: float | None
    logger: LoggerProto | None
    log_level: int
    apply_types: bool
    serializer: SerializerProto | None
    description: str | None
    tags: Iterable[Tag | TagDict]


class MQMeshBroker(MQMeshRegistrator, BrokerUsecase[Delivery, Producer, MQMeshBrokerConfig]):
    """FastStream's way to mqmesh::

        broker = MQMeshBroker("localhost:9876")
        app = FastStream(broker)

        @broker.subscriber("orders", group="billing")
        async def bill(order: Order) -> None: ...

    Args:
        namesrv_addr, credentials, namespace, client, transport, hooks: As for ``PushConsumer``, for
            all of its clients.
        producer_group: Producer group of its sends.
        tracing: Fields of ``TracingOptions`` for all of its clients: ``{"telemetry": "otel"}``.
        options: FastStream's: ``middlewares``, ``routers``, ``dependencies``, ``ack_policy``,
            ``parser``, ``decoder``, ``codec``, ``graceful_timeout`` (15 s: how long calls that run
            may take when it stops), ``logger``, ``log_level``, ``apply_types``, ``serializer``, and
            ``description`` and ``tags`` for AsyncAPI's document.

    Raises:
        InvalidArgument: A name or an option is out of bounds.
    """

    def __init__(
        self,
        namesrv_addr: NamesrvAddr | None = None,
        *,
        producer_group: str = "faststream",
        credentials: str | Credentials | None = None,
        namespace: str | None = None,
        client: ClientOptions | None = None,
        transport: Transport | None = None,
        hooks: Sequence[Hooks] = (),
        tracing: TracingKeywords | None = None,
        **options: Unpack[BrokerKeywords],
    ) -> None:
        self._client = client_options(client, namesrv_addr, credentials, namespace)
        common: dict[str, Any] = {
            "client": self._client,
            "transport": transport,
            "hooks": hooks,
            **(tracing or {}),
        }
        graceful_s = options.get("graceful_timeout", 15.0)
        close_ms = 60_000 if graceful_s is None else min(round(graceful_s * 1_000), 60_000)

        def consumer(group: str, wanted: PushConsumerKeywords) -> PushConsumer:
            chosen: PushConsumerKeywords = {"close_timeout_ms": close_ms, **wanted}
            return PushConsumer(group, **{**common, **chosen})

        def puller(group: str, wanted: PushConsumerKeywords) -> PullConsumer:
            return PullConsumer(group, **{**common, **wanted})

        depends = FastDependsConfig(
            use_fastdepends=options.get("apply_types", True),
            serializer=options.get("serializer", EMPTY),
        )
        codec = options.get("codec")
        encoder = MessageEncoder(depends._serializer, codec)
        producer, parser = partial(Producer, producer_group, **common), options.get("parser")
        self._sender = MQMeshProducer(producer, encoder, parser, options.get("decoder"))
        config = MQMeshBrokerConfig(
            **_shared(options),
            broker_codec=codec,
            producer=self._sender,
            consumers=GroupConsumers(consumer, puller),
            fd_config=depends,
            graceful_timeout=graceful_s,
            extra_context={"broker": self},
            logger=_LoggerState(
                options.get("log_level", logging.INFO),
                make_logger_storage(
                    options.get("logger", EMPTY),
                    _LoggerStorage,  # type: ignore[type-abstract]
                ),
            ),
        )
        specification = BrokerSpec(
            url=self._client.namesrv_addresses(),
            protocol="mqmesh",
            protocol_version=None,
            description=options.get("description"),
            tags=options.get("tags", ()),
            security=None,
        )
        routers = options.get("routers", ())
        super().__init__(config=config, specification=specification, routers=routers)

    async def _connect(self) -> Producer:
        return await self._sender.start()

    async def start(self) -> None:
        """Connects; handlers are called from now on.

        Raises:
            MQMeshError: As for ``PushConsumer.start``.
        """
        await self.connect()
        await super().start()
        await self._consumers.start()

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Ends the calls that run, commits and disconnects."""
        # The groups first and as wholes: a member never has half of its topics.
        await self._consumers.close()
        await super().stop(exc_type, exc_val, exc_tb)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def ping(self, timeout: float | None = None) -> bool:
        """Return True if a name server with brokers answers, within ``timeout`` seconds (3)."""
        if self._connection is None:
            return False
        client, timeout_ms = self._client, round((timeout or _PING_S) * 1_000)
        try:
            async with AdminClient(
                client.namesrv_addr,
                timeout_ms=timeout_ms,
                credentials=client.credentials,
                namespace=client.namespace,
            ) as admin:
                return bool((await admin.cluster()).brokers)
        except MQMeshError:
            return False

    async def publish(
        self,
        message: Any,
        /,
        topic: str,
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        timeout_ms: int | None = None,
        **fields: Unpack[SendFields],
    ) -> SendResult:
        """Sends a value and waits until it is stored.

        Args:
            message: Bytes, text, or a value for the serializer: models, dataclasses, JSON's types.
            topic: Topic.
            headers: Properties of the message.
            correlation_id: A new one by default.
            reply_to: Topic that its handler sends the result to.
            timeout_ms: Until then; by default ``send_msg_timeout_ms`` of producers.
            fields: ``tag``, ``keys``, ``sharding_key``, ``delay_level``, ``deliver_at_ms`` and
                ``flag`` of the ``Message``.

        Raises:
            MQMeshError: As for ``Producer.send``.
        """
        command = MQMeshPublishCommand(
            message,
            destination=topic,
            headers=dict(headers or {}),
            correlation_id=correlation_id or self.config.id_generator(),
            reply_to=reply_to,
            timeout_ms=timeout_ms,
            fields=fields,
            _publish_type=PublishType.PUBLISH,
        )
        sent: SendResult = await self._basic_publish(command, producer=self.config.producer)
        return sent

    async def publish_batch(  # type: ignore[override]
        self,
        *messages: Any,
        topic: str,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        timeout_ms: int | None = None,
        **fields: Unpack[SendFields],
    ) -> SendResult:
        """Sends values as one batch, which is stored as a whole or not at all.

        Args:
            messages: At least one.
            topic, headers, correlation_id, timeout_ms, fields: As for ``publish``, for all of them.

        Raises:
            InvalidArgument: There is no value.
            MQMeshError: As for ``Producer.send_batch``.
        """
        if not messages:
            raise InvalidArgument("publish_batch needs at least one value to send")
        command = MQMeshPublishCommand(
            *messages,
            destination=topic,
            headers=dict(headers or {}),
            correlation_id=correlation_id or self.config.id_generator(),
            timeout_ms=timeout_ms,
            fields=fields,
            _publish_type=PublishType.PUBLISH,
        )
        sent: SendResult = await self._basic_publish_batch(command, producer=self.config.producer)
        return sent

    async def request(  # type: ignore[override]
        self,
        message: Any,
        /,
        topic: str,
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        timeout_ms: int | None = None,
        **fields: Unpack[SendFields],
    ) -> MQMeshMessage:
        """Sends a value and awaits its handler's result: ``await reply.decode()``.

        Raises:
            RequestTimeout: No reply came in time (``timeout_ms``).
            MQMeshError: As for ``Producer.request``.
        """
        command = MQMeshPublishCommand(
            message,
            destination=topic,
            headers=dict(headers or {}),
            correlation_id=correlation_id or self.config.id_generator(),
            timeout_ms=timeout_ms,
            fields=fields,
            _publish_type=PublishType.REQUEST,
        )
        reply: MQMeshMessage = await self._basic_request(command, producer=self.config.producer)
        return reply

    @property
    def _consumers(self) -> GroupConsumers:
        consumers: GroupConsumers = self.config.consumers
        return consumers


class MQMeshRoute(SubscriberRoute):
    """A handler in the list of a router; arguments as for ``MQMeshBroker.subscriber``."""


class MQMeshRoutePublisher(ArgsContainer):
    """A publisher in the list of a route; arguments as for ``MQMeshBroker.publisher``."""


class MQMeshRouter(MQMeshRegistrator, BrokerRouter[Delivery, MQMeshBrokerConfig]):
    """Handlers of a part of an application, for ``broker.include_router``.

    Args:
        prefix: In front of all of its topics.
        handlers: Such that are not made by decorators.
        include_in_schema: False keeps them out of AsyncAPI's document.
        options: As for ``MQMeshBroker``.
    """

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[MQMeshRoute] = (),
        *,
        include_in_schema: bool | None = None,
        **options: Unpack[SharedKeywords],
    ) -> None:
        config = MQMeshBrokerConfig(
            **_shared(options), prefix=prefix, include_in_schema=include_in_schema
        )
        routers = options.get("routers", ())
        super().__init__(config=config, handlers=handlers, routers=routers)


class _LoggerState(LoggerState):
    def log(
        self,
        message: str,
        log_level: int | None = None,
        extra: dict[str, Any] | None = None,
        exc_info: BaseException | None = None,
    ) -> None:
        """Log one line without a traceback for a dead letter that is made on purpose.

        These are a ``Reject``, an error of ``dead_letter_on``, and a body of the wrong type.
        """
        if exc_info is not None:
            is_wanted = isinstance(exc_info, (Reject, *dead_letter_on.get()))
            is_wanted = is_wanted or is_of_body(exc_info)
            message = one_line(cut(message)) if is_wanted else cut(message)
            exc_info = None if is_wanted else error_to_log(exc_info)
        super().log(message, log_level, extra, exc_info)


class _LoggerStorage(DefaultLoggerStorage):
    def get_logger(self, *, context: ContextRepo) -> LoggerProto:
        logger = self._get_logger_ref()
        if logger is None:
            own = "%(topic)s | %(group)s | %(message_id)s"
            logger = get_broker_logger(
                name="mqmesh",
                default_context={"topic": "", "group": ""},
                message_id_ln=32,
                fmt=f"%(asctime)s %(levelname)-8s - {own} - %(message)s",
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(logger)
        return logger


def _shared(options: SharedKeywords) -> dict[str, Any]:
    return {
        "broker_parser": options.get("parser"),
        "broker_decoder": options.get("decoder"),
        "broker_middlewares": options.get("middlewares", ()),
        "broker_dependencies": options.get("dependencies", ()),
        "ack_policy": options.get("ack_policy", EMPTY),
    }

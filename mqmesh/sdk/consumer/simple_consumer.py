"""Simple consumer: the application receives messages, and acknowledges each."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Self, Unpack

from mqmesh.errors import ClientClosed, InvalidArgument, MQMeshError
from mqmesh.failure_text import failure_text
from mqmesh.message import StoredMessage, check_consumer_group, check_topic
from mqmesh.protocol.delivery import (
    BY_SCHEDULE,
    MAX_INVISIBLE_MS,
    MAX_NACK_MS,
    MAX_RECEIVED,
    MIN_INVISIBLE_MS,
    DeliveryMode,
    SettleAction,
)
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.protocol.retries import MAX_REASON_CHARACTERS
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr, client_options, make_options
from mqmesh.sdk.consumer.consumer_options import SimpleConsumerKeywords, SimpleConsumerOptions
from mqmesh.sdk.consumer.fetching.message_selector import (
    MessageSelector,
    Wanted,
    as_selector,
    check_not_subscribed,
)
from mqmesh.sdk.consumer.listening.consume_result import is_rejected
from mqmesh.sdk.consumer.processing import Processing
from mqmesh.sdk.consumer.receive_engine import ReceiveEngine
from mqmesh.sdk.consumer.receiving.receive_source import Demand
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport

CALL_MS: Final = 1_000
"""A call waits so much longer for its outcome than a settlement is tried, or than brokers wait."""
LOOK_AGAIN_MS: Final = 1_000
"""A receive sends new requests after so long, in case a broker has come since."""

_log = logging.getLogger(__name__)


class SimpleConsumer:
    """Consumer that receives messages and acknowledges each; RocketMQ 5's name.

    Any number of members share the messages of a topic with any number of queues. A message goes
    to one member, no other member gets it until its lease ends, and it is redelivered unless it is
    acknowledged. All methods may be called from any thread::

        with SimpleConsumer("billing") as consumer:
            consumer.subscribe("orders")
            while True:
                for message in consumer.receive():
                    try:
                        bill(message)
                    except Later:
                        consumer.nack(message, delay_ms=5_000)
                    except Bad as error:
                        consumer.reject(message, str(error))
                    else:
                        consumer.ack(message)

    The group has ``delivery`` "message": `mqmesh group create billing --delivery message`, or by
    itself when its first member is a simple consumer.

    Args:
        group: Consumer group, 1 to 255 characters of ``[%|a-zA-Z0-9_.-]``.
        namesrv_addr: ``host:port`` of the name servers, as a list, or as a text separated by
            commas or semicolons. By default those of ``client``, or of `mqmesh up`.
        credentials: Path of the file with the client's keys, or ``Credentials``, where security
            is on; by default those of ``client``.
        namespace: Namespace of all topics and groups, see docs/namespaces.md; by default that of
            ``client``, else of the environment (MQMESH_NAMESPACE).
        client: Settings of the connection.
        transport: The world; ZeroMQ by default.
        options: Fields of ``SimpleConsumerOptions``, by name.

    Raises:
        InvalidArgument: A name or an option is out of bounds.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv_addr: NamesrvAddr | None = None,
        credentials: str | Credentials | None = None,
        namespace: str | None = None,
        client: ClientOptions | None = None,
        transport: Transport | None = None,
        **options: Unpack[SimpleConsumerKeywords],
    ) -> None:
        self.group = check_consumer_group(group)
        self.options = make_options(SimpleConsumerOptions, options, "consumer option")
        if self.options.delivery is DeliveryMode.QUEUE:
            raise InvalidArgument("a simple consumer has delivery = message or fifo")
        if self.options.consume_from_where == ConsumeFromWhere.TIMESTAMP:
            raise InvalidArgument("a simple consumer begins at FIRST_OFFSET or LAST_OFFSET")
        self._client = client_options(client, namesrv_addr, credentials, namespace)
        self._transport = transport
        self._subscribed: dict[str, MessageSelector] = {}
        self._state = "new"
        self._engine = self._make_engine()

    def _make_engine(self) -> ReceiveEngine:
        engine = ReceiveEngine(self.group, self._client, self.options, self._transport)
        for topic, selector in self._subscribed.items():
            engine.subscribe(topic, selector)
        return engine

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> None:
        """Connect in the background; further calls do nothing.

        A closed consumer may be started again, with the subscriptions that it had.

        Raises:
            ClientClosed: It is being closed, or it was given a transport, which is closed with it.
            TooManyOpenFiles: The process has too few descriptors left.
        """
        if self._state == "closing":
            raise ClientClosed("the consumer is still being closed; start it again later")
        if self._state == "closed":
            self._engine.client.check_replaceable("consumer")
            self._engine, self._state = self._make_engine(), "new"
        if self._state == "new":
            self._state = "running"
            try:
                self._engine.start()
            except BaseException:
                self._state = "new"  # there is nothing to give back
                self.close()
                raise

    def close(self) -> None:
        """Give back messages that are not settled, so that others get them at once; idempotent."""
        if self._state in ("closing", "closed"):
            return
        running, self._state = self._state == "running", "closing"
        try:
            self._engine.wake()
            if running and not self._engine.client.closed:
                self._engine.client.call(self._engine.leave, CALL_MS)
        except MQMeshError:
            pass  # the leases end by themselves
        finally:
            self._engine.close()
            self._state = "closed"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def client_id(self) -> str:
        """Id of this member at brokers."""
        return self._engine.client.client_id

    # ---- Topics ----------------------------------------------------------------------

    def subscribe(self, topic: str, expression: Wanted = "*") -> None:
        """Subscribe to a topic; before or after ``start``.

        Args:
            topic: Topic; it need not exist yet.
            expression: Tags joined by ``||``, ``*`` for all messages, or a ``MessageSelector`` of
                tags or SQL92. All members of a group have the same.

        Raises:
            InvalidArgument: The topic's name or the expression is illegal, it is a filter in
                Python, or the topic is subscribed already.
            ClientClosed: After ``close``.
        """
        check_topic(topic)
        selector = as_selector(expression)
        if selector.python is not None:
            raise InvalidArgument("a simple consumer takes tags or SQL92, no filter in Python")
        check_not_subscribed(topic, self._subscribed)
        self._do_subscribe(topic, selector)
        self._subscribed[topic] = selector

    def unsubscribe(self, topic: str) -> None:
        """End the subscription of a topic; its messages that are not settled go back.

        Raises:
            ClientClosed: After ``close``.
        """
        self._check_not_closed()
        if self._subscribed.pop(topic, None) is None:
            return
        if self._state == "new":
            self._engine.unsubscribe(topic)
        else:
            self._engine.client.post(lambda: self._engine.unsubscribe(topic))

    def _do_subscribe(self, topic: str, selector: MessageSelector) -> None:
        self._check_not_closed()
        if self._state == "new":
            self._engine.subscribe(topic, selector)
        else:
            self._engine.client.post(lambda: self._engine.subscribe(topic, selector))

    # ---- Messages --------------------------------------------------------------------

    def receive(
        self,
        max_messages: int = 32,
        invisible_ms: int | None = None,
        wait_ms: int = 15_000,
    ) -> list[StoredMessage]:
        """Wait for messages, and return as soon as there are some.

        ``message.delivery_attempt`` counts from 1, ``message.receipt`` names the delivery.

        Args:
            max_messages: Most messages, 1 to 1,024.
            invisible_ms: Time for which no other member gets them, 1,000 to 43,200,000 ms; by
                default that of the group's settings.
            wait_ms: Time that brokers may wait for a message, from 0. Their answers may take
                longer, up to a second.

        Returns:
            Messages; none if none came in time.

        Raises:
            InvalidArgument: An argument is out of bounds.
            ClientClosed: Before ``start``, or after ``close``.
            NoPermission: Brokers refuse the group or a topic, or the group is in another delivery
                mode.
            TopicNotFound: A topic does not exist, with ``topic_must_exist``.
        """
        demand, caller = self._demand(max_messages, invisible_ms, wait_ms), object()
        if found := self._take(max_messages):
            return found
        try:
            while (looked := self._look(caller, demand)) is None:
                self._engine.wait(self._pause_ms(demand))
            return looked
        finally:
            self._engine.done(caller)

    def ack(self, message: StoredMessage) -> None:
        """Acknowledge a message: it never comes again. Return once its broker has noted that.

        Raises:
            StaleReceipt: Its lease ended, and another member has got it.
            ClientClosed: Before ``start``, or after ``close``.
            MQMeshError: No broker took it within ``settle_timeout_ms``: it may come again.
        """
        self._settle([message], SettleAction.ACK)

    def ack_many(self, messages: Iterable[StoredMessage]) -> None:
        """Acknowledge messages in few requests; see ``ack``.

        Raises:
            StaleReceipt: Of one of them; the others are settled.
            ClientClosed, MQMeshError: As for ``ack``.
        """
        self._settle(list(messages), SettleAction.ACK)

    def ack_async(self, message: StoredMessage) -> "Future[None]":
        """Acknowledge a message without waiting; messages of many calls share requests.

        Returns:
            A future, done once brokers have that; its error is as of ``ack``.

        Raises:
            ClientClosed: Before ``start``, or after ``close``.
        """
        return self._settle_later([message], SettleAction.ACK)

    def nack(self, message: StoredMessage, delay_ms: int | None = None, reason: str = "") -> None:
        """Report that a message failed: it comes again, to any member, or becomes a dead letter.

        Args:
            message: As it was received.
            delay_ms: Delay until it comes again, 0 to 86,400,000 ms; by default that of the group's
                retry schedule. Beyond 30,000 it waits in the schedule service, whose delay levels
                count.
            reason: Reason of the failure, up to 1,024 characters; it travels with a message that
                waits long, and with a dead letter.

        Raises:
            InvalidArgument: The delay is out of bounds.
            StaleReceipt, ClientClosed, MQMeshError: As for ``ack``.
        """
        self._settle([message], SettleAction.NACK, check_delay(delay_ms), reason)

    def reject(self, message: StoredMessage, reason: str = "") -> None:
        """Reject a message that will never succeed: it becomes a dead letter now.

        Args:
            message: As it was received.
            reason: Reason for the dead letter, up to 1,024 characters.

        Raises:
            StaleReceipt, ClientClosed, MQMeshError: As for ``ack``.
        """
        self._settle([message], SettleAction.REJECT, reason=reason)

    def extend(self, message: StoredMessage, invisible_ms: int) -> None:
        """Extend the lease of a message: no other member gets it for so long from now on.

        The same holds of all messages that were received together from its queue.

        Args:
            message: As it was received.
            invisible_ms: 1,000 to 43,200,000 ms; a lease is never made shorter.

        Raises:
            InvalidArgument: It is out of bounds.
            StaleReceipt, ClientClosed, MQMeshError: As for ``ack``.
        """
        check_invisible(invisible_ms)
        self._settle([message], SettleAction.EXTEND, invisible_ms)

    def processing(self, messages: Sequence[StoredMessage]) -> Processing:
        """Return a block whose outputs are stored when its messages are done::

            with consumer.processing(messages) as out:
                for message in messages:
                    out.send(Message("bills", bill(message)))

        Both are stored at once, or neither: docs/exactly-once.md. If the block raises, or its
        outputs cannot be stored, the messages are refused as by ``nack`` (one message whose block
        raises ``Reject`` as by ``reject``), and the error goes on.

        Args:
            messages: As they were received, of one topic and one broker group, to which the outputs
                go, too.

        Raises:
            InvalidArgument: There are none.
            ClientClosed: Before ``start``, or after ``close``.
        """
        self._check_running()
        engine, received = self._engine, list(messages)

        def refuse(error: Exception) -> None:
            action, reason = refusal_of(received, error)
            try:
                self._settle(received, action, reason=reason)
            except MQMeshError as problem:
                _log.info("messages that were not processed come again later: %s", problem)

        return Processing(engine.client, received, engine.processed_commits.commit, refuse)

    # ---- Helpers ---------------------------------------------------------------------

    def _demand(self, max_messages: int, invisible_ms: int | None, wait_ms: int) -> Demand:
        """Check the arguments of a receive."""
        self._check_running()
        if not 1 <= max_messages <= MAX_RECEIVED:
            raise InvalidArgument(
                f"max_messages must be within 1 and {MAX_RECEIVED}, not {max_messages}"
            )
        if wait_ms < 0:
            raise InvalidArgument(f"wait_ms must not be negative, as {wait_ms} is")
        if invisible_ms is not None:
            check_invisible(invisible_ms)
        return Demand(max_messages, invisible_ms or 0, self._now_ms() + wait_ms)

    def _look(self, caller: object, demand: Demand) -> list[StoredMessage] | None:
        """Return messages; none once the time is over; None to look again after a pause."""
        late_ms = self._now_ms() - demand.until_ms
        answered = self._engine.is_answered(caller)
        found = self._take(demand.max_messages)
        if found or (late_ms >= 0 and (answered or late_ms >= CALL_MS)):
            return found
        self._engine.want(caller, demand)
        return None

    def _pause_ms(self, demand: Demand) -> int:
        """Return how long to wait at most before the next look."""
        left_ms = demand.until_ms - self._now_ms()
        return min(left_ms, LOOK_AGAIN_MS) if left_ms > 0 else CALL_MS

    def _now_ms(self) -> int:
        return self._engine.client.loop.clock.monotonic_ms()

    def _take(self, max_messages: int) -> list[StoredMessage]:
        self._check_running()
        found = self._engine.take(max_messages)
        if not found and self._engine.hindrances.fatal is not None:
            raise self._engine.hindrances.fatal
        return found

    def _settle(
        self,
        messages: list[StoredMessage],
        action: SettleAction,
        delay_ms: int = BY_SCHEDULE,
        reason: str = "",
    ) -> None:
        self._check_running()
        timeout_ms = self.options.settle_timeout_ms + CALL_MS
        if action is SettleAction.ACK and self._engine.settle_alone(messages, timeout_ms):
            return

        def settle(done: Callable[[bool | MQMeshError], None]) -> None:
            self._engine.settle(
                messages,
                action,
                lambda error: done(True if error is None else error),
                delay_ms=delay_ms,
                reason=reason[:MAX_REASON_CHARACTERS],
            )

        self._engine.client.call(settle, timeout_ms)

    def _settle_later(
        self,
        messages: list[StoredMessage],
        action: SettleAction,
        delay_ms: int = BY_SCHEDULE,
        reason: str = "",
    ) -> "Future[None]":
        self._check_running()
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def done(error: MQMeshError | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._engine.client.post(
            lambda: self._engine.settle(
                messages, action, done, delay_ms=delay_ms, reason=reason[:MAX_REASON_CHARACTERS]
            )
        )
        return future

    def _check_not_closed(self) -> None:
        if self._state in ("closing", "closed"):
            raise ClientClosed("the consumer was closed")

    def _check_running(self) -> None:
        if self._state == "running" and self._engine.client.closed:
            raise ClientClosed("the consumer's thread has ended; see the log")
        self._check_not_closed()
        if self._state != "running":
            raise ClientClosed("call start() first")


def refusal_of(messages: Sequence[StoredMessage], error: Exception) -> tuple[SettleAction, str]:
    """Return how messages are refused that could not be processed, and the reason."""
    action = SettleAction.REJECT if is_rejected(messages, error) else SettleAction.NACK
    return action, failure_text(error)[:MAX_REASON_CHARACTERS]


def check_delay(delay_ms: int | None) -> int:
    """Return the delay of a message that failed as brokers get it.

    Raises:
        InvalidArgument: It is out of bounds.
    """
    if delay_ms is None:
        return BY_SCHEDULE
    if not 0 <= delay_ms <= MAX_NACK_MS:
        raise InvalidArgument(f"delay_ms must be within 0 and {MAX_NACK_MS}, not {delay_ms}")
    return delay_ms


def check_invisible(invisible_ms: int) -> None:
    """Check the length of a lease.

    Raises:
        InvalidArgument: It is out of bounds.
    """
    if not MIN_INVISIBLE_MS <= invisible_ms <= MAX_INVISIBLE_MS:
        raise InvalidArgument(
            f"invisible_ms must be within {MIN_INVISIBLE_MS} and {MAX_INVISIBLE_MS}, not "
            f"{invisible_ms}"
        )

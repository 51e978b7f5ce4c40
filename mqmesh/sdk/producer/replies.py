"""Replies to consumed requests, on their way to the requester."""

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import msgspec

from mqmesh.errors import (
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    QueueFull,
)
from mqmesh.message import (
    PROPERTY_CORRELATION_ID,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
    Message,
    StoredMessage,
    as_system,
)
from mqmesh.message_checks import check_messages, check_not_reserved
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replies import SendReplyRequest, SendReplyResponse
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.outbox import Effects, OutgoingRequest, RequestOutbox
from mqmesh.transport.requests import no_connection

TRY_MS: Final = 3_000
"""Time for one try to hand a reply to a broker, which waits for up to 2 s for the client."""
PAUSE_MS: Final = 50
"""Pause between tries to deliver a reply, while the requester is away."""
IN_FLIGHT: Final = 256
"""Replies at a broker; each for a client that is away stays there for 2 s."""

ReplyFuture = Future[bool]
"""Future of a reply: True when it was taken."""

_encoder = msgspec.msgpack.Encoder()


def is_request(message: Message) -> bool:
    """Return True when the sender of a message waits for a reply to it."""
    return bool(
        message.property(PROPERTY_CORRELATION_ID) and message.property(PROPERTY_REPLY_TO_CLIENT)
    )


def make_reply(
    request: Message,
    body: bytes | bytearray | memoryview,
    *,
    max_message_size: int,
    tag: str | None = None,
    keys: Sequence[str] = (),
    properties: Mapping[str, str] | None = None,
) -> Message:
    """Return the message that answers a request.

    Raises:
        InvalidArgument: That message is no request, or the reply is illegal.
    """
    if not isinstance(request, Message) or not is_request(request):
        raise InvalidArgument("the sender of this message waits for no reply (see is_request)")
    own = {PROPERTY_CORRELATION_ID: request.property(PROPERTY_CORRELATION_ID) or ""}
    check_not_reserved(properties or {})
    reply = as_system(Message(request.topic, body, tag, keys), {**(properties or {}), **own})
    checked = check_messages((reply,), max_message_size=max_message_size, allow_system=True)
    return checked[0]


def time_to_live_ms(request: Message) -> int | None:
    """Return how long the requester waits from the sending on; None when it does not say."""
    # Any producer may set the property, so its text may be no number.
    text = request.property(PROPERTY_TTL, "") or ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


class _Reply(msgspec.Struct, eq=False):
    """A reply on its way; ``origin`` is the broker that its request came through."""

    future: ReplyFuture
    topic: str
    origin: str | None
    deadline_ms: int
    header: bytes
    body: bytes
    why: MQMeshError
    others: list[str] = []


class Replies:
    """Replies that their requesters have not taken yet: next broker and outcome of each.

    A reply goes through the broker that the request came through, because there the requester
    is connected; when that broker is away, the others of the topic are tried.

    Args:
        engine: The replying client's engine; only read, nothing is sent by it here.
        most: Replies that may wait at a time.
    """

    def __init__(self, engine: ClientEngine, most: int) -> None:
        self._engine = engine
        self._most = most
        self._open: dict[_Reply, None] = {}
        self._waiting: dict[str, deque[_Reply]] = {}

    def open(self, request: Message, reply: Message, deadline_ms: int) -> _Reply:
        """Open a reply; from any thread, arguments and errors as of ``ReplySender.send``."""
        if len(self._open) >= self._most:
            raise QueueFull(
                f"{self._most} replies are on their way, no more may be (max_pending_requests)"
            )
        header = SendReplyRequest(
            request.property(PROPERTY_REPLY_TO_CLIENT) or "",
            request.property(PROPERTY_CORRELATION_ID) or "",
            self._engine.transport.random.getrandbits(63),
        )
        one = _Reply(
            Future(),
            request.topic,
            request.info.broker_name if isinstance(request, StoredMessage) else None,
            deadline_ms,
            encode_header(header),
            _encoder.encode(reply),
            NoRoute(f"no broker of topic {request.topic!r} is known"),
        )
        self._open[one] = None
        return one

    def forget(self, one: _Reply) -> None:
        """Forget a reply that could not even begin."""
        self._open.pop(one, None)

    def place(self, one: _Reply) -> Effects | None:
        """Chooses the broker where a reply is tried next."""
        if self._is_over(one):
            return None
        broker_name = self._next(one)
        if broker_name is None:
            return self._later(one)
        self._waiting.setdefault(broker_name, deque()).append(one)
        return None

    def brokers(self) -> list[str]:
        """Return the brokers that replies wait for."""
        return [name for name, replies in self._waiting.items() if replies]

    def take(self, broker_name: str) -> OutgoingRequest | None:
        """Return the next reply for a broker."""
        waiting = self._waiting.get(broker_name)
        while waiting:
            one = waiting.popleft()
            if not self._is_over(one):
                left_ms = one.deadline_ms - self._now_ms()
                return OutgoingRequest(
                    RequestCode.SEND_REPLY_MESSAGE,
                    [one.body],
                    one.header,
                    min(left_ms, TRY_MS),
                    partial(self._answered, one),
                )
        return None

    def without(self, broker_name: str) -> Effects:
        """Find other brokers for replies that wait for a broker that cannot be connected to."""
        effects = Effects()
        for one in self._waiting.pop(broker_name, ()):
            one.why = no_connection(f"broker {broker_name}")
            placed = self.place(one)
            if placed is not None:
                effects.later += placed.later
        return effects

    def close(self, error: MQMeshError) -> None:
        """Ends every reply."""
        for one in list(self._open):
            self._finish(one, error)

    def _answered(self, one: _Reply, answer: Command | MQMeshError) -> Effects | None:
        if isinstance(answer, MQMeshError) and answer.retriable:
            one.why = answer
            return self._later(one)
        outcome: bool | MQMeshError
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            outcome = decode_header(SendReplyResponse, answer.header).taken
        except MQMeshError as error:
            outcome = error
        self._finish(one, outcome)
        return None

    def _later(self, one: _Reply) -> Effects:
        delay_ms = max(min(PAUSE_MS, one.deadline_ms - self._now_ms()), 0)
        return Effects(later=[(delay_ms, partial(self.place, one))])

    def _is_over(self, one: _Reply) -> bool:
        if one.future.cancelled():
            self._open.pop(one, None)
        elif one.deadline_ms <= self._now_ms():
            self._finish(one, one.why)
        return one not in self._open

    def _next(self, one: _Reply) -> str | None:
        origin = one.origin
        if origin is not None and self._engine.brokers.may_come(origin):
            return origin
        if not one.others:
            brokers = {one.broker_name for one in self._engine.routes.publish_queues(one.topic)}
            one.others = sorted(name for name in brokers if self._engine.brokers.may_come(name))
        return one.others.pop() if one.others else origin

    def _finish(self, one: _Reply, outcome: bool | MQMeshError) -> None:
        self._open.pop(one, None)
        if not one.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, MQMeshError):
            one.future.set_exception(outcome)
        else:
            one.future.set_result(outcome)

    def _now_ms(self) -> int:
        return self._engine.loop.clock.monotonic_ms()


class ReplySender:
    """Sender of replies; repeats each until the requester took it or its time is over.

    Args:
        engine: The replying client's engine.
        most: Replies that may be on their way at a time.
    """

    def __init__(self, engine: ClientEngine, most: int) -> None:
        self._engine = engine
        self._replies = Replies(engine, most)
        self._outbox = RequestOutbox(engine, self._replies, IN_FLIGHT)

    def send(self, request: Message, reply: Message, deadline_ms: int) -> ReplyFuture:
        """Sends a reply, soon; from any thread.

        Args:
            request: The request.
            reply: Made by ``make_reply``.
            deadline_ms: By the engine's monotonic clock.

        Returns:
            Future that says whether the requester took it.

        Raises:
            QueueFull: Too many are on their way.
            ClientClosed: The client is closed.
        """
        one = self._replies.open(request, reply, deadline_ms)
        try:
            self._outbox.post(partial(self._begin, one))
        except ClientClosed:
            self._replies.forget(one)
            raise
        return one.future

    def end_all(self, error: MQMeshError) -> None:
        """Ends every reply; in the client loop, at its end."""
        self._outbox.close(error)
        self._replies.close(error)

    def _begin(self, one: _Reply) -> Effects | None:
        origin = one.origin
        if origin is not None and self._engine.routes.address(origin) is not None:
            return self._replies.place(one)
        self._engine.finder.find(one.topic, lambda _: self._found(one))
        return None

    def _found(self, one: _Reply) -> None:
        try:
            self._outbox.post(partial(self._replies.place, one))
        except ClientClosed:
            return  # closing ends it

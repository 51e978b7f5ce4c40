"""Requests that wait for a reply."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from mqmesh.errors import (
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    QueueFull,
    RemoteProtocolError,
    RequestTimeout,
)
from mqmesh.message import (
    PROPERTY_CORRELATION_ID,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
    Message,
    StoredMessage,
    as_system,
    without_reserved,
)
from mqmesh.message_checks import check_not_reserved
from mqmesh.metrics import Measured, counter, gauge
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replies import (
    AcknowledgeReply,
    PushReply,
)
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.transport.interface import Timer

REMEMBERED_REPLIES: Final = 1_024
"""Replies taken of late: one that comes a second time, because its acknowledgement was lost,
is distinguished from one that comes too late."""
SWEEP_MS: Final = 20
"""Least time between two searches for requests whose time is over."""

RequestFuture = Future[Message]
"""The reply to a request, when it comes."""

_PROPERTIES: Final = (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, PROPERTY_TTL)
_decoder = msgspec.msgpack.Decoder(Message)
_log = logging.getLogger(__name__)


class _WaitingForReply(msgspec.Struct, frozen=True):
    future: RequestFuture
    deadline_ms: int
    timeout_ms: int


class Requests:
    """The requests of one client that have no reply yet.

    Args:
        engine: The client's engine.
        most: Requests that may wait at a time.

    Attributes:
        late_replies: Number of replies that came after the end of their wait.
    """

    def __init__(self, engine: ClientEngine, most: int) -> None:
        self._engine = engine
        self._most = most
        self._lock = ranked_lock(LockRank.LEAF)
        self._waiting: dict[str, _WaitingForReply] = {}
        self._taken: OrderedDict[str, int] = OrderedDict()
        self._sweep_due_ms: int | None = None
        self._sweep_timer: Timer | None = None
        self.late_replies = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self, message: Message, timeout_ms: int) -> tuple[Message, str, RequestFuture]:
        """Begins to wait for a reply; from any thread.

        Args:
            message: Request.
            timeout_ms: Longest wait for the reply.

        Returns:
            The message to send, the request's correlation id, and its reply to come.

        Raises:
            InvalidArgument: It is no message, or has one of the properties that make a request.
            QueueFull: Too many requests wait already.
            ClientClosed: The client is closed.
        """
        asking, correlation_id = self._as_request(message, timeout_ms)
        future: RequestFuture = Future()
        deadline_ms = self._now_ms() + timeout_ms
        with self._lock:
            if len(self._waiting) >= self._most:
                raise QueueFull(
                    f"{self._most} requests wait for replies, no more may (max_pending_requests)"
                )
            self._waiting[correlation_id] = _WaitingForReply(future, deadline_ms, timeout_ms)
            due_ms = self._sweep_due_ms
            is_first = due_ms is None or deadline_ms < due_ms
            if is_first:
                self._sweep_due_ms = deadline_ms
        # A caller that gives up, as a cancelled coroutine does, makes room for another.
        future.add_done_callback(lambda _: self._drop(correlation_id))
        if is_first:
            try:
                self._engine.post(lambda: self._plan(deadline_ms))
            except ClientClosed:
                self._drop(correlation_id)
                raise
        return asking, correlation_id, future

    def fail(self, correlation_id: str, error: BaseException) -> None:
        """End a request that could not be sent, unless it has ended."""
        waiting = self._drop(correlation_id)
        if waiting is not None and waiting.future.set_running_or_notify_cancel():
            waiting.future.set_exception(error)

    def on_push(self, broker_name: str, command: Command) -> None:
        """Take a reply that a broker hands over; in the client loop."""
        try:
            push = decode_header(PushReply, command.header)
            reply = _decoder.decode(command.body)
        except (RemoteProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.warning("broker %s pushed what is no reply: %s", broker_name, error)
            return
        taken = self._take(push, reply)
        try:
            self._engine.brokers.connection(broker_name).oneway(
                RequestCode.ACKNOWLEDGE_REPLY,
                header=encode_header(AcknowledgeReply(push.token, taken)),
            )
        except MQMeshError as error:
            # The replier tries again, and gets the acknowledgement then.
            _log.info("a reply could not be acknowledged to broker %s: %s", broker_name, error)

    def end_all(self, error: MQMeshError) -> None:
        """Ends every request with an error; the client is closed."""
        for correlation_id in list(self._waiting):
            self.fail(correlation_id, error)

    def _as_request(self, message: Message, timeout_ms: int) -> tuple[Message, str]:
        if not isinstance(message, Message):
            raise InvalidArgument(f"must be a Message, not {type(message).__name__}")
        properties = message.properties or {}
        if not isinstance(properties, dict):
            raise InvalidArgument("properties must be a dict of str to str")
        if isinstance(message, StoredMessage):
            properties = without_reserved(message).properties or {}
        check_not_reserved(properties)
        correlation_id = self._engine.transport.random.randbytes(16).hex()
        own = (correlation_id, self._engine.client_id, str(timeout_ms))
        properties = {**properties, **dict(zip(_PROPERTIES, own, strict=True))}
        return as_system(message, properties), correlation_id

    def _take(self, push: PushReply, reply: Message) -> bool:
        correlation_id = push.correlation_id
        waiting = self._drop(correlation_id)
        if waiting is not None and waiting.future.set_running_or_notify_cancel():
            self._taken[correlation_id] = push.attempt_id
            if len(self._taken) > REMEMBERED_REPLIES:
                self._taken.popitem(last=False)
            waiting.future.set_result(reply)
            return True
        if self._taken.get(correlation_id) == push.attempt_id:
            return True  # it is here, but its acknowledgement was lost
        self.late_replies += 1
        _log.info("a reply to %s came when nobody waited for it any more", correlation_id)
        return False

    def _drop(self, correlation_id: str) -> _WaitingForReply | None:
        with self._lock:
            return self._waiting.pop(correlation_id, None)

    def _plan(self, due_ms: int) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        delay_ms = max(due_ms - self._now_ms(), SWEEP_MS)
        self._sweep_timer = self._engine.loop.call_later(delay_ms, self._sweep)

    def _sweep(self) -> None:
        now_ms = self._now_ms()
        with self._lock:
            late = [key for key, one in self._waiting.items() if one.deadline_ms <= now_ms]
            left = [one.deadline_ms for one in self._waiting.values() if one.deadline_ms > now_ms]
            due_ms = self._sweep_due_ms = min(left, default=None)
            ended = [(key, self._waiting[key].timeout_ms) for key in late]
        for correlation_id, timeout_ms in ended:
            error = RequestTimeout(
                f"no reply within {timeout_ms} ms; whether the request was handled is unknown"
            )
            self.fail(correlation_id, error)
        if due_ms is not None:
            self._plan(due_ms)

    def _now_ms(self) -> int:
        return self._engine.loop.clock.monotonic_ms()


OnReply = Callable[[RequestFuture], Any]
"""Callback with a reply, or why there is none, in the producer's own thread."""


REQUEST_METRICS: Final[tuple[Measured[Requests], ...]] = (
    gauge("pending_requests", "requests that wait for their replies", len),
    counter(
        "late_replies_total",
        "replies that came when nobody waited for them any more",
        lambda requests: requests.late_replies,
    ),
)

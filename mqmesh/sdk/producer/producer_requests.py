"""The part of a producer that asks, replies and cancels, beside its sends."""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Unpack

from mqmesh.errors import InvalidArgument, RequestTimeout
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.schedule import CancelDelayedRequest
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.queue_selector import QueueChoice, QueueSelector
from mqmesh.sdk.producer.requests import (
    OnReply,
    ReplyFuture,
    ReplySender,
    RequestFuture,
    Requests,
    make_reply,
    time_to_live_ms,
)
from mqmesh.sdk.producer.send_result import GRACE_MS, OnDone, SendFuture, SendResult
from mqmesh.transport.interface import OnDone as OnAnswer

_T = TypeVar("_T")


class ProducerRequests:
    """Requests, replies and cancellations of a ``Producer``, which inherits them."""

    options: ProducerOptions
    _engine: ClientEngine
    _requests: Requests

    def cancel_delayed(self, sent: SendResult, *, timeout_ms: int | None = None) -> None:
        """Cancels a delayed message that was sent on its own and waits still.

        Args:
            sent: What its send returned, here or at another producer of the cluster.
            timeout_ms: In place of ``send_msg_timeout_ms``.

        Raises:
            InvalidArgument: That is no ``SendResult``, or one of a batch; ``DelayClient`` cancels
                single messages of one, by their ``message_ids``.
            CancelRefused: It was delivered or cancelled before, or is being delivered.
            BrokerError: The broker does not know it, or cannot tell now.
            NoRoute, RequestTimeout, EndpointUnreachable: Whether it is cancelled is unknown.
            ClientClosed: The producer is not running.
        """
        self._check_blocking()
        if not isinstance(sent, SendResult) or sent.message_count != 1:
            raise InvalidArgument(
                f"must be the SendResult of one message, not {sent!r:.100}; DelayClient.cancel and "
                "`mqmesh schedule cancel` take a message id"
            )
        deadline_ms = self._deadline(timeout_ms)
        queue = sent.message_queue
        if self._engine.routes.address(queue.broker_name) is None:
            # A topic that the send made just now may not have a route yet: asked only in need.
            self._engine.wait_route(queue.topic, max(deadline_ms - self._now_ms(), 1))
        left_ms = max(deadline_ms - self._now_ms(), 1)
        header = encode_header(CancelDelayedRequest(sent.producer_id, sent.sequence))
        code = RequestCode.CANCEL_DELAYED

        def ask(done: OnAnswer) -> None:
            self._engine.request(queue.broker_name, code, done, header=header, timeout_ms=left_ms)

        self._engine.call(ask, left_ms + GRACE_MS)

    def request(
        self, message: Message, timeout_ms: int | None = None, **choice: Unpack[QueueChoice]
    ) -> Message:
        """Sends a message and waits for the reply that a consumer makes with ``reply``.

        The request is stored and consumed like every message; the reply comes straight to this
        producer, through the broker, and is not stored.

        Args:
            message: What is asked.
            timeout_ms: For request and reply together, ``send_msg_timeout_ms`` by default.
            choice: ``queue``, ``selector`` and ``arg``, as for ``send``.

        Raises:
            RequestTimeout: No reply in time; whether the request was handled is unknown.
            QueueFull: ``max_pending_requests`` wait already.
            MQMeshError: The request could not be sent; as for ``send``.
        """
        self._check_blocking()
        future = self.request_async(message, timeout_ms=timeout_ms, **choice)
        return _wait(future, timeout_ms or self.options.send_msg_timeout_ms)

    def request_async(
        self,
        message: Message,
        on_done: OnReply | None = None,
        *,
        timeout_ms: int | None = None,
        **choice: Unpack[QueueChoice],
    ) -> RequestFuture:
        """Sends a request without waiting for its reply.

        Args:
            message, timeout_ms, choice: As for ``request``.
            on_done: Called with the future when it is done, in the producer's own thread.

        Returns:
            A ``concurrent.futures.Future`` of the reply; who cancels it is not told any more,
            but the request may be handled all the same.

        Raises:
            InvalidArgument, NoRoute, ClientClosed, QueueFull: As for ``send_async``.
        """
        left_ms = self._deadline(timeout_ms) - self._now_ms()
        asking, correlation_id, future = self._requests.open(message, left_ms)
        if on_done is not None:
            future.add_done_callback(on_done)

        def sent(outcome: SendFuture) -> None:
            error = outcome.exception()
            if error is not None:
                self._requests.fail(correlation_id, error)

        try:
            send_ms = min(left_ms, self.options.send_msg_timeout_ms)
            self.send_async(asking, sent, timeout_ms=send_ms, **choice)
        except BaseException:
            future.cancel()
            raise
        return future

    def reply(
        self,
        request: Message,
        body: bytes | bytearray | memoryview,
        *,
        tag: str | None = None,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
    ) -> bool:
        """Replies to a consumed request, and waits until that is known to have arrived.

        Tried again while the broker, or whoever asked, is away for a moment.

        Args:
            request: The message as it was consumed; ``is_request`` tells whether it is one.
            body, tag, keys, properties: Of the reply.
            timeout_ms: ``send_msg_timeout_ms`` by default, and never longer than the sender of
                the request said it would wait.

        Returns:
            True when whoever asked has the reply; False when nobody waits for it any more.

        Raises:
            InvalidArgument: The message is no request, or the reply is illegal.
            ClientNotOnline: Whoever asked was not there until the time was over.
            MQMeshError: The broker could not be reached, or refused.
        """
        self._check_blocking()
        future = self.reply_async(
            request, body, tag=tag, keys=keys, properties=properties, timeout_ms=timeout_ms
        )
        return _wait(future, timeout_ms or self.options.send_msg_timeout_ms)

    def reply_async(
        self,
        request: Message,
        body: bytes | bytearray | memoryview,
        *,
        tag: str | None = None,
        keys: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout_ms: int | None = None,
    ) -> ReplyFuture:
        """Replies without waiting; arguments and outcome as of ``reply``.

        Raises:
            InvalidArgument, ClientClosed: As for ``reply``.
        """
        deadline_ms = self._deadline(timeout_ms)
        most = self.options.max_message_size
        reply = make_reply(
            request, body, max_message_size=most, tag=tag, keys=keys, properties=properties
        )
        to_live_ms = time_to_live_ms(request)
        if to_live_ms is not None:
            deadline_ms = min(deadline_ms, self._now_ms() + to_live_ms)
        sender = ReplySender(self._engine, request, reply, deadline_ms)
        self._engine.post(sender.start)
        return sender.future

    @property
    def pending_requests(self) -> int:
        """Requests that wait for their replies."""
        return len(self._requests)

    @property
    def late_replies(self) -> int:
        """Replies that came when nobody waited for them any more; they were dropped."""
        return self._requests.late_replies

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the producer's thread died."""
        return self._engine.closed

    # ---- What the producer has ---------------------------------------------------------

    def send_async(
        self,
        message: Message,
        on_done: OnDone | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        arg: Any = None,
        timeout_ms: int | None = None,
    ) -> SendFuture:
        """See ``Producer``."""
        raise AssertionError("only producers inherit from this class")

    def _check_blocking(self) -> None:
        raise AssertionError("only producers inherit from this class")

    def _deadline(self, timeout_ms: int | None) -> int:
        raise AssertionError("only producers inherit from this class")

    def _now_ms(self) -> int:
        return self._engine.loop.clock.monotonic_ms()


def _wait(future: "concurrent.futures.Future[_T]", timeout_ms: int) -> _T:
    try:
        return future.result((timeout_ms + GRACE_MS) / 1_000)
    except concurrent.futures.TimeoutError:
        future.cancel()
        raise RequestTimeout(f"no outcome within {timeout_ms} ms") from None
    except concurrent.futures.CancelledError:
        raise RequestTimeout("the request was cancelled") from None

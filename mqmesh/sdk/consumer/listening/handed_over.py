"""Delivery of one message that an administrator hands to a consumer, with the outcome as answer."""

from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import InvalidArgument
from mqmesh.failure_text import failure_text
from mqmesh.message import PROPERTY_HANDED_OVER, StoredMessage
from mqmesh.protocol.client_rpc import HandedOver, HandedResult
from mqmesh.sdk.consumer.listening.consume_result import why_again
from mqmesh.sdk.consumer.listening.consume_service import ConcurrentService
from mqmesh.sdk.consumer.listening.consume_work import AnyListener
from mqmesh.transport.interface import Loop

HAND_OVER_MS: Final = 10_000


def handed_message(
    body: memoryview, ordinal: int, *, broker_name: str, store_host: str, namespace: str
) -> StoredMessage:
    """Return a message of a batch that a broker hands over, marked as such.

    Raises:
        InvalidArgument: The batch has no such message.
        CorruptBatch: It is damaged.
    """
    messages = decode_messages(
        body,
        check_stored(body),
        broker_name=broker_name,
        store_host=store_host,
        namespace=namespace,
    )
    if ordinal >= len(messages):
        raise InvalidArgument(f"the batch has {len(messages)} messages, none of number {ordinal}")
    message = messages[ordinal]
    message.properties = {**(message.properties or {}), PROPERTY_HANDED_OVER: "true"}
    return message


class HandOver:
    """Delivery of one message to a listener; the result comes within 10 s, in the client loop.

    Args:
        service: Service with the workers that call it.
        loop: The client loop.
        on_result: Called once.
    """

    def __init__(
        self, service: ConcurrentService, loop: Loop, on_result: Callable[[HandedOver], None]
    ) -> None:
        self._service = service
        self._loop = loop
        self._on_result = on_result
        self._began_ms = loop.clock.monotonic_ms()
        self._is_logged = False

    def begin(self, listener: AnyListener, message: StoredMessage) -> None:
        """Has the message consumed."""

        def done(result: object) -> None:
            self._loop.call_soon_threadsafe(partial(self._done, result))

        take_back = self._service.hand_over(listener, message, done)
        self._loop.call_later(HAND_OVER_MS, partial(self._late, take_back))

    def _done(self, result: object) -> None:
        cause = why_again(result)
        if cause is None:
            self._answer(HandedResult.SUCCESS)
        elif isinstance(cause, BaseException):
            self._answer(HandedResult.EXCEPTION, failure_text(cause))
        else:
            self._answer(HandedResult.RECONSUME_LATER)

    def _late(self, take_back: Callable[[], bool]) -> None:
        if self._is_logged:
            return
        if take_back():
            self._answer(HandedResult.TIMEOUT, "all workers are busy; the listener was not called")
        else:
            self._answer(HandedResult.TIMEOUT, "the listener did not return yet, and goes on")

    def _answer(self, result: HandedResult, text: str = "") -> None:
        if not self._is_logged:
            self._is_logged = True
            took_ms = self._loop.clock.monotonic_ms() - self._began_ms
            self._on_result(HandedOver(result, text, took_ms))

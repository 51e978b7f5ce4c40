"""Channels to brokers for requests of the caller's own thread, past the client loop."""

import logging
from functools import partial
from typing import Final

from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError
from mqmesh.protocol.command import Command
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.outbox import OutgoingRequest
from mqmesh.transport.interface import Channel

CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait of ``close`` for a request that shall give up."""

_log = logging.getLogger(__name__)


class DirectChannels:
    """One channel a broker, for one request at a time; to brokers that the engine is connected to.

    A broker that is known to be away costs no waiting.

    Args:
        engine: The client's engine.
        busy_poll_us: See ``ProducerOptions``.

    Attributes:
        enter: Takes the channels for the calling thread and returns True, if they are free.
        leave: Frees them.
    """

    def __init__(self, engine: ClientEngine, busy_poll_us: int) -> None:
        self._engine = engine
        self._busy_poll_us = busy_poll_us
        self._lock = ranked_lock(LockRank.DIRECT)
        self._channels: dict[str, Channel] = {}
        self._broken: set[Channel] = set()
        self._closed = False
        self.enter = partial(self._lock.acquire, False)
        self.leave = self._lock.release

    def request(
        self, broker_name: str, endpoint: str, request: OutgoingRequest
    ) -> Command | MQMeshError:
        """Sends a request and waits for the answer; between ``enter`` and ``leave``.

        Args:
            broker_name: Broker.
            endpoint: Its endpoint.
            request: Request; the caller has the answer judged.

        Returns:
            The answer, or why there is none.
        """
        try:
            channel = self._channels.get(broker_name)
            if channel is None or channel.endpoint != endpoint or self._broken or self._closed:
                channel = self._channel(broker_name, endpoint)
            return channel.request(
                request.code, *request.parts, header=request.header, timeout_ms=request.timeout_ms
            )
        except Exception as error:
            return self._failure(endpoint, error)

    def post(
        self, broker_name: str, endpoint: str, request: OutgoingRequest
    ) -> tuple[Channel, bool] | None:
        """Sends a request and does not wait; after ``enter``, and ``take`` it before ``leave``.

        Returns:
            Its channel, and True when ``take`` may find the answer already; None if it could not be
            sent at once.
        """
        try:
            channel = self._channel(broker_name, endpoint)
            if not channel.is_connected():
                return None
            parts, header = request.parts, request.header
            is_there = channel.post(
                request.code, *parts, header=header, timeout_ms=request.timeout_ms
            )
        except Exception as error:
            self._failure(endpoint, error)
            return None
        return channel, is_there

    def take(self, channel: Channel) -> Command | MQMeshError | None:
        """Return the answer to the posted request, or its error; None if there is none yet."""
        try:
            return channel.take()
        except Exception as error:
            return self._failure(channel.endpoint, error)

    def interrupt(self, broker_name: str) -> None:
        """Give up the request that waits for a broker whose connection broke; from any thread."""
        channel = self._channels.get(broker_name)
        if channel is not None:
            self._broken.add(channel)
            channel.cancel()

    def close(self, timeout_s: float) -> None:
        """Closes the channels; from any thread.

        Args:
            timeout_s: Longest wait for a request under way.
        """
        entered = self._lock.acquire(timeout=timeout_s)
        self._closed = True
        if not entered:
            for channel in list(self._channels.values()):
                channel.cancel()
            entered = self._lock.acquire(timeout=CLOSE_TIMEOUT_S)
        if not entered:
            # Sockets may not be closed under the thread that uses them.
            _log.error("a request does not give up its connection")
            return
        try:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
        finally:
            self._lock.release()

    def _channel(self, broker_name: str, endpoint: str) -> Channel:
        channel = self._channels.get(broker_name)
        if channel is None or channel.endpoint != endpoint or channel in self._broken:
            if channel is not None:
                self._broken.discard(channel)
                del self._channels[broker_name]
                channel.close()
            if self._closed or self._engine.closed:
                raise ClientClosed("the producer is closed")
            channel = self._engine.transport.channel(endpoint, busy_poll_us=self._busy_poll_us)
            self._channels[broker_name] = channel
        if self._closed:
            channel.cancel()  # it was made after close had looked
        return channel

    def _failure(self, endpoint: str, error: Exception) -> MQMeshError:
        if isinstance(error, ClientClosed) and not self._closed:
            return EndpointUnreachable(f"the connection to broker {endpoint} broke: {error}")
        if isinstance(error, MQMeshError):
            return error
        # The engine's connection may do better.
        _log.error("a request to broker %s failed", endpoint, exc_info=error)
        return EndpointUnreachable(f"a request to broker {endpoint} failed: {error}")

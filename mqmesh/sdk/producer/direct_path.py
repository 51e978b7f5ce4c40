"""The shortest way of a single message: from the caller's own thread to the broker and back."""

import logging
from typing import Final

from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError
from mqmesh.message import Message
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.messaging import BatchOutcome, encode_send
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.producer.batch_codec import BatchCodec, read_outcomes
from mqmesh.sdk.producer.lane_table import LaneTable
from mqmesh.sdk.producer.lanes import Lane
from mqmesh.sdk.producer.send_buffer import lone_batch
from mqmesh.sdk.producer.send_result import PendingBatch
from mqmesh.sdk.producer.sender import Sender
from mqmesh.transport.interface import Channel

CLOSE_TIMEOUT_S: Final = 1.0
"""Longest wait of ``close`` for a send that shall give up."""

_log = logging.getLogger(__name__)


class DirectLink:
    """Link that sends one batch at a time, without the client loop; one thread at a time.

    It is taken only to brokers that the engine is connected to, so a broker that is known to
    be away costs no waiting.

    Args:
        engine: The client's engine.
        codec: Encodes the batches.
        busy_poll_us: See ``ProducerOptions``.
    """

    def __init__(self, engine: ClientEngine, codec: BatchCodec, busy_poll_us: int) -> None:
        self._engine = engine
        self._codec = codec
        self._busy_poll_us = busy_poll_us
        self._lock = ranked_lock(LockRank.DIRECT)
        self._channels: dict[str, Channel] = {}
        self._broken: set[Channel] = set()
        self._closed = False

    def enter(self) -> bool:
        """Takes the path for the calling thread, if it is free; then call ``leave``."""
        return self._lock.acquire(blocking=False)

    def leave(self) -> None:
        """Frees the path."""
        self._lock.release()

    def send(self, batch: PendingBatch, endpoint: str, now_ms: int) -> BatchOutcome | MQMeshError:
        """Sends a batch once and waits for the answer; between ``enter`` and ``leave``.

        Args:
            batch: Its lane is claimed.
            endpoint: Endpoint of the queue's broker.
            now_ms: By the engine's monotonic clock.

        Returns:
            What the broker says, or why there is no answer.
        """
        timeout_ms = max(batch.deadline_ms - now_ms, 1)
        try:
            data = self._codec.encode(batch, self._engine.loop.clock.wall_ms())
            channel = self._channel(batch.queue.broker_name, endpoint)
            answer = channel.request(
                RequestCode.SEND_MESSAGE,
                *data,
                header=encode_send(timeout_ms, 1, self._codec.key),
                timeout_ms=timeout_ms,
            )
            return read_outcomes(answer, 1)[0]
        except ClientClosed as error:
            if self._closed:
                return error
            return EndpointUnreachable(f"the connection to broker {endpoint} broke: {error}")
        except MQMeshError as error:
            return error
        except Exception as error:
            # The engine's connection may do better.
            _log.exception("broker %s could not be asked directly", endpoint)
            return EndpointUnreachable(f"broker {endpoint} could not be asked: {error}")

    def interrupt(self, broker_name: str) -> None:
        """Give up the send that waits for a broker whose connection broke; from any thread."""
        channel = self._channels.get(broker_name)
        if channel is not None:
            self._broken.add(channel)
            channel.cancel()

    def close(self, timeout_s: float) -> None:
        """Closes the connections; from any thread.

        Args:
            timeout_s: Longest wait for a send under way.
        """
        entered = self._lock.acquire(timeout=timeout_s)
        self._closed = True
        if not entered:
            for channel in list(self._channels.values()):
                channel.cancel()
            entered = self._lock.acquire(timeout=CLOSE_TIMEOUT_S)
        if not entered:
            # Sockets may not be closed under the thread that uses them.
            _log.error("a send does not give up its connection")
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


class DirectPath:
    """The way of a synchronous send past the buffer, where its lane and the link are free.

    Args:
        engine: The client's engine.
        lanes: Lanes of the producer.
        sender: Takes the outcome.
        link: Asks brokers.
    """

    def __init__(
        self, engine: ClientEngine, lanes: LaneTable, sender: Sender, link: DirectLink
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._sender = sender
        self._link = link
        self.interrupt = link.interrupt
        self.close = link.close

    def send(
        self,
        lane: Lane,
        message: Message,
        deadline_ms: int,
        *,
        bound: bool,
        retries: int,
        wait_store: bool,
    ) -> PendingBatch | None:
        """Sends a message once, in the calling thread; arguments as of ``SendBuffer.append``.

        Returns:
            Its batch, which the sender goes on with unless it is done; None when the message was
            not sent, because the way is not free.

        Raises:
            ClientClosed: The producer is closed.
        """
        endpoint = self._engine.brokers.live_endpoint(lane.queue.broker_name)
        if endpoint is None or not self._link.enter():
            return None
        try:
            batch = lone_batch(
                self._lanes.waits,
                lane,
                message,
                deadline_ms,
                bound=bound,
                retries=retries,
                wait_store=wait_store,
            )
            try:
                if not self._lanes.claim(lane, batch):
                    return None
                clock = self._engine.loop.clock
                began_ns = clock.monotonic_ns()
                answer = self._link.send(batch, endpoint, began_ns // 1_000_000)
                latency_ms = (clock.monotonic_ns() - began_ns) / 1_000_000
                self._sender.take_first(lane, batch, answer, latency_ms)
            except BaseException:
                # Ctrl-C in the middle: the lane must not stay claimed for ever.
                self._sender.give_back(lane, batch)
                raise
            return batch
        finally:
            self._link.leave()

"""The producer over real sockets, against a broker that misbehaves on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from harness.batches import split_batches

from mqmesh.errors import (
    RequestTimeout,
)
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import EMPTY_REPLY, Reply, Request, decode_header, reply_of
from mqmesh.protocol.membership import HeartbeatResponse
from mqmesh.protocol.messaging import BatchOutcome, decode_send, encode_outcomes
from mqmesh.protocol.route import (
    BrokerAddress,
    BrokerData,
    ClusterInfo,
    GetRouteRequest,
    QueueData,
    TopicRoute,
)
from mqmesh.sdk.producer.producer import Producer
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.server import CommandServer

QUEUE = MessageQueue("t", "a", 0)


class Script:
    """A name server and a broker in one thread, answering as they are told.

    Attributes:
        tricks: What is done with the next sends, in place of answering.
        stored: First sequence and message count of each batch that was kept, once each.
        seen: The same of all that arrived.
    """

    def __init__(self) -> None:
        self.tricks: deque[Callable[[Request, Reply], None]] = deque()
        self.stored: list[tuple[int, int]] = []
        self.seen: list[tuple[int, int]] = []
        self._context = sockets.new_context()
        self.loop = EventLoop()
        self._broker: CommandServer | None = None
        self.broker_endpoint = self.open("tcp://127.0.0.1:0")
        handlers = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: lambda _: reply_of(ClusterInfo([])),
        }
        self._namesrv = CommandServer(self._context, self.loop, handlers)
        self.namesrv_addr = self._namesrv.bind("tcp://127.0.0.1:0").removeprefix("tcp://")
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def open(self, endpoint: str) -> str:
        """The broker listens."""
        handlers = {
            RequestCode.SEND_MESSAGE: self._send,
            RequestCode.HEART_BEAT: lambda _: reply_of(HeartbeatResponse()),
            RequestCode.UNREGISTER_CLIENT: lambda _: EMPTY_REPLY,
        }
        self._broker = CommandServer(self._context, self.loop, handlers)
        return self._broker.bind(endpoint)

    def reply(self, request: Request, reply: Reply) -> None:
        assert self._broker is not None
        self._broker.reply(request, reply)

    def reopen(self) -> None:
        """All connections break, and the broker listens again; for the loop's thread."""
        assert self._broker is not None
        self._broker.close()
        self.loop.call_later(150, lambda: self.open(self.broker_endpoint))

    def close(self) -> None:
        self.loop.stop()
        self._thread.join()
        assert self._broker is not None
        self._broker.close()
        self._namesrv.close()
        self.loop.close()
        self._context.destroy(linger=0)

    def _route(self, request: Request) -> Reply:
        topic = decode_header(GetRouteRequest, request.command.header).topic
        address = BrokerAddress(self.broker_endpoint.removeprefix("tcp://"))
        return reply_of(
            TopicRoute(topic, [QueueData("a", 4, 4, 6)], [BrokerData("c", "a", {0: address})])
        )

    def _send(self, request: Request) -> Reply | None:
        outcomes = []
        _, count, _ = decode_send(request.command.header)
        for _, header in split_batches(request.command.body, most=count):
            key = (header.first_sequence, header.message_count)
            self.seen.append(key)
            if key not in self.stored:
                self.stored.append(key)
            outcomes.append(BatchOutcome(0, 0, 0, self.stored.index(key), 0, 1))
        header, body = encode_outcomes(outcomes)
        reply = Reply(header, (body,))
        if not self.tricks:
            return reply
        self.tricks.popleft()(request, reply)
        return None


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


@pytest.fixture
def producer(script: Script) -> Iterator[Producer]:
    with Producer("g", namesrv_addr=script.namesrv_addr) as producer:
        producer.send(message("0"), queue=QUEUE)
        yield producer
        assert producer._buffer.wait_empty(5.0), "every byte of room was given back"


def message(body: str) -> Message:
    return Message("t", body.encode())


def test_an_answer_that_comes_too_late_is_nobodys(script, producer):
    for send in (producer.send, lambda *a, **k: producer.send_async(*a, **k).result()):
        held: list[tuple[Request, Reply]] = []

        # Each copy: a machine that stands still breaks connections, and then it is sent again.
        def hold(request: Request, reply: Reply, held=held) -> None:
            held.append((request, reply))
            script.tricks.append(hold)

        script.tricks.append(hold)
        with pytest.raises(RequestTimeout):
            send(message("late"), queue=QUEUE, timeout_ms=100)
        script.tricks.clear()
        script.loop.call_soon_threadsafe(lambda: script.reply(*held[0]))  # noqa: B023
        result = send(message("next"), queue=QUEUE)
        assert script.stored[result.queue_offset][0] == result.sequence


def test_an_answer_that_comes_twice_counts_once(script, producer):
    def twice(request: Request, reply: Reply) -> None:
        script.reply(request, reply)
        script.reply(request, reply)

    script.tricks.extend([twice] * 20)
    results = [producer.send(message(str(n)), queue=QUEUE) for n in range(10)]
    futures = [producer.send_async(message(str(n)), queue=QUEUE) for n in range(10)]
    results += [future.result() for future in futures[:1]]
    assert len({one.message_id for one in results}) == 11
    for one in results:
        assert script.stored[one.queue_offset][0] == one.sequence


def test_a_connection_that_breaks_under_a_request_costs_a_second_try(script, producer):
    for send in (producer.send, lambda *a, **k: producer.send_async(*a, **k).result()):
        before = len(script.stored)
        script.tricks.append(lambda request, reply: script.reopen())
        result = send(message("1"), queue=QUEUE)
        assert result.queue_offset == before
        assert len(script.stored) == before + 1
        assert script.seen[-2:] == [script.stored[-1]] * 2, "the same numbers both times"

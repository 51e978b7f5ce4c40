"""The simulated transport: order, delay, cuts, breaks, pauses and deaths, all from one seed."""

import threading

import pytest

from mqmesh.errors import BrokerNotAvailable, EndpointUnreachable, RequestTimeout
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.command import Command, Reply
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer.lanes import GRACE_MS
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_buffer import DEADLINE_SPREAD_MS, SendBuffer
from mqmesh.transport.simulated.network import HEARTBEAT_TIMEOUT_MS, Network
from mqmesh.transport.simulated.node import NodeKilled, SimulatedExecutor, SimulatedNode
from mqmesh.transport.simulated.simulation import Simulation
from mqmesh.transport.simulated.transport import SimulatedTransport

ECHO, REFUSE, SILENT = 1, 2, 3
ENDPOINT = "tcp://127.0.0.1:9"


class Pair:
    """A server that answers, a client, and what each was told."""

    def __init__(self, seed: int = 1) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        self.server_node, self.client_node = self.node("server"), self.node("client")
        self.asked: list[bytes] = []
        self.gone: list[bytes] = []
        self.news: list[bool] = []
        self.answers: list[object] = []
        self.serving = SimulatedTransport(self.network, self.server_node)
        self.server = self.serving.serve(
            {ECHO: self.echo, REFUSE: self.refuse, SILENT: lambda request: None}, self.gone.append
        )
        self.server.bind(ENDPOINT)
        self.asking = SimulatedTransport(self.network, self.client_node)
        self.client = self.asking.connect(ENDPOINT, on_connection=self.news.append)

    def node(self, name: str) -> SimulatedNode:
        node = SimulatedNode(self.simulation, name)
        node.on_death.append(lambda: self.network.break_connections(node))
        return node

    def echo(self, request):
        self.asked.append(bytes(request.command.body))
        return Reply(b"", (request.command.body,))

    def refuse(self, request):
        raise BrokerNotAvailable("not now")

    def ask(self, body: bytes = b"x", code: int = ECHO, timeout_ms: int = 3_000) -> None:
        self.client.request(code, self.answers.append, body, timeout_ms=timeout_ms)

    def bodies(self) -> list[bytes]:
        return [bytes(one.body) for one in self.answers if isinstance(one, Command)]


def test_frames_of_one_connection_keep_their_order_whatever_the_weather():
    pair = Pair()
    pair.network.weather.gust_every = 2
    sent = [str(number).encode() for number in range(200)]
    for body in sent:
        pair.ask(body)
    pair.simulation.run(3_000)
    assert pair.asked == sent
    assert pair.bodies() == sent
    assert pair.news == [True]


def test_a_refusal_is_an_error():
    pair = Pair()
    pair.ask(code=REFUSE)
    pair.simulation.run(100)
    assert isinstance(pair.answers[0], BrokerNotAvailable)


def test_an_answer_that_does_not_come_is_a_timeout():
    pair = Pair()
    pair.ask(code=SILENT, timeout_ms=500)
    pair.simulation.run(400)
    assert pair.answers == []
    pair.simulation.run(200)
    assert isinstance(pair.answers[0], RequestTimeout)


def test_a_cut_holds_one_direction_and_a_short_one_loses_nothing():
    pair = Pair()
    pair.simulation.run(100)
    pair.network.cut(pair.server_node, pair.client_node)
    pair.ask()
    pair.simulation.run(500)
    assert pair.asked == [b"x"]
    assert pair.answers == []
    pair.network.heal()
    pair.simulation.run(100)
    assert pair.bodies() == [b"x"]
    assert pair.news == [True]


def test_a_long_cut_breaks_the_connection_at_both_ends_and_it_is_made_again():
    pair = Pair()
    pair.ask()
    pair.simulation.run(100)
    pair.network.cut(pair.client_node, pair.server_node)
    pair.simulation.run(HEARTBEAT_TIMEOUT_MS - 1)
    assert pair.news == [True]
    assert pair.gone == []
    pair.simulation.run(2_000)
    assert pair.news == [True, False]
    assert len(pair.gone) == 1
    pair.network.heal()
    pair.simulation.run(1_000)
    assert pair.news == [True, False, True]


def test_a_request_that_was_on_its_way_when_the_server_died_fails():
    pair = Pair()
    pair.simulation.run(100)
    pair.ask(code=SILENT)
    pair.simulation.run(100)
    pair.server_node.kill()
    pair.simulation.run(100)
    assert isinstance(pair.answers[0], EndpointUnreachable)
    assert pair.client.unreachable


def test_nothing_of_a_dead_process_happens_any_more():
    pair = Pair()
    called = []
    pair.client_node.after(10, lambda: called.append("step"))
    pair.asking.loop.call_later(10, lambda: called.append("timer"))
    executor = SimulatedExecutor(pair.client_node)
    executor.submit(called.append, "work")
    pair.client_node.kill()
    pair.simulation.run(1_000)
    assert called == []


def test_who_waits_in_a_process_that_is_killed_never_goes_on():
    pair = Pair()
    flag = pair.asking.flag()
    pair.simulation.after(50, pair.client_node.kill)
    with pytest.raises(NodeKilled):
        flag.wait(10)
    assert pair.simulation.now_ms - Simulation(1).now_ms == 50


def test_a_step_of_a_killed_process_ends_where_it_waits_and_the_others_go_on():
    pair = Pair()
    flag = pair.asking.flag()
    done = []

    def step() -> None:
        flag.wait(10)
        done.append("the dead")

    pair.client_node.after(10, step)
    pair.simulation.after(50, pair.client_node.kill)
    pair.server_node.after(60, lambda: done.append("the other"))
    pair.simulation.run(1_000)
    assert done == ["the other"]


@pytest.mark.parametrize("by_notice", [True, False])
def test_who_waits_under_a_lock_lets_others_take_it(by_notice):
    pair = Pair()
    lock = threading.Lock()
    changed = pair.asking.condition(lock)
    done = []

    def change() -> None:
        assert lock.acquire(blocking=False), "nobody else would run"
        done.append(1)
        changed.notify_all()
        lock.release()

    pair.simulation.after(50, change)
    with lock:
        assert changed.wait(1) if by_notice else changed.wait_for(lambda: bool(done), 1)
        assert lock.locked()
        assert not changed.wait_for(lambda: len(done) > 1, 0.5)
    assert not lock.locked()
    assert pair.simulation.now_ms - Simulation(1).now_ms == 550


def test_sends_and_room_are_waited_for_in_simulated_time():
    pair = Pair()
    options = ProducerOptions(buffer_memory_bytes=100, send_msg_timeout_ms=1_000)
    buffer = SendBuffer(options, pair.asking, len)
    topic = buffer.topic_lanes((MessageQueue("t", "a", 0),), 0, lambda _: frozenset())
    clock = pair.asking.clock

    def put():
        message = Message("t", b"x" * 200)
        deadline_ms = clock.monotonic_ms() + 1_000
        return buffer.append(None, topic, message, 200, deadline_ms, None, 0, False)[0]

    def store() -> None:
        (batch,) = buffer.take("a", 1 << 20, 10)
        with buffer.lock:
            assert buffer.end(batch, BatchOutcome(0, 0))
        batch.notify()

    began_ms = clock.monotonic_ms()
    first = put()
    pair.simulation.after(300, store)
    second = put()  # waits for room
    assert clock.monotonic_ms() - began_ms == 300
    assert first.result().message_count == 1
    pair.simulation.after(300, store)
    assert second.result().message_count == 1
    assert clock.monotonic_ms() - began_ms == 600
    third = put()
    with pytest.raises(RequestTimeout):
        third.result()
    assert clock.monotonic_ms() - began_ms == 600 + 1_000 + DEADLINE_SPREAD_MS + GRACE_MS


def test_a_process_that_stands_still_does_late_what_was_due():
    pair = Pair()
    pair.simulation.run(100)
    pair.server_node.pause()
    pair.ask()
    pair.simulation.run(300)
    assert pair.asked == []
    pair.server_node.resume()
    pair.simulation.run(100)
    assert pair.bodies() == [b"x"]


def test_a_blocking_request_lets_the_simulation_run():
    pair = Pair()
    channel = pair.asking.channel(ENDPOINT)
    assert bytes(channel.request(ECHO, b"hello", timeout_ms=1_000).body) == b"hello"
    with pytest.raises(BrokerNotAvailable):
        channel.request(REFUSE, timeout_ms=1_000)
    with pytest.raises(RequestTimeout):
        channel.request(SILENT, timeout_ms=1_000)
    pair.simulation.after(100, pair.server_node.kill)
    with pytest.raises(EndpointUnreachable):
        channel.request(SILENT, timeout_ms=1_000)


def test_what_is_posted_is_taken_when_the_watch_calls_back():
    pair = Pair()
    channel = pair.asking.channel(ENDPOINT)
    channel.request(ECHO, b"connected", timeout_ms=1_000)
    taken = []
    channel.post(ECHO, b"posted", timeout_ms=1_000)
    pair.asking.watch(channel, lambda: taken.append(channel.take()))
    assert taken == []
    pair.simulation.run(100)
    assert [bytes(one.body) for one in taken] == [b"posted"]
    channel.post(SILENT, timeout_ms=1_000)
    pair.asking.watch(channel, lambda: taken.append(None))
    pair.simulation.run(100)
    assert len(taken) == 1
    pair.server_node.kill()
    pair.simulation.run(100)
    assert taken[1:] == [None]
    with pytest.raises(EndpointUnreachable):
        channel.take()


def test_hints_reach_who_listens():
    pair = Pair()
    heard = []
    publisher = pair.serving.publish()
    place = publisher.bind("tcp://127.0.0.1:0")
    publisher.publish(b"lost")
    pair.asking.subscribe(place, on_hint=heard.append)
    pair.simulation.run(100)
    publisher.publish(b"heard")
    pair.simulation.run(100)
    assert heard == [b"heard"]


def test_a_clock_is_stepped_for_one_process_only():
    pair = Pair()
    before = pair.server_node.clock.wall_ms()
    pair.client_node.clock.step(-5_000)
    assert pair.client_node.clock.wall_ms() == before - 5_000
    assert pair.server_node.clock.wall_ms() == before


def test_a_seed_is_one_course_and_another_seed_another():
    def course(seed: int) -> list[int]:
        pair = Pair(seed)
        times: list[int] = []
        pair.network.weather.gust_every = 3
        for _ in range(50):
            pair.client.request(ECHO, lambda answer: times.append(pair.simulation.now_ms))
        pair.simulation.run(3_000)
        assert len(times) == 50
        return times

    assert course(7) == course(7)
    assert course(7) != course(8)

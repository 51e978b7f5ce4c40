"""Which queues a producer's messages may go to, and which one is next."""

from __future__ import annotations

import pytest
from harness.threadless_loop import ThreadlessLoop

from mqmesh.errors import InvalidArgument, NoRoute
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.route import BrokerAddress, BrokerData, QueueData, TopicRoute
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.producer.lanes import next_lane
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.publish_routes import PublishRoutes
from mqmesh.sdk.producer.queue_selector import queue_index
from mqmesh.sdk.producer.send_buffer import SendBuffer


class Setup:
    """Publish routes upon an engine that is not running."""

    def __init__(self, *, avoid_slow: bool = False) -> None:
        self.engine = ClientEngine(ClientOptions(), heartbeat=lambda: None)
        self.clock = self.engine.loop.clock
        self.buffer = SendBuffer(ProducerOptions(), ThreadlessLoop(), len)
        self.routes = PublishRoutes(self.engine, self.buffer, avoid_slow=avoid_slow)

    def update(self, queues: int = 2, brokers: str = "ab", priorities: int = 0) -> None:
        changed = self.engine.routes.update(
            TopicRoute(
                "t",
                [QueueData(name, queues, queues, 6, priorities) for name in brokers],
                [BrokerData("c", name, {0: BrokerAddress("h:1")}) for name in brokers],
            )
        )
        if changed:
            self.routes.on_routes({"t"})

    def lanes(self):
        return self.routes.lanes("t", self.clock.monotonic_ms() + 100)


@pytest.fixture
def setup(world):
    made = []

    def make(**options) -> Setup:
        made.append(Setup(**options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def names_of_next(lanes) -> set[str]:
    """The brokers of the next eight queues."""
    return {next_lane(lanes, lanes.avoid(lanes)).queue.broker_name for _ in range(8)}


def test_lanes_are_those_of_the_route_and_follow_it(setup):
    one = setup()
    assert one.routes.topics.get("t") is None
    one.update()
    lanes = one.lanes()
    assert one.routes.topics.get("t") is lanes
    assert len(lanes.queues) == 4
    one.update(queues=3)
    wider = one.routes.topics.get("t")
    assert len(wider.queues) == 6
    assert wider.lanes[0] is lanes.lanes[0], "what waits there stays there"
    one.update(queues=3)
    assert one.routes.topics.get("t") is wider


def test_a_topic_without_queues_keeps_the_old_ones(setup):
    one = setup()
    one.update()
    lanes = one.lanes()
    one.update(queues=0)
    assert one.routes.topics.get("t") is lanes


def test_a_route_that_changes_while_it_is_looked_up_is_not_missed(setup, monkeypatch):
    one = setup()
    one.update()
    find = one.routes._find_queues

    def slowly(topic, deadline_ms):
        queues = find(topic, deadline_ms)
        one.update(queues=5)  # the engine's thread is quicker
        return queues

    monkeypatch.setattr(one.routes, "_find_queues", slowly)
    assert len(one.lanes().queues) == 10


def test_in_the_engines_thread_nobody_waits_for_a_route(setup, monkeypatch):
    one = setup()
    monkeypatch.setattr(type(one.engine.loop), "in_loop_thread", True)
    with pytest.raises(NoRoute, match="callback"):
        one.lanes()


def test_the_queue_of_a_bound_message(setup):
    one = setup()
    one.update()
    lanes = one.lanes()
    free, keyed = Message("t", b"x"), Message("t", b"x", sharding_key="k")
    queue = MessageQueue("t", "b", 1)
    assert one.routes.bound_lane(lanes, free) is None
    assert one.routes.bound_lane(lanes, free, queue).queue == queue
    assert one.routes.bound_lane(lanes, keyed, queue).queue == queue, "the caller has the last word"
    assert one.routes.bound_lane(lanes, keyed) is lanes.lanes[queue_index("k", 4)]
    seen = []

    def select(queues, message, arg):
        seen.append((queues, message, arg))
        return queues[arg]

    assert one.routes.bound_lane(lanes, free, None, select, 2) is lanes.lanes[2]
    assert seen == [(lanes.queues, free, 2)]
    for wrong in (MessageQueue("t", "b", 2), MessageQueue("u", "b", 1), MessageQueue("t", "c", 0)):
        with pytest.raises(InvalidArgument):
            one.routes.bound_lane(lanes, free, wrong)


def test_another_lane_is_of_another_broker(setup, monkeypatch):
    one = setup()
    here = MessageQueue("t", "a", 0)
    assert one.routes.another_lane(here, frozenset()) is None, "nothing is known"
    assert one.routes.other_brokers(here) == frozenset()
    one.update(brokers="abc")
    one.lanes()
    names = {one.routes.another_lane(here, frozenset()).queue.broker_name for _ in range(10)}
    assert names == {"b", "c"}
    assert one.routes.other_brokers(here) == {"b", "c"}
    assert one.routes.another_lane(here, frozenset("b")).queue.broker_name == "c"
    assert one.routes.another_lane(here, frozenset("bc")) is None
    monkeypatch.setattr(one.engine.brokers, "may_come", lambda name: name != "c")
    assert one.routes.other_brokers(here) == {"b"}
    for _ in range(5):
        assert one.routes.another_lane(here, frozenset()).queue.broker_name == "b"
    assert one.routes.another_lane(here, frozenset("b")) is None


def test_in_place_of_a_queue_that_is_gone_another_one_of_its_broker_will_do(setup):
    one = setup()
    one.update(brokers="a")
    one.lanes()
    gone = MessageQueue("t", "a", 7)
    assert one.routes.another_lane(gone, frozenset()).queue.broker_name == "a"
    assert one.routes.another_lane(gone, frozenset("a")) is None, "it may be there twice then"
    assert one.routes.another_lane(MessageQueue("t", "a", 0), frozenset()) is None


def test_slow_brokers_are_avoided_but_better_than_none(setup):
    one = setup(avoid_slow=True)
    one.update()
    lanes = one.lanes()
    one.routes.on_sent("a", 700, True)
    assert names_of_next(lanes) == {"b"}
    one.routes.on_sent("b", 0, False)
    here = MessageQueue("t", "b", 0)
    assert one.routes.another_lane(here, frozenset()).queue.broker_name == "a"
    one.routes.on_sent("a", 10, True)
    one.routes.on_sent("b", 10, True)
    assert names_of_next(lanes) == {"a", "b"}


def test_without_the_option_slow_brokers_are_not_avoided(setup):
    one = setup()
    one.update()
    one.routes.on_sent("a", 20_000, False)
    lanes = one.lanes()
    assert names_of_next(lanes) == {"a", "b"}


def test_a_priority_is_a_queue_of_that_id_on_any_broker(setup):
    one = setup()
    one.update(queues=4, priorities=4)
    lanes = one.lanes()
    assert {lane.queue for lane in one.routes.level(lanes, 3).lanes} == {
        MessageQueue("t", "a", 3),
        MessageQueue("t", "b", 3),
    }
    keyed = one.routes.bound_lane(one.routes.level(lanes, 2), Message("t", b"x", sharding_key="k"))
    assert keyed.queue.queue_id == 2
    assert one.routes.bound_lane(lanes, Message("t", b"x"), MessageQueue("t", "b", 1)) is not None


def test_a_message_without_a_priority_has_the_lowest(setup):
    one = setup()
    one.update(queues=4, priorities=4)
    lanes = one.lanes()
    assert {next_lane(lanes, frozenset()).queue.queue_id for _ in range(8)} == {0}
    assert names_of_next(lanes) == {"a", "b"}


def test_another_broker_gets_a_message_with_the_same_priority(setup):
    one = setup()
    one.update(queues=4, priorities=4)
    one.lanes()
    for level in range(4):
        another = one.routes.another_lane(MessageQueue("t", "a", level), frozenset())
        assert another.queue == MessageQueue("t", "b", level)


@pytest.mark.parametrize("priority", [4, -1, True, "3"])
def test_a_priority_that_the_topic_has_not_is_refused(setup, priority):
    one = setup()
    one.update(queues=4, priorities=4)
    with pytest.raises(InvalidArgument, match="0 to 3, the priorities of topic 't'"):
        one.routes.level(one.lanes(), priority)


def test_a_topic_without_priorities_takes_none(setup):
    one = setup()
    one.update(queues=4)
    with pytest.raises(InvalidArgument, match="topic 't' has no priorities"):
        one.routes.level(one.lanes(), 0)

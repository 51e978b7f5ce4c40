"""The client of dead letters against brokers without sockets."""

from __future__ import annotations

import zlib

import pytest

from mqmesh.batch.record_batch import BROKER_PART_SIZE, Attributes, encode_batch
from mqmesh.errors import InvalidArgument, NoRoute
from mqmesh.message import PROPERTY_LAST_FAILURE, Message
from mqmesh.protocol.admin import TopicStats, TopicStatsRequest
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import BrokerAddress
from mqmesh.sdk.admin.dead_letters import (
    LETTERS_PER_REQUEST,
    DeadLetter,
    DeadLetterClient,
    DeadLetterFilter,
)

DLQ = "%DLQ%g"


class Client(DeadLetterClient):
    """Asks brokers that play in this process."""

    def __init__(self, stages):
        super().__init__("127.0.0.1:1")
        self.stages = stages
        self.asked = []

    def topics(self):
        return sorted(
            {one.topic for s in self.stages.values() for one in s.features.state.topics.configs()}
        )

    def topic_stats(self, topic):
        return {
            name: stage.ask(RequestCode.GET_TOPIC_STATS_INFO, TopicStatsRequest(topic), TopicStats)
            for name, stage in self.stages.items()
            if stage.features.state.topics.get(topic)
        }

    def _addresses(self):
        return {name: BrokerAddress(f"{name}:1") for name in self.stages}

    def _masters(self):
        return {name: f"tcp://{name}:1" for name in self.stages}

    def _request(self, endpoint, code, header, timeout_ms=None):
        name = endpoint.removeprefix("tcp://").partition(":")[0]
        self.asked.append((name, code))
        reply = self.stages[name].ask(code, header)
        body = memoryview(b"".join(map(bytes, reply.body)))
        return Command(0, 0, 1, memoryview(reply.header), body)


def bury(stage, *bodies, sequence=0, damaged=False, reason="ValueError: no", **fields):
    messages = [
        Message("t", body, properties={PROPERTY_LAST_FAILURE: reason}, **fields) for body in bodies
    ]
    data = bytearray(
        encode_batch(
            messages,
            topic=DLQ,
            queue_id=0,
            producer_id=7,
            first_sequence=sequence,
            born_timestamp=1,
            attributes=Attributes.REDELIVERED,
        )
    )
    if damaged:
        data[-1:] = b"\xc1"
        crc = zlib.crc32(data[BROKER_PART_SIZE + 4 :])
        data[BROKER_PART_SIZE : BROKER_PART_SIZE + 4] = crc.to_bytes(4, "little")
    stage.features.writes.put_encoded([bytes(data)], lambda outcomes: None)
    stage.end_tick()


@pytest.fixture
def stages(make_stage):
    return {"a": make_stage(), "b": make_stage()}


@pytest.fixture
def client(stages):
    with Client(stages) as client:
        yield client


def bodies_of(letters):
    return [letter.message.body if letter.message else letter.count for letter in letters]


def test_they_come_broker_by_broker_oldest_first(client, stages):
    bury(stages["b"], b"3")
    bury(stages["a"], b"1", b"2")
    bury(stages["b"], b"4", sequence=9)
    letters = list(client.scan("g"))
    assert bodies_of(letters) == [b"1", b"2", b"3", b"4"]
    assert [(one.broker_name, one.queue_offset) for one in letters] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert {one.reason for one in letters} == {"ValueError: no"}
    assert client.groups() == {"g": 4}


def test_a_filter_chooses(client, stages):
    bury(stages["a"], b"1", tag="T", keys=["k"])
    bury(stages["a"], b"2", reason="Timeout: too late", sequence=5)
    bury(stages["a"], b"3", b"4", damaged=True, sequence=9)

    def found(**wanted):
        return bodies_of(client.scan("g", DeadLetterFilter(**wanted)))

    assert found() == [b"1", b"2", 2]
    assert found(tag="T") == found(key="k") == [b"1"]
    assert found(topic="t") == [b"1", b"2"]
    assert found(topic="other") == []
    assert found(reason="timeout") == [b"2"]
    assert found(reason="DECODED") == [2]
    assert found(message_ids=frozenset({f"{7:016X}{5:016X}"})) == [b"2"]
    assert found(resent=True) == []
    stored_ms = stages["a"].clock.wall_ms()
    assert found(from_ms=stored_ms, to_ms=stored_ms, topic="t") == [b"1", b"2"]
    assert found(from_ms=stored_ms + 1, topic="t") == []
    with pytest.raises(InvalidArgument):
        found(topic="no topic")


def test_many_are_resent_in_portions(client, stages):
    count = 2 * LETTERS_PER_REQUEST + 3
    bury(stages["a"], *(b"%d" % at for at in range(count)))
    letters = list(client.scan("g"))
    client.asked.clear()
    assert len(list(client.resend("g", letters))) == count
    assert client.asked == [("a", RequestCode.RESEND_DEAD_LETTERS)] * 3


def test_what_dies_again_meanwhile_is_left_for_the_next_time(client, stages):
    bury(stages["a"], b"1", b"2")
    scan = client.scan("g")
    first = next(scan)
    bury(stages["a"], b"3", sequence=50)
    assert bodies_of([first, *scan]) == [b"1", b"2"]


def test_progress_is_told(client, stages):
    bury(stages["a"], b"1", b"2")
    bury(stages["b"], b"3", b"4", damaged=True)
    told = []
    list(client.scan("g", on_progress=lambda done, total: told.append((done, total))))
    assert told == [(2, 4), (4, 4)]


def test_a_broker_that_is_gone_is_named(client):
    letter = DeadLetter("c", 0, None)
    with pytest.raises(NoRoute, match="'c'"):
        list(client.resend("g", [letter]))

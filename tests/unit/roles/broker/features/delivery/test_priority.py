"""Topics with priorities: higher ones come first, fairness, retries keep their priority."""

from __future__ import annotations

import itertools

import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.record_batch import (
    check_stored,
    decode_messages,
    encode_batch,
    read_header,
)
from mqmesh.batch.schedule_record import ScheduleAction
from mqmesh.message import Message, retry_topic
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    DeliveryMode,
    ReceiveRequest,
    ReceiveResponse,
    SettleAction,
    Settlement,
    SettleRequest,
)
from mqmesh.protocol.groups import GroupConfig, UpdateGroupRequest
from mqmesh.protocol.membership import ConsumerData, HeartbeatRequest, Subscription
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.features.delays.due_messages import DueMessages
from mqmesh.roles.broker.features.delays.opened_batches import OpenedBatches
from mqmesh.roles.broker.writing.writes import batch_to_put

LEVELS = 4


class Jobs:
    """A broker with a topic of four priorities, and a member of a group."""

    def __init__(self, stage, fairness=0) -> None:
        self.stage = stage
        stage.features.state.topics.set(TopicConfig("jobs", LEVELS, LEVELS, priorities=LEVELS), 0)
        config = GroupConfig("g", delivery=DeliveryMode.MESSAGE, priority_fairness=fairness)
        stage.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, UpdateGroupRequest(config))
        data = ConsumerData(
            "g", "CLUSTERING", "FIRST_OFFSET", [Subscription("jobs")], DeliveryMode.MESSAGE
        )
        stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest("a", consumers=[data]), peer=b"a")
        self._sequence = itertools.count(0, 1_000)

    def send(self, priority, count=1) -> None:
        self.stage.clock.advance(1)
        self.stage.send(
            encode_batch(
                [Message("jobs", b"%d" % priority) for _ in range(count)],
                topic="jobs",
                queue_id=priority,
                producer_id=PRODUCER_ID,
                first_sequence=next(self._sequence),
                born_timestamp=1,
            )
        )

    def receive(self, most=1):
        """Leases and priorities, in the order of the answer."""
        opaque = self.stage.begin(
            RequestCode.RECEIVE_MESSAGE, ReceiveRequest("g", "jobs", "a", most), peer=b"a"
        )
        self.stage.end_tick()
        reply = self.stage.answer(opaque)
        if isinstance(reply, ReceiveResponse):
            return [], []
        data, position, found = b"".join(reply.body), 0, []
        while position < len(data):
            header = check_stored(data, position)
            messages = decode_messages(data, header, position=position)
            assert all(int(one.body) == one.priority for one in messages)
            found += [one.priority for one in messages]
            position += header.total_size
        return decode_header(ReceiveResponse, reply.header).leases, found

    def nack(self, lease, delay_ms) -> None:
        one = Settlement(
            lease.lease,
            lease.queue_id,
            lease.first,
            b"\1",
            int(SettleAction.NACK),
            delay_ms,
            is_retry=lease.is_retry,
        )
        self.stage.ask(
            RequestCode.SETTLE_MESSAGES, SettleRequest("g", "jobs", "a", [one]), peer=b"a"
        )


@pytest.fixture
def jobs(stage):
    return Jobs(stage)


def test_a_receive_begins_with_the_highest_priority(jobs):
    for priority in (0, 2, 1, 3, 2):
        jobs.send(priority)
    assert jobs.receive(3)[1] == [3, 2, 2]
    jobs.send(1)
    assert jobs.receive(3)[1] == [1, 1, 0]


def test_nothing_comes_before_a_message_of_higher_priority(jobs):
    for priority in (0, 1, 2, 3):
        jobs.send(priority, 500)
    order = [priority for _ in range(252) for priority in jobs.receive(8)[1]]
    assert order == sorted(order, reverse=True)
    assert len(order) == 2_000


def test_a_message_that_comes_again_comes_before_new_ones_of_its_priority_only(jobs):
    jobs.send(2)
    (lease,), _ = jobs.receive()
    jobs.send(2)
    jobs.send(3)
    jobs.nack(lease, 0)
    leases, order = jobs.receive(10)
    assert order == [3, 2, 2]
    assert [one.attempt for one in leases] == [1, 2, 1]


def test_a_retry_keeps_its_priority(jobs):
    stage = jobs.stage
    jobs.send(3)
    (lease,), _ = jobs.receive()
    jobs.nack(lease, 3_600_000)  # not in the window
    found = stage.store.get("SCHEDULE_TOPIC_XXXX", 16, 0, max_bytes=1)
    waiting = read_header(found.data[0]).commitlog_offset
    stage.clock.advance(3_600_000)
    due = DueMessages(stage.features.core, stage.features.writes, OpenedBatches())
    ((retry, _),) = due.prepare(ScheduleAction.DELIVER, [(waiting, 0, 1)]).groups
    assert (retry.topic, retry.queue_id) == (retry_topic("g"), 3)
    assert stage.features.state.topics.require(retry_topic("g")).config.read_queue_nums == LEVELS


def test_retries_of_a_priority_come_in_turn_with_its_messages(jobs):
    retries = retry_topic("g")
    stage = jobs.stage
    stage.features.writes.ensure_topic(retries, LEVELS)
    for number, priority in enumerate((1, 3)):
        data = encode_batch(
            [Message("jobs", b"%d" % priority)],
            topic=retries,
            queue_id=priority,
            producer_id=PRODUCER_ID,
            first_sequence=900_000 + number,
            born_timestamp=1,
        )
        stage.store.put([batch_to_put(data)], stage.clock.wall_ms())
    for priority in (0, 2, 3):
        jobs.send(priority)
    leases, order = jobs.receive(10)
    assert order == [3, 3, 2, 1, 0]
    assert sum(one.is_retry for one in leases) == 2


def test_with_fairness_each_nth_receive_begins_with_the_oldest_message(stage):
    jobs = Jobs(stage, fairness=10)
    jobs.send(0, 100)
    jobs.send(3, 1_000)
    order = [priority for _ in range(200) for priority in jobs.receive()[1]]
    assert order.count(0) == 20
    assert order[:10] == [3] * 9 + [0]


def test_fairness_takes_from_nobody_when_the_highest_is_oldest(stage):
    jobs = Jobs(stage, fairness=2)
    jobs.send(3, 50)
    jobs.send(0, 50)
    order = [priority for _ in range(100) for priority in jobs.receive()[1]]
    assert order == [3] * 50 + [0] * 50

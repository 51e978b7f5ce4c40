"""A master and its followers, as real processes: double write, promotion, and coming back."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.patience import until
from harness.replica_group import SEGMENT_BYTES, Group, bodies_of, pair

from mqmesh import Message, Producer, PullConsumer
from mqmesh.errors import InvalidArgument, NotMaster, TopicNotFound
from mqmesh.log_identity import EPOCHS_APART
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import DeleteTopicRequest
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.broker_admin import BrokerAdmin


@pytest.fixture
def group(short_tmp_path: Path) -> Iterator[Group]:
    group = Group(short_tmp_path)
    yield group
    group.close()


def log_of(group: Group, store: str, end: int) -> str:
    digest = hashlib.sha256()
    for path in sorted((group.folder / store / "commitlog").iterdir()):
        start = int(path.name)
        if start < end:
            with path.open("rb") as file:
                digest.update(file.read(min(end - start, SEGMENT_BYTES)))
    return digest.hexdigest()


def test_what_was_acknowledged_by_double_write_outlives_the_master(group: Group) -> None:
    pair(group, ha__ack_replicas="one")
    acknowledged: list[bytes] = []
    numbers = itertools.count()

    def send(producer: Producer, count: int) -> None:
        for number in itertools.islice(numbers, count):
            body = b"%06d" % number + b"x" * 2_000
            result = producer.send(Message("t", body))
            assert result.status is SendStatus.SEND_OK
            acknowledged.append(body)

    with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
        send(producer, 2_500)  # more than a segment
    group.replicas[0].kill()
    until(lambda: group.status(0) is None and not group.status(1).connected)
    answer = group.admin.promote("broker-a", 1)
    assert answer.epoch > EPOCHS_APART
    until(lambda: group.status(0) is not None)
    assert group.status(0).role == "MASTER"
    assert bodies_of(group) == sorted(acknowledged)
    # It goes on, alone.
    with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
        assert producer.send(Message("t", b"alone")).status is SendStatus.SLAVE_NOT_AVAILABLE
    # The old master comes back as a follower, and loses what nobody else had, if anything.
    group.start(2, group.endpoints[1], store="r0")
    until(lambda: group.is_caught_up(2))
    end = group.status(0).log_end
    assert log_of(group, "r0", end) == log_of(group, "r1", end)
    assert b"alone" in bodies_of(group)


def test_a_master_without_followers_says_so_and_goes_on(group: Group) -> None:
    pair(group, ha__ack_replicas="one", ha__slave_timeout_ms="500")
    with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
        assert producer.send(Message("t", b"1")).status is SendStatus.SEND_OK
        group.replicas[1].suspend()
        late = producer.send(Message("t", b"2")).status
        assert late in (SendStatus.FLUSH_SLAVE_TIMEOUT, SendStatus.SLAVE_NOT_AVAILABLE)
        until(lambda: not group.status(0).replicas)
        assert producer.send(Message("t", b"3")).status is SendStatus.SLAVE_NOT_AVAILABLE
        group.replicas[1].resume()
        until(lambda: group.is_caught_up())
        assert producer.send(Message("t", b"4")).status is SendStatus.SEND_OK
    assert bodies_of(group) == [b"1", b"2", b"3", b"4"]


def test_topics_groups_and_offsets_are_those_of_the_master(group: Group) -> None:
    pair(group)
    namesrv = group.namesrv.endpoint
    group.admin.create_topic("orders", queues=3)
    with Producer("shop", namesrv_addr=namesrv) as producer:
        for number in range(30):
            producer.send(Message("orders", b"%d" % number))
    with PullConsumer("billing", namesrv_addr=namesrv) as consumer:
        queues = consumer.queues("orders")
        consumer.assign(queues)
        for queue in queues:
            consumer.seek(queue, 7)
        consumer.commit()
    until(lambda: group.is_caught_up())
    group.replicas[0].stop()
    until(lambda: group.status(0) is None)
    group.admin.promote("broker-a", 1)
    until(lambda: group.status(0) is not None)
    (config,) = group.admin.topic_configs("orders")["broker-a"]
    assert config.write_queue_nums == 3
    with PullConsumer("billing", namesrv_addr=namesrv) as consumer:
        assert [consumer.committed(queue) for queue in consumer.queues("orders")] == [7, 7, 7]


def test_a_follower_that_was_away_catches_up_and_one_that_is_new_gets_everything(group):
    pair(group)
    group.replicas[1].kill()
    with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
        for number in range(3_000):
            producer.send_oneway(Message("t", b"%06d" % number + b"x" * 2_000))
        producer.send(Message("t", b"end"))
    group.start(1, group.endpoints[0])
    group.start(3, group.endpoints[0])
    until(lambda: group.is_caught_up(1) and group.is_caught_up(3))
    end = group.status(0).log_end
    assert len({log_of(group, store, end) for store in ("r0", "r1", "r3")}) == 1


def test_who_catches_up_is_sent_no_more_than_the_limit_until_it_is_changed(group: Group) -> None:
    rate, key = 500_000, "ha.max_ha_transfer_byte_in_second"
    group.start(0, ha__max_ha_transfer_byte_in_second=str(rate), ha__ha_window_bytes="65536")
    with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
        for _ in range(150):
            producer.send_batch([Message("t", os.urandom(10_000)) for _ in range(10)])
    began_s = time.monotonic()
    group.start(1, group.endpoints[0])

    def has() -> int:
        written = sum(one.written for one in group.status(0).replicas)
        # A second's worth is there at first; a batch that is over the limit is paid for later.
        assert written <= (time.monotonic() - began_s + 1) * rate + 200_000
        return written

    until(lambda: has() > 3 * rate)
    assert group.status(0).log_end > 20 * rate
    with BrokerAdmin(group.namesrv.endpoint) as admin:
        admin.set_config("broker-a", {key: "0"})
    until(lambda: group.is_caught_up())


def test_a_follower_refuses_what_is_the_masters_and_promotion_beside_one(group: Group) -> None:
    pair(group)
    with pytest.raises(InvalidArgument, match="stop it first"):
        group.admin.promote("broker-a", 1)
    status = group.status(1)
    assert (status.role, status.broker_id) == ("FOLLOWING", 1)
    assert status.leader == group.endpoints[0]
    metrics = group.admin.role_info(group.endpoints[1])
    assert (metrics["ha_role"], metrics["ha_connected"]) == ("FOLLOWING", True)
    assert metrics["ha_copied_bytes_total"] > 0 == metrics["ha_leader_lag_bytes"]
    assert group.admin.role_info(group.endpoints[0])["ha_role"] == "MASTER"
    deletion = RequestCode.DELETE_TOPIC_IN_BROKER, encode_header(DeleteTopicRequest("t"))
    with AdminClient(group.namesrv.endpoint) as admin:
        follower = f"tcp://{group.endpoints[1]}"
        with pytest.raises(NotMaster, match="follows") as refused:
            admin._ask_channel(follower, *deletion, 3_000, ())
        assert refused.value.master == group.endpoints[0]
        with pytest.raises(TopicNotFound):  # so the master says, who is asked instead
            admin._request(follower, *deletion)


def test_an_old_master_that_starts_as_one_again_serves_nothing(group: Group) -> None:
    pair(group)
    group.replicas[0].kill()
    until(lambda: group.status(0) is None and not group.status(1).connected)
    group.admin.promote("broker-a", 1)
    until(lambda: group.status(0) is not None)
    group.start(0)

    def is_refused() -> bool:
        try:
            group.admin._request(
                f"tcp://{group.endpoints[0]}",
                RequestCode.DELETE_TOPIC_IN_BROKER,
                encode_header(DeleteTopicRequest("t")),
            )
        except NotMaster:
            return True
        except TopicNotFound:
            pass  # it has not heard of the new one yet
        return False

    until(is_refused)
    assert group.status(0).broker_id == 1
    with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
        producer.send(Message("t", b"for the new one"))
    assert bodies_of(group) == [b"for the new one"]

"""What the followers of an elected master answer to those who read from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.simulation.election import leadership_of
from harness.simulation.world import Process
from simulation.test_election import Site

from mqmesh import Message, Producer, PullConsumer
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import decode_messages
from mqmesh.errors import MQMeshError, NotMaster
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.pulling import (
    PullRequest,
    PullResponse,
    PullStatus,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.units import MAX_OFFSET


class Reader:
    """Somebody who asks one replica."""

    def __init__(self, site: Site, replica: Process) -> None:
        self._site = site
        self._transport = site.world.transport("reader")
        port = site.world.broker_port(replica.name)
        self._connection = self._transport.connect(f"tcp://127.0.0.1:{port}")
        self.answers: list[Command | MQMeshError] = []

    def ask(self, code: RequestCode, header) -> None:
        self._connection.request(
            code, self.answers.append, header=encode_header(header), timeout_ms=20_000
        )

    def pull(self, queue_offset: int, suspend_ms: int = 0) -> None:
        pull = PullRequest("g", "t", 0, queue_offset, suspend_timeout_ms=suspend_ms)
        self.ask(RequestCode.PULL_MESSAGE, pull)

    def answer(self, span_ms: int = 100) -> tuple[PullResponse, list[bytes]]:
        """Status and bodies of the only answer there is."""
        self._site.run(span_ms)
        (answer,) = self.answers
        self.answers.clear()
        if isinstance(answer, MQMeshError):
            raise answer
        header = decode_header(PullResponse, answer.header)
        batches = iter_batches(answer.body)
        return header, [one.body for head, data in batches for one in decode_messages(data, head)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.admin.create_topic("t", queues=1)
    site.run(200)
    yield site
    site.close()


def followers_of(site: Site) -> list[Process]:
    return [one for one in site.replicas if leadership_of(one) is None]


def send(site: Site, *bodies: bytes) -> None:
    world = site.world
    transport = world.transport("producer")
    with Producer("p", client=world.client_options(), transport=transport) as producer:
        for body in bodies:
            producer.send(Message("t", body))
    site.run(200)  # followers are told what is confirmed


def test_a_follower_gives_out_what_is_confirmed_and_waits_for_what_comes(site):
    reader = Reader(site, followers_of(site)[0])
    send(site, b"one")
    reader.pull(0)
    header, bodies = reader.answer()
    assert (header.status, bodies) == (PullStatus.FOUND, [b"one"])
    reader.pull(1, suspend_ms=10_000)
    site.run(1_000)
    assert not reader.answers
    send(site, b"two")
    assert reader.answer()[1] == [b"two"]


def test_what_a_follower_lacks_is_waited_for(site):
    reader = Reader(site, followers_of(site)[0])
    reader.pull(7, suspend_ms=500)
    site.run(300)
    assert not reader.answers
    header, _ = reader.answer(1_000)
    assert (header.status, header.next_queue_offset) == (PullStatus.NO_NEW_MSG, 7)


def test_what_is_the_masters_is_refused_with_his_address(site):
    one = followers_of(site)[0]
    reader = Reader(site, one)
    reader.ask(RequestCode.HEART_BEAT, PullRequest("g", "t", 0, 0))
    with pytest.raises(NotMaster) as refused:
        reader.answer()
    leader = site.replicas[site.leader() - 1]
    port = site.world.broker_port(leader.name)
    assert refused.value.master == f"127.0.0.1:{port}"
    assert refused.value.epoch == leadership_of(leader).epoch


def hide_last_record(site: Site, follower: Process) -> Reader:
    """A record reaches one follower alone: it is not confirmed."""
    other = next(one for one in followers_of(site) if one is not follower)
    other.node.pause()
    transport = site.world.transport("sender")
    producer = Producer(
        "p", client=site.world.client_options(), transport=transport, send_msg_timeout_ms=20_000
    )
    producer.start()
    producer.send_async(Message("t", b"unconfirmed"))
    site.run(1_000)
    return Reader(site, follower)


def test_what_may_be_taken_back_is_shown_to_nobody(site):
    reader = hide_last_record(site, followers_of(site)[0])
    reader.pull(0)
    header, bodies = reader.answer()
    assert (header.status, bodies, header.max_queue_offset) == (PullStatus.NO_NEW_MSG, [], 0)
    reader.pull(0, suspend_ms=10_000)
    assert reader.answer(6_000)[1] == [b"unconfirmed"], "the other one is in sync no more"


def test_a_follower_that_shows_what_it_has_is_found(site):
    one = followers_of(site)[0]
    one.server._store.show_to(lambda: MAX_OFFSET)
    reader = hide_last_record(site, one)
    reader.pull(0)
    assert reader.answer()[1] == [b"unconfirmed"]


def test_a_follower_that_is_cut_off_serves_what_it_has(site):
    send(site, b"one")
    one = followers_of(site)[0]
    site.run(500)
    for other in site.replicas:
        if other is not one:
            other.kill()
    site.run(5_000)
    reader = Reader(site, one)
    reader.pull(0)
    assert reader.answer()[1] == [b"one"]


class Committer:
    """A client that no name server tells anything, once it has a route."""

    def __init__(self, site: Site) -> None:
        world = site.world
        transport = world.transport("client")
        self.engine = ClientEngine(
            world.client_options(),
            heartbeat=lambda: HeartbeatRequest(self.engine.client_id),
            transport=transport,
        )
        self.engine.start()
        self.engine.finder.find("t", lambda route: None)
        site.run(500)
        for namesrv in world.namesrvs:
            world.network.cut(namesrv.node, transport.node)
        self.outcomes: list[Command | MQMeshError] = []

    def commit(self) -> None:
        offsets = [QueueOffsetEntry("t", 0, 0)]
        self.engine.request(
            "broker-a",
            RequestCode.UPDATE_CONSUMER_OFFSET,
            self.outcomes.append,
            header=encode_header(UpdateConsumerOffsetRequest("g", "c", offsets)),
            timeout_ms=3_000,
        )


@pytest.fixture
def committer(site: Site) -> Iterator[Committer]:
    committer = Committer(site)
    yield committer
    committer.engine.close()


def test_what_a_former_master_refuses_is_asked_of_his_successor(site, committer):
    committer.commit()
    site.run(100)
    before = site.leader()
    site.admin.switch_over("broker-a")
    site.run(500)
    assert site.leader() not in (0, before)
    committer.commit()
    committer.commit()
    site.run(100)
    assert [type(one) for one in committer.outcomes] == [Command] * 3


def test_consumers_read_from_the_follower_where_they_stand_whoever_leads(site):
    world = site.world
    world.zone = followers_of(site)[0].server._config.ha.zone
    with PullConsumer(
        "g",
        client=world.client_options(),
        transport=world.transport("consumer"),
        consume_from_where="FIRST_OFFSET",
    ) as consumer:
        consumer.subscribe("t")
        for number in range(6):
            before = consumer.counters.replica_pulls
            for part in range(3):
                send(site, b"%d %d" % (number, part))
                assert [one.body for one in consumer.poll(30_000)] == [b"%d %d" % (number, part)]
            leads = site.replicas[site.leader() - 1].server._config.ha.zone == world.zone
            assert leads or consumer.counters.replica_pulls > before
            consumer.poll(0)  # so that it is done with all
            consumer.commit()
            depose(site)
            site.run(31_000)  # by then it follows advice again


def depose(site: Site) -> int:
    """The master gives up; its id."""
    was = int(site.leader())
    site.replicas[was - 1].server._member.step_down("the test says so")
    return was


def test_who_sees_a_new_epoch_commits_where_it_is(site):
    world, led_again = site.world, 0
    with PullConsumer(
        "g",
        client=world.client_options(),
        transport=world.transport("consumer"),
        persist_consumer_offset_interval_ms=3_600_000,
    ) as consumer:
        (queue,) = consumer.queues("t")
        consumer.assign([queue])
        consumer.seek(queue, 0)
        for number in range(6):
            send(site, b"%d" % number)
            assert [one.body for one in consumer.poll(30_000)] == [b"%d" % number]
            consumer.commit()
            was = depose(site)  # before that is in the log
            site.run(5_000)
            led_again += site.leader() == was
            assert consumer.committed(queue) == number + 1
    assert led_again, "also where the connection to the master stood all the time"


def test_without_a_master_commits_wait_for_one(site, committer):
    depose(site)
    committer.commit()
    site.run(100)
    assert site.leader() == 0
    assert committer.outcomes == []
    site.run(2_000)
    assert [type(one) for one in committer.outcomes] == [Command]


def test_a_consumer_whose_brokers_are_away_says_so_each_minute(site, caplog):
    world = site.world
    with PullConsumer(
        "g", client=world.client_options(), transport=world.transport("consumer")
    ) as consumer:
        consumer.subscribe("t")
        send(site, b"1")
        assert consumer.poll(30_000)
        for replica in site.replicas:
            replica.kill()
        caplog.clear()
        site.run(5 * 60_000)
        lines = [one for one in caplog.messages if "no connection to broker broker-a" in one]
        assert 3 <= len(lines) <= 5
        for replica in site.replicas:
            replica.start()
        site.run(60_000)
        caplog.clear()
        site.run(5 * 60_000)
        assert "no connection to broker" not in caplog.text

"""A broker over real sockets, on a real store."""

from __future__ import annotations

import errno
import itertools
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.stopwatch import Stopwatch

from mqmesh.batch.record_batch import check_stored, decode_messages, encode_batch
from mqmesh.errors import (
    BrokerNotAvailable,
    ConfigError,
    EndpointUnreachable,
    MessageIllegal,
    MQMeshError,
    OffsetIllegal,
    StoreClosed,
    StoreLocked,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.message import Message
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import RoleInfo, RuntimeInfo, RuntimeInfoRequest
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import (
    MAX_FRAME_BYTES,
    Command,
    decode_frame,
    decode_header,
    encode_frame,
    encode_header,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import (
    ConsumerData,
    ConsumerIdsChanged,
    ConsumerList,
    ConsumerListRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
    Subscription,
    UnregisterClientRequest,
)
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    PullRequest,
    PullResponse,
    QueryConsumerOffsetRequest,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
from mqmesh.protocol.route import DeleteTopicRequest, GetRouteRequest, TopicRoute
from mqmesh.roles.broker import server as broker_server
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.namesrv.server import NameServer
from mqmesh.roles.process import StoppedEarly
from mqmesh.storage.backends import open_store
from mqmesh.storage.interface import FlushDiskType, RecoveryProgress
from mqmesh.storage.log.flush import Flusher
from mqmesh.transport.zmq.client import CommandClient
from mqmesh.units import MIB

SEGMENT_BYTES = 32 * MIB
PATIENCE_S = 30


class Site:
    """A broker in this thread, and what its clients say."""

    def __init__(self, wire, folder, **settings) -> None:
        self.wire = wire
        storage = {"mapped_file_size_commit_log": SEGMENT_BYTES} | settings.pop("storage", {})
        self.config = BrokerConfig(
            listen_port=settings.pop("listen_port", 0),
            namesrv_addr=settings.pop("namesrv_addr", []),
            store_path_root_dir=str(folder),
            storage=BrokerStoreConfig(**storage),
            **settings,
        )
        self.clock = wire.loop.clock
        self.broker = BrokerServer(self.config, wire.transport)
        self.endpoint = self.broker.start()
        self.sequences = itertools.count(0, 1_000)
        self.client = wire.client(self.endpoint)

    def restart(self) -> None:
        """Stop the broker and start it on what it left; the client follows it."""
        self.broker.stop()
        self.broker = BrokerServer(self.config, self.wire.transport, self.clock)
        self.endpoint = self.broker.start()
        self.client = self.wire.client(self.endpoint)

    def batch(self, topic="t", queue_id=0, *, bodies=(b"body",), tag=None, **options):
        options.setdefault("first_sequence", next(self.sequences))
        messages = [Message(topic, body, tag=tag) for body in bodies]
        return encode_batch(
            messages,
            topic=topic,
            queue_id=queue_id,
            producer_id=PRODUCER_ID,
            born_timestamp=1,
            **options,
        )

    def begin(self, code, header, *body, client=None, **options):
        """Ask; the outcome will stand in the list that is returned."""
        done: list[Command | MQMeshError] = []
        (client or self.client).request(
            code, done.append, *body, header=header, **({"timeout_ms": 10_000} | options)
        )
        return done

    def wait(self, done):
        self.wire.until(lambda: done)
        if isinstance(done[0], MQMeshError):
            raise done[0]
        return done[0]

    def send(self, *batches, client=None):
        header = encode_send(3_000, len(batches), PRODUCER_KEY)
        done = self.begin(RequestCode.SEND_MESSAGE, header, *batches, client=client)
        command = self.wait(done)
        return decode_outcomes(command.header, command.body)

    def begin_pull(self, topic="t", queue_id=0, queue_offset=0, *, client=None, **options):
        pull = PullRequest("g", topic, queue_id, queue_offset, **options)
        return self.begin(RequestCode.PULL_MESSAGE, encode_header(pull), client=client)

    def pulled(self, done):
        command = self.wait(done)
        data, position, bodies = bytes(command.body), 0, []
        while position < len(data):
            header = check_stored(data, position)
            messages = decode_messages(data, header, position=position)
            bodies += [message.body for message in messages]
            position += header.total_size
        return decode_header(PullResponse, command.header), bodies

    def pull(self, *arguments, **options):
        return self.pulled(self.begin_pull(*arguments, **options))

    def ask(self, code, header, kind=None, client=None):
        return self.wire.ask(client or self.client, code, header, kind)

    def metrics(self):
        request = RuntimeInfoRequest()
        info = self.ask(RequestCode.GET_BROKER_RUNTIME_INFO, request, RuntimeInfo)
        return Readings(info.metrics)

    def held(self, count):
        """Wait until so many pulls are held."""
        self.wire.until(lambda: self.metrics()["held_pulls"] == count)

    def join(self, client_id, group="g", client=None):
        data = ConsumerData(group, "CLUSTERING", "LAST_OFFSET", [Subscription("t")])
        self.ask(
            RequestCode.HEART_BEAT, HeartbeatRequest(client_id, consumers=[data]), client=client
        )

    def members(self, group="g"):
        request = ConsumerListRequest(group)
        return self.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, request, ConsumerList).client_ids


@pytest.fixture
def make_site(wire, short_tmp_path):
    """Makes brokers; settings by name."""
    made = []

    def make(folder="store", **settings):
        site = Site(wire, short_tmp_path / folder, **settings)
        made.append(site)
        return site

    yield make
    for site in made:
        site.broker.stop()


@pytest.fixture
def site(make_site):
    """A broker as configured by default."""
    return make_site()


def test_what_is_sent_is_pulled(site):
    first, second = site.send(site.batch(bodies=(b"a", b"b")), site.batch(queue_id=3))
    assert (first.code, first.base_queue_offset) == (0, 0)
    assert second.code == 0
    answer, bodies = site.pull()
    assert bodies == [b"a", b"b"]
    assert (answer.next_queue_offset, answer.max_queue_offset) == (2, 2)


def test_a_local_client_may_come_by_the_unix_socket(site):
    path = Path(site.config.store_path_root_dir) / "sock"
    assert os.stat(path)
    client = site.wire.client(f"ipc://{path}")
    assert site.send(site.batch(), client=client)[0].code == 0
    assert site.pull(client=client)[1] == [b"body"]


def test_a_waiting_pull_is_answered_within_50_ms_of_the_message(site):
    site.send(site.batch())
    delays = []
    for number in range(1, 11):
        done = site.begin_pull(queue_offset=number, suspend_timeout_ms=15_000)
        site.held(1)
        watch = Stopwatch()
        site.send(site.batch(bodies=(b"%d" % number,)))
        assert site.pulled(done)[1] == [b"%d" % number]
        delays.append(watch.seconds)
    assert sorted(delays)[5] < 0.050


def test_pulls_of_a_lost_client_are_forgotten(site):
    site.send(site.batch())
    other = CommandClient(site.wire.context, site.wire.loop, site.endpoint)
    site.begin_pull(queue_offset=1, suspend_timeout_ms=30_000, client=other)
    site.held(1)
    other.close()
    site.held(0)


def test_refusals_are_told_and_the_connection_goes_on(site):
    assert site.send(site.batch())[0].code == 0
    codes = [
        one.code
        for one in site.send(
            site.batch(queue_id=4), site.batch("%RETRY%g"), site.batch(), site.batch("new")
        )
    ]
    assert codes == [ResponseCode.MESSAGE_ILLEGAL, ResponseCode.NO_PERMISSION, 0, 0]
    with pytest.raises(TopicNotFound):
        site.pull("unknown")
    with pytest.raises(MessageIllegal):
        site.pull(queue_id=4)
    with pytest.raises(UnsupportedCommand):
        site.wait(site.begin(9_999, b""))
    assert site.pull()[1] == [b"body", b"body"]


def test_with_sync_flush_an_answer_means_that_the_disk_has_it(make_site):
    site = make_site(storage={"flush_disk_type": FlushDiskType.SYNC_FLUSH})
    waiting = site.begin_pull(suspend_timeout_ms=15_000) if site.send(site.batch()) else None
    assert site.pulled(waiting)[1] == [b"body"]
    metrics = site.metrics()
    assert metrics["store_durable_offset"] == metrics["store_max_commitlog_offset"]
    held = site.begin_pull(queue_offset=1, suspend_timeout_ms=15_000)
    (outcome,) = site.send(site.batch(bodies=(b"two",)))
    assert (outcome.code, outcome.status) == (0, 0)
    assert site.pulled(held)[1] == [b"two"]


def test_with_sync_flush_nobody_sees_what_the_disk_does_not_have(make_site, monkeypatch):
    synced = threading.Event()
    synced.set()
    begin = Flusher.__init__

    def begin_gated(self, **given):
        begin(self, **given | {"sync": lambda descriptor: synced.wait(PATIENCE_S)})

    monkeypatch.setattr(Flusher, "__init__", begin_gated)
    site = make_site(storage={"flush_disk_type": FlushDiskType.SYNC_FLUSH})
    site.send(site.batch(bodies=(b"one",)))
    synced.clear()
    header = encode_send(3_000, 1, PRODUCER_KEY)
    sent = site.begin(RequestCode.SEND_MESSAGE, header, site.batch(bodies=(b"two",)))
    site.pull()  # in the turn of the send, maybe before it is written
    answer, bodies = site.pull()
    assert (answer.max_queue_offset, bodies, sent) == (1, [b"one"], [])
    synced.set()
    site.wait(sent)
    assert site.pull(queue_offset=1)[1] == [b"two"]


def test_members_are_told_when_one_joins_leaves_or_dies(site):
    notices = {name: [] for name in ("c1", "c2")}
    clients = {}
    for name, heard in notices.items():
        clients[name] = CommandClient(
            site.wire.context, site.wire.loop, site.endpoint, on_command=heard.append
        )
        site.join(name, client=clients[name])
    site.wire.until(lambda: notices["c1"] and notices["c2"])
    change = decode_header(ConsumerIdsChanged, notices["c1"][-1].header)
    assert (notices["c1"][-1].code, change.group) == (RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, "g")
    assert site.members() == ["c1", "c2"]
    notices["c1"].clear()
    began, watch = time.monotonic(), Stopwatch()
    clients["c2"].close()
    site.wire.until(lambda: notices["c1"])
    assert time.monotonic() - began > 0.9
    assert watch.seconds < 3
    assert site.members() == ["c1"]
    site.ask(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c1"), client=clients["c1"])
    with pytest.raises(MQMeshError, match="no member"):
        site.members()
    clients["c1"].close()


def commit(site, *entries):
    queues = [QueueOffsetEntry(*one) for one in entries]
    site.ask(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", "client", queues))


def committed(site, *queues):
    request = QueryConsumerOffsetRequest("g", [QueueOffsetEntry(*one) for one in queues])
    found = site.ask(RequestCode.QUERY_CONSUMER_OFFSET, request, ConsumerOffsets)
    return [one.queue_offset for one in found.queues]


def test_offsets_and_topics_outlive_a_restart_but_not_their_topic(site):
    site.send(site.batch(bodies=(b"a", b"b")), site.batch("u"))
    commit(site, ("t", 0, 2), ("u", 0, 1))
    with pytest.raises(OffsetIllegal):
        commit(site, ("t", 0, 3))
    site.restart()
    assert committed(site, ("t", 0), ("u", 0), ("t", 1)) == [2, 1, -1]
    site.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest("t"))
    assert committed(site, ("t", 0), ("u", 0)) == [-1, 1]
    site.restart()
    assert committed(site, ("t", 0), ("u", 0)) == [-1, 1]
    with pytest.raises(TopicNotFound):
        site.pull()
    assert site.send(site.batch())[0].base_queue_offset == 0


def test_generations_and_locks_of_a_later_epoch_are_newer(site):
    queue = LockEntry("t", 0)
    seen = []
    for _ in range(2):
        site.restart()
        site.send(site.batch())
        data = ConsumerData("g", "CLUSTERING", "LAST_OFFSET", [Subscription("t")])
        heartbeat = HeartbeatRequest("c", consumers=[data])
        answer = site.ask(RequestCode.HEART_BEAT, heartbeat, HeartbeatResponse)
        asked = LockBatchRequest("g", "c", [queue])
        locked = site.ask(RequestCode.LOCK_BATCH_MQ, asked, LockBatchResponse)
        while locked.queues[0].token < 0:  # former holders have their time first
            site.wire.loop.tick(10)
            locked = site.ask(RequestCode.LOCK_BATCH_MQ, asked, LockBatchResponse)
        seen.append((answer.memberships[0].generation, locked.queues[0].token))
    generations, tokens = zip(*seen, strict=True)
    assert list(generations) == sorted(set(generations))
    assert list(tokens) == sorted(set(tokens))


def test_files_beside_the_log_may_be_lost(site, short_tmp_path):
    site.send(site.batch(queue_id=2, bodies=(b"kept",)))
    site.broker.stop()
    for path in (short_tmp_path / "store" / "config").iterdir():
        path.unlink()
    site.restart()
    assert site.pull(queue_id=2)[1] == [b"kept"]


@pytest.fixture
def namesrv(wire):
    server = NameServer(NamesrvConfig(listen_port=0), wire.transport)
    endpoint = server.start()
    yield endpoint.removeprefix("tcp://")
    server.stop()


def test_the_name_server_knows_topics_as_soon_as_they_are_there(make_site, namesrv, wire):
    site = make_site(namesrv_addr=[namesrv], register_broker_interval_ms=60_000)
    asker = wire.client(f"tcp://{namesrv}")

    def route():
        try:
            return wire.ask(
                asker, RequestCode.GET_ROUTEINFO_BY_TOPIC, GetRouteRequest("t"), TopicRoute
            )
        except TopicNotFound:
            return None

    assert route() is None
    site.send(site.batch())
    assert wire.until(route) < 1
    found = route()
    assert (found.queues[0].broker_name, found.queues[0].write_queue_nums) == ("broker-a", 4)
    address = found.brokers[0].addresses[0]
    assert f"tcp://{address.tcp}" == site.endpoint
    assert os.path.exists(address.ipc)
    assert site.metrics()["namesrvs_registered"] == 1
    site.broker.stop()
    assert wire.until(lambda: route() is None) < 1


def test_a_stop_is_quick_and_answers_those_who_wait(site):
    site.send(site.batch())
    done = site.begin_pull(queue_offset=1, suspend_timeout_ms=30_000)
    site.held(1)
    watch = Stopwatch()
    site.broker.stop()
    assert watch.seconds < 2
    with pytest.raises((BrokerNotAvailable, EndpointUnreachable)):
        site.wait(done)
    site.broker.stop()


def test_a_second_broker_on_the_same_store_is_refused_and_harms_nothing(site, make_site):
    with pytest.raises(StoreLocked):
        make_site()
    path = Path(site.config.store_path_root_dir) / "sock"
    client = site.wire.client(f"ipc://{path}")
    assert site.ask(RequestCode.PING, b"", RoleInfo, client).state == "running"
    assert site.send(site.batch())[0].code == 0


def test_a_recovering_broker_answers_ping_and_refuses_all_else(make_site, wire, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    client = wire.client(f"tcp://127.0.0.1:{port}")
    seen = []

    def slow_open(*arguments, on_progress, **options):
        ping, pull = [], []
        header = encode_header(PullRequest("g", "t", 0, 0))
        client.request(RequestCode.PING, ping.append, timeout_ms=10_000)
        client.request(RequestCode.PULL_MESSAGE, pull.append, header=header, timeout_ms=10_000)
        deadline = time.monotonic() + 10
        while not (ping and pull) and time.monotonic() < deadline:
            on_progress(RecoveryProgress("reading", 1, 2))
        seen.extend((decode_header(RoleInfo, ping[0].header).state, pull[0]))
        return open_store(*arguments, on_progress=on_progress, **options)

    monkeypatch.setattr(broker_server, "open_store", slow_open)
    site = make_site(listen_port=port)
    assert seen[0] == "recovering"
    assert isinstance(seen[1], BrokerNotAvailable)
    assert site.ask(RequestCode.PING, b"", RoleInfo).state == "running"


def test_a_recovering_broker_can_be_told_to_stop(wire, short_tmp_path, monkeypatch):
    def endless_open(*arguments, on_progress, **options):
        while True:
            on_progress(RecoveryProgress("reading", 1, 2))

    monkeypatch.setattr(broker_server, "open_store", endless_open)
    config = BrokerConfig(
        listen_port=0, namesrv_addr=[], store_path_root_dir=str(short_tmp_path / "store")
    )
    broker = BrokerServer(config, wire.transport)
    wire.loop.call_later(10, wire.loop.stop)
    with pytest.raises(StoppedEarly, match="asked to stop"):
        broker.start()
    broker.stop()


def test_what_cannot_be_started_says_why(make_site, site, short_tmp_path):
    port = int(site.endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match="in use"):
        make_site("other", listen_port=port)
    (short_tmp_path / "file").write_text("")
    with pytest.raises((MQMeshError, OSError)):
        make_site("file")
    with pytest.raises(ConfigError, match="host:port"):
        make_site("third", namesrv_addr=["nonsense"])
    assert site.send(site.batch())[0].code == 0


HOSTILE = random.Random(4)


def hostile_frames():
    codes = [int(code) for code in RequestCode] + [0, 65_535]
    for code in codes:
        for header in (b"", b"\x90", b"\xc1", HOSTILE.randbytes(40), b"\x91" * 2_000):
            yield encode_frame(code, 1, HOSTILE.randbytes(30), header=header)
    whole = encode_frame(
        RequestCode.SEND_MESSAGE, 1, b"MQB1" + bytes(200), header=encode_send(1, 1, PRODUCER_KEY)
    )
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(HOSTILE.randrange(1, 6)):
            damaged[HOSTILE.randrange(len(damaged))] = HOSTILE.randrange(256)
        yield bytes(damaged[: HOSTILE.randrange(len(damaged) + 1)])


def test_malformed_frames_leave_other_clients_unaffected(site, wire):
    hostile = wire.context.socket(zmq.DEALER)
    hostile.setsockopt(zmq.LINGER, 0)
    hostile.connect(site.endpoint)
    sent = 0
    for frame in hostile_frames():
        hostile.send(frame)
        sent += 1
        if sent % 20 == 0:
            assert site.send(site.batch())[0].code == 0
            while hostile.poll(0):
                assert decode_frame(hostile.recv()).code != 0 or sent > 0
    hostile.close()
    assert sent > 300
    metrics = site.metrics()
    assert metrics["callback_failures_total"] == 0
    assert metrics["malformed_frames_total"] > 0
    _, bodies = site.pull(max_bytes=MIB)
    assert len(bodies) == sent // 20


def test_random_bytes_and_oversized_frames_on_the_port_leave_other_clients_unaffected(site, wire):
    host, _, port = site.endpoint.removeprefix("tcp://").rpartition(":")
    for number in range(50):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(HOSTILE.randbytes(2_000))
        if number % 10 == 0:
            assert site.send(site.batch())[0].code == 0
    hostile = wire.context.socket(zmq.DEALER)
    hostile.setsockopt(zmq.LINGER, 0)
    hostile.connect(site.endpoint)
    hostile.send(bytes(MAX_FRAME_BYTES + 1))
    assert site.send(site.batch())[0].code == 0
    hostile.close()
    assert site.metrics()["callback_failures_total"] == 0


def test_one_producer_of_oversized_batches_does_not_stop_the_others(site):
    for _ in range(3):
        (big, small) = site.send(
            site.batch(bodies=(b"x" * (15 * MIB),)), site.batch(queue_id=1, bodies=(b"small",))
        )
        assert big.code == ResponseCode.MESSAGE_ILLEGAL
        assert small.code == 0


def test_a_broker_whose_store_has_stopped_ends(site, wire, monkeypatch):
    def failing(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (sent,) = site.send(site.batch())
    assert sent.code == 0
    monkeypatch.setattr(site.broker._store._flusher, "_sync", failing)
    site.send(site.batch())
    with pytest.raises(StoreClosed, match="Input/output error"):
        wire.loop.run()

"""Queries through real processes: SDK, broker, index process and back."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqmesh.cli.main import main
from mqmesh.errors import (
    BrokerNotAvailable,
    InvalidArgument,
    MQMeshError,
    OffsetIllegal,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.message import Message, StoredMessage
from mqmesh.metrics import Readings
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.queries import QueryClient, QueryResult
from mqmesh.sdk.admin.searches import MessageFilter, SearchClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendResult
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 20.0


@pytest.fixture
def cluster(short_tmp_path: Path) -> Iterator[ProcessCluster]:
    """A name server and a broker with small log segments."""
    settings = {"storage.mapped_file_size_commit_log": str(1 << 20)}
    with ProcessCluster(short_tmp_path, broker_settings=settings) as cluster:
        yield cluster


@pytest.fixture
def query(cluster: ProcessCluster) -> Iterator[QueryClient]:
    """A client for queries."""
    with QueryClient(cluster.namesrv_addr, timeout_ms=10_000) as query:
        yield query


@pytest.fixture
def producer(cluster: ProcessCluster) -> Iterator[Producer]:
    """A producer."""
    with Producer("g", namesrv_addr=cluster.namesrv_addr) as producer:
        yield producer


def patiently(ask: Callable[[], QueryResult]) -> QueryResult:
    """Ask until the index process is there and covers everything."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            result = ask()
        except BrokerNotAvailable:
            result = None
        if result is not None and not result.notes:
            return result
        assert time.monotonic() < deadline, result


def send_with_keys(producer: Producer, start: int, count: int) -> list[tuple[str, SendResult]]:
    """Send batches of ten messages with two keys each; what was acknowledged."""
    acknowledged = []
    for number in range(start, start + count):
        some = [
            Message("orders", bytes(100), keys=(f"k{number}-{n}", f"all{n}")) for n in range(10)
        ]
        acknowledged.append((f"k{number}", producer.send_batch(some)))
    return acknowledged


def check_all(query: QueryClient, acknowledged: list[tuple[str, SendResult]]) -> None:
    """Every message that was acknowledged is found by its own key and by its id."""
    patiently(lambda: query.by_key("orders", "all0"))
    for name, result in acknowledged:
        (found,) = query.by_key("orders", f"{name}-3").messages
        assert found.commitlog_offset == result.commitlog_offset
        (same,) = query.by_id(found.message_id).messages
        assert same == found


def metrics(query: QueryClient) -> Readings:
    return query.runtime_info()["broker-a"]


def index_pid(query: QueryClient, *, killed: int = 0) -> int:
    """Process id of the index process, once it answers; not the one that was killed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = metrics(query)
        if found["index_state"] == "running" and found["index_pid"] not in (0, killed):
            return int(found.number("index_pid"))
        assert time.monotonic() < deadline, found


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        os.sched_yield()


def test_a_message_is_found_the_moment_it_is_acknowledged(producer, query):
    patiently(lambda: _by_key(query, producer.send(Message("orders", b"x", keys=("first",)))))
    for number in range(50):
        sent = producer.send(Message("orders", b"body %d" % number, keys=("all", f"k{number}")))
        (found,) = query.by_key("orders", f"k{number}").messages
        assert found.body == b"body %d" % number
        assert found.message_id == sent.message_id
        assert query.by_id(sent.message_id).messages == [found]
    result = query.by_key("orders", "all")
    bodies = [message.body for message in result.messages]
    assert bodies == [b"body %d" % number for number in range(49, 17, -1)]
    assert result.more


def _by_key(query: QueryClient, sent: SendResult) -> QueryResult:
    assert sent.commitlog_offset >= 0
    return query.by_key("orders", "first")


def test_messages_are_found_by_where_they_stand(producer, query):
    some = [Message("orders", b"%d" % n, keys=("a",), tag="t") for n in range(10)]
    producer.send_batch(some)
    found = patiently(lambda: query.by_key("orders", "a")).messages
    for message in found:
        assert query.by_offset_id(message.offset_message_id) == message
        assert query.by_offset("orders", message.queue_id, message.queue_offset) == message
    one = found[0]
    with pytest.raises(OffsetIllegal, match="before 10"):
        query.by_offset("orders", one.queue_id, 10)
    with pytest.raises(InvalidArgument, match="10 messages"):
        query.by_offset_id(f"{one.store_host}#{one.commitlog_offset:X}#A")
    with pytest.raises(OffsetIllegal):
        query.by_offset_id(f"{one.store_host}#FFFFFF#0")
    with pytest.raises(OffsetIllegal, match="no message begins at"):
        query.by_offset_id(f"{one.store_host}#{one.commitlog_offset + 8:X}#0")
    query.create_topic("empty", queues=1)
    with pytest.raises(OffsetIllegal, match="it is empty, its next message gets 0"):
        query.by_offset("empty", 0, 0)
    with pytest.raises(TopicNotFound):
        query.by_offset("nothing", 0, 0)
    with pytest.raises(TopicNotFound):
        query.by_key("nothing", "a")
    with pytest.raises(InvalidArgument):
        query.by_id("no id")


def test_killed_under_load_the_index_process_comes_back_and_misses_nothing(producer, query):
    acknowledged = []
    pid = 0
    for round_ in range(3):
        acknowledged += send_with_keys(producer, round_ * 100, 50)
        pid = index_pid(query, killed=pid)
        os.kill(pid, signal.SIGKILL)
        acknowledged += send_with_keys(producer, round_ * 100 + 50, 50)
    check_all(query, acknowledged)
    assert metrics(query)["index_starts_total"] == 4
    assert metrics(query)["index_discarded_total"] == 0


def test_a_killed_broker_takes_its_index_process_along(cluster, producer, query):
    acknowledged = send_with_keys(producer, 0, 100)
    pid = index_pid(query)
    cluster.brokers["broker-a"].kill()
    wait_until_gone(pid)
    cluster.start_broker()
    acknowledged += send_with_keys(producer, 100, 100)
    check_all(query, acknowledged)


def test_a_stopped_broker_stops_its_index_process(cluster, query):
    pid = index_pid(query)
    broker = cluster.brokers["broker-a"]
    assert broker.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert "is gone; stopping" not in (cluster.folder / "broker-a.log").read_text()


def test_an_index_that_was_removed_is_made_again(cluster, producer, query):
    acknowledged = send_with_keys(producer, 0, 400)
    pid = index_pid(query)
    # Renamed, not removed file by file: the index process writes into the folder meanwhile.
    (cluster.folder / "broker-a" / "index").rename(cluster.folder / "index-lost")
    acknowledged += send_with_keys(producer, 400, 200)
    os.kill(pid, signal.SIGKILL)
    check_all(query, acknowledged)


def test_a_file_cut_under_the_index_process_costs_a_restart_and_no_message(
    cluster, producer, query
):
    acknowledged = send_with_keys(producer, 0, 400)
    check_all(query, acknowledged[-3:])
    pid = index_pid(query)
    for file in (cluster.folder / "broker-a" / "index").glob("*/data.mdb"):
        os.truncate(file, 4096)
    # Reading beyond the end of a mapped file ends the process by a signal.
    deadline = time.monotonic() + PATIENCE_S
    number = 0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        number += 1
        try:
            query.by_key("orders", f"k{number % 400}-5")
        except MQMeshError:
            break
    check_all(query, acknowledged)
    log = (cluster.folder / "broker-a.log").read_text()
    assert "made anew" in log


def test_with_synchronous_flush_what_is_acknowledged_is_found(short_tmp_path):
    settings = {"storage.flush_disk_type": "SYNC_FLUSH"}
    with (
        ProcessCluster(short_tmp_path, broker_settings=settings) as cluster,
        Producer("g", namesrv_addr=cluster.namesrv_addr) as producer,
        QueryClient(cluster.namesrv_addr) as query,
    ):
        check_all(query, send_with_keys(producer, 0, 20))


def test_several_brokers_are_asked_and_one_that_is_down_is_told(short_tmp_path):
    names = ("broker-a", "broker-b")
    with (
        ProcessCluster(short_tmp_path, brokers=names) as cluster,
        QueryClient(cluster.namesrv_addr, timeout_ms=1_000) as query,
    ):
        query.put_topic(TopicConfig("orders"))
        with Producer("g", namesrv_addr=cluster.namesrv_addr) as producer:
            deadline = time.monotonic() + PATIENCE_S
            while len(queues := producer.fetch_publish_queues("orders")) < 8:
                assert time.monotonic() < deadline, queues
            for body, broker in ((b"first", "broker-a"), (b"second", "broker-b")):
                (queue, *_) = (one for one in queues if one.broker_name == broker)
                producer.send(Message("orders", body, keys=("a",)), queue=queue)
        result = patiently(lambda: query.by_key("orders", "a"))
        assert [message.body for message in result.messages] == [b"second", b"first"]
        assert [message.broker_name for message in result.messages] == ["broker-b", "broker-a"]
        with pytest.raises(InvalidArgument, match="broker-a, broker-b"):
            query.by_offset("orders", 0, 0)
        cluster.brokers["broker-b"].suspend()
        try:
            result = query.by_key("orders", "a")
        finally:
            cluster.brokers["broker-b"].resume()
        assert [message.body for message in result.messages] == [b"first"]
        assert list(result.notes) == ["broker-b"]


@pytest.mark.parametrize(
    "settings", [{"index.enable": "false"}, {"storage.backend": "memory"}], ids=["off", "memory"]
)
def test_a_broker_without_an_index_says_so(short_tmp_path, settings):
    with (
        ProcessCluster(short_tmp_path, broker_settings=settings) as cluster,
        Producer("g", namesrv_addr=cluster.namesrv_addr) as producer,
        QueryClient(cluster.namesrv_addr) as query,
    ):
        producer.send(Message("orders", b"x", keys=("a",)))
        with pytest.raises(UnsupportedCommand, match=r"index\.enable"):
            query.by_key("orders", "a")
        assert metrics(query)["index_state"] == "off"


def test_the_command_line_shows_every_field(cluster, producer, query, capsys):
    body = b'{"a": [1, 2], "b": "\xc3\xbc"}'
    sent = producer.send(
        Message("orders", body, tag="t", keys=("a", "b"), properties={"p": "v"}, flag=3)
    )
    (found,) = patiently(lambda: query.by_key("orders", "a")).messages
    root = ["--namesrv", cluster.namesrv_addr, "query"]
    place = ["--queue", str(found.queue_id), "--offset", str(found.queue_offset)]
    for arguments in (
        ["by-key", "a", "--topic", "orders"],
        ["by-id", sent.message_id],
        ["by-offset-id", found.offset_message_id],
        ["by-offset", "--topic", "orders", *place],
    ):
        assert main([*root, *arguments, "--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["messages"]
        _check_json(one, found)
        assert main([*root, *arguments]) == 0
        text = capsys.readouterr().out
        for part in (sent.message_id, found.offset_message_id, "a, b", "property p", '  "b": "ü"'):
            assert part in text
    assert main([*root, "by-key", "nothing", "--topic", "orders"]) == 1
    assert "no message" in capsys.readouterr().err
    assert main([*root, "by-key", "a", "--topic", "orders", "--from", "never"]) == 2
    assert "--from" in capsys.readouterr().err


def _check_json(one: dict, found: StoredMessage) -> None:
    assert one["message_id"] == found.message_id
    assert one["offset_message_id"] == found.offset_message_id
    assert one["body"] == found.body.decode()
    assert (one["topic"], one["physical_topic"]) == ("orders", "orders")
    assert (one["tag"], one["keys"], one["properties"]) == ("t", ["a", "b"], {"p": "v"})
    assert (one["flag"], one["ordinal"], one["body_size"]) == (3, 0, len(found.body))
    assert one["store_host"] == found.store_host


def test_a_topic_is_searched_by_time_tag_properties_and_body(cluster, producer) -> None:
    with SearchClient(cluster.namesrv_addr, timeout_ms=10_000) as search:
        search.create_topic("orders", queues=4)
        messages = [
            Message("orders", b"body %d" % n, ("new", "paid")[n % 2], properties={"price": str(n)})
            for n in range(40)
        ]
        sent = [producer.send(one) for one in messages]
        middle = sorted(one.store_timestamp for one in sent)[20]

        def bodies(**wanted: Any) -> list[bytes]:
            found = search.search("orders", MessageFilter(**wanted))
            assert found.looked == found.total
            return sorted(bytes(one.body) for one in found.messages)

        def expected(fits: Callable[[int], bool]) -> list[bytes]:
            return sorted(b"body %d" % n for n in range(40) if fits(n))

        assert bodies() == expected(lambda n: True)
        assert bodies(tags="new") == expected(lambda n: n % 2 == 0)
        assert bodies(sql="price > 30 AND TAGS = 'paid'") == expected(lambda n: n > 30 and n % 2)
        assert bodies(text="dy 3") == expected(lambda n: n == 3 or n >= 30)
        times = [one.store_timestamp for one in sent]
        assert bodies(from_ms=middle) == expected(lambda n: times[n] >= middle)
        assert bodies(to_ms=middle) == expected(lambda n: times[n] <= middle)
        assert bodies(from_ms=times[-1] + 1) == []
        queue_id = sent[0].message_queue.queue_id
        of_queue = {n for n in range(40) if sent[n].message_queue.queue_id == queue_id}
        assert bodies(queue_id=queue_id) == expected(lambda n: n in of_queue)
        assert bodies(broker_name="another") == []
        newest = search.search("orders", max_looked=8)
        assert (newest.looked, newest.total, len(newest.messages)) == (8, 40, 8)
        stored = [one.store_timestamp for one in newest.messages]
        assert stored == sorted(stored, reverse=True)
        for max_looked, wanted in ((0, MessageFilter()), (1, MessageFilter(sql="price >"))):
            with pytest.raises(InvalidArgument):
                search.search("orders", wanted, max_looked=max_looked)
        with pytest.raises(TopicNotFound):
            search.search("nope")

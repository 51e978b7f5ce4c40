"""Expressions against a real cluster: exactly the right messages, and few bytes for the others."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
import threading
import time
from collections import Counter

import msgspec
import pytest
from harness.commands import CommandProcess

from mqmesh import MessageSelector, Producer, PullConsumer, PushConsumer, aio
from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import InvalidArgument, MessageIllegal, MQMeshError
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 40.0
TOPIC = "flights"
ROWS = 40_000
BATCH = 200
PREFIX_BYTES = 16
SQL = "dep_delay > 60 AND origin IN ('JFK','EWR')"
TAGS = "UA || DL"


@pytest.fixture(scope="module")
def flights(project_root):
    """Rows of the file with their messages."""
    module = runpy.run_path(str(project_root / "examples" / "flights.py"))
    rows = []
    for row in module["rows"]():
        rows.append((row, module["to_message"](row)))
        if len(rows) == ROWS:
            break
    return rows


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, flights):
    """A cluster that holds the flights, in batches that mix tags."""
    folder = tmp_path_factory.mktemp("cluster")
    with ProcessCluster(folder, broker_settings={"message_delay_level": "1s 1s 1s"}) as cluster:
        cluster.start_schedule()
        with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
            sends = []
            for start in range(0, len(flights), BATCH):
                messages = [message for _, message in flights[start : start + BATCH]]
                for message in messages:
                    message.sharding_key = None
                sends.append(producer.send_batch_async(messages))
            for send in sends:
                send.result()
        yield cluster


def wanted_by_sql(row):
    """What SQL says, written down in Python, over a plain scan."""
    delay = row["dep_delay"]
    return delay not in ("", "NA") and float(delay) > 60 and row["origin"] in ("JFK", "EWR")


def scan(flights, wanted):
    """The bodies of the rows that a plain scan of the file chooses."""
    return Counter(message.body for row, message in flights if wanted(row))


SELECTORS = {
    "sql": (MessageSelector.by_sql(SQL), wanted_by_sql),
    "tags": (MessageSelector.by_tag(TAGS), lambda row: row["carrier"] in ("UA", "DL")),
    "tags-in-sql": (
        MessageSelector.by_sql("TAGS = 'UA' AND NOT dep_delay <= 60"),
        lambda row: (
            row["carrier"] == "UA"
            and row["dep_delay"] not in ("", "NA")
            and float(row["dep_delay"]) > 60
        ),
    ),
}


@pytest.fixture(params=SELECTORS)
def choice(request, flights):
    """A selector and the bodies that it must give."""
    selector, wanted = SELECTORS[request.param]
    return request.param, selector, scan(flights, wanted)


def options(cluster, **more):
    return {
        "namesrv_addr": cluster.namesrv_addr,
        "consume_from_where": "FIRST_OFFSET",
        **more,
    }


def test_a_push_consumer_gets_the_rows_of_a_plain_scan(cluster, choice):
    name, selector, expected = choice
    got, changed = Counter(), threading.Condition()

    def listen(messages):
        with changed:
            got.update(message.body for message in messages)
            changed.notify_all()
        return ConsumeResult.SUCCESS

    consumer = PushConsumer(f"push-{name}", **options(cluster), consume_message_batch_max_size=32)
    consumer.subscribe(TOPIC, selector, listener=listen)
    with consumer, changed:
        changed.wait_for(lambda: got.total() >= expected.total(), PATIENCE_S)
    assert got == expected
    # All is done, also what was passed over: the next member comes to the end.
    with PullConsumer(f"push-{name}", **options(cluster)) as check:
        check.subscribe(TOPIC, selector)
        deadline = time.monotonic() + PATIENCE_S
        while sum(check.lag().values()):
            # On a busy machine the last commit may be late, and some messages come again.
            assert {message.body for message in check.poll(50)} <= expected.keys()
            assert time.monotonic() < deadline


def test_a_pull_consumer_gets_them_with_their_ids_and_offsets(cluster, choice):
    name, selector, expected = choice
    with PullConsumer(f"whole-{name}", **options(cluster)) as whole:
        whole.subscribe(TOPIC)
        everything = {m.message_id: m for m in poll_all(whole, ROWS)}
    with PullConsumer(f"pull-{name}", **options(cluster)) as consumer:
        consumer.subscribe(TOPIC, selector)
        found = poll_all(consumer, expected.total())
        assert consumer.poll(200) == []
    assert Counter(message.body for message in found) == expected
    for message in found:
        twin = everything[message.message_id]
        assert message.info == twin.info
        assert message == twin
        assert (message.queue_offset, message.offset_message_id) == (
            twin.queue_offset,
            twin.offset_message_id,
        )


def poll_all(consumer, count):
    found = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += consumer.poll(500, 4_096)
    assert len(found) == count
    return found


def pull_everything(wire, cluster, selector):
    """Pulls all queues to their ends, as consumers do.

    Returns:
        Bytes of all answers, frames' heads included, and the bodies of the messages.
    """
    size, found = 0, []
    client = wire.client(f"tcp://{cluster.brokers['broker-a'].endpoint}")
    for queue_id in range(4):
        offset = 0
        while True:
            header = PullRequest(
                "wire",
                TOPIC,
                queue_id,
                offset,
                expression=selector.expression,
                expression_type=selector.expression_type,
            )
            command = wire.ask(client, RequestCode.PULL_MESSAGE, header)
            size += PREFIX_BYTES + len(command.header) + len(command.body)
            answer = decode_header(PullResponse, command.header)
            if answer.status == PullStatus.NO_NEW_MSG:
                break
            assert answer.next_queue_offset > offset
            offset = answer.next_queue_offset
            place = 0
            while place < len(command.body):
                batch = check_stored(command.body, place)
                found += decode_messages(command.body, batch, position=place)
                place += batch.total_size
    return size, found


@pytest.mark.parametrize("name", SELECTORS)
def test_what_nobody_wants_does_not_cross_the_network(wire, cluster, flights, name):
    selector, wanted = SELECTORS[name]
    size, found = pull_everything(wire, cluster, selector)
    assert Counter(message.body for message in found) == scan(flights, wanted)
    matches = sum(len(msgspec.msgpack.encode(message.to_message())) for message in found)
    # Every batch has a head of about 140 bytes, even if one message in a hundred is wanted.
    assert size <= (1.2 if name == "tags-in-sql" else 1.1) * matches
    print(f"{name}: {size:,} bytes for {matches:,} bytes of matches: {size / matches:.3f}")


LATE_UA = MessageSelector.by_sql("TAGS = 'UA' AND dep_delay > 240")


def is_late_ua(row):
    return (
        row["carrier"] == "UA"
        and row["dep_delay"] not in ("", "NA")
        and float(row["dep_delay"]) > 240
    )


class Listener:
    """Keeps what it gets; answers what it is told."""

    def __init__(self, answer=lambda message: ConsumeResult.SUCCESS):
        self.changed = threading.Condition()
        self.got = []
        self.answer = answer

    def __call__(self, messages):
        with self.changed:
            (message,) = messages
            self.got.append(message)
            self.changed.notify_all()
            return self.answer(message)

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.got) >= count, PATIENCE_S), len(self.got)


def test_what_fails_comes_again_under_its_own_id(cluster, flights):
    expected = scan(flights, is_late_ua)
    failed = set()

    def answer(message):
        first = message.message_id not in failed
        failed.add(message.message_id)
        return ConsumeResult.RECONSUME_LATER if first else ConsumeResult.SUCCESS

    listener = Listener(answer)
    consumer = PushConsumer("again", **options(cluster))
    consumer.subscribe(TOPIC, LATE_UA, listener=listener)
    with consumer:
        listener.wait(2 * expected.total())
    ids = Counter(message.message_id for message in listener.got)
    assert set(ids.values()) == {2}
    bodies = {message.message_id: message.body for message in listener.got}
    assert Counter(bodies.values()) == expected
    assert {message.topic for message in listener.got} == {TOPIC}


@pytest.mark.parametrize(
    "more", [{"consume_orderly": True}, {"message_model": "BROADCASTING"}], ids=str
)
def test_ordered_and_broadcasting_consumers_get_them(cluster, flights, tmp_path, more):
    expected = scan(flights, is_late_ua)
    listener = Listener()
    name = next(iter(more))
    consumer = PushConsumer(name, **options(cluster), **more, offsets_dir=str(tmp_path))
    consumer.subscribe(TOPIC, LATE_UA, listener=listener)
    with consumer:
        listener.wait(expected.total())
    assert Counter(message.body for message in listener.got) == expected
    places = {}
    for message in listener.got:
        places.setdefault(message.message_queue, []).append(message.queue_offset)
    if name == "consume_orderly":
        assert all(offsets == sorted(offsets) for offsets in places.values())


def test_the_example_finds_the_rows_of_a_plain_scan(cluster, project_root):
    command = [sys.executable, str(project_root / "examples" / "filtered_flights.py")]
    done = subprocess.run(
        [*command, "--rows", "5000", "--namesrv", cluster.namesrv_addr],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("as scanned") == 3


BAD = "a > AND b"


def test_a_bad_expression_is_refused_at_subscribe_and_by_the_broker(wire, cluster):
    selector = MessageSelector.by_sql(BAD)
    where = "character 5: 'AND' where"
    refused = pytest.raises(InvalidArgument, match=where)
    with PullConsumer("bad", **options(cluster)) as consumer, refused:
        consumer.subscribe(TOPIC, selector)
    with PushConsumer("bad", **options(cluster)) as consumer, refused:
        consumer.subscribe(TOPIC, selector, listener=print)

    async def subscribe():
        async with aio.PullConsumer("bad", **options(cluster)) as consumer:
            await consumer.subscribe(TOPIC, selector)

    with pytest.raises(InvalidArgument, match=where):
        asyncio.run(subscribe())
    client = wire.client(f"tcp://{cluster.brokers['broker-a'].endpoint}")
    header = PullRequest("wire", TOPIC, 0, 0, expression=BAD, expression_type="SQL92")
    with pytest.raises(MQMeshError, match=where):
        wire.ask(client, RequestCode.PULL_MESSAGE, header)


HOSTILE = [
    "(" * 4_096,
    "NOT " * 1_000 + "a = 1",
    " OR ".join(f"p{n}=1" for n in range(255)),
    "'" + "''" * 2_000,
    "a IN (" + ",".join(["1e308"] * 255) + ")",
    "x" * 16_384,
    "\x00",
    '"__class__" = \'x\' OR "__init__" IS NULL AND FALSE',
    "dep_delay > 99999999",
]


@pytest.mark.parametrize("expression", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_expressions_hold_nobody_up(wire, cluster, expression):
    client = wire.client(f"tcp://{cluster.brokers['broker-a'].endpoint}")
    other = wire.client(f"tcp://{cluster.brokers['broker-a'].endpoint}")
    longest_s = 0.0
    offset = 0
    while True:
        pulled, pinged = [], []
        header = PullRequest(
            "wire", TOPIC, 0, offset, expression=expression, expression_type="SQL92"
        )
        began = time.monotonic()
        client.request(RequestCode.PULL_MESSAGE, pulled.append, header=encode_header(header))
        other.request(RequestCode.PING, pinged.append)
        wire.until(lambda pulled=pulled, pinged=pinged: pulled and pinged)
        longest_s = max(longest_s, time.monotonic() - began)
        if isinstance(pulled[0], MQMeshError):
            assert isinstance(pulled[0], MessageIllegal | InvalidArgument)
            break
        answer = decode_header(PullResponse, pulled[0].header)
        if answer.status == PullStatus.NO_NEW_MSG:
            break
        assert answer.next_queue_offset > offset
        offset = answer.next_queue_offset
    assert longest_s < 2, "a pull and a ping are answered at once, whatever the expression"


def test_the_command_line_prints_them(cluster, choice):
    _, selector, expected = choice
    language = "--sql" if selector.expression_type == "SQL92" else "--tags"
    with CommandProcess(
        *("--namesrv", cluster.namesrv_addr, "consume", TOPIC, "--from", "first"),
        *(language, selector.expression, "--body", "--max", str(expected.total())),
        *("--timeout", "10"),
    ) as command:
        assert command.wait(PATIENCE_S) == 0
        assert Counter(line.encode() for line in command.out) == expected

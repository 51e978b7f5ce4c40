"""Messages that fail: they come again later, elsewhere if need be, and end as dead letters."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.patience import until

from mqmesh.batch.payload import Payload, compress_payload
from mqmesh.batch.record_batch import batch_parts
from mqmesh.cli import main
from mqmesh.errors import UndecodableMessages
from mqmesh.message import (
    PROPERTY_LAST_FAILURE,
    PROPERTY_RECONSUME_TIMES,
    PROPERTY_RESENT_FROM_DLQ,
    Message,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.retries import ResendStatus
from mqmesh.sdk.admin.dead_letters import DeadLetterClient, DeadLetterFilter
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel

PATIENCE_S = 30.0
LEVELS = "1s 1s 1s 1s 1s 1s"
SETTINGS = {
    "default_topic_queue_nums": "4",
    "message_delay_level": LEVELS,
    "check_compressed_batches": "false",  # so that something undecodable can be stored
}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that no test harms; every retry comes after a second."""
    with ProcessCluster(tmp_path_factory.mktemp("c"), broker_settings=SETTINGS) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture
def own_cluster(short_tmp_path):
    """A cluster that the test may harm."""
    with ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture
def names():
    """A topic and a group that no other test uses."""
    number = next(_numbers)
    return f"retry-topic-{number}", f"retry-group-{number}"


class Listener:
    """Fails as it is told, and keeps what it gets."""

    def __init__(self, fails=lambda message, attempt: False):
        self.changed = threading.Condition()
        self.tries: Counter[bytes] = Counter()
        self.done: list[bytes] = []
        self.seen: list[tuple[float, bytes, object]] = []
        self._fails = fails

    def __call__(self, messages):
        for message in messages:
            with self.changed:
                self.tries[message.body] += 1
                self.seen.append((time.monotonic(), message.body, message))
                attempt = self.tries[message.body]
                self.changed.notify_all()
            if self._fails(message, attempt):
                raise ValueError(f"bad amount in {message.body.decode()}")
            with self.changed:
                self.done.append(message.body)
                self.changed.notify_all()
        return ConsumeResult.SUCCESS

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), PATIENCE_S), "waited in vain"


def hangs_at(body, release):
    """For a ``Listener``: the first try of a message waits, and no try fails."""

    def fails(message, attempt):
        if message.body == body and attempt == 1:
            release.wait(PATIENCE_S)
        return False

    return fails


def bodies(count):
    return [b"%d" % number for number in range(count)]


def send(cluster, topic, wanted, sent=None, **fields):
    """Sends one by one, notes when each was, and returns the ids."""
    ids = []
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        for body in wanted:
            if sent is not None:
                sent[body] = time.monotonic()
            ids.append(producer.send(Message(topic, body, **fields)).message_id)
    return ids


def consumer_of(cluster, topic, group, listener, **options):
    options = {"consume_from_where": "FIRST_OFFSET", **options}
    consumer = PushConsumer(group, namesrv_addr=cluster.namesrv_addr, **options)
    consumer.subscribe(topic, listener=listener)
    return consumer


def letters_of(cluster, group, **wanted):
    with DeadLetterClient(cluster.namesrv_addr) as client:
        return list(client.scan(group, DeadLetterFilter(**wanted)))


def run(capsys, cluster, *arguments):
    """Runs `mqmesh dlq … --json`; returns the exit code and the decoded answer."""
    capsys.readouterr()
    code = main.main(["dlq", *arguments, "--namesrv", cluster.namesrv_addr, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_poison_message_delays_nobody_and_ends_with_its_cause(own_cluster, names, capsys):
    topic, group = names
    healed = threading.Event()
    listener = Listener(lambda message, _: message.body == b"7" and not healed.is_set())
    with consumer_of(own_cluster, topic, group, listener, max_reconsume_times=2):
        sent: dict[bytes, float] = {}
        fields = {
            "keys": ["k"],
            "tag": "T",
            "properties": {"own": "1"},
            "sharding_key": "one queue",
        }
        ids = send(own_cluster, topic, bodies(50), sent, **fields)
        listener.until(lambda one: set(one.done) == set(bodies(50)) - {b"7"})
        came = {body: at for at, body, _ in reversed(listener.seen)}
        assert max(came[body] - sent[body] for body in bodies(50)) < 1
        letter = until(lambda: letters_of(own_cluster, group))[0]
        assert listener.tries[b"7"] == 3
        times = [at for at, body, _ in listener.seen if body == b"7"]
        assert all(later - earlier >= 0.9 for earlier, later in itertools.pairwise(times))

        dead = letter.message
        assert (dead.topic, dead.message_id, dead.tag, dead.keys) == (topic, ids[7], "T", ("k",))
        assert dead.properties == {
            "own": "1",
            PROPERTY_RECONSUME_TIMES: "3",
            PROPERTY_LAST_FAILURE: "ValueError: bad amount in 7",
        }
        retried = [message for _, body, message in listener.seen if body == b"7"][1:]
        assert [message.reconsume_times for message in retried] == [1, 2]
        assert {message.topic for message in retried} == {topic}
        assert {message.message_id for message in retried} == {ids[7]}

        code, told = run(capsys, own_cluster, "resend", group, "--all", "--dry-run")
        assert (code, told["resent"], told["dry_run"]) == (0, 1, True)
        healed.set()
        code, told = run(capsys, own_cluster, "resend", group, ids[7], ids[8])
        assert (code, told["resent"], told["already_resent"]) == (1, 1, 0), "ids[8] is none"
        listener.until(lambda one: b"7" in one.done)
        own_cluster.brokers["broker-a"].kill()
        own_cluster.start_broker()
        until(lambda: letters_of(own_cluster, group, resent=True))
        code, told = run(capsys, own_cluster, "resend", group, "--all")
        assert (code, told["resent"], told["already_resent"]) == (0, 0, 1)
        send(own_cluster, topic, [b"last"])
        listener.until(lambda one: b"last" in one.done)
    assert Counter(listener.done)[b"7"] == 1
    again = [message for _, body, message in listener.seen if body == b"7"][3]
    assert again.reconsume_times == 0
    assert PROPERTY_RESENT_FROM_DLQ in again.properties


def test_without_its_broker_a_failed_message_is_kept_and_tried_here(own_cluster, names):
    topic, group = names
    entered, failing = threading.Event(), threading.Event()

    def fails(message, attempt):
        if message.body == b"3" and attempt == 1:
            entered.set()
            assert failing.wait(PATIENCE_S)
            return True
        return False

    listener = Listener(fails)
    with consumer_of(own_cluster, topic, group, listener):
        send(own_cluster, topic, bodies(10))
        assert entered.wait(PATIENCE_S)
        own_cluster.brokers["broker-a"].kill()
        failing.set()
        listener.until(lambda one: b"3" in one.done)
        own_cluster.start_broker()
        send(own_cluster, topic, [b"last"])
        listener.until(lambda one: {*bodies(10), b"last"} <= set(one.done))
    assert letters_of(own_cluster, group) == []


def test_what_waits_for_its_retry_outlives_consumer_broker_and_schedule(own_cluster, names):
    topic, group = names
    first = Listener(lambda message, _: message.body == b"3")
    with consumer_of(own_cluster, topic, group, first) as consumer:
        send(own_cluster, topic, bodies(10))
        first.until(lambda one: len(one.done) == 9 and one.tries[b"3"])
        until(lambda: consumer.failures)
    own_cluster.schedules["broker-a"].kill()
    own_cluster.brokers["broker-a"].kill()
    own_cluster.start_broker()
    own_cluster.start_schedule()
    second = Listener()
    with consumer_of(own_cluster, topic, group, second):
        second.until(lambda one: b"3" in one.done)


def test_of_a_call_with_many_messages_only_the_bad_one_fails_again(cluster, names):
    topic, group = names
    send(cluster, topic, bodies(20))
    listener = Listener(lambda message, attempt: message.body == b"4" and attempt < 3)
    with consumer_of(
        cluster, topic, group, listener, consume_message_batch_max_size=32, consume_thread_count=1
    ):
        listener.until(lambda one: set(one.done) == set(bodies(20)))
    assert listener.tries[b"4"] == 3


def test_a_queue_that_was_full_because_of_a_call_that_hangs_is_pulled_on(cluster, names):
    topic, group = names
    release = threading.Event()
    listener = Listener(hangs_at(b"0", release))
    options = {"consume_concurrently_max_span": 5, "pull_max_bytes": 1}
    send(cluster, topic, bodies(30), sharding_key="one queue")
    # Once it is sent back nothing is left that a worker could be done with.
    with consumer_of(cluster, topic, group, listener, consume_timeout_ms=1_000, **options):
        listener.until(lambda one: set(one.done) == set(bodies(30)))
        assert not release.is_set()
        release.set()


def test_members_without_the_topic_leave_a_trace(cluster, names):
    topic, group = names
    listener = Listener(lambda message, _: True)
    with consumer_of(cluster, topic, group, listener, max_reconsume_times=1):
        send(cluster, topic, [b"0"])
        listener.until(lambda one: one.tries[b"0"])
    other, stranger = Listener(), f"{topic}-other"
    with consumer_of(cluster, stranger, group, other, max_reconsume_times=1):
        letter = until(lambda: letters_of(cluster, group))[0]
    assert f"no listener for topic {topic}" in letter.reason
    assert other.seen == []


def send_undecodable(cluster, topic):
    """Three messages to queue 0 that nobody can read; returns their first offset."""
    # Compressed, since this broker does not look inside then.
    raw = b"\x93" + b"\xc1" * 1_000  # msgpack never uses this byte
    stored, codec = compress_payload(raw)
    batch = b"".join(
        batch_parts(
            Payload(stored, codec, len(raw), 3, False, b""),
            topic=topic,
            queue_id=0,
            producer_id=PRODUCER_ID,
            first_sequence=0,
            born_timestamp=1,
        )
    )
    context = sockets.new_context()
    channel = BlockingChannel(context, f"tcp://{cluster.brokers['broker-a'].endpoint}")
    try:
        answer = channel.request(
            RequestCode.SEND_MESSAGE,
            batch,
            header=encode_send(3_000, 1, PRODUCER_KEY),
            timeout_ms=5_000,
        )
    finally:
        channel.close()
        context.destroy(linger=0)
    (outcome,) = decode_outcomes(answer.header, answer.body)
    assert outcome.code == 0
    return outcome.base_queue_offset


def test_messages_that_nobody_can_read_stop_no_queue(cluster, names, capsys, tmp_path):
    topic, group = names
    send(cluster, topic, bodies(8))
    send_undecodable(cluster, topic)
    send(cluster, topic, [b"behind-%d" % number for number in range(8)])
    listener = Listener()
    with consumer_of(cluster, topic, group, listener):
        listener.until(lambda one: len(one.done) == 16)
        (letter,) = until(lambda: letters_of(cluster, group))
    assert (letter.message, letter.count) == (None, 3)
    assert letter.reason.startswith("it cannot be decoded: ")
    assert len(letter.reason) > len("it cannot be decoded: ")
    file = tmp_path / "letters.jsonl"
    code, told = run(capsys, cluster, "export", group, str(file))
    assert (code, told["exported"]) == (0, 3)
    assert json.loads(file.read_text())["batch_base64"]
    code, told = run(capsys, cluster, "resend", group, "--all")
    assert (code, told["refused"]) == (1, 1)
    assert "decoded" in told["problems"][0]["remark"]


def test_a_pull_consumer_is_told_of_what_it_cannot_read_and_may_pass_it_over(cluster, names):
    topic, group = names
    send(cluster, topic, bodies(8))
    first = send_undecodable(cluster, topic)
    send(cluster, topic, [b"behind-%d" % number for number in range(8)])
    got, told = [], []
    with PullConsumer(
        group, namesrv_addr=cluster.namesrv_addr, consume_from_where="FIRST_OFFSET"
    ) as consumer:
        consumer.subscribe(topic)
        deadline = time.monotonic() + PATIENCE_S
        while len(got) < 16 and time.monotonic() < deadline:
            try:
                got += consumer.poll(200)
            except UndecodableMessages as error:
                told.append(error)
                (queue,) = [q for q in consumer.assignment() if q.queue_id == error.queue_id]
                if len(told) == 3:
                    consumer.seek(queue, error.next_offset)
    assert len(got) == 16
    assert [(one.queue_offset, one.next_offset) for one in told] == [(first, first + 3)] * 3


def test_dead_letters_are_found_by_what_they_are(cluster, names, capsys, tmp_path):
    topic, group = names
    listener = Listener(lambda message, _: True)
    with consumer_of(cluster, topic, group, listener, max_reconsume_times=0):
        send(cluster, topic, bodies(6), keys=["even"], tag="A")
        ids = send(cluster, topic, [b"60", b"61"], keys=["odd"])
        until(lambda: len(letters_of(cluster, group)) == 8)
    assert len(letters_of(cluster, group, key="odd")) == 2
    assert len(letters_of(cluster, group, tag="A")) == 6
    assert len(letters_of(cluster, group, topic="another")) == 0
    assert len(letters_of(cluster, group, reason="BAD AMOUNT IN 6")) == 2
    assert len(letters_of(cluster, group, from_ms=1, to_ms=2)) == 0
    code, told = run(capsys, cluster, "list")
    assert [one["dead_letters"] for one in told if one["group"] == group] == [8]
    code, told = run(capsys, cluster, "list", group, "--max", "3")
    assert (code, len(told["dead_letters"]), told["count"]) == (0, 3, 8)
    code, (letter,) = run(capsys, cluster, "show", group, ids[0])
    assert (letter["body"], letter["reason"]) == ("60", "ValueError: bad amount in 60")
    code, told = run(capsys, cluster, "resend", group, "--key", "odd", "--target", "topic")
    assert (code, told["resent"]) == (0, 2)
    code, told = run(capsys, cluster, "resend", group, "--all")
    assert (told["resent"], told["already_resent"]) == (6, 2)
    code, told = run(capsys, cluster, "resend", group, ids[0], "--force")
    assert told["resent"] == 1
    with DeadLetterClient(cluster.namesrv_addr) as client:
        letters = list(client.scan(group))
        newest = [one.queue_offset for one in client.scan(group, newest=3)]
        assert newest == [one.queue_offset for one in letters[-3:]]
        results = [result for _, result in client.resend(group, letters, dry_run=True)]
    assert {result.status for result in results} == {ResendStatus.ALREADY_RESENT}
    healed = Listener()
    with consumer_of(cluster, topic, group, healed):
        healed.until(lambda one: {*bodies(6), b"60", b"61"} <= set(one.done))


def test_the_example_books_what_was_given_up(cluster, project_root):
    done = subprocess.run(
        [
            sys.executable,
            str(project_root / "examples" / "dead_letters.py"),
            *("--namesrv", cluster.namesrv_addr),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "dead: payment to eve: KeyError: 'eve'",
        "first resend: status 0",
        "second resend: status 1",
        "booked: ada, bob, eve",
    ]

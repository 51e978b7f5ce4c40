"""The fixture mqmesh_cluster, here and in a project of somebody else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
from harness.stopwatch import Stopwatch

from mqmesh.errors import MQMeshError
from mqmesh.message import Message

USERS_TEST = """
    import threading

    import pytest
    from mqmesh import ConsumeResult, Message

    names = set()

    @pytest.mark.parametrize("round", [1, 2])
    def test_there_and_back(mqmesh_cluster, round):
        topic = mqmesh_cluster.topic(queues=2)
        assert topic not in names
        names.add(topic)
        done = threading.Event()
        consumer = mqmesh_cluster.push_consumer()
        def listen(messages):
            assert messages[0].body == b"hello"
            done.set()
            return ConsumeResult.SUCCESS
        consumer.subscribe(topic, listener=listen)
        consumer.start()
        mqmesh_cluster.producer().send(Message(topic, b"hello"))
        assert done.wait(20)
        assert [m.body for m in mqmesh_cluster.messages(topic)] == [b"hello"]
        print(f"started in {mqmesh_cluster.started_in_s:.3f} s")

    def test_what_fails_comes_again(mqmesh_cluster):
        topic, times = mqmesh_cluster.topic(), []
        done = threading.Event()
        consumer = mqmesh_cluster.push_consumer()
        def listen(messages):
            times.append(messages[0].reconsume_times)
            if len(times) == 1:
                raise ValueError("not yet")
            done.set()
            return ConsumeResult.SUCCESS
        consumer.subscribe(topic, listener=listen)
        consumer.start()
        mqmesh_cluster.producer().send(Message(topic, b"hello"))
        assert done.wait(20)
        assert times == [0, 1]

    def test_after_a_stop(mqmesh_cluster):
        topic = mqmesh_cluster.topic()
        producer = mqmesh_cluster.producer(send_msg_timeout_ms=20_000)
        producer.send(Message(topic, b"before"))
        STOP
        mqmesh_cluster.start_broker()
        producer.send(Message(topic, b"after"))
        bodies = {m.body for m in mqmesh_cluster.messages(topic)}
        assert bodies == {b"before", b"after"}
"""


@pytest.mark.parametrize(
    ("kind", "stop"), [("threads", "stop_broker"), ("processes", "kill_broker")]
)
def test_a_project_of_somebody_else_gets_a_cluster_quickly(tmp_path, kind, stop):
    source = textwrap.dedent(USERS_TEST).replace("STOP", f"mqmesh_cluster.{stop}()")
    (tmp_path / "test_users.py").write_text(source)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nmqmesh_cluster = {kind}\n"
        "mqmesh_broker_settings =\n    message_delay_level = 1s 1s 1s\n"
    )
    watch = Stopwatch()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    # A cluster starts within a second; Python, pytest and four tests are the rest.
    assert watch.seconds < 10


def test_a_test_has_names_and_clients_of_its_own(mqmesh_cluster):
    one, two = mqmesh_cluster.topic(), mqmesh_cluster.topic()
    assert one != two
    assert mqmesh_cluster.group() != mqmesh_cluster.group()
    assert "test_a_test_has_names" in one
    producer = mqmesh_cluster.producer()
    producer.send(Message(one, b"1"))
    assert mqmesh_cluster.messages(two) == []
    consumer = mqmesh_cluster.pull_consumer()
    consumer.subscribe(one)
    assert [message.body for message in consumer.poll(timeout_ms=20_000)] == [b"1"]
    mqmesh_cluster.close()
    with pytest.raises(MQMeshError):
        producer.send(Message(one, b"2"))


def test_the_broker_may_be_stopped_and_is_there_again_for_the_next_test(mqmesh_cluster):
    topic = mqmesh_cluster.topic()
    mqmesh_cluster.producer().send(Message(topic, b"1"))
    mqmesh_cluster.stop_broker()
    producer = mqmesh_cluster.producer(send_msg_timeout_ms=300)
    with pytest.raises(MQMeshError):
        producer.send(Message(topic, b"2"))
    mqmesh_cluster.close()
    assert mqmesh_cluster.messages(topic)[0].body == b"1"


def test_a_broker_that_was_started_is_known_to_all(mqmesh_cluster):
    for _ in range(5):
        mqmesh_cluster.stop_broker()
        mqmesh_cluster.start_broker()
        topic = mqmesh_cluster.topic()
        mqmesh_cluster.producer().send(Message(topic, b"1"))


def test_delayed_messages_come_when_they_are_due(mqmesh_cluster):
    topic = mqmesh_cluster.topic()
    consumer = mqmesh_cluster.pull_consumer()
    consumer.subscribe(topic)
    sent_ms = time.time() * 1_000
    mqmesh_cluster.producer().send(Message(topic, b"later", delay_level=1))
    (message,) = consumer.poll(timeout_ms=20_000)
    assert message.body == b"later"
    assert message.store_timestamp >= sent_ms + 900


def test_a_thread_cannot_be_killed(mqmesh_cluster):
    with pytest.raises(RuntimeError, match="--mqmesh-cluster=processes"):
        mqmesh_cluster.kill_broker()


def test_pytest_loads_nothing_of_a_cluster_until_it_is_wanted():
    code = "import sys, mqmesh.testing.pytest_plugin; print('zmq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

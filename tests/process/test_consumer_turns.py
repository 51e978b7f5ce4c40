"""A push consumer's worker that takes the turns of the client's event loop, in a real cluster."""

from __future__ import annotations

import threading
import time

import pytest

from mqmesh.message import Message
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.listening import consume_service
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster
from mqmesh.testing.stopwatch import Stopwatch

PATIENCE_S = 20.0
QUEUES = 4
BATCHES = 200
BATCH_MESSAGES = 250
TOTAL = BATCHES * BATCH_MESSAGES
A_QUEUE = TOTAL // QUEUES
"""Twice as many as one pull brings."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    settings = {"default_topic_queue_nums": str(QUEUES)}
    folder = tmp_path_factory.mktemp("cluster")
    with ProcessCluster(folder, broker_settings=settings) as cluster:
        with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
            queues = producer.fetch_publish_queues("bulk")
            assert len(queues) == QUEUES
            batch = [Message("bulk", b"x" * 100)] * BATCH_MESSAGES
            futures = [
                producer.send_batch_async(batch, queue=queues[number % QUEUES])
                for number in range(BATCHES)
            ]
            for future in futures:
                future.result()
        yield cluster


class Busy:
    """A pace that does not depend on how busy the machine is."""

    waits = False

    def note(self, took_s, cpu_s):
        pass


@pytest.fixture
def busy(monkeypatch):
    monkeypatch.setattr(consume_service, "WorkerPace", Busy)


class Group:
    """A consumer of everything, and a listener that may hang while it has the turns.

    Args:
        hangs: A call that finds its thread to have borrowed the turns waits for ``release``; once.
    """

    def __init__(self, cluster, name, *, hangs):
        self.release = threading.Event()
        self.hanging = threading.Event()
        self.changed = threading.Condition()
        self.offsets: dict[int, list[int]] = {}
        self.leaders = 0
        self.hanging_queue = -1
        self.hangs = hangs
        self.consumer = PushConsumer(
            name,
            namesrv_addr=cluster.namesrv_addr,
            consume_from_where="FIRST_OFFSET",
            consume_message_batch_max_size=BATCH_MESSAGES,
            persist_consumer_offset_interval_ms=100,
        )
        self.consumer.subscribe("bulk", listener=self.listen)
        self.loop = self.consumer._engine.client.loop

    def listen(self, messages):
        leads = self.loop._borrower == threading.get_ident()
        assert not self.loop.in_loop_thread
        if leads and self.hangs and not self.hanging.is_set():
            self.hanging_queue = messages[0].queue_id
            self.hanging.set()
            self.release.wait(PATIENCE_S)
        with self.changed:
            self.leaders += leads
            offsets = self.offsets.setdefault(messages[0].queue_id, [])
            offsets += [message.queue_offset for message in messages]
            self.changed.notify_all()
        return ConsumeResult.SUCCESS

    def until_consumed(self, *, but=-1):
        def consumed():
            return all(
                len(self.offsets.get(queue, ())) >= A_QUEUE
                for queue in range(QUEUES)
                if queue != but
            )

        with self.changed:
            assert self.changed.wait_for(consumed, PATIENCE_S)


def test_a_backlog_is_consumed_by_a_worker_that_takes_the_turns(cluster, busy):
    group = Group(cluster, "quick", hangs=False)
    with group.consumer:
        group.until_consumed()
    assert group.leaders
    assert all(sorted(offsets) == list(range(A_QUEUE)) for offsets in group.offsets.values())


def test_a_listener_that_hangs_with_the_turns_holds_up_nothing_but_its_messages(cluster, busy):
    group = Group(cluster, "hangs", hangs=True)
    with group.consumer:
        assert group.hanging.wait(PATIENCE_S)
        # So somebody else sends the pulls that are missing, and takes their answers.
        group.until_consumed(but=group.hanging_queue)
        # And what is done is committed meanwhile.
        deadline = time.monotonic() + PATIENCE_S
        with GroupAdmin(namesrv_addr=cluster.namesrv_addr) as admin:
            while admin.progress("hangs").lag > A_QUEUE:
                assert time.monotonic() < deadline
        group.release.set()
        group.until_consumed()
    assert all(sorted(offsets) == list(range(A_QUEUE)) for offsets in group.offsets.values())


def test_closing_is_quick_while_a_listener_hangs_with_the_turns(cluster, busy):
    group = Group(cluster, "closes", hangs=True)
    group.consumer.start()
    assert group.hanging.wait(PATIENCE_S)
    closer = threading.Thread(target=group.consumer.close)
    watch = Stopwatch()
    closer.start()
    closer.join(group.consumer.options.close_timeout_ms / 1_000 + 2)
    assert not closer.is_alive()
    assert watch.seconds < group.consumer.options.close_timeout_ms / 1_000 + 2
    group.release.set()


def test_a_listener_may_close_its_consumer_while_it_has_the_turns(cluster, busy):
    group = Group(cluster, "closes-itself", hangs=True)
    closed = threading.Event()

    class CloseInstead(threading.Event):
        def wait(self, timeout=None):
            group.consumer.close()
            closed.set()
            return True

    group.release = CloseInstead()
    group.consumer.start()
    assert closed.wait(PATIENCE_S)

"""The broker's clock is set forward and back by an hour while messages wait: nothing is lost."""

from __future__ import annotations

import threading
import time

import pytest
from harness.patience import until
from harness.stepped_clock import PROGRAM, step_clock

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 30.0
HOUR_MS = 3_600_000
SOON, LATER, MUCH_LATER = b"soon", b"in half an hour", b"in two hours"
SOON_COUNT, FAR_COUNT = 300, 50
BEGIN_MS, SPREAD_MS = 1_500, 10
"""When the first of those due soon is due, and the time from one to the next."""
SETTINGS = {
    "message_delay_level": "1s",
    "default_topic_queue_nums": "2",
    "transaction_timeout_ms": "500",
    "transaction_check_interval_ms": "300",
    "transaction_check_max": "1000",  # the listener is asked until it knows, however long that is
}


class Late(TransactionListener):
    """Knows the outcome of its transactions only when it is told."""

    def __init__(self) -> None:
        self.known = threading.Event()

    def execute_local_transaction(self, message, arg):
        return LocalTransactionState.UNKNOWN

    def check_local_transaction(self, message):
        if not self.known.is_set():
            return LocalTransactionState.UNKNOWN
        if message.body.startswith(b"yes"):
            return LocalTransactionState.COMMIT
        return LocalTransactionState.ROLLBACK


class Scene:
    """A cluster whose broker has a clock that can be set, and everything it delivered."""

    def __init__(self, folder) -> None:
        self._file = folder / "clock"
        self.set_clock(0)
        self.cluster = ProcessCluster(
            folder, broker_settings=SETTINGS, broker_program=(*PROGRAM, str(self._file))
        )
        self.cluster.start_schedule()
        address = self.cluster.namesrv_addr
        self.listener = Late()
        self.producer = Producer("producers", namesrv_addr=address)
        self.transactions = TransactionProducer("transactions", self.listener, namesrv_addr=address)
        self.consumer = PullConsumer(
            "consumers", namesrv_addr=address, consume_from_where="FIRST_OFFSET"
        )
        self.found: list = []

    def __enter__(self) -> Scene:
        self.producer.start()
        self.transactions.start()
        self.consumer.start()
        self.consumer.subscribe("t")
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.close()
        self.transactions.close()
        self.producer.close()
        self.cluster.close()

    def set_clock(self, offset_ms: int) -> None:
        step_clock(self._file, offset_ms)

    def send_all(self) -> dict[bytes, set[str]]:
        """Sends what is due soon, later and much later; ids by body."""
        now_ms = time.time_ns() // 1_000_000
        soon = [now_ms + BEGIN_MS + SPREAD_MS * number for number in range(SOON_COUNT)]
        dues = (
            [(SOON, due_ms) for due_ms in soon]
            + [(LATER, now_ms + HOUR_MS // 2)] * FAR_COUNT
            + [(MUCH_LATER, now_ms + 2 * HOUR_MS)] * FAR_COUNT
        )
        futures = [
            (body, self.producer.send_async(Message("t", body, deliver_at_ms=due_ms)))
            for body, due_ms in dues
        ]
        ids: dict[bytes, set[str]] = {}
        for body, future in futures:
            ids.setdefault(body, set()).add(future.result().message_id)
        for number in range(20):
            self.transactions.send_message_in_transaction(Message("t", b"yes %d" % number))
            self.transactions.send_message_in_transaction(Message("t", b"no %d" % number))
        return ids

    def kill(self, role: str) -> None:
        """Kills the broker or its schedule service, and starts it again; the other one runs on."""
        if role == "broker":
            self.cluster.brokers["broker-a"].kill()
            self.cluster.start_broker()
        else:
            self.cluster.schedules["broker-a"].kill()
            self.cluster.start_schedule()

    def poll_until(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"only {len(self.found)} messages came"
            self.found += self.consumer.poll(100, 1_000)

    def ids(self, body: bytes) -> set[str]:
        return {one.message_id for one in self.found if one.body == body}

    def count(self, start: bytes) -> int:
        return sum(one.body.startswith(start) for one in self.found)

    def pass_a_second(self, mark: bytes) -> None:
        """Until the service delivered something by the broker's clock as it is now."""
        self.producer.send(Message("t", mark, delay_level=1))
        self.poll_until(lambda: self.count(mark))

    def wait_pending(self, count: int) -> None:
        """Until the broker knows from the service that so many messages wait."""
        with AdminClient(self.cluster.namesrv_addr) as admin:
            until(lambda: admin.runtime_info()["broker-a"]["schedule_pending"] == count)

    def check_transactions(self) -> None:
        self.listener.known.set()
        self.poll_until(lambda: self.count(b"yes") >= 20)
        bodies = [one.body for one in self.found if one.body[:1] in b"yn"]
        assert sorted(bodies) == sorted(b"yes %d" % number for number in range(20))

    def check_never_early(self, step_ms: int) -> None:
        timed = [one for one in self.found if one.body in (SOON, LATER, MUCH_LATER)]
        assert timed
        for one in timed:
            # The store timestamp is the time of delivery by the broker's clock.
            assert one.store_timestamp >= one.deliver_at_ms
            assert one.store_timestamp <= time.time_ns() // 1_000_000 + step_ms


@pytest.mark.parametrize("kill", ["broker", "service"])
def test_a_clock_set_forward_delivers_early_by_no_more_than_that(short_tmp_path, kill):
    with Scene(short_tmp_path) as scene:
        ids = scene.send_all()
        scene.poll_until(lambda: scene.count(SOON) >= 20)
        scene.set_clock(HOUR_MS)
        scene.kill(kill)
        scene.poll_until(lambda: scene.ids(LATER) == ids[LATER])
        scene.poll_until(lambda: scene.ids(SOON) == ids[SOON])
        scene.pass_a_second(b"a second later")
        assert scene.ids(MUCH_LATER) == set()
        scene.check_never_early(HOUR_MS)
        scene.check_transactions()
        places = {(one.queue_id, one.queue_offset) for one in scene.found}
        assert len(places) == SOON_COUNT + FAR_COUNT + 20 + 1, "something was delivered twice"
        scene.wait_pending(FAR_COUNT)
        scene.set_clock(2 * HOUR_MS)
        scene.poll_until(lambda: scene.ids(MUCH_LATER) == ids[MUCH_LATER])


@pytest.mark.parametrize("kill", ["broker", "service"])
def test_a_clock_set_back_delivers_late_but_everything(short_tmp_path, kill):
    with Scene(short_tmp_path) as scene:
        ids = scene.send_all()
        scene.poll_until(lambda: scene.count(SOON) >= 20)
        scene.set_clock(-HOUR_MS)
        scene.kill(kill)
        scene.pass_a_second(b"a second later")
        before = scene.count(SOON)
        scene.pass_a_second(b"two seconds later")
        assert scene.count(SOON) == before < SOON_COUNT
        scene.check_transactions()
        scene.set_clock(0)
        scene.poll_until(lambda: scene.ids(SOON) == ids[SOON])
        scene.pass_a_second(b"in the end")
        assert scene.ids(LATER) | scene.ids(MUCH_LATER) == set()
        scene.check_never_early(0)
        places = {(one.queue_id, one.queue_offset) for one in scene.found}
        assert len(places) == SOON_COUNT + 20 + 3, "something was delivered twice"
        scene.wait_pending(2 * FAR_COUNT)

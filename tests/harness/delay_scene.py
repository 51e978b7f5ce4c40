"""Delayed messages while broker and schedule service are killed at any time; the judgement is C9.

A message whose cancel succeeded must never be in the log; an accepted one must be there
once, under its id, and not before it was due.
"""

import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from harness.chaos_scene import BROKER, wait_until
from harness.checker import Report, Verdict
from harness.checker_later import delayed_messages
from harness.history import ACKED, UNKNOWN, DelayedMessage, Delivery, History
from harness.secured import keys_in
from harness.topic_reader import read_topic
from mqmesh.errors import BrokerError, MQMeshError
from mqmesh.message import Message
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture
from mqmesh.testing.processes import ProcessCluster

TOPIC: Final = "delays"
PATIENCE_S: Final = 60.0
LOAD_S: Final = (0.05, 0.5)
DELAY_MS: Final = 1_500
BATCHES_A_STEP: Final = 5
SERVICE_SHARE: Final = 0.6
"""Share of the kills that hit the schedule service."""
CANCEL_SHARE: Final = 0.1


class _Sent:
    """A batch that was sent, and what is known of it."""

    def __init__(self, first: int, due_ms: list[int], future: SendFuture) -> None:
        self.first = first
        self.due_ms = due_ms
        self.future = future
        self.cancelled = ""

    def messages(self) -> list[DelayedMessage]:
        outcome = ACKED if self.future.exception() is None else UNKNOWN
        return [
            DelayedMessage("delays", self.first + i, "", outcome, float(due), self.cancelled)
            for i, due in enumerate(self.due_ms)
        ]


class DelayScene:
    """A cluster with a schedule service, a producer, and what it sent.

    Args:
        folder: For everything on disk.
        seed: Seed of all random choices.
        flush: The broker's ``flush_disk_type``.
    """

    def __init__(self, folder: Path, seed: int, flush: str) -> None:
        self._chance = random.Random(seed)
        self._sent: list[_Sent] = []
        self._next = 0
        self.kills: Counter[str] = Counter()
        settings = {"storage.flush_disk_type": flush}
        self.cluster = ProcessCluster(folder, broker_settings=settings, keys=keys_in(folder))
        with AdminClient(self.cluster.namesrv_addr) as admin:
            wait_until("the broker to be known", lambda: _make_topic(admin))
        self.cluster.start_schedule(BROKER)
        self._producer = Producer(
            "delay-chaos", namesrv_addr=self.cluster.namesrv_addr, send_msg_timeout_ms=20_000
        )
        self._producer.start()

    def round(self) -> None:
        """Loads the cluster, kills a process in the middle, and starts it again."""
        end_s = time.monotonic() + self._chance.uniform(*LOAD_S)
        while time.monotonic() < end_s:
            self._send()
            time.sleep(0.01)
        self._cancel()
        if self._chance.random() < SERVICE_SHARE:
            self.cluster.schedules[BROKER].kill()
            self.kills["schedule"] += 1
            self._send()
            self.cluster.start_schedule(BROKER)
        else:
            self.cluster.brokers[BROKER].kill()
            self.kills["broker"] += 1
            self._send()
            self.cluster.start_broker(BROKER)

    def _send(self) -> None:
        for _ in range(BATCHES_A_STEP):
            count = self._chance.choice((1, 1, 20))
            now_ms = time.time_ns() // 1_000_000
            due_ms = [now_ms + self._chance.randrange(DELAY_MS) for _ in range(count)]
            first, self._next = self._next, self._next + count
            batch = [
                Message(TOPIC, b"%d" % (first + i), deliver_at_ms=due)
                for i, due in enumerate(due_ms)
            ]
            self._sent.append(_Sent(first, due_ms, self._producer.send_batch_async(batch)))

    def _cancel(self) -> None:
        for sent in self._sent[-20:]:
            if len(sent.due_ms) == 1 and self._chance.random() < CANCEL_SHARE:
                try:
                    self._producer.cancel_delayed(sent.future.result())
                    sent.cancelled = ACKED
                except BrokerError as error:
                    sent.cancelled = UNKNOWN if error.retriable else ""
                except MQMeshError:
                    sent.cancelled = UNKNOWN

    def finish(self) -> Report:
        """Waits until nothing waits any more, and judges the log."""
        for sent in self._sent:
            with suppress(MQMeshError):
                sent.future.result()
        # Metrics of the service are a second old.
        over_ms = max(due for sent in self._sent for due in sent.due_ms) + 2_000
        wait_until("everything to be due", lambda: time.time() * 1_000 > over_ms)
        with AdminClient(self.cluster.namesrv_addr) as admin:
            wait_until("all delayed messages to be delivered", lambda: _is_over(admin), PATIENCE_S)
        history = History(
            deliveries=_read(self.cluster.namesrv_addr),
            delayed=[message for sent in self._sent for message in sent.messages()],
        )
        outcomes = Counter(message.cancelled or message.outcome for message in history.delayed)
        return Report(
            [Verdict("C9", list(delayed_messages(history)))],
            {"acked": outcomes[ACKED], "delivered": len(history.deliveries)},
        )

    def close(self) -> None:
        """Ends everything."""
        self._producer.close()
        self.cluster.close()


def run_delay_rounds(
    folder: Path, seed: int, rounds: int, flush: str
) -> tuple[Report, Counter[str]]:
    """Runs rounds of one kill each.

    Returns:
        The report, and the number of kills by victim.
    """
    scene = DelayScene(folder, seed, flush)
    try:
        for _ in range(rounds):
            scene.round()
        return scene.finish(), scene.kills
    finally:
        scene.close()


def _read(namesrv_addr: str) -> list[Delivery]:
    return [
        Delivery(
            "delays",
            int(one.body),
            "",
            f"{one.broker_name}:{one.queue_id}",
            one.queue_offset,
            one.message_id,
            float(one.store_timestamp),
        )
        for one in read_topic(namesrv_addr, TOPIC)
    ]


def _make_topic(admin: AdminClient) -> bool:
    try:
        admin.put_topic(TopicConfig(TOPIC, 4, 4))
    except MQMeshError:
        return False
    return True


def _is_over(admin: AdminClient) -> bool:
    try:
        metrics = admin.runtime_info()[BROKER]
    except (MQMeshError, KeyError):
        return False
    return metrics["schedule_service"] == "on" and metrics["schedule_pending"] == 0

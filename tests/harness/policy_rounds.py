"""Policies of topics and groups while the broker is killed: retention, time to live, pause, rate.

Broken when, at any moment between and behind kills:

* P1: a queue shows other than its newest ``KEPT`` messages;
* P2: a message younger than ``KEPT_MS`` is hidden, or one is shown that is older by more than
  ``LOOK_MS``;
* P3: a message comes after its time to live;
* P4: a paused group gets a message;
* P5: a group gets more than its rate allows.
"""

import random
import threading
import time
from pathlib import Path
from typing import Final

from harness.chaos_scene import BROKER, UpCluster
from harness.checker import Report, Verdict
from harness.patience import until
from mqmesh import Message, Producer, PushConsumer, SendResult
from mqmesh.errors import MQMeshError
from mqmesh.message import StoredMessage
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.policies import FOREVER_MS
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.topic_state.topic_retention import LOOK_MS
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin

COUNTED, TIMED, DYING = "counted", "timed", "dying"
QUEUES: Final = 2
KEPT: Final = 500
KEPT_MS: Final = 2_000
TTL_MS: Final = 1_500
RATE: Final = 100
PACE_S: Final = 0.01
LOAD_S: Final = (0.3, 1.5)
ON_THE_WAY_MS: Final = 2_000
"""A message that the broker gave out in time may reach a listener so much later."""
KILLS_A_LIFE: Final = 4
"""After so many kills all is stopped and started again, so that the supervisor does not wait."""
LONG: Final = 10
"""With so many kills the age of messages is looked at without any for a while, too."""
NARROW_MS: Final = 1_000
"""Clocks are read before and behind a request of a busy machine."""


class _Load:
    """Producer of all topics, in a thread; knows where each acknowledged message of ``TIMED`` is.

    Args:
        namesrv_addr: Name server.
    """

    def __init__(self, namesrv_addr: str) -> None:
        self.timed: list[tuple[int, int, float]] = []
        self.acked = 0
        self._stopping = threading.Event()
        self._producer = Producer("policies", namesrv_addr=namesrv_addr)
        self._thread = threading.Thread(target=self._run)
        self._producer.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the load."""
        self._stopping.set()
        self._thread.join()
        self._producer.close()

    def _run(self) -> None:
        while not self._stopping.wait(PACE_S):
            sent_ms = time.time() * 1_000
            try:
                self._producer.send_batch([Message(COUNTED, b"x") for _ in range(7)])
                self._note(self._producer.send(Message(TIMED, b"x")), sent_ms)
                body = b"%d" % (time.time() * 1_000)
                self._producer.send(Message(DYING, body), ttl_ms=TTL_MS)
            except MQMeshError:
                continue  # unknown: nothing is promised
            self.acked += 9

    def _note(self, result: SendResult, sent_ms: float) -> None:
        self.timed.append((result.message_queue.queue_id, result.queue_offset, sent_ms))


class _Listeners:
    """Groups: one without a limit, one that is paused, and one with a rate.

    Args:
        namesrv_addr: Name server.
    """

    def __init__(self, namesrv_addr: str) -> None:
        self.late: list[str] = []
        self.lively = self.paused = self.slow = 0
        listeners = {"lively": self._live, "paused": self._pause, "slow": self._slow}
        self._consumers = []
        for group, listener in listeners.items():
            one = PushConsumer(group, namesrv_addr=namesrv_addr, consume_from_where="FIRST_OFFSET")
            one.subscribe(COUNTED if group == "slow" else DYING, listener=listener)
            one.start()
            self._consumers.append(one)

    def stop(self) -> None:
        """Closes all members."""
        for one in self._consumers:
            one.close()

    def _live(self, messages: list[StoredMessage]) -> None:
        for message in messages:
            self.lively += 1
            age_ms = time.time() * 1_000 - int(message.body)
            if age_ms > TTL_MS + ON_THE_WAY_MS:
                self.late.append(f"a message came {age_ms:.0f} ms after it was sent")

    def _pause(self, messages: list[StoredMessage]) -> None:
        self.paused += len(messages)

    def _slow(self, messages: list[StoredMessage]) -> None:
        self.slow += len(messages)


def run_policy_rounds(
    folder: Path, seed: int, rounds: int, settings: dict[str, str]
) -> tuple[Report, dict[str, float]]:
    """Kills the broker while policies hold; returns the judgement and measured values.

    Args:
        folder: For data.
        seed: Of all random choices.
        rounds: Kills.
        settings: Of the broker.
    """
    chance = random.Random(seed)
    broken: dict[str, list[str]] = {"P1": [], "P2": [], "P4": [], "P5": []}
    looks = 0
    with UpCluster(folder / "data", settings) as cluster:
        _prepare(cluster.namesrv_addr)
        load, listeners = _Load(cluster.namesrv_addr), _Listeners(cluster.namesrv_addr)
        began = time.monotonic()
        with AdminClient(cluster.namesrv_addr) as admin:
            try:
                for number in range(rounds):
                    if number and number % KILLS_A_LIFE == 0:
                        cluster.restart()
                    end = time.monotonic() + chance.uniform(*LOAD_S)
                    while time.monotonic() < end:
                        _look(admin, load, broken)
                        looks += 1
                    cluster.kill_broker()
                    cluster.wait_killed()
                    cluster.wait_ready()
                    acked = load.acked
                    until(lambda: load.acked > acked)  # noqa: B023
                    _look(admin, load, broken)
                # A broker that starts looks at the age of messages, and then each LOOK_MS.
                end = time.monotonic() + LOOK_MS / 1_000 + 1
                while rounds >= LONG and time.monotonic() < end:
                    _look(admin, load, broken)
                    looks += 1
            finally:
                load.stop()
                listeners.stop()
        most = RATE * (time.monotonic() - began + rounds + 2)
    if listeners.paused:
        broken["P4"].append(f"a paused group got {listeners.paused} messages")
    if not 0 < listeners.slow <= most:
        broken["P5"].append(f"{listeners.slow} messages came, {most:.0f} may")
    verdicts = [Verdict(name, found) for name, found in broken.items()]
    counts = {"acked": load.acked, "delivered in time": listeners.lively, "looks": looks}
    report = Report([*verdicts, Verdict("P3", listeners.late)], counts)
    return report, {"kills": rounds, "by the rate": listeners.slow, "at most": most}


def _prepare(namesrv_addr: str) -> None:
    with AdminClient(namesrv_addr) as admin:
        admin.create_topic(TopicConfig(COUNTED, QUEUES, QUEUES, retention_messages=KEPT))
        admin.create_topic(TopicConfig(TIMED, QUEUES, QUEUES, retention_ms=KEPT_MS))
        admin.create_topic(TopicConfig(DYING, QUEUES, QUEUES, message_ttl=True))
    with GroupAdmin(namesrv_addr) as groups:
        groups.put_group(GroupConfig("paused", paused_until=FOREVER_MS))
        groups.put_group(GroupConfig("slow", max_messages_per_s=RATE))


def _look(admin: AdminClient, load: _Load, broken: dict[str, list[str]]) -> None:
    """Look at what the queues show."""
    before_ms = time.time() * 1_000
    known = list(load.timed[-1_000:])
    try:
        counted = admin.topic_stats(COUNTED)[BROKER].queues
        timed = admin.topic_stats(TIMED)[BROKER].queues
    except MQMeshError:
        return
    after_ms = time.time() * 1_000
    for one in counted:
        shown = one.max_queue_offset - one.min_queue_offset
        if shown != min(one.max_queue_offset, KEPT):
            broken["P1"].append(f"queue {one.queue_id} shows {shown} of {one.max_queue_offset}")
    for queue_id, offset, sent_ms in known:
        first = timed[queue_id].min_queue_offset
        if offset < first and sent_ms > after_ms - KEPT_MS:
            broken["P2"].append(f"{offset} is hidden after {after_ms - sent_ms:.0f} ms")
    for one in timed:
        age_ms = before_ms - one.first_timestamp
        if one.first_timestamp and age_ms > KEPT_MS + LOOK_MS + NARROW_MS:
            broken["P2"].append(f"queue {one.queue_id} shows a message after {age_ms:.0f} ms")

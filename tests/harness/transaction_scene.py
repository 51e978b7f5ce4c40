"""Transactions whose producers and brokers are killed at every step, and the judgement of them.

Each booked message must be in the log exactly once, and no other message may be there.
"""

import itertools
import random
import time
from collections import Counter
from pathlib import Path
from typing import Final

from harness.chaos_scene import BROKER, ChaosFailure, wait_until
from harness.checker import Report, Verdict
from harness.secured import keys_in
from harness.topic_reader import read_topic
from harness.transaction_worker import DONE, STEPS, Books, TransactionWorker, WorkerPlan
from mqmesh.errors import MQMeshError, NoRoute
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.transaction_admin import TransactionAdmin
from mqmesh.testing.processes import ProcessCluster

TOPIC: Final = "transactions"
GROUP: Final = "transaction-chaos"
PATIENCE_S: Final = 60.0
MAX_STEPS: Final = 400
LOAD_S: Final = (0.05, 0.6)
BROKER_SHARE: Final = 0.6
"""Share of the rounds in which the broker dies, too."""
SETTINGS: Final = {
    "transaction_timeout_ms": "1000",
    "transaction_check_interval_ms": "500",
    "transaction_check_max": "1000",
    "flush_consumer_offset_interval_ms": "300",
}


class TransactionScene:
    """A cluster, workers and their books.

    Args:
        folder: For everything on disk.
        seed: Seed of all random choices.
        flush: The broker's ``flush_disk_type``.
    """

    def __init__(self, folder: Path, seed: int, flush: str) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._numbers = itertools.count(1)
        self._workers: list[TransactionWorker] = []
        self._books = folder / "books.sqlite"
        self.kills: Counter[str] = Counter()
        settings = {**SETTINGS, "storage.flush_disk_type": flush}
        self.cluster = ProcessCluster(folder, broker_settings=settings, keys=keys_in(folder))
        with AdminClient(self.cluster.namesrv_addr) as admin:
            wait_until("the broker to be known", lambda: _make_topic(admin))

    def worker(self, die_at: str = "", *, sends: bool = True) -> TransactionWorker:
        """Starts a worker."""
        plan = WorkerPlan(
            name=f"w{next(self._numbers)}",
            namesrv_addr=self.cluster.namesrv_addr,
            topic=TOPIC,
            group=GROUP,
            books=str(self._books),
            seed=self._chance.randrange(1 << 32),
            die_at=die_at,
            die_after=self._chance.randint(1, MAX_STEPS),
            sends=sends,
        )
        worker = TransactionWorker(plan, self._folder / "workers.log")
        self._workers.append(worker)
        return worker

    def round(self, step: str) -> None:
        """Makes a producer die at a step; perhaps the broker does, too, at some time."""
        victim = self.worker(step)
        if self._chance.random() < BROKER_SHARE:
            time.sleep(self._chance.uniform(*LOAD_S))
            self.cluster.brokers[BROKER].kill()
            self.kills["broker"] += 1
            self.cluster.start_broker(BROKER)
        if not victim.wait_dead(PATIENCE_S):
            raise ChaosFailure(f"{victim.plan.name} did not come to {step!r}")
        self.kills[step] += 1

    def finish(self) -> Report:
        """Waits until everything is decided, and judges the log by the books."""
        for worker in self._workers:
            if not worker.plan.die_at and worker.plan.sends:
                worker.stop()
        with TransactionAdmin(self.cluster.namesrv_addr) as admin:
            wait_until("all transactions to be decided", lambda: _is_decided(admin), PATIENCE_S)
        return judge(Books(str(self._books)).all(), read_keys(self.cluster.namesrv_addr))

    def close(self) -> None:
        """Ends everything."""
        for worker in self._workers:
            worker.kill()
        self.cluster.close()


def run_rounds(folder: Path, seed: int, rounds: int, flush: str) -> tuple[Report, Counter[str]]:
    """Runs rounds, one step after the other, while another member of the group lives.

    Returns:
        The report, and the number of kills by victim.
    """
    scene = TransactionScene(folder, seed, flush)
    try:
        scene.worker()
        # A member that only answers: the sender's own questions must reach others, too.
        scene.worker(sends=False)
        for number in range(rounds):
            scene.round(STEPS[number % len(STEPS)])
        return scene.finish(), scene.kills
    finally:
        scene.close()


def judge(fates: dict[str, str], seen: Counter[str]) -> Report:
    """Compares the books with what is in the log, by key."""
    done = {key for key, state in fates.items() if state == DONE}
    c7 = [
        f"{key} is visible, but {fates.get(key, 'nothing was ever done')}"
        for key in seen
        if key not in done
    ]
    c7 += [f"{key} is done, but not visible" for key in sorted(done - seen.keys())]
    c5 = [f"{key} is there {count} times" for key, count in seen.items() if count > 1]
    counts = Counter(fates.values())
    return Report(
        [Verdict("C7", c7), Verdict("C5", c5)],
        {"acked": len(seen), **dict(sorted(counts.items()))},
    )


def read_keys(namesrv_addr: str) -> Counter[str]:
    """Counts how often each key is in the log.

    Raises:
        AssertionError: A message that must be there does not come.
    """
    return Counter(message.keys[0] for message in read_topic(namesrv_addr, TOPIC))


def _make_topic(admin: AdminClient) -> bool:
    try:
        admin.put_topic(TopicConfig(TOPIC, 4, 4))
    except NoRoute:
        return False
    return True


def _is_decided(admin: TransactionAdmin) -> bool:
    try:
        return admin.half_messages().pending_count == 0
    except MQMeshError:
        return False

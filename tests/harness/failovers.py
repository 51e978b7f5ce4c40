"""A broker group of real processes that elects its master, loses him again and again under load.

Run as a program (``scripts/failovers``) it prints how long sends stood still, and whether anything
that was acknowledged is gone or there twice.
"""

import argparse
import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from harness.chaos import say, show
from harness.patience import until
from mqmesh import Message, Producer, PullConsumer
from mqmesh.errors import MQMeshError
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.testing.processes import RoleProcess

GROUP: Final = "broker-a"
TOPIC: Final = "t"
PATIENCE_S: Final = 60
FAULTS: Final = {
    "kill": "kill -9; he is started again",
    "stop": "SIGSTOP, until another one leads",
    "switch": "he hands the lead over",
}
SLOW_S: Final = 2.0
"""A pause that is longer is told at once."""


class ElectedGroup:
    """A coordinator, a name server, and the replicas of one group.

    Args:
        folder: For their data and logs.
        settings: Of all replicas, as after ``--set``; two underscores for a dot.

    Attributes:
        replicas: Their processes, by id.
    """

    def __init__(self, folder: Path, *, count: int = 3, **settings: str) -> None:
        self.folder = folder
        self._settings = {name.replace("__", "."): value for name, value in settings.items()}
        self._ids = range(1, count + 1)
        coordinator = {"listen_port": "0", "data_dir": str(folder / "coordinator")}
        self.coordinator = RoleProcess("coordinator", coordinator, folder / "coordinator.log")
        self.namesrv = RoleProcess("namesrv", {"listen_port": "0"}, folder / "namesrv.log")
        self.replicas: dict[int, RoleProcess] = {}
        self._endpoints: dict[int, str] = {}
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(self.start, self._ids))
        self.admin = HaAdmin(self.namesrv.endpoint)
        until(lambda: self.in_sync() == list(self._ids))

    def start(self, replica_id: int) -> None:
        """Starts a replica, or starts it again at its old address."""
        process = RoleProcess(
            "broker",
            {
                "broker_id": str(replica_id),
                "listen_port": self._endpoints.get(replica_id, ":0").rpartition(":")[2],
                "namesrv_addr": f'["{self.namesrv.endpoint}"]',
                "store_path_root_dir": str(self.folder / f"r{replica_id}"),
                "ha.mode": "auto",
                "ha.ack_replicas": "all",
                "ha.total_replicas": str(len(self._ids)),
                "ha.min_in_sync_replicas": "2",
                "ha.coordinator": f"embedded://{self.coordinator.endpoint}",
                **self._settings,
            },
            self.folder / f"r{replica_id}.log",
        )
        self.replicas[replica_id] = process
        self._endpoints[replica_id] = process.endpoint

    def master(self) -> int:
        """Id of the replica that leads, 0 if nobody serves as the master."""
        found = [one for one in self.admin.ha_status(GROUP) if one.broker_id == 0]
        if not found or found[0].status is None or found[0].status.role != "MASTER":
            return 0
        at = {endpoint: replica_id for replica_id, endpoint in self._endpoints.items()}
        return at[found[0].endpoint]

    def in_sync(self) -> list[int]:
        """Ids of the replicas in sync, as the master says."""
        found = [one.status for one in self.admin.ha_status(GROUP) if one.broker_id == 0]
        return found[0].in_sync if found and found[0] is not None else []

    def close(self) -> None:
        """Ends all."""
        self.admin.close()
        for process in (*self.replicas.values(), self.namesrv, self.coordinator):
            process.stop()


class Load:
    """A producer that sends one message after the other, in a thread of its own.

    Args:
        namesrv_addr: Name server.

    Attributes:
        acked: Numbers of messages that were acknowledged as safe.
        gaps_s: How long each send took that came after a fault.
        errors: What a caller of ``send`` would have had to handle.
    """

    def __init__(self, namesrv_addr: str) -> None:
        self.acked: list[int] = []
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._slowest_s = 0.0
        self._producer = Producer("load", namesrv_addr=namesrv_addr, send_msg_timeout_ms=10_000)
        self._producer.start()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def slowest_s(self) -> float:
        """How long the slowest send took since this was asked last."""
        slowest, self._slowest_s = self._slowest_s, 0.0
        return slowest

    def close(self) -> None:
        """Sends no more."""
        self._stop.set()
        self._thread.join()
        self._producer.close()

    def _run(self) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            begun = time.monotonic()
            try:
                result = self._producer.send(Message(TOPIC, str(number).encode()))
                if result.status is SendStatus.SEND_OK:
                    self.acked.append(number)
                else:
                    self.errors.append(result.status.name)
            except MQMeshError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self._slowest_s = max(self._slowest_s, time.monotonic() - begun)


class Result(msgspec.Struct, frozen=True):
    """What became of some failovers.

    Attributes:
        gaps_s: How long sends stood still at each.
        acked: Messages that were acknowledged.
        errors: Of sends.
        lost: Messages that were acknowledged and are gone.
        twice: That are there twice.
    """

    gaps_s: list[float]
    acked: int
    errors: list[str]
    lost: list[int]
    twice: list[int]


def run_failovers(
    group: ElectedGroup,
    count: int,
    on_round: Callable[[int, float], None] | None = None,
    *,
    fault: str = "kill",
) -> Result:
    """Kills the master so many times under load, and starts him again each time.

    Args:
        group: That runs.
        count: How often.
        on_round: Told of each, with the time that sends stood still.
        fault: What happens to him, see ``FAULTS``.
    """
    load, gaps = Load(group.namesrv.endpoint), []
    try:
        for number in range(count):
            until(lambda: len(group.in_sync()) > 2)
            before = len(load.acked) + 50
            until(lambda before=before: len(load.acked) >= before)  # type: ignore[misc]
            load.slowest_s()
            master = group.master()
            if fault == "switch":
                group.admin.switch_over(GROUP)
            elif fault == "stop":
                os.kill(group.replicas[master].pid, signal.SIGSTOP)
            else:
                group.replicas[master].kill()
            before = len(load.acked) + 20
            until(lambda before=before: len(load.acked) >= before)  # type: ignore[misc]
            gaps.append(load.slowest_s())
            if fault == "kill":
                group.start(master)
            elif fault == "stop":
                os.kill(group.replicas[master].pid, signal.SIGCONT)
            if on_round is not None:
                on_round(number, gaps[-1])
    finally:
        load.close()
    found = Counter(_stored(group))
    return Result(
        gaps,
        len(load.acked),
        load.errors,
        [number for number in load.acked if not found[number]],
        [number for number, times in found.items() if times > 1],
    )


def _stored(group: ElectedGroup) -> list[int]:
    numbers: list[int] = []
    with PullConsumer("all", namesrv_addr=group.namesrv.endpoint) as consumer:
        queues = consumer.queues(TOPIC)
        consumer.assign(queues)
        consumer.seek_to_begin(*queues)
        until(lambda: bool(consumer.lag(*queues)))
        while any(consumer.lag(*queues).values()):
            numbers += [int(message.body) for message in consumer.poll(1_000)]
    return numbers


def _tell(number: int, gap_s: float) -> None:
    show(f"{number + 1} done, the last {gap_s:.2f} s")
    if gap_s > SLOW_S:
        say(f"{time.strftime('%H:%M:%S')} number {number + 1} took {gap_s:.2f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says.

    Returns:
        0 when all is well, 1 when something was lost or is there twice.
    """
    parser = argparse.ArgumentParser(prog="scripts/failovers", description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="failovers (default: 10)")
    parser.add_argument("--ack", default="all", help="all (default), quorum or one")
    parser.add_argument("--folder", type=Path, help="keep data and logs there")
    parser.add_argument("--fault", choices=list(FAULTS), default="kill", help="what happens to him")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mqmesh-")))
        folder.mkdir(parents=True, exist_ok=True)
        least = "2" if options.ack == "all" else "1"
        group = ElectedGroup(folder, ha__ack_replicas=options.ack, ha__min_in_sync_replicas=least)
        try:
            result = run_failovers(
                group,
                options.count,
                _tell,
                fault=options.fault,
            )
        finally:
            group.close()
    gaps = sorted(result.gaps_s)
    p99 = gaps[min(int(len(gaps) * 0.99), len(gaps) - 1)]
    median = gaps[len(gaps) // 2]
    say(
        f"{len(gaps)} times {options.fault}, ack_replicas {options.ack}: sends stood still "
        f"{median:.2f} s (median), {p99:.2f} s (p99), {gaps[-1]:.2f} s at most"
    )
    say(
        f"{result.acked} messages acknowledged, {len(result.lost)} lost, "
        f"{len(result.twice)} twice, "
        f"{len(result.errors)} errors at the producer"
    )
    for error, times in Counter(result.errors).most_common(5):
        say(f"  {times} times {error}")
    return 1 if result.lost or result.twice else 0


if __name__ == "__main__":
    sys.exit(main())

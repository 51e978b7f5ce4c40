"""A broker group of real processes that elects its master, loses it again and again under load.

Run as a program (``scripts/failovers``) it prints how long sends stood still, and whether anything
that was acknowledged is gone or there twice.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from harness.chaos import say, show
from harness.etcd_processes import QUICK, EtcdCluster
from harness.machines import HERE, Machines, enter
from harness.patience import until
from harness.processing_scene import Billing
from harness.receives import Members, judge
from mqmesh import Message, Producer, PullConsumer
from mqmesh.errors import MQMeshError
from mqmesh.message import StoredMessage
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.testing.processes import PROGRAM, RoleProcess

GROUP: Final = "broker-a"
TOPIC: Final = "t"
PATIENCE_S: Final = 60
SETTLE_S: Final = 240
"""Time in which members receive what has gathered over a hundred failovers on a busy machine."""
FAULTS: Final = {
    "kill": "kill -9; he is started again",
    "stop": "SIGSTOP, until another one leads",
    "switch": "he hands the lead over",
    "end": "SIGTERM, as for an upgrade: he hands the lead over, and is started again",
    "link": "his machine is gone: its link is down",
    "late": "his followers hear nothing of him for a second, then his machine is gone",
}
NEEDS_MACHINES: Final = ("link", "late")
UP_PORT: Final = 10911
LATE_S: Final = 1.0
OPEN: Final = {"allow_insecure_bind": "true"}
ASK_LAG: Final = """
import sys
from mqmesh.sdk.admin.admin import AdminClient
with AdminClient(sys.argv[1]) as admin:
    while True:
        metrics = {one.metric.name: one.samples for one in admin.role_info(sys.argv[1])}
        print(metrics["ha_confirmed_lag_bytes"][0].value, flush=True)
        if not sys.stdin.readline():
            break
"""
RECEIVERS: Final = "receivers"
MEMBERS: Final = 4
TWICE_SHARE: Final = 0.001
"""Most messages of those that members hold over a failover that may go to others, too."""
MOST_SAID: Final = 5
SLOW_S: Final = 2.0
"""Pause of sends above which a failover is printed at once."""


class SupervisedReplica:
    """A replica that a `mqmesh up` runs, as on a machine of its own; it serves once this returns.

    Args:
        endpoint: Address where it listens.
        settings: Settings of the broker.
        folder: For the cluster file and what the supervisor keeps.
        before: Prefix of the command.

    Attributes:
        endpoint: Address where it listens.
        pid: Id of the supervisor's process, which gets the signals.
    """

    def __init__(
        self, endpoint: str, settings: Mapping[str, str], folder: Path, before: Sequence[str]
    ) -> None:
        self.endpoint = endpoint
        folder.mkdir(exist_ok=True)
        self._log = folder / "up.log"
        (folder / "cluster.toml").write_text("schedule = false\n[[broker]]\n")
        command = [*before, sys.executable, *PROGRAM, "up", "-c", str(folder / "cluster.toml")]
        command += ["--set", f"data_dir={folder}"]
        for key, value in settings.items():
            command += ["--set", f"broker.0.{key}={value}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.pid = self._process.pid
        until(self._serves)

    @property
    def running(self) -> bool:
        """True until the supervisor has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the supervisor alone: its processes notice that, and end by themselves."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends the supervisor as `mqmesh down` does."""
        self._process.terminate()
        self._process.wait()

    def suspend(self) -> None:
        """Lets the supervisor hang until ``resume``."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Ends ``suspend``."""
        os.kill(self.pid, signal.SIGCONT)

    def _serves(self) -> bool:
        if not self.running:
            raise RuntimeError(f"`mqmesh up` ended: {self._log.read_text()[-2_000:]}")
        with suppress(MQMeshError), AdminClient(self.endpoint, timeout_ms=1_000) as admin:
            return admin.ping(self.endpoint).state == "running"
        return False


class ElectedGroup:
    """A coordinator, a name server, and the replicas of one group.

    Args:
        folder: For their data and logs.
        machines: Each process gets a machine, ``r1`` and so on, and ``coordinator``; the name
            server is where this program is. None: all are there, on the loopback.
        before: Returns the prefix of a command by the name of its process.
        etcd: Their coordinator is one of three members, on machines ``e1`` and so on.
        supervised: Each replica is run by a `mqmesh up` of its machine.
        settings: Settings of all replicas, as after ``--set``; two underscores for a dot.

    Attributes:
        replicas: Their processes, by id.
        machines: Machines of the processes.
        etcd: The members; None where the coordinator is mqmesh's own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        count: int = 3,
        machines: Machines | None = None,
        before: Callable[[str], Sequence[str]] = lambda name: (),
        etcd: bool = False,
        supervised: bool = False,
        **settings: str,
    ) -> None:
        self.folder, self.machines, self._before = folder, machines, before
        self._supervised = supervised
        self._settings = {name.replace("__", "."): value for name, value in settings.items()}
        self._ids = range(1, count + 1)
        names = [*(() if etcd else ("coordinator",)), *(f"r{one}" for one in self._ids)]
        self._hosts = {name: machines.add(name) for name in names} if machines is not None else {}
        here = {} if machines is None else {"listen_host": HERE, **OPEN}
        self.coordinator: RoleProcess
        self.etcd: EtcdCluster | None = None
        self.replicas: dict[int, RoleProcess | SupervisedReplica] = {}
        self._endpoints: dict[int, str] = {}
        with ExitStack() as stack:
            if etcd:
                self.etcd = EtcdCluster(folder, 3, QUICK, machines)
                stack.callback(self.etcd.close)
            else:
                self.start_coordinator("0")
                stack.callback(lambda: self.coordinator.stop())
            namesrv = {"listen_port": "0", **here}
            self.namesrv = RoleProcess("namesrv", namesrv, folder / "namesrv.log")
            stack.callback(self.namesrv.stop)
            stack.callback(self._stop_replicas)
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(self.start, self._ids))
            self.admin = HaAdmin(self.namesrv.endpoint)
            stack.callback(self.admin.close)
            until(lambda: self.in_sync() == list(self._ids))
            self._ends = stack.pop_all()

    def start_coordinator(self, port: str = "") -> None:
        """Starts the coordinator, or starts it again at its old address."""
        settings = {
            "listen_port": port or self.coordinator.endpoint.rpartition(":")[2],
            "data_dir": str(self.folder / "coordinator"),
        }
        self.coordinator = self._run("coordinator", "coordinator", settings)

    def start(self, replica_id: int, **settings: str) -> None:
        """Starts a replica, or starts it again at its old address; settings as of the group."""
        name = f"r{replica_id}"
        where = self._endpoints.get(replica_id, f":{UP_PORT if self._supervised else 0}")
        coordinator = self.etcd.url if self.etcd else f"embedded://{self.coordinator.endpoint}"
        values = {
            "broker_id": str(replica_id),
            "listen_port": where.rpartition(":")[2],
            "namesrv_addr": f'["{self.namesrv.endpoint}"]',
            "store_path_root_dir": str(self.folder / name),
            "ha.mode": "auto",
            "ha.ack_replicas": "all",
            "ha.total_replicas": str(len(self._ids)),
            "ha.min_in_sync_replicas": "2",
            "ha.coordinator": coordinator,
            # Machines of a test share their disks, and so would take Unix sockets.
            "enable_ipc": str(self.machines is None).lower(),
            **self._settings,
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        process = (self._up if self._supervised else self._run_broker)(name, values)
        self.replicas[replica_id] = process
        self._endpoints[replica_id] = process.endpoint

    def master(self) -> int:
        """Returns the id of the replica that leads, 0 if none serves as the master."""
        found = [one for one in self.admin.ha_status(GROUP) if one.broker_id == 0]
        if not found or found[0].status is None or found[0].status.role != "MASTER":
            return 0
        at = {endpoint: replica_id for replica_id, endpoint in self._endpoints.items()}
        return at[found[0].endpoint]

    def in_sync(self) -> list[int]:
        """Returns the ids of the replicas in sync, as the master reports."""
        found = [one.status for one in self.admin.ha_status(GROUP) if one.broker_id == 0]
        return found[0].in_sync if found and found[0] is not None else []

    @contextmanager
    def told_lag(self, replica_id: int) -> Iterator[Callable[[], int]]:
        """Gives a function that asks a replica how many bytes of its log may be taken back.

        A process on the replica's machine asks, and runs before anything happens: soon after the
        replica is cut off it leads no more, and reports 0.
        """
        assert self.machines is not None
        place = self.machines.inside(f"r{replica_id}")
        command = [*place, sys.executable, "-P", "-c", ASK_LAG, self._endpoints[replica_id]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()

            def ask() -> int:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(b"\n")
                process.stdin.flush()
                return int(process.stdout.readline())

            yield ask

    def _run_broker(self, name: str, settings: dict[str, str]) -> RoleProcess:
        return self._run("broker", name, settings)

    def _up(self, name: str, settings: dict[str, str]) -> SupervisedReplica:
        assert self.machines is not None, "all of them would listen at one port"
        host = self._hosts[name]
        return SupervisedReplica(
            f"{host}:{UP_PORT}",
            {**settings, "listen_host": host, **OPEN},
            self.folder / f"up-{name}",
            (*self.machines.inside(name), *self._before(name)),
        )

    def _run(self, role: str, name: str, settings: dict[str, str]) -> RoleProcess:
        """Starts a process on the machine of a name."""
        return RoleProcess(
            role,
            {**settings, **({"listen_host": self._hosts[name], **OPEN} if self.machines else {})},
            self.folder / f"{name}.log",
            before=(*(self.machines.inside(name) if self.machines else ()), *self._before(name)),
        )

    def close(self) -> None:
        """Ends all."""
        self._ends.close()

    def _stop_replicas(self) -> None:
        for process in self.replicas.values():
            process.stop()


class Stored(NamedTuple):
    """A message of ``Load``, and the place that it has."""

    queue_id: int
    queue_offset: int
    number: int


class Load:
    """A producer that sends one message after the other, in a thread of its own.

    Args:
        namesrv_addr: Name server.

    Attributes:
        acked: Numbers of messages that were acknowledged as safe, and where the log had them.
        acked_s: And when, monotonic clock.
        errors: Errors that a caller of ``send`` would have had to handle.
    """

    def __init__(self, namesrv_addr: str) -> None:
        self.acked: dict[int, int] = {}
        self.acked_s: dict[int, float] = {}
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._slowest_s = 0.0
        self._producer = Producer("load", namesrv_addr=namesrv_addr, send_msg_timeout_ms=10_000)
        self._producer.start()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def slowest_s(self) -> float:
        """Returns the time of the slowest send since the last call, in seconds."""
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
                    self.acked_s[number] = time.monotonic()
                    self.acked[number] = result.commitlog_offset
                else:
                    self.errors.append(result.status.name)
            except MQMeshError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self._slowest_s = max(self._slowest_s, time.monotonic() - begun)


class Reader:
    """Reads all that is delivered meanwhile, in a thread of its own.

    Args:
        namesrv_addr: Name server.

    Attributes:
        found: Messages that came.
    """

    def __init__(self, namesrv_addr: str) -> None:
        self.found: set[Stored] = set()
        self._stop = threading.Event()
        self._consumer = PullConsumer("meanwhile", namesrv_addr=namesrv_addr)
        self._consumer.start()
        queues = self._consumer.queues(TOPIC)
        self._consumer.assign(queues)
        self._consumer.seek_to_begin(*queues)
        self._thread = threading.Thread(target=self._run, name="reader")
        self._thread.start()

    def close(self) -> None:
        """Reads no more."""
        self._stop.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(MQMeshError):  # nobody leads for a while
                self.found.update(map(_stored, self._consumer.poll(100)))


class Round(msgspec.Struct, frozen=True):
    """One failover.

    Attributes:
        gap_s: Time that sends stood still, in seconds.
        last: Number of the message that was acknowledged last.
        lag_bytes: Bytes of the old master's log that could be taken back, as it last reported.
    """

    gap_s: float
    last: int
    lag_bytes: int = 0


class Billed(msgspec.Struct, frozen=True):
    """Bills that members of two groups made of messages over some failovers.

    Attributes:
        wrong: Sentences on messages that were billed twice.
        bills: Count of all bills.
    """

    wrong: list[str]
    bills: int


class Received(msgspec.Struct, frozen=True):
    """Messages that members of a group received over some failovers, and acknowledged each.

    Attributes:
        acked: Messages of which the acknowledgement was answered.
        never: Messages that were sent and acknowledged as safe, and that nobody got.
        again: Sentences on messages that came after their acknowledgement was answered.
        held: Messages that members had when a master was lost, of all rounds.
        twice: Sentences on messages that two members had at a time.
    """

    acked: int
    never: list[int]
    again: list[str]
    held: int
    twice: list[str]

    @property
    def is_good(self) -> bool:
        """True when it is as promised."""
        return not self.never and not self.again and len(self.twice) <= self.held * TWICE_SHARE


class Result(msgspec.Struct, frozen=True):
    """Result of some failovers.

    Attributes:
        rounds: Each of them.
        acked: Messages that were acknowledged, and where the log had them.
        errors: Errors of sends.
        lost: Messages that were acknowledged and are gone.
        twice: Messages that are in the log twice.
        delivered: Lost messages that a consumer had.
        received: Messages that members received; None where there were none.
        billed: Bills that members made of the messages; None where there were none.
    """

    rounds: list[Round]
    acked: dict[int, int]
    errors: list[str]
    lost: list[int]
    twice: list[int]
    delivered: list[int]
    received: Received | None = None
    billed: Billed | None = None

    def untold(self) -> list[str]:
        """Returns rounds that lost more of the log than the old master had reported."""
        found, first = [], 0
        for number, one in enumerate(self.rounds, 1):
            at = [self.acked[each] for each in self.lost if first <= each <= one.last]
            first = one.last + 1
            if at and max(at) - min(at) >= one.lag_bytes:
                found.append(
                    f"number {number} lost {len(at)} messages over {max(at) - min(at)} bytes, and "
                    f"{one.lag_bytes} bytes were told"
                )
        return found


def run_failovers(
    group: ElectedGroup,
    count: int,
    on_round: Callable[[int, float], None] | None = None,
    *,
    fault: str = "kill",
    whom: Sequence[int] = (),
    receive: bool = False,
    bill_log: Path | None = None,
) -> Result:
    """Takes the master away ``count`` times under load, and brings it back each time.

    Args:
        group: Running group.
        count: Number of failovers.
        whom: Replicas to take away instead of the master, one after the other.
        on_round: Called after each failover, with the time that sends stood still.
        fault: Fault of the master, see ``FAULTS``.
        receive: Members of a group receive the messages, and acknowledge each.
        bill_log: Members of two groups make a message of each; log file of theirs.
    """
    load, rounds = Load(group.namesrv.endpoint), []
    reader: Reader | None = None
    members: Members | None = None
    billing: Billing | None = None
    billed: Billed | None = None
    held = 0
    try:
        for number in range(count):
            until(lambda: len(group.in_sync()) > 2)
            wait_acked(load, 50)
            reader = reader or Reader(group.namesrv.endpoint)
            if receive:
                members = members or Members(RECEIVERS, TOPIC, group.namesrv.endpoint, MEMBERS)
                members.wait_acked(MEMBERS)
                held += members.held()
            if bill_log is not None:
                endpoint = group.namesrv.endpoint
                billing = billing or Billing(endpoint, TOPIC, bill_log, random.Random(count))
                billing.wait_billed(MEMBERS)
                if number % 2:
                    billing.replace_one()
            load.slowest_s()
            master = whom[number] if whom else group.master()
            lag_bytes = _harm(group, master, fault)
            wait_acked(load, 20)
            rounds.append(Round(load.slowest_s(), max(load.acked), lag_bytes))
            _mend(group, master, fault)
            if on_round is not None:
                on_round(number, rounds[-1].gap_s)
        until(lambda: len(group.in_sync()) > 2)
        load.close()
        if members is not None:
            until(lambda: _all_settled(group), SETTLE_S)
        if billing is not None:
            billed = Billed(billing.judge(load.acked), billing.found.total())
    finally:
        load.close()
        if billing is not None:
            billing.close()
        if members is not None:
            members.close()
        if reader is not None:
            reader.close()
    found = Counter(one.number for one in stored(group))
    lost = {number for number in load.acked if not found[number]}
    return Result(
        rounds,
        load.acked,
        load.errors,
        sorted(lost),
        [number for number, times in found.items() if times > 1],
        [one.number for one in reader.found if one.number in lost] if reader is not None else [],
        None if members is None else _received(members, held, load.acked.keys() - lost),
        billed,
    )


def _all_settled(group: ElectedGroup) -> bool:
    with GroupAdmin(group.namesrv.endpoint) as admin:
        return not sum(queue.lag for queue in admin.progress(RECEIVERS).queues)


def _received(members: Members, held: int, sent: set[int]) -> Received:
    judged = judge(members.seen)
    never = sent - {number for _, number in judged.got}
    return Received(len(judged.acked), sorted(never), judged.again, held, judged.twice)


def wait_acked(load: Load, more: int) -> None:
    """Waits until so many more messages are acknowledged."""
    before = len(load.acked) + more
    until(lambda: len(load.acked) >= before)


def fail_over(group: ElectedGroup) -> bool:
    """Kills the master, and starts it again; does nothing unless all others could follow it."""
    with suppress(MQMeshError):  # nobody leads for a while
        master = group.master()
        if master and len(group.in_sync()) == len(group.replicas):
            group.replicas[master].kill()
            group.start(master)
            return True
    return False


def _harm(group: ElectedGroup, master: int, fault: str) -> int:
    """Injects the fault; returns how many bytes may be lost by it, as the master reports."""
    if fault == "switch":
        group.admin.switch_over(GROUP)
    elif fault == "stop":
        os.kill(group.replicas[master].pid, signal.SIGSTOP)
    elif fault == "kill":
        group.replicas[master].kill()
    elif fault == "end":
        code = group.replicas[master].stop()
        assert code == 0, f"r{master} ended with exit code {code}"
    else:
        assert group.machines is not None
        with group.told_lag(master) as ask:
            if fault == "late":
                for one in group.replicas.keys() - {master}:
                    group.machines.cut(f"r{master}", f"r{one}")
                threading.Event().wait(LATE_S)
            group.machines.gone(f"r{master}")
            return ask()
    return 0


def _mend(group: ElectedGroup, master: int, fault: str) -> None:
    if fault in ("kill", "end"):
        group.start(master)
    elif fault == "stop":
        os.kill(group.replicas[master].pid, signal.SIGCONT)
    elif group.machines is not None:
        if fault == "late":
            for one in group.replicas.keys() - {master}:
                group.machines.heal(f"r{master}", f"r{one}")
        group.machines.back(f"r{master}")


def _stored(message: StoredMessage) -> Stored:
    return Stored(message.queue_id, message.queue_offset, int(message.body))


def stored(group: ElectedGroup) -> list[Stored]:
    """Reads all messages that the group has, as consumers see it."""
    found: list[Stored] = []
    with PullConsumer("all", namesrv_addr=group.namesrv.endpoint) as consumer:
        queues = consumer.queues(TOPIC)
        consumer.assign(queues)
        consumer.seek_to_begin(*queues)
        until(lambda: bool(consumer.lag(*queues)))
        while any(consumer.lag(*queues).values()):
            found += map(_stored, consumer.poll(1_000))
    return found


def _tell(number: int, gap_s: float) -> None:
    show(f"{number + 1} done, the last {gap_s:.2f} s")
    if gap_s > SLOW_S:
        say(f"{time.strftime('%H:%M:%S')} number {number + 1} took {gap_s:.2f} s")


def _say_received(received: Received) -> None:
    say(
        f"{received.acked} messages received and acknowledged, {len(received.never)} never came, "
        f"{len(received.again)} came again; of {received.held} that members held when a master "
        f"was lost, {len(received.twice)} went to two"
    )
    for line in (*received.again[:MOST_SAID], *received.twice[:MOST_SAID]):
        say(f"  {line}")


def _say_billed(billed: Billed) -> bool:
    """Says what members made of the messages; returns True when it is as promised."""
    say(f"{billed.bills} bills of two groups, {len(billed.wrong)} orders were billed twice")
    for line in billed.wrong[:MOST_SAID]:
        say(f"  {line}")
    return not billed.wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says.

    Returns:
        0 when all is well, 1 when something was lost that may not be, or is there twice.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="scripts/failovers", description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="failovers (default: 10)")
    parser.add_argument("--ack", default="all", help="all (default), quorum, one or none")
    parser.add_argument("--folder", type=Path, help="keep data and logs there")
    parser.add_argument(
        "--fault", choices=list(FAULTS), default="kill", help="what happens to the master"
    )
    parser.add_argument(
        "--receive", action="store_true", help="members receive meanwhile, and acknowledge each"
    )
    parser.add_argument(
        "--processing", action="store_true", help="members make messages of messages meanwhile"
    )
    options = parser.parse_args(arguments)
    machines = None
    if options.fault in NEEDS_MACHINES:
        enter("harness.failovers", arguments)
        machines = Machines()
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mqmesh-")))
        folder.mkdir(parents=True, exist_ok=True)
        least = "2" if options.ack == "all" else "1"
        group = ElectedGroup(
            folder,
            machines=machines,
            ha__ack_replicas=options.ack,
            ha__min_in_sync_replicas=least,
        )
        try:
            result = run_failovers(
                group,
                options.count,
                _tell,
                fault=options.fault,
                receive=options.receive,
                bill_log=folder / "members.log" if options.processing else None,
            )
        finally:
            group.close()
    gaps = sorted(one.gap_s for one in result.rounds)
    p99 = gaps[min(int(len(gaps) * 0.99), len(gaps) - 1)]
    median = gaps[len(gaps) // 2]
    say(
        f"{len(gaps)} times {options.fault}, ack_replicas {options.ack}: sends stood still "
        f"{median:.2f} s (median), {p99:.2f} s (p99), {gaps[-1]:.2f} s at most"
    )
    say(
        f"{len(result.acked)} messages acknowledged, {len(result.lost)} lost, "
        f"{len(result.delivered)} of them delivered, {len(result.twice)} twice, "
        f"{len(result.errors)} errors at the producer"
    )
    for error, times in Counter(result.errors).most_common(5):
        say(f"  {times} times {error}")
    untold = result.untold()
    for line in untold:
        say(f"  {line}")
    if result.received is not None:
        _say_received(result.received)
        if not result.received.is_good:
            return 1
    if result.billed is not None and not _say_billed(result.billed):
        return 1
    may_lose = options.ack == "none"
    bad = untold or result.delivered if may_lose else result.lost
    return 1 if bad or result.twice else 0


if __name__ == "__main__":
    sys.exit(main())

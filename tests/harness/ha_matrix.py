"""Every kind of victim with every kind of fault, in every mode of a group that elects its master.

Run as a program (``scripts/chaos --ha``) it takes cells so that each pair of their four parts comes
once at least, prints a line about each, and how to replay it. Each runs in network namespaces of
its own, see ``harness.machines``.
"""

import argparse
import errno
import fcntl
import itertools
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from harness.chaos import say
from harness.etcd_processes import EtcdCluster
from harness.failovers import ElectedGroup, Load, Reader, Stored, stored, wait_acked
from harness.faulty_hosts import FaultyHosts
from harness.machines import Machines, enter
from harness.patience import until
from mqmesh import Message, Producer
from mqmesh.errors import MQMeshError
from mqmesh.protocol.messaging import SendStatus
from mqmesh.units import MIB

BIG_TOPIC: Final = "big"
CELL_S: Final = 150
HOLD_S: Final = 4.0
REPLACED_S: Final = 20
REPAIR_S: Final = 60
DISK_BYTES: Final = 512 * MIB
SEGMENT_BYTES: Final = 8 * MIB
MODES: Final = ("none", "one", "quorum", "all")
FLUSHES: Final = ("ASYNC_FLUSH", "SYNC_FLUSH")
VICTIMS: Final = (
    "master",
    "slave",
    "coordinator",
    "master+coordinator",
    "etcd",
    "master+etcd",
    "two",
)
"""``etcd``: the group's coordinator is a cluster of three, and its leader is the victim."""
SUPERVISOR: Final = "supervisor"
"""The `mqmesh up` of the master's machine."""
EVERYWHERE: Final = ("kill", "stop-1", "stop-3", "stop-10", "gone", "cut", "cut-in", "cut-out")
"""Faults that may happen to any process."""
FROM_REPLICAS: Final = ("from-replicas", "cut-in-replicas", "cut-out-replicas")
"""Cut off from the other replicas; nothing of theirs arrives; nothing that it sends them arrives.
A master that waits for others is to be replaced while that lasts, though its coordinator hears it.
"""
OF_REPLICAS: Final = (*FROM_REPLICAS, "from-coordinator")
OF_ONE: Final = (
    "disk-full",
    "sync-fails",
    "sync-slow",
    "clock-ahead",
    "clock-behind",
    "flipped",
    "wiped",
    "backup",
)
"""Faults of one replica: more of them at once may take what was acknowledged."""
OF_MASTERS: Final = ("unanswered",)
"""The master is stopped when sends are written but not answered, until another one leads."""
TAIL: Final = "tail"
"""The master comes back with many MB that no other replica has; kills interrupt its cuts."""
RESTART: Final = "restart"
"""The replica is away for a while, and meanwhile a follower starts again."""
HOUR_MS: Final = 3_600_000
BIG_BYTES, MOST_BIG, BIG_S = 1 * MIB, 100, 2.0
CUT_KILLS, CUT_S = 5, 0.4
AWAY_S: Final = 20.0
ALL, POWER = "all", "power"
"""Power fails for all replicas and their coordinator at once, and unsynced data is gone."""
UNSYNCED_S: Final = 1.0
"""Time before a power cut in which acknowledged messages may be lost with ``ASYNC_FLUSH``: half a
second, and the time of syncs on a busy machine."""
BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_SHUT_DOWN: Final = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_JOURNAL: Final = struct.pack("I", 2)  # EXT4_GOING_FLAGS_NOLOGFLUSH


class Cell(NamedTuple):
    """Cell of the matrix: victim, fault, and the group's mode and flush."""

    victim: str
    fault: str
    mode: str
    flush: str


def all_cells() -> list[Cell]:
    """Returns all cells that make sense."""
    victims = [
        *itertools.product(VICTIMS, EVERYWHERE),
        *itertools.product((SUPERVISOR,), ("kill", "stop-3", "stop-10")),
        *itertools.product(("master", "slave", "two"), OF_REPLICAS),
        *itertools.product(("master", "slave"), OF_ONE),
        *itertools.product(("master",), OF_MASTERS),
        ("master", TAIL),
        ("coordinator", RESTART),
        ("two", "ring"),
        (ALL, POWER),
    ]
    return [
        Cell(victim, fault, mode, flush)
        for (victim, fault), mode, flush in itertools.product(victims, MODES, FLUSHES)
        # Where sends wait for others nobody has a long tail of his own.
        if fault != TAIL or mode == "none"
    ]


def pairwise(seed: int) -> list[Cell]:
    """Returns few cells in which each two parts that can meet do meet, those with most first."""
    cells, chance = all_cells(), random.Random(seed)
    chance.shuffle(cells)
    missing = {pair for cell in cells for pair in _pairs(cell)}
    found = []
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        found.append(best)
        missing -= _pairs(best)
    return found


def _pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations(enumerate(cell), 2))


# ---- A group that can be harmed ----------------------------------------------------------


class SmallDisks(FaultyHosts):
    """Machines with small disks, whose syncs and clocks can be made to fail.

    Args:
        folder: Folder of the group.
        names: Names of the machines; each has its data in a file system of its own.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(folder, names)
        self._names = names
        for name in names:
            (folder / name).mkdir()
            self._make(name)

    def _make(self, name: str) -> None:
        _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", self.folder / name)

    def fill(self, name: str) -> None:
        """Leaves no room on its disk."""
        with (self.folder / name / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(MIB))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def empty(self, name: str) -> None:
        """Ends ``fill``."""
        (self.folder / name / "filler").unlink()


class PoweredDisks(SmallDisks):
    """Disks that lose unsynced data when their power fails: ext4 on loop devices."""

    def _make(self, name: str) -> None:
        # Processes on machines have mounts of their own, and would keep what is unmounted here.
        _mount("--make-rshared", "/")
        with self._image(name).open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", self._image(name)], check=True)
        _mount("-o", "loop", self._image(name), self.folder / name)

    def _image(self, name: str) -> Path:
        return self.folder / f"{name}.ext4"

    def lose_power(self) -> None:
        """Cuts the power: nothing is written from now on, and unsynced data is gone."""
        for name in self._names:
            directory = os.open(self.folder / name, os.O_RDONLY)
            try:
                fcntl.ioctl(directory, _SHUT_DOWN, _WITHOUT_JOURNAL)
            finally:
                os.close(directory)

    def restore_power(self) -> None:
        """Starts the machines again with the data of their disks; no process of theirs runs."""
        for name in self._names:
            # The processes of those that were killed end by themselves, soon.
            until(partial(_unmount, self.folder / name))
            _mount("-o", "loop", self._image(name), self.folder / name)
        boot_id = self.folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        _mount("--bind", boot_id, BOOT_ID)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _unmount(path: Path, *options: str) -> bool:
    """Unmounts a file system; False while a process has a file open there."""
    return subprocess.run(["umount", "--quiet", *options, path]).returncode == 0


class Harm:
    """Injects the fault of a cell into a group, and ends it.

    Args:
        group: Running group.
        hosts: Hosts of its replicas.
        cell: Victim and fault.
        chance: Source of chance for the slave's choice, and all else that the cell leaves open.

    Attributes:
        replicas: Replicas that get the fault.
        began_s: Time of the power cut, monotonic clock.
    """

    def __init__(
        self, group: ElectedGroup, hosts: SmallDisks, cell: Cell, chance: random.Random
    ) -> None:
        self._group, self._hosts, self._chance = group, hosts, chance
        self._victim, self._fault, self._mode = cell.victim, cell.fault, cell.mode
        assert group.machines is not None
        self._machines = group.machines
        master = until(group.master)
        slave = chance.choice([one for one in group.replicas if one != master])
        self.replicas = {
            "master": [master],
            "slave": [slave],
            "coordinator": [],
            "master+coordinator": [master],
            "etcd": [],
            "master+etcd": [master],
            SUPERVISOR: [master],
            "two": [master, slave],
            ALL: list(group.replicas),
        }[cell.victim]
        self._has_coordinator = "coordinator" in cell.victim or cell.victim == ALL
        self._members = [group.etcd.leader()] if group.etcd is not None else []
        self._names = [f"r{one}" for one in self.replicas]
        self._names += ["coordinator"] * self._has_coordinator
        self._names += [f"e{number + 1}" for number in self._members]
        self._cuts: list[tuple[str, str]] = []
        self.began_s = 0.0
        self.pause = threading.Event().wait

    @property
    def _is_replaced(self) -> bool:
        """True if another replica has to lead while the fault lasts."""
        has_copies = self._mode != "none"
        return self._victim == "master" and self._fault in FROM_REPLICAS and has_copies

    def run(self) -> None:
        """Runs the fault from its beginning to its end; ended processes run again."""
        fault = self._fault
        if fault.startswith("stop-"):
            self._signal(signal.SIGSTOP)
            self.pause(float(fault.removeprefix("stop-")))
            self._signal(signal.SIGCONT)
        elif fault in ("kill", "flipped", "wiped", "backup"):
            self._kill()
        elif fault == "gone":
            for name in self._names:
                self._machines.gone(name)
            self.pause(HOLD_S)
            for name in self._names:
                self._machines.back(name)
        elif fault == "unanswered":
            self._stop_unanswered(self.replicas[0])
        elif fault == TAIL:
            self._return_with_tail(self.replicas[0])
        elif fault == RESTART:
            self._restart_meanwhile()
        elif fault == POWER:
            self._lose_power()
        elif fault in OF_ONE:
            self._disturb()
        else:
            self._cut()

    def _signal(self, number: signal.Signals) -> None:
        processes = [self._group.replicas[one] for one in self.replicas]
        if self._has_coordinator:
            processes.append(self._group.coordinator)
        for process in processes:
            os.kill(process.pid, number)
        for member in self._members:
            self._etcd.signal(member, number)

    @property
    def _etcd(self) -> EtcdCluster:
        assert self._group.etcd is not None
        return self._group.etcd

    def _stop_unanswered(self, master: int) -> None:
        others = [f"r{one}" for one in self._group.replicas if one != master]
        for other in others:
            self._machines.cut(other, f"r{master}")
        self.pause(0.3)
        process = self._group.replicas[master]
        process.suspend()
        for other in others:
            self._machines.heal(other, f"r{master}")
        until(lambda: self._group.master() not in (0, master), CELL_S)
        process.resume()

    def _return_with_tail(self, master: int) -> None:
        others = [f"r{one}" for one in self._group.replicas if one != master]
        with Producer("big", namesrv_addr=self._group.namesrv.endpoint) as producer:
            producer.send(Message(BIG_TOPIC, b"made"))
            for other in others:
                self._machines.cut(f"r{master}", other)
            began, body = time.monotonic(), self._chance.randbytes(BIG_BYTES)
            for _ in range(MOST_BIG):
                producer.send(Message(BIG_TOPIC, body))
                if time.monotonic() > began + BIG_S:  # else the followers leave the set
                    break
        self._machines.gone(f"r{master}")
        for other in others:
            self._machines.heal(f"r{master}", other)
        until(lambda: self._group.master() not in (0, master), CELL_S)
        self._machines.back(f"r{master}")
        for _ in range(CUT_KILLS):
            self.pause(self._chance.uniform(0, CUT_S))
            self._group.replicas[master].kill()
            self._group.start(master)
        until(lambda: len(self._group.in_sync()) > 2, CELL_S)
        cut = list((self._group.folder / f"r{master}").rglob("cut/**/*"))
        size = sum(path.stat().st_size for path in cut if path.is_file())
        say(f"       {size / MIB:.0f} MiB in {len(cut)} files of cut/")
        assert size > BIG_BYTES, "the tail is not in cut/"

    def _restart_meanwhile(self) -> None:
        def epoch() -> int:
            statuses = [one.status for one in self._group.admin.ha_status() if one.broker_id == 0]
            return statuses[0].epoch if statuses and statuses[0] is not None else 0

        before, master = until(epoch), until(self._group.master)
        self._group.coordinator.kill()
        self.pause(1.0)
        slave = self._chance.choice([one for one in self._group.replicas if one != master])
        self._group.replicas[slave].kill()
        self._group.start(slave)
        self.pause(AWAY_S)
        self._group.start_coordinator()
        until(lambda: len(self._group.in_sync()) > 2, CELL_S)
        # A master with mode none may answer nobody once its session may be over.
        if self._mode != "none" and until(epoch) != before:
            raise AssertionError(f"epoch {epoch()} after {before}: somebody was elected")

    def _lose_power(self) -> None:
        assert isinstance(self._hosts, PoweredDisks)
        self.pause(self._chance.uniform(1, 2) * UNSYNCED_S)
        self.began_s = time.monotonic()
        self._signal(signal.SIGSTOP)
        self._hosts.lose_power()
        for one in self.replicas:
            self._group.replicas[one].kill()
        self._group.coordinator.kill()
        self._hosts.restore_power()
        self._start()

    def _kill(self) -> None:
        copies = {}
        for one in self.replicas:
            self._group.replicas[one].kill()
            folder = self._group.folder / f"r{one}"
            if self._fault == "backup":
                copies[one] = shutil.copytree(folder, self._group.folder / f"copy-{one}")
        if self._has_coordinator:
            self._group.coordinator.kill()
        for member in self._members:
            self._etcd.kill(member)
        if self._fault == "backup":
            self._start()
            until(lambda: len(self._group.in_sync()) > 2)
            self.pause(0.5)
            for one in self.replicas:
                self._group.replicas[one].kill()
        self.pause(self._chance.uniform(0.1, HOLD_S))
        for one in self.replicas:
            folder = self._group.folder / f"r{one}"
            if self._fault == "flipped":
                self._flip(folder)
            elif self._fault in ("wiped", "backup"):
                for each in folder.iterdir():
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
            if self._fault == "backup":
                shutil.copytree(copies[one], folder, dirs_exist_ok=True)
        self._start()

    def _start(self) -> None:
        if self._has_coordinator:
            self._group.start_coordinator()
        for member in self._members:
            self._etcd.restart(member)
        for one in self.replicas:
            self._group.start(one)

    def _flip(self, folder: Path) -> None:
        """Flips one bit of a record of the log, within the written part."""
        segment = min((folder / "commitlog").iterdir())
        data = bytearray(segment.read_bytes())
        end = len(data.rstrip(b"\0"))
        data[self._chance.randrange(end // 4, end)] ^= 1 << self._chance.randrange(8)
        segment.write_bytes(data)

    def _disturb(self) -> None:
        faults = {
            "sync-fails": {"sync_errno": errno.EIO},
            "sync-slow": {"sync_ms": self._chance.randrange(500, 5_000)},
            "clock-ahead": {"clock_ms": HOUR_MS},
            "clock-behind": {"clock_ms": -HOUR_MS},
        }
        for name in self._names:
            if self._fault == "disk-full":
                self._hosts.fill(name)
            else:
                self._hosts.set(name, **faults[self._fault])
        self.pause(HOLD_S)
        for name in self._names:
            if self._fault == "disk-full":
                self._hosts.empty(name)
            else:
                self._hosts.set(name)
        for one in self.replicas:
            if not self._group.replicas[one].running:  # as it does when a sync failed
                self._group.start(one)

    def _cut(self) -> None:
        replicas = [f"r{one}" for one in self._group.replicas]
        members = [f"e{number}" for number in (1, 2, 3)]
        coordinators = members if self._members else ["coordinator"]
        everybody = [*replicas, *coordinators, ""]
        if self._fault == "ring":
            self._cuts = list(zip(replicas, [*replicas[1:], replicas[0]], strict=True))
        else:
            others = {
                **dict.fromkeys(FROM_REPLICAS, replicas),
                "from-coordinator": coordinators,
            }
            way = slice(
                self._fault.startswith("cut-out"), 1 + (not self._fault.startswith("cut-in"))
            )
            for victim in self._names:
                for other in others.get(self._fault, everybody):
                    if other not in self._names:
                        self._cuts += [(other, victim), (victim, other)][way]
        for pair in self._cuts:
            self._machines.cut(*pair)
        self.pause(HOLD_S)
        if self._is_replaced:
            master = self.replicas[0]
            until(lambda: self._group.master() not in (0, master), REPLACED_S)
        for pair in self._cuts:
            self._machines.heal(*pair)


# ---- Judging -----------------------------------------------------------------------------


def run_cell(cell: Cell, seed: int, folder: Path) -> tuple[list[str], str]:
    """Runs a cell.

    Returns:
        Faults, and measured values.
    """
    machines, chance = Machines(), random.Random(seed)
    folders = [folder / name for name in ("r1", "r2", "r3")]
    if cell.fault == POWER:
        hosts: SmallDisks = PoweredDisks(folder, ["r1", "r2", "r3", "coordinator"])
    else:
        hosts = SmallDisks(folder, ["r1", "r2", "r3"])
    group = ElectedGroup(
        folder,
        machines=machines,
        before=hosts.before,
        etcd="etcd" in cell.victim,
        supervised=cell.victim == SUPERVISOR,
        ha__ack_replicas=cell.mode,
        ha__min_in_sync_replicas="2" if cell.mode == "all" else "1",
        storage__flush_disk_type=cell.flush,
        storage__mapped_file_size_commit_log=str(SEGMENT_BYTES),
    )
    try:
        load, reader = Load(group.namesrv.endpoint), None
        try:
            wait_acked(load, 50)
            reader = Reader(group.namesrv.endpoint)
            load.slowest_s()
            harm = Harm(group, hosts, cell, chance)
            harm.run()
            began = time.monotonic()
            _start_ended(group)
            wait_acked(load, 20)
            gap_s, again_s = load.slowest_s(), time.monotonic() - began
            until(lambda: _start_ended(group) or len(group.in_sync()) > 2, CELL_S)
            back_s = time.monotonic() - began
            wait_acked(load, 20)
        finally:
            load.close()
            if reader is not None:
                reader.close()
        found = stored(group)
        end = until(lambda: _level_end(group))
        if cell.fault == "flipped":  # what a disk changes at rest is found beside all else
            until(lambda: not harm.pause(0.5) and not _differences(folders, end), REPAIR_S)
    finally:
        group.close()
    assert reader is not None
    wrong, lost = _lacking(cell, load, reader, found, harm.began_s)
    wrong += _differences(folders, end)
    if _takes_unsynced(cell):  # all of them said what they have, and the best one was to lead
        cut = [path for each in folders for path in each.rglob("cut/**/*") if path.is_file()]
        wrong += [f"it had more than who leads: {path}" for path in cut]
    metrics = (
        f"{len(load.acked)} acked, {len(lost)} lost, {len(load.errors)} errors, longest send "
        f"{gap_s:.1f} s, sends {again_s:.1f} s and three in sync {back_s:.1f} s after its end"
    )
    if cell.fault == POWER and lost:
        metrics += f", the first lost {harm.began_s - load.acked_s[lost[0]]:.2f} s before it"
    return wrong, metrics


def _takes_unsynced(cell: Cell) -> bool:
    return (cell.fault, cell.flush) == (POWER, "ASYNC_FLUSH")


def _lacking(
    cell: Cell, load: Load, reader: Reader, found: Sequence[Stored], began_s: float
) -> tuple[list[str], list[int]]:
    """Returns the faults of the group's messages, in words, and the numbers of lost ones."""
    times = Counter(one.number for one in found)
    lost = [number for number in load.acked if not times[number]]
    since_s, may_go = math.inf, set(lost if cell.mode == "none" else ())
    if _takes_unsynced(cell):
        # The end of the acknowledged messages goes, and may have been delivered.
        since_s = began_s - UNSYNCED_S
        kept = max(one for one, at_s in load.acked_s.items() if at_s <= began_s and times[one])
        may_go = {one for one in lost if one > kept and load.acked_s[one] > since_s}
    stays = {one for one in reader.found if load.acked_s.get(one.number, math.inf) <= since_s}
    read = stays | (reader.found & set(found))
    places = read | set(found)
    wrong = {
        "acknowledged and lost": len(set(lost) - may_go),
        # Nothing but SEND_OK is true of a group that may elect another master at any time.
        "answered with another status": sum(one in SendStatus.__members__ for one in load.errors),
        "lost and delivered": sum(1 for one in read if not times[one.number]),
        "there twice": sum(1 for count in times.values() if count > 1),
        "places with two contents": len(places) - len({one[:2] for one in places}),
    }
    return [f"{count} {what}" for what, count in wrong.items() if count], lost


def _start_ended(group: ElectedGroup) -> bool:
    """Starts replicas that ended, as a supervisor does, and says so; always False.

    libzmq may end a process that hung while its connections broke: ``Assertion failed: !_io_error
    (src/stream_engine_base.cpp:310)``.
    """
    for one, process in list(group.replicas.items()):
        if not process.running:
            say(f"       replica {one} had ended, its log tells why; it is started again")
            group.start(one)
    return False


def _level_end(group: ElectedGroup) -> int:
    """Returns the end of all logs, once it is the same; 0 before."""
    ends = [one.status.log_end for one in group.admin.ha_status() if one.status is not None]
    return ends[0] if len(ends) == len(group.replicas) and len(set(ends)) == 1 else 0


def _differences(folders: Sequence[Path], end: int) -> list[str]:
    """Returns segments of the log that differ between replicas, up to the end that all have."""
    logs = [{path.name: path for path in (each / "commitlog").iterdir()} for each in folders]
    names = sorted(name for name in set.intersection(*map(set, logs)) if name.isdecimal())
    if not names:
        return ["the replicas have no segment in common"]
    contents = {
        name: {one[name].read_bytes()[: max(end - int(name), 0)] for one in logs} for name in names
    }
    return [f"segment {name} differs" for name in names if len(contents[name]) > 1]


# ---- The program -------------------------------------------------------------------------


def _inside(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs one cell, in its own namespaces."""
    enter("harness.ha_matrix", arguments)
    cell = Cell(*options.cell.split(":"))
    if cell not in all_cells():
        raise SystemExit(f"error: {options.cell} is no cell")
    if cell.fault == POWER and not os.access("/dev/loop-control", os.R_OK | os.W_OK):
        say(f"left out {options.cell}: no loop device can be made here")
        return 0
    folder = Path(options.folder or tempfile.mkdtemp(prefix="mq-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        wrong, metrics = run_cell(cell, options.seed, folder)
    except (AssertionError, RuntimeError, MQMeshError) as error:
        wrong, metrics = [f"{type(error).__name__}: {error}"], ""
    say(f"{'FAILED' if wrong else 'ok    '} {options.cell} --seed {options.seed}: {metrics}")
    for line in wrong:
        say(f"       {line}")
    if wrong:
        say(f"       replay: scripts/chaos --ha --cell {options.cell} --seed {options.seed}")
    if not options.folder:
        for path in filter(Path.is_mount, folder.iterdir()):
            _unmount(path, "--lazy")
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


def _outside(options: argparse.Namespace, run: Callable[[list[str]], int]) -> int:
    cells = pairwise(options.seed)
    failed = 0
    for number, cell in enumerate(cells[: options.cells or len(cells)]):
        failed += run(["--cell", ":".join(cell), "--seed", str(options.seed + number)]) != 0
    say(f"{min(options.cells or len(cells), len(cells))} cells, {failed} failed")
    return 1 if failed else 0


def _run(arguments: list[str]) -> int:
    command = [sys.executable, "-P", "-m", "harness.ha_matrix", *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=2 * CELL_S).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Returns:
        Exit code: 0 when everything held, 1 when not.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="scripts/chaos --ha", description=__doc__)
    parser.add_argument("--cells", type=int, default=0, help="how many; 0: all pairs once")
    parser.add_argument("--cell", help="VICTIM:FAULT:MODE:FLUSH: only this one")
    parser.add_argument("--seed", type=int, default=1, help="of the first cell (default: 1)")
    parser.add_argument("--folder", help="of --cell: logs are kept there")
    options = parser.parse_args(arguments)
    return _inside(options, arguments) if options.cell else _outside(options, _run)


if __name__ == "__main__":
    sys.exit(main())

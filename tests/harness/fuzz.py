"""Sends hostile frames to everything that a cluster listens at, and watches what becomes of it.

Run as a program (``scripts/fuzz``). A producer and a consumer of ours work all the while; all
processes have to stay, each within its memory. Further scene: a crowd of clients that are idle or
never read, beside which a producer must be as quick as without them.
"""

import argparse
import contextlib
import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from harness.chaos import say, show
from harness.fuzz_sender import Found
from harness.keys import credentials, user
from harness.listening import family, listening, private_bytes
from harness.patience import until
from harness.secured import Roles, place_of
from harness.secured_attack import Keys
from mqmesh.errors import MQMeshError
from mqmesh.message import Message, StoredMessage
from mqmesh.protocol.commands import ServedBy
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.security.access_list import UserRole
from mqmesh.units import MIB

FRAMES: Final = 1_000_000
BUDGET_BYTES: Final = 64 * MIB
"""``max_total_pending_bytes`` of the broker and the name server."""
GROWTH_BYTES: Final = BUDGET_BYTES * 5 // 4 + 64 * MIB
"""More than it had before no process may have: the true limit for clients, and the tables and
staged messages that the frames which are no nonsense make."""
PAUSE_S: Final = 0.005
IDLE_SENDS: Final = 1_000
PARTS: Final = 8
WATCH_S: Final = 0.1
BODY: Final = bytes(1_000)
BUG: Final = "Traceback (most recent call last)"
"""Text of a log for an error that no code handles."""
IDLE_CLIENTS: Final = 2_000
DEAF_CLIENTS: Final = 60
STRANGERS: Final = 1_000
THEIRS: Final = "theirs"
"""Topic that strangers send to."""
BIG_MESSAGES: Final = 64
MOST_RATIO: Final = 2.0
PATIENCE_S: Final = 30.0


class FuzzFailure(AssertionError):
    """Something did not hold."""


class Fuzzed(msgspec.Struct, frozen=True):
    """Result of a run.

    Attributes:
        places: Frames and answers of each place.
        grown: Most memory of its own that each process had beyond its memory before, in bytes,
            by its name.
        before: 50th and 99th percentile of a send in ms, without the frames.
        meanwhile: The same with them.
        sends: Sends of the producer meanwhile; each was stored, and consumed.
    """

    places: list[Found]
    grown: dict[str, int]
    before: tuple[float, float]
    meanwhile: tuple[float, float]
    sends: int


class Traffic:
    """A producer and a consumer of ours, while others do harm.

    Args:
        namesrv_addr: Name servers.
        topic: Topic of their own.
        credentials: File of their keys; "" for none.
    """

    def __init__(self, namesrv_addr: str, topic: str, credentials: str = "") -> None:
        self._topic = topic
        self._count = 0
        self._seen: set[bytes] = set()
        self._producer = Producer("legitimate", namesrv_addr=namesrv_addr, credentials=credentials)
        self._consumer = PushConsumer(
            "legitimate",
            namesrv_addr=namesrv_addr,
            credentials=credentials,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        )
        self._consumer.subscribe(topic, listener=self._take)

    def __enter__(self) -> Self:
        self._producer.start()
        self.send()
        self._consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._producer.close()

    def send(self) -> float:
        """Sends a message; the ms that it took."""
        began = time.monotonic()
        self._producer.send(Message(self._topic, b"%d " % self._count + BODY))
        self._count += 1
        return (time.monotonic() - began) * 1_000

    def send_while(self, wanted: Callable[[int], bool]) -> list[float]:
        """Sends with pauses as long as that is wanted, after each send by their number."""
        took: list[float] = []
        while wanted(len(took)):
            took.append(self.send())
            time.sleep(PAUSE_S)
        return took

    def wait_consumed(self) -> int:
        """Waits until everything that was sent was consumed; how many that were.

        Raises:
            FuzzFailure: Something did not come.
        """
        deadline = time.monotonic() + PATIENCE_S
        while len(self._seen) < self._count:
            if time.monotonic() >= deadline:
                raise FuzzFailure(f"{len(self._seen)} of {self._count} messages were consumed")
            time.sleep(PAUSE_S)
        return self._count

    def _take(self, messages: list[StoredMessage]) -> ConsumeResult:
        self._seen.update(bytes(message.body).partition(b" ")[0] for message in messages)
        return ConsumeResult.SUCCESS


class MemoryWatch:
    """Looks at the memory of processes again and again, in a thread.

    Args:
        pids: The processes by name.
    """

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._before = {name: private_bytes(pid) for name, pid in pids.items()}
        self._peak = dict(self._before)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def grown(self) -> dict[str, int]:
        """Returns the most memory of each process beyond its memory before, in bytes."""
        return {name: self._peak[name] - self._before[name] for name in self._pids}

    def _run(self) -> None:
        while not self._ended.wait(WATCH_S):
            for name, pid in self._pids.items():
                self._peak[name] = max(self._peak[name], private_bytes(pid))


class Target:
    """A small cluster with a process of each role.

    Args:
        folder: For stores and logs; a short path.
        secure: Clients without a key are refused.

    Attributes:
        namesrv_addr: Name server.
        credentials: File of our own keys; "" for none.
        roles: Processes of the cluster by the names of their roles.
        pids: Ids of these processes and of all that they started.
        keys: Keys of the hostile clients; none where none are needed.
    """

    def __init__(self, folder: Path, *, secure: bool = False) -> None:
        self._folder = folder
        self.keys: Keys | None = None
        settings = {
            "max_pending_bytes": str(BUDGET_BYTES // 2),
            "max_total_pending_bytes": str(BUDGET_BYTES),
            "filter_server_enable": "true",
            "max_auto_topics": "100",
        }
        hostile = [credentials("powerless"), credentials("mighty")]
        users = [user(hostile[0]), user(hostile[1], UserRole.ADMIN)]
        cluster = Roles(folder, settings, users if secure else None)
        self._cluster = cluster
        self.namesrv_addr, self.credentials = cluster.namesrv_addr, cluster.credentials
        self.roles = {role.name.lower(): process for role, process in cluster.roles.items()}
        self.pids = {name: role.pid for name, role in self.roles.items()}
        until(lambda: len(family(self.roles["broker"].pid)) > 1)  # its index process comes later
        for name, role in self.roles.items():
            for number, pid in enumerate(family(role.pid)[1:], 1):
                self.pids[f"{name}/{number}"] = pid
        until(lambda: all(map(listening, self.pids.values())))
        if secure:
            self.keys = Keys(hostile, self._server_keys())

    def places(self) -> dict[str, str]:
        """Returns all endpoints of its processes, with the name of the process.

        Where security is on without that of helpers, which are for processes of one user.
        """
        names = self.pids if self.keys is None else self.roles
        return {place: name for name in names for place in listening(self.pids[name])}

    def _server_keys(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for role, process in self._cluster.roles.items():
            taken = [place_of(process.endpoint)]
            if role is not ServedBy.SCHEDULE:
                taken += [one for one in listening(process.pid) if one.startswith("ipc://")]
            found |= dict.fromkeys(taken, self._cluster.server_key(role))
        return found

    def check(self, grown: dict[str, int]) -> None:
        """Looks whether all processes are the same as before, and small enough.

        Raises:
            FuzzFailure: One has ended, met a bug, or took more than it may.
        """
        for name, pid in self.pids.items():
            if private_bytes(pid) == 0:
                raise FuzzFailure(f"{name} has ended")
        for log in self._folder.glob("*.log"):
            if BUG in log.read_text(errors="replace"):
                raise FuzzFailure(f"{log.name} tells of a bug")
        for name, size in grown.items():
            if size > GROWTH_BYTES:
                raise FuzzFailure(f"{name} took {size // MIB} MiB, over {GROWTH_BYTES // MIB}")

    def close(self) -> None:
        """Ends all processes."""
        self._cluster.close()


@contextlib.contextmanager
def _target(folder: Path, *, secure: bool = False) -> Iterator[Target]:
    target = Target(folder, secure=secure)
    try:
        yield target
    finally:
        target.close()


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", f"harness.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def percentiles(took_ms: list[float]) -> tuple[float, float]:
    """Returns the 50th and the 99th percentile, each the median of several parts of the run.

    So that a moment in which the machine did something else counts as what it is.
    """
    size = max(len(took_ms) // PARTS, 1)
    parts = [sorted(took_ms[at : at + size]) for at in range(0, len(took_ms) - size + 1, size)]
    return (
        statistics.median(part[len(part) // 2] for part in parts),
        statistics.median(part[len(part) * 99 // 100] for part in parts),
    )


def fuzz(
    folder: Path, seed: int, frames: int, idle_sends: int = IDLE_SENDS, *, secure: bool = False
) -> Fuzzed:
    """Sends hostile frames to all places of a cluster.

    Args:
        folder: For stores and logs; a short path.
        seed: Seed of the frames.
        frames: Number of frames.
        idle_sends: Sends of the producer before they begin.
        secure: The cluster lets nobody in without a key. The frames are broken handshakes then, and
            those of an administrator, and of a user who may do nothing.

    Raises:
        FuzzFailure: A process ended, took too much memory, did not answer or met a bug of its own;
            or the producer or consumer did not get on.
    """
    with (
        _target(folder, secure=secure) as target,
        Traffic(target.namesrv_addr, f"ours-{seed}", target.credentials) as traffic,
    ):
        before = traffic.send_while(lambda number: number < idle_sends)
        places = target.places()
        with (
            MemoryWatch(target.pids) as memory,
            _process("fuzz_sender", str(seed), str(frames), *places) as sender,
        ):
            assert sender.stdin is not None
            assert sender.stdout is not None
            with sender.stdin as keys:
                keys.write(b"" if target.keys is None else msgspec.json.encode(target.keys))
            meanwhile = traffic.send_while(lambda _: sender.poll() is None)
            found = msgspec.json.decode(sender.stdout.read() or b"[]", type=list[Found])
            sends = traffic.wait_consumed()
        target.check(memory.grown())
        if sender.returncode or not found:
            raise FuzzFailure(f"the sender of the frames ended with {sender.returncode}")
        for one in found:
            one.place = f"{places[one.place]} {_short(one.place)}"
            if one.fault:
                raise FuzzFailure(f"{one.place}: {one.fault}")
        return Fuzzed(found, memory.grown(), percentiles(before), percentiles(meanwhile), sends)


def crowd(
    folder: Path, idle: int = IDLE_CLIENTS, deaf: int = DEAF_CLIENTS, sends: int = 4 * IDLE_SENDS
) -> Fuzzed:
    """Lets a crowd of clients come that are idle or never read.

    Raises:
        FuzzFailure: A process ended or took too much memory.
    """
    with _target(folder) as target, Traffic(target.namesrv_addr, "ours") as traffic:
        with Producer("big", namesrv_addr=target.namesrv_addr) as producer:
            for _ in range(BIG_MESSAGES):
                producer.send(Message("big", bytes(MIB)), timeout_ms=30_000)
        place = place_of(target.roles["broker"].endpoint)
        return _beside(target, traffic, sends, "crowd", place, "big", str(idle), str(deaf))


def strangers(folder: Path, count: int = STRANGERS, sends: int = 4 * IDLE_SENDS) -> Fuzzed:
    """Lets strangers come that have no key: broken and half handshakes, and unknown keys.

    Raises:
        FuzzFailure: A process ended or took too much memory, or one of their messages came in.
    """
    with (
        _target(folder, secure=True) as target,
        Traffic(target.namesrv_addr, "ours", target.credentials) as traffic,
    ):
        place = place_of(target.roles["broker"].endpoint)
        assert target.keys is not None
        asked = (place, target.keys.servers[place], THEIRS, str(count))
        result = _beside(target, traffic, sends, "strangers", *asked)
        with AdminClient(target.namesrv_addr, credentials=target.credentials) as admin:
            if THEIRS in admin.topics():
                raise FuzzFailure("a message of somebody without a key came in")
        return result


def _beside(target: Target, traffic: Traffic, sends: int, module: str, *arguments: str) -> Fuzzed:
    """Measures our sends before and while a process makes a crowd of connections."""
    before = traffic.send_while(lambda number: number < sends)
    with (
        MemoryWatch(target.pids) as memory,
        _process(module, *arguments) as process,
    ):
        out = process.stdout
        assert out is not None
        ready = select.poll()  # select.select takes no descriptor above 1,023
        ready.register(out, select.POLLIN)
        traffic.send_while(lambda _: not ready.poll(0))
        if out.readline() != b"ready\n":
            raise FuzzFailure("the crowd did not come")
        meanwhile = traffic.send_while(lambda number: number < sends)
        count = traffic.wait_consumed()
    target.check(memory.grown())
    return Fuzzed([], memory.grown(), percentiles(before), percentiles(meanwhile), count)


def table(result: Fuzzed) -> str:
    """Formats the result of a run for people."""
    lines = [
        f"{'place':34} {'frames':>9} {'connections':>11} {'ended':>6}  answers",
        *(
            f"{one.place:34} {one.frames:>9,} {one.connections:>11,} {one.ended:>6,}  "
            + ", ".join(f"{name} {n:,}" for name, n in sorted(one.answers.items()))
            for one in result.places
        ),
        "",
        f"{'process':34} {'MiB more':>9} (bound {GROWTH_BYTES // MIB})",
        *(f"{name:34} {size / MIB:>9.1f}" for name, size in result.grown.items()),
        "",
        f"{'a send of our producer, ms':34} {'p50':>9} {'p99':>11}",
        f"{'before':34} {result.before[0]:>9.2f} {result.before[1]:>11.2f}",
        f"{'meanwhile':34} {result.meanwhile[0]:>9.2f} {result.meanwhile[1]:>11.2f}",
        f"{result.sends:,} messages sent, stored and consumed",
    ]
    return "\n".join(lines if result.places else lines[2:])


def _short(place: str) -> str:
    return place if len(place) <= 24 else f"…{place[-23:]}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the program.

    Returns:
        Exit code: 0 when everything held, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description="Sends hostile frames to all that a cluster listens at."
    )
    parser.add_argument("--frames", type=int, default=FRAMES, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the frames")
    parser.add_argument("--secure", action="store_true", help="a cluster with security on")
    parser.add_argument("--crowd", action="store_true", help="a crowd of clients instead of frames")
    parser.add_argument(
        "--strangers", action="store_true", help="a crowd without keys, and security on"
    )
    options = parser.parse_args(arguments)
    if options.frames < 1:
        parser.error("--frames must be at least 1")
    seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        show(f"{options.frames:,} frames, --seed {seed} …")
        try:
            if options.crowd:
                result = crowd(Path(folder))
            elif options.strangers:
                result = strangers(Path(folder))
            else:
                result = fuzz(Path(folder), seed, options.frames, secure=options.secure)
        except (FuzzFailure, MQMeshError, RuntimeError) as error:
            say(f"FAILED --seed {seed}: {type(error).__name__}: {error}")
            for log in sorted(Path(folder).glob("*.log")):
                text = log.read_text(errors="replace")
                at = text.find(BUG)
                say(f"--- {log.name}\n{text[at : at + 3_000] if at >= 0 else text[-2_000:]}")
            return 1
    say(table(result))
    ratio = result.meanwhile[1] / result.before[1]
    say(f"p99 {ratio:.2f} times that of before; {time.monotonic() - began:.0f} s, --seed {seed}")
    return 1 if (options.crowd or options.strangers) and ratio > MOST_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measurements of a running broker: snapshots under load."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from commands import HERE, Failed
from figures import BATCH, Figure, Hold, Sizes, UnderLoad, read_holds, snapshot_figures
from orders import FILLER, TOPIC, Orders

from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.storage.tools.snapshot import Manifest, delete_snapshot, load_manifest
from mqmesh.testing.processes import ProcessCluster
from mqmesh.units import GIB

BROKER: Final = "broker-a"
LOAD: Final = "load"
_FILL_BATCH_BYTES: Final = BATCH * 4_000

Say = Callable[[str], None]


class Stored(NamedTuple):
    """Store of the broker after its end.

    Attributes:
        some: A snapshot with the first orders, which are compared.
        all: One with all orders.
        figures: F1.
    """

    some: Path
    all: Path
    figures: list[Figure]


def measure(folder: Path, size: Sizes, say: Say) -> Stored:
    """Fills a broker, snapshots it twice for later, and then under load.

    Args:
        folder: For its store, logs and snapshots, which are left there.
        size: How much of all.
        say: Told what is being done.
    """
    notes = folder / "held-up"
    settings = {
        "snapshot.keep": "0",
        "storage.mapped_file_size_commit_log": str(size.segment_bytes),
    }
    program = (str(HERE / "watched_broker.py"), str(notes))
    with (
        ProcessCluster(folder, broker_settings=settings, broker_program=program) as cluster,
        AdminClient(cluster.namesrv_addr) as admin,
    ):
        address = cluster.namesrv_addr
        say(f"sending {size.orders:,} messages")
        _produce(address, TOPIC, 0, size.compared)
        some = Path(admin.create_snapshot(BROKER).path)
        _produce(address, TOPIC, size.compared, size.orders - size.compared)
        whole = Path(admin.create_snapshot(BROKER).path)
        missing = size.store_bytes - load_manifest(whole).end_offset
        if missing > 0:
            say(f"making the log {size.store_bytes / GIB:.2f} GiB large")
            _produce(address, FILLER, 0, -(-missing // _FILL_BATCH_BYTES) * BATCH)
        taken = _under_load(address, admin, size, say)
    holds: list[Hold] = read_holds(notes.read_text(encoding="ascii"))
    figures = snapshot_figures(taken, holds, segment_bytes=size.segment_bytes, quiet_s=size.quiet_s)
    return Stored(some, whole, figures)


def _producers(address: str, kind: str, first: int, count: int) -> "subprocess.Popen[bytes]":
    arguments = [str(HERE / "producers.py"), address, kind, str(first), str(count)]
    return subprocess.Popen([sys.executable, *arguments])


def _produce(address: str, kind: str, first: int, count: int) -> None:
    if _producers(address, kind, first, count).wait():
        raise Failed(f"not all of {count:,} messages of {kind} were stored")


def _under_load(address: str, admin: AdminClient, size: Sizes, say: Say) -> list[UnderLoad]:
    load = _producers(address, LOAD, 0, 0)
    try:
        with Producer("single", namesrv_addr=address) as producer:
            message = Orders().batch("single", 0)[0]
            # Until the other one has begun, too, this one has a queue and its connection.
            _send_until(producer, message, _after(max(size.quiet_s, 2.0)))
            taken = []
            for number in range(size.snapshots):
                say(f"snapshot {number + 1} of {size.snapshots} under load")
                taken.append(_snapshot(producer, message, admin, size.quiet_s))
        if load.poll() is not None:
            raise Failed("the producer of the load has ended; its error stands above")
        return taken
    finally:
        load.kill()
        load.wait()


def _snapshot(
    producer: Producer, message: Message, admin: AdminClient, quiet_s: float
) -> UnderLoad:
    before = _send_until(producer, message, _after(quiet_s))
    made: list[tuple[Path, float]] = []

    def make() -> None:
        info = admin.create_snapshot(BROKER)
        made.append((Path(info.path), info.took_ms / 1_000))

    thread = threading.Thread(target=make)
    began = monotonic()
    thread.start()
    during = _send_until(producer, message, lambda: not thread.is_alive())
    ended = monotonic()
    thread.join()
    if not made:
        raise Failed("no snapshot was made; the error stands above")
    path, took_s = made[0]
    manifest = load_manifest(path)
    own, live = _own_bytes(path, manifest)
    delete_snapshot(path)
    return UnderLoad(began, ended, took_s, manifest.log_bytes, own, live, before, during)


def _after(seconds: float) -> Callable[[], bool]:
    end = monotonic() + seconds
    return lambda: monotonic() >= end


def _send_until(producer: Producer, message: Message, over: Callable[[], bool]) -> list[float]:
    """Sends one message after the other; how long each took, ms."""
    took = []
    while not over() or not took:
        began = monotonic()
        producer.send(message)
        took.append((monotonic() - began) * 1_000)
    return took


def _own_bytes(path: Path, manifest: Manifest) -> tuple[int, int]:
    """Disk that no other link shares, and the size of the live index in it."""
    # Of the file system, since a file may have holes.
    own = sum(
        status.st_blocks * 512
        for status in (one.stat() for one in path.rglob("*") if one.is_file())
        if status.st_nlink == 1
    )
    live = sum(file.size for file in manifest.files if ".live/" in file.path)
    return own, live

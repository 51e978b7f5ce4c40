"""A process that uses an ``lmdb`` store is killed at any moment: nothing answered is lost."""

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

import mqmesh
from mqmesh.batch.record_batch import decode_messages, read_header
from mqmesh.storage.backends import open_store
from mqmesh.storage.interface import (
    BatchToPut,
    FlushDiskType,
    MessageStore,
    PutStatus,
    StoreConfig,
)
from mqmesh.storage.tools.stopped_store import open_stopped
from mqmesh.storage.tools.verify import verify_store
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch, read_queue
from mqmesh.units import CommitLogOffset

PACKAGE = str(Path(mqmesh.__file__).parent)
ROUNDS = 6
QUEUES = 3

# Puts batches for ever, each put for all queues, and tells every answer. The second topic is
# deleted again and again.
WRITER = """
import sys
from pathlib import Path
from mqmesh.storage.backends import open_store
from mqmesh.storage.interface import FlushDiskType, StoreConfig
from mqmesh.storage.lmdb import opening
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, make_batch

opening.FIRST_MAP_BYTES = 256 * 1024
config = StoreConfig(
    flush_disk_type=FlushDiskType[sys.argv[2]], disk_reserve_bytes=0, flush_interval_commitlog_ms=10
)
store = open_store("lmdb", Path(sys.argv[1]), config, clock=ManualClock(),
                   wake=lambda: None, on_progress=lambda progress: None)
number = int(sys.argv[3])
while True:
    batches = [
        make_batch([f"{number}-{index}" for index in range(5)], queue_id=queue_id,
                   first_sequence=number * 5, group=1)
        for queue_id in range(3)
    ]
    batches.append(make_batch(["x" * 5000], topic="brief", first_sequence=number))
    results = store.put(batches, NOW)
    where = [(r.base_queue_offset, r.commitlog_offset) for r in results[:3]]
    print(number, *(f"{base}:{place}" for base, place in where), flush=True)
    number += 1
    if number % 10 == 0:
        store.delete_topic("brief")
        store.tick(0)
"""


def open_lmdb(directory: Path, config: StoreConfig) -> MessageStore:
    return open_store(
        "lmdb",
        directory,
        config,
        clock=ManualClock(),
        wake=lambda: None,
        on_progress=lambda progress: None,
    )


def write_until_killed(directory: Path, config: StoreConfig, start: int, answers: int) -> list[str]:
    """Lines of all answers that a writer gave before it was killed."""
    command = [sys.executable, "-c", WRITER, str(directory), config.flush_disk_type.name]
    with subprocess.Popen([*command, str(start)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while len(lines) < answers:
            line = process.stdout.readline()
            assert line, "the writer ended by itself"
            lines.append(line)
        process.kill()
        rest = process.stdout.read().splitlines(keepends=True)
    assert process.returncode == -signal.SIGKILL
    # A line without its end was not told.
    return [line for line in lines + rest if line.endswith("\n")]


class KilledError(BaseException):
    """The end of a process in the middle of a put."""


def put_until(store: MessageStore, batches: list[BatchToPut], calls: int) -> int:
    """Puts batches, and dies at a call of mqmesh; returns how many calls there were."""
    made = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal made
        # An error in a callback of the garbage collector would reach nobody.
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            made += 1
            if made == calls:
                raise KilledError

    sys.setprofile(count)
    try:
        store.put(batches, NOW)
    except KilledError:
        pass
    finally:
        sys.setprofile(None)
    return made


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_group_is_there_or_not_wherever_its_put_dies(tmp_path: Path, count: int) -> None:
    config = StoreConfig(disk_reserve_bytes=0)
    bodies = [f"{number}" for number in range(count)]
    seen: Counter[int] = Counter()

    def group() -> list[BatchToPut]:
        return [
            make_batch([body], queue_id=number % 3, first_sequence=number, group=1)
            for number, body in enumerate(bodies)
        ]

    store = open_lmdb(tmp_path / "whole", config)
    calls = put_until(store, group(), 0)
    store.close()
    for at in (*range(1, calls - 8, calls // 8 + 1), *range(calls - 8, calls + 1, 2)):
        store = open_lmdb(tmp_path / f"{at}", config)
        put_until(store, group(), at)
        store.close()
        store = open_lmdb(tmp_path / f"{at}", config)
        found = [body for queue_id in range(3) for body in read_queue(store, queue_id=queue_id)]
        assert sorted(found) in ([], sorted(bodies))
        seen[len(found)] += 1
        results = store.put(group(), NOW)
        assert {one.status for one in results} == {
            PutStatus.DUPLICATE if found else PutStatus.PUT_OK
        }
        store.close()
    assert seen.keys() == {0, count}


@pytest.mark.slow
@pytest.mark.parametrize("flush", list(FlushDiskType))
def test_nothing_that_was_answered_is_lost(tmp_path: Path, flush: FlushDiskType) -> None:
    choice = random.Random(1)
    config = StoreConfig(flush_disk_type=flush, disk_reserve_bytes=0)
    answered: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for _ in range(ROUNDS):
        for line in write_until_killed(tmp_path, config, number, choice.randrange(1, 60)):
            told, *places = line.split()
            pairs = [place.split(":") for place in places]
            answered[int(told)] = [(int(base), int(place)) for base, place in pairs]
        with open_stopped(tmp_path) as stopped:
            report = verify_store(stopped, lambda progress: None)
        assert report is not None and report.sound, report
        store = open_lmdb(tmp_path, config)
        number = check(store, answered)
        store.close()
    assert number > ROUNDS


def check(store: MessageStore, answered: dict[int, list[tuple[int, int]]]) -> int:
    """Compares a store with the answers; returns the number of the next batch."""
    bodies = [read_queue(store, queue_id=queue_id) for queue_id in range(QUEUES)]
    # All queues of a put, or none.
    assert bodies[0] == bodies[1] == bodies[2]
    last = max(answered)
    stored = len(bodies[0]) // 5
    assert bodies[0] == [f"{n}-{index}" for n in range(stored) for index in range(5)]
    # One put more than was answered may be there.
    assert stored in (last + 1, last + 2)
    for number, places in answered.items():
        for queue_id, (base, place) in enumerate(places):
            batch = store.read_at(CommitLogOffset(place))
            header = read_header(batch)
            assert (header.base_queue_offset, header.queue_id) == (base, queue_id)
            assert decode_messages(batch, header)[0].body == f"{number}-0".encode()
    # The producer repeats what it got no answer for, and what it did.
    texts = [f"{last}-{index}" for index in range(5)]
    (again,) = store.put([make_batch(texts, first_sequence=5 * last)], NOW)
    assert again.status is PutStatus.DUPLICATE
    assert (again.base_queue_offset, again.commitlog_offset) == answered[last][0]
    return stored

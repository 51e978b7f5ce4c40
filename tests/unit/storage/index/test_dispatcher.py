"""When the index does what may wait: not while others need the machine, and not never."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from harness.indexed_store import IndexedStore

from mqmesh.message import Message
from mqmesh.storage.index import dispatcher
from mqmesh.storage.index.dispatcher import BUSY_MS, CATCH_UP_MS, PAUSES
from mqmesh.storage.interface import StoreConfig
from mqmesh.units import KIB

STEP = 4 * KIB
WORK_MS = 10


class Pressure:
    """Every piece of work takes ``WORK_MS``."""

    is_crowded = False

    def end(self) -> tuple[int, bool]:
        return WORK_MS, self.is_crowded


@pytest.fixture
def pressure(monkeypatch: pytest.MonkeyPatch) -> type[Pressure]:
    monkeypatch.setattr(dispatcher, "CpuPressure", Pressure)
    monkeypatch.setattr(Pressure, "is_crowded", False)
    return Pressure


@pytest.fixture
def indexed(tmp_path: Path, pressure: type[Pressure]) -> Iterator[IndexedStore]:
    config = StoreConfig(mapped_file_size_commit_log=64 * KIB)
    indexed = IndexedStore(tmp_path / "store", config, step_bytes=STEP)
    yield indexed
    indexed.close()


def put_some(indexed: IndexedStore, size: int) -> None:
    """Stores messages with keys, of about so many bytes together, and tells of them."""
    while size > 0:
        first = indexed.sequence
        keys = [f"key {number}" for number in range(first, first + 5)]
        messages = [Message("t", b"x" * 20, None, (key,)) for key in keys]
        result = indexed.put(messages)
        size -= result.end_offset - result.commitlog_offset
    indexed.tell()


def work(indexed: IndexedStore, duration_ms: int) -> None:
    """Lets the dispatcher work as long as it wants to."""
    until_ms = indexed.now_ms + duration_ms
    while (delay_ms := indexed.dispatcher.step(indexed.now_ms)) is not None:
        if indexed.now_ms + delay_ms >= until_ms:
            break
        indexed.now_ms += delay_ms
    indexed.now_ms = until_ms


def test_a_log_that_grows_slowly_is_hashed_at_once(indexed):
    for _ in range(40):
        put_some(indexed, STEP // 2)
        work(indexed, 50)
        assert not indexed.dispatcher.stats().texts


def test_one_that_grows_fast_is_put_down_as_text_until_it_rests(indexed, pressure):
    pressure.is_crowded = True
    put_some(indexed, 3 * STEP)
    assert indexed.dispatcher.step(indexed.now_ms) == 0
    assert indexed.dispatcher.stats().texts
    work(indexed, CATCH_UP_MS + BUSY_MS + 2 * PAUSES * WORK_MS)
    assert indexed.dispatcher.stats().at_rest
    assert not indexed.dispatcher.stats().texts


def test_bursts_keep_nothing_back_where_there_are_processors_to_spare(indexed):
    for _ in range(20):
        put_some(indexed, 2 * STEP)
        for _ in range(20):
            put_some(indexed, STEP // 8)
            work(indexed, 50)
    stats = indexed.dispatcher.stats()
    assert stats.segments > 3
    assert stats.sealed >= stats.segments - 1
    assert stats.texts <= 1


@pytest.mark.parametrize("is_crowded", [False, True])
def test_work_that_may_wait_pauses_where_others_wait_for_a_processor(
    indexed, pressure, monkeypatch, is_crowded
):
    pressure.is_crowded = is_crowded
    other_work = indexed.dispatcher._other_work
    times = []

    def noted() -> bool:
        did_something = other_work()
        if did_something:
            times.append(indexed.now_ms)
        return did_something

    monkeypatch.setattr(indexed.dispatcher, "_other_work", noted)
    put_some(indexed, 60 * STEP)
    work(indexed, 10)
    while indexed.now_ms < 2_000:
        put_some(indexed, STEP)
        work(indexed, 10)
        assert not indexed.dispatcher.lag_bytes  # what follows the log waits for nothing
    if is_crowded:
        gaps = [after - before for before, after in pairwise(times)]
        assert min(gaps) == (1 + PAUSES) * WORK_MS
        # It may wait no longer than the log grows.
        work(indexed, BUSY_MS + (1 + PAUSES) * WORK_MS)
    assert len(times) > (10 if is_crowded else 100)
    assert indexed.dispatcher.stats().at_rest

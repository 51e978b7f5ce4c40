"""Threads take the locks of a producer in one order, so they never wait for one another."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from harness.checked_locks import LockWatch
from harness.simulated_cluster import Fault, FaultKind

import mqmesh.sdk
from mqmesh.message import Message, MessageQueue
from mqmesh.sdk.client import lock_order
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock

ROOMS = [Path(mqmesh.sdk.__file__).parent / name for name in ("producer", "transactions")]


@pytest.fixture
def watch(monkeypatch):
    watch = LockWatch()
    monkeypatch.setattr(lock_order, "make_lock", watch.lock)
    yield watch
    assert watch.faults == []
    assert watch.held() == []


def test_all_that_a_producer_does_keeps_the_order(watch, world):
    world.build(brokers=("a", "b"))
    producer = world.producer(max_requests_in_flight=1, buffer_memory_bytes=100_000)
    message = Message("t", b"x" * 100, "tag")
    told = []
    for _ in range(4):  # the later ones go straight to brokers that were met by the first
        world.call(lambda: producer.send(message))
    futures = [producer.send_async(message, told.append) for _ in range(100)]
    futures += [producer.send_async(Message("t", b"x", sharding_key="s")) for _ in range(5)]
    producer.send_oneway(message)
    futures.append(producer.send_batch_async([message] * 3))
    world.broker.faults.extend([Fault(FaultKind.LOSE), Fault(FaultKind.LATE, 100)])
    world.run(10_000)
    assert all(future.done() for future in futures)
    world.broker.crash()
    late = producer.send_async(message, queue=MessageQueue("t", "a", 0), timeout_ms=500)
    world.run(2_000)
    assert late.done()
    world.broker.start()
    world.run(2_000)
    world.call(lambda: producer.send_batch([message] * 2))
    producer.close()
    assert (LockRank.DIRECT, LockRank.LANES) in watch.nested
    assert (LockRank.ROUTES, LockRank.LANES) in watch.nested


def test_a_lock_that_is_not_watched_is_a_plain_one():
    # It costs nothing more, and the part in C takes no other.
    assert type(ranked_lock(LockRank.LANES)) is type(threading.Lock())


def test_a_planted_fault_is_seen():
    watch = LockWatch()
    outer, inner = watch.lock(LockRank.ROUTES), watch.lock(LockRank.LANES)
    with outer, inner:
        assert watch.faults == []
    with inner, outer:
        assert watch.faults == ["ROUTES was taken under LANES"]
    with watch.lock(LockRank.LEAF), watch.lock(LockRank.LEAF):
        assert watch.faults[1:] == ["LEAF was taken under LEAF"]


def test_every_lock_has_its_place():
    for room in ROOMS:
        for path in room.glob("*.py"):
            assert "threading.Lock()" not in path.read_text(), f"{path.name}: take ranked_lock"

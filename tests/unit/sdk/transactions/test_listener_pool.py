"""Threads that call users' code: few when it is quick, more when some of it hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mqmesh.sdk.transactions.listener_pool import GROW_MS, ListenerPool
from mqmesh.transport.simulated.network import Network
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.transport.simulated.simulation import Simulation
from mqmesh.transport.simulated.transport import SimulatedTransport

PATIENCE_S = 10.0


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(1)


@pytest.fixture
def pool(simulation) -> Iterator[ListenerPool]:
    node = SimulatedNode(simulation, "producer")
    pool = ListenerPool("test", 3, SimulatedTransport(Network(simulation), node).loop)
    yield pool
    pool.close()


def grow(simulation: Simulation, done: threading.Semaphore, count: int) -> None:
    """Let time of the loop pass until so much was done."""
    for _ in range(count):
        for _ in range(1_000):
            simulation.run(GROW_MS)
            if done.acquire(timeout=PATIENCE_S / 1_000):
                break
        else:
            pytest.fail("it was not done")


def test_quick_tasks_share_a_thread(pool):
    threads, done = set(), threading.Semaphore(0)

    def task() -> None:
        threads.add(threading.get_ident())
        done.release()

    for _ in range(100):
        pool.submit(task)
    for _ in range(100):
        assert done.acquire(timeout=PATIENCE_S)
    assert len(threads) == 1


def test_nobody_looks_after_a_pool_that_idles(pool, simulation):
    done = threading.Semaphore(0)
    pool.submit(lambda: done.release())
    assert done.acquire(timeout=PATIENCE_S)
    simulation.run(10 * GROW_MS)
    events = simulation.event_count
    simulation.run(1_000 * GROW_MS)
    assert simulation.event_count == events


def test_a_task_that_hangs_holds_up_no_other(pool, simulation):
    hang, done = threading.Event(), threading.Semaphore(0)
    pool.submit(lambda: hang.wait(PATIENCE_S) and None)
    for _ in range(5):
        pool.submit(lambda: done.release())
    grow(simulation, done, 5)
    hang.set()


def test_when_all_hang_that_is_told_and_the_rest_waits(pool, simulation, caplog):
    hang, done, begun = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)

    def stuck() -> None:
        begun.release()
        hang.wait(PATIENCE_S)

    for _ in range(3):
        pool.submit(stuck)
    grow(simulation, begun, 3)
    pool.submit(lambda: done.release())
    simulation.run(5 * GROW_MS)
    assert pool.waiting == 1
    assert "all 3 threads test are busy or hang, 1 tasks wait" in caplog.text
    hang.set()
    assert done.acquire(timeout=PATIENCE_S)


def test_what_fails_harms_nobody(pool, caplog):
    done = threading.Semaphore(0)

    def fail() -> None:
        raise SystemExit

    pool.submit(fail)
    pool.submit(lambda: done.release())
    assert done.acquire(timeout=PATIENCE_S)
    assert "a task of test failed" in caplog.text


def test_nothing_is_begun_after_closing(pool, simulation):
    pool.close()
    pool.submit(lambda: pytest.fail("it was begun"))
    simulation.run(5 * GROW_MS)
    assert pool.waiting == 0

"""Messages that a pull left for the next one."""

from mqmesh.roles.gateway.consuming import KEPT_MS, PullCache, PulledRun
from mqmesh.testing.clock import ManualClock

KEY = ("broker-a", "orders", 0, "TAG", "*")


def run(first: int = 5, size: int = 10, came_ms: int = 0) -> PulledRun:
    return PulledRun(first, first + 3, [first], [], size, (0, 100), came_ms)


def test_a_run_is_found_by_the_offsets_that_it_has():
    cache = PullCache(100, ManualClock().monotonic_ms)
    cache.keep(KEY, run(came_ms=ManualClock().monotonic_ms()))
    assert [cache.find(KEY, offset) is not None for offset in (4, 5, 7, 8)] == [
        *(False, True, True, False),
    ]
    assert cache.find(("broker-a", "orders", 1, "TAG", "*"), 5) is None


def test_what_nobody_took_for_long_is_asked_for_again():
    clock = ManualClock()
    cache = PullCache(100, clock.monotonic_ms)
    cache.keep(KEY, run(came_ms=clock.monotonic_ms()))
    clock.advance(KEPT_MS)
    assert cache.find(KEY, 5) is not None
    clock.advance(1)
    assert cache.find(KEY, 5) is None
    assert cache.held_bytes == 0


def test_the_oldest_go_when_there_is_no_room_and_those_of_a_broker_with_it():
    clock = ManualClock()
    cache = PullCache(25, clock.monotonic_ms)
    keys = [("broker-a", "orders", queue, "TAG", "*") for queue in range(3)]
    for key in keys:
        cache.keep(key, run(came_ms=clock.monotonic_ms()))
    assert [cache.find(key, 5) is not None for key in keys] == [False, True, True]
    cache.keep(keys[1], run(9, came_ms=clock.monotonic_ms()))
    assert cache.find(keys[1], 5) is None
    assert cache.held_bytes == 20
    cache.drop_broker("broker-a")
    assert cache.held_bytes == 0

"""The network that tests of clients move by hand."""

from __future__ import annotations

import time

from harness.simulated_network import SimulatedNetwork


def test_no_time_passes_for_who_only_wants_a_processor():
    network = SimulatedNetwork()
    begin_ms = network.clock.monotonic_ms()

    def work() -> None:
        until_s = time.thread_time() + 0.1
        while time.thread_time() < until_s:
            pass

    network.call(work)
    assert network.clock.monotonic_ms() - begin_ms < 10

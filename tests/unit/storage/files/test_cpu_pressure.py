"""Who waits for a processor is counted by the system, or seen by the work itself."""

from __future__ import annotations

import types

import pytest

from mqmesh.storage.files import cpu_pressure
from mqmesh.storage.files.cpu_pressure import CpuPressure, waited_us


class Machine:
    """Clocks and counter of a machine."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.computed_s = 5.0
        self.waited_us: int | None = 1_000

    def work(self, seconds: float, *, computing: float, others_wait: float = 0) -> None:
        self.now_s += seconds
        self.computed_s += computing
        if self.waited_us is not None:
            self.waited_us += int(others_wait * 1e6)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    clocks = types.SimpleNamespace(
        perf_counter=lambda: machine.now_s, process_time=lambda: machine.computed_s
    )
    monkeypatch.setattr(cpu_pressure, "time", clocks)
    monkeypatch.setattr(cpu_pressure, "waited_us", lambda: machine.waited_us)
    return machine


@pytest.mark.parametrize(
    ("computing", "others_wait", "is_crowded"),
    [(0.05, 0, False), (0.05, 0.009, False), (0.05, 0.02, True), (0.03, 0, True)],
)
def test_a_machine_is_crowded_where_somebody_waits(machine, computing, others_wait, is_crowded):
    pressure = CpuPressure()
    machine.work(0.05, computing=computing, others_wait=others_wait)
    took_ms, was_crowded = pressure.end()
    assert was_crowded is is_crowded
    assert took_ms in (50, 51)


@pytest.mark.parametrize(("computing", "is_crowded"), [(0.05, False), (0.03, True)])
def test_without_a_counter_the_work_s_own_waiting_tells(machine, computing, is_crowded):
    machine.waited_us = None
    pressure = CpuPressure()
    machine.work(0.05, computing=computing)
    assert pressure.end()[1] is is_crowded


def test_the_counter_is_read_as_linux_writes_it(monkeypatch, tmp_path):
    path = tmp_path / "cpu"
    monkeypatch.setattr(cpu_pressure, "_PRESSURE", path)
    assert waited_us() is None
    path.write_text(
        "some avg10=47.47 avg60=42.72 avg300=22.01 total=10803131685\n"
        "full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    )
    assert waited_us() == 10_803_131_685
    path.write_text("")
    assert waited_us() is None

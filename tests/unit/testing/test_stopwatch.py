"""Seconds without those that a busy machine took."""

import pytest
from harness import stopwatch


@pytest.fixture
def machine(monkeypatch):
    """Seconds that went by, and those that somebody waited for a processor."""
    now = {"time": 100.0, "stalled": 7.0}
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now["time"])
    monkeypatch.setattr(stopwatch, "_stalled_s", lambda: now["stalled"])
    return now


@pytest.mark.parametrize(
    ("stalled_s", "seconds"),
    [
        pytest.param(0.0, 10.0, id="a quiet machine: all counts"),
        pytest.param(3.0, 7.0, id="what was lost to others does not count"),
        pytest.param(19.0, 2.0, id="a fifth counts always"),
    ],
)
def test_what_others_took_does_not_count(machine, stalled_s, seconds):
    watch = stopwatch.Stopwatch()
    machine["time"] += 10.0
    machine["stalled"] += stalled_s
    assert watch.seconds == pytest.approx(seconds)


def test_a_kernel_that_does_not_tell_lets_all_count(tmp_path):
    assert stopwatch._total_us(str(tmp_path / "none")) == 0
    (tmp_path / "odd").write_text("some\n")
    assert stopwatch._total_us(str(tmp_path / "odd")) == 0
    (tmp_path / "cpu").write_text("some avg10=1.46 avg60=6.58 total=9222737\nfull total=1\n")
    assert stopwatch._total_us(str(tmp_path / "cpu")) == 9222737

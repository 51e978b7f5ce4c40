"""Which segments may go, how ages are measured, when writes are refused."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.errors import DiskFull
from mqmesh.storage.commitlog.retention import (
    HOUR_MS,
    AgeClock,
    SealedFile,
    Verdict,
    WriteGate,
    count_older,
    files_to_delete,
    hours_of,
)
from mqmesh.storage.files.disk_space import Space, system_space
from mqmesh.storage.interface import StoreConfig

NOW = 1_600_000_000_000
DAY_MS = 24 * HOUR_MS
RESERVED_MS = 72 * HOUR_MS
CONFIG = StoreConfig()
FORCED = StoreConfig(clean_file_forcibly_enable=True)


def aged(*hours: float) -> list[SealedFile]:
    """Files of 10 bytes that were last written so many hours ago."""
    return [SealedFile(10, int(NOW - hour * HOUR_MS)) for hour in hours]


def used(percent: float) -> Space:
    return Space(int(percent * 10), 1000 - int(percent * 10))


def decide(files, *, percent=50.0, hour=12, config=CONFIG, now_ms=NOW):
    return files_to_delete(files, used(percent), now_ms=now_ms, hour=hour, config=config)


@pytest.mark.parametrize(
    ("percent", "hour", "count"),
    [(50, 12, 0), (50, 4, 2), (74.9, 12, 0), (75, 12, 2), (84.9, 12, 2)],
)
def test_expired_files_go_at_their_hour_or_when_room_is_scarce(percent, hour, count):
    verdict = decide(aged(100, 72, 71.9, 1), percent=percent, hour=hour)
    assert verdict.count == count
    assert ("file_reserved_time" in verdict.reason) == bool(count)


def test_past_the_forced_mark_age_does_not_count():
    # 860 of 1000 used, 10 a file: two of them bring it below 850.
    verdict = decide(aged(2, 1, 1, 1), percent=86, config=FORCED)
    assert (verdict.count, verdict.forced) == (2, True)
    assert "86.0 %" in verdict.reason
    assert "disk_space_clean_forcibly_ratio = 85" in verdict.reason


def test_by_force_no_more_go_than_there_are():
    assert decide(aged(2, 1), percent=99, config=FORCED).count == 2


def test_what_has_expired_is_not_removed_by_force():
    assert not decide(aged(100, 90, 1, 1), percent=86, config=FORCED).forced
    assert decide(aged(100, 2, 1, 1), percent=86, config=FORCED).forced


@pytest.mark.parametrize("percent", [85, 90, 99, 100])
def test_by_default_nothing_goes_before_its_time(percent):
    assert decide(aged(71.9, 2, 1), percent=percent, hour=4) == Verdict(0)
    verdict = decide(aged(100, 1), percent=percent)
    assert (verdict.count, verdict.forced) == (1, False)


@pytest.mark.parametrize(("percent", "config"), [(50, CONFIG), (99, CONFIG), (99, FORCED)])
def test_a_pass_is_bounded(percent, config):
    assert decide(aged(*[1000] * 50), percent=percent, hour=4, config=config).count == 10


def test_a_file_is_as_old_as_those_that_follow_it():
    # The second was written while the clock was a year ahead.
    assert count_older(aged(100, -8760, 90, 1), NOW - RESERVED_MS) == 3
    assert count_older(aged(-8760, 1), NOW - RESERVED_MS) == 0
    assert count_older([], NOW) == 0


def test_hours():
    assert hours_of("04") == {4}
    assert hours_of("04;16;23") == {4, 16, 23}


@pytest.mark.parametrize("text", ["4", "24", "04;", "", "04,05", "aa"])
def test_bad_hours_are_refused(text):
    with pytest.raises(msgspec.ValidationError, match="delete_when"):
        msgspec.convert({"delete_when": text}, StoreConfig)


def ages(last_alive_ms: int | None = None) -> AgeClock:
    return AgeClock(1000, NOW, reserved_ms=RESERVED_MS, last_alive_ms=last_alive_ms)


def test_time_that_passes_counts():
    clock = ages()
    assert clock.look(1000 + DAY_MS, NOW + DAY_MS) == NOW + DAY_MS
    assert clock.jumps == 0


def test_a_leap_forward_makes_nothing_older_until_all_is_old_by_any_clock():
    clock = ages()
    assert clock.look(2000, NOW + 1000 + 365 * DAY_MS) == NOW + 1000
    assert clock.jumps == 1
    almost = RESERVED_MS - 1
    assert clock.look(2000 + almost, NOW + 1000 + 365 * DAY_MS + almost) == NOW + 1000 + almost
    wall_ms = NOW + 1000 + 365 * DAY_MS + RESERVED_MS
    assert clock.look(2000 + RESERVED_MS, wall_ms) == wall_ms


def test_a_leap_that_is_taken_back_leaves_nothing():
    clock = ages()
    clock.look(2000, NOW + 1000 + DAY_MS)
    assert clock.look(3000, NOW + 2000) == NOW + 2000
    assert clock.jumps == 2


def test_a_leap_back_makes_files_younger():
    clock = ages()
    assert clock.look(2000, NOW - DAY_MS) == NOW - DAY_MS


def test_small_corrections_are_no_leaps():
    clock = ages()
    for step in range(1, 100):
        clock.look(1000 + step * 1000, NOW + step * 1001)
    assert clock.jumps == 0


def test_time_without_a_broker_makes_nothing_older():
    rested = 30 * DAY_MS
    clock = ages(NOW - rested)
    assert clock.look(2000, NOW + 1000) == NOW + 1000 - rested
    assert clock.look(1000 + RESERVED_MS, NOW + RESERVED_MS) == NOW + RESERVED_MS


@pytest.mark.parametrize("last_alive_ms", [NOW - 1000, NOW + DAY_MS])
def test_a_short_rest_and_one_of_the_future_do_not_matter(last_alive_ms):
    assert ages(last_alive_ms).look(2000, NOW + 1000) == NOW + 1000


def test_the_gate_closes_at_the_mark_and_opens_below_it_by_itself():
    gate = WriteGate(90)
    assert not gate.look(used(89.9))
    gate.check()
    assert gate.look(used(90))
    with pytest.raises(DiskFull, match=r"90\.0 % full.*from 90 % on.*disk_space_warning_level"):
        gate.check()
    assert not gate.look(used(89.5))
    with pytest.raises(DiskFull, match=r"89\.5 %"):
        gate.check()
    assert gate.look(used(88.9))
    gate.check()


def test_the_systems_answer_is_that_of_df(tmp_path):
    space = system_space(tmp_path)
    assert 0 < space.used_percent <= 100
    assert Space(0, 0).used_percent == 0

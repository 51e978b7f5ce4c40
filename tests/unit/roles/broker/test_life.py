"""Lives of a broker are counted, whatever the clock does."""

import pytest

from mqmesh.errors import CorruptRecord
from mqmesh.roles.broker.life import MAX_LIFE, dump_life, first_number, next_life

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


def test_each_life_begins_above_the_one_before_also_when_the_clock_was_set_back() -> None:
    lives = [next_life(None, NOW_MS)]
    for wall_ms in (NOW_MS, NOW_MS - HOUR_MS, 0, -HOUR_MS, NOW_MS - 1, NOW_MS + HOUR_MS):
        lives.append(next_life(dump_life(lives[-1]), wall_ms))
    assert lives == sorted(set(lives))
    assert lives[0] == NOW_MS // 1_000
    assert lives[1:6] == [lives[0] + number for number in range(1, 6)]


def test_a_count_that_was_lost_or_restored_goes_on_from_the_clock() -> None:
    old = next_life(None, NOW_MS)
    later = next_life(dump_life(old), NOW_MS + HOUR_MS)
    assert next_life(None, NOW_MS + HOUR_MS + 1_000) > later
    assert next_life(dump_life(old), NOW_MS + HOUR_MS + 1_000) > later


def test_a_clock_from_the_far_future_uses_up_no_lives() -> None:
    assert next_life(dump_life(7), 4_000_000_000_000) == 8


def test_numbers_of_a_life_are_above_those_of_the_one_before_and_fit_the_wire() -> None:
    assert first_number(8) - first_number(7) == 2**32
    assert first_number(MAX_LIFE + 1) < 2**63


@pytest.mark.parametrize(
    "document", [b"", b"{}", b'{"version":2,"life":1}', b'{"version":1,"life":-1}', b"\xff"]
)
def test_a_document_that_says_nothing_is_not_passed_over(document: bytes) -> None:
    with pytest.raises(CorruptRecord, match="life"):
        next_life(document, NOW_MS)
    with pytest.raises(CorruptRecord, match="lives"):
        next_life(dump_life(MAX_LIFE), NOW_MS)

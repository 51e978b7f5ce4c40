from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.sdk.producer.queue_selector import queue_index


# What is here was given to users' data: a change would send keys to other queues.
@pytest.mark.parametrize(
    ("key", "count", "index"),
    [("N14228", 4, 2), ("N14228", 7, 2), ("ü", 16, 5), ("order-1", 8, 7), ("", 5, 0)],
)
def test_the_queue_of_a_key_never_changes(key: str, count: int, index: int) -> None:
    assert queue_index(key, count) == index


@given(st.text(max_size=50), st.integers(1, 100_000))
def test_every_key_has_a_queue(key: str, count: int) -> None:
    assert 0 <= queue_index(key, count) < count


def test_keys_spread_evenly() -> None:
    counts = Counter(queue_index(f"N{number}", 8) for number in range(8_000))
    assert all(800 < count < 1_200 for count in counts.values())

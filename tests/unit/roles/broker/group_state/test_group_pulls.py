"""What groups were handed out, and how quickly."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from mqmesh.roles.broker.group_state.group_pulls import GroupPulls


def test_the_last_pull_of_a_queue_counts():
    pulls = GroupPulls()
    assert pulls.pull_offset("g", "t", 0) == -1
    pulls.note("g", "t", 0, 10, 10, 0, 0)
    pulls.note("g", "t", 0, 4, 2, 0, 0)  # it went back
    pulls.note("g", "t", 1, 7, 7, 0, 0)
    assert (pulls.pull_offset("g", "t", 0), pulls.pull_offset("g", "t", 1)) == (4, 7)
    assert pulls.pull_offset("other", "t", 0) == -1


def test_the_rate_is_that_of_the_last_whole_seconds():
    pulls = GroupPulls()
    for second in range(20):
        pulls.note("g", "t", 0, second, 100, 0, second * 1_000)
    assert pulls.rate("g", 20_000) == 100.0
    assert pulls.rate("g", 25_999) == 50.0
    assert pulls.rate("g", 60_000) == 0.0
    assert pulls.rate("unknown", 0) == 0.0


def test_a_group_that_began_a_moment_ago_has_a_rate_too():
    pulls = GroupPulls()
    pulls.note("g", "t", 0, 5, 500, 0, 1_200)
    assert pulls.rate("g", 1_300) == 500.0
    assert pulls.rate("g", 2_000) == 500.0
    assert pulls.rate("g", 4_000) == 500 / 3


@given(
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 100)), min_size=1, max_size=50),
    st.integers(0, 30_000),
)
def test_the_rate_is_what_a_plain_count_gives(steps, wait_ms):
    pulls, now_ms, seen = GroupPulls(), 0, []
    for pause_ms, count in steps:
        now_ms += pause_ms
        pulls.note("g", "t", 0, 0, count, 0, now_ms)
        seen.append((now_ms // 1_000, count))
    now_s = (now_ms + wait_ms) // 1_000
    whole = min(now_s - seen[0][0], 10)
    counted = sum(count for at, count in seen if now_s - whole <= at < now_s)
    wanted = counted / whole if whole else sum(count for at, count in seen if at == now_s)
    assert pulls.rate("g", now_ms + wait_ms) == wanted


def test_a_group_is_active_for_a_minute():
    pulls = GroupPulls()
    pulls.note("g", "t", 0, 1, 1, 0, 5_000)
    assert pulls.is_active("g", 64_999)
    assert not pulls.is_active("g", 65_000)
    assert not pulls.is_active("unknown", 0)


def test_memory_has_an_end_and_the_oldest_group_pays():
    pulls = GroupPulls(most=3)
    for group in "abcd":
        pulls.note(group, "t", 0, 1, 1, 0, 0)
    assert pulls.pull_offset("a", "t", 0) == -1
    assert pulls.pull_offset("d", "t", 0) == 1
    pulls.forget("b")
    pulls.forget("b")
    pulls.note("e", "t", 0, 1, 1, 0, 0)
    assert pulls.pull_offset("c", "t", 0) == 1


def test_a_topic_is_forgotten():
    pulls = GroupPulls()
    pulls.note("g", "t", 0, 1, 1, 0, 0)
    pulls.note("g", "u", 0, 1, 1, 0, 0)
    pulls.forget_topic("t")
    assert (pulls.pull_offset("g", "t", 0), pulls.pull_offset("g", "u", 0)) == (-1, 1)


def test_what_a_group_got_of_a_topic_is_added_up_until_the_topic_goes():
    pulls = GroupPulls()
    for group, topic, count in (("g", "t", 3), ("g", "t", 4), ("g", "u", 5), ("h", "t", 6)):
        pulls.note(group, topic, 0, count, count, 100 * count, 0)
    pulls.note("passed over", "t", 0, 9, 0, 0, 0)
    told = {(topic, group): one for topic, group, one in pulls.handed_out()}
    assert {key: (one.messages, one.stored_bytes) for key, one in told.items()} == {
        ("t", "g"): (7, 700),
        ("u", "g"): (5, 500),
        ("t", "h"): (6, 600),
    }
    pulls.forget_topic("t")
    assert [(topic, group) for topic, group, _ in pulls.handed_out()] == [("u", "g")]


def test_a_pair_of_topic_and_group_takes_about_a_kib_at_most():
    topics = [f"topic-{number}" for number in range(1_000)]
    groups = [f"group-{number}" for number in range(1_000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        pulls = GroupPulls()
        for number, (group, topic) in enumerate(zip(groups, topics, strict=True), 1_000):
            for queue_id in range(4):
                pulls.note(group, topic, queue_id, number * 4_000, number, number * 1_000, number)
        for _, _, one in pulls.handed_out():
            one.before.minute, one.before.earlier_minute = one.messages - 300, one.messages - 600
            one.before.midnight = one.messages - 900
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 40 bytes of it come and go with what other tests did to the classes.
    assert after - before <= 1_100 * 1_000

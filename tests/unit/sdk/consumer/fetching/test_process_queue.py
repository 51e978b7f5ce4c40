"""How far a queue may be committed, and when it is pulled no further."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqmesh.sdk.consumer.fetching.process_queue import (
    DONE,
    OPEN,
    PARKED,
    SPAN_TARGET,
    FlowLimits,
    ProcessQueue,
)

LIMITS = FlowLimits()


class FakeBatch:
    """All that a process queue looks at."""

    def __init__(self, first: int, count: int, offsets: list[int] | None = None):
        self.first = first
        self.end = first + count
        self.offsets = offsets


def filled(*counts: int, start: int = 0, limits: FlowLimits = LIMITS):
    queue = ProcessQueue(start, limits)
    spans = []
    for count in counts:
        first = queue.next_offset
        spans.append(queue.add([FakeBatch(first, count)], first + count, count * 100))
    return queue, spans


def test_an_empty_queue_commits_where_it_begins():
    assert ProcessQueue(7, LIMITS).commit_offset() == 7


def test_nothing_is_committed_before_the_first_message_is_done():
    queue, _ = filled(10, start=100)
    assert queue.commit_offset() == 100


def test_what_is_done_in_order_is_committed():
    queue, (span,) = filled(10, start=100)
    span.mark(100, 103, DONE)
    assert queue.commit_offset() == 104


def test_a_gap_holds_the_commit_back():
    queue, (span,) = filled(10)
    span.mark(1, 9, DONE)
    assert queue.commit_offset() == 0
    span.mark(0, 0, DONE)
    assert queue.commit_offset() == 10


def test_the_commit_reaches_over_several_spans():
    queue, (first, second) = filled(2_000, 2_000)
    assert first is not second
    second.mark(2_000, 3_999, DONE)
    first.mark(0, 1_998, DONE)
    assert queue.commit_offset() == 1_999
    first.mark(1_999, 1_999, DONE)
    assert queue.commit_offset() == 4_000


def test_small_arrivals_share_a_span():
    queue, spans = filled(*[1] * SPAN_TARGET, 1)
    assert len({id(span) for span in spans[:SPAN_TARGET]}) == 1
    assert spans[-1] is not spans[0]
    spans[0].mark(0, SPAN_TARGET - 1, DONE)
    assert queue.commit_offset() == SPAN_TARGET


def test_messages_that_a_filter_left_out_count_as_done():
    queue = ProcessQueue(0, LIMITS)
    span = queue.add([FakeBatch(2, 1), FakeBatch(5, 1)], 10, 100)
    assert queue.commit_offset() == 2
    assert queue.held() == (2, 20)
    span.mark(2, 2, DONE)
    assert queue.commit_offset() == 5
    span.mark(5, 5, DONE)
    assert queue.commit_offset() == 10


def test_passing_over_everything_moves_the_commit():
    queue = ProcessQueue(0, LIMITS)
    assert queue.add([], 500, 0) is None
    assert (queue.next_offset, queue.commit_offset()) == (500, 500)


def test_a_parked_message_holds_the_commit_but_not_the_span():
    limits = FlowLimits(messages=100, span=50)
    queue, (span,) = filled(60, limits=limits)
    assert not queue.has_room()
    span.mark(0, 0, PARKED)
    span.mark(1, 59, DONE)
    assert queue.commit_offset() == 0
    assert queue.has_room()
    span.mark(0, 0, OPEN)
    assert not queue.has_room()


def test_many_parked_messages_stop_the_pulling():
    queue, (span,) = filled(100, limits=FlowLimits(messages=100))
    span.mark(0, 99, PARKED)
    assert not queue.has_room()


def test_a_parked_message_does_not_keep_what_came_after_it():
    queue, (first, *others) = filled(*[2_000] * 50)
    first.mark(0, 0, PARKED)
    first.mark(1, 1_999, DONE)
    for span in others:
        span.mark(span.base, span.end - 1, DONE)
    assert queue.held()[0] == 1
    assert queue.commit_offset() == 0
    assert queue._unfinished == [first]


def test_each_limit_stops_the_pulling():
    assert filled(9, limits=FlowLimits(messages=10))[0].has_room()
    assert not filled(10, limits=FlowLimits(messages=10))[0].has_room()
    assert filled(9, limits=FlowLimits(size_bytes=1_000))[0].has_room()
    assert not filled(10, limits=FlowLimits(size_bytes=1_000))[0].has_room()
    assert filled(9, limits=FlowLimits(span=10))[0].has_room()
    assert not filled(10, limits=FlowLimits(span=10))[0].has_room()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 319), st.sampled_from([DONE, DONE, PARKED, OPEN]))),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_room_is_what_a_count_of_all_states_says(counts, steps, most, most_span):
    queue, spans = filled(*counts, limits=FlowLimits(messages=most, span=most_span))
    for offset, state in steps:
        for span in spans:
            if span.base <= offset < span.end:
                span.mark(offset, offset, state)
    # Small arrivals share a span.
    states = b"".join(span.states for span in dict.fromkeys(spans))
    held = len(states) - states.count(DONE)
    spread = len(states) - (states.find(OPEN) if OPEN in states else len(states))
    assert queue.has_room() == (held < most and spread < most_span)
    assert queue.held()[0] == held


def test_room_comes_back_as_messages_are_done():
    queue, (span,) = filled(1_500)
    assert not queue.has_room()
    span.mark(0, 500, DONE)
    assert queue.held() == (999, 99_900)
    assert queue.has_room()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 319), st.sampled_from([DONE, DONE, PARKED, OPEN]))),
)
def test_the_commit_is_the_first_offset_not_done(counts, steps):
    queue, spans = filled(*counts)
    span_of = {offset: span for span in spans for offset in range(span.base, span.end)}
    state = dict.fromkeys(range(sum(counts)), OPEN)
    for offset, to in steps:
        if offset in state and state[offset] != DONE:  # done is for ever
            state[offset] = to
            span_of[offset].mark(offset, offset, to)
            queue.held()
    waiting = [offset for offset, now in state.items() if now != DONE]
    assert queue.commit_offset() == min(waiting, default=sum(counts))
    assert queue.held()[0] == len(waiting)


def test_what_a_filter_left_out_holds_nothing_back():
    queue = ProcessQueue(0, LIMITS)
    batch = FakeBatch(2, 8, offsets=[3, 4, 8])
    span = queue.add([batch, FakeBatch(12, 1)], 20, 100)
    assert queue.held()[0] == 4
    assert queue.commit_offset() == 3
    span.mark(3, 8, DONE)
    assert queue.commit_offset() == 12
    span.mark(12, 12, DONE)
    assert queue.commit_offset() == 20

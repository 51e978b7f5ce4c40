"""One queue's pulls: what is taken, what is refused, and what happens next."""

from __future__ import annotations

import pytest

from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    encode_batch,
    read_header,
    read_meta,
    read_payload,
    stamp,
)
from mqmesh.batch.sparse_batch import cut_batch
from mqmesh.errors import BrokerError, EndpointUnreachable, NoPermission, SystemBusy, TopicNotFound
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.fetching.pull_loop import (
    BACKOFF_MAX_MS,
    BACKOFF_MS,
    BEYOND_END_RETRY_MS,
    CORRUPT_TRIES,
    STOPPED_RETRY_MS,
    PullCounters,
    PullLoop,
    PullMeter,
    PullSettings,
)
from mqmesh.sdk.consumer.fetching.pulled_batch import PullSource
from mqmesh.sdk.consumer.fetching.replica_choice import ADVICE_MS
from mqmesh.testing.clock import ManualClock

QUEUE = MessageQueue("t", "broker-a", 3)
ONLY_A = PullSource("broker-a", "127.0.0.1:1", frozenset("A"), filtered=True)


def stored_batch(base: int, count: int, *, queue_id: int = 3, tags: str = "") -> bytes:
    """A batch as a broker would send it; its bodies are the queue offsets."""
    batch = encode_batch(
        [
            Message("t", b"%d" % offset, tag=tags[offset - base] if tags else None)
            for offset in range(base, base + count)
        ],
        topic="t",
        queue_id=queue_id,
        producer_id=1,
        first_sequence=base,
        born_timestamp=0,
    )
    part = stamp(
        read_header(batch),
        commitlog_offset=base * 1_000,
        base_queue_offset=base,
        store_timestamp=5,
        epoch=0,
        store_id=1,
    )
    return part + batch[BROKER_PART_SIZE:]


class FakeNetwork:
    """Keeps requests and timers until the test answers them."""

    def __init__(self):
        self.requests = []
        self.timers = []

    def request(self, broker_name, code, on_done, *, header, timeout_ms):
        assert (broker_name, code) == ("broker-a", RequestCode.PULL_MESSAGE)
        self.requests.append((decode_header(PullRequest, header), on_done))

    def call_later(self, delay_ms, callback):
        self.timers.append((delay_ms, callback))

    def answer(
        self,
        status=PullStatus.FOUND,
        *batches,
        next_offset=0,
        low=0,
        high=1_000,
        suggest=0,
        epoch=0,
    ):
        _, on_done = self.requests.pop(0)
        header = PullResponse(int(status), next_offset, low, high, suggest, epoch)
        body = memoryview(b"".join(batches))
        on_done(Command(0, 0, 1, memoryview(encode_header(header)), body))

    def fail(self, error):
        self.requests.pop(0)[1](error)

    def run_timer(self):
        delay_ms, callback = self.timers.pop(0)
        callback()
        return delay_ms


class FakeReplicas(FakeNetwork):
    """Followers: who was asked stands beside the request."""

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.asked = []

    def request(self, broker_name, broker_id, code, on_done, *, header, timeout_ms):
        self.asked.append(broker_id)
        super().request(broker_name, code, on_done, header=header, timeout_ms=timeout_ms)


class FakeSink:
    def __init__(self, start):
        self.next_offset = start
        self.messages = []
        self.room = True
        self.moves = []

    def has_room(self):
        return self.room

    def take(self, batches, next_offset, size_bytes):
        assert next_offset > self.next_offset
        for batch in batches:
            messages = batch.decode()
            assert all(batch.first <= m.queue_offset < batch.end for m in messages)
            self.messages += messages
        self.next_offset = next_offset

    def move(self, offset, *, by_admin=False):
        self.by_admin = by_admin
        self.moves.append(offset)
        self.next_offset = offset

    @property
    def offsets(self):
        assert all(m.body == b"%d" % m.queue_offset for m in self.messages)
        return [m.queue_offset for m in self.messages]


class Case:
    def __init__(self, start=0, *, settings=None, **options):
        self.network = FakeNetwork()
        self.sink = FakeSink(start)
        self.counters = PullCounters()
        self.loop = PullLoop(
            QUEUE,
            "g",
            self.sink,
            self.network,
            settings or PullSettings(),
            self.counters,
            **options,
        )
        self.loop.resume()

    def asked(self):
        ((request, _),) = self.network.requests
        return request


def test_a_pull_says_what_is_wanted():
    request = Case(start=17, selector=MessageSelector.by_tag("A"), source=ONLY_A).asked()
    assert request == PullRequest("g", "t", 3, 17, 1024 * 1024, 15_000, "A", apart=True)


def test_whole_batches_are_taken_and_the_next_pull_follows_at_once():
    case = Case()
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3), stored_batch(3, 2))
    assert case.sink.offsets == [0, 1, 2, 3, 4]
    assert case.asked().queue_offset == 5
    message = case.sink.messages[3]
    assert (message.broker_name, message.queue_id, message.ordinal) == ("broker-a", 3, 0)


def test_only_one_pull_is_under_way():
    case = Case()
    case.loop.resume()
    case.loop.resume()
    case.asked()


def test_what_stands_before_the_offset_is_left_out():
    case = Case(start=2)
    case.network.answer(PullStatus.FOUND, stored_batch(0, 5))
    assert case.sink.offsets == [2, 3, 4]


def test_a_batch_that_was_received_before_is_left_out():
    case = Case(start=5)
    case.network.answer(PullStatus.FOUND, stored_batch(0, 5), stored_batch(5, 1))
    assert case.sink.offsets == [5]


def test_an_empty_answer_is_followed_by_the_next_pull():
    case = Case(start=4)
    case.network.answer(PullStatus.NO_NEW_MSG, next_offset=4)
    assert case.asked().queue_offset == 4


NO_PROGRESS = {
    "nothing new": (PullStatus.NO_NEW_MSG, {"next_offset": 4}),
    "nothing matched": (PullStatus.NO_MATCHED_MSG, {"next_offset": 4}),
    "nothing matched, and back": (PullStatus.NO_MATCHED_MSG, {"next_offset": 1}),
    "moved to where it is": (PullStatus.OFFSET_RESET, {"next_offset": 4}),
    "moved back": (PullStatus.OFFSET_RESET, {"next_offset": 1}),
    "cut": (PullStatus.OFFSET_CUT, {"next_offset": 1}),
    "gone": (PullStatus.OFFSET_ILLEGAL, {"low": 10}),
    "behind the end": (PullStatus.OFFSET_ILLEGAL, {"high": 2}),
    "a message from elsewhere": (PullStatus.FOUND, {}),
}


def answers_in(case, clock, duration_ms, answer):
    """How many answers come in a time to one who answers at once."""
    count, end_ms = 0, clock.monotonic_ms() + duration_ms
    while clock.monotonic_ms() < end_ms and count < 1_000:
        answer()
        count += 1
        if not case.network.requests:
            clock.advance(case.network.timers[0][0])
            case.network.run_timer()
    return count


@pytest.mark.parametrize("kind", NO_PROGRESS)
def test_answers_at_once_that_bring_nothing_are_not_asked_for_at_once(kind):
    status, told = NO_PROGRESS[kind]
    clock = ManualClock()
    case = Case(start=4, meter=PullMeter(clock.monotonic_ms))

    def answer():
        # A queue whose beginning goes away as fast as it is followed brings nothing, too.
        more = {"low": case.sink.next_offset + 1} if "low" in told else told
        case.network.answer(status, **more)

    assert answers_in(case, clock, 4_000, answer) <= 13
    assert clock.monotonic_ms() >= 4_000
    case.network.requests.clear()
    case.loop.reset(4)  # whatever it was, a message ends it
    case.network.answer(PullStatus.FOUND, stored_batch(4, 1), next_offset=5)
    case.network.answer(PullStatus.NO_NEW_MSG, next_offset=5)
    assert len(case.network.requests) == 1


def test_a_pull_that_the_broker_held_is_followed_by_the_next_at_once():
    clock = ManualClock()
    case = Case(start=4, meter=PullMeter(clock.monotonic_ms))
    for _ in range(20):
        clock.advance(15_000)
        case.network.answer(PullStatus.NO_NEW_MSG, next_offset=4)
    assert case.asked().queue_offset == 4
    assert case.network.timers == []


def test_a_pull_that_is_not_to_be_held_is_repeated_ten_times_a_second():
    clock = ManualClock()
    settings = PullSettings(suspend_ms=0)
    case = Case(start=4, settings=settings, meter=PullMeter(clock.monotonic_ms))

    def answer():
        case.network.answer(PullStatus.NO_NEW_MSG, next_offset=4)

    assert 40 <= answers_in(case, clock, 4_000, answer) <= 46


def test_a_filter_may_pass_over_messages():
    case = Case(source=ONLY_A, selector=MessageSelector.by_tag("A"))
    case.network.answer(PullStatus.NO_MATCHED_MSG, next_offset=40)
    assert case.asked().queue_offset == 40


def test_tags_are_compared_again():
    case = Case(source=ONLY_A, selector=MessageSelector.by_tag("A"))
    case.network.answer(PullStatus.FOUND, stored_batch(10, 4, tags="ABAB"), next_offset=20)
    assert case.sink.offsets == [10, 12]
    assert case.asked().queue_offset == 20


def cut(batch, *wanted):
    """The batch as a broker sends it to whom only these positions are of interest."""
    header = read_header(batch)
    selected = bytes(at in wanted for at in range(header.message_count))
    parts = read_meta(batch, header), read_payload(batch, header)
    return b"".join(cut_batch(header, *parts, selected))


def test_a_pull_says_in_which_language_something_is_wanted():
    selector = MessageSelector.by_sql("a > 5")
    request = Case(start=17, selector=selector).asked()
    assert (request.expression, request.expression_type) == ("a > 5", "SQL92")


def test_messages_may_be_left_out_of_batches():
    case = Case(start=12, source=PullSource("broker-a", filtered=True))
    case.network.answer(
        PullStatus.FOUND,
        cut(stored_batch(10, 6), 1, 3, 4),
        cut(stored_batch(20, 4), 0),
        next_offset=30,
    )
    assert case.sink.offsets == [13, 14, 20]
    assert case.counters.messages == 3
    assert case.asked().queue_offset == 30


def test_a_cut_batch_may_hold_nothing_new():
    case = Case(start=14, source=PullSource("broker-a", filtered=True))
    case.network.answer(PullStatus.FOUND, cut(stored_batch(10, 6), 1, 3), next_offset=16)
    assert case.sink.offsets == []
    assert case.asked().queue_offset == 16


def test_without_a_filter_nothing_may_be_left_out_of_a_batch():
    case = Case(start=10)
    case.network.answer(PullStatus.FOUND, cut(stored_batch(10, 6), 0, 5), next_offset=16)
    assert case.sink.offsets == []
    assert case.counters.failures == 1


def test_tags_of_a_cut_batch_are_compared_again():
    case = Case(source=ONLY_A, selector=MessageSelector.by_tag("A"))
    batch = cut(stored_batch(10, 6, tags="ABABBA"), 0, 1, 5)
    case.network.answer(PullStatus.FOUND, batch, next_offset=16)
    assert case.sink.offsets == [10, 15]


def test_without_room_nothing_is_pulled_until_there_is_some():
    case = Case()
    case.sink.room = False
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3))
    assert case.sink.offsets == [0, 1, 2]
    assert not case.network.requests
    assert case.loop.waiting_for_room
    case.sink.room = True
    case.loop.resume()
    assert case.asked().queue_offset == 3
    assert not case.loop.waiting_for_room


def test_a_worker_that_makes_room_while_it_is_looked_for_is_not_missed():
    case = Case()
    seen = []

    def has_room():
        seen.append(case.loop.waiting_for_room)  # what a worker would find now
        return False

    case.sink.has_room = has_room
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3))
    assert seen == [True]


def test_a_paused_queue_is_not_pulled():
    case = Case()
    case.loop.paused = True
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3))
    assert not case.network.requests
    case.loop.paused = False
    case.loop.resume()
    assert case.asked().queue_offset == 3


def test_failures_wait_longer_each_time_and_success_ends_that():
    case = Case()
    delays = []
    for _ in range(6):
        case.network.fail(EndpointUnreachable("gone"))
        assert not case.network.requests
        delays.append(case.network.run_timer())
    assert delays == [BACKOFF_MS, 200, 400, 800, BACKOFF_MAX_MS, BACKOFF_MAX_MS]
    case.network.answer(PullStatus.FOUND, stored_batch(0, 1))
    case.network.fail(BrokerError("no"))
    assert case.network.run_timer() == BACKOFF_MS
    assert case.counters.failures == 7


def test_a_queue_that_cannot_be_pulled_is_in_the_log_each_minute(caplog):
    clock = ManualClock()
    case = Case(meter=PullMeter(clock.monotonic_ms))
    for _ in range(121):
        case.network.fail(NoPermission("consumer group 'g' may not consume"))
        case.network.run_timer()
        clock.advance(1_000)
    lines = [text for text in caplog.messages if "t:broker-a:3 cannot be pulled" in text]
    assert len(lines) == 3


def test_the_brokers_wish_to_wait_is_granted():
    case = Case()
    case.network.fail(SystemBusy("full", retry_after_ms=3_000))
    assert case.network.run_timer() == 3_000


def test_a_dropped_loop_takes_nothing_more():
    case = Case()
    case.loop.drop()
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3))
    assert case.sink.messages == []
    assert not case.network.requests


def test_a_restart_forgets_the_pull_under_way():
    case = Case()
    case.sink.move(50)
    case.loop.restart()
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3))
    assert case.sink.messages == []
    assert case.asked().queue_offset == 50


def test_a_restart_forgets_the_wait_for_the_next_try():
    case = Case()
    case.network.fail(EndpointUnreachable("gone"))
    case.loop.restart()
    case.network.run_timer()
    case.asked()


# ---- Damage ---------------------------------------------------------------------------


def damaged(batch: bytes, at: int = 130) -> bytes:
    return batch[:at] + bytes((batch[at] ^ 0x55,)) + batch[at + 1 :]


def test_what_stands_before_damage_is_taken_and_the_rest_asked_for_again():
    case = Case()
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3), damaged(stored_batch(3, 3)))
    assert case.sink.offsets == [0, 1, 2]
    assert case.counters.corrupt_batches == 1
    case.network.run_timer()
    assert (case.asked().queue_offset, case.asked().verify) == (3, True)
    case.network.answer(PullStatus.FOUND, stored_batch(3, 3))
    assert case.sink.offsets == [0, 1, 2, 3, 4, 5]
    assert not case.asked().verify


def test_a_queue_goes_on_behind_damage_that_the_broker_passes(caplog):
    case = Case()
    case.network.answer(PullStatus.FOUND, damaged(stored_batch(0, 3)))
    case.network.run_timer()
    case.network.answer(PullStatus.MESSAGES_LOST, next_offset=3)
    assert "lost the messages from offset 0 on; going on at 3" in caplog.text
    case.network.answer(PullStatus.FOUND, stored_batch(3, 3))
    assert case.sink.offsets == [3, 4, 5]


@pytest.mark.parametrize("at", [10, 20, 60, 130])
def test_damage_is_seen_wherever_it_is(at):
    case = Case()
    case.network.answer(PullStatus.FOUND, damaged(stored_batch(0, 3), at))
    assert case.sink.messages == []
    assert case.counters.corrupt_batches == 1


def test_lasting_damage_stops_the_queue_and_skips_nothing():
    case = Case()
    for _ in range(CORRUPT_TRIES - 1):
        case.network.answer(PullStatus.FOUND, damaged(stored_batch(0, 3)), stored_batch(3, 3))
        assert case.network.run_timer() == BACKOFF_MS
        assert not case.loop.stopped
    case.network.answer(PullStatus.FOUND, damaged(stored_batch(0, 3)), stored_batch(3, 3))
    assert case.loop.stopped
    assert case.sink.messages == []
    assert case.network.run_timer() == STOPPED_RETRY_MS
    case.network.answer(PullStatus.FOUND, stored_batch(0, 3))  # repaired
    assert not case.loop.stopped
    assert case.sink.offsets == [0, 1, 2]


@pytest.mark.parametrize(
    "body",
    [
        [stored_batch(5, 3)],
        [stored_batch(0, 3), stored_batch(4, 3)],
        [stored_batch(0, 3, queue_id=4)],
        [],
    ],
)
def test_an_answer_that_does_not_fit_is_a_failure(body):
    case = Case()
    case.network.answer(PullStatus.FOUND, *body)
    assert case.counters.failures == 1
    assert all(offset < 3 for offset in case.sink.offsets)
    assert not case.network.requests
    assert case.network.run_timer() == BACKOFF_MS


def test_an_unreadable_header_is_a_failure():
    case = Case()
    case.network.requests.pop()[1](Command(0, 0, 1, memoryview(b"\xc1"), memoryview(b"")))
    assert case.counters.failures == 1
    assert case.network.run_timer() == BACKOFF_MS


# ---- Offsets that the broker does not hold --------------------------------------------


def test_below_the_first_message_it_goes_on_at_the_first():
    case = Case(start=5)
    case.network.answer(PullStatus.OFFSET_ILLEGAL, low=100, high=200)
    case.network.run_timer()
    assert case.sink.moves == [100]
    assert case.asked().queue_offset == 100
    assert case.counters.offsets_moved == 1


def test_behind_the_end_it_asks_again_and_then_goes_to_the_lowest_end_told():
    case = Case(start=500)
    for high in (120, 100):
        case.network.answer(PullStatus.OFFSET_ILLEGAL, low=10, high=high)
        assert case.sink.moves == []
        assert case.network.run_timer() == BEYOND_END_RETRY_MS
    case.network.answer(PullStatus.OFFSET_ILLEGAL, low=10, high=130)
    case.network.run_timer()
    assert case.sink.moves == [100]
    assert case.asked().queue_offset == 100


def test_an_end_that_was_short_for_a_moment_may_have_been_filled_with_other_messages():
    case = Case(start=500)
    case.network.answer(PullStatus.OFFSET_ILLEGAL, low=0, high=100)
    case.network.run_timer()
    case.network.answer(PullStatus.FOUND, stored_batch(500, 3))
    assert case.sink.messages == []
    case.network.run_timer()
    assert case.sink.moves == [100]
    assert case.asked().queue_offset == 100


# ---- Moved by an administrator -------------------------------------------------------------


def test_a_group_that_was_moved_goes_on_there_and_forgets_what_it_committed(caplog):
    told = []
    case = Case(90, on_reset=lambda: told.append("forget"))
    case.network.answer(PullStatus.OFFSET_RESET, next_offset=5)
    assert (case.sink.moves, case.sink.by_admin, told) == ([5], True, ["forget"])
    assert case.asked().queue_offset == 5
    assert "an administrator moved group g from offset 90 to 5" in caplog.text


def test_a_notice_moves_it_also_while_a_pull_waits_or_there_is_no_room():
    case = Case(90)
    case.loop.reset(5)
    assert [request.queue_offset for request, _ in case.network.requests] == [90, 5]
    case.network.answer(PullStatus.OFFSET_RESET, next_offset=7)  # of the pull of before
    assert case.sink.moves == [5]
    case.network.answer(PullStatus.FOUND, stored_batch(5, 2), next_offset=7)
    assert case.sink.offsets == [5, 6]
    full = Case(90)
    full.sink.room = False
    full.network.answer(PullStatus.NO_NEW_MSG, next_offset=90)
    assert full.loop.waiting_for_room
    full.sink.room = True
    full.loop.reset(5)
    assert full.asked().queue_offset == 5


def test_a_queue_that_damage_stopped_can_be_led_past_it():
    case = Case()
    for _ in range(CORRUPT_TRIES):
        case.network.answer(PullStatus.FOUND, stored_batch(0, 1)[:-1], next_offset=1)
        case.network.run_timer()
    assert case.loop.stopped
    case.network.requests.clear()
    case.loop.reset(8)
    assert not case.loop.stopped
    case.network.answer(PullStatus.FOUND, stored_batch(8, 1), next_offset=9)
    assert case.sink.offsets == [8]


def test_who_stands_there_already_is_moved_in_silence(caplog):
    case = Case(5)
    case.network.answer(PullStatus.OFFSET_RESET, next_offset=5)
    assert case.sink.moves == [5]  # what it holds may be of before
    assert caplog.text == ""


def test_in_a_topic_that_was_deleted_and_made_anew_it_begins_at_the_first_message(caplog):
    told = []
    case = Case(50, on_reset=lambda: told.append("forget"))
    case.network.fail(TopicNotFound("topic 't' was deleted"))
    case.network.run_timer()
    case.network.fail(EndpointUnreachable("away"))
    case.network.run_timer()
    # By now there are more messages than there were of the old topic.
    case.network.answer(PullStatus.FOUND, stored_batch(50, 2), next_offset=52, low=0, high=52)
    assert (case.sink.moves, case.sink.by_admin, told) == ([0], False, ["forget"])
    assert "deleted and made anew; going on at 0" in caplog.text
    assert case.asked().queue_offset == 0
    case.network.answer(PullStatus.FOUND, stored_batch(0, 2), next_offset=2)
    assert case.sink.offsets == [0, 1]
    assert case.asked().queue_offset == 2


def test_an_administrator_who_moves_the_group_in_a_new_topic_has_the_last_word():
    case = Case(50)
    case.network.fail(TopicNotFound("topic 't' was deleted"))
    case.network.run_timer()
    case.network.answer(PullStatus.OFFSET_RESET, next_offset=7)
    case.network.answer(PullStatus.FOUND, stored_batch(7, 1), next_offset=8)
    assert case.sink.moves == [7]
    assert case.sink.offsets == [7]


def test_a_cut_of_the_log_sends_the_loop_back_and_gives_up_what_it_holds(caplog):
    network, sink, epochs, resets = FakeNetwork(), FakeSink(20), {QUEUE: 4}, []
    loop = PullLoop(
        QUEUE,
        "g",
        sink,
        network,
        PullSettings(),
        PullCounters(),
        epochs=epochs,
        on_reset=lambda: resets.append(sink.next_offset),
    )
    loop.resume()
    assert network.requests[0][0].epoch == 4
    network.answer(PullStatus.OFFSET_CUT, next_offset=10, high=25, epoch=5)
    assert (sink.next_offset, sink.by_admin, resets, epochs) == (10, True, [20], {QUEUE: 5})
    assert "lost messages before offset 20, where we were; going on at 10" in caplog.text
    assert (network.requests[0][0].queue_offset, network.requests[0][0].epoch) == (10, 5)
    network.answer(PullStatus.FOUND, stored_batch(10, 2), epoch=6)
    assert sink.next_offset == 12
    assert epochs == {QUEUE: 6}
    # Behind the end, in an epoch that we do not know to be true: it is not taken over.
    network.answer(PullStatus.OFFSET_ILLEGAL, high=11, epoch=7)
    assert epochs == {QUEUE: 6}


class ReplicaCase(Case):
    """A queue that its master has sent to replica 2, where a pull is under way."""

    def __init__(self, **options):
        self.replicas = FakeReplicas()
        super().__init__(replicas=self.replicas, **options)
        self.network.answer(PullStatus.FOUND, stored_batch(0, 2), suggest=2, epoch=5)
        assert self.replicas.asked == [2]
        assert not self.network.requests


def test_where_the_master_says_so_a_follower_is_pulled_from():
    case = ReplicaCase()
    for number in range(2, 5):
        case.replicas.answer(PullStatus.FOUND, stored_batch(number, 1), epoch=5)
    assert case.sink.offsets == [0, 1, 2, 3, 4]
    assert case.counters.replica_pulls == 3
    assert case.replicas.asked == [2] * 4
    case.replicas.clock.advance(ADVICE_MS)
    case.replicas.answer(PullStatus.NO_NEW_MSG, next_offset=5, epoch=5)
    assert case.asked().queue_offset == 5


@pytest.mark.parametrize(
    "bad",
    [
        lambda replicas: replicas.fail(EndpointUnreachable("gone")),
        lambda replicas: replicas.fail(TopicNotFound("it lags")),
        lambda replicas: replicas.answer(PullStatus.OFFSET_ILLEGAL, low=7),
        lambda replicas: replicas.answer(PullStatus.OFFSET_CUT, next_offset=1),
        lambda replicas: replicas.answer(PullStatus.MESSAGES_LOST, next_offset=9),
        lambda replicas: replicas.answer(PullStatus.FOUND, b"x" * 200),
        lambda replicas: replicas.answer(PullStatus.FOUND, stored_batch(5, 1)),
        lambda replicas: replicas.answer(99),
    ],
)
def test_whatever_goes_wrong_at_a_follower_the_master_is_asked_at_once(bad):
    case = ReplicaCase()
    bad(case.replicas)
    assert not case.network.timers
    assert case.sink.moves == []
    assert (case.asked().queue_offset, case.asked().verify) == (2, False)
    case.network.answer(PullStatus.FOUND, stored_batch(2, 1), suggest=2, epoch=5)
    assert case.asked().queue_offset == 3, "and his advice is not taken for a while"
    assert case.sink.offsets == [0, 1, 2]


def test_expired_messages_are_passed_at_a_follower_as_well_and_nothing_is_lost(caplog):
    case = ReplicaCase()
    case.replicas.answer(PullStatus.NO_MATCHED_MSG, next_offset=9, epoch=5)
    assert case.sink.next_offset == 9
    assert len(case.replicas.requests) == 1, "the follower is asked again"
    assert not caplog.records


def test_a_follower_of_an_earlier_epoch_does_not_make_the_place_doubtful():
    case = ReplicaCase()
    case.replicas.answer(PullStatus.NO_NEW_MSG, next_offset=2, epoch=4)
    ((request, _),) = case.replicas.requests
    assert request.epoch == 5


def test_an_administrators_reset_is_shown_to_the_master_at_once():
    case = ReplicaCase()
    case.loop.reset(1)
    assert case.asked().queue_offset == 1
    case.replicas.answer(PullStatus.FOUND, stored_batch(2, 1))
    assert case.sink.offsets == [0, 1], "what was under way does not count"


def test_a_pull_says_where_the_consumer_stands():
    network, sink = FakeNetwork(), FakeSink(0)
    PullLoop(QUEUE, "g", sink, network, PullSettings(zone="east"), PullCounters()).resume()
    ((request, _),) = network.requests
    assert request.zone == "east"


def test_a_later_epoch_is_told_before_the_queue_goes_on():
    told: list[int] = []
    case = Case(on_epoch=told.append)
    case.network.answer(PullStatus.NO_NEW_MSG, epoch=4)
    assert told == [], "nothing was known before"
    case.network.answer(PullStatus.NO_NEW_MSG, epoch=4)
    case.network.run_timer()
    case.network.answer(PullStatus.OFFSET_ILLEGAL, high=0, epoch=5)
    assert told == [], "it may be a broker that has nothing yet"
    case.network.timers.clear()
    case.loop.restart()
    case.network.answer(PullStatus.NO_NEW_MSG, epoch=5)
    assert told == [5]

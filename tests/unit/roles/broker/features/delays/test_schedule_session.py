"""A broker and its schedule service, message by message: cut off and killed at every step."""

from __future__ import annotations

import heapq
import itertools
import random
from functools import partial

import msgspec
import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.sorted_pairs import SortedPairs

from mqmesh.batch.delayed_batch import ANY_TIME_QUEUE, RECORD_QUEUE, DelayedMeta, pack_due_times
from mqmesh.batch.half_batch import half_parts, have_immunity
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts, decode_messages, read_header
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import (
    CorruptRecord,
    DiskFull,
    EndpointUnreachable,
    LocalProtocolError,
    MQMeshError,
    RemoteProtocolError,
    SystemBusy,
)
from mqmesh.message import SCHEDULE_TOPIC, Message
from mqmesh.metrics import MetricBoard, Readings
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import Principal, decode_frame, encode_frame, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import (
    ConsumeStats,
    ConsumeStatsRequest,
    GetGroupsRequest,
    GroupsProgress,
    GroupsProgressRequest,
    GroupSummaries,
)
from mqmesh.protocol.membership import ConsumerData, HeartbeatRequest, Subscription
from mqmesh.protocol.pulling import QueueOffsetEntry, UpdateConsumerOffsetRequest
from mqmesh.protocol.retries import TO_DEAD_LETTERS, SendBackEntry, SendBackRequest
from mqmesh.protocol.schedule import CancelDelayedRequest
from mqmesh.protocol.transactions import (
    Decision,
    End,
    EndOutcome,
    EndTransactionRequest,
    decode_end_outcomes,
    encode_ends,
)
from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.features.delays import due_messages
from mqmesh.roles.broker.staging import SendStage
from mqmesh.roles.exporter.families import Families
from mqmesh.roles.exporter.names import Node, broker_series, group_series, metric_series
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.roles.schedule.service import ScheduleService, SessionState
from mqmesh.roles.schedule.timetable import Timetable
from mqmesh.security.access_list import AccessList, Namespace, NamespaceQuota
from mqmesh.storage.interface import FlushDiskType

HOUR_MS = 3_600_000
START_MS = 1_600_000_000_000


class Timer:
    def __init__(self):
        self.active = True

    def cancel(self):
        self.active = False


class Link:
    """The connection of one life of the service; what it asks waits until ``Rig.pump``."""

    def __init__(self, peer):
        self.peer = peer
        self.asked = []
        self.broken = False

    def request(self, code, on_done, *parts, header=b"", timeout_ms=0):
        self.asked.append((code, header, parts, on_done))

    def oneway(self, code, *parts, header=b""):
        self.asked.append((code, header, parts, None))


class Rig:
    """A broker without a process, and its service, on one clock that tests move."""

    def __init__(self, stage, name="service", **settings):
        self.stage = stage
        self.name = name
        self.settings = settings
        self.pairs = SortedPairs()
        self.timers = []
        self.counter = itertools.count()
        self.lives = itertools.count()
        self.sequence = itertools.count()
        self.start_service()

    @property
    def now_ms(self):
        return self.stage.clock.wall_ms()

    def call_later(self, delay_ms, callback):
        timer = Timer()
        due = self.stage.clock.monotonic_ms() + delay_ms
        heapq.heappush(self.timers, (due, next(self.counter), timer, callback))
        return timer

    def open_table(self, anew):
        if anew:
            self.pairs = SortedPairs()
        return Timetable(self.pairs)

    def start_service(self):
        self.timers = []
        config = ScheduleConfig(**self.settings)
        self.service = ScheduleService(
            config,
            clock=self.stage.clock,
            call_later=self.call_later,
            open_table=self.open_table,
            boot_id=b"boot",
            on_session_lost=lambda: None,
        )
        self.connect()

    def connect(self):
        self.link = Link(b"%s%d" % (self.name.encode(), next(self.lives)))
        self.service.on_connected(self.link)

    def kill_service(self):
        """It is gone with all it had not sent; the broker learns of it."""
        old, self.link = self.link, None
        old.broken = True
        self.stage.features.delays.client_gone(
            self.stage.peer(old.peer), self.stage.clock.monotonic_ms()
        )
        self.start_service()
        return old

    def restart_broker(self):
        """What was staged is lost, what was stored stays."""
        self.link.broken = True
        self.stage.features.writes.stage = SendStage()
        self.stage.epoch += 1
        self.stage.restart()
        self.service.on_disconnected()
        self.connect()

    def execute(self, link):
        """Hands everything that a link has asked to the broker; pairs of callback and number."""
        begun = []
        for code, header, parts, on_done in link.asked:
            oneway = on_done is None
            number = self.stage.begin(code, header, *parts, peer=link.peer, oneway=oneway)
            begun.append((on_done, number))
        link.asked = []
        return begun

    def end_tick(self):
        self.stage.end_tick()
        self.stage.features.delays.notify_service()

    def pump(self):
        """One turn: requests, the tick's end, answers, notices. True if there was something."""
        link = self.link
        begun = self.execute(link)
        self.end_tick()
        for on_done, number in begun:
            if on_done is not None and number in self.stage.answers and not link.broken:
                on_done(self.answer(number))
        notices, self.stage.notices[:] = list(self.stage.notices), []
        for peer, code, header in notices:
            if peer == link.peer and not link.broken:
                frame = encode_frame(code, 0, header=header)
                self.service.on_command(decode_frame(frame))
        return bool(begun or notices)

    def answer(self, number):
        reply = self.stage.answers[number]
        if isinstance(reply, MQMeshError):
            return reply
        return decode_frame(encode_frame(0, number, *reply.body, header=reply.header))

    def settle(self):
        while self.pump():
            continue

    def advance(self, duration_ms, step_ms=1):
        for _ in range(0, duration_ms, step_ms):
            self.stage.clock.advance(step_ms)
            self.run_timers()
            self.settle()

    def run_timers(self):
        now_ms = self.stage.clock.monotonic_ms()
        while self.timers and self.timers[0][0] <= now_ms:
            _, _, timer, callback = heapq.heappop(self.timers)
            if timer.active:
                callback()

    # ---- Messages ----------------------------------------------------------------------

    def send(self, *due_ms, level=0, topic="t", queue_id=0):
        """Sends a batch of delayed messages, one for each time; their sequences."""
        count = max(len(due_ms), 1)
        first = next(self.sequence)
        for _ in range(count - 1):
            next(self.sequence)
        meta = DelayedMeta(topic, level=level, due_times=pack_due_times(due_ms) if due_ms else b"")
        data = b"".join(
            batch_parts(
                encode_payload([Message(topic, b"%d" % (first + i)) for i in range(count)]),
                topic=topic,
                queue_id=queue_id,
                producer_id=PRODUCER_ID,
                first_sequence=first,
                born_timestamp=1,
                attributes=Attributes.HAS_DELAY,
                meta=meta,
            )
        )
        (outcome,) = self.stage.send(data)
        self.stage.features.delays.notify_service()
        assert outcome.code == 0, outcome.remark
        return list(range(first, first + count))

    def begin_cancel(self, sequence):
        header = encode_header(CancelDelayedRequest(PRODUCER_ID, sequence))
        return self.stage.begin(RequestCode.CANCEL_DELAYED, header, peer=b"client")

    def cancel(self, sequence):
        """The response code."""
        number = self.begin_cancel(sequence)
        self.advance(25)
        reply = self.stage.answers[number]
        return (vars(reply).get("code") or code_of(reply)) if isinstance(reply, Exception) else 0

    def delivered(self, topic="t"):
        """Sequence and store time of every delivered message, in order."""
        found = []
        for queue_id in self.stage.store.queues(topic):
            result = self.stage.store.get(topic, queue_id, 0, max_bytes=1 << 30)
            for data in result.data:
                position = 0
                while position < len(data):
                    header = read_header(data, position)
                    for ordinal, message in enumerate(
                        decode_messages(data, header, position=position)
                    ):
                        sequence = header.first_sequence + ordinal
                        assert message.body == b"%d" % sequence
                        found.append((sequence, header.store_timestamp))
                    position += header.total_size
        return found


@pytest.fixture
def rig(make_stage):
    return Rig(make_stage())


def test_messages_are_delivered_when_they_are_due(rig):
    now_ms = rig.now_ms
    rig.send(level=1)
    rig.send(now_ms + 50, now_ms + 10, now_ms + 3_000)
    rig.send(now_ms - 5)
    rig.advance(3_100)
    due = {0: now_ms + 1_000, 1: now_ms + 50, 2: now_ms + 10, 3: now_ms + 3_000, 4: now_ms - 5}
    delivered = dict(rig.delivered())
    assert set(delivered) == set(due)
    for sequence, at in delivered.items():
        assert 0 <= at - max(due[sequence], now_ms) <= 12
    assert rig.service.status().delivered == rig.stage.features.state.schedule.delivered == 5


def test_a_level_counts_from_the_store_time(rig):
    rig.send(level=2)
    rig.advance(4_999)
    assert rig.delivered() == []
    rig.advance(15)
    assert len(rig.delivered()) == 1


def test_a_cancelled_message_never_comes_and_others_of_its_batch_do(rig):
    first = rig.send(*[rig.now_ms + 100 + i for i in range(5)])
    rig.advance(10)
    assert rig.cancel(first[2]) == 0
    assert rig.cancel(first[2]) == ResponseCode.CANCEL_REFUSED
    assert rig.cancel(999) == ResponseCode.QUERY_NOT_FOUND
    rig.advance(300)
    assert [s for s, _ in rig.delivered()] == [first[0], first[1], first[3], first[4]]
    assert rig.cancel(first[0]) == ResponseCode.CANCEL_REFUSED


def test_a_message_of_another_namespace_is_unknown_to_who_wants_to_cancel_it(rig):
    (sequence,) = rig.send(rig.now_ms + 100)
    rig.advance(10)
    rig.stage.peer(b"client").principal = Principal("u", namespace="bank")
    assert rig.cancel(sequence) == rig.cancel(999) == ResponseCode.QUERY_NOT_FOUND
    rig.advance(200)
    assert [one for one, _ in rig.delivered()] == [sequence]


def test_only_who_may_send_to_its_topic_cancels_a_message(rig):
    (sequence,) = rig.send(rig.now_ms + 100)
    rig.advance(10)
    rig.stage.guard.forbidden.add("t")
    assert rig.cancel(sequence) == ResponseCode.NO_PERMISSION
    assert rig.stage.guard.told[-1] == ("CANCEL_DELAYED", "t")
    rig.stage.guard.forbidden.clear()
    rig.advance(200)
    assert [one for one, _ in rig.delivered()] == [sequence]
    assert rig.stage.features.state.schedule.cancelled == 0


def test_nothing_is_cancelled_for_somebody_who_has_stopped_waiting(rig):
    (sequence,) = rig.send(rig.now_ms + 100)
    rig.advance(10)
    number = rig.begin_cancel(sequence)
    rig.stage.features.delays.tick(rig.stage.clock.monotonic_ms() + 3_000)
    assert "does not answer" in str(rig.stage.answers[number])
    rig.advance(200)
    assert [one for one, _ in rig.delivered()] == [sequence]


def test_a_cancel_ends_with_its_master(rig):
    (sequence,) = rig.send(rig.now_ms + 100)
    rig.advance(10)
    number = rig.begin_cancel(sequence)
    rig.stage.features.delays.stopping()
    assert "whether the message is cancelled is unknown" in str(rig.stage.answers[number])


def test_a_cancel_of_what_is_no_id_does_not_get_as_far_as_the_service(rig):
    rig.settle()
    number = rig.begin_cancel(-1)
    assert isinstance(rig.stage.answers[number], RemoteProtocolError)
    assert rig.cancel(2**64 - 1) == ResponseCode.QUERY_NOT_FOUND


def test_a_cancel_is_refused_without_a_service_and_when_it_dies(rig):
    (sequence,) = rig.send(rig.now_ms + 500)
    rig.advance(5)
    number = rig.begin_cancel(sequence)
    rig.kill_service()
    assert "does not answer" in str(rig.stage.answers[number])
    number = rig.begin_cancel(sequence)  # nobody has opened a session yet
    assert "no schedule service" in str(rig.stage.answers[number])
    rig.settle()
    assert rig.cancel(sequence) == 0


def test_what_an_earlier_service_has_on_its_way_is_not_carried_out(rig):
    rig.send(rig.now_ms + 50)
    rig.advance(49)
    rig.stage.clock.advance(10)
    rig.run_timers()
    assert [code for code, *_ in rig.link.asked][-1] == RequestCode.DELIVER_DUE
    old = rig.kill_service()
    rig.pump()  # the new one opens its session
    _, number = rig.execute(old)[-1]
    assert "session is over" in str(rig.stage.answers[number])
    rig.advance(20)
    assert len(rig.delivered()) == 1


def test_no_service_begins_while_what_one_before_delivered_is_not_safe(make_stage):
    rig = Rig(make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH))
    rig.send(rig.now_ms + 50)
    rig.advance(49)
    rig.stage.store.synced = rig.stage.store.stats().max_commitlog_offset
    rig.advance(20)
    assert rig.stage.features.state.schedule.storing == 1
    rig.kill_service()
    rig.advance(2_000)
    assert rig.service.status().state is not SessionState.SERVING, "it would deliver it again"
    rig.stage.store.synced = None
    rig.stage.features.writes.answer_confirmed()
    rig.advance(2_000)
    assert rig.service.status().state is SessionState.SERVING
    assert len(rig.delivered()) == 1


def test_two_services_of_a_broker_take_turns_and_lose_and_repeat_nothing(make_stage):
    stage = make_stage()
    one, other = rigs = Rig(stage, "one"), Rig(stage, "other")
    sent = [s for _ in range(5) for s in one.send(*[one.now_ms + 100 * i for i in range(40)])]
    desk = stage.features.state.schedule
    turns = []
    for _ in range(500):
        stage.clock.advance(10)
        for rig in rigs:
            rig.run_timers()
            rig.settle()
        if desk.service not in turns[-1:]:
            turns.append(desk.service)
    assert sorted(sequence for sequence, _ in one.delivered()) == sent
    assert one.service.status().delivered
    assert other.service.status().delivered
    assert 5 <= len(turns) <= 11, "each comes again 0.5 s after it was refused"


def test_a_full_disk_loses_nothing(rig):
    rig.send(rig.now_ms + 50)
    rig.advance(10)
    rig.stage.store.failure = DiskFull("full")
    rig.advance(2_000, 10)
    rig.stage.store.failure = None
    rig.advance(1_000, 10)
    assert len(rig.delivered()) == 1


def test_what_fits_into_no_batch_does_not_hold_up_others(rig, monkeypatch):
    rig.send(rig.now_ms + 50, topic="large")
    rig.send(rig.now_ms + 60)

    def refuse(*args, topic, **options):
        if topic == "large":
            raise LocalProtocolError("planned")
        return redeliver(*args, topic=topic, **options)

    monkeypatch.setattr(due_messages, "redeliver", refuse)
    rig.advance(80)
    assert len(rig.delivered()) == 1
    assert rig.stage.features.state.schedule.gone == 1


def test_a_topic_that_was_deleted_is_made_again_beyond_max_topics(make_stage):
    rig = Rig(make_stage(max_topics=3))  # with that of the schedule
    rig.send(rig.now_ms + 50, topic="gone")
    rig.send(rig.now_ms + 60, topic="t")
    rig.stage.features.state.topics.delete("gone", 1)
    rig.stage.send(rig.stage.batch("other"))
    assert len(rig.stage.features.state.topics) == 3
    rig.advance(80)
    assert len(rig.delivered("gone")) == len(rig.delivered("t")) == 1
    with pytest.raises(SystemBusy, match="max_topics"):
        rig.stage.features.state.topics.create("new", 1, 1)


def test_a_topic_that_was_deleted_is_not_made_again_beyond_the_quota_of_its_namespace(rig):
    for name in ("ns%gone", "t"):
        rig.send(rig.now_ms + 50, topic=name)
    rig.stage.features.state.topics.delete("ns%gone", 1)
    rig.stage.send(rig.stage.batch("ns%other"))
    quota = [Namespace("ns", NamespaceQuota(topics=1))]
    rig.stage.features.core.quotas.put(AccessList(1, [], quota))
    rig.advance(80)
    assert (rig.delivered("ns%gone"), len(rig.delivered("t"))) == ([], 1)
    assert rig.stage.features.state.schedule.gone == 1


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_step_of_the_clock_loses_nothing_and_nothing_is_early_by_more(rig, step_ms):
    began_ms = rig.now_ms
    due = {}
    for delay_ms in (2_000, HOUR_MS // 2, HOUR_MS + 5_000, 2 * HOUR_MS):
        (sequence,) = rig.send(began_ms + delay_ms)
        due[sequence] = delay_ms
    rig.advance(100)
    rig.stage.clock.jump_wall(step_ms)
    rig.advance(3 * HOUR_MS + 10_000, 500)
    delivered = dict(rig.delivered())
    assert set(delivered) == set(due)
    for sequence, at_ms in delivered.items():
        true_ms = at_ms - step_ms - began_ms
        assert true_ms >= due[sequence] - max(step_ms, 0)
        assert true_ms <= due[sequence] + max(-step_ms, 0) + 2_000


def test_a_lost_timetable_is_made_anew_from_the_log(rig):
    rig.send(rig.now_ms + 50, rig.now_ms + 5_000)
    (gone,) = rig.send(rig.now_ms + 5_000)
    rig.advance(100)
    assert rig.cancel(gone) == 0
    rig.pairs = SortedPairs()
    rig.kill_service()
    rig.advance(6_000, 10)
    assert sorted(s for s, _ in rig.delivered()) == [0, 1]


def test_a_log_that_lost_its_end_means_a_new_timetable(rig):
    rig.send(rig.now_ms + 50)
    rig.advance(10)
    state = Timetable(rig.pairs).state
    state.cursors[0] = 10**6
    rig.pairs.write([(b"s", msgspec.msgpack.encode(state))])
    rig.kill_service()
    rig.advance(2_000, 10)
    assert rig.service.status().rebuilds == 1
    assert len(rig.delivered()) == 1


class Epochs:
    """The epochs of a store: 1, and later ones that begin at given offsets of queue 19."""

    def __init__(self, store, monkeypatch):
        self.newest = 1
        self.cuts = {}
        monkeypatch.setattr(store, "epoch", lambda: self.newest)
        monkeypatch.setattr(store, "cut_offset", self.cut_offset)

    def begin(self, **cuts):
        self.newest += 1
        self.cuts = {int(name.removeprefix("queue_")): cut for name, cut in cuts.items()}

    def cut_offset(self, topic, queue_id, epoch):
        assert (topic, 1 <= epoch < self.newest) == (SCHEDULE_TOPIC, True)
        return self.cuts.get(queue_id)


def test_a_restart_that_lost_nothing_keeps_the_timetable(rig, monkeypatch, caplog):
    epochs = Epochs(rig.stage.store, monkeypatch)
    rig.kill_service()
    rig.send(rig.now_ms + 50, rig.now_ms + 5_000)
    rig.advance(100)
    for cut in (2, 3):
        epochs.begin(**{f"queue_{ANY_TIME_QUEUE}": cut, f"queue_{RECORD_QUEUE}": 1})
        rig.restart_broker()
        rig.advance(100)
        assert Timetable(rig.pairs).state.pending == 1
        assert rig.service.status().rebuilds == 0
    assert caplog.messages == []
    rig.advance(6_000, 10)
    assert [s for s, _ in rig.delivered()] == [0, 1]


@pytest.mark.parametrize(("queue_id", "cut"), [(ANY_TIME_QUEUE, 1), (RECORD_QUEUE, 0)])
def test_an_epoch_in_which_the_log_lost_its_end_means_a_new_timetable(
    rig, monkeypatch, caplog, queue_id, cut
):
    epochs = Epochs(rig.stage.store, monkeypatch)
    rig.kill_service()
    rig.send(rig.now_ms + 50, rig.now_ms + 5_000)
    rig.advance(100)
    epochs.begin(**{f"queue_{queue_id}": cut})
    rig.restart_broker()
    rig.advance(2_000, 10)
    assert rig.service.status().rebuilds == 1
    assert f"queue {queue_id} of the schedule topic lost its messages from {cut} on" in caplog.text
    assert rig.service.state is SessionState.SERVING


def test_a_damaged_queue_is_not_asked_for_as_fast_as_it_is_refused(rig, monkeypatch):
    rig.send(level=1)
    rig.send(rig.now_ms + 10_000)
    good, asked = rig.stage.store.get, []

    def get(topic, queue_id, *place, **options):
        if (topic, queue_id) == (SCHEDULE_TOPIC, 0):
            asked.append(rig.now_ms)
            raise CorruptRecord("damaged")
        return good(topic, queue_id, *place, **options)

    monkeypatch.setattr(rig.stage.store, "get", get)
    rig.pairs = SortedPairs()
    rig.kill_service()
    rig.advance(5_000, 10)
    assert 5 <= len(asked) <= 8
    monkeypatch.setattr(rig.stage.store, "get", good)
    rig.advance(6_000, 10)
    assert sorted(sequence for sequence, _ in rig.delivered()) == [0, 1], "once it is repaired"


def test_what_retention_wants_is_rolled_forward(rig, monkeypatch):
    sequences = rig.send(*[rig.now_ms + 5_000 + i for i in range(100)])
    (level,) = rig.send(level=2)
    rig.advance(20)
    end = rig.stage.store.stats().max_commitlog_offset
    wish = [end]
    monkeypatch.setattr(rig.stage.store, "retention_wish", lambda: wish[0], raising=False)
    kept = []

    def keep(holder, at):
        kept.append(at)

    monkeypatch.setattr(rig.stage.store, "keep_from", keep, raising=False)
    assert rig.cancel(sequences[3]) == 0
    rig.advance(3_000, 10)
    assert rig.stage.features.state.schedule.rolled == 100
    assert kept[-1] >= end
    wish[0] = 0
    rig.advance(5_000, 10)
    wanted = [s for s in (*sequences, level) if s != sequences[3]]
    assert sorted(s for s, _ in rig.delivered()) == wanted


@pytest.mark.parametrize("turns", range(4))
def test_what_is_being_rolled_forward_can_be_cancelled(rig, monkeypatch, turns):
    cancelled, other = rig.send(rig.now_ms + 5_000, rig.now_ms + 5_001)
    rig.advance(20)
    end = rig.stage.store.stats().max_commitlog_offset
    monkeypatch.setattr(rig.stage.store, "retention_wish", lambda: end, raising=False)
    rig.stage.clock.advance(1_000)
    rig.run_timers()
    for _ in range(turns):
        rig.pump()
    assert rig.cancel(cancelled) == 0
    rig.advance(5_000, 10)
    assert rig.stage.features.state.schedule.rolled
    assert [s for s, _ in rig.delivered()] == [other]


def test_records_need_not_be_read_by_who_caused_them(rig):
    for _ in range(20):
        rig.send(rig.now_ms + 5)
        rig.advance(20)
    low, high = rig.stage.store.queue_bounds(SCHEDULE_TOPIC, RECORD_QUEUE)
    assert (low, high) == (0, 20)
    assert Timetable(rig.pairs).state.cursors[RECORD_QUEUE] in (19, 20)


@pytest.mark.parametrize("seed", range(60))
def test_kills_at_any_step_lose_nothing_and_repeat_nothing(make_stage, seed):
    chance = random.Random(seed)
    rig = Rig(make_stage(default_topic_queue_nums=2), retry_ms=10)
    due, cancelled, leftovers = {}, set(), []
    for _ in range(150):
        match chance.randrange(10):
            case 0 | 1 | 2:
                times = [
                    rig.now_ms + chance.randrange(400) for _ in range(chance.choice((1, 1, 3, 80)))
                ]
                sequences = rig.send(*times, queue_id=chance.randrange(2))
                due.update(zip(sequences, times, strict=True))
            case 3 | 4 | 5:
                rig.stage.clock.advance(chance.randrange(30))
                rig.advance(1)
            case 6:
                rig.pump()
            case 7:
                old = rig.kill_service()
                if chance.random() < 0.5:
                    leftovers.append(old)
            case 8:
                if chance.random() < 0.3:
                    rig.restart_broker()
                elif leftovers:
                    # What was on its way arrives at last.
                    rig.execute(leftovers.pop())
                    rig.end_tick()
            case 9 if due:
                sequence = chance.choice(list(due))
                number = rig.begin_cancel(sequence)
                rig.advance(3)
                if rig.stage.answers.get(number) is not None and not isinstance(
                    rig.stage.answers[number], Exception
                ):
                    cancelled.add(sequence)
    rig.advance(4_000, 20)
    assert rig.service.state is SessionState.SERVING
    delivered = rig.delivered()
    sequences = sorted(sequence for sequence, _ in delivered)
    assert len(sequences) == len(set(sequences)), "delivered twice"
    assert cancelled.isdisjoint(sequences)
    missing = set(due) - set(sequences) - cancelled
    # A cancellation whose answer was lost may have been carried out.
    done = rig.stage.features.state.schedule
    assert len(missing) == 0 or all(rig.cancel(s) == ResponseCode.CANCEL_REFUSED for s in missing)
    assert len(missing) <= 3, (missing, done.metrics())
    for sequence, at in delivered:
        assert at >= due[sequence], "early"


def test_an_unreachable_broker_is_asked_again(rig):
    rig.settle()
    rig.send(rig.now_ms + 20)
    rig.advance(10)
    rig.stage.clock.advance(20)
    rig.run_timers()
    asked, rig.link.asked = rig.link.asked, []
    for *_, on_done in asked:
        on_done(EndpointUnreachable("the connection broke"))
    assert rig.service.state is not SessionState.SERVING
    rig.advance(1_500, 10)
    assert len(rig.delivered()) == 1


# ---- The states of a message ---------------------------------------------------------------

STATES = {
    "ready": "rocketmq_consumer_ready_messages",
    "in flight": "rocketmq_consumer_inflight_messages",
    "waiting for a retry": "mqmesh_group_waiting_retries",
    "dead": "mqmesh_group_dead_messages",
    "half": "rocketmq_half_messages",
}
"""The number of each state, as docs/metrics.md lists them; what producers delay is a difference."""
RETRY = "%RETRY%g"


class Shop:
    """Producers of a topic, and a member of its only group, one message at a time."""

    def __init__(self, rig, seed=0):
        self.rig, self.stage = rig, rig.stage
        self.chance = random.Random(seed)
        self.open = 0
        self.halves = []
        self.sequence = itertools.count(10**9)
        # Transactions have a queue of their own: their producer's messages have other sequences.
        self.held = {("t", 0): [], ("t", 1): [], (RETRY, 0): []}
        self.next = dict.fromkeys(self.held, 0)
        features = self.stage.features
        features.state.half_messages.recover(
            self.stage.store,
            None,
            wall_ms=self.stage.clock.wall_ms(),
            now_ms=self.stage.clock.monotonic_ms(),
        )
        data = ConsumerData("g", "CLUSTERING", "FIRST_OFFSET", [Subscription("t")])
        self.stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest("c", consumers=[data]))
        self.send()

    def send(self):
        self.stage.send(self.stage.batch(bodies=(b"a", b"b", b"c")))
        self.open += 3

    def delay(self):
        now_ms = self.rig.now_ms
        self.rig.send(*[now_ms + self.chance.randint(1, 20_000) for _ in range(2)])
        self.open += 2

    def prepare(self):
        sequence = next(self.sequence)
        messages = [Message("t", b"half")]
        parts = half_parts(
            encode_payload(messages),
            producer_group="pg",
            real_topic="t",
            real_queue_id=1,
            has_immunity=have_immunity(messages),
            producer_id=PRODUCER_ID,
            first_sequence=sequence,
            born_timestamp=1,
        )
        (outcome,) = self.stage.send(b"".join(parts))
        self.halves.append((outcome.base_queue_offset, sequence))
        self.open += 1

    def decide(self):
        if self.halves:
            base, sequence = self.halves.pop()
            decision = self.chance.choice((Decision.COMMIT, Decision.ROLLBACK))
            end = End(base, PRODUCER_ID, sequence, 0, 1, int(decision), PRODUCER_KEY)
            asked, body = EndTransactionRequest("pg"), encode_ends([end])
            number = self.stage.begin(RequestCode.END_TRANSACTION, asked, body)
            self.stage.features.transactions.finish()
            self.stage.end_tick()
            reply = self.stage.answer(number)
            (outcome,) = decode_end_outcomes(b"".join(reply.body), 1)
            assert outcome is EndOutcome.ENDED
            self.open -= decision is Decision.ROLLBACK

    def pull(self):
        for queue, begin in self.next.items():
            if self.stage.features.state.topics.get(queue[0]) is not None:
                found, bodies = self.stage.pull(*queue, begin)
                self.held[queue] += range(begin, begin + len(bodies))
                self.next[queue] = max(begin, found.next_queue_offset)

    def finish(self, topic, level=None, queue_id=0):
        """The member is done with a message: it has handled it, or sends it back."""
        if not self.held[topic, queue_id]:
            return
        offset = self.held[topic, queue_id].pop(0)
        if level is None:
            self.open -= 1
        else:
            entry = SendBackEntry(topic, queue_id, offset, 1, "planned", level)
            self.stage.ask(RequestCode.CONSUMER_SEND_MSG_BACK, SendBackRequest("g", [entry]))
            self.stage.features.delays.notify_service()
        commit = UpdateConsumerOffsetRequest(
            "g", "c", [QueueOffsetEntry(topic, queue_id, offset + 1)]
        )
        self.stage.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)

    def step(self):
        topic, queue_id = self.chance.choice(list(self.held))
        self.chance.choice(
            (
                self.send,
                self.delay,
                self.prepare,
                self.decide,
                self.pull,
                lambda: self.finish(topic, None, queue_id),
                lambda: self.finish(topic, 0, queue_id),
                lambda: self.finish(topic, TO_DEAD_LETTERS, queue_id),
            )
        )()
        self.rig.settle()

    def numbers(self):
        """How many messages are in each state, as Prometheus is told."""
        node = Node("c", "broker", "a", "a:1", True, "a")
        board = MetricBoard()
        for kind in FEATURES:
            board.add(kind.metrics, partial(self.stage.features.of, kind))
        readings = Readings(board.read())
        request = GroupsProgressRequest()
        told = self.stage.ask(RequestCode.GET_GROUPS_PROGRESS, request, GroupsProgress)
        (group,) = [one for one in told.groups if one.group == "g"]
        families = Families(
            [
                *metric_series(node, readings),
                *broker_series(node, readings, told.now_ms),
                *group_series(node, group, told.now_ms),
            ]
        )
        found = {state: families.sums(name, ())[()] for state, name in STATES.items()}
        (delayed,) = families.sums("rocketmq_timing_messages", ()).values()
        (retries,) = families.sums("mqmesh_schedule_retries", ()).values()
        lag = families.sums("rocketmq_consumer_lag_messages", ())[()]
        assert lag == found["ready"] + found["in flight"] + found["waiting for a retry"]
        return found | {"delayed": delayed - retries}


@pytest.mark.parametrize("seed", range(8))
def test_each_message_is_in_one_number(rig, seed):
    rig.settle()
    shop, seen = Shop(rig, seed), set()
    for _ in range(120):
        shop.step()
        rig.advance(shop.chance.choice((200, 4_000)), step_ms=200)
        # The service reports each second what it has done, and at once when it is told of more.
        rig.stage.features.state.schedule.timer_changed = True
        rig.stage.features.delays.notify_service()
        rig.settle()
        numbers = shop.numbers()
        assert sum(numbers.values()) == shop.open, numbers
        seen |= {state for state, count in numbers.items() if count}
    assert seen == {*STATES, "delayed"}


def test_what_waits_for_a_retry_is_lag_of_its_group(rig):
    rig.settle()
    shop = Shop(rig)
    shop.pull()
    for _ in range(2):
        shop.finish("t", level=0)
    sent_back_ms = rig.now_ms
    shop.finish("t")
    rig.advance(2_000, step_ms=100)
    request = GetGroupsRequest("g")
    summaries = rig.stage.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, request, GroupSummaries)
    (one,) = summaries.groups
    assert (one.lag, one.retrying, one.dead) == (2, 2, 0)
    stats = rig.stage.ask(RequestCode.GET_CONSUME_STATS, ConsumeStatsRequest("g"), ConsumeStats)
    assert (stats.waiting_retries, stats.waiting_since) == (2, sent_back_ms)
    of_topic = ConsumeStatsRequest("g", "t")
    stats = rig.stage.ask(RequestCode.GET_CONSUME_STATS, of_topic, ConsumeStats)
    assert stats.waiting_retries == 0, "they are in another topic"
    rig.advance(10_000, step_ms=100)
    assert shop.numbers()["waiting for a retry"] == 0
    assert shop.numbers()["ready"] == 2, "they are due"


def test_while_its_service_is_away_the_broker_counts_what_comes_to_wait(rig):
    rig.settle()
    shop = Shop(rig)
    shop.pull()
    shop.finish("t", level=0)
    rig.advance(2_000, step_ms=100)
    delays = rig.stage.features.delays
    delays.client_gone(rig.stage.peer(rig.link.peer), rig.stage.clock.monotonic_ms())
    rig.link.broken = True
    shop.finish("t", level=0)
    shop.delay()
    for _ in range(2):  # nothing is counted twice
        delays.sample()
    assert shop.numbers()["waiting for a retry"] == 2
    assert sum(shop.numbers().values()) == shop.open
    rig.service.on_disconnected()
    rig.connect()
    rig.advance(2_000, step_ms=100)
    assert shop.numbers()["waiting for a retry"] == 2
    assert sum(shop.numbers().values()) == shop.open

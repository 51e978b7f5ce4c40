"""RECEIVE_MESSAGE and SETTLE_MESSAGES: leases, acknowledgements, what comes again, dead letters."""

from __future__ import annotations

import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.delayed_batch import (
    ANY_TIME_QUEUE,
    ExpectingMeta,
    due_times,
    read_delayed_meta,
)
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import (
    Attributes,
    batch_parts,
    check_stored,
    decode_messages,
    encode_batch,
)
from mqmesh.errors import (
    CorruptRecord,
    DiskFull,
    GroupNotFound,
    InvalidArgument,
    NoPermission,
    StaleGeneration,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import Message, as_system
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    LeaseList,
    ListLeasesRequest,
    MessageLease,
    ReceiveRequest,
    ReceiveResponse,
    ReleasedLeases,
    ReleaseLeasesRequest,
    SettleAction,
    Settlement,
    SettleRequest,
    SettleResponse,
)
from mqmesh.protocol.groups import (
    ConsumeStats,
    ConsumeStatsRequest,
    DeleteGroupRequest,
    GetGroupsRequest,
    GroupConfig,
    GroupSummaries,
    ResetOffsetRequest,
    UpdateGroupRequest,
    WindowProgress,
)
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    Subscription,
    UnregisterClientRequest,
)
from mqmesh.protocol.pulling import QueueOffsetEntry, UpdateConsumerOffsetRequest
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.features.delivery.failed_messages import FailedMessages
from mqmesh.roles.broker.features.delivery.feature import FORGET_MS, NOTE_EVERY_MS
from mqmesh.roles.broker.features.retries.send_back import SendBackFeature
from mqmesh.roles.broker.reading import pull_filter
from mqmesh.security.access_list import AccessList, Namespace, NamespaceQuota
from mqmesh.storage.interface import FlushDiskType, GetStatus

OK = int(ResponseCode.SUCCESS)
STALE = int(ResponseCode.STALE_RECEIPT)


class Scene:
    """A broker with the topic t of one queue, and members of the group g."""

    def __init__(self, stage, **group) -> None:
        self.stage = stage
        stage.features.state.topics.set(TopicConfig("t", 1, 1), 0)
        if group:
            self.configure(**group)
        self.join("a")
        self.join("b")

    def configure(self, **group) -> None:
        config = GroupConfig("g", **{"delivery": "message", **group})
        self.stage.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, UpdateGroupRequest(config))

    def join(self, member, *, group="g", delivery="message", where="FIRST_OFFSET", **options):
        data = ConsumerData(group, "CLUSTERING", where, [Subscription("t", **options)], delivery)
        self.stage.ask(
            RequestCode.HEART_BEAT, HeartbeatRequest(member, consumers=[data]), peer=member.encode()
        )

    def leave(self, *members) -> None:
        for member in members:
            leaving = UnregisterClientRequest(member)
            self.stage.ask(RequestCode.UNREGISTER_CLIENT, leaving, peer=member.encode())

    def send(self, count=1, **options) -> None:
        bodies = [str(number).encode() for number in range(count)]
        self.stage.send(self.stage.batch(bodies=bodies, **options))

    def begin(self, most=10, member="a", wait_ms=0, **options) -> int:
        wanted = ReceiveRequest("g", "t", member, most, suspend_timeout_ms=wait_ms, **options)
        return self.stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=member.encode())

    def receive(self, *arguments, **options) -> tuple[list[MessageLease], list[bytes]]:
        opaque = self.begin(*arguments, **options)
        self.stage.end_tick()
        return self.received(opaque)

    def received(self, opaque) -> tuple[list[MessageLease], list[bytes]]:
        reply = self.stage.answer(opaque)
        if isinstance(reply, ReceiveResponse):
            return reply.leases, []
        data, position, bodies = b"".join(reply.body), 0, []
        while position < len(data):
            header = check_stored(data, position)
            found = decode_messages(data, header, position=position)
            bodies += [message.body for message in found]
            position += header.total_size
        return decode_header(ReceiveResponse, reply.header).leases, bodies

    def begin_settle(self, *settlements, member="a") -> int:
        wanted = SettleRequest("g", "t", member, list(settlements))
        return self.stage.begin(RequestCode.SETTLE_MESSAGES, wanted, peer=member.encode())

    def settle(self, lease, action=SettleAction.ACK, *, member="a", bits=None, **options) -> int:
        opaque = self.begin_settle(settlement(lease, action, bits=bits, **options), member=member)
        self.stage.end_tick()
        (code,) = decode_header(SettleResponse, self.stage.answer(opaque).header).codes
        return code

    def later(self, ms) -> None:
        """Time passes, with a tick of the broker each tenth of a second."""
        features, clock = self.stage.features, self.stage.clock
        for _ in range(0, ms, 100):
            clock.advance(100)
            features.tick(clock.monotonic_ms())
            self.stage.end_tick()

    @property
    def committed(self) -> int:
        return self.stage.features.state.committed.query("g", "t", 0)


def settlement(lease, action=SettleAction.ACK, *, bits=None, **options) -> Settlement:
    size = lease.end - lease.first
    mask = (1 << size) - 1 if bits is None else bits
    return Settlement(
        lease.lease,
        lease.queue_id,
        lease.first,
        mask.to_bytes((size + 7) // 8, "little"),
        int(action),
        is_retry=lease.is_retry,
        **options,
    )


@pytest.fixture
def scene(stage):
    return Scene(stage)


@pytest.fixture
def kept(make_stage):
    """A scene whose state is in the log."""
    return Scene(make_stage(is_kept=True))


def test_a_message_goes_to_one_member_and_is_settled_by_its_acknowledgement(scene):
    scene.send(3)
    (lease,), bodies = scene.receive()
    assert bodies == [b"0", b"1", b"2"]
    assert (lease.first, lease.end, lease.attempt, lease.length_ms) == (0, 3, 1, 60_000)
    assert scene.receive(member="b") == ([], [])
    assert scene.settle(lease) == OK
    assert scene.committed == 3


def test_a_batch_is_cut_for_a_member_that_wants_less(scene):
    scene.send(10)
    assert scene.receive(4)[1] == [b"0", b"1", b"2", b"3"]
    assert scene.receive(4, member="b")[1] == [b"4", b"5", b"6", b"7"]
    assert scene.receive(4)[1] == [b"8", b"9"]


def test_many_batches_make_one_lease(scene):
    for _ in range(5):
        scene.send(3)
    (lease,), bodies = scene.receive(9)
    assert (lease.first, lease.end, len(bodies)) == (0, 9, 9)
    assert len(scene.receive(10)[1]) == 6


def test_no_batch_is_cut_where_half_of_what_is_wanted_is_there(scene):
    for _ in range(4):
        scene.send(6)
    assert [len(scene.receive(10)[1]) for _ in range(2)] == [6, 6]
    assert len(scene.receive(4)[1]) == 4
    assert len(scene.receive(5)[1]) == 5, "2 and 3: the rest of a batch is less than half"
    assert len(scene.receive(5)[1]) == 3


def test_an_answer_has_no_more_bytes_than_wanted(scene):
    for _ in range(5):
        scene.send(3)
    assert len(scene.receive(100, max_bytes=1)[1]) == 3


def test_a_message_that_is_not_settled_in_time_comes_again(scene):
    scene.send()
    (lease,), _ = scene.receive(invisible_ms=1_000)
    scene.later(1_300)
    (again,), bodies = scene.receive(member="b")
    assert (again.attempt, bodies) == (2, [b"0"])
    assert scene.settle(lease) == STALE
    assert scene.settle(again, member="b") == OK
    assert scene.committed == 1


def test_the_end_of_the_next_lease_is_known(scene):
    delivery, now_ms = scene.stage.features.delivery, scene.stage.clock.monotonic_ms()
    scene.send(2)
    assert delivery.next_ms() is None
    (long,), _ = scene.receive(1, invisible_ms=5_000)
    (short,), _ = scene.receive(1, invisible_ms=1_000)
    assert now_ms + 1_000 < delivery.next_ms() <= now_ms + 1_020
    scene.settle(short)
    assert now_ms + 5_000 < delivery.next_ms() <= now_ms + 5_020
    scene.settle(long)
    assert delivery.next_ms() is None


class Ordered(Scene):
    """The same with order by key; the body of a message is its key, and "-" has none."""

    def __init__(self, stage, **group) -> None:
        super().__init__(stage, delivery="fifo", **group)

    def join(self, member, **options):
        super().join(member, delivery="fifo", **options)

    def send_keys(self, keys: str) -> None:
        messages = [
            Message("t", key.encode(), sharding_key=None if key == "-" else key, tag=key)
            for key in keys
        ]
        self.stage.send(self.stage.batch(messages=messages))


def test_with_order_by_key_a_receive_has_one_lease_of_what_is_far_apart(stage):
    scene = Ordered(stage)
    for _ in range(30):
        scene.send_keys("a" + "b" * 9)
    scene.send_keys("c-bd")
    (first,), bodies = scene.receive(1)
    assert bodies == [b"a"]
    (lease,), bodies = scene.receive(400, member="b")
    assert b"".join(bodies) == b"b" * 270 + b"c-bd"
    assert (lease.first, lease.end, lease.count) == (1, 304, 274)
    assert scene.settle(lease, bits=1 | 1 << 299, member="b") == OK, "a message of each end"
    assert scene.settle(first) == OK
    (rest,), bodies = scene.receive(400)
    assert (bodies, rest.count) == ([b"a"] * 29, 29)


def test_with_order_by_key_batches_of_which_a_filter_leaves_out_messages_have_keys(stage):
    scene = Ordered(stage)
    for member in "ab":
        scene.join(member, expression="a || c")
    for keys in ("ab", "abc"):
        scene.send_keys(keys)
    (lease,), bodies = scene.receive(1, expression="a || c")
    assert bodies == [b"a"]
    assert scene.receive(member="b", expression="a || c")[1] == [b"c"], "the other one of a waits"
    scene.settle(lease)
    assert scene.receive(member="b", expression="a || c")[1] == [b"a"]


def test_with_order_by_key_the_filter_is_asked_about_messages_of_a_damaged_record(stage):
    scene = Ordered(stage)
    for member in "ab":
        scene.join(member, expression="a")
    scene.send_keys("abba")
    window = stage.features.state.windows.begin(("g", "t", 0), 0)
    window.miss(4)
    window.resume(stage.clock.monotonic_ms(), 0, 0)
    scene.later(100)
    (lease,), bodies = scene.receive(expression="a")
    assert bodies == [b"a", b"a"]
    assert scene.settle(lease) == OK
    assert scene.committed == 4


def test_with_order_by_key_what_was_read_goes_out_before_damage(stage, monkeypatch):
    scene = Ordered(stage)
    scene.send_keys("aab")
    scene.send_keys("c")
    store, damaged = scene.stage.store, {3}
    get = type(store).get

    def damaged_get(topic, queue_id, queue_offset, **options):
        if topic == "t" and queue_offset in damaged:
            raise CorruptRecord("planned")
        return get(store, topic, queue_id, queue_offset, **{**options, "max_bytes": 1})

    monkeypatch.setattr(store, "get", damaged_get)
    (lease,), bodies = scene.receive(10)
    assert bodies == [b"a", b"a", b"b"]
    assert scene.settle(lease) == OK
    damaged.clear()
    assert scene.receive(10)[1] == [b"c"]


def test_with_order_by_key_what_has_no_room_in_an_answer_is_left_for_the_next(stage):
    scene = Ordered(stage)
    for _ in range(5):
        scene.send_keys("abc")
    (lease,), bodies = scene.receive(15, max_bytes=1)
    assert b"".join(bodies) == b"abc"
    assert scene.receive(15, member="b") == ([], []), "all keys are busy"
    scene.settle(lease)
    assert b"".join(scene.receive(15, member="b")[1]) == b"abc" * 4


def test_with_order_by_key_what_failed_comes_again_though_the_group_may_hold_no_more(stage):
    scene = Ordered(stage, max_unsettled=2)
    scene.send_keys("abc")
    (lease,), bodies = scene.receive(10)
    assert b"".join(bodies) == b"ab"
    for bits in (0b01, 0b10):
        assert scene.settle(lease, SettleAction.NACK, bits=bits, delay_ms=0) == OK
    leases, bodies = scene.receive(10, member="b")
    assert b"".join(bodies) == b"ab", "and nothing new"
    assert [scene.settle(one, member="b") for one in leases] == [OK] * len(leases)
    assert b"".join(scene.receive(10)[1]) == b"c"


def test_with_order_by_key_what_was_given_back_comes_though_others_behind_it_fill_the_group(stage):
    scene = Ordered(stage, max_unsettled=2)
    scene.send_keys("aab")
    (lease,), bodies = scene.receive(10)
    assert bodies == [b"a", b"a"]
    scene.configure(delivery="fifo", max_unsettled=1)
    assert scene.settle(lease, SettleAction.NACK, bits=0b10, delay_ms=0) == OK
    assert scene.settle(lease, SettleAction.RETURN, bits=0b01) == OK
    (first,), bodies = scene.receive(10, member="b")
    assert (bodies, first.first, first.attempt) == ([b"a"], 0, 1)
    assert scene.receive(10) == ([], []), "nothing new"
    assert scene.settle(first, member="b") == OK
    (second,), bodies = scene.receive(10)
    assert (bodies, second.first, second.attempt) == ([b"a"], 1, 2)


def test_an_extended_lease_lasts(scene):
    scene.send()
    (lease,), _ = scene.receive(invisible_ms=1_000)
    scene.settle(lease, SettleAction.EXTEND, delay_ms=5_000)
    scene.later(4_000)
    assert scene.receive(member="b") == ([], [])
    scene.later(1_300)
    assert scene.receive(member="b")[1] == [b"0"]


def test_single_messages_of_a_lease_are_settled(scene):
    scene.send(4)
    (lease,), _ = scene.receive()
    scene.settle(lease, bits=0b1101)
    assert scene.committed == 1
    scene.settle(lease, SettleAction.NACK, bits=0b0010, delay_ms=0)
    (again,), bodies = scene.receive()
    assert (again.first, again.attempt, bodies) == (1, 2, [b"1"])


def test_a_refused_message_comes_again_after_its_delay(scene):
    scene.send()
    (lease,), _ = scene.receive()
    assert scene.settle(lease, SettleAction.NACK, delay_ms=5_000) == OK
    scene.later(4_900)
    assert scene.receive() == ([], [])
    scene.later(300)
    assert scene.receive()[0][0].attempt == 2


def test_a_message_that_was_given_back_comes_at_once_as_if_for_the_first_time(scene):
    scene.send()
    (lease,), _ = scene.receive()
    scene.settle(lease, SettleAction.RETURN)
    assert scene.receive(member="b")[0][0].attempt == 1


def test_a_receive_waits_for_a_message(scene):
    opaque = scene.begin(wait_ms=5_000)
    scene.stage.end_tick()
    assert opaque not in scene.stage.answers
    scene.send()
    assert scene.received(opaque)[1] == [b"0"]


def test_a_receive_that_waits_gets_what_comes_again(scene):
    scene.send()
    (lease,), _ = scene.receive()
    opaque = scene.begin(member="b", wait_ms=5_000)
    scene.settle(lease, SettleAction.NACK, delay_ms=0)
    assert scene.received(opaque)[0][0].attempt == 2


def test_a_receive_that_waited_in_vain_is_answered(scene):
    opaque = scene.begin(wait_ms=500)
    scene.later(400)
    assert opaque not in scene.stage.answers
    scene.later(200)
    assert scene.received(opaque) == ([], [])


def test_those_that_wait_longest_are_answered_first(scene):
    opaques = [scene.begin(1, member, wait_ms=5_000) for member in ("a", "b", "a")]
    scene.send(2)
    assert [scene.received(one)[1] for one in opaques[:2]] == [[b"0"], [b"1"]]
    assert opaques[2] not in scene.stage.answers


def test_an_acknowledgement_is_answered_when_it_is_safe(make_stage):
    stage = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH, is_kept=True)
    scene = Scene(stage)
    scene.send()
    (lease,), _ = scene.receive()
    stage.store.synced = int(stage.store.durable_offset())
    opaque = scene.begin_settle(settlement(lease))
    stage.end_tick()
    assert opaque not in stage.answers
    stage.store.synced = None
    stage.features.durable()
    assert decode_header(SettleResponse, stage.answer(opaque).header).codes == [OK]


def test_what_was_acknowledged_never_comes_again_after_a_restart(kept):
    kept.send(4)
    (lease,), _ = kept.receive()
    kept.settle(lease, bits=0b0101)
    restarted = restart(kept)
    assert restarted.receive(member="b") == ([], [])
    restarted.later(3_200)
    (again, *_), bodies = restarted.receive(member="b")
    assert (bodies, again.attempt) == ([b"1", b"3"], 2)


def restart(scene, **subscription) -> Scene:
    scene.stage.epoch += 1
    scene.stage.restart()
    scene.stage.features.load()
    scene.stage.features.opened()
    for member in ("a", "b"):
        scene.join(member, **subscription)
    return scene


def test_after_a_restart_a_member_keeps_what_it_shows(kept):
    kept.send(4)
    (lease,), _ = kept.receive(2)
    kept.receive(2, member="b")
    kept.later(100)  # the hand-outs are in the log
    restart(kept)
    assert kept.settle(lease, SettleAction.EXTEND, delay_ms=60_000) == OK
    kept.later(3_200)
    assert kept.receive(member="b")[1] == [b"2", b"3"]
    assert kept.settle(lease) == OK
    assert kept.committed == 2


def test_a_hand_out_is_in_the_log_at_the_end_of_its_turn_each_two_ms(kept):
    kept.send(4)
    written = kept.stage.features.core.state.records_written
    kept.receive(1)
    assert kept.stage.features.core.state.records_written == written + 1
    kept.receive(1)
    assert kept.stage.features.core.state.records_written == written + 1
    kept.stage.clock.advance(NOTE_EVERY_MS)
    (lease,), _ = kept.receive(1)
    assert kept.stage.features.core.state.records_written == written + 2
    restart(kept)
    assert kept.receive(member="b")[1] == [b"3"], "the others may be held still"
    assert lease.first == 2


def test_after_a_restart_a_member_keeps_what_the_log_did_not_know(kept):
    kept.send(4)
    (first,), _ = kept.receive(1)
    kept.settle(first)
    (lease,), _ = kept.receive(2)
    restart(kept)
    assert kept.settle(lease, SettleAction.EXTEND, delay_ms=60_000) == OK
    assert kept.receive(member="b")[1] == [b"3"]


def test_after_a_restart_nobody_gets_what_the_filter_passes_over(kept):
    red = {"expression": "red"}
    for member in ("a", "b"):
        kept.join(member, **red)
    kept.send()
    kept.send(3, tag="red")
    (first,), _ = kept.receive(1, **red)
    kept.settle(first)
    kept.send(5, tag="blue")
    kept.send(tag="red")
    kept.receive(1, member="b", **red)
    (lease,), _ = kept.receive(2, **red)
    assert (lease.first, lease.end) == (3, 10), "of which the log knows nothing"
    restart(kept, **red)
    assert kept.settle(lease, SettleAction.EXTEND, bits=0b1000001, delay_ms=60_000) == OK
    (again,), bodies = kept.receive(10, member="b", **red)
    assert (bodies, again.first) == ([b"1"], 2)
    assert kept.receive(member="b", **red) == ([], [])
    assert kept.settle(again, member="b") == kept.settle(lease, bits=0b1000001) == OK
    assert kept.committed == 10


def test_a_long_filter_is_asked_about_some_messages_at_a_time(kept, monkeypatch):
    scene, red = kept, {"expression": "colour = 'red'", "expression_type": "SQL92"}
    for member in ("a", "b"):
        scene.join(member, **red)
    messages = [
        Message("t", b"%d" % at, properties={"colour": "blue" if at % 30 else "red"})
        for at in range(100)
    ]
    scene.stage.send(scene.stage.batch(messages=messages))
    (lease,), bodies = scene.receive(**red)
    assert bodies == [b"0", b"30", b"60", b"90"]
    assert scene.settle(lease, SettleAction.RETURN) == OK
    restart(kept, **red)  # the log does not say whether the filter was asked
    monkeypatch.setattr(pull_filter, "MAX_LOOKS", 160)
    assert scene.receive(member="b", **red)[1] == bodies


def test_marks_that_cannot_be_read_hold_up_no_settlement(scene, monkeypatch):
    scene.send(2)
    (lease,), _ = scene.receive()
    assert scene.settle(lease, bits=0b10) == OK

    def damaged(*_):
        raise CorruptRecord("t", 0, 0, "planted")

    monkeypatch.setattr(SendBackFeature, "is_sent_back", damaged)
    nack = settlement(lease, SettleAction.NACK, bits=0b01, delay_ms=60_000)
    opaque = scene.begin_settle(nack, settlement(lease, bits=0b10))
    scene.stage.end_tick()
    assert decode_header(SettleResponse, scene.stage.answer(opaque).header).codes == [OK, OK]
    assert scene.committed == 2


def test_a_report_that_fails_holds_up_no_other(scene, monkeypatch):
    scene.send(3)
    (lease,), _ = scene.receive()
    judge = FailedMessages.judge

    def judged(failed, key, window, run, *arguments):
        if run.low == 1:
            raise SystemBusy("planted")
        return judge(failed, key, window, run, *arguments)

    monkeypatch.setattr(FailedMessages, "judge", judged)
    actions = SettleAction.REJECT, SettleAction.NACK, SettleAction.ACK
    opaque = scene.begin_settle(
        *(settlement(lease, action, bits=1 << at) for at, action in enumerate(actions))
    )
    scene.stage.end_tick()
    codes = decode_header(SettleResponse, scene.stage.answer(opaque).header).codes
    assert codes == [OK, int(ResponseCode.SYSTEM_BUSY), OK]
    assert [message.body for message in dead_letters(scene.stage)] == [b"0"]
    (again,), bodies = scene.receive(member="b")
    assert (again.attempt, bodies) == (2, [b"1"])


def test_what_cannot_be_judged_comes_again_and_others_are_dead_letters(stage, monkeypatch):
    scene = Scene(stage, retry_max_times=0)
    scene.send(4)
    judge = FailedMessages.judge

    def judged(failed, key, window, run, *arguments):
        if not run.low % 2:
            raise CorruptRecord("planted")
        return judge(failed, key, window, run, *arguments)

    monkeypatch.setattr(FailedMessages, "judge", judged)
    for _ in range(2):
        scene.receive(1, invisible_ms=1_000)
    scene.later(1_300)
    assert [message.body for message in dead_letters(stage)] == [b"1"]
    for _ in range(3):
        scene.receive(1, member="b")
    wanted = ReleaseLeasesRequest("g", "b")
    assert stage.ask(RequestCode.RELEASE_LEASES, wanted, ReleasedLeases).messages == 3
    assert [message.body for message in dead_letters(stage)] == [b"1", b"3"]
    assert sorted(scene.receive()[1]) == [b"0", b"2"]


def test_what_was_never_handed_out_goes_out_at_once_after_a_restart(kept):
    kept.send(4)
    (lease,), _ = kept.receive(2)
    kept.settle(lease, bits=0b01)
    restart(kept)
    assert kept.receive(member="b")[1] == [b"2", b"3"]


def test_a_message_that_waits_long_waits_in_the_schedule_service(scene):
    scene.send()
    (lease,), _ = scene.receive()
    assert scene.settle(lease, SettleAction.NACK, delay_ms=60_000) == OK
    assert scene.committed == 1
    found = scene.stage.store.get("SCHEDULE_TOPIC_XXXX", 4, 0, max_bytes=1)
    assert found.status is GetStatus.FOUND


@pytest.mark.parametrize("action", [SettleAction.NACK, SettleAction.REJECT])
def test_late_work_on_what_another_member_sent_back_is_stale(scene, action):
    scene.send(2)
    (lease,), _ = scene.receive(invisible_ms=1_000)
    scene.later(1_200)
    (other,), bodies = scene.receive(member="b")
    assert bodies == [b"0", b"1"]
    assert scene.settle(other, action, member="b", bits=0b10, delay_ms=60_000) == OK
    assert scene.settle(other, member="b", bits=0b01) == OK
    assert scene.settle(lease, bits=0b01) == OK, "a repeat, for all that the broker knows"
    assert scene.settle(lease) == STALE
    assert scene.settle(lease, bits=0b10) == STALE


@pytest.mark.parametrize("delay_ms", [90_000, 20 * 3_600_000])
def test_a_message_waits_exactly_as_long_as_it_should(scene, delay_ms):
    scene.send()
    (lease,), _ = scene.receive()
    due_ms = scene.stage.clock.wall_ms() + delay_ms
    assert scene.settle(lease, SettleAction.NACK, delay_ms=delay_ms) == OK
    found = scene.stage.store.get("SCHEDULE_TOPIC_XXXX", ANY_TIME_QUEUE, 0, max_bytes=1)
    header, batch = next(iter_batches(found.data[0]))
    assert list(due_times(read_delayed_meta(batch, header), header)) == [due_ms]


def test_a_message_of_the_retry_topic_comes_to_the_same_receive(scene):
    scene.stage.features.writes.ensure_topic("%RETRY%g")
    batch = scene.stage.batch("%RETRY%g", bodies=(b"again",))
    scene.stage.features.writes.put_encoded([batch], lambda outcomes: None)
    scene.send()
    leases, bodies = scene.receive()
    assert sorted(bodies) == [b"0", b"again"]
    assert sorted(lease.is_retry for lease in leases) == [False, True]
    assert [scene.settle(lease) for lease in leases] == [OK, OK]


def dead_letters(stage) -> list:
    found = stage.store.get("%DLQ%g", 0, 0, max_bytes=1 << 20)
    data = b"".join(found.data)
    messages, position = [], 0
    while position < len(data):
        header = check_stored(data, position)
        messages += decode_messages(data, header, position=position)
        position += header.total_size
    return messages


def test_a_rejected_message_is_a_dead_letter_at_once(scene):
    scene.send(2)
    (lease,), _ = scene.receive()
    assert scene.settle(lease, SettleAction.REJECT, bits=0b10, reason="no such account") == OK
    (message,) = dead_letters(scene.stage)
    assert message.body == b"1"
    assert message.properties["LAST_FAILURE"] == "no such account"
    assert scene.settle(lease, bits=0b01) == OK
    assert scene.committed == 2


@pytest.mark.parametrize("own", ["t", "kept-aside"])
def test_a_dead_letter_never_returns_to_the_topic_that_it_comes_from(stage, own):
    scene = Scene(stage, dead_letter=own)
    scene.send(1)
    (lease,), _ = scene.receive()
    assert scene.settle(lease, SettleAction.REJECT) == OK
    assert scene.receive()[0] == []
    assert len(dead_letters(stage)) == (own == "t")


def test_a_dead_letter_in_a_table_stands_behind_what_was_compared_before(stage):
    scene = Scene(stage, dead_letter="kv")
    stage.features.state.topics.set(TopicConfig("kv", 1, 1, history=1), 0)
    stage.send(stage.batch(messages=[Message("t", b"dead", keys=["a"])]))
    (lease,), _ = scene.receive()
    payload = encode_payload([Message("kv", b"1", keys=["a"])])
    parts = batch_parts(
        payload,
        topic="kv",
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=0,
        born_timestamp=1,
        attributes=Attributes.HAS_EXPECTED,
        meta=ExpectingMeta("kv", expected=bytes(8)),
    )
    opaque = stage.begin_send(b"".join(parts))
    assert scene.settle(lease, SettleAction.REJECT) == OK
    assert stage.outcomes(opaque)[0].base_queue_offset == 0, "what it expected was so"
    assert stage.store.queue_bounds("kv", 0)[1] == 2


def test_a_message_that_failed_too_often_is_a_dead_letter(stage):
    scene = Scene(stage, retry_max_times=2)
    scene.send()
    for attempt in (1, 2, 3):
        (lease,), _ = scene.receive()
        assert lease.attempt == attempt
        assert dead_letters(stage) == []
        assert scene.settle(lease, SettleAction.NACK, delay_ms=0, reason="again") == OK
    assert [message.body for message in dead_letters(stage)] == [b"0"]
    assert scene.receive() == ([], [])
    assert scene.committed == 1


def test_a_message_whose_lease_ended_too_often_is_a_dead_letter(stage):
    scene = Scene(stage, retry_max_times=0)
    scene.send()
    scene.receive(invisible_ms=1_000)
    scene.later(1_300)
    assert [message.body for message in dead_letters(stage)] == [b"0"]


def test_each_message_of_the_retry_topic_has_failures_of_its_own(stage):
    scene = Scene(stage, retry_max_times=3)
    stage.features.writes.ensure_topic("%RETRY%g")
    messages = [
        as_system(Message("%RETRY%g", b"%d" % failures), {"RECONSUME_TIMES": str(failures)})
        for failures in (3, 1, 3, 0)
    ]
    batch = encode_batch(
        messages, topic="%RETRY%g", queue_id=0, producer_id=1, first_sequence=0, born_timestamp=1
    )
    stage.features.writes.put_encoded([batch], lambda outcomes: None)
    stage.end_tick()
    assert len(scene.receive(invisible_ms=1_000)[1]) == 4
    scene.later(1_300)
    assert [message.body for message in dead_letters(stage)] == [b"3", b"3"]
    (again, *rest), bodies = scene.receive()
    assert (sorted(bodies), again.attempt) == ([b"0", b"1"], 2)
    for one in (again, *rest):
        assert scene.settle(one, SettleAction.NACK, delay_ms=0) == OK
    assert [message.body for message in dead_letters(stage)] == [b"3", b"3"]
    for one in scene.receive()[0]:
        assert scene.settle(one, SettleAction.NACK, delay_ms=0) == OK
    assert len(dead_letters(stage)) == 3


def test_damaged_messages_wait_and_others_go_on(scene, monkeypatch):
    for _ in range(3):
        scene.send(2)
    for (lease,), _ in [scene.receive(2) for _ in range(3)]:
        scene.settle(lease, SettleAction.NACK, delay_ms=0)
    scene.send(1)
    store, damaged = scene.stage.store, {2}
    get = type(store).get

    def damaged_get(topic, queue_id, queue_offset, *, verify=False, **options):
        if verify and topic == "t" and queue_offset in damaged:
            raise CorruptRecord("planned")
        return get(store, topic, queue_id, queue_offset, **options)

    monkeypatch.setattr(store, "get", damaged_get)
    leases, bodies = scene.receive(10, verify=True)
    assert ([lease.first for lease in leases], len(bodies)) == ([0, 4, 6], 5)
    scene.later(1_300)
    assert scene.receive(10, verify=True) == ([], [])
    damaged.clear()
    scene.later(1_300)
    assert [lease.first for lease in scene.receive(10, verify=True)[0]] == [2]


def test_one_message_that_is_stored_costs_a_look_for_each_group(scene, monkeypatch):
    for group in ("g", "h"):
        for number in range(20):
            scene.join(f"{group}{number}", group=group)
    for group in ("g", "h"):
        for number in range(20):
            member = f"{group}{number}"
            wanted = ReceiveRequest(group, "t", member, suspend_timeout_ms=5_000)
            scene.stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=member.encode())
    table, looks = scene.stage.features.state.group_table, []
    monkeypatch.setattr(table, "check_consumes", looks.append)
    scene.send()
    assert sorted(looks) == ["g", "g", "h", "h"], "one that gets it and one that finds nothing"


def test_an_acknowledgement_costs_no_look_for_those_that_wait(scene, monkeypatch):
    scene.send()
    (lease,), _ = scene.receive()
    scene.begin(member="b", wait_ms=5_000)
    scene.stage.end_tick()
    table, looks = scene.stage.features.state.group_table, []
    monkeypatch.setattr(table, "check_consumes", looks.append)
    assert scene.settle(lease) == OK
    assert looks == []


def test_a_message_that_cannot_be_sent_back_comes_again(scene):
    scene.send()
    (lease,), _ = scene.receive()
    stage = scene.stage
    stage.store.failure = DiskFull("planned")
    opaque = scene.begin_settle(settlement(lease, SettleAction.REJECT))
    stage.store.failure = None
    stage.end_tick()
    codes = decode_header(SettleResponse, stage.answer(opaque).header).codes
    assert codes == [int(ResponseCode.DISK_FULL)]
    scene.later(1_200)
    (again,), bodies = scene.receive(member="b")
    assert (again.attempt, bodies, dead_letters(stage)) == (2, [b"0"], [])


def test_members_hold_no_more_than_the_group_may(stage):
    scene = Scene(stage, max_unsettled=3)
    scene.send(10)
    (lease,), bodies = scene.receive(10)
    assert len(bodies) == 3
    opaque = scene.begin(member="b", wait_ms=200)
    scene.later(400)
    with pytest.raises(SystemBusy, match=r"hold 3 messages.* a most of them, 3.*max_unsettled = 3"):
        stage.answer(opaque)
    opaque = scene.begin(member="b", wait_ms=5_000)
    scene.settle(lease, bits=0b011)
    assert scene.received(opaque)[1] == [b"3", b"4"]


def test_a_broker_gives_out_no_more_leases_than_it_may_keep(scene):
    scene.stage.features.state.windows.numbers.most = 1
    scene.send(4)
    scene.receive(1)
    with pytest.raises(SystemBusy, match="1 leases are given out"):
        scene.receive(1)


def test_a_member_that_is_gone_keeps_its_leases_for_a_while(stage):
    scene = Scene(stage, lost_grace_ms=2_000)
    scene.send(2)
    scene.receive(1), scene.receive(1, member="b")
    stage.features.client_gone(stage.peer(b"a"), stage.clock.monotonic_ms())
    scene.later(1_900)
    assert scene.receive(member="b") == ([], [])
    scene.later(300)
    assert scene.receive(member="b")[1] == [b"0"]


def test_a_member_that_came_back_keeps_its_leases(stage):
    scene = Scene(stage, lost_grace_ms=2_000)
    scene.send()
    (lease,), _ = scene.receive()
    stage.features.client_gone(stage.peer(b"a"), stage.clock.monotonic_ms())
    scene.later(1_000)
    scene.settle(lease, SettleAction.EXTEND, delay_ms=60_000)
    scene.later(3_000)
    assert scene.receive(member="b") == ([], [])


def test_members_that_left_and_hold_nothing_are_forgotten(scene):
    scene.send(1)
    (lease,), _ = scene.receive(1, attempt_id=5, invisible_ms=100_000)
    scene.receive(1, member="b")
    for member in "a", "b":
        leaving = UnregisterClientRequest(member)
        scene.stage.ask(RequestCode.UNREGISTER_CLIENT, leaving, peer=member.encode())
    scene.later(FORGET_MS)
    assert len(scene.stage.features.delivery.peers) == 1
    assert scene.settle(lease) == OK
    scene.later(FORGET_MS)
    assert len(scene.stage.features.delivery.peers) == 0


def test_a_receive_of_a_connection_that_is_gone_gets_nothing(scene):
    opaque = scene.begin(wait_ms=5_000)
    scene.stage.features.client_gone(scene.stage.peer(b"a"), 0)
    scene.send()
    assert opaque not in scene.stage.answers
    assert scene.receive(member="b")[1] == [b"0"]


def test_a_receive_reports_on_what_came_before(kept):
    kept.send(4)
    (lease,), _ = kept.receive(2)
    opaque = kept.begin(2, settle=[settlement(lease)])
    assert opaque not in kept.stage.answers, "it is not in the log yet"
    kept.stage.end_tick()
    header = decode_header(ReceiveResponse, kept.stage.answer(opaque).header)
    assert ([one.first for one in header.leases], header.settled) == ([2], [OK])
    assert kept.committed == 2
    opaque = kept.begin(2, wait_ms=5_000, settle=[settlement(lease), settlement(header.leases[0])])
    kept.stage.end_tick()
    header = decode_header(ReceiveResponse, kept.stage.answer(opaque).header)
    assert (header.leases, header.settled) == ([], [OK, OK]), "it does not wait with the report"


def test_a_report_counts_where_the_receive_that_brings_it_is_refused(scene):
    scene.send(2)
    (lease,), _ = scene.receive(1)
    scene.configure(consume_enable=False)
    opaque = scene.begin(settle=[settlement(lease, SettleAction.REJECT)])
    scene.stage.end_tick()
    header = decode_header(ReceiveResponse, scene.stage.answer(opaque).header)
    assert (header.leases, header.settled) == ([], [OK])
    assert len(dead_letters(scene.stage)) == 1


def test_a_receive_that_is_repeated_gets_the_same_leases(scene):
    scene.send(6)
    first, bodies = scene.receive(3, attempt_id=7)
    assert scene.receive(3, attempt_id=7) == (first, bodies)
    scene.settle(first[0], bits=0b001)
    (again,), bodies = scene.receive(3, attempt_id=7)
    assert (again.lease, again.count, bodies) == (first[0].lease, 2, [b"1", b"2"])
    (second,), _ = scene.receive(3, attempt_id=8)
    assert second.lease != first[0].lease


def test_a_receive_that_waits_ends_when_its_member_comes_by_another_connection(scene):
    opaque = scene.begin(wait_ms=5_000)
    wanted = ReceiveRequest("g", "t", "a", suspend_timeout_ms=5_000)
    other = scene.stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=b"another")
    scene.send()
    assert scene.received(opaque) == ([], [])
    assert scene.received(other)[1] == [b"0"]


def test_a_receive_that_waits_goes_on_when_a_report_comes_before_the_heartbeat(scene):
    scene.send()
    (lease,), _ = scene.receive()
    scene.stage.features.client_gone(scene.stage.peer(b"a"), scene.stage.clock.monotonic_ms())
    wanted = ReceiveRequest("g", "t", "a", suspend_timeout_ms=5_000)
    waits = scene.stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=b"again")
    report = SettleRequest("g", "t", "a", [settlement(lease)])
    scene.stage.ask(RequestCode.SETTLE_MESSAGES, report, peer=b"lone")
    scene.send()
    assert scene.received(waits)[1] == [b"0"]


def test_tags_that_nobody_wants_are_passed_over(scene):
    scene.join("a", expression="red")
    scene.join("b", expression="red")
    for number in range(6):
        scene.send(2, tag="red" if number % 2 else "blue")
    (lease,), bodies = scene.receive(3, expression="red")
    assert (bodies, lease.first, lease.end) == ([b"0", b"1", b"0"], 2, 7)
    assert scene.settle(lease) == OK
    assert scene.committed == 7
    (rest,), bodies = scene.receive(10, expression="red")
    assert (len(bodies), rest.first) == (3, 7)
    assert scene.settle(rest) == OK
    assert scene.committed == 12


def test_a_queue_without_anything_wanted_is_passed_over(scene):
    scene.join("a", expression="red")
    scene.send(5, tag="blue")
    opaque = scene.begin(expression="red")
    scene.later(100)
    assert scene.received(opaque) == ([], [])
    assert scene.committed == 5


def test_all_members_want_the_same(scene):
    with pytest.raises(InvalidArgument, match="subscribes to 't' with '\\*', not with 'red'"):
        scene.receive(expression="red")


def test_who_is_no_member_gets_nothing(scene):
    with pytest.raises(StaleGeneration):
        scene.receive(member="stranger")


def test_a_topic_that_is_not_there_is_named(scene):
    wanted = ReceiveRequest("g", "none", "a")
    with pytest.raises(TopicNotFound, match="none"):
        scene.stage.ask(RequestCode.RECEIVE_MESSAGE, wanted)


def test_a_group_without_settings_is_unknown(stage):
    wanted = ReceiveRequest("nobody", "t", "a")
    with pytest.raises(GroupNotFound):
        stage.ask(RequestCode.RECEIVE_MESSAGE, wanted)


def test_a_group_that_may_not_consume_gets_nothing(scene):
    scene.send()
    scene.configure(consume_enable=False)
    with pytest.raises(NoPermission, match="consume_enable"):
        scene.receive()


def test_a_group_that_may_not_consume_any_more_settles_what_it_holds(scene):
    scene.send()
    (lease,), _ = scene.receive()
    scene.configure(consume_enable=False)
    assert scene.settle(lease) == ResponseCode.SUCCESS
    assert scene.committed == lease.end


def test_a_member_of_the_other_mode_is_refused(scene):
    with pytest.raises(NoPermission, match="delivery = message, this member has queue: use Simple"):
        scene.join("c", delivery="queue")
    with pytest.raises(NoPermission, match="use SimpleConsumer"):
        scene.stage.pull()
    scene.join("c", group="other", delivery="queue")
    with pytest.raises(NoPermission, match="use PushConsumer"):
        scene.join("d", group="other")
    wanted = ReceiveRequest("other", "t", "c")
    with pytest.raises(InvalidArgument, match="delivery = queue"):
        scene.stage.ask(RequestCode.RECEIVE_MESSAGE, wanted)


def test_offsets_of_a_group_that_acknowledges_cannot_be_committed(scene):
    update = UpdateConsumerOffsetRequest("g", "x", [QueueOffsetEntry("t", 0, 0)])
    with pytest.raises(NoPermission):
        scene.stage.ask(RequestCode.UPDATE_CONSUMER_OFFSET, update)


def test_the_mode_of_a_group_with_members_stays(scene):
    with pytest.raises(InvalidArgument, match=r"has delivery = message, and 2 members"):
        scene.configure(delivery="queue")


def test_the_mode_of_a_group_stays_while_settled_messages_would_come_again(scene):
    scene.send(3)
    (lease,), _ = scene.receive()
    scene.settle(lease, bits=0b010)
    scene.leave("a", "b")
    with pytest.raises(InvalidArgument, match="1 messages of queue 0 of 't' are settled behind"):
        scene.configure(delivery="queue")
    scene.settle(lease, bits=0b001)
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    with pytest.raises(InvalidArgument, match="exists already"):
        scene.stage.ask(code, UpdateGroupRequest(GroupConfig("g"), must_be_new=True))
    assert scene.stage.features.state.windows.find(("g", "t", 0)) is not None
    scene.configure(delivery="queue")
    assert (scene.committed, len(scene.stage.features.state.windows)) == (2, 0)


def test_messages_that_a_topic_does_not_show_any_more_are_passed_over(scene):
    scene.send(5)
    scene.receive(1)
    scene.stage.features.state.topics.set(TopicConfig("t", 1, 1, retention_messages=2), 0)
    scene.send(5)
    (lease,), bodies = scene.receive()
    assert (bodies, lease.first) == ([b"3", b"4"], 8)
    assert scene.committed == 8


def test_progress_of_a_group_is_what_is_ready_held_and_waiting(scene):
    scene.send(10)
    (lease,), _ = scene.receive(4)
    scene.settle(lease, bits=0b0010)
    scene.settle(lease, SettleAction.NACK, bits=0b0001, delay_ms=9_000)
    scene.later(1_000)
    stats = scene.stage.ask(RequestCode.GET_CONSUME_STATS, ConsumeStatsRequest("g"), ConsumeStats)
    (queue,) = [one for one in stats.queues if one.topic == "t"]
    assert queue.window == WindowProgress(6, 2, 1, 0, 1_000)
    summary = scene.stage.ask(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, GetGroupsRequest("g"), GroupSummaries
    )
    assert summary.groups[0].lag == 9


def test_a_paused_group_gets_nothing_until_the_pause_is_over(scene):
    scene.send()
    scene.configure(paused_until=scene.stage.clock.wall_ms() + 2_000)
    opaque = scene.begin(wait_ms=10_000)
    scene.later(1_900)
    assert opaque not in scene.stage.answers
    scene.later(300)
    assert scene.received(opaque)[1] == [b"0"]


def test_a_member_of_a_paused_group_that_takes_no_answers_hinders_nobody(scene):
    scene.configure(paused_until=scene.stage.clock.wall_ms() + 2_000)
    opaque = scene.begin(wait_ms=5_000)

    def no_room():
        raise SystemBusy("the client does not take its answers")

    scene.stage.peer(b"a").room = no_room
    scene.send()
    scene.stage.features.delivery.serve()
    assert opaque not in scene.stage.answers
    scene.later(2_100)
    with pytest.raises(SystemBusy):
        scene.received(opaque)
    assert scene.receive(member="b")[1] == [b"0"]


def test_a_group_gets_no_more_messages_than_its_rate(scene):
    scene.send(100)
    scene.configure(max_messages_per_s=20)
    got = 0
    for _ in range(40):
        got += len(scene.receive(100)[1])
        scene.later(100)
    assert 60 <= got <= 100


def test_a_refused_message_waits_as_long_as_the_retries_of_the_group(stage):
    scene = Scene(stage, retry_delays="2s 4s")
    scene.send()
    for delay_ms in (2_000, 4_000, 4_000):
        (lease,), _ = scene.receive()
        scene.settle(lease, SettleAction.NACK)
        scene.later(delay_ms - 100)
        assert scene.receive() == ([], [])
        scene.later(300)


def test_a_group_begins_where_its_first_member_subscribed(stage):
    scene = Scene(stage)
    scene.leave("a", "b")
    scene.send()
    scene.join("a", where="LAST_OFFSET")
    scene.send(2)
    scene.join("b", where="LAST_OFFSET")
    assert scene.receive(member="b")[1] == [b"0", b"1"]
    assert scene.receive() == ([], [])


def test_a_topic_that_is_made_after_the_members_subscribed_is_read_from_its_first_message(stage):
    scene = Scene(stage)
    scene.leave("a", "b")
    scene.send(2)
    scene.join("a", where="LAST_OFFSET")
    assert scene.receive(1, is_earlier=True)[1] == [b"0"]
    assert scene.receive(1)[1] == [b"1"]


def test_a_topic_that_is_made_anew_is_read_from_its_first_message_by_any_member(stage):
    scene = Scene(stage)
    topics = stage.features.state.topics
    topics.delete("t", 0)
    topics.set(TopicConfig("t", 1, 1), 0)
    scene.send()
    scene.join("b", where="LAST_OFFSET")
    assert scene.receive(member="b")[1] == [b"0"]


def test_where_topics_ended_is_forgotten_with_the_last_member_that_names_them(stage):
    def join(member, *topics):
        named = [Subscription(topic) for topic in topics]
        data = ConsumerData("g", "CLUSTERING", "LAST_OFFSET", named, "message")
        beat = HeartbeatRequest(member, consumers=[data])
        stage.ask(RequestCode.HEART_BEAT, beat, peer=member.encode())

    join("a", "t", "u")
    join("b", "t")
    ends = stage.features.state.groups.group("g").ends
    assert ends.keys() == {"t", "u"}
    for number in range(10):
        join("a", f"u{number}")
    assert ends.keys() == {"t", "u9"}
    stage.features.delivery.topic_deleted("t")
    assert (ends["t"], ends.keys()) == ([], {"t", "u9"})
    stage.features.delivery.topic_deleted("never")
    assert ends.keys() == {"t", "u9"}


def test_a_queue_that_is_added_later_is_read_from_its_first_message(stage):
    scene = Scene(stage)
    scene.leave("a", "b")
    topics = stage.features.state.topics
    topics.set(TopicConfig("t", 2, 2), 0)
    scene.send(queue_id=1)
    scene.join("a", where="LAST_OFFSET")
    assert scene.receive() == ([], [])
    topics.set(TopicConfig("t", 3, 3), 0)
    scene.send(queue_id=2)
    assert [one.queue_id for one in scene.receive()[0]] == [2]


def test_a_reset_makes_receipts_stale(scene):
    scene.send(3)
    (lease,), _ = scene.receive()
    scene.settle(lease, bits=0b001)
    reset = ResetOffsetRequest("g", "t", where="FIRST")
    scene.stage.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
    assert scene.settle(lease) == STALE
    (again,), bodies = scene.receive()
    assert (len(bodies), again.attempt) == (3, 1)
    assert scene.settle(lease) == STALE


def test_what_is_held_can_be_listed_and_released(scene):
    scene.send(5)
    (lease,), _ = scene.receive(2)
    scene.receive(2, member="b")
    scene.settle(lease, SettleAction.NACK, bits=0b01, delay_ms=9_000)
    scene.later(1_000)
    found = scene.stage.ask(RequestCode.LIST_LEASES, ListLeasesRequest("g"), LeaseList)
    assert [(one.first, one.count, one.state, one.member) for one in found.leases] == [
        (0, 1, "waiting", ""),
        (1, 1, "leased", "a"),
        (2, 2, "leased", "b"),
    ]
    assert found.leases[1].held_ms == 1_000
    assert found.leases[1].left_ms == 59_000
    after = ListLeasesRequest("g", "", "t", 0, 1)
    rest = scene.stage.ask(RequestCode.LIST_LEASES, after, LeaseList)
    assert [one.first for one in rest.leases] == [2]
    released = scene.stage.ask(
        RequestCode.RELEASE_LEASES, ReleaseLeasesRequest("g", "b"), ReleasedLeases
    )
    assert released.messages == 2
    assert scene.receive(member="a")[0][0].attempt == 2


def test_a_deleted_topic_fails_receives_and_forgets_what_was_held(scene):
    scene.send()
    scene.receive()
    opaque = scene.begin(wait_ms=5_000)
    scene.stage.features.state.topics.delete("t", 0)
    with pytest.raises(TopicNotFound):
        scene.stage.answer(opaque)
    assert len(scene.stage.features.state.windows) == 0


def test_a_deleted_group_forgets_what_was_held(scene):
    scene.send()
    scene.receive()
    for member in ("a", "b"):
        scene.stage.features.state.groups.on_unregister(member)
    scene.stage.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest("g"))
    assert len(scene.stage.features.state.windows) == 0
    assert scene.stage.features.state.windows.numbers.runs == 0


def test_a_stopping_broker_answers_those_that_wait(scene):
    opaque = scene.begin(wait_ms=5_000)
    scene.stage.features.stopping()
    assert isinstance(scene.stage.answers[opaque], Exception)


def test_a_turn_gives_out_so_much_and_the_next_one_goes_on(scene):
    for _ in range(3):
        scene.stage.send(scene.stage.batch(bodies=(bytes(3 << 20),)))
    opaques = [scene.begin(1, wait_ms=0) for _ in range(3)]
    assert [opaque in scene.stage.answers for opaque in opaques] == [True, True, False]
    scene.stage.end_tick()
    assert [len(body) for body in scene.received(opaques[2])[1]] == [3 << 20]


def test_a_report_by_a_connection_of_its_own_is_no_sign_of_life(stage):
    scene = Scene(stage, lost_grace_ms=2_000)
    scene.send(2)
    (lease,), _ = scene.receive(1)
    waits = scene.begin(member="b", wait_ms=5_000)
    scene.received(waits)
    wanted = ReceiveRequest("g", "t", "a", settle=[settlement(lease)])
    for peer in (b"lone", b"another"):
        stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=peer)
        stage.end_tick()
        stage.features.delivery.client_gone(stage.peer(peer), stage.clock.monotonic_ms())
    scene.send()
    (held,), _ = scene.receive(1)
    scene.later(3_000)
    assert scene.settle(held) == OK, "the connection of its heartbeats stands"
    scene.send()
    scene.receive(1)
    stage.features.delivery.client_gone(stage.peer(b"a"), stage.clock.monotonic_ms())
    scene.later(2_500)
    assert scene.receive(1, member="b")[0][0].attempt == 2


def test_the_rest_of_a_batch_needs_no_read_and_a_topic_that_is_made_anew_has_its_own(scene):
    scene.send(10)
    assert scene.receive(3)[1] == [b"0", b"1", b"2"]
    store, reads = scene.stage.store, []
    get = store.get
    store.get = lambda *place, **options: reads.append(place) or get(*place, **options)
    assert scene.receive(3)[1] == [b"3", b"4", b"5"]
    assert reads == []
    state = scene.stage.features.state
    state.topics.delete("t", 0)
    state.topics.set(TopicConfig("t", 1, 1), 0)
    scene.stage.send(scene.stage.batch(bodies=[b"new"] * 10))
    assert scene.receive(4)[1] == [b"new"] * 4


@pytest.mark.parametrize("delivery", ["message", "fifo"])
def test_members_of_a_namespace_hold_no_more_than_its_quota(scene, delivery):
    stage = scene.stage
    quota = Namespace("ns", NamespaceQuota(unsettled_messages=4))
    stage.features.core.quotas.put(AccessList(1, [], [quota]))
    stage.features.state.topics.set(TopicConfig("ns%t", 1, 1), 0)
    for group in ("ns%a", "ns%b"):
        data = ConsumerData(group, "CLUSTERING", "FIRST_OFFSET", [Subscription("ns%t")], delivery)
        stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest(group, consumers=[data]), peer=b"m")
    stage.send(stage.batch("ns%t", bodies=[b"0", b"1", b"2", b"3", b"4", b"5"]))

    def receive(group: str, most=3, wait_ms=0) -> int:
        wanted = ReceiveRequest(group, "ns%t", group, most, suspend_timeout_ms=wait_ms)
        return stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=b"m")

    (lease,), bodies = scene.received(receive("ns%a"))
    assert len(bodies) == 3
    assert len(scene.received(receive("ns%b"))[1]) == 1
    with pytest.raises(SystemBusy, match="'ns' has 4 of 4 unsettled_messages at this broker"):
        stage.answer(receive("ns%b"))
    waits = receive("ns%b", wait_ms=5_000)
    scene.send(1)
    assert len(scene.receive()[1]) == 1, "others go on"
    wanted = SettleRequest("ns%a", "ns%t", "ns%a", [settlement(lease)])
    stage.begin(RequestCode.SETTLE_MESSAGES, wanted, peer=b"m")
    scene.later(200)
    assert len(scene.received(waits)[1]) == 3
    windows = stage.features.state.windows
    assert windows.unsettled_of("ns") == 4
    windows.drop_group("ns%b")
    assert windows.unsettled_of("ns") == 0

"""COMMIT_PROCESSED: messages are done and their outputs stored, all or none."""

from __future__ import annotations

import msgspec
import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.keys import credentials, user

from mqmesh.batch.delayed_batch import DelayedMeta, ExpectingMeta, ExpiringMeta
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.errors import (
    BrokerNotAvailable,
    DiskFull,
    InvalidArgument,
    MessageIllegal,
    NoPermission,
    NotMaster,
    OffsetIllegal,
    RemoteProtocolError,
    SequenceConflict,
    StaleGeneration,
    StaleReceipt,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import SCHEDULE_TOPIC, SENT_BACK_TOPIC, STATE_TOPIC, Message
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.command import ANYBODY, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    MessageLease,
    ReceiveRequest,
    ReceiveResponse,
    SettleAction,
    Settlement,
    SettleRequest,
    SettleResponse,
)
from mqmesh.protocol.groups import GroupConfig, ResetOffsetRequest, ResetWhere, UpdateGroupRequest
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    HeartbeatResponse,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
    Subscription,
)
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.processing import MAX_COMMIT_BATCHES, CommitProcessedRequest, ProcessedOffset
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    QueryConsumerOffsetRequest,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
from mqmesh.protocol.route import OnExpired, TopicConfig
from mqmesh.security.access_list import AccessList, Quota
from mqmesh.storage.interface import FlushDiskType, GetStatus
from mqmesh.units import MIB

HALF_MESSAGE = int(Attributes.TRANSACTION_HALF)


class Scene:
    """A broker with the topics t and bills, and the member a of the group g.

    Args:
        stage: The broker.
        delivery: Of the group.
    """

    def __init__(self, stage, delivery="message") -> None:
        self.stage = stage
        self.delivery = delivery
        for name in ("t", "bills"):
            stage.features.state.topics.set(TopicConfig(name, 2, 2), 0)
        stage.ask(
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            UpdateGroupRequest(GroupConfig("g", delivery=delivery)),
        )
        self.generation = {member: self.join(member) for member in "ab"}

    def join(self, member) -> int:
        subscriptions = [Subscription("t")]
        data = ConsumerData("g", "CLUSTERING", "FIRST_OFFSET", subscriptions, self.delivery)
        beat = HeartbeatRequest(member, consumers=[data])
        answer = self.stage.ask(
            RequestCode.HEART_BEAT, beat, HeartbeatResponse, peer=member.encode()
        )
        return answer.memberships[0].generation

    def send(self, count) -> None:
        self.stage.send(self.stage.batch(bodies=[b"%d" % number for number in range(count)]))

    def receive(self, most=10, member="a", **options) -> list[MessageLease]:
        wanted = ReceiveRequest("g", "t", member, most, **options)
        reply = self.stage.ask(RequestCode.RECEIVE_MESSAGE, wanted, peer=member.encode())
        header = reply if isinstance(reply, ReceiveResponse) else None
        return (header or decode_header(ReceiveResponse, reply.header)).leases

    def begin(self, *outputs, member="a", count=None, key=PRODUCER_KEY, **what) -> int:
        count = len(outputs) if count is None else count
        wanted = CommitProcessedRequest("g", "t", member, key, count, **what)
        code = RequestCode.COMMIT_PROCESSED
        return self.stage.begin(code, wanted, *outputs, peer=member.encode())

    def commit(self, *outputs, **options) -> None:
        opaque = self.begin(*outputs, **options)
        self.stage.end_tick()
        self.stage.answer(opaque)

    def output(self, *bodies, topic="bills", **options) -> bytes:
        return self.stage.batch(topic, bodies=bodies or (b"bill",), **options)

    def bills(self, queue_id=0) -> int:
        return int(self.stage.store.queue_bounds("bills", queue_id)[1])

    @property
    def committed(self) -> int:
        return self.stage.features.state.committed.query("g", "t", 0)

    def counted(self, name, feature="processing") -> int:
        feature = getattr(self.stage.features, feature)
        (metric,) = [one for one in feature.metrics if one.metric.name == name]
        return metric.read(feature)

    def settle(self, lease, action=SettleAction.ACK, member="a") -> int:
        wanted = SettleRequest("g", "t", member, [done(lease, action)])
        reply = self.stage.ask(RequestCode.SETTLE_MESSAGES, wanted, peer=member.encode())
        (code,) = decode_header(SettleResponse, reply.header).codes
        return code

    def lock(self, member="a", queue_id=0) -> int:
        wanted = LockBatchRequest("g", member, [LockEntry("t", queue_id)])
        answer = self.stage.ask(
            RequestCode.LOCK_BATCH_MQ, wanted, LockBatchResponse, peer=member.encode()
        )
        claim = QueryConsumerOffsetRequest("g", [QueueOffsetEntry("t", queue_id)], member)
        found = self.stage.ask(RequestCode.QUERY_CONSUMER_OFFSET, claim, ConsumerOffsets)
        self.generation[member] = found.generation
        return answer.queues[0].token

    def commit_plainly(self, offset, member="a", generation=None) -> None:
        generation = self.generation[member] if generation is None else generation
        entries = [QueueOffsetEntry("t", 0, offset)]
        update = UpdateConsumerOffsetRequest("g", member, entries, generation)
        self.stage.ask(RequestCode.UPDATE_CONSUMER_OFFSET, update, peer=member.encode())

    def die_behind(self, topic) -> None:
        """Writes nothing more once the log has a batch of a topic."""
        put = self.stage.store.put

        def put_and_die(batches, store_timestamp, **options):
            results = put(batches, store_timestamp, **options)
            if any(batch.topic == topic for batch in batches):
                self.stage.store.failure = DiskFull("planned")
            return results

        self.stage.store.put = put_and_die

    def save_and_restart(self) -> None:
        core = self.stage.features.core
        core.state.save()
        core.write_state()
        self.restart()

    def restart(self) -> None:
        """Begins anew with what is in the log."""
        self.stage.store.failure = None
        self.stage.restart()
        self.stage.features.load()
        self.stage.features.opened()


def done(lease, action=SettleAction.ACK, bits=None) -> Settlement:
    size = lease.end - lease.first
    mask = (1 << size) - 1 if bits is None else bits
    data = mask.to_bytes((size + 7) // 8, "little")
    return Settlement(lease.lease, lease.queue_id, lease.first, data, int(action))


def encoded(message, attributes, meta, queue_id=0, first_sequence=100_000) -> bytes:
    payload = encode_payload([message])
    parts = batch_parts(
        payload,
        topic=message.topic,
        queue_id=queue_id,
        producer_id=PRODUCER_ID,
        first_sequence=first_sequence,
        born_timestamp=1,
        attributes=int(attributes),
        meta=msgspec.structs.replace(meta, tag_hashes=payload.tag_hashes),
    )
    return b"".join(parts)


def delayed(first_sequence) -> bytes:
    message, meta = Message("bills", b"later", delay_level=3), DelayedMeta("bills", (), "", 3, b"")
    return encoded(message, Attributes.HAS_DELAY, meta, 1, first_sequence)


@pytest.fixture
def scene(make_stage):
    return Scene(make_stage(is_kept=True))


@pytest.fixture
def queues(make_stage):
    """The same with a group whose members divide the queues."""
    return Scene(make_stage(is_kept=True), "queue")


def test_the_bytes_of_a_request():
    settled = Settlement(5, 1, 2, b"\x03")
    request = CommitProcessedRequest("g", "t", "a", b"k" * 16, 1, [settled])
    assert encode_header(request).hex() == (
        "97a167a174a161c4106b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b019198050102c4010300ffa0c290"
    )
    offset = ProcessedOffset(1, -1, 4, 7, 1)
    request = CommitProcessedRequest("g", "t", "a", b"k" * 16, 0, [], [offset])
    assert encode_header(request).hex() == (
        "97a167a174a161c4106b6b6b6b6b6b6b6b6b6b6b6b6b6b6b6b0090919501ff040701"
    )


# ---- Messages that are acknowledged one by one -----------------------------------------


def test_messages_are_done_and_what_was_made_of_them_is_stored(scene):
    scene.send(4)
    (lease,) = scene.receive()
    scene.commit(scene.output(b"x", b"y"), scene.output(queue_id=1), settlements=[done(lease)])
    assert (scene.bills(0), scene.bills(1), scene.committed) == (2, 1, 4)
    assert scene.receive(member="b") == []
    assert scene.counted("processed_commits_total") == 1


def test_the_log_has_both_or_none_and_is_told_once(scene):
    scene.send(4)
    (lease,) = scene.receive()
    scene.commit(scene.output(), settlements=[done(lease, bits=0b0101)])
    assert not scene.stage.features.state.windows.changed, "the commit itself has said it"
    scene.restart()
    window = scene.stage.features.state.windows.find(("g", "t", 0))
    assert [run.bits << run.first for run in window.runs] == [0b1010]
    assert scene.committed == 1
    assert scene.settle(lease) == 0


def test_a_commit_whose_hand_out_the_log_does_not_know_yet(scene):
    scene.send(4)
    (lease,) = scene.receive(2)
    scene.receive(2)
    assert scene.stage.features.state.windows.changed, "less than 2 ms ago"
    scene.commit(scene.output(), settlements=[done(lease)])
    scene.restart()
    window = scene.stage.features.state.windows.find(("g", "t", 0))
    assert (window.floor, window.next_offset) == (2, 4)


def test_a_repeated_commit_is_answered_as_done(scene):
    scene.send(2)
    (lease,) = scene.receive()
    outputs = scene.output(), scene.output(queue_id=1)
    for _ in range(2):
        scene.commit(*outputs, settlements=[done(lease)])
    scene.restart()
    scene.commit(*outputs, settlements=[done(lease)])
    assert (scene.bills(0), scene.bills(1)) == (1, 1)


def test_other_messages_under_the_same_sequences_are_refused(scene):
    scene.send(2)
    (lease,) = scene.receive()
    scene.commit(scene.output(first_sequence=7), settlements=[done(lease, bits=1)])
    with pytest.raises(SequenceConflict):
        other = scene.output(b"other", first_sequence=7)
        scene.commit(other, settlements=[done(lease, bits=2)])
    assert (scene.bills(), scene.committed) == (1, 1)
    assert scene.settle(lease) == 0


@pytest.mark.parametrize("first", ["settled", "handed out again", "committed in part"])
def test_of_messages_that_are_not_all_its_own_nothing_is_stored(scene, first):
    scene.send(2)
    (lease,) = scene.receive(invisible_ms=1_000)
    if first == "settled":
        scene.settle(lease)
    elif first == "committed in part":
        scene.commit(scene.output(), settlements=[done(lease, bits=1)])
    else:
        scene.stage.clock.advance(1_100)
        scene.stage.features.tick(scene.stage.clock.monotonic_ms())
        assert scene.receive(member="b")
    before = scene.bills()
    with pytest.raises(StaleReceipt, match="nothing is stored"):
        scene.commit(scene.output(topic="new"), settlements=[done(lease)])
    assert scene.bills() == before
    assert scene.stage.features.state.topics.get("new") is None, "nothing has come of it"
    assert scene.counted("processed_refused_total") == 1
    assert scene.counted("delivery_stale_total", "delivery") == 1


def test_late_work_counts_while_nobody_else_has_the_messages(scene):
    scene.send(1)
    (lease,) = scene.receive(invisible_ms=1_000)
    scene.stage.clock.advance(1_100)
    scene.stage.features.tick(scene.stage.clock.monotonic_ms())
    scene.commit(scene.output(), settlements=[done(lease)])
    assert scene.receive(member="b") == []
    assert scene.bills() == 1


def test_one_stale_receipt_of_several_refuses_the_whole(scene):
    scene.send(4)
    (first,), (second,) = scene.receive(2), scene.receive(2)
    scene.settle(second)
    with pytest.raises(StaleReceipt):
        scene.commit(scene.output(), settlements=[done(first), done(second)])
    assert (scene.bills(), scene.committed) == (0, 0)
    assert scene.settle(first) == 0


def test_a_commit_without_outputs_is_an_acknowledgement_and_may_be_repeated(scene):
    scene.send(3)
    (lease,) = scene.receive()
    scene.commit(settlements=[done(lease, bits=0b001)], key=b"")
    for _ in range(2):
        scene.commit(settlements=[done(lease, bits=0b011)], key=b"")
    assert scene.committed == 2
    assert scene.settle(lease, SettleAction.REJECT) == 0
    with pytest.raises(StaleReceipt):
        scene.commit(settlements=[done(lease)], key=b"")


def test_a_message_behind_what_the_log_has_lost_is_nobodys(scene):
    scene.send(4)
    (lease,) = scene.receive()
    scene.stage.store.cut_offset = lambda topic, queue_id, epoch: 3
    scene.stage.store.epoch = lambda: 5
    old = msgspec.structs.replace(done(lease), lease=4 << 32 | 1)
    with pytest.raises(StaleReceipt):
        scene.commit(scene.output(), settlements=[old])
    assert scene.bills() == 0


def test_what_fails_in_the_same_turn_goes_its_own_way(scene):
    """With a receive that makes a dead letter of a message that has expired."""
    expiring = TopicConfig("t", 2, 2, message_ttl=True, on_expired=OnExpired.DEAD_LETTER)
    scene.stage.features.state.topics.set(expiring, 0)
    scene.send(2)
    (lease,) = scene.receive()
    meta = ExpiringMeta("t", (), "", 0, b"", expires_ms=scene.stage.clock.wall_ms() + 10)
    scene.stage.send(encoded(Message("t", b"old"), Attributes.HAS_EXPIRY, meta))
    scene.stage.clock.advance(20)
    wanted = ReceiveRequest("g", "t", "a", 10, settle=[done(lease, SettleAction.REJECT, 0b01)])
    received = scene.stage.begin(RequestCode.RECEIVE_MESSAGE, wanted, peer=b"a")
    opaque = scene.begin(scene.output(), settlements=[done(lease, bits=0b10)])
    scene.stage.end_tick()
    assert decode_header(ReceiveResponse, scene.stage.answer(received).header).settled == [0]
    scene.stage.answer(opaque)
    assert scene.stage.store.queue_bounds("%DLQ%g", 0)[1] == 2
    assert (scene.bills(), scene.committed) == (1, 3)


def test_only_acknowledgements_are_committed(scene):
    scene.send(1)
    (lease,) = scene.receive()
    with pytest.raises(InvalidArgument, match="acknowledged"):
        scene.commit(scene.output(), settlements=[done(lease, SettleAction.NACK)])
    with pytest.raises(InvalidArgument, match="either"):
        scene.commit(scene.output())
    assert scene.bills() == 0


def test_a_disk_without_room_changes_nothing(scene):
    scene.send(1)
    (lease,) = scene.receive()
    scene.stage.clock.advance(10)
    scene.stage.end_tick()
    scene.stage.store.failure = DiskFull("planned")
    with pytest.raises(DiskFull):
        scene.commit(scene.output(), settlements=[done(lease)])
    scene.stage.store.failure = None
    assert scene.committed == 0
    scene.commit(scene.output(), settlements=[done(lease)])
    assert (scene.bills(), scene.committed) == (1, 1)


def test_it_is_answered_when_it_is_safe(make_stage):
    scene = Scene(make_stage(is_kept=True, flush_disk_type=FlushDiskType.SYNC_FLUSH))
    scene.send(1)
    (lease,) = scene.receive()
    scene.stage.store.synced = int(scene.stage.store.durable_offset())
    output = scene.output()
    opaque = scene.begin(output, settlements=[done(lease)])
    again = scene.begin(output, settlements=[done(lease)])
    scene.stage.end_tick()
    assert not {opaque, again} & scene.stage.answers.keys()
    assert scene.receive(member="b") == []
    assert scene.stage.store.get("bills", 0, 0).status is GetStatus.NO_NEW_MESSAGE
    assert scene.counted("processed_commits_total") == 0
    scene.stage.store.synced = None
    scene.stage.features.durable()
    scene.stage.answer(opaque)
    scene.stage.answer(again)
    assert scene.counted("processed_commits_total") == 2


@pytest.mark.parametrize("event", ["the disk is late", "the master is isolated"])
def test_what_is_stored_and_not_safe_is_to_be_repeated(make_stage, event):
    scene = Scene(make_stage(is_kept=True, flush_disk_type=FlushDiskType.SYNC_FLUSH))
    scene.send(1)
    (lease,) = scene.receive()
    scene.stage.store.synced = int(scene.stage.store.durable_offset())
    output = scene.output()
    opaque = scene.begin(output, settlements=[done(lease)])
    if event == "the disk is late":
        scene.stage.clock.advance(5_001)
        scene.stage.features.tick(scene.stage.clock.monotonic_ms())
    else:
        scene.stage.features.writes.refuse_waiting(NotMaster("planned"))
    with pytest.raises(BrokerNotAvailable, match=r"not safe yet.*repeat|planned"):
        scene.stage.answer(opaque)
    opaque = scene.begin(output, settlements=[done(lease)])
    scene.stage.store.synced = None
    scene.stage.features.durable()
    scene.stage.answer(opaque)
    assert (scene.bills(), scene.committed) == (1, 1)


def test_an_answer_that_nobody_is_there_to_make_safer_is_counted(scene, monkeypatch):
    scene.send(1)
    (lease,) = scene.receive()
    point = scene.stage.features.core.commit_point
    monkeypatch.setattr(point, "status_of", lambda end: SendStatus.SLAVE_NOT_AVAILABLE)
    scene.commit(scene.output(), settlements=[done(lease)])
    assert scene.counted("unsafe_answers_total", "sending") == {("slave_not_available",): 1}


@pytest.mark.parametrize("failure", ["nack", "reject", "lease ended"])
def test_a_message_that_was_sent_back_is_done_wherever_its_retry_is_in_the_log(scene, failure):
    scene.send(2)
    (lease,) = scene.receive(invisible_ms=1_000)
    scene.stage.end_tick()
    if failure == "lease ended":
        config = GroupConfig("g", delivery="message", retry_max_times=0)
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        scene.stage.ask(code, UpdateGroupRequest(config))
    scene.die_behind(SENT_BACK_TOPIC)
    if failure == "lease ended":
        scene.stage.clock.advance(1_100)
        scene.stage.features.tick(scene.stage.clock.monotonic_ms())
    else:
        action = SettleAction.NACK if failure == "nack" else SettleAction.REJECT
        sent_back = msgspec.structs.replace(done(lease, action, 0b01), delay_ms=60_000)
        wanted = SettleRequest("g", "t", "a", [sent_back])
        scene.stage.begin(RequestCode.SETTLE_MESSAGES, wanted, peer=b"a")
    scene.stage.end_tick()
    assert scene.stage.store.failure is not None, "it died meanwhile"
    scene.restart()
    left = [] if failure == "lease ended" else [(1, 2)]
    window = scene.stage.features.state.windows.find(("g", "t", 0))
    assert [(run.low, run.end) for run in window.runs] == left
    with pytest.raises(StaleReceipt):
        scene.commit(scene.output(), settlements=[done(lease)])
    assert scene.bills() == 0


# ---- Outputs ---------------------------------------------------------------------------


def test_who_may_not_send_to_the_topic_of_an_output_commits_nothing(scene):
    scene.send(1)
    (lease,) = scene.receive()
    scene.stage.guard.forbidden.add("bills")
    with pytest.raises(NoPermission):
        scene.commit(scene.output(), settlements=[done(lease)])
    assert ("SEND_MESSAGE", "bills") in scene.stage.guard.told, "the right to send is asked for"
    assert ("COMMIT_PROCESSED", "t") in scene.stage.guard.told
    with pytest.raises(NoPermission, match="key"):
        scene.commit(scene.output(), settlements=[done(lease)], key=b"another key, too")
    assert scene.committed == 0


def test_limits_of_a_commit(scene):
    scene.send(1)
    (lease,) = scene.receive()
    with pytest.raises(MessageIllegal, match="4194304"):
        large = [scene.output(bytes([n]) * MIB, first_sequence=n) for n in range(5)]
        scene.commit(*large, settlements=[done(lease)])
    with pytest.raises(RemoteProtocolError, match=str(MAX_COMMIT_BATCHES)):
        scene.commit(count=MAX_COMMIT_BATCHES + 1, settlements=[done(lease)])
    with pytest.raises(RemoteProtocolError, match="1 batches"):
        scene.commit(scene.output(), count=2, settlements=[done(lease)])
    with pytest.raises(MessageIllegal, match="half"):
        half = scene.output(attributes=HALF_MESSAGE)
        scene.commit(half, settlements=[done(lease)])
    assert (scene.bills(), scene.committed) == (0, 0)


def test_an_output_expects_no_revision(scene):
    scene.stage.features.load()
    scene.stage.features.state.topics.update(TopicConfig("kv", 1, 1, history=1), 0)
    scene.send(1)
    (lease,) = scene.receive()
    meta = ExpectingMeta("kv", expected=bytes(8))
    output = encoded(Message("kv", b"1", keys=["k"]), Attributes.HAS_EXPECTED, meta)
    with pytest.raises(MessageIllegal, match="expected revisions"):
        scene.commit(output, settlements=[done(lease)])


def test_tables_keep_nothing_of_commits_that_were_refused(scene):
    scene.stage.features.load()
    scene.stage.features.state.topics.update(TopicConfig("kv", 1, 1, history=1), 0)
    scene.send(1)
    (lease,) = scene.receive()
    scene.stage.end_tick()
    scene.stage.store.failure = DiskFull("planned")
    numbers = set()
    for _ in range(3):
        with pytest.raises(DiskFull):
            output = scene.output(messages=[Message("kv", b"1", keys=["k"])], topic="kv")
            scene.commit(output, settlements=[done(lease)])
        numbers.add(scene.stage.features.writes.number)
    assert len(numbers) == 3, "they forget with the next number"


def test_a_commit_that_is_refused_is_charged_to_the_quota(scene):
    users = [user(credentials(ANYBODY.name), quota=Quota(send_bytes_per_s=1_000))]
    scene.stage.features.core.quotas.put(AccessList(1, users))
    scene.send(1)
    (lease,) = scene.receive()
    scene.stage.clock.advance(10_000)
    good, bad = scene.output(bytes(5_000)), scene.output(attributes=HALF_MESSAGE)
    with pytest.raises(MessageIllegal, match="half"):
        scene.commit(good, bad, settlements=[done(lease)])
    with pytest.raises(SystemBusy, match="send_bytes_per_s"):
        scene.commit(good, bad, settlements=[done(lease)])


def test_a_commit_pushes_nothing_out_of_what_is_remembered(scene):
    scene.send(1)
    (lease,) = scene.receive()
    plain = [scene.output() for _ in range(4)]
    scene.stage.send(*plain)
    with pytest.raises(MessageIllegal, match=r"5 batches for queue 1 of 'bills'.* 4 for each"):
        scene.commit(*[scene.output(queue_id=1) for _ in range(5)], settlements=[done(lease)])
    with pytest.raises(MessageIllegal, match="129 batches of delayed"):
        scene.commit(*[delayed(number) for number in range(129)], settlements=[done(lease)])
    scene.commit(*[scene.output(queue_id=1) for _ in range(4)], settlements=[done(lease)])
    scene.stage.send(*plain)
    assert (scene.bills(0), scene.bills(1)) == (4, 4)


def test_a_repeat_is_not_called_stale_while_nobody_can_say_so(make_stage):
    scene = Scene(make_stage(is_kept=True, max_producers_per_connection=1))
    scene.send(2)
    (first,), (second,), key = scene.receive(1), scene.receive(1, "b"), b"k" * 16
    output, other = scene.output(), scene.output(producer_id=producer_id_of(key))
    scene.commit(output, settlements=[done(first)])
    scene.commit(other, settlements=[done(second)], member="b", key=key)
    with pytest.raises(SystemBusy, match="max_producers_per_connection"):
        scene.commit(output, settlements=[done(first)], member="b")


def test_outputs_of_another_commit_are_a_conflict(scene):
    scene.send(4)
    (lease,) = scene.receive()
    first, second = scene.output(first_sequence=7), scene.output(queue_id=1)
    scene.commit(first, second, settlements=[done(lease, bits=0b01)])
    with pytest.raises(SequenceConflict, match="sequences 7 to 7 to queue 0 of 'bills'"):
        scene.commit(first, second, settlements=[done(lease, bits=0b10)])
    with pytest.raises(SequenceConflict, match="by another commit"):
        scene.commit(scene.output(), second, settlements=[done(lease, bits=0b01)])
    assert (scene.bills(0), scene.bills(1), scene.committed) == (1, 1, 1)


def test_a_busy_broker_is_counted_and_a_key_is_whole(make_stage):
    scene = Scene(make_stage(is_kept=True, max_producers_per_connection=1))
    scene.send(1)
    (lease,) = scene.receive()
    scene.commit(scene.output(), settlements=[done(lease, bits=1)], key=PRODUCER_KEY)
    with pytest.raises(InvalidArgument, match="16 bytes"):
        scene.commit(scene.output(), settlements=[done(lease)], key=b"short")
    scene.send(1)
    (lease,) = scene.receive()
    with pytest.raises(SystemBusy, match="max_producers_per_connection"):
        scene.commit(scene.output(), settlements=[done(lease)], key=b"k" * 16)
    assert scene.counted("busy_refusals_total", "sending") == 1
    scene.commit(settlements=[done(lease)], key=b"k" * 16)
    assert scene.committed == 2


def test_only_outputs_are_counted_as_stored(scene):
    scene.send(2)
    (lease,) = scene.receive()
    before = scene.counted("put_messages_total", "sending")
    scene.commit(scene.output(b"x", b"y"), settlements=[done(lease)])
    assert scene.counted("put_messages_total", "sending") == before + 2


def test_one_output_that_is_refused_refuses_the_whole(make_stage):
    scene = Scene(make_stage(is_kept=True, auto_create_topic_enable=False))
    scene.send(1)
    (lease,) = scene.receive()
    with pytest.raises(TopicNotFound):
        scene.commit(scene.output(), scene.output(topic="gone"), settlements=[done(lease)])
    assert (scene.bills(), scene.committed) == (0, 0)


def test_no_output_is_stored_in_front_of_its_topic(scene):
    scene.send(1)
    (lease,) = scene.receive()
    with pytest.raises(TopicNotFound):
        scene.commit(scene.output(topic="new"), settlements=[done(lease)])
    scene.stage.clock.advance(10)
    scene.stage.end_tick()
    scene.stage.features.state.topics.create("new", 1, 0)
    put, failures = scene.stage.store.put, [DiskFull("planned"), DiskFull("planned")]

    def put_later(batches, store_timestamp, **options):
        if failures:
            raise failures.pop()
        return put(batches, store_timestamp, **options)

    scene.stage.store.put = put_later
    with pytest.raises(DiskFull):
        scene.commit(scene.output(topic="new"), settlements=[done(lease)])
    assert scene.committed == 0
    scene.die_behind("new")
    scene.begin(scene.output(topic="new"), settlements=[done(lease)])
    scene.restart()
    assert scene.stage.store.queue_bounds("new", 0)[1] == 1
    assert scene.stage.features.state.topics.get("new") is not None, "in front of its message"


def test_delayed_outputs_wait_in_the_schedule(scene):
    scene.send(1)
    (lease,) = scene.receive()
    for _ in range(2):
        scene.commit(scene.output(first_sequence=9), delayed(0), settlements=[done(lease)])
    assert scene.stage.store.queue_bounds(SCHEDULE_TOPIC, 2)[1] == 1
    assert (scene.bills(), scene.committed) == (1, 1)


# ---- Queues ----------------------------------------------------------------------------


def processed(token, known, end, queue_id=0) -> list[ProcessedOffset]:
    return [ProcessedOffset(queue_id, known, end, token)]


def test_the_owner_of_a_queue_commits_its_progress_with_the_outputs(queues):
    queues.send(10)
    token = queues.lock()
    queues.commit(queues.output(), offsets=processed(token, -1, 4))
    queues.commit(queues.output(), offsets=processed(token, 4, 7))
    assert (queues.bills(), queues.committed) == (2, 7)
    queues.restart()
    assert queues.committed == 7


def test_a_repeated_commit_of_a_queue_is_answered_as_done(queues):
    queues.send(10)
    token = queues.lock()
    output = queues.output()
    for _ in range(2):
        queues.commit(output, offsets=processed(token, -1, 4))
    queues.restart()
    queues.commit(output, offsets=processed(token, -1, 4))
    assert (queues.bills(), queues.committed) == (1, 4)


@pytest.mark.parametrize(
    ("token", "known", "end"), [(99, 3, 4), (0, 3, 4), (1, 2, 4), (1, 5, 5), (1, -1, 4), (1, 4, 8)]
)
def test_a_wrong_token_or_place_refuses_the_whole(queues, token, known, end):
    queues.send(10)
    own = queues.lock()
    queues.commit(queues.output(), offsets=processed(own, -1, 3))
    with pytest.raises(StaleGeneration):
        offsets = processed(own if token == 1 else token, known, end)
        queues.commit(queues.output(), offsets=offsets)
    with pytest.raises(InvalidArgument, match="no progress"):
        queues.commit(queues.output(), offsets=processed(own, 3, 3))
    assert (queues.bills(), queues.committed) == (1, 3)


def test_nothing_is_stored_behind_a_commit_that_is_not(queues):
    queues.send(10)
    token = queues.lock()
    first = queues.output()
    queues.stage.store.failure = DiskFull("planned")
    with pytest.raises(DiskFull):
        queues.commit(first, offsets=processed(token, -1, 4))
    queues.stage.store.failure = None
    with pytest.raises(StaleGeneration, match="is -1, not 4"):
        queues.commit(queues.output(), offsets=processed(token, 4, 8))
    queues.commit(first, offsets=processed(token, -1, 4))
    queues.commit(queues.output(), offsets=processed(token, 4, 8))
    assert (queues.bills(), queues.committed) == (2, 8)


def test_outputs_of_a_member_that_was_replaced_are_never_stored(queues):
    queues.send(10)
    old = queues.lock()
    now_ms = queues.stage.clock.monotonic_ms()
    queues.stage.features.client_gone(queues.stage.peer(b"a"), now_ms)
    queues.stage.clock.advance(60_000)
    queues.stage.features.tick(queues.stage.clock.monotonic_ms())
    new = queues.lock("b")
    with pytest.raises(StaleGeneration):
        queues.commit(queues.output(), offsets=processed(old, -1, 4))
    queues.commit(queues.output(), offsets=processed(new, -1, 2), member="b")
    assert (queues.bills(), queues.committed) == (1, 2)


def test_a_late_plain_commit_does_not_put_the_group_back(queues):
    queues.send(10)
    token = queues.lock()
    queues.commit_plainly(2)
    queues.commit(queues.output(), offsets=processed(token, 2, 6))
    with pytest.raises(OffsetIllegal, match="does not go back"):
        queues.commit_plainly(2)
    queues.commit_plainly(6)
    assert queues.committed == 6


def test_what_was_processed_stays_so_whoever_owns_the_queue_and_wherever_the_log_is(queues):
    queues.send(10)
    queues.commit(queues.output(), offsets=processed(queues.lock(), -1, 6))
    with pytest.raises(OffsetIllegal, match="does not go back"):
        queues.commit_plainly(2, generation=0)
    locked = LockBatchRequest("g", "a", [LockEntry("t", 0)])
    queues.stage.ask(RequestCode.UNLOCK_BATCH_MQ, locked, peer=b"a")
    queues.lock("b")
    with pytest.raises(OffsetIllegal, match="does not go back"):
        queues.commit_plainly(5, member="b")
    queues.commit_plainly(7, member="b")
    queues.save_and_restart()
    with pytest.raises(OffsetIllegal, match="does not go back"):
        queues.commit_plainly(2, generation=0)
    assert queues.committed == 7


def test_an_administrator_may_have_messages_processed_once_more(queues):
    queues.send(10)
    queues.commit(queues.output(), offsets=processed(queues.lock(), -1, 6))
    code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
    for where, offset in ((ResetWhere.OFFSET, 6), (ResetWhere.FIRST, 0)):
        queues.stage.ask(code, ResetOffsetRequest("g", "t", where, 0, queue_offset=offset))
    for offset in (0, 4, 2):
        queues.stage.features.state.moved.forget("g")  # as if its members had followed
        queues.commit_plainly(offset, generation=0)
        queues.save_and_restart()
        assert queues.committed == offset


def test_a_repeat_without_outputs_is_answered_as_done(queues):
    queues.send(10)
    token = queues.lock()
    for known, end in ((-1, 4), (4, 8), (-1, 4), (4, 8)):
        queues.commit(offsets=processed(token, known, end), key=b"")
    with pytest.raises(StaleGeneration):
        queues.commit(queues.output(), offsets=processed(token, -1, 4))
    assert (queues.bills(), queues.committed) == (0, 8)


def test_a_commit_that_is_refused_claims_nothing_and_offsets_have_room_together(make_stage):
    queues = Scene(make_stage(is_kept=True, max_consumer_offsets=2), "queue")
    queues.send(1)
    queues.stage.send(queues.stage.batch(queue_id=1))
    tokens = [queues.lock(queue_id=number) for number in range(2)]
    queues.stage.features.state.groups.claims.clear()
    queues.stage.features.state.committed.commit("h", "t", 0, 0)
    both = [*processed(tokens[0], -1, 1), *processed(tokens[1], -1, 1, queue_id=1)]
    with pytest.raises(SystemBusy, match="max_consumer_offsets"):
        queues.commit(queues.output(), offsets=both)
    assert queues.stage.features.state.groups.claims.find("g", "t", 0) is None
    queues.commit(queues.output(), offsets=both[:1])
    assert queues.stage.features.state.groups.claims.find("g", "t", 0).client_id == "a"


def test_no_queue_is_committed_beyond_its_end_or_twice(queues):
    queues.send(3)
    token = queues.lock()
    with pytest.raises(OffsetIllegal, match="queue's end"):
        queues.commit(queues.output(), offsets=processed(token, -1, 4))
    with pytest.raises(InvalidArgument, match="once"):
        queues.commit(queues.output(), offsets=processed(token, -1, 1) * 2)
    assert queues.bills() == 0


def test_each_delivery_has_its_own_way(scene, queues):
    scene.send(1)
    queues.send(1)
    with pytest.raises(NoPermission, match="delivery"):
        scene.commit(scene.output(), offsets=processed(1, 0, 1))
    with pytest.raises(InvalidArgument, match="delivery"):
        lease = MessageLease(1, 0, 0, 1, 1, 1, 1)
        queues.commit(queues.output(), settlements=[done(lease)])


def test_a_snapshot_of_the_state_goes_on_beside_commits(scene):
    scene.send(8)
    leases = [scene.receive(2)[0] for _ in range(4)]
    scene.stage.clock.advance(10)
    scene.stage.end_tick()
    state = scene.stage.features.core.state
    for number, lease in enumerate(leases):
        state._log_end = (number + 1) << 30  # as if the log had a new segment
        scene.commit(scene.output(), settlements=[done(lease)])
        state.save()
        state.write()
    end = scene.stage.store.queue_bounds(STATE_TOPIC, 0)[1]
    assert state._next_offset == end
    scene.restart()
    assert (scene.bills(), scene.committed) == (4, 8)

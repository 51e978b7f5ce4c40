"""Transactions at a broker without sockets, and after it was started again on the same store."""

from __future__ import annotations

import pytest

from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    CorruptRecord,
    DiskFull,
    NoPermission,
)
from mqmesh.half_batch import half_parts, have_immunity
from mqmesh.message import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
    Message,
    format_message_id,
)
from mqmesh.payload import encode_payload
from mqmesh.protocol.codes import RequestCode, ResponseCode
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.transactions import (
    CheckTransactionState,
    Decision,
    End,
    EndHalfMessageRequest,
    EndOutcome,
    EndTransactionRequest,
    HalfInfo,
    HalfList,
    HalfState,
    ListHalfMessagesRequest,
    ViewHalfMessageRequest,
    decode_end_outcomes,
    encode_ends,
)
from mqmesh.record_batch import Attributes, check_stored, decode_messages, read_header
from mqmesh.roles.broker.handlers.send import answer_durable, finish_sends
from mqmesh.roles.broker.handlers.transactions import (
    check_transactions,
    finish_transactions,
    has_queue,
)
from mqmesh.roles.broker.transaction_desk import TransactionDesk
from mqmesh.roles.broker.transactions import Transactions as TransactionTable
from mqmesh.roles.broker.transactions import TransactionSettings
from mqmesh.storage.interface import FlushDiskType

PRODUCER = 77


class Scene:
    """A broker, a producer of half messages, and a member of its group."""

    def __init__(self, stage) -> None:
        self.stage = stage
        self.sequence = 0
        stage.context.transactions.table.settings = self.settings()

    def settings(self) -> TransactionSettings:
        config = self.stage.config
        return TransactionSettings(
            timeout_ms=config.transaction_timeout_ms,
            check_interval_ms=config.transaction_check_interval_ms,
            check_max=config.transaction_check_max,
            pending_max=config.transaction_pending_max,
        )

    @property
    def desk(self) -> TransactionDesk:
        return self.stage.context.transactions

    def half(self, *bodies: bytes, topic="t", queue_id=0, seconds=None, sequence=None) -> int:
        """Sends a half batch; returns its queue offset in the half topic."""
        outcome = self.send_half(
            *bodies, topic=topic, queue_id=queue_id, seconds=seconds, sequence=sequence
        )
        assert outcome.code == 0, outcome.remark
        return outcome.base_queue_offset

    def send_half(self, *bodies, topic="t", queue_id=0, seconds=None, sequence=None, **wrong):
        properties = (
            {"CHECK_IMMUNITY_TIME_IN_SECONDS": str(seconds)} if seconds is not None else None
        )
        messages = [Message(topic, body, properties=properties) for body in bodies]
        first = self.sequence if sequence is None else sequence
        self.sequence = max(self.sequence, first + len(bodies))
        parts = half_parts(
            encode_payload(messages),
            producer_group="pg",
            real_topic=topic,
            real_queue_id=queue_id,
            has_immunity=have_immunity(messages),
            producer_id=PRODUCER,
            first_sequence=first,
            born_timestamp=1,
            **wrong,
        )
        return self.stage.send(b"".join(parts))[0]

    def begin_end(self, *ends: tuple[int, int, int, int, Decision]) -> int:
        body = encode_ends(
            [End(base, PRODUCER, seq, first, n, int(d)) for base, seq, first, n, d in ends]
        )
        return self.stage.begin(RequestCode.END_TRANSACTION, EndTransactionRequest("pg"), body)

    def finish(self) -> None:
        finish_transactions(self.stage.context)
        self.stage.end_tick()

    def end(self, *ends) -> list[EndOutcome]:
        opaque = self.begin_end(*ends)
        self.finish()
        reply = self.stage.answer(opaque)
        return decode_end_outcomes(b"".join(reply.body), len(ends))

    def bodies(self, topic="t", queue_id=0) -> list[bytes]:
        return [message.body for message in self.messages(topic, queue_id)]

    def messages(self, topic="t", queue_id=0):
        found, offset = [], 0
        while True:
            result = self.stage.store.get(topic, queue_id, offset, max_bytes=1 << 20)
            if not result.data:
                return found
            data, position = b"".join(result.data), 0
            while position < len(data):
                header = check_stored(data, position)
                found += decode_messages(data, header, position=position)
                position += header.total_size
            offset = result.next_queue_offset

    def join(self, peer=b"member", group="pg") -> None:
        heartbeat = HeartbeatRequest(peer.decode(), [group])
        self.stage.ask(RequestCode.HEART_BEAT, heartbeat, peer=peer)

    def tick(self, ms=100) -> None:
        self.stage.clock.advance(ms)
        check_transactions(self.stage.context, self.stage.clock.monotonic_ms())
        self.finish()

    def asked(self) -> list[tuple[CheckTransactionState, list[bytes]]]:
        """What was asked since the last call, with the bodies of the messages."""
        found = []
        for notice in self.stage.notices:
            if notice[1] == RequestCode.CHECK_TRANSACTION_STATE:
                question = decode_header(CheckTransactionState, notice[2])
                data = b"".join(notice[3:])
                messages = decode_messages(data, read_header(data))
                wanted = [messages[one - question.first_ordinal].body for one in question.ordinals]
                found.append((question, wanted))
        self.stage.notices.clear()
        return found

    def restart(self, document: bytes | None = None) -> None:
        """A broker on the same store that knows nothing but that."""
        context = self.stage.context
        desk = TransactionDesk(self.settings())
        desk.recover(
            self.stage.store,
            document,
            lambda topic, queue_id: has_queue(context.topics, topic, queue_id),
            wall_ms=self.stage.clock.wall_ms(),
            now_ms=self.stage.clock.monotonic_ms(),
            segment_bytes=1 << 30,
        )
        for name in desk.__dict__:
            setattr(context.transactions, name, getattr(desk, name))


@pytest.fixture
def scene(stage):
    return Scene(stage)


def test_half_messages_are_seen_by_nobody_until_they_are_committed(scene):
    base = scene.half(b"one", b"two")
    assert scene.bodies() == []
    assert scene.end((base, 0, 0, 2, Decision.COMMIT)) == [EndOutcome.ENDED]
    assert scene.bodies() == [b"one", b"two"]
    assert [one.message_id for one in scene.messages()] == [
        format_message_id(PRODUCER, 0),
        format_message_id(PRODUCER, 1),
    ]
    half_place = read_header(scene.stage.store.get(TRANS_HALF_TOPIC, 0, 0, max_bytes=1).data[0])
    assert {one.prepared_transaction_offset for one in scene.messages()} == {
        half_place.commitlog_offset
    }
    header = read_header(scene.stage.store.get("t", 0, 0, max_bytes=1).data[0])
    assert header.attributes & Attributes.TRANSACTION_ROLLBACK == Attributes.TRANSACTION_COMMIT


def test_what_is_rolled_back_is_never_seen(scene):
    base = scene.half(b"one", b"two", b"three")
    outcomes = scene.end((base, 0, 0, 1, Decision.ROLLBACK), (base, 0, 1, 2, Decision.COMMIT))
    assert outcomes == [EndOutcome.ENDED, EndOutcome.ENDED]
    assert scene.bodies() == [b"two", b"three"]


def test_a_commit_goes_to_the_real_queue(scene):
    base = scene.half(b"one", queue_id=3)
    scene.end((base, 0, 0, 1, Decision.COMMIT))
    assert scene.bodies("t", 3) == [b"one"]
    assert scene.bodies("t", 0) == []


def test_a_repeated_end_writes_nothing_again(scene):
    base = scene.half(b"one")
    scene.end((base, 0, 0, 1, Decision.COMMIT))
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.ENDED_BEFORE]
    assert scene.end((base, 0, 0, 1, Decision.ROLLBACK)) == [EndOutcome.DECIDED_OTHERWISE]
    assert scene.bodies() == [b"one"]


def test_another_group_decides_nothing(scene):
    base = scene.half(b"one")
    body = encode_ends([End(base, PRODUCER, 0, 0, 1, int(Decision.COMMIT))])
    opaque = scene.stage.begin(RequestCode.END_TRANSACTION, EndTransactionRequest("others"), body)
    assert b"".join(scene.stage.answer(opaque).body) == bytes([EndOutcome.NOT_PENDING])
    assert scene.desk.table.pending_count == 1


def test_a_repeated_half_batch_is_stored_once_also_long_after(scene):
    first = scene.half(b"one", sequence=0)
    for number in range(1, 400):
        scene.half(b"x", sequence=number)
    assert scene.half(b"one", sequence=0) == first


def test_decisions_and_commits_of_a_tick_are_one_write(scene):
    bases = [scene.half(b"%d" % number) for number in range(3)]
    puts = []
    put = scene.stage.store.put
    scene.stage.store.put = lambda batches, now: puts.append(batches) or put(batches, now)
    opaques = [
        scene.begin_end((base, number, 0, 1, Decision.COMMIT)) for number, base in enumerate(bases)
    ]
    assert not scene.stage.answers.keys() & set(opaques), "nobody is answered before it is stored"
    scene.finish()
    (batches,) = puts
    assert [batch.topic for batch in batches] == [TRANS_OP_HALF_TOPIC, "t", "t", "t"]
    assert all(opaque in scene.stage.answers for opaque in opaques)


def test_a_full_disk_decides_nothing(scene):
    base = scene.half(b"one")
    scene.stage.store.failure = DiskFull("full")
    with pytest.raises(BrokerError):
        scene.end((base, 0, 0, 1, Decision.COMMIT))
    scene.stage.store.failure = None
    assert scene.desk.table.pending_count == 1
    assert scene.end((base, 0, 0, 1, Decision.ROLLBACK)) == [EndOutcome.ENDED]
    assert scene.bodies() == []


def test_with_sync_flush_ends_are_answered_when_the_disk_has_them(make_stage):
    scene = Scene(make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH))
    base = scene.half(b"one")
    scene.stage.store.synced = 0
    opaque = scene.begin_end((base, 0, 0, 1, Decision.COMMIT))
    scene.finish()
    assert opaque not in scene.stage.answers
    again = scene.begin_end((base, 0, 0, 1, Decision.COMMIT))
    assert b"".join(scene.stage.answer(again).body) == bytes([EndOutcome.AGAIN])


def test_a_deleted_topic_takes_no_commits(scene):
    base = scene.half(b"one")
    scene.stage.context.topics.delete("t", 1)
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.TOPIC_GONE]
    assert scene.desk.table.pending_count == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"topic": TRANS_OP_HALF_TOPIC}, ResponseCode.NO_PERMISSION),
        ({"topic": "%RETRY%g"}, ResponseCode.NO_PERMISSION),
        ({"queue_id": 99}, ResponseCode.MESSAGE_ILLEGAL),
        ({"attributes": Attributes.HAS_DELAY}, ResponseCode.MESSAGE_ILLEGAL),
        ({"attributes": Attributes.SPARSE}, ResponseCode.MESSAGE_ILLEGAL),
        ({"attributes": Attributes.TRANSACTION_COMMIT}, ResponseCode.MESSAGE_ILLEGAL),
    ],
)
def test_halves_that_may_not_be_are_refused(scene, change, code):
    assert scene.send_half(b"one", **change).code == code
    assert scene.desk.table.pending_count == 0


def test_too_many_halves_are_refused_and_taken_again_when_some_have_ended(make_stage):
    scene = Scene(make_stage(transaction_pending_max=2))
    base = scene.half(b"one", b"two")
    refused = scene.send_half(b"three")
    assert refused.code == ResponseCode.SYSTEM_BUSY
    assert "transaction_pending_max" in refused.remark
    scene.end((base, 0, 0, 2, Decision.ROLLBACK))
    scene.half(b"three")


@pytest.mark.parametrize("topic", [TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC])
def test_nobody_may_read_the_half_topics(scene, topic):
    base = scene.half(b"one")
    scene.end((base, 0, 0, 1, Decision.ROLLBACK))
    with pytest.raises(NoPermission, match="nobody may read"):
        scene.stage.ask(RequestCode.PULL_MESSAGE, PullRequest("g", topic, 0, 0))


# ---- Check-backs -----------------------------------------------------------------------------


def test_a_member_of_the_group_is_asked_and_its_answer_counts(scene):
    scene.join()
    base = scene.half(b"one", b"two")
    scene.end((base, 0, 0, 1, Decision.COMMIT))
    scene.tick(5_900)
    assert scene.asked() == []
    scene.tick(100)
    ((question, bodies),) = scene.asked()
    assert (question.group, question.base_queue_offset, question.check_times) == ("pg", base, 1)
    assert bodies == [b"two"]
    assert scene.end((base, 0, 1, 1, Decision.COMMIT)) == [EndOutcome.ENDED]
    scene.tick(60_000)
    assert scene.asked() == []


def test_members_of_other_groups_are_not_asked(scene):
    scene.join(group="others")
    scene.half(b"one")
    scene.tick(6_000)
    assert scene.asked() == []
    scene.join(b"late")
    scene.tick(1_000)
    assert len(scene.asked()) == 1


def test_a_message_says_when_it_is_asked_about_first(scene):
    scene.join()
    scene.half(b"slow", seconds=60)
    scene.half(b"fast", seconds=1)
    scene.tick(1_000)
    assert [bodies for _, bodies in scene.asked()] == [[b"fast"]]
    scene.tick(10_000)
    assert scene.asked() == []
    scene.tick(49_000)
    assert [b"slow"] in [bodies for _, bodies in scene.asked()]


def test_what_was_asked_about_in_vain_is_parked_visibly_and_may_be_committed_later(make_stage):
    scene = Scene(make_stage(transaction_check_max=2))
    scene.join()
    base = scene.half(b"stuck")
    for _ in range(4):
        scene.tick(30_000)
    assert scene.bodies(TRANS_CHECK_MAX_TIME_TOPIC) == [b"stuck"]
    assert (scene.desk.table.pending_count, scene.desk.table.parked_count) == (0, 1)
    scene.asked()
    scene.tick(300_000)
    assert scene.asked() == []
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.ENDED]
    assert scene.bodies() == [b"stuck"]


def test_half_messages_that_retention_took_are_told_and_forgotten(scene, caplog):
    base = scene.half(b"one")
    bounds = scene.stage.store.queue_bounds
    scene.stage.store.queue_bounds = lambda topic, queue_id: (
        (base + 1, base + 1) if topic == TRANS_HALF_TOPIC else bounds(topic, queue_id)
    )
    scene.tick()
    assert scene.desk.table.pending_count == 0
    assert scene.desk.figures()["half_messages_lost_total"] == "1"
    assert "file_reserved_time" in caplog.text


def test_a_decision_about_what_cannot_be_read_is_not_acknowledged(scene):
    bases = [scene.half(b"gone", b"too"), scene.half(b"there")]
    read_at = scene.stage.store.read_at
    gone = scene.desk.table.batches[bases[0]].commitlog_offset

    def read(offset):
        if offset == gone:
            raise CorruptRecord("planted")
        return read_at(offset)

    scene.stage.store.read_at = read
    outcomes = scene.end((bases[0], 0, 0, 1, Decision.COMMIT), (bases[1], 2, 0, 1, Decision.COMMIT))
    assert outcomes == [EndOutcome.NOT_PENDING, EndOutcome.ENDED]
    assert scene.bodies() == [b"there"]
    assert scene.desk.figures()["half_messages_lost_total"] == "2"


def test_very_many_decisions_at_once_are_several_writes(scene, monkeypatch):
    monkeypatch.setattr("mqmesh.roles.broker.handlers.transactions.MAX_STAGED_RUNS", 2)
    base = scene.half(*[b"%d" % number for number in range(10)])
    ends = [(base, 0, number, 1, Decision(1 + number % 2)) for number in range(10)]
    assert scene.end(*ends) == [EndOutcome.ENDED] * 10
    assert scene.bodies() == [b"%d" % number for number in range(0, 10, 2)]
    assert scene.desk.table.pending_count == 0
    scene.restart()
    assert scene.desk.table.pending_count == 0
    assert not scene.desk.torn


# ---- Administration ---------------------------------------------------------------------------


def test_what_waits_is_listed_shown_and_ended_by_hand(scene):
    scene.half(b"one", b"two")
    scene.half(b"three", topic="u")
    listed = scene.stage.ask(RequestCode.LIST_HALF_MESSAGES, ListHalfMessagesRequest(), HalfList)
    assert [one.topic for one in listed.messages] == ["t", "t", "u"]
    assert listed.pending_count == 3
    only = ListHalfMessagesRequest(topic="u", group="pg")
    (one,) = scene.stage.ask(RequestCode.LIST_HALF_MESSAGES, only, HalfList).messages
    reply = scene.stage.ask(RequestCode.VIEW_HALF_MESSAGE, ViewHalfMessageRequest(one.message_id))
    assert decode_header(HalfInfo, reply.header) == one
    assert one.state == HalfState.PENDING
    data = b"".join(reply.body)
    assert decode_messages(data, read_header(data))[0].body == b"three"
    opaque = scene.stage.begin(
        RequestCode.END_HALF_MESSAGE, EndHalfMessageRequest(one.message_id, Decision.COMMIT)
    )
    scene.finish()
    assert b"".join(scene.stage.answer(opaque).body) == bytes([EndOutcome.ENDED])
    assert scene.bodies("u") == [b"three"]
    with pytest.raises(BrokerError, match="no half message"):
        scene.stage.ask(RequestCode.VIEW_HALF_MESSAGE, ViewHalfMessageRequest(one.message_id))


# ---- Started again -----------------------------------------------------------------------------


def decide_some(scene) -> tuple[int, int]:
    """Half messages in all states."""
    first, second = scene.half(b"a", b"b", b"c", b"d"), scene.half(b"e")
    scene.end((first, 0, 0, 1, Decision.COMMIT), (first, 0, 1, 1, Decision.ROLLBACK))
    return first, second


@pytest.mark.parametrize("noted", ["nothing", "before", "after"])
def test_a_start_finds_what_waits(scene, noted):
    document = None
    if noted == "before":
        scene.half(b"z", sequence=1_000)
        document = scene.desk.dump()
        scene.sequence = 0
        scene.end((0, 1_000, 0, 1, Decision.ROLLBACK))
    first, second = decide_some(scene)
    if noted == "after":
        document = scene.desk.dump()
    scene.restart(document)
    table = scene.desk.table
    assert [batch.base for batch in table.batches.values()] == [first, second]
    assert table.pending_count == 3
    outcomes = scene.end((first, 0, 0, 4, Decision.COMMIT), (second, 4, 0, 1, Decision.COMMIT))
    assert outcomes == [EndOutcome.DECIDED_OTHERWISE, EndOutcome.ENDED]
    assert scene.bodies() == [b"a", b"c", b"d", b"e"]


def test_a_note_makes_a_start_read_little(scene):
    for number in range(20):
        base = scene.half(b"x")
        if number != 7:
            scene.end((base, number, 0, 1, Decision.COMMIT))
    document = scene.desk.dump()
    reads = []
    get = scene.stage.store.get
    scene.stage.store.get = lambda topic, *rest, **options: (
        reads.append(topic) or get(topic, *rest, **options)
    )
    scene.restart(document)
    assert scene.desk.table.pending_count == 1
    assert reads.count(TRANS_HALF_TOPIC) <= 4
    assert reads.count(TRANS_OP_HALF_TOPIC) <= 4


def test_with_too_much_to_note_the_topics_are_read_from_the_oldest_on(scene, monkeypatch):
    monkeypatch.setattr("mqmesh.roles.broker.transaction_snapshot.MAX_NOTED", 1)
    scene.end((scene.half(b"gone"), 0, 0, 1, Decision.COMMIT))
    scene.half(b"a")
    scene.half(b"b")
    scene.restart(scene.desk.dump())
    assert scene.desk.table.pending_count == 2


def test_a_start_without_a_note_holds_no_more_than_waited_at_a_time(scene, monkeypatch):
    for number in range(50):
        base = scene.half(b"x")
        scene.end((base, number, 0, 1, Decision.COMMIT))
    most = []
    take = TransactionTable.on_half
    monkeypatch.setattr(
        TransactionTable,
        "on_half",
        lambda table, *facts: take(table, *facts) or most.append(table.pending_count),
    )
    scene.restart()
    assert len(most) == 50
    assert max(most) == 1


@pytest.mark.parametrize("document", [b"", b"{", b'{"version":99}', b"null"])
def test_a_note_that_cannot_be_read_costs_only_time(scene, document):
    scene.half(b"a")
    scene.restart(document)
    assert scene.desk.table.pending_count == 1


def test_a_note_that_knows_more_than_the_log_is_not_believed(scene, caplog):
    scene.half(b"a")
    other = Scene(type(scene.stage)())
    for body in (b"1", b"2", b"3"):
        other.half(body)
    other.desk.store_id = scene.stage.store.stats().store_id
    scene.restart(other.desk.dump())
    assert scene.desk.table.pending_count == 1
    assert "does not fit the log" in caplog.text


def test_how_often_was_asked_survives_a_start(make_stage):
    scene = Scene(make_stage(transaction_check_max=3))
    scene.join()
    scene.half(b"stuck")
    scene.tick(6_000)
    scene.tick(30_000)
    scene.asked()
    for document in (None, scene.desk.dump()):
        scene.restart(document)
        scene.stage.context.groups.tick(scene.stage.clock.monotonic_ms())
        scene.tick(100)
        assert scene.asked() == [], "not at once: it was asked a moment ago"
    scene.tick(30_000)
    ((question, _),) = scene.asked()
    assert question.check_times == 3


def test_parked_messages_stay_parked_after_a_start(make_stage):
    scene = Scene(make_stage(transaction_check_max=1))
    scene.join()
    scene.half(b"stuck")
    scene.tick(6_000)
    scene.tick(30_000)
    for document in (None, scene.desk.dump()):
        scene.restart(document)
        assert (scene.desk.table.pending_count, scene.desk.table.parked_count) == (0, 1)
    assert scene.bodies(TRANS_CHECK_MAX_TIME_TOPIC) == [b"stuck"]


def torn_write(scene, *, keep: int, ends) -> None:
    """Writes decisions as a crash leaves them: only the first batches of the write."""
    scene.begin_end(*ends)
    finish_transactions(scene.stage.context)
    put = scene.stage.store.put
    scene.stage.store.put = lambda batches, now: put(batches[:keep], now)
    with pytest.raises(IndexError):
        finish_sends(scene.stage.context)
    del scene.stage.store.put


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("with_note", [False, True])
def test_commits_that_a_crash_cut_off_are_written_again_once(scene, keep, with_note):
    bases = [scene.half(b"a1", b"a2"), scene.half(b"b"), scene.half(b"c", queue_id=1)]
    ends = [
        (bases[0], 0, 0, 1, Decision.COMMIT),
        (bases[1], 2, 0, 1, Decision.COMMIT),
        (bases[2], 3, 0, 1, Decision.COMMIT),
        (bases[0], 0, 1, 1, Decision.ROLLBACK),
    ]
    document = scene.desk.dump() if with_note else None
    torn_write(scene, keep=keep, ends=ends)
    scene.restart(document)
    assert len(scene.desk.torn) == 4 - keep
    with pytest.raises(BrokerNotAvailable):
        scene.end((bases[0], 0, 0, 1, Decision.COMMIT))
    scene.tick()
    assert not scene.desk.torn
    assert sorted(scene.bodies() + scene.bodies("t", 1)) == [b"a1", b"b", b"c"]
    scene.restart(document)
    assert not scene.desk.torn, "they are found"
    assert scene.desk.table.pending_count == 0


def test_with_a_slow_disk_they_are_written_again_once(make_stage):
    scene = Scene(make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH))
    base = scene.half(b"a")
    torn_write(scene, keep=1, ends=[(base, 0, 0, 1, Decision.COMMIT)])
    scene.restart()
    scene.stage.store.synced = 0
    for _ in range(5):
        scene.tick()
    scene.stage.store.synced = None
    answer_durable(scene.stage.context)
    scene.tick()
    assert not scene.desk.torn
    assert scene.bodies() == [b"a"]


def test_nothing_is_written_again_where_nothing_was_cut_off(scene):
    for number in range(5):
        base = scene.half(b"%d" % number)
        scene.end((base, number, 0, 1, Decision.COMMIT))
    scene.stage.send(scene.stage.batch("t", bodies=(b"plain",)))
    scene.restart()
    assert not scene.desk.torn


def test_a_torn_commit_for_a_deleted_topic_is_left(scene):
    base = scene.half(b"a")
    torn_write(scene, keep=1, ends=[(base, 0, 0, 1, Decision.COMMIT)])
    scene.stage.context.topics.delete("t", 1)
    scene.restart()
    assert not scene.desk.torn


def test_what_is_in_the_store_is_never_changed(scene):
    base = scene.half(b"a", b"b")
    before = bytes(scene.stage.store.get(TRANS_HALF_TOPIC, 0, 0, max_bytes=1 << 20).data[0])
    scene.end((base, 0, 0, 2, Decision.COMMIT))
    assert bytes(scene.stage.store.get(TRANS_HALF_TOPIC, 0, 0, max_bytes=1 << 20).data[0]) == before

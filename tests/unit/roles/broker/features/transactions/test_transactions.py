"""Transactions at a broker without sockets, and after it was started again on the same store."""

from __future__ import annotations

from random import Random

import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY

from mqmesh.batch.record_batch import Attributes, decode_messages, read_header
from mqmesh.errors import BrokerError, CorruptRecord, DiskFull, NoPermission
from mqmesh.message import (
    TRANS_CHECK_MAX_TIME_TOPIC,
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
    format_message_id,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.route import TopicConfig
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
    encode_ends,
)
from mqmesh.roles.broker.producer_keys import EndProofs
from mqmesh.storage.interface import FlushDiskType

PRODUCER = PRODUCER_ID


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


def test_another_group_decides_nothing(scene):
    base = scene.half(b"one")
    body = encode_ends([End(base, PRODUCER, 0, 0, 1, int(Decision.COMMIT), PRODUCER_KEY)])
    opaque = scene.stage.begin(RequestCode.END_TRANSACTION, EndTransactionRequest("others"), body)
    assert b"".join(scene.stage.answer(opaque).body) == bytes([EndOutcome.NOT_PENDING])
    assert scene.desk.table.pending_count == 1


def test_who_is_neither_the_producer_nor_asked_decides_nothing(scene):
    base = scene.half(b"take 100")
    commit = (base, 0, 0, 1, Decision.COMMIT)
    for proof in (b"key of a strange", b"", bytes(16)):
        assert scene.end(commit, proof=proof) == [EndOutcome.NOT_PROVEN]
    assert scene.bodies() == []
    assert scene.end(commit) == [EndOutcome.ENDED]


def test_who_was_asked_decides_about_that_batch_and_no_other(scene):
    scene.join()
    base, other = scene.half(b"asked", seconds=0), scene.half(b"other", seconds=600)
    scene.tick()
    ((peer, code, header, _),) = [one for one in scene.stage.notices if len(one) == 4]
    assert (peer, code) == (b"member", RequestCode.CHECK_TRANSACTION_STATE)
    token = decode_header(CheckTransactionState, header).token
    assert scene.end((other, 1, 0, 1, Decision.COMMIT), proof=token) == [EndOutcome.NOT_PROVEN]
    assert scene.end((base, 0, 0, 1, Decision.COMMIT), proof=token) == [EndOutcome.ENDED]
    assert scene.bodies() == [b"asked"]


def test_a_token_is_of_one_life_of_the_broker(scene):
    base = scene.half(b"asked", seconds=0)
    token = scene.desk.proofs.token(base, PRODUCER_ID, 0)
    scene.desk.proofs = EndProofs(Random(2))
    end = (base, 0, 0, 1, Decision.ROLLBACK)
    assert scene.end(end, proof=token) == [EndOutcome.NOT_PROVEN]


def test_other_half_messages_under_known_ids_are_refused(scene):
    base = scene.half(b"mine")
    for body in (b"forged", b"forged once more"):
        assert scene.send_half(body, sequence=0).code == ResponseCode.SEQUENCE_CONFLICT
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.ENDED]
    assert scene.bodies() == [b"mine"]


def test_a_repeated_half_batch_is_stored_once_also_long_after(scene):
    first = scene.half(b"one", sequence=0)
    for number in range(1, 400):
        scene.half(b"x", sequence=number)
    assert scene.half(b"one", sequence=0) == first


def test_how_long_the_oldest_waits_is_told_unless_it_is_parked(scene):
    features, table = scene.stage.features, scene.desk.table
    assert features.transactions.oldest_ms() == 0
    first = scene.half(b"1", seconds=600)
    scene.stage.clock.advance(1_000)
    second = scene.half(b"2", seconds=600)
    scene.stage.clock.advance(500)
    assert features.transactions.oldest_ms() == 1_500
    table.parked(table.batches[first], [0])
    assert features.transactions.oldest_ms() == 500
    scene.end((second, 1, 0, 1, Decision.ROLLBACK))
    assert features.transactions.oldest_ms() == 0


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


def test_with_sync_flush_ends_are_answered_when_the_disk_has_them(make_scene):
    scene = make_scene(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    base = scene.half(b"one")
    scene.stage.store.synced = scene.stage.store.durable_offset()
    opaque = scene.begin_end((base, 0, 0, 1, Decision.COMMIT))
    scene.finish()
    assert opaque not in scene.stage.answers
    again = scene.begin_end((base, 0, 0, 1, Decision.COMMIT))
    assert b"".join(scene.stage.answer(again).body) == bytes([EndOutcome.AGAIN])


def test_a_half_message_on_its_way_to_the_disk_is_not_taken_for_lost(make_scene):
    scene = make_scene(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    scene.join()
    base = scene.half(b"one", seconds=0)
    scene.stage.store.synced = 0
    scene.tick()
    assert scene.asked() == []
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.AGAIN]
    scene.stage.store.synced = None
    scene.tick(30_000)
    assert len(scene.asked()) == 1
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.ENDED]
    assert scene.bodies() == [b"one"]
    assert scene.desk.lost == 0


def test_a_deleted_topic_takes_no_commits(scene):
    base = scene.half(b"one")
    scene.stage.features.state.topics.delete("t", 1)
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.TOPIC_GONE]
    assert scene.desk.table.pending_count == 1


def test_what_was_acknowledged_can_be_decided_though_there_are_too_many_topics(make_scene):
    scene = make_scene(max_topics=2)
    base = scene.half(b"one")
    assert len(scene.stage.features.state.topics) == 2
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.ENDED]
    assert scene.bodies() == [b"one"]


@pytest.mark.parametrize("parked", [False, True])
def test_a_topic_that_lost_the_queue_takes_commits_once_it_has_it_again(make_scene, parked):
    scene = make_scene(transaction_check_max=2)
    scene.join()
    base = scene.half(b"one", queue_id=3)
    topics = scene.stage.features.state.topics
    topics.update(TopicConfig("t", 2, 2), 1)
    commit = (base, 0, 0, 1, Decision.COMMIT)
    assert scene.end(commit) == [EndOutcome.TOPIC_GONE]
    for _ in range(4 if parked else 0):
        scene.tick(30_000)
    assert scene.bodies(TRANS_CHECK_MAX_TIME_TOPIC) == ([b"one"] if parked else [])
    assert scene.end(commit) == scene.end_by_hand(base, Decision.COMMIT) == [EndOutcome.TOPIC_GONE]
    topics.update(TopicConfig("t", 4, 4), 1)
    assert scene.end_by_hand(base, Decision.COMMIT) == [EndOutcome.ENDED]
    assert scene.bodies("t", 3) == [b"one"]


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


def test_too_many_halves_are_refused_and_taken_again_when_some_have_ended(make_scene):
    scene = make_scene(transaction_pending_max=2)
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


def test_what_was_asked_about_in_vain_is_parked_visibly_and_may_be_committed_later(make_scene):
    scene = make_scene(transaction_check_max=2)
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
    assert scene.desk.lost == 1
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
    assert scene.desk.lost == 2


def test_very_many_decisions_at_once_are_several_writes(scene, monkeypatch):
    monkeypatch.setattr("mqmesh.roles.broker.features.transactions.feature.MAX_STAGED_RUNS", 2)
    base = scene.half(*[b"%d" % number for number in range(10)])
    ends = [(base, 0, number, 1, Decision(1 + number % 2)) for number in range(10)]
    assert scene.end(*ends) == [EndOutcome.ENDED] * 10
    assert scene.bodies() == [b"%d" % number for number in range(0, 10, 2)]
    assert scene.desk.table.pending_count == 0
    scene.restart()
    assert scene.desk.table.pending_count == 0


# ---- Administration ---------------------------------------------------------------------------


def test_a_namespace_that_is_asked_for_is_listed_behind_many_others(scene):
    scene.half(b"one", b"two", topic="bank%t", group="bank%pg")
    scene.half(b"three", topic="shop%t", group="shop%pg")
    asked = ListHalfMessagesRequest(max_count=1, namespace="shop")
    found = scene.stage.ask(RequestCode.LIST_HALF_MESSAGES, asked, HalfList)
    assert [one.topic for one in found.messages] == ["shop%t"]
    assert (found.pending_count, found.parked_count) == (1, 0)


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

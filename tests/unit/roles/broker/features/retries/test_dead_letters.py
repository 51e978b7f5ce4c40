"""RESEND_DEAD_LETTERS: another chance for dead letters, once each."""

from __future__ import annotations

from random import Random

import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.record_batch import Attributes, check_stored, decode_messages, encode_batch
from mqmesh.errors import DiskFull, InvalidArgument, TopicNotFound
from mqmesh.message import (
    DEAD_LETTER_MARKS_TOPIC,
    PROPERTY_LAST_FAILURE,
    PROPERTY_RECONSUME_TIMES,
    PROPERTY_RESENT_FROM_DLQ,
    Message,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.retries import (
    TO_DEAD_LETTERS,
    ResendRequest,
    ResendResponse,
    ResendStatus,
    ResendTarget,
    SendBackEntry,
    SendBackRequest,
)
from mqmesh.protocol.route import Perm, TopicConfig
from mqmesh.roles.broker.features.retries import dead_letter_marks, dead_letters
from mqmesh.roles.broker.features.retries.dead_letter_marks import (
    FORGOTTEN_AT_ONCE,
    DeadLetterMarks,
    ResentMark,
)
from mqmesh.storage.interface import FlushDiskType, GetStatus

DLQ, RETRY = "%DLQ%g", "%RETRY%g"
RESENT, ALREADY, GONE, REFUSED = ResendStatus


def resend(stage, *offsets, group="g", **options):
    request = ResendRequest(group, list(offsets), **options)
    answer = stage.ask(RequestCode.RESEND_DEAD_LETTERS, request, ResendResponse)
    return [ResendStatus(one.status) for one in answer.results]


def messages_in(stage, topic, queue_id=0):
    found, place = [], 0
    while True:
        result = stage.store.get(topic, queue_id, place, max_bytes=1)
        if result.status is not GetStatus.FOUND:
            return found
        found += decode_messages(result.data[0], check_stored(result.data[0]))
        place = result.next_queue_offset


def bury(stage, count=1, *, topic="t", sequence=500, **fields):
    """Stores dead letters in one batch."""
    properties = {"own": "1", PROPERTY_RECONSUME_TIMES: "17", PROPERTY_LAST_FAILURE: "E: no"}
    messages = [
        Message(topic, b"%d" % number, properties=properties, **fields) for number in range(count)
    ]
    batch = encode_batch(
        messages,
        topic=DLQ,
        queue_id=0,
        producer_id=7,
        first_sequence=sequence,
        born_timestamp=1,
        attributes=Attributes.REDELIVERED,
    )
    stage.features.writes.put_encoded([batch], lambda outcomes: None)
    stage.end_tick()


def test_who_may_not_send_to_a_topic_resends_to_the_retry_topic_only(stage):
    bury(stage, 1, topic="secret")
    stage.guard.forbidden.add("secret")
    assert resend(stage, 0, target="TOPIC") == [REFUSED]
    assert messages_in(stage, "secret") == []
    assert resend(stage, 0) == [RESENT]


def test_it_goes_to_the_groups_retry_topic_as_if_it_had_never_failed(stage):
    bury(stage, 3, tag="T", keys=["k"])
    assert resend(stage, 1) == [RESENT]
    (message,) = messages_in(stage, RETRY)
    dead = messages_in(stage, DLQ)[1]
    assert message.message_id == dead.message_id
    assert (message.topic, message.body, message.tag, message.keys) == ("t", b"1", "T", ("k",))
    assert message.reconsume_times == 0
    assert message.properties == {
        "own": "1",
        PROPERTY_LAST_FAILURE: "E: no",
        PROPERTY_RESENT_FROM_DLQ: dead.offset_message_id.partition("#")[2],
    }
    assert stage.features.core.stats.total.resent_dead_letters == 1


def test_what_a_stranger_wrote_into_a_message_sends_it_nowhere_else(make_stage):
    stage = make_stage(check_compressed_batches=False)
    stage.send(stage.batch("secret"), stage.batch("t"))
    forged = encode_batch(
        [Message("secret", b"forged" * 100)],
        topic="t",
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=1_000_000,
        born_timestamp=1,
        compress_over_bytes=1,
    )
    assert stage.send(forged)[0].code == 0
    back = SendBackRequest("g", [SendBackEntry("t", 0, 1, delay_level=TO_DEAD_LETTERS)])
    stage.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)
    assert [message.topic for message in messages_in(stage, DLQ)] == ["t"]
    assert resend(stage, 0, target=ResendTarget.TOPIC) == [RESENT]
    bodies = [m.body for queue in range(4) for m in messages_in(stage, "secret", queue)]
    assert bodies == [b"body"]


def test_nothing_is_resent_twice_by_accident(stage):
    bury(stage, 3)
    assert resend(stage, 0, 1) == [RESENT, RESENT]
    assert resend(stage, 0, 1, 2) == [ALREADY, ALREADY, RESENT]
    assert resend(stage, 1, target=ResendTarget.TOPIC) == [ALREADY]
    assert len(messages_in(stage, RETRY)) == 3


def test_not_even_within_one_request(stage):
    bury(stage)
    assert resend(stage, 0, 0) == [RESENT, ALREADY]


def test_marks_outlive_the_broker(stage, make_stage):
    bury(stage, 2)
    resend(stage, 0)
    reborn = DeadLetterMarks(Random(1))
    reborn.load(stage.store)
    dead = messages_in(stage, DLQ)
    assert reborn.resent_ms("g", 0, dead[0].message_id) == stage.clock.wall_ms()
    assert reborn.resent_ms("g", 1, dead[1].message_id) == 0
    assert reborn.resent_ms("other", 0, dead[0].message_id) == 0
    assert len(reborn) == 1


def test_a_mark_does_not_concern_another_message_at_its_place():
    marks = DeadLetterMarks(Random(1))
    marks.add([ResentMark("g", 0, "A" * 32, 5)])
    assert marks.resent_ms("g", 0, "B" * 32) == 0


def test_marks_of_dead_letters_that_are_gone_are_forgotten(stage, monkeypatch):
    bury(stage, 5)
    resend(stage, 4, 0, 2)
    marks, dead = stage.features.dead_letters.marks, messages_in(stage, DLQ)
    stage.features.dead_letters.sample()
    assert len(marks) == 3
    monkeypatch.setattr(stage.store, "queue_bounds", lambda topic, queue_id: (2, 5))
    stage.features.dead_letters.sample()
    resent_ms = [marks.resent_ms("g", n, one.message_id) for n, one in enumerate(dead)]
    assert [bool(one) for one in resent_ms] == [False, False, True, False, True]
    stage.features.state.topics.delete(DLQ, 1)
    stage.features.dead_letters.sample()
    assert len(marks) == 0


def test_marks_are_forgotten_some_at_a_time():
    marks = DeadLetterMarks(Random(1))
    count = FORGOTTEN_AT_ONCE + 10
    marks.add(ResentMark(f"g{n % 2}", n, "A" * 32, 5) for n in range(count))
    marks.remove([ResentMark("g1", 1, "A" * 32, 5)])
    marks.add([ResentMark("g1", 1, "A" * 32, 6), ResentMark("g1", 1, "A" * 32, 7)])
    lost = [ResentMark("g1", 3, "A" * 32, 5)]
    marks.remove(lost)
    assert len(marks) == count - 1
    marks.forget(lambda group: count - 1)
    assert 9 <= len(marks) <= 12
    marks.forget(lambda group: count - 1)
    assert len(marks) == 1
    assert marks.resent_ms("g1", count - 1, "A" * 32) == 5
    marks.remove(lost)
    assert len(marks) == 1


def test_each_group_has_its_turn_to_forget(monkeypatch):
    monkeypatch.setattr(dead_letter_marks, "FORGOTTEN_AT_ONCE", 2)
    marks, asked = DeadLetterMarks(Random(1)), []
    marks.add(ResentMark(group, 0, "A" * 32, 5) for group in "abc")
    for _ in range(3):
        marks.forget(lambda group: asked.append(group) or 0)
    assert asked == list("abcabc")
    assert len(marks) == 3


def test_a_damaged_mark_is_counted_and_passed_over(stage):
    batch = encode_batch(
        [Message(DEAD_LETTER_MARKS_TOPIC, b"\xc1")],
        topic=DEAD_LETTER_MARKS_TOPIC,
        queue_id=0,
        producer_id=7,
        first_sequence=0,
        born_timestamp=1,
    )
    stage.features.writes.put_encoded([batch], lambda outcomes: None)
    bury(stage)
    resend(stage, 0)
    marks = DeadLetterMarks(Random(1))
    marks.load(stage.store)
    assert (marks.unreadable, len(marks)) == (1, 1)


def test_a_dry_run_writes_nothing(stage):
    bury(stage)
    assert resend(stage, 0, 7, dry_run=True) == [RESENT, GONE]
    assert messages_in(stage, RETRY) == []
    assert resend(stage, 0) == [RESENT]


def test_what_is_gone_or_has_no_topic_is_told_apart(stage):
    bury(stage)
    assert resend(stage, 0, 5, target=ResendTarget.TOPIC) == [REFUSED, GONE]
    assert messages_in(stage, RETRY) == []


def test_a_topic_that_may_not_be_written_refuses(stage):
    bury(stage)
    stage.features.state.topics.set(TopicConfig("t", 4, 4, Perm.READ.value), 0)
    assert resend(stage, 0, target=ResendTarget.TOPIC) == [REFUSED]


def test_a_store_that_refuses_leaves_no_mark(stage):
    bury(stage, 2)
    resend(stage, 0)
    stage.store.failure = DiskFull("full")
    assert resend(stage, 0, 1, force=True) == [REFUSED, REFUSED]
    stage.store.failure = None
    assert resend(stage, 0, 1) == [ALREADY, RESENT]


def test_of_several_groups_only_those_that_were_refused_leave_no_mark(stage, monkeypatch):
    bury(stage, 3)
    writes = stage.features.writes
    put_groups = writes.put_groups

    def put_first(groups, on_stored):
        first, *others = groups
        refused = [BatchOutcome(int(ResponseCode.DISK_FULL))] * sum(map(len, others))
        put_groups([first], lambda outcomes: on_stored([*outcomes, *refused]))

    monkeypatch.setattr(writes, "put_groups", put_first)
    monkeypatch.setattr(dead_letters, "divided", lambda parts, *_: ([one] for one in parts))
    assert resend(stage, 0, 0, 1, 9) == [RESENT, ALREADY, REFUSED, GONE]
    monkeypatch.undo()
    assert resend(stage, 0, 1) == [ALREADY, RESENT]
    assert [one.body for one in messages_in(stage, RETRY)] == [b"0", b"1"]


def test_nothing_is_answered_before_the_disk_has_it(make_stage):
    stage = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    bury(stage)
    opaque = stage.begin(RequestCode.RESEND_DEAD_LETTERS, ResendRequest("g", [0]))
    assert opaque not in stage.answers
    stage.end_tick()
    assert stage.answer(opaque, ResendResponse).results[0].status == RESENT


def test_wrong_requests_are_refused(stage):
    with pytest.raises(TopicNotFound):
        resend(stage, 0)
    bury(stage)
    with pytest.raises(InvalidArgument):
        resend(stage, 0, target="ELSEWHERE")
    with pytest.raises(InvalidArgument):
        resend(stage, 0, group="")

"""CONSUMER_SEND_MSG_BACK: failed messages come again later, or become dead letters."""

from __future__ import annotations

import re
import zlib
from itertools import groupby

import msgspec
import pytest
from harness.batches import PRODUCER_ID

from mqmesh.batch.delayed_batch import ANY_TIME_QUEUE, due_times, read_delayed_meta
from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    Attributes,
    check_stored,
    decode_messages,
    encode_batch,
)
from mqmesh.errors import DiskFull, GroupNotFound, InvalidArgument, SystemBusy
from mqmesh.message import (
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_LAST_FAILURE,
    PROPERTY_RECONSUME_TIMES,
    SCHEDULE_TOPIC,
    SENT_BACK_TOPIC,
    Message,
)
from mqmesh.metrics import MAX_LABEL_SETS
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import (
    DeleteGroupRequest,
    GroupConfig,
    GroupsProgress,
    GroupsProgressRequest,
    ResetOffsetRequest,
)
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.policies import parse_retry_delays
from mqmesh.protocol.retries import (
    TO_DEAD_LETTERS,
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
)
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.features.retries import send_back as send_backs
from mqmesh.roles.broker.features.retries.retry_plan import plan_retry
from mqmesh.roles.broker.features.retries.sent_back_marks import SentBackMarks
from mqmesh.security.access_list import AccessList, Namespace, NamespaceQuota
from mqmesh.storage.interface import FlushDiskType, GetStatus

RETRY = "%RETRY%g"
DLQ = "%DLQ%g"


def entry(topic="t", queue_id=0, queue_offset=0, count=1, reason="ValueError: no", **options):
    return SendBackEntry(topic, queue_id, queue_offset, count, reason, **options)


def send_back(stage, *entries, group="g", **options):
    request = SendBackRequest(group, list(entries), **options)
    answer = stage.ask(RequestCode.CONSUMER_SEND_MSG_BACK, request, SendBackResponse)
    return answer.results


def stored(stage, topic, queue_id=0):
    """Every batch of a queue: header, data and messages."""
    found, place = [], 0
    while True:
        result = stage.store.get(topic, queue_id, place, max_bytes=1)
        if result.status is not GetStatus.FOUND:
            return found
        data = bytes(result.data[0])
        header = check_stored(data)
        found.append((header, data, decode_messages(data, header)))
        place = result.next_queue_offset


def messages_in(stage, topic, queue_id=0):
    return [message for _, _, messages in stored(stage, topic, queue_id) for message in messages]


def write(stage, topic, messages, queue_id=0, *, sequence=500):
    """Stores messages as the broker itself does; returns nothing."""
    batch = encode_batch(
        messages,
        topic=topic,
        queue_id=queue_id,
        producer_id=7,
        first_sequence=sequence,
        born_timestamp=1,
        attributes=Attributes.REDELIVERED,
    )
    stage.features.writes.put_encoded([batch], lambda outcomes: None)
    stage.end_tick()


def undecodable(data):
    """A batch whose checksum is right and whose messages are none."""
    raw = bytearray(data)
    raw[-1:] = b"\xc1"  # msgpack never uses this byte
    crc = zlib.crc32(raw[BROKER_PART_SIZE + 4 :])
    raw[BROKER_PART_SIZE : BROKER_PART_SIZE + 4] = crc.to_bytes(4, "little")
    return bytes(raw)


def test_a_failed_message_waits_a_level_and_carries_its_reason(stage):
    stage.send(stage.batch(bodies=(b"a", b"b", b"c"), tag="T"))
    (result,) = send_back(stage, entry(queue_offset=1))
    assert (result.code, result.dead_letters) == (ResponseCode.SUCCESS, 0)
    ((header, data, (message,)),) = stored(stage, SCHEDULE_TOPIC, 2)
    meta = read_delayed_meta(data, header)
    assert (meta.real_topic, meta.real_queue_id, meta.level) == (RETRY, 0, 3)
    assert header.attributes & Attributes.REDELIVERED
    assert (message.topic, message.body, message.tag) == ("t", b"b", "T")
    assert message.properties == {
        PROPERTY_RECONSUME_TIMES: "1",
        PROPERTY_LAST_FAILURE: "ValueError: no",
    }
    original = messages_in(stage, "t")[1]
    assert message.message_id == original.message_id
    assert message.info.born_timestamp == original.info.born_timestamp


@pytest.mark.parametrize(("times", "queue_id"), [(1, 3), (2, 4), (5, 7), (15, 17)])
def test_each_further_retry_waits_a_level_longer(stage, times, queue_id):
    write(stage, RETRY, [Message("t", b"x", properties={PROPERTY_RECONSUME_TIMES: str(times)})])
    send_back(stage, entry(RETRY))
    (message,) = messages_in(stage, SCHEDULE_TOPIC, queue_id)
    assert message.reconsume_times == times + 1


@pytest.mark.parametrize(("times", "most", "is_dead"), [(15, 16, 0), (16, 16, 1), (0, 0, 1)])
def test_after_so_many_times_it_is_a_dead_letter(stage, times, most, is_dead):
    properties = {PROPERTY_RECONSUME_TIMES: str(times), "own": "1"}
    write(stage, RETRY, [Message("t", b"x", keys=["k"], properties=properties)])
    (result,) = send_back(stage, entry(RETRY), max_reconsume_times=most)
    assert (result.code, result.dead_letters) == (0, is_dead)
    found = messages_in(stage, DLQ)
    assert len(found) == is_dead
    if found:
        assert found[0].topic == "t"
        assert found[0].keys == ("k",)
        assert found[0].properties == {
            "own": "1",
            PROPERTY_RECONSUME_TIMES: str(times + 1),
            PROPERTY_LAST_FAILURE: "ValueError: no",
        }
        assert stage.features.core.stats.total.dead_letters == 1


def test_the_dead_letters_of_each_group_are_told_however_many_topics_there_are(stage):
    for number in range(MAX_LABEL_SETS):
        stage.features.state.topics.set(TopicConfig(f"t{number}", 1, 1), 1)
        stage.features.state.topics.require(f"t{number}").put_messages = 1
    stage.features.state.group_table.update(GroupConfig("g"))
    stage.send(stage.batch())
    send_back(stage, entry(), max_reconsume_times=0)
    code = RequestCode.GET_GROUPS_PROGRESS
    (told,) = stage.ask(code, GroupsProgressRequest(), GroupsProgress).groups
    assert (told.group, told.dead, told.dead_letters) == ("g", 1, 1)


@pytest.mark.parametrize(("limit", "is_dead"), [(0, 1), (5, 0), (-1, 0)])
def test_the_settings_of_the_group_stand_above_the_wish_of_the_consumer(stage, limit, is_dead):
    stage.features.state.group_table.update(GroupConfig("g", retry_max_times=limit))
    stage.send(stage.batch())
    (result,) = send_back(stage, entry(), max_reconsume_times=3)
    assert result.dead_letters == is_dead


def set_group(stage, group="g", **settings):
    stage.features.state.group_table.update(GroupConfig(group, **settings))


def test_retries_come_when_the_schedule_of_the_group_says(stage):
    set_group(stage, retry_delays="10s 30s jitter 20%")
    stage.send(stage.batch(bodies=(b"a", b"b", b"c")))
    send_back(stage, entry(count=3))
    ((header, data, messages),) = stored(stage, SCHEDULE_TOPIC, ANY_TIME_QUEUE)
    schedule = parse_retry_delays("10s 30s jitter 20%")
    now_ms = stage.clock.wall_ms()
    wanted = [now_ms + schedule.delay_ms(0, message.message_id) for message in messages]
    meta = read_delayed_meta(data, header)
    assert list(due_times(meta, header)) == wanted
    assert len(set(wanted)) == 3
    assert (meta.real_topic, meta.level) == (RETRY, 0)
    assert [message.reconsume_times for message in messages] == [1, 1, 1]


def test_a_level_that_the_consumer_asks_for_stands_above_the_schedule(stage):
    set_group(stage, retry_delays="10s")
    stage.send(stage.batch())
    send_back(stage, entry(delay_level=7))
    assert len(messages_in(stage, SCHEDULE_TOPIC, 6)) == 1


def test_a_full_batch_with_a_schedule_is_divided_with_its_times(stage):
    set_group(stage, retry_delays="10s jitter 20%")
    stage.send(stage.batch(bodies=(b"a", b"b", b"c")))
    (_, _, messages) = stored(stage, "t")[0]
    (step,) = plan_retry(
        messages,
        topic="t",
        max_reconsume_times=1,
        delays=parse_retry_delays("10s jitter 20%"),
        now_ms=1,
    )
    one, two = step.halves()
    assert one.due_times + two.due_times == step.due_times
    assert len(one.due_times) == len(one.messages)


def test_dead_letters_that_are_dropped_are_counted_and_nowhere(stage):
    set_group(stage, dead_letter="drop")
    stage.send(stage.batch(bodies=(b"a", b"b")))
    (result,) = send_back(stage, entry(count=2), max_reconsume_times=0)
    assert (result.code, result.dead_letters) == (ResponseCode.SUCCESS, 0)
    assert stage.features.state.topics.get(DLQ) is None
    total = stage.features.core.stats.total
    assert (total.dropped_dead_letters, total.dead_letters) == (2, 0)


def test_dead_letters_go_to_the_topic_that_the_group_names(stage):
    set_group(stage, dead_letter="t-dead")
    stage.send(stage.batch())
    (result,) = send_back(stage, entry(delay_level=TO_DEAD_LETTERS))
    assert result.dead_letters == 1
    (message,) = messages_in(stage, "t-dead")
    assert (message.topic, message.body) == ("t-dead", b"body")
    assert message.properties[PROPERTY_LAST_FAILURE] == "ValueError: no"
    assert message.properties[PROPERTY_DLQ_ORIGIN_TOPIC] == "t"
    # Sent back from the same place once more, it is there already.
    assert send_back(stage, entry(delay_level=TO_DEAD_LETTERS))[0].dead_letters == 1
    assert len(messages_in(stage, "t-dead")) == 1


@pytest.mark.parametrize("limit", ["max_topics", "topics in .namespace.quota."])
def test_a_topic_of_dead_letters_is_made_within_the_limits(make_stage, limit):
    stage = make_stage(max_topics=2 if limit == "max_topics" else 100)
    stage.send(stage.batch("ns%t", bodies=(b"a", b"b")))
    set_group(stage, group="ns%g", dead_letter="ns%dead")
    if limit != "max_topics":
        quota = [Namespace("ns", NamespaceQuota(topics=1))]
        stage.features.core.quotas.put(AccessList(1, [], quota))
    entries = entry("ns%t", queue_offset=0, delay_level=-1), entry("ns%t", queue_offset=1)
    if limit == "max_topics":
        stage.features.state.topics.set(TopicConfig("other"), 1)
    dead, again = send_back(stage, *entries, group="ns%g")
    assert (dead.code, again.code) == (ResponseCode.SYSTEM_BUSY, ResponseCode.SUCCESS)
    assert re.search(limit, dead.remark)
    assert stage.features.state.topics.get("ns%dead") is None


def test_a_number_that_a_producer_wrote_counts_for_nothing(stage):
    messages = [Message("t", b"x", properties={PROPERTY_RECONSUME_TIMES: "99"})]
    stage.send(
        encode_batch(
            messages,
            topic="t",
            queue_id=0,
            producer_id=PRODUCER_ID,
            first_sequence=0,
            born_timestamp=0,
        )
    )
    assert send_back(stage, entry())[0].dead_letters == 0
    assert messages_in(stage, SCHEDULE_TOPIC, 2)[0].reconsume_times == 1


def test_a_consumer_may_give_a_message_up_at_once(stage):
    stage.send(stage.batch())
    assert send_back(stage, entry(delay_level=TO_DEAD_LETTERS))[0].dead_letters == 1
    assert len(messages_in(stage, DLQ)) == 1


def test_an_entry_may_reach_over_batches_and_times(stage):
    for times in (1, 1, 2):
        properties = {PROPERTY_RECONSUME_TIMES: str(times)}
        write(stage, RETRY, [Message("t", b"%d" % times, properties=properties)] * 2)
    (result,) = send_back(stage, entry(RETRY, queue_offset=1, count=5))
    assert result.code == 0
    assert len(messages_in(stage, SCHEDULE_TOPIC, 3)) == 3
    assert len(messages_in(stage, SCHEDULE_TOPIC, 4)) == 2


def test_times_of_one_batch_may_differ(stage):
    write(
        stage,
        RETRY,
        [
            Message("t", b"x", properties={PROPERTY_RECONSUME_TIMES: times})
            for times in ("1", "1", "16", "2")
        ],
    )
    (result,) = send_back(stage, entry(RETRY, count=4))
    assert (result.code, result.dead_letters) == (0, 1)
    assert [len(messages_in(stage, SCHEDULE_TOPIC, level - 1)) for level in (4, 5)] == [2, 1]


def test_what_cannot_be_decoded_goes_to_the_dead_letters_whole(stage):
    # No client could send it; it is from before the broker looked.
    stage.features.writes.put_encoded([undecodable(stage.batch(bodies=(b"a", b"b", b"c")))], print)
    stage.end_tick()
    (result,) = send_back(stage, entry(queue_offset=1))
    assert (result.code, result.dead_letters) == (0, 3)
    found = stage.store.get(DLQ, 0, 0, max_bytes=1)
    header = check_stored(found.data[0])
    assert header.message_count == 3


@pytest.mark.parametrize("limit", ["max_subscription_groups", "auto_groups_per_minute"])
def test_groups_of_messages_sent_back_are_counted_before_their_topics_are_made(make_stage, limit):
    stage = make_stage(max_topics=1, **{limit: 1})
    stage.send(stage.batch(bodies=(b"a", b"b")))
    again, dead = entry(), entry(queue_offset=1, delay_level=-1)
    assert [result.code for result in send_back(stage, again, dead)] == [ResponseCode.SUCCESS] * 2
    with pytest.raises(SystemBusy, match=limit):
        send_back(stage, again, group="another")
    topics = {config.topic for config in stage.features.state.topics.configs()}
    assert topics == {"t", RETRY, DLQ, SCHEDULE_TOPIC, SENT_BACK_TOPIC}


def test_a_group_that_is_there_sends_back_however_its_members_share_messages(make_stage):
    stage = make_stage(auto_create_subscription_group=False)
    stage.send(stage.batch())
    with pytest.raises(GroupNotFound):
        send_back(stage, entry())
    stage.features.state.group_table.update(GroupConfig("g", delivery="message"))
    assert [result.code for result in send_back(stage, entry())] == [ResponseCode.SUCCESS]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (entry("unknown"), ResponseCode.TOPIC_NOT_EXIST),
        (entry(queue_offset=5), ResponseCode.OFFSET_ILLEGAL),
        (entry(queue_offset=0, count=2), ResponseCode.OFFSET_ILLEGAL),
    ],
)
def test_one_entry_fails_and_the_others_go_on(stage, wrong, code):
    stage.send(stage.batch())
    stage.send(stage.batch(queue_id=1))
    results = send_back(stage, wrong, entry(queue_id=1))
    assert [result.code for result in results] == [code, 0]
    assert results[0].remark


@pytest.mark.parametrize("name", ["no such", "mqmesh-consume-1", "CID_RMQ_SYS_x"])
def test_a_group_needs_a_legal_name_and_does_more_than_look(stage, name):
    stage.send(stage.batch())
    with pytest.raises(InvalidArgument):
        send_back(stage, entry(), group=name)
    assert {config.topic for config in stage.features.state.topics.configs()} == {"t"}


def test_nothing_is_answered_before_it_is_stored(make_stage):
    stage = make_stage(flush_disk_type=FlushDiskType.SYNC_FLUSH)
    stage.send(stage.batch())
    opaque = stage.begin(RequestCode.CONSUMER_SEND_MSG_BACK, SendBackRequest("g", [entry()]))
    assert opaque not in stage.answers
    stage.end_tick()
    assert stage.answer(opaque, SendBackResponse).results[0].code == 0


def test_a_store_that_refuses_is_told_and_may_be_asked_again(stage):
    stage.send(stage.batch())
    stage.store.failure = DiskFull("full")
    (result,) = send_back(stage, entry())
    assert result.code == ResponseCode.DISK_FULL
    stage.store.failure = None
    assert send_back(stage, entry())[0].code == 0
    assert len(messages_in(stage, SCHEDULE_TOPIC, 2)) == 1


def restart(stage):
    """What the broker had in memory only is gone."""
    stage.features.send_back.marks = SentBackMarks()


@pytest.mark.parametrize("after", [lambda stage: None, restart], ids=["at once", "restarted"])
@pytest.mark.parametrize(("level", "topic", "queue_id"), [(0, SCHEDULE_TOPIC, 2), (-1, DLQ, 0)])
def test_a_message_is_sent_back_from_one_place_once(stage, after, level, topic, queue_id):
    stage.send(stage.batch(bodies=(b"a", b"b", b"c")))
    wanted = entry(queue_offset=1, delay_level=level)
    first = send_back(stage, wanted)
    after(stage)
    assert send_back(stage, wanted) == first
    assert [one.body for one in messages_in(stage, topic, queue_id)] == [b"b"]
    # Its neighbours are others, and so is another group.
    (result,) = send_back(stage, entry(count=3, delay_level=level))
    assert result == msgspec.structs.replace(first[0], dead_letters=3 * first[0].dead_letters)
    assert sorted(one.body for one in messages_in(stage, topic, queue_id)) == [b"a", b"b", b"c"]
    assert send_back(stage, wanted, group="other") == first
    stored_all = len(messages_in(stage, SCHEDULE_TOPIC, 2)) + len(messages_in(stage, "%DLQ%other"))
    assert stored_all == (4 if level == 0 else 1)


def test_a_message_that_nobody_can_decode_is_buried_once(stage):
    stage.features.writes.put_encoded([undecodable(stage.batch(bodies=(b"x", b"y")))], print)
    stage.end_tick()
    first = send_back(stage, entry(count=2))
    assert first[0].dead_letters == 2
    restart(stage)
    assert send_back(stage, entry(count=2)) == first
    assert stage.store.queue_bounds(DLQ, 0) == (0, 2)


def test_what_is_being_written_is_not_written_again_nor_said_to_be_there(stage):
    stage.send(stage.batch())
    request = SendBackRequest("g", [entry()])
    begun = [stage.begin(RequestCode.CONSUMER_SEND_MSG_BACK, request) for _ in range(2)]
    stage.end_tick()
    codes = [stage.answer(one, SendBackResponse).results[0].code for one in begun]
    assert codes == [0, ResponseCode.SERVICE_NOT_AVAILABLE]
    assert len(messages_in(stage, SCHEDULE_TOPIC, 2)) == 1
    assert send_back(stage, entry())[0].code == 0


def test_retries_and_their_marks_are_refused_together(stage, monkeypatch):
    stage.send(stage.batch())
    monkeypatch.setattr(stage.features.state.admission, "count_refused", lambda count, now_ms: 1)
    assert send_back(stage, entry())[0].code == ResponseCode.SYSTEM_BUSY
    monkeypatch.undo()
    restart(stage)
    assert send_back(stage, entry())[0].code == 0
    assert len(messages_in(stage, SCHEDULE_TOPIC, 2)) == 1


@pytest.mark.parametrize("is_divided", [False, True])
def test_retries_are_in_one_group_with_the_marks_that_report_them(stage, monkeypatch, is_divided):
    if is_divided:
        stage.features.writes.group_bytes = 1_000
    stage.send(stage.batch(bodies=(b"a",)), stage.batch(bodies=(b"b",)))
    puts = []
    put = stage.store.put
    monkeypatch.setattr(
        stage.store, "put", lambda batches, now_ms: puts.append(batches) or put(batches, now_ms)
    )
    send_back(stage, entry(count=2))
    (batches,) = puts
    groups = [[one.topic for one in same] for _, same in groupby(batches, lambda one: one.group)]
    pair = [SENT_BACK_TOPIC, SCHEDULE_TOPIC]
    assert groups == ([pair, pair] if is_divided else [[*pair, SCHEDULE_TOPIC]])
    assert all(one.group for one in batches)


def test_of_several_groups_only_those_that_were_refused_are_sent_back_again(stage, monkeypatch):
    stage.send(stage.batch(bodies=(b"a",)), stage.batch(bodies=(b"b",)))
    writes = stage.features.writes
    put_groups = writes.put_groups

    def put_first(groups, on_stored):
        first, *others = groups
        refused = [BatchOutcome(int(ResponseCode.DISK_FULL))] * sum(map(len, others))
        put_groups([first], lambda outcomes: on_stored([*outcomes, *refused]))

    monkeypatch.setattr(writes, "put_groups", put_first)
    monkeypatch.setattr(send_backs, "divided", lambda parts, *_: ([one] for one in parts))
    entries = [entry(), entry(queue_offset=1)]
    assert [one.code for one in send_back(stage, *entries)] == [0, ResponseCode.DISK_FULL]
    monkeypatch.undo()
    assert [one.code for one in send_back(stage, *entries)] == [0, 0]
    assert [one.body for one in messages_in(stage, SCHEDULE_TOPIC, 2)] == [b"a", b"b"]


@pytest.mark.parametrize("after", [lambda stage: None, restart], ids=["at once", "restarted"])
def test_what_comes_again_because_offsets_were_moved_may_be_sent_back_again(stage, after):
    stage.send(stage.batch())
    send_back(stage, entry())
    stage.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffsetRequest("g", "t", "FIRST"))
    after(stage)
    send_back(stage, entry())
    assert len(messages_in(stage, SCHEDULE_TOPIC, 2)) == 2
    stage.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest("g"))
    after(stage)
    send_back(stage, entry())
    assert len(messages_in(stage, SCHEDULE_TOPIC, 2)) == 3


def test_a_batch_that_grows_too_large_is_divided(stage):
    bodies = (*(bytes([number]) * 2_000_000 for number in range(7)), b"x" * 2_776_800)
    stage.send(stage.batch(bodies=bodies))
    reason = "x" * 1_024
    (result,) = send_back(stage, msgspec.structs.replace(entry(count=8), reason=reason))
    assert result.code == 0
    assert len(messages_in(stage, SCHEDULE_TOPIC, 2)) == 8

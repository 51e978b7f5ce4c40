"""SEND_MESSAGE."""

from __future__ import annotations

import msgspec
import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY

from mqmesh.batch.payload import CODEC_NONE, Payload, compress_payload
from mqmesh.batch.record_batch import Attributes, batch_parts, encode_batch
from mqmesh.errors import (
    CorruptBatch,
    DiskFull,
    NotMaster,
    RemoteProtocolError,
    StoreClosed,
    SystemBusy,
)
from mqmesh.message import Message
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus, encode_send
from mqmesh.protocol.route import Perm, TopicConfig
from mqmesh.storage.interface import FlushDiskType

SYNC = FlushDiskType.SYNC_FLUSH


def test_a_batch_is_stored_and_its_place_told(stage):
    first, second = stage.send(stage.batch(bodies=(b"a", b"b")), stage.batch(bodies=(b"c",)))
    assert (first.code, first.status, first.base_queue_offset) == (0, SendStatus.SEND_OK, 0)
    assert (second.base_queue_offset, second.commitlog_offset > 0) == (2, True)
    assert first.store_timestamp == stage.clock.wall_ms()
    assert stage.pull()[1] == [b"a", b"b", b"c"]


def test_nothing_is_answered_before_the_ticks_one_write(stage):
    calls = []
    put = stage.store.put
    stage.store.put = lambda *arguments: calls.append(len(arguments[0])) or put(*arguments)
    opaques = [stage.begin_send(stage.batch(), stage.batch(queue_id=1)) for _ in range(3)]
    assert not stage.answers
    stage.end_tick()
    assert calls == [6]
    assert [len(stage.outcomes(opaque)) for opaque in opaques] == [2, 2, 2]


def test_an_unknown_topic_is_created_and_saved(stage):
    stage.send(stage.batch("new"))
    assert stage.features.state.topics.require("new").config == TopicConfig("new", 4, 4)
    assert stage.saved == ["topics"]


def test_an_unknown_topic_is_refused_where_that_is_wanted(make_stage):
    stage = make_stage(auto_create_topic_enable=False)
    (outcome,) = stage.send(stage.batch("new"))
    assert outcome.code == ResponseCode.TOPIC_NOT_EXIST
    assert "auto_create_topic_enable" in outcome.remark
    assert not stage.saved


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"queue_id": 4}, ResponseCode.MESSAGE_ILLEGAL, "write_queue_nums = 4"),
        ({"topic": "%RETRY%g"}, ResponseCode.NO_PERMISSION, "reserved"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, ResponseCode.NO_PERMISSION, "reserved"),
        ({"topic": "full", "queue_id": 4}, ResponseCode.MESSAGE_ILLEGAL, "default_topic_queue"),
        ({"topic": "read-only"}, ResponseCode.NO_PERMISSION, "does not permit writing"),
        (
            {"attributes": Attributes.TRANSACTION_HALF},
            ResponseCode.MESSAGE_ILLEGAL,
            "half messages",
        ),
        ({"attributes": Attributes.REDELIVERED}, ResponseCode.MESSAGE_ILLEGAL, "redelivered"),
        ({"attributes": Attributes.SPARSE}, ResponseCode.MESSAGE_ILLEGAL, "0x10"),
        ({"attributes": Attributes.HAS_DELAY}, ResponseCode.MESSAGE_ILLEGAL, "need a level"),
        ({"attributes": 1 << 15}, ResponseCode.MESSAGE_ILLEGAL, "0x8000"),
    ],
)
def test_a_refused_batch_does_not_harm_its_neighbours(stage, change, code, why):
    stage.send(stage.batch())
    stage.features.state.topics.set(TopicConfig("read-only", 4, 4, Perm.READ.value), 1)
    good, bad, last = stage.send(stage.batch(), stage.batch(**change), stage.batch(queue_id=1))
    assert (good.code, good.base_queue_offset) == (0, 1)
    assert (last.code, last.base_queue_offset) == (0, 0)
    assert bad.code == code
    assert why in bad.remark
    assert "full" not in [config.topic for config in stage.features.state.topics.configs()]


def test_other_content_under_ids_that_are_known_is_refused_and_said(stage):
    stage.send(stage.batch(first_sequence=5))
    other, again, next_one = stage.send(
        stage.batch(first_sequence=5, bodies=(b"forged",)),
        stage.batch(first_sequence=5),
        stage.batch(first_sequence=6),
    )
    assert other.code == ResponseCode.SEQUENCE_CONFLICT
    assert f"{PRODUCER_ID:016X} sent sequences 5 to 5 to queue 0 of 't' before" in other.remark
    assert (again.code, again.base_queue_offset) == (0, 0)
    assert (next_one.code, next_one.base_queue_offset) == (0, 1)
    assert stage.features.core.stats.total.put_duplicates == 1
    assert stage.features.core.stats.total.put_refused == 1


def test_new_producers_are_refused_while_all_room_is_taken(stage):
    stage.store._states._most = 2
    stage.store._states._min_age_ms = 60_000
    for queue_id in range(3):
        (outcome,) = stage.send(stage.batch(queue_id=queue_id))
    assert (outcome.code, outcome.retry_after_ms) == (ResponseCode.SYSTEM_BUSY, 1_000)
    assert "storage.max_producer_states" in outcome.remark
    stage.clock.advance(60_000)
    assert stage.send(stage.batch(queue_id=2))[0].code == 0


def test_a_batch_of_a_producer_whose_key_is_not_shown_is_refused(stage):
    stage.send(stage.batch(first_sequence=5))
    forged, own = stage.send(
        stage.batch(first_sequence=6, producer_id=PRODUCER_ID - 1), stage.batch(queue_id=1)
    )
    assert forged.code == ResponseCode.NO_PERMISSION
    assert f"{PRODUCER_ID - 1:016X}" in forged.remark
    assert own.code == 0
    header = encode_send(1, 1, b"key of a stranger")
    opaque = stage.begin(RequestCode.SEND_MESSAGE, header, stage.batch(first_sequence=6))
    stage.end_tick()
    assert stage.outcomes(opaque)[0].code == ResponseCode.NO_PERMISSION
    assert stage.pull()[1] == [b"body"]


def test_a_connection_sends_for_a_few_producers_only(make_stage):
    stage = make_stage(max_producers_per_connection=2)
    keys = [bytes([number]) * 16 for number in range(3)]
    batches = [stage.batch(producer_id=producer_id_of(key)) for key in keys]

    def send(number, peer=b"peer"):
        opaque = stage.begin(
            RequestCode.SEND_MESSAGE, encode_send(1, 1, keys[number]), batches[number], peer=peer
        )
        stage.end_tick()
        return stage.outcomes(opaque)[0].code

    assert [send(0), send(1), send(0)] == [0, 0, 0]
    with pytest.raises(SystemBusy, match="max_producers_per_connection"):
        send(2)
    assert [send(2, peer=b"another"), send(1)] == [0, 0]


def test_a_body_over_the_limit_is_refused(make_stage):
    stage = make_stage(max_message_size=1_000)
    good, bad = stage.send(
        stage.batch(bodies=(b"x" * 1_000,)), stage.batch(bodies=(b"x" * 1_000_000,))
    )
    assert good.code == 0
    assert bad.code == ResponseCode.MESSAGE_ILLEGAL
    assert "max_message_size" in bad.remark


def test_every_message_that_the_sdk_may_send_passes_the_limit(make_stage):
    stage = make_stage(max_message_size=10)
    message = Message(
        "t",
        b"x" * 10,
        tag="界" * 255,
        keys=[f"{number:03}" + "界" * 252 for number in range(64)],
        properties={f"{number:05}": "" for number in range(6_000)} | {"k": "v" * 2_000},
        sharding_key="界" * 255,
    )
    data = encode_batch(
        [message],
        topic="t",
        queue_id=0,
        producer_id=PRODUCER_ID,
        first_sequence=0,
        born_timestamp=1,
    )
    assert stage.send(data)[0].code == 0


def test_changed_bytes_cost_the_batch_not_the_request(stage):
    broken = bytearray(stage.batch(bodies=(b"precious",)))
    broken[-3] ^= 1
    good, bad, last = stage.send(stage.batch(), bytes(broken), stage.batch(queue_id=1))
    assert (good.code, last.code) == (0, 0)
    assert bad.code == ResponseCode.MESSAGE_ILLEGAL
    assert "checksum" in bad.remark


def test_behind_a_refused_batch_nothing_of_its_queue_is_stored(stage):
    broken = bytearray(stage.batch())
    broken[-3] ^= 1
    bad, later, other = stage.send(bytes(broken), stage.batch(), stage.batch(queue_id=1))
    assert bad.code == ResponseCode.MESSAGE_ILLEGAL
    assert later.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "an earlier batch" in later.remark
    assert other.code == 0
    assert stage.send(stage.batch())[0].base_queue_offset == 0


def test_a_refusal_of_one_topic_does_not_concern_another(stage):
    bad, other, later, good = stage.send(
        stage.batch("%RETRY%g"), stage.batch("t"), stage.batch("%RETRY%g"), stage.batch("t")
    )
    assert (other.code, good.code) == (0, 0)
    assert bad.code == ResponseCode.NO_PERMISSION
    assert later.code == ResponseCode.SERVICE_NOT_AVAILABLE


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"junk" + data[4:],
        lambda data: data[:-1],
        lambda data: data + b"rest",
        lambda data: data[:30],
    ],
)
def test_where_batches_end_nowhere_the_whole_request_is_refused(stage, damage):
    opaque = stage.begin_send(stage.batch(), damage(stage.batch()))
    stage.end_tick()
    with pytest.raises(CorruptBatch):
        stage.answer(opaque)
    assert stage.store.stats().put_batches == 0


def test_a_wrong_number_of_batches_is_refused(stage):
    from mqmesh.protocol.commands import RequestCode
    from mqmesh.protocol.messaging import encode_send

    for header in (
        encode_send(1, 2, PRODUCER_KEY),
        b"",
        b"12345678",
        encode_send(1, 4_096, PRODUCER_KEY),
    ):
        with pytest.raises(RemoteProtocolError):
            stage.answer(stage.begin(RequestCode.SEND_MESSAGE, header, stage.batch()))
    assert not stage.features.writes.stage.sends


def test_a_duplicate_is_answered_like_the_first(stage):
    batch = stage.batch(first_sequence=9)
    (first,) = stage.send(batch)
    stage.clock.advance(5)
    (again,) = stage.send(batch)
    assert again == first
    assert stage.features.core.stats.total.put_duplicates == 1
    assert stage.features.core.stats.total.put_batches == 1


def test_a_oneway_send_is_stored_and_never_answered(make_stage):
    for flush in FlushDiskType:
        stage = make_stage(flush_disk_type=flush)
        stage.store.synced = 0
        stage.begin_send(stage.batch(), oneway=True)
        stage.end_tick()
        assert stage.store.stats().put_batches == 1
        assert not stage.answers
        assert not stage.features.core.commit_point.waiting_count


def test_a_full_disk_is_told_and_forgotten(stage):
    stage.store.failure = DiskFull("no room")
    first, second = stage.send(stage.batch(), stage.batch("%DLQ%x"))
    assert (first.code, first.remark) == (ResponseCode.DISK_FULL, "no room")
    assert second.code == ResponseCode.NO_PERMISSION
    stage.store.failure = None
    assert stage.send(stage.batch())[0].code == 0


def test_a_stopped_store_makes_the_broker_unavailable(stage):
    stage.store.failure = StoreClosed("a sync failed")
    (outcome,) = stage.send(stage.batch())
    assert outcome.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "a sync failed" in outcome.remark


def test_much_at_once_is_written_before_the_tick_ends(make_stage):
    stage = make_stage(max_staged_bytes=64 * 1_024)
    opaque = stage.begin_send(stage.batch(bodies=(b"x" * 70_000,)))
    assert stage.outcomes(opaque)[0].code == 0
    assert stage.features.writes.stage.staged_bytes == 0


def test_with_sync_flush_the_answer_waits_for_the_disk(make_stage):
    stage = make_stage(flush_disk_type=SYNC)
    stage.store.synced = 0
    first = stage.begin_send(stage.batch())
    stage.end_tick()
    second = stage.begin_send(stage.batch(), stage.batch("SCHEDULE_TOPIC_XXXX"))
    stage.end_tick()
    assert not stage.answers
    stage.store.synced = stage.store.stats().max_commitlog_offset // 2
    stage.features.writes.answer_confirmed()
    assert list(stage.answers) == [first]
    stage.store.synced *= 2
    stage.features.writes.answer_confirmed()
    assert [one.code for one in stage.outcomes(second)] == [0, ResponseCode.NO_PERMISSION]


def test_with_sync_flush_a_sender_need_not_wait(make_stage):
    stage = make_stage(flush_disk_type=SYNC)
    stage.store.synced = 0
    opaque = stage.begin_send(stage.batch(attributes=Attributes.NO_WAIT_STORE))
    stage.end_tick()
    assert [one.status for one in stage.outcomes(opaque)] == [SendStatus.SEND_OK]


def test_with_sync_flush_waiting_has_an_end(make_stage):
    stage = make_stage(flush_disk_type=SYNC, sync_flush_timeout_ms=5_000)
    stage.store.synced = 0
    opaque = stage.begin_send(stage.batch(), stage.batch("%DLQ%x"))
    stage.end_tick()
    stage.clock.advance(4_999)
    stage.features.writes.answer_expired(stage.clock.monotonic_ms())
    assert not stage.answers
    stage.clock.advance(1)
    stage.features.writes.answer_expired(stage.clock.monotonic_ms())
    good, bad = stage.outcomes(opaque)
    assert (good.code, good.status) == (0, SendStatus.FLUSH_DISK_TIMEOUT)
    assert (bad.code, bad.status) == (ResponseCode.NO_PERMISSION, SendStatus.SEND_OK)
    assert stage.features.core.stats.unsafe_answers == {SendStatus.FLUSH_DISK_TIMEOUT: 1}


def test_a_group_that_elects_its_master_answers_nothing_that_is_not_confirmed(make_stage):
    stage = make_stage(flush_disk_type=SYNC, sync_flush_timeout_ms=100)
    stage.features.core.leadership = object()
    stage.store.synced = 0
    opaque = stage.begin_send(stage.batch())
    stage.end_tick()
    stage.clock.advance(60_000)
    stage.features.writes.answer_expired(stage.clock.monotonic_ms())
    assert not stage.answers
    stage.store.synced = stage.store.stats().max_commitlog_offset
    stage.features.writes.answer_confirmed()
    assert [one.status for one in stage.outcomes(opaque)] == [SendStatus.SEND_OK]


def test_a_group_that_elects_its_master_leaves_open_what_waits_when_it_is_stopped(make_stage):
    stage = make_stage(flush_disk_type=SYNC)
    stage.features.core.leadership = object()
    stage.store.synced = 0
    opaque = stage.begin_send(stage.batch())
    stage.end_tick()
    stage.features.sending.stopped()
    assert isinstance(stage.answers[opaque], NotMaster)


def test_with_sync_flush_a_duplicate_waits_for_the_same_sync(make_stage):
    stage = make_stage(flush_disk_type=SYNC)
    stage.store.synced = 0
    batch = stage.batch(first_sequence=1)
    opaques = [stage.begin_send(batch), stage.begin_send(batch)]
    stage.end_tick()
    assert not stage.answers
    stage.store.synced = stage.store.stats().max_commitlog_offset
    stage.features.writes.answer_confirmed()
    assert stage.outcomes(opaques[0]) == stage.outcomes(opaques[1])


def test_with_sync_flush_too_many_waiting_sends_are_told_to_come_back(make_stage):
    stage = make_stage(flush_disk_type=SYNC, max_sync_flush_waits=2, busy_retry_after_ms=30)
    stage.store.synced = 0
    for _ in range(2):
        stage.begin_send(stage.batch())
        stage.end_tick()
    with pytest.raises(SystemBusy, match="max_sync_flush_waits") as caught:
        stage.answer(stage.begin_send(stage.batch()))
    assert caught.value.retry_after_ms == 30


def test_counters_tell_what_happened(stage):
    stage.send(stage.batch(bodies=(b"a", b"b")), stage.batch("%DLQ%x"))
    total = stage.features.core.stats.total
    assert (total.send_requests, total.put_batches, total.put_messages) == (1, 1, 2)
    assert (total.put_refused, total.put_bytes > 100) == (1, True)
    topic = stage.features.state.topics.require("t")
    assert (topic.put_messages, topic.last_update) == (2, {0: stage.clock.wall_ms()})


# ---- What is in a batch ---------------------------------------------------------------------


def batch_of(data: bytes, count: int = 1, topic: str = "t", compress: bool = False) -> bytes:
    """A batch whose header is right, with anything for messages."""
    stored, codec = compress_payload(data) if compress else (data, CODEC_NONE)
    assert (codec == CODEC_NONE) is not compress
    payload = Payload(stored, codec, len(data), count, False, b"")
    return b"".join(
        batch_parts(
            payload,
            topic=topic,
            queue_id=0,
            producer_id=PRODUCER_ID,
            first_sequence=0,
            born_timestamp=1,
        )
    )


GARBAGE = [
    msgspec.msgpack.encode([{"no": "message"}]),
    msgspec.msgpack.encode([Message("t", b"x", "")]),
    msgspec.msgpack.encode([Message("t", b"x", None, ("k",) * 300_000)]),
    msgspec.msgpack.encode([Message("other", b"x" * 100)]),
    msgspec.msgpack.encode([Message("t", b"x" * 100, properties={"a": "b" * 40_000})]),
    msgspec.msgpack.encode([Message("t", b"x" * 100)]) + bytes(100),
    msgspec.msgpack.encode([Message("t", bytes(4 * 1024 * 1024 + 1))]),
    b"\x91" + bytes(100),
    b"\x90" + bytes(100),
]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("data", GARBAGE)
def test_messages_that_no_consumer_could_read_are_refused(stage, data, compress):
    if compress:
        try:
            bad = batch_of(data, compress=True)
        except AssertionError:
            bad = batch_of(data + b"\0" * 1_000, compress=True)  # too small to be compressed
    else:
        bad = batch_of(data)
    good, refused, last = stage.send(stage.batch(), bad, stage.batch(queue_id=1))
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL
    assert refused.remark
    assert (good.code, last.code) == (0, 0)
    assert stage.pull()[1] == [b"body"]


@pytest.mark.parametrize("compress", [False, True])
def test_messages_of_another_topic_than_their_batch_are_refused(stage, compress):
    data = msgspec.msgpack.encode([Message("secret", b"x" * 100)])
    (outcome,) = stage.send(batch_of(data, compress=compress))
    assert outcome.code == ResponseCode.MESSAGE_ILLEGAL
    assert "topic 'secret' differs from 't'" in outcome.remark


def test_a_broker_may_believe_what_was_compressed(make_stage):
    data = msgspec.msgpack.encode([Message("secret", b"x" * 100)])
    stage = make_stage(check_compressed_batches=False)
    believed, looked_at = stage.send(batch_of(data, compress=True), batch_of(data))
    assert believed.code == 0
    assert looked_at.code == ResponseCode.MESSAGE_ILLEGAL

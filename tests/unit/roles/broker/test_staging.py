"""Sends between request and answer."""

from __future__ import annotations

from mqmesh.batch.record_batch import encode_batch, read_header
from mqmesh.message import Message
from mqmesh.protocol.command import Command, Request
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.roles.broker.features.sends.staging import OpenSend, SendStage, fill_in, fill_in_refusal
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus


def open_send(*outcomes, end_offset=0, deadline_ms=0):
    request = Request(b"p", Command(10, 1, 0, memoryview(b""), memoryview(b"")))
    return OpenSend(request, list(outcomes), end_offset, deadline_ms)


def stored(at):
    return PutResult(PutStatus.PUT_OK, at, at * 100, at * 100 + 100, 5)


def batch_to_put():
    data = encode_batch(
        [Message("t", b"x")],
        topic="t",
        queue_id=0,
        producer_id=1,
        first_sequence=0,
        born_timestamp=1,
    )
    return BatchToPut("t", 0, read_header(data), data)


def test_results_go_where_nothing_was_decided_yet():
    refused = BatchOutcome(13)
    sends = [open_send(None, refused, None), open_send(refused), open_send(None)]
    results = [stored(1), stored(2), PutResult(PutStatus.MESSAGE_ILLEGAL, -1, -1, -1, 5)]
    fill_in(sends, [batch_to_put()] * 3, results)
    assert [one.base_queue_offset for one in sends[0].outcomes] == [1, -1, 2]
    assert sends[0].end_offset == 300
    assert sends[1].outcomes == [refused]
    assert sends[2].outcomes[0].code == 13


def test_a_refusal_of_the_store_spares_what_was_decided_before():
    early, late = BatchOutcome(13), BatchOutcome(28)
    send = open_send(None, early)
    fill_in_refusal([send], late)
    assert send.outcomes == [late, early]


def test_sends_wait_in_order_until_the_disk_has_them():
    stage = SendStage()
    sends = [open_send(end_offset=end) for end in (10, 20, 15, 30)]
    for send in sends:
        stage.wait(send)
    assert stage.durable(9) == []
    assert stage.durable(10) == sends[:1]
    assert stage.durable(20) == sends[1:3]
    assert stage.waiting_count == 1


def test_after_too_long_only_what_was_stored_says_so():
    stage = SendStage()
    stage.wait(open_send(BatchOutcome(0), BatchOutcome(13), deadline_ms=10))
    stage.wait(open_send(BatchOutcome(0), deadline_ms=11))
    (late,) = stage.expire(10)
    assert [one.status for one in late.outcomes] == [SendStatus.FLUSH_DISK_TIMEOUT, 0]
    assert stage.waiting_count == 1


def test_arrivals_are_told_until_all_of_them_is_on_disk():
    stage = SendStage()
    stage.note_arrival(("t", 0), 10)
    stage.note_arrival(("t", 1), 20)
    stage.note_arrival(("t", 0), 30)
    assert stage.arrivals(20) == [("t", 0), ("t", 1)]
    assert stage.arrivals(25) == [("t", 0)], "there may be more for it with each sync"
    assert stage.arrivals(30) == [("t", 0)]
    assert stage.arrivals(99) == []


def test_what_is_staged_is_taken_once():
    stage = SendStage()
    stage.sends.append(open_send(None))
    stage.staged_bytes = 5
    assert len(stage.take()[1]) == 1
    assert (stage.take(), stage.staged_bytes) == (([], []), 0)

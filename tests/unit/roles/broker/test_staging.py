"""Sends between request and answer."""

from __future__ import annotations

from harness.peers import KeptPeer

from mqmesh.batch.record_batch import encode_batch, read_header
from mqmesh.message import Message
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.protocol.request import PendingReply
from mqmesh.roles.broker.staging import (
    OpenSend,
    fill_in,
    fill_in_refusal,
    fill_in_status,
)
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus


def open_send(*outcomes):
    return OpenSend(PendingReply(KeptPeer(b"p"), 10, 1, 0), list(outcomes))


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


def test_only_what_was_stored_says_that_something_is_missing():
    send = open_send(BatchOutcome(0), BatchOutcome(13))
    fill_in_status(send, SendStatus.FLUSH_SLAVE_TIMEOUT)
    assert [one.status for one in send.outcomes] == [SendStatus.FLUSH_SLAVE_TIMEOUT, 0]

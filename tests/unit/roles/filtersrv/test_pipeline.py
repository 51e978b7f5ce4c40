"""What a pull becomes on its way through a filter."""

from __future__ import annotations

import pytest

from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    check_batch,
    check_stored,
    decode_messages,
    encode_batch,
    stamp,
)
from mqmesh.errors import CorruptBatch
from mqmesh.message import Message
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.pulling import PullResponse, PullStatus
from mqmesh.roles.filtersrv.pipeline import QUESTION_MESSAGES, FilterPass


def stored(base, count, queue_id=0):
    """A stored batch of messages whose bodies are their queue offsets."""
    data = encode_batch(
        [Message("t", b"%d" % number) for number in range(base, base + count)],
        topic="t",
        queue_id=queue_id,
        producer_id=1,
        first_sequence=base,
        born_timestamp=5,
    )
    front = stamp(
        check_batch(data),
        commitlog_offset=base * 100,
        base_queue_offset=base,
        store_timestamp=6,
        epoch=0,
        store_id=9,
    )
    return front + data[BROKER_PART_SIZE:]


def passage(*batches, queue_offset=0, end=None):
    body = b"".join(batches)
    answer = PullResponse(int(PullStatus.FOUND), end or 100, 0, 100)
    return FilterPass(answer, memoryview(body), queue_offset)


def received(reply):
    """Status, next offset, and the (offset, body) of each message of a reply."""
    header = decode_header(PullResponse, reply.header)
    body = b"".join(reply.body)
    found, position = [], 0
    while position < len(body):
        batch = check_stored(body, position)
        messages = decode_messages(body, batch, position=position)
        found += [(message.queue_offset, int(message.body)) for message in messages]
        position += batch.total_size
    return PullStatus(header.status), header.next_queue_offset, found


def test_batches_that_match_whole_pass_as_they_are():
    first, second = stored(0, 3), stored(3, 2)
    one = passage(first, second)
    (question,) = one.questions()
    assert question.messages == 5
    assert b"".join(question.parts) == first + second
    one.take(b"\1\1\1\0\0")
    reply = one.reply()
    assert b"".join(reply.body) == first
    assert received(reply) == (PullStatus.FOUND, 100, [(0, 0), (1, 1), (2, 2)])


def test_batches_that_match_in_part_are_cut_down_and_keep_their_offsets():
    one = passage(stored(10, 5), stored(15, 3), queue_offset=10)
    one.take(b"\0\1\0\1\0\0\0\1")
    assert received(one.reply())[2] == [(11, 11), (13, 13), (17, 17)]


def test_what_stands_before_the_offset_asked_for_is_left_out():
    one = passage(stored(10, 5), queue_offset=13)
    one.take(b"\1\1\1\1\1")
    assert received(one.reply())[2] == [(13, 13), (14, 14)]
    one = passage(stored(10, 5), queue_offset=13)
    one.take(b"\1\1\1\0\0")
    assert received(one.reply()) == (PullStatus.NO_MATCHED_MSG, 100, [])


def test_without_a_match_the_consumer_learns_where_to_go_on():
    one = passage(stored(0, 4), end=4)
    one.take(bytes(4))
    assert received(one.reply()) == (PullStatus.NO_MATCHED_MSG, 4, [])


def test_a_question_is_not_larger_than_a_filter_can_answer_in_time():
    big = QUESTION_MESSAGES // 2 + 1
    one = passage(stored(0, big), stored(big, big), stored(2 * big, 10))
    assert [question.messages for question in one.questions()] == [big, big + 10]
    one.take(bytes(big))
    one.take(b"\1" + bytes(big + 9))
    assert received(one.reply())[2] == [(big, big)]


def test_what_was_not_judged_in_time_is_pulled_again():
    big = QUESTION_MESSAGES
    one = passage(stored(5, big), stored(5 + big, 10), queue_offset=7)
    first, second = one.questions()
    assert (first.messages, second.messages) == (big, 10)
    one.take(bytes(big - 1) + b"\1")
    assert received(one.reply()) == (PullStatus.FOUND, 5 + big, [(4 + big, 4 + big)])


def test_damage_is_not_passed_over():
    data = bytearray(stored(0, 3))
    data[-1] ^= 1
    with pytest.raises(CorruptBatch):
        passage(bytes(data))

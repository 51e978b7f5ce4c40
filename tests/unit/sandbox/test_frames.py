"""What a worker says is believed only as far as the rules go."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.sandbox.frames import (
    ANSWER,
    Answer,
    AnswerReader,
    FramingSlip,
    Setup,
    Status,
    encode_answer,
    encode_question,
    failure_text,
)

NONCE = 0x0123_4567_89AB_CDEF


def test_an_answer_may_come_in_any_pieces():
    whole = encode_answer(NONCE, Status.MATCHED, b"\x00\x01\x01")
    for step in range(1, len(whole) + 1):
        reader = AnswerReader(NONCE, 3)
        pieces = [whole[i : i + step] for i in range(0, len(whole), step)]
        assert [reader.take(one) for one in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert reader.take(pieces[-1]) == Answer(Status.MATCHED, b"\x00\x01\x01")


@pytest.mark.parametrize(
    ("data", "messages"),
    [
        (encode_answer(NONCE + 1, Status.MATCHED, b"\x01"), 1),
        (encode_answer(NONCE, Status.MATCHED, b"\x01\x01"), 1),
        (encode_answer(NONCE, Status.MATCHED, b""), 1),
        (encode_answer(NONCE, Status.MATCHED, b"\x02"), 1),
        (encode_answer(NONCE, Status.MATCHED, b""), 0),
        (encode_answer(NONCE, Status.READY, b"\x90"), 1),
        (encode_answer(NONCE, Status.READY, bytes(1_025)), 0),
        (encode_answer(NONCE, Status.FAILED, bytes(1_025)), 1),
        (encode_answer(NONCE, Status.UNCONFINED, b"x"), 1),
        (ANSWER.pack(0, NONCE, 9), 1),
        (ANSWER.pack(2**32 - 1, NONCE, Status.MATCHED), 1),
        (encode_answer(NONCE, Status.MATCHED, b"\x01") + b"\x00", 1),
        (b"x" * 100_000, 1),
    ],
)
def test_a_slip_is_noticed(data, messages):
    with pytest.raises(FramingSlip):
        AnswerReader(NONCE, messages).take(data)


@given(st.binary(max_size=64), st.integers(0, 5))
def test_random_bytes_are_a_slip_or_incomplete(data, messages):
    reader = AnswerReader(NONCE, messages)
    try:
        assert reader.take(data) is None
        assert len(data) < ANSWER.size
    except FramingSlip:
        assert len(data) >= ANSWER.size


def test_a_question_is_sixteen_bytes_less_four_and_a_body():
    assert encode_question(NONCE, 5) == b"\x05\x00\x00\x00" + NONCE.to_bytes(8, "little")


def test_a_setup_survives_the_way():
    setup = Setup("def match(m): return True", 1 << 28, 60, True, "broker-a")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(setup), type=Setup) == setup


def test_a_reason_is_one_printable_line():
    assert failure_text(b"a\nb\x1b[31mc\xff") == "a b [31mc\ufffd"

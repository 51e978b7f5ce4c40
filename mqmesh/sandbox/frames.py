"""Frames between a confined worker and its owner, over two pipes.

Layout of a question, little endian:

======== ===== ==== ==========================================================
position bytes type meaning
======== ===== ==== ==========================================================
0        4     u32  size of the body
4        8     u64  nonce: random, repeated in the answer
12       …     …    body: first ``Setup`` as msgpack, then whole record batches
======== ===== ==== ==========================================================

Layout of an answer, little endian:

======== ===== ==== ==========================================================
position bytes type meaning
======== ===== ==== ==========================================================
0        4     u32  size of the body
4        8     u64  nonce of the question
12       1     u8   ``Status``
13       …     …    body: see ``Status``
======== ===== ==== ==========================================================

After an invalid answer, or one that is longer than the question allows, the owner kills the worker.
"""

import enum
import struct
from typing import Final

import msgspec

QUESTION: Final = struct.Struct("<IQ")
ANSWER: Final = struct.Struct("<IQB")
MAX_QUESTION_BYTES: Final = 32 * 1024 * 1024
MAX_TEXT_BYTES: Final = 1_024
MAX_RUNGS_BYTES: Final = 1_024


class Status(enum.IntEnum):
    """Status of a worker's answer."""

    READY = 0
    """Answer to the setup; body: names of the rungs that hold, a msgpack array."""
    MATCHED = 1
    """Answer to batches; body: one byte a message, 1 for a match, else 0."""
    FAILED = 2
    """The filter cannot be used, or raised; body: why, UTF-8."""
    UNCONFINED = 3
    """The worker could not be locked in; body: why, UTF-8."""


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """The first question: the filter to run, and its limits.

    Attributes:
        source: The filter, Python.
        memory_bytes: Address space.
        cpu_s: Seconds of processor time.
        require_seccomp: Refuse to run without a filter of system calls.
        broker_name: Broker group that the messages come from.
    """

    source: str
    memory_bytes: int
    cpu_s: int
    require_seccomp: bool
    broker_name: str


class Answer(msgspec.Struct, frozen=True):
    """One answer of a worker, checked against its question.

    Attributes:
        status: A ``Status``.
        body: Body of the answer, see ``Status``.
    """

    status: Status
    body: bytes


class FramingSlip(Exception):
    """Raised when a worker's output is no answer."""


class AnswerReader:
    """Takes a worker's output, and never holds more of it than an answer may be.

    Args:
        nonce: Nonce of the question.
        messages: Messages in the batches of the question; 0 for the setup.
    """

    def __init__(self, nonce: int, messages: int) -> None:
        self._nonce = nonce
        self._messages = messages
        self._data = bytearray()

    def take(self, data: bytes) -> Answer | None:
        """Takes a piece; the answer once it is complete.

        Raises:
            FramingSlip: The output is no answer to the question.
        """
        self._data += data
        if len(self._data) < ANSWER.size:
            return None
        size, nonce, number = ANSWER.unpack_from(self._data)
        if nonce != self._nonce:
            raise FramingSlip("an answer to another question")
        if not self._may_be(number, size):
            raise FramingSlip(f"an answer of kind {number} and {size} bytes")
        if len(self._data) > ANSWER.size + size:
            raise FramingSlip("more than an answer")
        if len(self._data) < ANSWER.size + size:
            return None
        body = bytes(self._data[ANSWER.size :])
        if number == Status.MATCHED and body.strip(b"\x00\x01"):
            raise FramingSlip("a match that is neither yes nor no")
        return Answer(Status(number), body)

    def _may_be(self, number: int, size: int) -> bool:
        if number == Status.MATCHED:
            return bool(self._messages) and size == self._messages
        if number == Status.READY:
            return not self._messages and size <= MAX_RUNGS_BYTES
        if number == Status.UNCONFINED:
            return not self._messages and size <= MAX_TEXT_BYTES
        return number == Status.FAILED and size <= MAX_TEXT_BYTES


def encode_answer(nonce: int, status: Status, body: bytes) -> bytes:
    """Encodes an answer. Layout: answer."""
    return ANSWER.pack(len(body), nonce, status) + body


def encode_question(nonce: int, size: int) -> bytes:
    """Encodes the head of a question whose body has ``size`` bytes."""
    return QUESTION.pack(size, nonce)


def failure_text(data: bytes) -> str:
    """Returns the reason that a worker gave, made safe to show: one line, printable."""
    text = data.decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text)

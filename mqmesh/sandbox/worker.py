"""The confined process: ``python -I -B -m mqmesh.sandbox.worker``, always these arguments.

It has no environment and no descriptors but two pipes: questions come by 0, answers go
by 1. First it imports what it and filters need, then it reads what to run, locks itself
in, and only then looks at the filter.
"""

# Imports after the lock-down end the process, so late imports of Python are made here.
import encodings.ascii
import encodings.idna
import encodings.latin_1
import encodings.utf_16
import encodings.utf_32  # noqa: F401
import os
import sys
import time
import unicodedata  # noqa: F401
import warnings
from collections.abc import Iterator
from typing import Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import decode_messages
from mqmesh.errors import CorruptBatch
from mqmesh.message import StoredMessage
from mqmesh.sandbox.confinement import ConfinementFailed, Limits, confine
from mqmesh.sandbox.frames import (
    MAX_QUESTION_BYTES,
    MAX_TEXT_BYTES,
    QUESTION,
    Setup,
    Status,
    encode_answer,
)
from mqmesh.sandbox.runtime import FilterError, FilterExhausted, Match, load_filter, match_all

QUESTIONS: Final = 0
ANSWERS: Final = 1
EXHAUSTED: Final = 12
"""Exit code of a worker without memory."""
_CHUNK = 1 << 20


def main() -> None:
    """Serves until the owner closes the pipe."""
    nonce, body = _read_question()
    setup = msgspec.msgpack.decode(body, type=Setup)
    # Nothing may want to write a word: there is nowhere to.
    sys.stdin = sys.stdout = sys.stderr = None
    warnings.simplefilter("ignore")
    time.strptime("2013", "%Y")
    time.localtime()
    try:
        rungs = confine(Limits(setup.memory_bytes, setup.cpu_s))
    except ConfinementFailed as error:
        _answer(nonce, Status.UNCONFINED, _text(str(error)))
        return
    if setup.require_seccomp and "seccomp" not in rungs:
        reason = "this platform has no filter of system calls (filter_server.require_seccomp)"
        _answer(nonce, Status.UNCONFINED, _text(reason))
        return
    try:
        match = load_filter(setup.source)
    except FilterError as error:
        _answer(nonce, Status.FAILED, _text(str(error)))
        return
    _answer(nonce, Status.READY, msgspec.msgpack.encode(rungs))
    while True:
        _serve(match, setup.broker_name)


def _serve(match: Match, broker_name: str) -> None:
    nonce, body = _read_question()
    try:
        found = b"".join(match_all(match, some) for some in _batches(body, broker_name))
    except FilterExhausted as error:
        _answer(nonce, Status.FAILED, _text(str(error)))
        os._exit(EXHAUSTED)  # what it holds would be in the way of all further messages
    except (FilterError, CorruptBatch) as error:
        _answer(nonce, Status.FAILED, _text(str(error)))
    except MemoryError:
        _answer(nonce, Status.FAILED, b"the messages need more than worker_memory_bytes")
    else:
        _answer(nonce, Status.MATCHED, found)


def _batches(body: memoryview, broker_name: str) -> Iterator[list[StoredMessage]]:
    for header, data in iter_batches(body):
        yield decode_messages(data, header, broker_name=broker_name)


def _read_question() -> tuple[int, memoryview]:
    size, nonce = QUESTION.unpack(_read(QUESTION.size))
    if size > MAX_QUESTION_BYTES:
        os._exit(1)
    return nonce, _read(size)


def _read(size: int) -> memoryview:
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        some = os.read(QUESTIONS, min(size - filled, _CHUNK))
        if not some:
            os._exit(0)  # the owner is gone, or does not need us any more
        view[filled : filled + len(some)] = some
        filled += len(some)
    return view


def _answer(nonce: int, status: Status, body: bytes) -> None:
    left = memoryview(encode_answer(nonce, status, body))
    while left:
        left = left[os.write(ANSWERS, left) :]


def _text(text: str) -> bytes:
    return text.encode(errors="replace")[:MAX_TEXT_BYTES]


if __name__ == "__main__":
    main()

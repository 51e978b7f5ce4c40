"""The owner's end of a confined worker: starts it, sends questions, and kills it if it misbehaves.

The worker is exec'ed with fixed arguments and an empty environment. The owner knows the form and
the deadline of each answer in advance, so it kills the worker at the first wrong or late byte.
"""

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from mqmesh.sandbox.frames import (
    Answer,
    AnswerReader,
    FramingSlip,
    Setup,
    encode_question,
)

WORKER_ARGV: Final = (sys.executable, "-I", "-B", "-m", "mqmesh.sandbox.worker")
_CHUNK = 1 << 18

_log = logging.getLogger(__name__)


class WorkerTimer(Protocol):
    """A planned call."""

    def cancel(self) -> None:
        """Cancels the call."""


class WorkerLoop(Protocol):
    """Interface of the event loop; ``mqmesh.transport.zmq.loop.EventLoop`` has it."""

    def add(self, source: int, handler: Callable[[], None]) -> None:
        """Calls ``handler`` while the descriptor can be read."""

    def want_write(self, source: int, wanted: bool) -> None:
        """Also calls the handler while the descriptor can be written."""

    def remove(self, source: int) -> None:
        """Stops watching a descriptor."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> WorkerTimer:
        """Calls once, not before ``delay_ms``."""


class WorkerProcess:
    """One worker; answers one question at a time.

    Args:
        loop: Event loop of the process.
        setup: Program and limits of the worker; the first question.
        deadline_ms: Time for the answer to the setup, which includes Python's start.
        on_answer: Called with each answer.
        on_death: Called once with the reason when the worker dies, unless ``close`` was called.

    Attributes:
        pid: Process id of the worker.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(
        self,
        loop: WorkerLoop,
        setup: Setup,
        *,
        deadline_ms: int,
        on_answer: Callable[[Answer], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._on_answer = on_answer
        self._on_death = on_death
        self._process = subprocess.Popen(
            WORKER_ARGV,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={},
            cwd="/",
            close_fds=True,
            process_group=0,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions = self._process.stdin.fileno()
        self._answers = self._process.stdout.fileno()
        self._waiting: list[memoryview] = []
        self._reader: AnswerReader | None = None
        self._deadline: WorkerTimer | None = None
        self._closed = False
        for descriptor in (self._questions, self._answers):
            os.set_blocking(descriptor, False)
        loop.add(self._answers, self._on_readable)
        loop.add(self._questions, self._on_writable)
        self._question([msgspec.msgpack.encode(setup)], 0, deadline_ms)

    @property
    def is_busy(self) -> bool:
        """True while an answer is due."""
        return self._reader is not None

    def ask(self, parts: list[bytes | memoryview], messages: int, deadline_ms: int) -> None:
        """Asks about record batches.

        Args:
            parts: Whole batches, checked.
            messages: Number of messages in the batches, from 1.
            deadline_ms: A worker that has not answered by then is killed.
        """
        self._question(parts, messages, deadline_ms)

    def close(self) -> None:
        """Ends the worker at once; no callback is called any more."""
        if self._closed:
            return
        self._closed = True
        self._reader = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove(self._questions)
        self._loop.remove(self._answers)
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _question(self, parts: list[bytes | memoryview], messages: int, deadline_ms: int) -> None:
        assert self._reader is None
        nonce = secrets.randbits(64)
        head = encode_question(nonce, sum(map(len, parts)))
        self._waiting = [memoryview(one) for one in (head, *parts)]
        self._reader = AnswerReader(nonce, messages)
        self._deadline = self._loop.call_later(
            deadline_ms, lambda: self._die(f"no answer within {deadline_ms} ms")
        )
        self._on_writable()

    def _on_writable(self) -> None:
        try:
            while self._waiting:
                first = self._waiting[0]
                sent = os.write(self._questions, first[:_CHUNK])
                if sent < len(first):
                    self._waiting[0] = first[sent:]
                else:
                    del self._waiting[0]
        except BlockingIOError:
            self._loop.want_write(self._questions, True)
            return
        except OSError:
            self._die_of_itself()
            return
        if not self._closed:
            self._loop.want_write(self._questions, False)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._answers, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._die_of_itself()
            return
        if self._reader is None:
            self._die("it spoke without being asked")
            return
        try:
            answer = self._reader.take(data)
        except FramingSlip as slip:
            self._die(f"it broke the rules of its pipe: {slip}")
            return
        if answer is None:
            return
        if self._waiting:
            self._die("it answered before it had read the question")
            return
        self._reader = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._on_answer(answer)

    def _die_of_itself(self) -> None:
        # Its pipe is closed: it is dead, or may as well be.
        try:
            code = self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            self._die("it closed its pipe")
            return
        self._die(_cause(code))

    def _die(self, reason: str) -> None:
        if self._closed:
            return
        self.close()
        _log.info("worker %d was ended: %s", self.pid, reason)
        self._on_death(reason)


_CAUSES = {
    12: "it used up its memory (worker_memory_bytes)",
    -31: "it made a system call that filters may not make (SIGSYS)",
    -24: "it used up its processor time (SIGXCPU)",
    -9: "it was killed (SIGKILL)",
    -11: "it crashed (SIGSEGV)",
    -6: "it crashed (SIGABRT)",
}


def _cause(code: int) -> str:
    return _CAUSES.get(code, f"it ended with exit code {code}")

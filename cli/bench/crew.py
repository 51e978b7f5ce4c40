"""Starts the clients of `mqmesh bench`, lets them begin together, and collects their reports."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from mqmesh.errors import MQMeshError
from mqmesh.sdk.client.interrupt import Interrupt

from .words import (
    GO,
    MAX_LINE_BYTES,
    STOP,
    BenchTask,
    ClientFailure,
    ClientProgress,
    ClientReady,
    ClientReport,
    Word,
    Work,
)

READY_TIMEOUT_S: Final = 60.0
LOOK_EVERY_S: Final = 0.1
END_TIMEOUT_S: Final = 60.0
"""Time that a stopped client has to wait for its outcomes."""
LAST_READ_S: Final = 5.0
"""Readers wait so long for more of the sent messages."""

OnProgress = Callable[[int, float], None]
"""Called with the number of messages that are done, and seconds since the beginning."""


class BenchFailed(MQMeshError):
    """A client could not go on."""


class BenchClient:
    """One client's process, in a session of its own, so that Ctrl-C reaches only us.

    Args:
        task: Task of the client.
    """

    def __init__(self, task: BenchTask) -> None:
        self.task = task
        self.done = 0
        self.is_ready = False
        self.report: ClientReport | None = None
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mqmesh.cli.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self.say(msgspec.json.encode(task).decode())

    def say(self, text: str) -> None:
        """Writes a line to the client's standard input; ignored if the client has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # the caller that waits for its report will read why

    def read_messages(self) -> None:
        """Takes the client's messages.

        Raises:
            BenchFailed: The client cannot go on, or has ended without a report.
        """
        data = os.read(self.output.fileno(), 1 << 16)
        if not data and self.report is None:
            raise BenchFailed("a client of the benchmark ended without a report")
        self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        if len(self._pending) > MAX_LINE_BYTES:
            raise BenchFailed(f"a client of the benchmark said more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            self._take(msgspec.json.decode(line, type=Word))

    def end(self) -> None:
        """Ends the client, also in the middle of its work."""
        process = self._process
        if self.report is None:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it ended before it read everything
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _take(self, word: Word) -> None:
        match word:
            case ClientReady():
                self.is_ready = True
            case ClientProgress(done):
                self.done = done
            case ClientReport():
                self.report = word
                self.done = word.done
            case ClientFailure(error):
                raise BenchFailed(error)


class Crew:
    """All clients of one measurement; leaving the ``with`` ends them.

    Args:
        tasks: One for each.
        interrupt: Ctrl-C: the clients stop, and their work until then is the result.
    """

    def __init__(self, tasks: Sequence[BenchTask], interrupt: Interrupt) -> None:
        self._tasks = tasks
        self._interrupt = interrupt
        self._clients: list[BenchClient] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        try:
            for task in self._tasks:
                client = BenchClient(task)
                self._clients.append(client)
                self._selector.register(client.output, selectors.EVENT_READ, client)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, on_progress: OnProgress, enough: int = 0) -> list[ClientReport]:
        """Lets all begin, and waits until all have ended.

        Readers stop when they have enough: ``enough``, or all messages of the crew's senders.

        Args:
            on_progress: Called ten times a second.
            enough: Messages after which readers stop; 0 where they go by time or by senders.

        Returns:
            The reports, in the order of the tasks; of no messages if Ctrl-C came too early.

        Raises:
            BenchFailed: A client cannot go on.
        """
        if not self._wait(READY_TIMEOUT_S, lambda: all(one.is_ready for one in self._clients)):
            if self._interrupt:
                return [ClientReport() for _ in self._clients]
            raise BenchFailed(f"clients of the benchmark were not ready in {READY_TIMEOUT_S:g} s")
        for one in self._clients:
            one.say(GO)
        began = time.monotonic()
        self._follow(on_progress, began, enough)
        for one in self._clients:
            one.say(STOP)
        if not self._wait(END_TIMEOUT_S, self._has_all_reports, is_stopping=True):
            raise BenchFailed(f"clients of the benchmark did not end in {END_TIMEOUT_S:g} s")
        reports = [one.report for one in self._clients if one.report is not None]
        on_progress(self._counted(), time.monotonic() - began)
        return reports

    def _follow(self, on_progress: OnProgress, began: float, enough: int) -> None:
        """Waits until the clients have done their work, or Ctrl-C."""
        senders, readers = self._split()
        seen, seen_at = -1, began
        while not self._interrupt and not self._has_all_reports():
            self._look(LOOK_EVERY_S)
            now = time.monotonic()
            on_progress(self._counted(), now - began)
            if not readers:
                continue
            read = sum(one.done for one in readers)
            if read != seen:
                seen, seen_at = read, now
            if enough and read >= enough:
                return
            if senders and all(one.report for one in senders):
                sent = sum(one.done for one in senders)
                if read >= sent or now - seen_at >= LAST_READ_S:
                    return

    def _counted(self) -> int:
        senders, readers = self._split()
        return sum(one.done for one in senders or readers)

    def _split(self) -> tuple[list[BenchClient], list[BenchClient]]:
        senders = [one for one in self._clients if one.task.work in (Work.SEND, Work.SEND_EACH)]
        return senders, [one for one in self._clients if one not in senders]

    def _has_all_reports(self) -> bool:
        return all(one.report is not None for one in self._clients)

    def _wait(
        self, seconds: float, is_done: Callable[[], bool], *, is_stopping: bool = False
    ) -> bool:
        deadline = time.monotonic() + seconds
        while not is_done():
            if time.monotonic() >= deadline or (self._interrupt and not is_stopping):
                return False
            self._look(LOOK_EVERY_S)
        return True

    def _look(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            client: BenchClient = key.data
            client.read_messages()
            if client.report is not None:
                self._selector.unregister(client.output)

    def _end(self) -> None:
        for one in self._clients:
            one.end()
        self._selector.close()

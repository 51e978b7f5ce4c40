"""The command line as a process whose output is waited for."""

import os
import random
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mqmesh.roles.supervisor.log_lines import LineReader
from mqmesh.roles.supervisor.supervisor import python_argv

PORTS: Final = (22_000, 32_700)
"""From, and up to: below the ephemeral ports of Linux, beside the default ports of all roles."""
PATIENCE_S: Final = 15.0
STOP_TIMEOUT_S: Final = 10.0


class CommandProcess:
    """`mqmesh …` in a process of its own.

    Args:
        arguments: Arguments of the command line.
        folder: Working folder, None for this process's.

    Attributes:
        pid: Id of the process.
        out: Lines on standard output so far.
        err: Lines on standard error so far.
    """

    def __init__(self, *arguments: str, folder: Path | None = None) -> None:
        self._process = subprocess.Popen(
            python_argv(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
        )
        self.pid = self._process.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._lines: list[str] = []
        self._seen = 0
        for pipe, lines in ((self._process.stdout, self.out), (self._process.stderr, self.err)):
            assert pipe is not None
            reader = LineReader(pipe.fileno())
            self._selector.register(pipe, selectors.EVENT_READ, (reader, lines))

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self.code is None

    def expect(
        self, pattern: str, timeout_s: float = PATIENCE_S, *, anywhere: bool = False
    ) -> re.Match[str]:
        """Waits for a line on either output.

        Args:
            pattern: Regular expression, found anywhere in the line.
            timeout_s: Longest wait, in seconds.
            anywhere: Also before the line that was expected last.

        Raises:
            AssertionError: The line did not come in time, or the process has ended without it.
        """
        deadline = time.monotonic() + timeout_s
        if anywhere:
            self._seen = 0
        while True:
            while self._seen < len(self._lines):
                self._seen += 1
                match = re.search(pattern, self._lines[self._seen - 1])
                if match is not None:
                    return match
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"no line like {pattern!r}:\n" + "\n".join(self._lines))

    def send_signal(self, number: signal.Signals) -> None:
        """Sends the process a signal."""
        self._process.send_signal(number)

    def close_output(self) -> None:
        """Reads standard output no more, as `| head` does."""
        assert self._process.stdout is not None
        self._selector.unregister(self._process.stdout)
        self._process.stdout.close()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits for the end, reading on.

        Returns:
            The exit code; minus the number of the signal that killed it.

        Raises:
            AssertionError: The process is still running after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self._read(deadline - time.monotonic()):
            continue
        try:
            return self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s") from None

    def close(self) -> None:
        """Ends the process if it still runs: kindly, so that it ends its children."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, timeout_s: float) -> bool:
        """Reads once; False when nothing more comes, in time or at all."""
        if not self._selector.get_map():
            return False
        events = self._selector.select(max(timeout_s, 0))
        for key, _ in events:
            reader, lines = key.data
            new = reader.read()
            lines += new
            self._lines += new
            if not reader.is_open:
                self._selector.unregister(key.fileobj)
        return bool(events)


def run_command(*arguments: str, timeout_s: float = PATIENCE_S) -> CommandProcess:
    """Runs `mqmesh …` to its end; ``out`` and ``err`` hold its output.

    Raises:
        AssertionError: The command is still running after ``timeout_s``.
    """
    with CommandProcess(*arguments) as command:
        command.wait(timeout_s)
    return command


def free_ports(count: int) -> list[int]:
    """Returns TCP ports that are free, and stay this process's own until it ends.

    They are below those that the system gives to connections and to listeners at port 0, and no
    other test gets one: a name among the abstract Unix sockets, of which a process has one alone,
    stands for each.
    """
    return list(islice(_free_ports(), count))


def free_ports_of_replicas() -> list[int]:
    """Returns free ports of a name server, a coordinator and the first of three replicas.

    The other replicas have the ports 10 and 20 above the first one's.
    """
    for broker in _free_ports():
        if all(_take_port(broker + step) for step in (10, 20)):
            return [*free_ports(2), broker]
    raise AssertionError("no free ports")


def _free_ports() -> Iterator[int]:
    ports = list(range(*PORTS))
    random.shuffle(ports)
    yield from filter(_take_port, ports)


def _take_port(port: int) -> bool:
    """Returns True if a port was free, and is this process's own now."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0mqmesh-test-port-{port}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError:
        name.close()
        return False
    name.detach()  # held until the process ends
    return True


def wait_until_gone(pids: list[int], timeout_s: float = PATIENCE_S) -> list[int]:
    """Waits until processes have ended, also those that are no children of this one.

    Returns:
        Those that are still there.
    """
    deadline = time.monotonic() + timeout_s
    return [pid for pid in pids if not _is_gone(pid, deadline)]


def _is_gone(pid: int, deadline: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            return bool(selector.select(max(deadline - time.monotonic(), 0)))
    finally:
        os.close(descriptor)


def up_arguments(folder: Path, ports: list[int]) -> Iterator[str]:
    """Yields arguments of a default cluster in a folder; ports of two name servers and a broker."""
    yield from ("up", "--data-dir", str(folder))
    for key, port in zip(("namesrv.0", "namesrv.1", "broker.0"), ports, strict=True):
        yield from ("--set", f"{key}.listen_port={port}")

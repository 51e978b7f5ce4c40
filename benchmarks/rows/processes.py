"""Starts the processes of a benchmark, speaks with them, measures them, and ends them all."""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from mqmesh.roles.process import parse_ready
from rows.workload import GO, READY, Report, Task

READY_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0
TAIL_CHARACTERS: Final = 2_000
MODULES: Final = (
    ("_labelled", "labelled"),
    ("_orders", "orders"),
    ("_priority", "priorities"),
    ("_table", "tables"),
    ("_foreign", "foreign"),
)
"""Ends of the kinds of tasks that have a module of their own."""

_PR_SET_PDEATHSIG: Final = 1
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None)


class BenchError(Exception):
    """A benchmark could not be carried out, or its counts did not come out right."""


class Usage(msgspec.Struct, frozen=True):
    """Resources that a process has used, as the kernel counts them.

    Attributes:
        cpu_s: User and system time of all its threads.
        rss_bytes: Resident now.
        peak_rss_bytes: Most that ever was resident.
        private_bytes: Resident now and nobody else's: without programs, libraries and maps of
            files, which belong to the page cache.
    """

    cpu_s: float
    rss_bytes: int
    peak_rss_bytes: int
    private_bytes: int


class Child:
    """One process of a benchmark: a session of its own, so that Ctrl-C reaches only us.

    Args:
        name: For messages.
        command: Program and arguments.
        folder: Where its standard error is kept until the end.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.{time.monotonic_ns()}.log"
        self._pending = b""
        # Ctrl-C while the interpreter forks would be raised where exceptions are ignored.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        try:
            with self._log.open("wb") as errors:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                    preexec_fn=partial(_begin, before),
                    cwd=folder,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    def wait_line(self, timeout_s: float) -> str:
        """The next line of its standard output.

        Raises:
            BenchError: None came in time, or the process ended.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise BenchError(f"{self.name} said nothing for {timeout_s:.0f} s{self.tail()}")
                if selector.select(left_s):
                    data = os.read(descriptor, 1 << 20)
                    if not data:
                        raise BenchError(f"{self.name} ended too early{self.tail()}")
                    self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="replace")

    def wait_ready(self) -> str:
        """Waits until a measured program is set up; returns what it said."""
        line = self.wait_line(READY_TIMEOUT_S)
        if not line.startswith(READY):
            raise BenchError(f"{self.name} said {line[:200]!r} instead of being ready")
        return line.removeprefix(READY).strip()

    def go(self) -> None:
        """Lets a measured program begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{GO}\n".encode())
        self._process.stdin.flush()

    def enough(self) -> None:
        """Lets a program end that goes on until its parent says so."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait_report(self, timeout_s: float) -> Report:
        """Return the report of the process.

        Raises:
            BenchError: No report in time, or it tells of faults.
        """
        report = msgspec.json.decode(self.wait_line(timeout_s), type=Report)
        if report.faults:
            raise BenchError(f"{self.name}: {'; '.join(report.faults[:5])}")
        return report

    def usage(self) -> Usage:
        """Return the resources that the process has used until now."""
        return read_usage(self.pid)

    def tail(self) -> str:
        """The end of its standard error, for error messages."""
        text = self._log.read_text(errors="replace").strip()
        return f":\n{text[-TAIL_CHARACTERS:]}" if text else ""

    def kill(self) -> None:
        """Ends the process as a crash would: it gets no chance to save anything."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends the process, by force if need be."""
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # it ended before it read everything


class Crew:
    """All processes of one measurement; leaving the ``with`` ends them, last first.

    Args:
        folder: Empty directory for data and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in reversed(self._children):
            child.stop()

    def limit(self, task: Task) -> Child:
        """Starts a bare program."""
        return self._start(f"limit-{task.kind}", "rows.limit", task)

    def client(self, task: Task) -> Child:
        """Starts a program that uses mqmesh."""
        module = "consumers" if task.kind.startswith("drain") else "producers"
        module = next((one for end, one in MODULES if task.kind.endswith(end)), module)
        return self._start(task.kind, f"rows.{module}", task)

    def role(
        self, role: str, settings: Sequence[str], module: str = "mqmesh.cli"
    ) -> tuple[Child, str]:
        """Starts a role of mqmesh, as users start it unless ``module`` is another one.

        Returns:
            The process, and the ``host:port`` it serves at.
        """
        command = [sys.executable, "-m", module, role]
        for setting in settings:
            command += ["--set", setting]
        child = self._add(Child(role, command, self.folder))
        while True:
            ready = parse_ready(child.wait_line(READY_TIMEOUT_S))
            if ready is not None:
                return child, ready.endpoint.removeprefix("tcp://")

    def _start(self, name: str, module: str, task: Task) -> Child:
        text = msgspec.json.encode(task).decode()
        return self._add(Child(name, [sys.executable, "-m", module, text], self.folder))

    def _add(self, child: Child) -> Child:
        self._children.append(child)
        return child


def read_usage(pid: int) -> Usage:
    """Return the resources that a process has used until now, from /proc.

    Raises:
        BenchError: There is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError as error:
        raise BenchError(f"process {pid} cannot be measured: {error}") from error
    return parse_usage(stat, status)


def parse_usage(stat: str, status: str) -> Usage:
    """Reads the texts of /proc/PID/stat and /proc/PID/status."""
    # The name of the program, in brackets, may hold blanks and brackets.
    fields = stat.rpartition(")")[2].split()
    sizes = {
        key: int(value.split()[0]) * 1_024
        for key, _, value in (line.partition(":") for line in status.splitlines())
        if key
        in (
            "VmRSS",
            "VmHWM",
            "RssAnon",
        )
    }
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    rss = sizes.get("VmRSS", 0)
    return Usage(cpu_s, rss, sizes.get("VmHWM", 0), sizes.get("RssAnon", rss))


def _begin(signals: set[signal.Signals | int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    # If we are killed ourselves, nothing must stay behind. Runs between fork and exec, where
    # nothing may be imported or allocated that a thread of ours could hold a lock for.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

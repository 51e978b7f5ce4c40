"""Runs mqmesh's commands as users do, and sees what they and their processes use."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

import psutil
from figures import Used

from rows.processes import BenchError, read_usage

MQMESH: Final = str(Path(sys.executable).with_name("mqmesh"))
HERE: Final = Path(__file__).parent
TIMEOUT_S: Final = 3_600
LOOK_EVERY_S: Final = 0.2


class Failed(Exception):
    """A command failed; the text has what it said."""


def mqmesh(folder: Path, *arguments: object) -> tuple[Used, str]:
    """Runs a command of mqmesh in a folder; what it used, and its output."""
    return _run([MQMESH, *map(str, arguments)], folder, None)


def program(folder: Path, name: str, *arguments: object, **variables: str) -> Any:
    """Runs a program of this directory; the JSON that it prints.

    Args:
        folder: To run it in.
        name: Of the file.
        arguments: Of the program.
        variables: Of its environment, which replace others.
    """
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    return json.loads(_run(command, folder, {**os.environ, **variables})[1])


def _run(command: list[str], folder: Path, variables: Mapping[str, str] | None) -> tuple[Used, str]:
    before = _ended_cpu_s()
    began = monotonic()
    # Files, not pipes: Java may end after the command, and nobody waits for it.
    with (folder / "output").open("w+") as output, (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=folder, env=variables)
        with process, _Family(process) as family:
            process.wait(TIMEOUT_S)
            seconds = monotonic() - began
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            text = errors.read()[:2_000]
            raise Failed(f"{' '.join(command)} ended with {process.returncode}: {text}")
        # Processes that nobody waited for are not among those that have ended.
        cpu_s = max(_ended_cpu_s() - before, family.cpu_s)
        memory = (family.java_bytes, family.worker_bytes, family.own_bytes)
        return Used(seconds, cpu_s, *memory), output.read()


def _ended_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Family:
    """Looks now and then at a process and all that it has started.

    Attributes:
        java_bytes: Most memory that was resident in Java.
        worker_bytes: Most of one of the others that it has started: Spark's Python workers.
        own_bytes: Most of the process itself.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.java_bytes = 0
        self.worker_bytes = 0
        self.own_bytes = 0
        self._process = process
        self._cpu_s: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    @property
    def cpu_s(self) -> float:
        """Of processors, by all together, when they were looked at last."""
        return sum(self._cpu_s.values())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            # Whoever ends while we look was looked at before.
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(self._process.pid)
                for one in [top, *top.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess, BenchError):
                        self._note(one, is_top=one is top)

    def _note(self, one: psutil.Process, *, is_top: bool) -> None:
        usage = read_usage(one.pid)
        self._cpu_s[one.pid] = usage.cpu_s
        # A process that Java just forked has Java's memory still, and the name of its thread.
        if Path(one.exe()).name == "java":
            self.java_bytes = max(self.java_bytes, usage.peak_rss_bytes)
        elif is_top:
            self.own_bytes = max(self.own_bytes, usage.peak_rss_bytes)
        else:
            self.worker_bytes = max(self.worker_bytes, usage.peak_rss_bytes)

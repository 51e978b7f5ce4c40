"""Children that a program forks at once: a start of Python for each would take longer."""

import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def fork_for_lines(live: Callable[[str], None]) -> None:
    """Forks a child for each line of standard input, and prints its process id.

    Args:
        live: Called in the child with the line; it returns when the child is to end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
            random.seed()
            live(line.strip())
            return
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


class Forks:
    """A running program that calls ``fork_for_lines``.

    Args:
        module: Name of the program.
        arguments: Arguments of its command line.
        log: File for what it and its children say.
    """

    def __init__(self, module: str, *arguments: str, log: Path) -> None:
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
                text=True,
            )

    def start(self, line: str = "") -> int:
        """Has a child forked; returns its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the program; its children live until they are killed."""
        with self._process:
            pass  # its pipes are closed, and it ends

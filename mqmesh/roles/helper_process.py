"""A process that belongs to another one, which starts it, and with which it ends.

Its standard input is a pipe that its owner holds, and the kernel closes it however
the owner dies; ``run_role(supervised=True)`` is the other end of that. It runs in a
process group of its own, so that a Ctrl-C at the terminal reaches the owner alone.
"""

import logging
import subprocess
from collections.abc import Sequence
from typing import Final

from mqmesh.roles.supervisor.supervisor import python_argv

STOP_TIMEOUT_S: Final = 0.5
"""Time that a helper has to end; then it is killed."""

_log = logging.getLogger(__name__)


class HelperProcess:
    """One process of mqmesh, in the service of another; it runs once this returns.

    Its standard error is the owner's, and its standard output goes nowhere.

    Args:
        arguments: Arguments of the command line, behind ``mqmesh``.

    Attributes:
        pid: Id of the process.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            python_argv(*arguments, "--supervised"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """Return its exit code, minus the signal's number when one killed it; None while it
        runs."""
        code = self._process.poll()
        if code is not None:
            self._close_pipe()
        return code

    def ask_to_stop(self) -> None:
        """Signals it to end, and does not wait."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def stop(self) -> None:
        """Signals it to end and waits for that, ``STOP_TIMEOUT_S`` at most; then kills it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning("process %d does not end; killing it", self.pid)
            self._process.kill()
            self._process.wait()
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

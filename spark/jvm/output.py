"""Standard error of Java: kept instead of shown, for the error of a failed start."""

import os
import threading
from collections import deque
from typing import Final

from ..failures import last_cause

LINES_KEPT: Final = 400
"""Limit of lines kept: the last ones."""
LINE_BYTES: Final = 2_000
"""A longer line counts as several."""
CLOSED_WITHIN_S: Final = 5.0
"""A Java that has ended closes its output within this time."""


class JavaOutput:
    """The last lines of a Java process, read by a thread until the process ends.

    Give ``descriptor`` to the process as its standard error, then call ``started``.

    Attributes:
        descriptor: File descriptor of the pipe that the process writes to.
    """

    def __init__(self) -> None:
        source, self.descriptor = os.pipe()
        self._lines: deque[bytes] = deque(maxlen=LINES_KEPT)
        # A daemon: Java may outlive this process for as long as it writes its class archive.
        self._reader = threading.Thread(
            target=self._read, args=(source,), name="mqmesh-java-output", daemon=True
        )
        self._reader.start()

    def started(self) -> None:
        """Closes this process's end: the process has one of its own, or has failed to start."""
        os.close(self.descriptor)

    def last_cause(self) -> str:
        """Returns why the process ended, in one line; empty if it wrote nothing."""
        self._reader.join(CLOSED_WITHIN_S)
        return last_cause(line.decode("utf-8", "replace") for line in list(self._lines))

    def _read(self, source: int) -> None:
        with open(source, "rb") as file:
            while line := file.readline(LINE_BYTES):
                self._lines.append(line)

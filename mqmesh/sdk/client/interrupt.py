"""Ctrl-C that lets a command end its work in order."""

import signal
import threading
from types import FrameType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a program in order: Ctrl-C, and those of systemd, Docker and Kubernetes."""


class Interrupt:
    """Handler of SIGINT and SIGTERM while it is entered; a second SIGINT kills at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._former: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        """Return True once a signal has come."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits; ends early, with True, when a signal comes."""
        return self._event.wait(max(seconds, 0))

    def __enter__(self) -> Self:
        def note(number: int, frame: FrameType | None) -> None:
            self._event.set()
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        for number in SIGNALS:
            self._former[number] = signal.signal(number, note)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

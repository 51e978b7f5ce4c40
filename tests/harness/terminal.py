"""A terminal for commands that run in this process."""

from __future__ import annotations

import io
import sys

import pytest


class Terminal(io.StringIO):
    """Keeps what is printed, and says that it is a terminal."""

    def isatty(self) -> bool:
        """Returns True: it is a terminal."""
        return True

    @property
    def lines(self) -> list[str]:
        """Printed lines."""
        return self.getvalue().splitlines()


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, term: str = "xterm") -> Terminal:
    """Makes standard output a terminal; call it in the test, fixtures have another one.

    Args:
        monkeypatch: Fixture of the test.
        columns: Width.
        term: Kind; ``dumb`` has no colours.
    """
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    return out

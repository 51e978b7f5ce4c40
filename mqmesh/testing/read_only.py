"""A file system that is read-only, also for tests that run as root."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES: Final = ("rename", "replace", "unlink", "mkdir", "rmdir", "link", "truncate")


def refuse_writing(
    monkeypatch: pytest.MonkeyPatch, error: int = errno.EROFS, unreadable: Sequence[Path] = ()
) -> None:
    """Makes every call of ``os`` fail that would change files.

    Args:
        monkeypatch: Undoes the change at the end of the test.
        error: Number of the error.
        unreadable: Files that cannot be opened to be read, either.
    """
    system_open = os.open

    def refuse(path: Any) -> OSError:
        return OSError(error, os.strerror(error), str(path))

    def open_to_read(path: Any, flags: int, *others: Any, **named: Any) -> int:
        if flags & _WRITING or Path(path) in unreadable:
            raise refuse(path)
        return system_open(path, flags, *others, **named)

    def change(path: Any, *others: Any, **named: Any) -> None:
        raise refuse(path)

    monkeypatch.setattr(os, "open", open_to_read)
    for name in _CHANGES:
        monkeypatch.setattr(os, name, change)

"""Standard output and standard error, of any encoding, open or closed.

A terminal's encoding may not hold all characters: text then has Python's escapes (``\\xe9``), JSON
its own (``\\u00e9``), which mean the same to every reader.
"""

import codecs
import errno
import io
import json
import os
import sys
from typing import Any, TextIO

import msgspec

from mqmesh.logs import escape_json


def escape_what_no_encoding_holds() -> None:
    """Has both streams write escapes for characters that their encodings do not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class ClosedOutput(io.StringIO):
    """Standard output that is closed: a write of click to it is an error, not lost unseen."""

    def write(self, text: str) -> int:
        """Refuses a text.

        Raises:
            OSError: Always.
        """
        raise OSError(errno.EBADF, "standard output is closed, so the answer is lost")


def refuse_closed_output() -> None:
    """Makes a closed standard output one that refuses texts."""
    if sys.stdout is None:
        sys.stdout = ClosedOutput()


def standard_output() -> TextIO:
    """Returns standard output.

    Raises:
        OSError: Standard output is closed.
    """
    if isinstance(sys.stdout, ClosedOutput):
        sys.stdout.write("")
    return sys.stdout


def drop_output() -> None:
    """Drops unwritten output, so that the interpreter does not try it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def json_text(value: Any, stream: TextIO) -> str:
    """Returns a value as one line of JSON that a stream's encoding holds, without line break."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return _json(value, ascii_only=codecs.lookup(encoding).name != "utf-8")


def json_line(value: Any) -> bytes:
    """Returns a value as a line of JSON in UTF-8, for files and pipes that take bytes."""
    return f"{_json(value)}\n".encode()


def _json(value: Any, *, ascii_only: bool = False) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        # Names of files may be no text; JSON has escapes for such bytes.
        text = json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
    return escape_json(text, ascii_only=ascii_only)

"""Filters in Python as consumers give them, and their ids on the wire."""

import hashlib
from typing import Final

from mqmesh.errors import InvalidArgument

MAX_SOURCE_BYTES: Final = 64 * 1024
ID_LENGTH: Final = 32


class PythonFilter:
    r"""A filter that runs on filter servers, beside the brokers.

    The source defines ``match(message) -> bool``; the message has the fields and properties
    of ``StoredMessage``: headers, properties and body::

        consumer.subscribe(
            "flights",
            PythonFilter(
                "def match(message):\n"
                "    return int(message.property('dep_delay', '0')) > 60"
            ),
            listener=on_messages,
        )

    It may import ``base64``, ``datetime``, ``decimal``, ``json``, ``math``, ``re``, ``string``
    and ``struct``. It runs without files and network, with bounds on memory and time. Its
    globals are lost when its process is renewed, so it should keep nothing between calls.

    Args:
        source: Python, up to 64 KiB as UTF-8.

    Attributes:
        source: Python source of the filter.
        filter_id: Name of the filter on the wire: 32 hex digits.

    Raises:
        InvalidArgument: The source is no text, empty or too long.
    """

    __slots__ = ("filter_id", "source")

    def __init__(self, source: str) -> None:
        if not isinstance(source, str):
            raise InvalidArgument(f"a filter is Python source, not {type(source).__name__}")
        try:
            data = source.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"the filter is no text: {error.reason}") from None
        if not 0 < len(data) <= MAX_SOURCE_BYTES:
            raise InvalidArgument(
                f"a filter of {len(data)} bytes; 1 to {MAX_SOURCE_BYTES} are allowed"
            )
        self.source: str = source
        self.filter_id: str = filter_id(data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonFilter) and other.filter_id == self.filter_id

    def __hash__(self) -> int:
        return hash(self.filter_id)

    def __repr__(self) -> str:
        return f"PythonFilter({self.filter_id})"


def filter_id(source: bytes) -> str:
    """Returns the name of a filter on the wire: the BLAKE2b digest of its source, 32 hex digits."""
    return hashlib.blake2b(source, digest_size=ID_LENGTH // 2).hexdigest()


def check_filter_id(text: str) -> str:
    """Returns a filter's id if it has the form of one.

    Raises:
        InvalidArgument: The text has another form.
    """
    if len(text) != ID_LENGTH or any(c not in "0123456789abcdef" for c in text):
        raise InvalidArgument(f"{text[:64]!r} is no filter id, which has {ID_LENGTH} hex digits")
    return text

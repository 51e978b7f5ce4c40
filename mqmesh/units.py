"""The kinds of number that are easily confused, each with its own type.

An offset always names the next thing to read. ``queue_offset`` counts messages
of one message queue, ``commitlog_offset`` counts bytes from the origin of a
broker's log. They are ``NewType``s, so mixing them up is a type error and
costs nothing at run time.
"""

from typing import Final, NewType

QueueOffset = NewType("QueueOffset", int)
"""Position in a message queue, in messages, from 0. int64."""

CommitLogOffset = NewType("CommitLogOffset", int)
"""Position in a broker's commit log, in bytes, from 0. int64."""

TimestampMs = NewType("TimestampMs", int)
"""Wall-clock time in milliseconds since 1970-01-01 UTC. Labels messages, decides nothing."""

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

MAX_OFFSET: Final = (1 << 63) - 1
"""Largest offset that the formats can carry."""

MAX_TIMESTAMP_MS: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, as far as calendars of Python and Arrow reach."""

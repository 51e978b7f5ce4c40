"""Messages between `mqmesh bench` and its clients, a line of JSON each.

A client gets a ``BenchTask``, says ``ClientReady``, waits for ``GO``, reports its
``ClientProgress`` ten times a second, and ends with a ``ClientReport``, by itself or when it
gets ``STOP``. A client that cannot go on says ``ClientFailure`` instead.
"""

import enum
import math
import struct
import time
from typing import Final

import msgspec

GO: Final = "go"
STOP: Final = "stop"
MAX_LINE_BYTES: Final = 1 << 20
"""Longest line of a client: a report with all its latencies has some 50 KB."""
MIN_STAMPED_BYTES: Final = 16
"""A body that carries its run and its time has at least so many bytes."""
STEPS_AN_OCTAVE: Final = 32
PERCENTS: Final = (50.0, 90.0, 99.0, 99.9)

_STAMP = struct.Struct("<QQ")


class Work(enum.StrEnum):
    """Kinds of work for a client."""

    SEND = "send"
    SEND_EACH = "send_each"
    """One synchronous send after the other, whose bodies carry the time."""
    READ = "read"
    READ_STAMPED = "read_stamped"
    """Only messages that ``SEND_EACH`` of the same run sends from now on."""


class BenchTask(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Task of one client.

    Attributes:
        work: Kind of work.
        namesrv: Name servers.
        topic: Topic to send to, or to read.
        client: Number of the client, from 0.
        clients: Number of clients: readers divide the queues.
        run: Number in stamped bodies that identifies this run, 0 to 2**64 - 1.
        message_count: Messages to send; 0 for no end.
        duration_s: Seconds after which it ends; 0 for no end.
        body_bytes: Size of each body.
        rate: Messages a second, at most; 0 for as many as possible.
        batch_messages: Messages in an explicit batch; 1 for single sends.
        tag: Tag of each message, None for none.
        has_keys: Each message has a key of its own.
        properties: Properties of each message.
    """

    work: Work
    namesrv: str
    topic: str
    client: int = 0
    clients: int = 1
    run: int = 0
    message_count: int = 0
    duration_s: float = 0.0
    body_bytes: int = 128
    rate: float = 0.0
    batch_messages: int = 1
    tag: str | None = None
    has_keys: bool = False
    properties: dict[str, str] = {}


class Latencies(msgspec.Struct):
    """Histogram of durations, in steps of 2.2 percent.

    Attributes:
        steps: Number of the step (of the logarithm) -> durations in it.
        most_us: Longest duration, microseconds.
    """

    steps: dict[int, int] = msgspec.field(default_factory=dict)
    most_us: float = 0.0

    def add(self, took_us: float) -> None:
        """Notes one.

        Args:
            took_us: Microseconds; clocks that disagree by a tick make it 0 or less.
        """
        step = math.ceil(math.log2(max(took_us, 1.0)) * STEPS_AN_OCTAVE)
        self.steps[step] = self.steps.get(step, 0) + 1
        self.most_us = max(self.most_us, took_us)

    def add_all(self, others: "Latencies") -> None:
        """Adds the observations of another client."""
        for step, count in others.steps.items():
            self.steps[step] = self.steps.get(step, 0) + count
        self.most_us = max(self.most_us, others.most_us)

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.steps.values())

    def percentile_us(self, percent: float) -> float:
        """Returns the percentile, at most 2.2 percent too high, in microseconds; 0.0 of nothing."""
        rank = max(math.ceil(self.count * percent / 100), 1)
        for step in sorted(self.steps):
            rank -= self.steps[step]
            if rank <= 0:
                return min(2 ** (step / STEPS_AN_OCTAVE), self.most_us)
        return 0.0


class ClientReady(msgspec.Struct, tag="ready"):
    """A client can begin."""


class ClientProgress(msgspec.Struct, tag="progress"):
    """Progress of a client.

    Attributes:
        done: Messages acknowledged, or read.
    """

    done: int


class ClientReport(msgspec.Struct, tag="report", kw_only=True):
    """Report of a client at its end.

    Attributes:
        done: Messages acknowledged, or read.
        body_bytes: Sum of their bodies.
        failed: Sends that failed.
        error: Text of the first send error.
        begin_s: Monotonic time at which it began.
        end_s: Monotonic time at which the last message was done.
        cpu_s: Processor time of the client from GO on.
        send: Times from call to acknowledgement, of ``SEND_EACH``.
        delivery: Times from the call of send to the reader, of ``READ_STAMPED``.
    """

    done: int = 0
    body_bytes: int = 0
    failed: int = 0
    error: str = ""
    begin_s: float = 0.0
    end_s: float = 0.0
    cpu_s: float = 0.0
    send: Latencies = msgspec.field(default_factory=Latencies)
    delivery: Latencies = msgspec.field(default_factory=Latencies)


class ClientFailure(msgspec.Struct, tag="failure"):
    """A client could not go on.

    Attributes:
        error: Why, for people.
    """

    error: str


Word = ClientReady | ClientProgress | ClientReport | ClientFailure


def stamp(run: int, filler: bytes) -> bytes:
    """Makes a body with its run and the time, by the clock that all processes of a machine share.

    Args:
        run: Number of the run, see ``BenchTask``.
        filler: The body, ``MIN_STAMPED_BYTES`` or more, whose begin is replaced.
    """
    return _STAMP.pack(run, time.monotonic_ns()) + filler[_STAMP.size :]


def age_us(run: int, body: bytes, now_ns: int) -> float | None:
    """Microseconds since ``stamp``; None for a body of another run."""
    if len(body) < _STAMP.size:
        return None
    found, made_ns = _STAMP.unpack_from(body)
    return (now_ns - made_ns) / 1_000 if found == run else None

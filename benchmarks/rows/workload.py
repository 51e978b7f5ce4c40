"""Common parts of the measured programs: task, messages, checks and report.

Every child process of a benchmark gets a ``Task`` as JSON on its command line, says a
line when it is ready, waits for a line on standard input, and ends with a ``Report`` as
one line of JSON. Times are of ``CLOCK_MONOTONIC``, which all processes of a machine share.
"""

import random
import select
import struct
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.message import StoredMessage
from mqmesh.units import MIB

TOPIC: Final = "bench"
GROUP: Final = "bench-group"
READY: Final = "ready"
GO: Final = "go"
WARM_UP_SENDS: Final = 200
"""Single sends before latencies are taken."""

_STAMP = struct.Struct("<q")


class Task(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Task of one process of a benchmark.

    Attributes:
        kind: Which program.
        address: Endpoint of the bare broker, or the name servers of mqmesh.
        folder: Directory for the bare broker's log.
        log_bytes: Room that is preallocated there.
        message_count: Messages to send, or to wait for.
        body_bytes: Size of each body, at least 8.
        batch_messages: Messages in an explicit batch.
        window: Requests, or single messages, in flight.
        queue_count: Message queues to send to.
        topic_count: Topics that the messages go to in turn.
        ready_count: A consumer says that it is ready after so many messages; they do
            not count among ``message_count``.
        rate: Messages a second where a row prescribes it.
        sync_flush: The bare broker waits for the disk.
        slave: The bare broker has a slave, whom it does not wait for (``async``), or does
            (``sync``); or ``none``.
        use_ipc: False keeps mqmesh's clients off the Unix socket.
        key_count: Business keys on each message.
        key_pool: After so many messages the same keys come again; 0 for never.
        expression: Subscription of a consumer of labelled messages.
        expression_type: Its language.
        msg_trace: Share of the messages that mqmesh's clients trace.
    """

    kind: str
    address: str
    folder: str = ""
    log_bytes: int = 64 * MIB
    message_count: int = 0
    body_bytes: int = 128
    batch_messages: int = 500
    window: int = 8
    queue_count: int = 4
    topic_count: int = 1
    ready_count: int = 0
    rate: int = 0
    sync_flush: bool = False
    slave: str = "none"
    use_ipc: bool = True
    key_count: int = 0
    key_pool: int = 0
    expression: str = "*"
    expression_type: str = "TAG"
    msg_trace: float = 0.0


class Report(msgspec.Struct, kw_only=True):
    """Result of a task.

    Attributes:
        message_count: Messages acknowledged, or consumed.
        begin_s: When the first one was on its way.
        end_s: When the last one was acknowledged, or consumed.
        cpu_s: CPU time of the process in between, user and system.
        latencies_us: Of single messages, for the rows that ask for them.
        faults: Faults that the checks found; empty when all is well.
    """

    message_count: int
    begin_s: float
    end_s: float
    cpu_s: float
    latencies_us: list[float] = []
    faults: list[str] = []

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.message_count / max(self.end_s - self.begin_s, 1e-9)


class Stopwatch:
    """Wall-clock and CPU time of this process from now on."""

    def __init__(self) -> None:
        self.begin_s = time.monotonic()
        self._cpu_s = time.process_time()

    def report(
        self,
        message_count: int,
        *,
        latencies_us: Sequence[float] = (),
        faults: Sequence[str] = (),
    ) -> Report:
        """Return a report of the time until now."""
        return Report(
            message_count=message_count,
            begin_s=self.begin_s,
            end_s=time.monotonic(),
            cpu_s=time.process_time() - self._cpu_s,
            latencies_us=list(latencies_us),
            faults=list(faults),
        )


class SequenceCheck:
    """Proves that each message of every producer came exactly once.

    Count, sum and sum of squares of the sequences must be those of a range without gaps.
    A run of messages costs the same as one message, so that checking costs nothing.
    """

    def __init__(self) -> None:
        self.count = 0
        self._producers: dict[int, list[int]] = {}

    def add(self, producer_id: int, first_sequence: int, count: int) -> None:
        """Notes messages of consecutive sequences.

        Args:
            producer_id: Whose.
            first_sequence: Of the first one.
            count: How many.
        """
        a, n = first_sequence, count
        seen = self._producers.get(producer_id)
        if seen is None:
            seen = self._producers[producer_id] = [0, 0, 0, a, a]
        seen[0] += n
        seen[1] += n * a + n * (n - 1) // 2
        seen[2] += n * a * a + a * n * (n - 1) + (n - 1) * n * (2 * n - 1) // 6
        seen[3] = min(seen[3], a)
        seen[4] = max(seen[4], a + n)
        self.count += n

    def add_messages(self, messages: Sequence[StoredMessage]) -> None:
        """Notes what a listener got: runs of messages, each of one batch.

        Raises:
            ValueError: A run of one batch has a hole.
        """
        position, end = 0, len(messages)
        while position < end:
            first = messages[position]
            info = first.info
            behind = _end_of_run(messages, position, end)
            offset = first.queue_offset
            if messages[behind - 1].queue_offset - offset != behind - position - 1:
                raise ValueError(f"a hole behind queue offset {offset} of queue {info.queue_id}")
            ordinal = offset - info.base_queue_offset
            self.add(info.producer_id, info.first_sequence + ordinal, behind - position)
            position = behind

    def faults(self, expected_count: int) -> list[str]:
        """Return the faults of all messages noted so far.

        Args:
            expected_count: Messages that were sent.
        """
        found = []
        if self.count != expected_count:
            found.append(f"{self.count} messages instead of {expected_count}")
        for producer_id, (count, total, squares, low, high) in self._producers.items():
            whole = SequenceCheck()
            whole.add(0, low, high - low)
            if [count, total, squares] != whole._producers[0][:3]:
                found.append(
                    f"producer {producer_id:X}: {count} messages with sequences {low} to "
                    f"{high - 1}: some are missing or came twice"
                )
        return found


def _end_of_run(messages: Sequence[StoredMessage], position: int, end: int) -> int:
    # Messages of a batch stand together, so the border is found by halving.
    info = messages[position].batch
    if messages[end - 1].batch is info:
        return end
    low, high = position, end - 1
    while high - low > 1:
        middle = (low + high) // 2
        if messages[middle].batch is info:
            low = middle
        else:
            high = middle
    return high


def topic_names(count: int) -> list[str]:
    """The topics of a row; ``TOPIC`` where it has one."""
    return [TOPIC] if count == 1 else [f"{TOPIC}-{number}" for number in range(count)]


def make_bodies(count: int, size: int) -> list[bytes]:
    """Bodies that cannot be compressed, the same in every run.

    Args:
        count: How many, all different.
        size: Bytes of each.
    """
    chance = random.Random(count * 1_000_003 + size)
    return [chance.randbytes(size) for _ in range(count)]


def make_keys(number: int, count: int) -> tuple[str, ...]:
    """The business keys of a message: as long as order numbers are, and all different.

    Args:
        number: Of the message.
        count: How many keys.
    """
    return tuple([f"key-{kind}-{number:010d}" for kind in range(count)])


def stamp_body(filler: bytes) -> bytes:
    """A body that carries the time it was made at."""
    return _STAMP.pack(time.monotonic_ns()) + filler[_STAMP.size :]


def age_us(body: bytes) -> float:
    """Microseconds since ``stamp_body`` made a body, in whatever process."""
    made_ns: int = _STAMP.unpack_from(body)[0]
    return (time.monotonic_ns() - made_ns) / 1_000


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent are not above (nearest rank); 0.0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def read_task() -> Task:
    """The task on the command line."""
    return msgspec.json.decode(sys.argv[1], type=Task)


def say_ready(what: str = "") -> None:
    """Tells the parent that the process is set up.

    Args:
        what: Anything the parent must know, such as an endpoint.
    """
    sys.stdout.write(f"{READY} {what}\n")
    sys.stdout.flush()


def wait_go() -> None:
    """Says ready and waits for the parent's word.

    Raises:
        SystemExit: The parent has gone.
    """
    say_ready()
    if sys.stdin.readline().strip() != GO:
        sys.exit(1)


def is_enough() -> bool:
    """Whether the parent wants the program to end, and has closed its standard input."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def hand_in(report: Report) -> None:
    """Gives the parent the report."""
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()

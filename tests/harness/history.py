"""Records written while a cluster is harmed, for ``harness.checker`` to judge.

Times are in ms, by one clock that all writers share: the machine's monotonic one, or the wall
clock if delivery times are given by it.
"""

from typing import Final

import msgspec

ACKED: Final = "acked"
RETURNED: Final = "returned"
"""Without an error, and with a status other than SEND_OK, that does not say it may be lost."""
REFUSED: Final = "refused"
UNKNOWN: Final = "unknown"

MessageKey = tuple[str, int]
"""Name of the producer, and the number that it gave the message."""
Place = tuple[str, int]
"""Queue, as ``broker/queue_id``, and queue offset."""


class Attempt(msgspec.Struct, frozen=True):
    """One message that a producer tried to send, in the order of the calls.

    Attributes:
        producer: Name of the producer.
        number: Counts its messages, from 0.
        body_hash: Hash of the body.
        outcome: ``acked``, ``returned``, ``refused``, or ``unknown``, as it is for a producer that
            died.
        mode: ``single`` or ``batch``.
        queue: Queue in the acknowledgement.
        queue_offset: Queue offset in the acknowledgement.
        message_id: Message id in the acknowledgement.
        called_ms: Time of the call.
        answered_ms: Time at which the producer knew the outcome.
    """

    producer: str
    number: int
    body_hash: str
    outcome: str = UNKNOWN
    mode: str = ""
    queue: str = ""
    queue_offset: int = -1
    message_id: str = ""
    called_ms: float = 0.0
    answered_ms: float = float("inf")


class Delivery(msgspec.Struct, frozen=True):
    """One message that a consumer got, or that is in the log.

    Attributes:
        producer: Name of the producer, read from the body; "" when it cannot be read.
        number: The producer's number, read from the body.
        body_hash: Hash of the body.
        queue: Queue that it came from.
        queue_offset: Queue offset that it came from.
        message_id: Id of the message.
        time_ms: Time of the delivery, on a clock that all consumers share.
        consumer: Name of the consumer.
        keys: Business keys of the message.
    """

    producer: str
    number: int
    body_hash: str
    queue: str
    queue_offset: int
    message_id: str
    time_ms: float = 0.0
    consumer: str = ""
    keys: tuple[str, ...] = ()

    @property
    def key(self) -> MessageKey:
        """Which message it is."""
        return self.producer, self.number

    @property
    def place(self) -> Place:
        """Place of the message."""
        return self.queue, self.queue_offset


class Commit(msgspec.Struct, frozen=True):
    """Answer of the broker about a committed offset.

    Attributes:
        group: Consumer group.
        queue: Queue.
        queue_offset: Next offset to read.
        end_offset: Behind the last message, by a later request; -1 when it is not known.
        time_ms: Time of the request.
    """

    group: str
    queue: str
    queue_offset: int
    end_offset: int
    time_ms: float


class Look(msgspec.Struct, frozen=True):
    """End of a queue, as readers saw it.

    Attributes:
        queue: Queue.
        end_offset: Behind the last message that readers may see.
        began_ms: Time of the request.
        ended_ms: Time of the answer.
    """

    queue: str
    end_offset: int
    began_ms: float
    ended_ms: float


COMMITTED: Final = "committed"
ROLLED_BACK: Final = "rolled back"
UNDECIDED: Final = "undecided"


class HalfMessage(msgspec.Struct, frozen=True):
    """One message that was sent in a transaction.

    The local database of the producer holds the decision when all is over, not the plan of a
    producer that died.

    Attributes:
        producer, number, body_hash: The same as for an ``Attempt``.
        decision: ``committed``, ``rolled back``, or ``undecided``: nobody ever decided, as with a
            listener that always answers UNKNOWN.
        decided_ms: Earliest time of the commit's decision; no consumer may see the message before.
    """

    producer: str
    number: int
    body_hash: str
    decision: str
    decided_ms: float = 0.0

    @property
    def key(self) -> MessageKey:
        """Which message it is."""
        return self.producer, self.number


class DelayedMessage(msgspec.Struct, frozen=True):
    """One message that was to be delivered later.

    Attributes:
        producer, number, body_hash, outcome: The same as for an ``Attempt``.
        due_ms: Earliest time of its delivery, by the clock of the deliveries.
        cancelled: ``acked`` if the broker said that it will not be delivered, ``unknown`` if
            nobody knows, "" if it was not cancelled or that was refused.
    """

    producer: str
    number: int
    body_hash: str
    outcome: str
    due_ms: float
    cancelled: str = ""

    @property
    def key(self) -> MessageKey:
        """Which message it is."""
        return self.producer, self.number


class Lookup(msgspec.Struct, frozen=True):
    """Answer to a query for messages.

    Attributes:
        kind: ``key`` or ``id``.
        value: Key or id of the query.
        places: Places in the answer.
        limit: Most places wanted.
    """

    kind: str
    value: str
    places: tuple[Place, ...]
    limit: int = 32


class Resources(msgspec.Struct, frozen=True):
    """Resources of a process, or a directory.

    Attributes:
        name: Name of the process or directory.
        rss_bytes, descriptors, threads, disk_bytes: Metrics; 0 where they do not apply.
    """

    name: str
    rss_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    disk_bytes: int = 0


class Return(msgspec.Struct, frozen=True):
    """Bounds within which resources must return when the load is over.

    Attributes:
        before: Resources while all was well.
        after: Resources when the harm is over.
        growth: Growth that each metric may keep.
    """

    before: Resources
    after: Resources
    growth: Resources


class Outage(msgspec.Struct, frozen=True):
    """A time in which something was not served.

    Attributes:
        what: Cause of the outage.
        lasted_ms: Time until it was served again; None if it never was.
        bound_ms: Longest time that it may last.
    """

    what: str
    lasted_ms: float | None
    bound_ms: float


class Degradation(msgspec.Struct, frozen=True):
    """Refusal, loss or repair by a cluster, and how it was reported.

    Attributes:
        kind: ``refusal``, ``truncation``, ``quarantine``, … and of what.
        happened: Number of times, as far as is known from outside; 0 when it did not happen.
        error_codes: Number of answers with an error code; None where there was no request, as when
            a log is cut at a start.
        log_lines: Lines of the log about it; several may share one.
        counted: Value of the counter.
    """

    kind: str
    happened: int
    error_codes: int | None
    log_lines: int
    counted: int


class History(msgspec.Struct):
    """History of a run.

    Attributes:
        attempts: Attempts of all producers, each producer's in the order of its calls.
        deliveries: Deliveries to the consumers, in any order.
        stored: The log at the end, queue by queue in the order of offsets.
        commits: Looks at committed offsets, in the order of time.
        looks: Ends of queues, as readers saw them at the leader of the newest epoch.
        kills_ms: Times at which a broker was killed.
        offset_window_ms: Most age of a saved committed offset.
        halves: Messages of transactions.
        delayed: Messages for later.
        early_ms: Time by which a delayed message may come too early, where clocks are stepped.
        late_ms: Time after its due time within which it must have come; 0 for no bound.
        delayed_repeats: Number of delayed messages that may be stored again, under the same ids.
        lookups: Queries, sent when the log did not grow any more.
        returns: Metrics before and after.
        outages: Times without service.
        degradations: Refusals, cuts and quarantines.
    """

    attempts: list[Attempt] = []
    deliveries: list[Delivery] = []
    stored: list[Delivery] = []
    commits: list[Commit] = []
    looks: list[Look] = []
    kills_ms: list[float] = []
    offset_window_ms: float = 0.0
    halves: list[HalfMessage] = []
    delayed: list[DelayedMessage] = []
    early_ms: float = 0.0
    late_ms: float = 0.0
    delayed_repeats: int = 0
    lookups: list[Lookup] = []
    returns: list[Return] = []
    outages: list[Outage] = []
    degradations: list[Degradation] = []

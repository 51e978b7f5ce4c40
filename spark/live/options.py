"""Options of readers of a running cluster: which queues, from where to where. No Spark in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import MessageQueue, check_group, check_topic
from mqmesh.sdk.client.options import namesrv_addresses
from mqmesh.sdk.connector.queue_reader import GROUP, QueueReader
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.units import MAX_OFFSET, MAX_TIMESTAMP_MS, MIB

from ..options import (
    Options,
    check_names,
    flag,
    json_object,
    number,
    span_ms,
    time_ms,
    words,
)

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
FIRST: Final = -2
"""Beginning of the queue, in JSON."""
END: Final = -1
"""End of the queue, in JSON."""
MOST_PARTITIONS: Final = 10_000
MOST_ROWS: Final = 1_000_000
MOST_FETCH: Final = 16 * MIB
MOST_PATIENCE_MS: Final = 3_600_000
MAX_DELAY_MS: Final = 15 * 60_000
"""Longest wait for ``minOffsetsPerTrigger``, unless ``maxTriggerDelay`` says otherwise."""

COMMON: Final = (
    "namesrv",
    "credentials",
    "namespace",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "minPartitions",
    "failOnDataLoss",
    "filter",
    "filterSql",
    "columns",
    "group",
    "maxRowsPerBatch",
    "maxFetchBytes",
    "fetchTimeoutMs",
)
OF_STREAMS: Final = (
    *COMMON,
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
)


_BOUNDS: Final = ("Offsets", "Timestamp", "OffsetsByTimestamp")
"""Ways to say where a read begins or ends, behind ``starting`` or ``ending``."""


@dataclass(frozen=True)
class Place:
    """A place in a queue.

    Attributes:
        offset: Queue offset of the next message; ``FIRST`` or ``END`` in users' options.
        epoch: Epoch of the broker's log when the offset was right; 0 if it is not known.
    """

    offset: int
    epoch: int = 0


Places = dict[MessageQueue, Place]


@dataclass(frozen=True)
class Bound:
    """Beginning, or end, of the read parts of queues.

    Attributes:
        name: Name of the option, for errors.
        everywhere: ``FIRST`` or ``END``.
        time_ms: First message stored at or after a time, in place of ``everywhere``; -1 for none.
        places: Places by queue, in place of both; None if there is no such option.
        times_ms: Times by queue, in place of all; None if there is no such option.
    """

    name: str
    everywhere: int
    time_ms: int = -1
    places: Places | None = None
    times_ms: dict[MessageQueue, int] | None = None

    def place(self, queue: MessageQueue) -> Place:
        """Returns where to begin or end in a queue, if not by time.

        Raises:
            ConfigError: The option names places, and none for this queue.
        """
        if self.places is None:
            return Place(self.everywhere)
        found = self.places.get(queue)
        if found is None:
            raise self._no_queue(queue, f"its offset, {FIRST} for earliest or {END} for latest")
        return found

    def time_of(self, queue: MessageQueue) -> int:
        """Returns the time of the first message in a queue, in ms; -1 if there is none.

        Raises:
            ConfigError: The option names times, and none for this queue.
        """
        if self.times_ms is None:
            return self.time_ms
        found = self.times_ms.get(queue, -1)
        if found < 0:
            raise self._no_queue(queue, "a time in ISO 8601, UTC, or ms since 1970")
        return found

    def _no_queue(self, queue: MessageQueue, wanted: str) -> ConfigError:
        return ConfigError(
            f"option {self.name} says nothing of queue {queue_name(queue)} of topic "
            f"{queue.topic!r}; give {wanted}"
        )


@dataclass(frozen=True)
class LiveOptions:
    """Options of a reader of a running cluster.

    Attributes:
        namesrv: Name servers.
        topics: Names, or beginnings of names with ``*`` behind.
        pattern: Expression that names of topics fit as a whole; empty for none.
        assigned: Queues, in place of topics.
        starting: Beginning of the read.
        ending: End of the read; None for a stream without one.
        min_partitions: Tasks, if there are as many messages; 0 for one a queue.
        max_offsets: Messages of a batch of a stream; 0 for no limit.
        min_offsets: Messages that a stream waits for before a batch; 0 for none.
        max_delay_ms: Longest wait for ``min_offsets``, in ms.
        fail_on_loss: Messages that are gone make the query fail.
        selector: Selector of the wanted messages.
        group: Consumer group for requests to brokers.
        most_rows: Rows of a record batch.
        fetch_bytes: Bytes of one answer of a broker.
        patience_ms: Wait for a broker that is away, in ms.
        credentials: File with the client's keys, on each machine that reads; empty for none.
        namespace: Namespace of the topics; None for that of the environment of each machine.
    """

    namesrv: str
    topics: tuple[str, ...]
    pattern: str
    assigned: tuple[MessageQueue, ...]
    starting: Bound
    ending: Bound | None
    min_partitions: int
    max_offsets: int
    fail_on_loss: bool
    min_offsets: int = 0
    max_delay_ms: int = MAX_DELAY_MS
    selector: MessageSelector = field(default_factory=MessageSelector)
    group: str = GROUP
    most_rows: int = 8_000
    fetch_bytes: int = MIB
    patience_ms: int = 60_000
    credentials: str = ""
    namespace: str | None = None

    def client(self) -> QueueReader:
        """Opens a client that reads with these options; the caller closes it."""
        client = QueueReader(
            self.namesrv,
            patience_ms=self.patience_ms,
            credentials=self.credentials,
            namespace=self.namespace,
        )
        client.group = self.group
        return client


def read_options(options: Options, *, stream: bool) -> LiveOptions:
    """Reads the options of a reader.

    Args:
        options: Options that the user gave.
        stream: True for a stream, which has other options than a batch.

    Raises:
        ConfigError: An option is wrong; names it, its value, and the allowed ones.
    """
    kind = "a stream" if stream else "a batch"
    check_names(options, OF_STREAMS if stream else COMMON, f"{kind} of mqmesh")
    topics, pattern, assigned = _which(options)
    max_offsets = number(options, "maxOffsetsPerTrigger", 0, 1, MAX_OFFSET)
    min_offsets = number(options, "minOffsetsPerTrigger", 0, 1, max_offsets or MAX_OFFSET)
    ending = _bound(options, "ending", END)
    return LiveOptions(
        namesrv=check_namesrv(options),
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        starting=_bound(options, "starting", END if stream else FIRST),
        ending=None if stream and not _has_bound(options, "ending") else ending,
        min_partitions=number(options, "minPartitions", 0, 1, MOST_PARTITIONS),
        max_offsets=max_offsets,
        min_offsets=min_offsets,
        max_delay_ms=span_ms(options, "maxTriggerDelay", MAX_DELAY_MS),
        fail_on_loss=flag(options, "failOnDataLoss", True),
        selector=_selector(options),
        group=_group(options),
        most_rows=number(options, "maxRowsPerBatch", 8_000, 1, MOST_ROWS),
        fetch_bytes=number(options, "maxFetchBytes", MIB, 1, MOST_FETCH),
        patience_ms=number(options, "fetchTimeoutMs", 60_000, 1, MOST_PATIENCE_MS),
        credentials=options.get("credentials") or "",
        namespace=options.get("namespace"),
    )


def check_namesrv(options: Options) -> str:
    """Returns the checked name servers.

    Raises:
        ConfigError: None is given, or one is no address.
    """
    text = options.get("namesrv") or ""
    if not text:
        raise ConfigError("option namesrv is missing: host:port of the name servers, by commas")
    namesrv_addresses(text)
    return text


def queue_name(queue: MessageQueue) -> str:
    """Returns a queue of a topic as options and checkpoints write it: ``broker-a:0``."""
    return f"{queue.broker_name}:{queue.queue_id}"


def to_json(places: Places, latest: Places | None = None) -> dict[str, dict[str, dict[str, int]]]:
    """Encodes places for a checkpoint, always in the same order: Spark compares the text.

    Args:
        places: Places by queue.
        latest: Ends of the queues; an end behind its place is noted, for metrics.
    """
    found: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(places):
        place = places[queue]
        entry = {"offset": place.offset, "epoch": place.epoch}
        end = (latest or {}).get(queue, place).offset
        if end > place.offset:
            entry[LATEST] = end
        found.setdefault(queue.topic, {})[queue_name(queue)] = entry
    return found


def from_json(value: Mapping[str, Any], what: str) -> Places:
    """Decodes places of a checkpoint, or of an option, which may give offsets as plain numbers.

    Args:
        value: Offsets by topic and queue.
        what: Name of the value, for errors.

    Raises:
        ConfigError: The value has another form.
    """
    places: Places = {}
    for topic, queues in value.items():
        if not isinstance(queues, Mapping):
            raise _no_places(what, topic, queues)
        for name, place in queues.items():
            if isinstance(place, Mapping):
                offset, epoch = place.get("offset"), place.get("epoch", 0)
            else:
                offset, epoch = place, 0
            if type(offset) is not int or type(epoch) is not int:
                raise _no_places(what, name, place)
            if not FIRST <= offset <= MAX_OFFSET or not 0 <= epoch < 1 << 32:
                raise _no_places(what, name, place)
            places[_queue(topic, name, what)] = Place(offset, epoch)
    return places


def _no_places(what: str, name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{what}: {name!r} has {value!r:.100}; write "
        f'{{"orders": {{"broker-a:0": 4711, "broker-a:1": {END}}}}}, {FIRST} for earliest and '
        f"{END} for latest"
    )


def _queue(topic: str, name: object, what: str) -> MessageQueue:
    broker, _, number_text = str(name).rpartition(":")
    if not broker or not (number_text.isascii() and number_text.isdecimal()):
        raise ConfigError(f"{what}: {name!r} of {topic!r} is no queue; write broker-a:0")
    queue_id = int(number_text[:11])
    if queue_id >= 1 << 32:
        raise ConfigError(f"{what}: {name!r} of {topic!r}: queues have numbers below {1 << 32}")
    return MessageQueue(check_topic(topic), broker, queue_id)


def _which(options: Options) -> tuple[tuple[str, ...], str, tuple[MessageQueue, ...]]:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if options.get(name)]
    if len(given) != 1:
        raise ConfigError(
            "say which messages by one of subscribe (topics, by commas, or beginnings with * "
            "behind), subscribePattern (an expression) and assign (queues, in JSON); given: "
            f"{', '.join(given) or 'none'}"
        )
    topics = tuple(words(options.get("subscribe")))
    for topic in topics:
        check_topic(topic.removesuffix("*") or "x")
    pattern = options.get("subscribePattern") or ""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"option subscribePattern is {pattern!r}: {error}") from None
    assigned = []
    if given == ["assign"]:
        for topic, names in json_object(options, "assign").items():
            if not isinstance(names, list):
                raise ConfigError(
                    f'option assign: {topic!r} has {names!r:.100}; write {{"orders": '
                    '["broker-a:0"]}'
                )
            assigned += [_queue(topic, name, "option assign") for name in names]
        if not assigned:
            raise ConfigError("option assign names no queue")
    return topics, pattern, tuple(sorted(set(assigned)))


def _has_bound(options: Options, side: str) -> bool:
    return any(options.get(f"{side}{kind}") for kind in _BOUNDS)


def _bound(options: Options, side: str, default: int) -> Bound:
    given = [f"{side}{kind}" for kind in _BOUNDS if options.get(f"{side}{kind}")]
    if len(given) > 1:
        raise ConfigError(f"options {' and '.join(given)} exclude each other; leave one out")
    name = given[0] if given else f"{side}Offsets"
    text = options.get(name) or ""
    if name.endswith("OffsetsByTimestamp"):
        return Bound(name, default, times_ms=_times(options, name))
    if name.endswith("Timestamp"):
        return Bound(name, default, _time_ms(text, name))
    if not text:
        return Bound(name, default)
    if text.lower() in (EARLIEST, LATEST):
        if side == "ending" and text.lower() == EARLIEST:
            raise ConfigError("option endingOffsets is 'earliest'; it may be 'latest' or JSON")
        return Bound(name, FIRST if text.lower() == EARLIEST else END)
    if not text.lstrip().startswith("{"):
        raise ConfigError(f"option {name} is {text[:100]!r}; it may be earliest, latest or JSON")
    places = from_json(json_object(options, name), f"option {name}")
    if side == "ending" and any(place.offset == FIRST for place in places.values()):
        raise ConfigError(f"option endingOffsets has {FIRST} (earliest); use {END} or an offset")
    return Bound(name, default, places=places)


def _times(options: Options, name: str) -> dict[MessageQueue, int]:
    found = {}
    for topic, queues in json_object(options, name).items():
        if not isinstance(queues, dict):
            raise ConfigError(
                f"option {name}: {topic!r} has {queues!r:.100}; write "
                '{"orders": {"broker-a:0": "2026-03-01T12:00Z"}}'
            )
        for queue, moment in queues.items():
            found[_queue(topic, queue, f"option {name}")] = _time_ms(str(moment), name)
    return found


def _time_ms(text: str, name: str) -> int:
    moment = time_ms(text, -1)
    if moment > MAX_TIMESTAMP_MS:
        raise ConfigError(f"option {name} is {text!r}; at most 9999-12-31")
    return moment


def _selector(options: Options) -> MessageSelector:
    tags, sql = options.get("filter"), options.get("filterSql")
    if tags and sql:
        raise ConfigError("options filter (tags) and filterSql exclude each other; leave one out")
    found = MessageSelector.by_sql(sql) if sql else MessageSelector.by_tag(tags or "*")
    try:
        found.check()
    except InvalidArgument as error:
        raise ConfigError(f"option {'filterSql' if sql else 'filter'}: {error}") from error
    return found


def _group(options: Options) -> str:
    group = options.get("group") or GROUP
    try:
        return check_group(group)
    except InvalidArgument as error:
        raise ConfigError(f"option group: {error}") from error

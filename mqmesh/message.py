"""Messages and message queues, as producers and consumers use them.

``Message`` is what a producer sends and is itself the wire form: a batch is
the msgpack array of its messages, each an array of the fields below in this
order. The order is on disk and never changes; new fields go to the end, with
a new version of the batch.

``StoredMessage`` is what a consumer receives: the same fields, plus the position
of the message. Fields that all messages of a batch share are kept once, in
``BatchInfo``.
"""

import hashlib
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.units import MAX_TIMESTAMP_MS, MIB, CommitLogOffset, QueueOffset, TimestampMs

MAX_TOPIC_LENGTH: Final = 127
MAX_GROUP_LENGTH: Final = 255
MAX_MESSAGE_BYTES_DEFAULT: Final = 4 * MIB
MAX_PROPERTIES_BYTES: Final = 32 * 1024
MAX_TAG_LENGTH: Final = 255
MAX_KEYS: Final = 64
MAX_KEY_LENGTH: Final = 255
MAX_SHARDING_KEY_LENGTH: Final = 255
MAX_FLAG: Final = (1 << 31) - 1
FIELD_LIMITS: Final = (
    MAX_TAG_LENGTH,
    MAX_KEYS,
    MAX_KEY_LENGTH,
    MAX_SHARDING_KEY_LENGTH,
    MAX_PROPERTIES_BYTES,
    MAX_FLAG,
    MAX_TIMESTAMP_MS,
)
"""These bounds as ``mqmesh/native/slots.h`` wants them."""
MAX_DELAY_MS: Final = 40 * 366 * 24 * 3_600_000

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
TRANS_HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
TRANS_OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANS_CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
DEAD_LETTER_MARKS_TOPIC: Final = "RMQ_SYS_DLQ_RESENT_TOPIC"
"""Topic of resent dead letters; see ``roles/broker/features/retries/dead_letter_marks.py``."""
SENT_BACK_TOPIC: Final = "RMQ_SYS_SENT_BACK_TOPIC"
"""Topic of marks for messages sent back: ``roles/broker/features/retries/sent_back_marks.py``."""
STATE_TOPIC: Final = "RMQ_SYS_STATE_TOPIC"
"""Topic of a broker's state beside its messages; see ``roles/broker/state_records.py``."""
CARRIED_TOPIC: Final = "RMQ_SYS_CARRIED_TOPIC"
"""Topic of values of tables that outlive their place in the log; see
``roles/broker/features/tables/carry.py``."""
AUTO_CREATE_TOPIC: Final = "TBW102"
"""Never holds a message: brokers that create topics by themselves announce it as the pattern."""
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
RESERVED_TOPICS: Final = frozenset(
    {
        SCHEDULE_TOPIC,
        TRANS_HALF_TOPIC,
        TRANS_OP_HALF_TOPIC,
        TRANS_CHECK_MAX_TIME_TOPIC,
        TRACE_TOPIC,
        DEAD_LETTER_MARKS_TOPIC,
        SENT_BACK_TOPIC,
        STATE_TOPIC,
        CARRIED_TOPIC,
        AUTO_CREATE_TOPIC,
    }
)

HIDDEN_TOPICS: Final = frozenset(
    {TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC, STATE_TOPIC, CARRIED_TOPIC}
)
"""No consumer may read them, and no query finds their messages."""

LONGEST_TOPIC: Final = max(len(RETRY_PREFIX), len(DLQ_PREFIX)) + MAX_GROUP_LENGTH
"""In characters: that of a group whose name is as long as it may be."""

_NAME = re.compile(r"(?!\.\.?\Z)[%|a-zA-Z0-9_.-]+\Z")
"""Pattern of names. A folder and its parent (``.``, ``..``) are none: names become paths."""
NO_KEYS: Final[tuple[str, ...]] = ()


# The bounds hold for decoded messages; check_messages checks those that users make.
_Label = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
if TYPE_CHECKING:
    # A sender may give any sequence.
    _Keys = Sequence[str]
else:
    # A receiver gets a tuple: the empty one costs no allocation, where a list for each message
    # would keep the garbage collector busy for a third of a consumer's time.
    _Keys = Annotated[tuple[_Label, ...], msgspec.Meta(max_length=MAX_KEYS)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_FLAG)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMESTAMP_MS)]
_Property = Annotated[str, msgspec.Meta(max_length=MAX_PROPERTIES_BYTES)]


class Message(msgspec.Struct, array_like=True, gc=False):
    """One message, as a producer makes it.

    Attributes:
        topic: 1 to 127 characters of ``[%|a-zA-Z0-9_.-]``, but not ``.`` nor ``..``.
        body: 1 byte to ``max_message_size`` (4 MiB by default). A ``bytearray`` or ``memoryview``
            is taken as well, and copied when the message is sent.
        tag: Second-level type for cheap filtering, up to 255 characters, or None.
        keys: Business keys that the message can be looked up by; up to 64 of 255 characters.
        properties: Text by text, all together up to 32 KiB as UTF-8, or None. Names of
            ``RESERVED_PROPERTIES`` are set by mqmesh only.
        flag: A number of the user's, 0 to 2**31 - 1; mqmesh does not look at it.
        sharding_key: Messages with the same sharding key go to the same queue, in send order.
        delay_level: 0 for none, else 1 to the number of the broker's delay levels.
        deliver_at_ms: Wall-clock time of delivery in ms, 0 for at once.

    Source: semantics, chapter 4.
    """

    topic: str
    body: bytes
    tag: _Label | None = None
    keys: _Keys = NO_KEYS
    properties: dict[_Property, _Property] | None = None
    flag: _Number = 0
    sharding_key: _Label | None = None
    delay_level: _Number = 0
    deliver_at_ms: _Time = 0

    if TYPE_CHECKING:  # what may be given is more than what is received

        def __init__(
            self,
            topic: str,
            body: bytes | bytearray | memoryview,
            tag: str | None = None,
            keys: Sequence[str] = NO_KEYS,
            properties: dict[str, str] | None = None,
            flag: int = 0,
            sharding_key: str | None = None,
            delay_level: int = 0,
            deliver_at_ms: int = 0,
        ) -> None:
            """Create a message; see the class for the arguments."""

    def delayed_by(self, delay_ms: int) -> "Message":
        """Return the same message, to be delivered so long after now.

        Args:
            delay_ms: 0 to 40 years; by this machine's clock, as all points in time.

        Raises:
            InvalidArgument: It is none.
        """
        check_number("delay_ms", delay_ms, MAX_DELAY_MS)
        plain = as_plain(self)
        plain.delay_level, plain.deliver_at_ms = 0, time.time_ns() // 1_000_000 + delay_ms
        return plain

    def property(self, name: str, default: str | None = None) -> str | None:
        """Return one property, or ``default`` when the message has none of that name."""
        return default if self.properties is None else self.properties.get(name, default)


class BatchInfo(msgspec.Struct, frozen=True, gc=False):
    """Fields that all messages of one stored batch share.

    Attributes:
        topic: The physical topic; differs from the message's own for retries and dead letters.
        queue_id: Number of the message queue on its broker, from 0.
        broker_name: Broker group the batch was read from.
        base_queue_offset: Queue offset of the first message.
        commitlog_offset: Where the batch begins in the broker's log.
        store_size: Size of the whole batch in the log, in bytes.
        born_timestamp: When the producer closed the batch.
        store_timestamp: When the broker stored it.
        born_host: Producer as ``host:pid`` text.
        store_host: Broker's address, ``host:port``.
        producer_id: Producer instance id.
        first_sequence: Sequence of the first message at that producer.
        payload_crc: CRC-32 over everything that the producer wrote.
        prepared_transaction_offset: Where committed messages' half batch begins; -1 if unknown.
        fencing_token: Of the lock by which an ordered consumer has the queue, or number of the
            lease by which a simple consumer has the message; 0 without.
        attempt: How often the message was handed out under a lease; 0 without.
    """

    topic: str
    queue_id: int
    broker_name: str
    base_queue_offset: QueueOffset
    commitlog_offset: CommitLogOffset
    store_size: int
    born_timestamp: TimestampMs
    store_timestamp: TimestampMs
    born_host: str
    store_host: str
    producer_id: int
    first_sequence: int
    payload_crc: int
    prepared_transaction_offset: CommitLogOffset = CommitLogOffset(-1)
    fencing_token: int = 0
    attempt: int = 0


class StoredMessage(Message, array_like=True, gc=False):
    """One message, as a consumer receives it.

    Keys and properties may be decoded only on first access (``native_decode.py``). Functions that
    read the slots of a class from outside, such as ``msgspec.structs.asdict`` and
    ``msgspec.json.encode``, do not find them before: give them ``to_message()``.

    Attributes:
        queue_offset: Position in its message queue.
        batch: Fields that all messages of its batch share.
    """

    queue_offset: QueueOffset = QueueOffset(-1)
    batch: BatchInfo | None = None

    def __eq__(self, other: object) -> bool:
        """Return True if another message has the same content, place and batch."""
        return (
            type(other) is StoredMessage
            and as_plain(self) == as_plain(other)
            and self.queue_offset == other.queue_offset
            and self.batch == other.batch
        )

    __hash__ = None  # type: ignore[assignment]  # as of all messages, which may be changed

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor and arguments from which ``copy`` and others make a copy."""
        plain = msgspec.structs.astuple(as_plain(self))
        return StoredMessage, (*plain, self.queue_offset, self.batch)

    def __copy__(self) -> "StoredMessage":
        """Copy for ``copy.copy``, which would ask msgspec otherwise."""
        kind, fields = self.__reduce__()
        return kind(*fields)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        """Return all fields, as of any struct."""
        self.properties  # noqa: B018  # makes them
        return super().__repr__()

    @property
    def info(self) -> BatchInfo:
        """The batch's shared facts; set on every delivered message."""
        assert self.batch is not None
        return self.batch

    @property
    def queue_id(self) -> int:
        """Number of the message queue on its broker."""
        return self.info.queue_id

    @property
    def priority(self) -> int:
        """Priority in a topic with priorities: the number of its queue, 0 the lowest."""
        return self.info.queue_id

    @property
    def broker_name(self) -> str:
        """Broker group that holds the message."""
        return self.info.broker_name

    @property
    def message_queue(self) -> "MessageQueue":
        """The message queue that the message was read from."""
        info = self.info
        return MessageQueue(info.topic, info.broker_name, info.queue_id)

    @property
    def ordinal(self) -> int:
        """Position inside the batch, from 0."""
        return self.queue_offset - self.info.base_queue_offset

    @property
    def message_id(self) -> str:
        """Globally unique id, made by the producer, ordered per producer."""
        info = self.info
        return format_message_id(info.producer_id, info.first_sequence + self.ordinal)

    @property
    def offset_message_id(self) -> str:
        """Broker address, commit-log offset and ordinal: findable without an index."""
        info = self.info
        return f"{info.store_host}#{info.commitlog_offset:X}#{self.ordinal:X}"

    @property
    def commitlog_offset(self) -> CommitLogOffset:
        """Offset in the broker's log where the message's batch begins."""
        return self.info.commitlog_offset

    @property
    def store_size(self) -> int:
        """Size of the message's whole batch in the log, in bytes."""
        return self.info.store_size

    @property
    def prepared_transaction_offset(self) -> CommitLogOffset:
        """Log offset where the half message's batch begins; -1 if there was no transaction."""
        return self.info.prepared_transaction_offset

    @property
    def fencing_token(self) -> int:
        """Token of the lock by which an ordered consumer has the message's queue; 0 without a lock.

        A later owner of the queue has a larger one, also after a restart or a failover of the
        broker. A store that keeps the largest it has seen of a queue, and refuses smaller ones,
        takes nothing from a call that went on after its member was replaced.
        """
        return self.info.fencing_token

    @property
    def born_timestamp(self) -> TimestampMs:
        """Time when the producer closed the message's batch."""
        return self.info.born_timestamp

    @property
    def store_timestamp(self) -> TimestampMs:
        """Time when the broker stored the message."""
        return self.info.store_timestamp

    @property
    def born_host(self) -> str:
        """The producer, as ``host:pid``."""
        return self.info.born_host

    @property
    def store_host(self) -> str:
        """The broker's address."""
        return self.info.store_host

    @property
    def reconsume_times(self) -> int:
        """Number of times the message was sent back for retry."""
        # Any producer may set the property, so its text may be no number.
        text = self.property(PROPERTY_RECONSUME_TIMES, "")
        return int(text) if text and len(text) < 10 and text.isdecimal() else 0

    @property
    def delivery_attempt(self) -> int:
        """Number of times the message was delivered to its group, this time included; from 1."""
        return self.reconsume_times + (self.info.attempt or 1)

    @property
    def receipt(self) -> str:
        """Name of this delivery, for logs; "" for a message that no simple consumer received."""
        info = self.info
        if not info.attempt:
            return ""
        return f"{info.broker_name}:{info.queue_id}:{self.queue_offset}:{info.fencing_token:x}"

    @property
    def is_handed_over(self) -> bool:
        """An administrator handed it to this consumer; offsets and retries know nothing of it."""
        return self.property(PROPERTY_HANDED_OVER) is not None

    def to_message(self) -> Message:
        """Return a plain message of the same content, to be sent, without reserved properties."""
        return without_reserved(as_plain(self))


PROPERTY_RECONSUME_TIMES: Final = "RECONSUME_TIMES"
PROPERTY_WAIT_STORE_MSG_OK: Final = "WAIT"
PROPERTY_CORRELATION_ID: Final = "CORRELATION_ID"
"""Identity of a request at its sender; its reply has the same."""
PROPERTY_REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
"""The client that waits for the reply to a request."""
PROPERTY_TTL: Final = "TTL"
"""Time that a request waits, in ms from the sending on."""
PROPERTY_CONTENT_TYPE: Final = "CONTENT_TYPE"
"""Form of the body, a media type; users may set it."""
PROPERTY_LAST_FAILURE: Final = "LAST_FAILURE"
"""Reason why the message was sent back last: type and text of an exception, or the answer."""
PROPERTY_DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
"""Topic that a dead letter was sent to at first, in the topic that its group names for them."""
PROPERTY_RESENT_FROM_DLQ: Final = "RESENT_FROM_DLQ"
"""Offset message id in the dead-letter queue of a dead letter that was resent."""
PROPERTY_HANDED_OVER: Final = "HANDED_OVER"
"""An administrator handed the message to this consumer (`mqmesh query hand-to`)."""
RESERVED_PROPERTIES: Final = frozenset(
    {
        PROPERTY_RECONSUME_TIMES,
        PROPERTY_WAIT_STORE_MSG_OK,
        PROPERTY_CORRELATION_ID,
        PROPERTY_REPLY_TO_CLIENT,
        PROPERTY_TTL,
        PROPERTY_LAST_FAILURE,
        PROPERTY_DLQ_ORIGIN_TOPIC,
        PROPERTY_RESENT_FROM_DLQ,
        PROPERTY_HANDED_OVER,
    }
)
"""Reserved properties, which mqmesh sets; users may read them, and not set them."""


class SystemMessage(Message, array_like=True, gc=False):
    """A message whose reserved properties mqmesh has set; it is sent as a plain one."""


class MessageQueue(msgspec.Struct, frozen=True, order=True, gc=False):
    """One queue of a topic on one broker group.

    Attributes:
        topic: Topic name.
        broker_name: Broker group.
        queue_id: From 0.
    """

    topic: str
    broker_name: str
    queue_id: int


def format_message_id(producer_id: int, sequence: int) -> str:
    """Return the text form of a message id: 32 upper-case hex digits, producer first.

    Args:
        producer_id: Producer instance id, 0 to 2**64 - 1.
        sequence: Sequence at that producer, 0 to 2**64 - 1.
    """
    return f"{producer_id:016X}{sequence:016X}"


def parse_message_id(text: str) -> tuple[int, int]:
    """Takes a message id apart.

    Returns:
        Producer instance id and sequence.

    Raises:
        InvalidArgument: It is not 32 hex digits.
    """
    if not isinstance(text, str) or re.fullmatch(r"[0-9A-Fa-f]{32}", text) is None:
        shown = repr(text)[:64] if isinstance(text, str) else describe(text)
        raise InvalidArgument(f"message id {shown} is not 32 hex digits")
    return int(text[:16], 16), int(text[16:], 16)


@lru_cache(maxsize=8192)
def tag_hash(tag: str | None) -> int:
    """Return the 64-bit hash of a tag that consume queues carry. On disk: never changes.

    Returns:
        The first 8 bytes of BLAKE2b of the UTF-8 tag, little endian; 0 only for no tag.
    """
    if tag is None:
        return 0
    digest = hashlib.blake2b(tag.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def retry_topic(group: str) -> str:
    """Return the topic that a consumer group's failed messages wait in."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """Return the topic that a consumer group's dead letters end in."""
    return DLQ_PREFIX + group


def is_system_topic(topic: str) -> bool:
    """Return True for names that mqmesh itself has a use for."""
    return topic in RESERVED_TOPICS or topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


def is_closed_topic(topic: str) -> bool:
    """Return True for system topics that clients may not create, change or send to.

    The one that they may is that of the message trace, which is theirs.
    """
    return is_system_topic(topic) and topic != TRACE_TOPIC


def check_topic(topic: str) -> str:
    """Returns the topic name if it is legal; system names are legal here.

    Raises:
        InvalidArgument: Empty, too long, ``.``, ``..``, or a character outside
            ``[%|a-zA-Z0-9_.-]``.
    """
    limit = MAX_TOPIC_LENGTH
    if isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        # A prefix and a group name, and group names may be longer than topics.
        limit = MAX_GROUP_LENGTH + topic.index("%", 1) + 1
    return _check_name("topic", topic, limit)


def check_group(group: str) -> str:
    """Returns the group name if it is legal.

    Raises:
        InvalidArgument: Empty, longer than 255, ``.``, ``..``, or a character outside
            ``[%|a-zA-Z0-9_.-]``.
    """
    return _check_name("group", group, MAX_GROUP_LENGTH)


def check_consumer_group(group: str) -> str:
    """Returns the name of a consumer group if users may have it.

    Raises:
        InvalidArgument: Illegal, or reserved.
    """
    check_group(group)
    if is_system_topic(group):
        raise InvalidArgument(f"group {group!r} is reserved")
    return group


def check_number(field: str, number: int, limit: int) -> None:
    """Checks that a field is a whole number from 0 to a limit.

    Raises:
        InvalidArgument: It is none.
    """
    if type(number) is not int or not 0 <= number <= limit:
        raise InvalidArgument(f"{field} must be an int of 0 to {limit}, not {describe(number)}")


def describe(value: object) -> str:
    """Return type and value of something that is refused, cut to a readable length."""
    return f"{type(value).__name__} {repr(value)[:64]}"


def as_plain(message: Message) -> Message:
    """Return a message of the plain class, with the same content."""
    return Message(
        message.topic,
        message.body,
        message.tag,
        message.keys,
        message.properties,
        message.flag,
        message.sharding_key,
        message.delay_level,
        message.deliver_at_ms,
    )


def as_system(message: Message, properties: dict[str, str]) -> SystemMessage:
    """Return the same message with the properties that mqmesh gives it."""
    system = SystemMessage(*msgspec.structs.astuple(as_plain(message)))
    system.properties = properties
    return system


def without_reserved(message: Message) -> Message:
    """Return the same message when it has no reserved properties, else a plain one without them."""
    properties = message.properties
    if not properties or RESERVED_PROPERTIES.isdisjoint(properties):
        return message
    plain = as_plain(message)
    own = {name: text for name, text in properties.items() if name not in RESERVED_PROPERTIES}
    plain.properties = own or None
    return plain


def _check_name(kind: str, name: str, limit: int) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(f"{kind} must be a str, not {describe(name)}")
    if not name:
        raise InvalidArgument(f"the {kind} name is empty; 1 to {limit} characters are allowed")
    if len(name) > limit:
        raise InvalidArgument(
            f"{kind} name of {len(name)} characters is too long (limit {limit}): {name[:64]!r}…"
        )
    if _NAME.match(name) is None:
        raise InvalidArgument(
            f"{kind} name {name!r} has a character outside of letters, digits, '_', '-', '.', '%', "
            "'|', or is '.' or '..'"
        )
    return name

"""Messages between RocketMQ's clients and mqmesh: the mapping of their properties. Pure."""

import binascii
import ipaddress
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.filtering.tags import ALL, SEPARATOR
from mqmesh.message import (
    DLQ_PREFIX,
    MAX_KEYS,
    NO_KEYS,
    PROPERTY_CORRELATION_ID,
    PROPERTY_REPLY_TO_CLIENT,
    PROPERTY_TTL,
    RESERVED_PROPERTIES,
    RETRY_PREFIX,
    Message,
    StoredMessage,
    as_system,
    parse_message_id,
)
from mqmesh.protocol.pulling import ExpressionType
from mqmesh.protocol.remoting.records import (
    COMMITTED,
    NAME_END,
    PAIR_END,
    RecordPlace,
    encode_record,
)

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
UNIQ_KEY: Final = "UNIQ_KEY"
SHARDING_KEY: Final = "__SHARDINGKEY"
DELAY_LEVEL: Final = "DELAY"
DELAY_MS: Final = "TIMER_DELAY_MS"
DELAY_S: Final = "TIMER_DELAY_SEC"
DELIVER_MS: Final = "TIMER_DELIVER_MS"
PRODUCER_GROUP: Final = "PGROUP"
HALF: Final = "TRAN_MSG"
RETRY_TOPIC: Final = "RETRY_TOPIC"
REAL_TOPIC: Final = "REAL_TOPIC"
MESSAGE_ID_DIGITS: Final = 32
"""Length of an id that mqmesh gives a message."""
ORDINALS: Final = 65_536
"""Messages that one batch may have: a batch's offset in the log times this, and the message's
ordinal, is the offset that RocketMQ's clients see."""

CLUSTER: Final = "CLUSTER"
TRANSACTION_ID: Final = "__transactionId__"
TRACED: Final = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
"""Region of all messages, and that consumers may trace them; also in answers to sends."""

TRACE_END: Final = b"\x02"
"""End of a record in a message about traces."""
MOST_TRACED: Final = 1_000_000
"""Keys times records of a message about traces that is split."""
_LONG: Final = {
    "producerGroup": "a",
    "topic": "b",
    "queueId": "e",
    "sysFlag": "f",
    "flag": "h",
    "properties": "i",
}
"""Fields of sends with short names by those with long ones."""
_REQUEST: Final = (PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT, PROPERTY_TTL)
DELAYS: Final = frozenset({DELAY_LEVEL, DELAY_MS, DELAY_S, DELIVER_MS})
"""Properties that delay a message."""
_FIELDS: Final = DELAYS | {TAGS, SHARDING_KEY}
"""Properties that are fields of an mqmesh message."""
_DROPPED: Final = _FIELDS | RESERVED_PROPERTIES | {RETRY_TOPIC, REAL_TOPIC, PRODUCER_GROUP, HALF}
"""Properties of a client that are not stored. A committed message is no half message any more."""


@lru_cache(1_000)
def _packed(host: str) -> bytes:
    """Return an IPv4 address as 4 bytes; kept, as each message that goes out has it."""
    return ipaddress.IPv4Address(host).packed


@lru_cache(1_000)
def _id_head(host: str, port: int) -> str:
    """Return what ids of the messages of a broker group begin with."""
    return f"{_packed(host).hex()}{port:08x}".upper()


class Address(msgspec.Struct, frozen=True):
    """Address at which RocketMQ's clients find a broker group.

    Attributes:
        host: IPv4 address, in text.
        port: The gateway's port for the group.
        cluster: Cluster of the group.
    """

    host: str
    port: int
    cluster: str = ""

    @property
    def ip(self) -> bytes:
        """The address as 4 bytes."""
        return _packed(self.host)

    def __str__(self) -> str:
        """Return ``host:port``."""
        return f"{self.host}:{self.port}"


def to_message(
    topic: str, body: bytes, properties: Mapping[str, str], flag: int, now_ms: int
) -> Message:
    """Return the message that a client sends.

    The client's own id and the words of its key text are keys, so that it is found by them.

    Args:
        topic: Where to.
        body: Body of the message, not compressed.
        properties: As the client wrote them. Those that only mqmesh sets are left out.
        flag: The user's number.
        now_ms: Wall clock, for delays.

    Raises:
        InvalidArgument: A delay is no number.
    """
    words = properties.get(KEYS)
    keys = tuple(dict.fromkeys(words.split())) if words else ()
    unique = properties.get(UNIQ_KEY)
    if unique and unique not in keys:
        keys = (*keys, unique)
    own = {name: value for name, value in properties.items() if name not in _DROPPED}
    level, deliver_at_ms = 0, 0
    if not DELAYS.isdisjoint(properties):
        level, deliver_at_ms = _delay(properties, now_ms)
    message = Message(
        topic,
        body,
        properties.get(TAGS) or None,
        keys or NO_KEYS,
        own or None,
        flag,
        properties.get(SHARDING_KEY) or None,
        level,
        deliver_at_ms,
    )
    if PROPERTY_REPLY_TO_CLIENT in properties and is_request(properties):
        asking = {name: properties[name] for name in _REQUEST if name in properties}
        return as_system(message, own | asking)
    return message


def split_trace(message: Message) -> list[Message]:
    """Return a client's message about traces as several that have no more keys than one may have.

    Such a message has a record for each message that it is about, and their ids and keys as keys.

    Args:
        message: Its keys may be too many.
    """
    records = [one + TRACE_END for one in bytes(message.body).split(TRACE_END) if one]
    if len(message.keys) <= MAX_KEYS or len(message.keys) * len(records) > MOST_TRACED:
        return [message]
    encoded = {key: key.encode() for key in message.keys}
    found: list[Message] = []
    body, keys = b"", dict[str, None]()
    for record in [*records, b""]:
        own = dict.fromkeys([key for key, data in encoded.items() if data in record][:MAX_KEYS])
        if body and (not record or len(keys | own) > MAX_KEYS):
            properties = {**(message.properties or {}), KEYS: " ".join(keys)}
            found.append(
                msgspec.structs.replace(message, body=body, keys=tuple(keys), properties=properties)
            )
            body, keys = b"", {}
        body += record
        keys |= own
    return found


def is_request(properties: Mapping[str, str]) -> bool:
    """Return True if properties say that the sender of a message waits for a reply."""
    return bool(
        properties.get(PROPERTY_REPLY_TO_CLIENT)
        and 0 < len(properties.get(PROPERTY_CORRELATION_ID, "")) <= 64
    )


def send_fields(fields: Mapping[str, str], *, is_short: bool) -> Mapping[str, str]:
    """Return the fields of a send under their long names.

    Args:
        fields: As they came.
        is_short: They have names of one letter.
    """
    if not is_short:
        return fields
    return {name: fields[short] for name, short in _LONG.items() if short in fields}


def to_properties(message: Message) -> dict[str, str]:
    """Return the properties of a message for RocketMQ's clients, without those of its place."""
    own = message.properties or {}
    properties: dict[str, str] = {}
    if message.tag is not None:
        properties[TAGS] = message.tag
    if message.sharding_key is not None:
        properties[SHARDING_KEY] = message.sharding_key
    if KEYS not in own and (words := [one for one in message.keys if one != own.get(UNIQ_KEY)]):
        properties[KEYS] = " ".join(words)
    for name, value in own.items():
        if name not in RESERVED_PROPERTIES:
            properties.setdefault(name, value)
    return properties


def _delay(properties: Mapping[str, str], now_ms: int) -> tuple[int, int]:
    """Return delay level and time of delivery, one of them 0, by a property of ``DELAYS``."""
    if DELIVER_MS in properties:
        return 0, _number(properties, DELIVER_MS)
    if DELAY_MS in properties:
        return 0, now_ms + _number(properties, DELAY_MS)
    if DELAY_S in properties:
        return 0, now_ms + _number(properties, DELAY_S) * 1_000
    return _number(properties, DELAY_LEVEL), 0


def _number(properties: Mapping[str, str], name: str) -> int:
    text = properties[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise InvalidArgument(
            f"property {name} must be a number of at most 15 digits: {text!r:.50}"
        )
    return int(text)


def log_offset(commitlog_offset: int, ordinal: int) -> int:
    """Return the offset in the log that RocketMQ's clients see of a message."""
    return commitlog_offset * ORDINALS + ordinal


def offset_message_id(address: Address, offset: int) -> str:
    """Return the id by which RocketMQ's clients find a message without an index.

    Args:
        address: Address of the broker group.
        offset: ``log_offset``.
    """
    return f"{_id_head(address.host, address.port)}{offset:016X}"


def recall_handle(broker_name: str, message: Message, message_id: str) -> str:
    """Return the handle by which a client calls a delayed message back.

    RocketMQ's clients read it themselves, to find the broker group. Behind what they look for
    stands the message's id at mqmesh.

    Args:
        broker_name: Broker group that has the message.
        message: The message.
        message_id: Id of the message at mqmesh.
    """
    unique = message.property(UNIQ_KEY, "") or message_id
    fields = ("v1", message.topic, broker_name, str(message.deliver_at_ms), unique, message_id)
    return urlsafe_b64encode(" ".join(fields).encode()).decode()


def read_recall_handle(handle: str, topic: str, broker_name: str) -> tuple[str, int, int]:
    """Return a message's id as its client knows it, and the two halves of its id at mqmesh.

    Raises:
        InvalidArgument: It is no handle of a message of this topic and broker group.
    """
    try:
        fields = urlsafe_b64decode(handle.encode()).decode().split(" ")
        if len(fields) < 6 or fields[:3] != ["v1", topic, broker_name]:
            raise ValueError("its fields")
        return (fields[4], *parse_message_id(fields[-1]))
    except (ValueError, binascii.Error) as error:
        raise InvalidArgument(
            f"no handle of a delayed message of topic {topic!r} at broker group {broker_name!r}: "
            f"{handle!r:.100}"
        ) from error


def to_record(message: StoredMessage, address: Address, half_group: str = "") -> bytes:
    """Return a stored message as a client of RocketMQ reads it.

    Args:
        message: The message.
        address: Address of its broker group.
        half_group: Producer group, for a half message whose producer is queried about its outcome.
    """
    info = message.info
    topic = message.topic if half_group else info.topic
    # Those that clients need stand first: where there is no room, the last are left out.
    own = message.properties or {}
    properties = {UNIQ_KEY: own.get(UNIQ_KEY) or message.message_id}
    if info.topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) and message.topic != info.topic:
        properties[RETRY_TOPIC] = message.topic
    is_committed = info.prepared_transaction_offset >= 0
    if half_group:
        properties[PRODUCER_GROUP] = half_group
    if half_group or is_committed:
        properties |= {HALF: "true", TRANSACTION_ID: properties[UNIQ_KEY]}
    if is_request(own):
        properties |= {name: own[name] for name in _REQUEST if name in own}
    properties |= {CLUSTER: address.cluster, **TRACED}
    for name, value in to_properties(message).items():
        properties.setdefault(name, value)
    place = RecordPlace(
        info.queue_id,
        message.queue_offset,
        log_offset(info.commitlog_offset, message.ordinal),
        info.born_timestamp,
        info.store_timestamp,
        address.ip,
        address.port,
        message.reconsume_times,
        max(info.prepared_transaction_offset, 0),
        COMMITTED if is_committed else 0,
    )
    return encode_record(topic, message.body, writable(properties), message.flag, place)


def writable(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the same without properties that would be read as several."""
    return {
        name: value
        for name, value in properties.items()
        if NAME_END not in name and PAIR_END not in name and PAIR_END not in value
    }


def tag_expression(text: str, expression_type: str = ExpressionType.TAG.value) -> str:
    """Return a client's expression of tags without what RocketMQ passes over in it.

    An empty text beside tags is no tag, and ``*`` beside tags is a tag that no message has.
    """
    tags = [one.strip() for one in text.split(SEPARATOR)]
    named = [one for one in tags if one not in ("", ALL)]
    if expression_type != ExpressionType.TAG.value or not 0 < len(named) < len(tags):
        return text
    return f" {SEPARATOR} ".join(named)

"""Messages between clients by gRPC and mqmesh: the properties are those of remoting's. Pure."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import DLQ_PREFIX, MAX_KEYS, RESERVED_PROPERTIES, Message, StoredMessage
from mqmesh.protocol.grpc.codes import (
    MD5,
    BodyEncoding,
    MessageType,
    RefusedCall,
    ReplyCode,
)
from mqmesh.protocol.grpc.messages import CLASSES, GrpcMessage
from mqmesh.roles.gateway.grpc.clients import MAX_BODY_BYTES, name_of, resource_of
from mqmesh.roles.gateway.messages import (
    DELAY_LEVEL,
    DELAY_MS,
    DELAY_S,
    DELIVER_MS,
    HALF,
    KEYS,
    PRODUCER_GROUP,
    REAL_TOPIC,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    to_message,
)

MOST_ID_CHARACTERS: Final = 255
MOST_PROPERTIES: Final = 128
"""Properties of a user's message, as at RocketMQ's proxy."""
_NOT_THE_USERS: Final = frozenset(
    {
        *(DELAY_LEVEL, DELAY_MS, DELAY_S, DELIVER_MS, HALF, KEYS, PRODUCER_GROUP, REAL_TOPIC),
        *(RETRY_TOPIC, SHARDING_KEY, TAGS, UNIQ_KEY),
        *RESERVED_PROPERTIES,
    }
)
"""Properties of the system at RocketMQ or here, which users cannot set."""
_ANY_WINDOW: Final = 47
"""``wbits`` for what zlib or gzip made."""


def read_message(sent: GrpcMessage, now_ms: int, most_bytes: int = MAX_BODY_BYTES) -> Message:
    """Return a message that a producer sends.

    Args:
        sent: As it came.
        now_ms: Wall clock.
        most_bytes: Longest body, decompressed.

    Raises:
        RefusedCall: The message's id, body, properties or kind are wrong.
        InvalidArgument: The same of what mqmesh says about messages.
    """
    system = sent.system_properties
    message_id = system.message_id
    if not 0 < len(message_id) <= MOST_ID_CHARACTERS:
        raise RefusedCall(
            ReplyCode.ILLEGAL_MESSAGE_ID,
            f"message_id must have 1 to {MOST_ID_CHARACTERS} characters: {message_id!r:.50}",
        )
    if system.message_type == MessageType.LITE:
        raise RefusedCall(ReplyCode.NOT_IMPLEMENTED, "lite topics are not served")
    if len(sent.user_properties) > MOST_PROPERTIES or len(system.keys) > MAX_KEYS:
        raise InvalidArgument(
            f"{len(sent.user_properties)} properties and {len(system.keys)} keys of a message; at "
            f"most {MOST_PROPERTIES} and {MAX_KEYS} may be"
        )
    own = {one.key: one.value for one in sent.user_properties}
    if not _NOT_THE_USERS.isdisjoint(own):
        names = ", ".join(sorted(_NOT_THE_USERS & own.keys()))
        raise RefusedCall(
            ReplyCode.ILLEGAL_MESSAGE_PROPERTY_KEY, f"users cannot set the properties {names}"
        )
    properties = {**own, UNIQ_KEY: message_id}
    if system.tag:
        properties[TAGS] = system.tag
    if system.keys:
        properties[KEYS] = " ".join(system.keys)
    if system.message_group:
        properties[SHARDING_KEY] = system.message_group
    elif system.message_type == MessageType.FIFO:
        raise RefusedCall(
            ReplyCode.ILLEGAL_MESSAGE_GROUP, "a message of type FIFO needs a message_group"
        )
    if system.HasField("delivery_timestamp"):
        properties[DELIVER_MS] = str(max(ms_of(system.delivery_timestamp), 1))
    body = _body_of(sent, min(most_bytes, MAX_BODY_BYTES))
    return to_message(name_of(sent.topic), body, properties, 0, now_ms)


def _body_of(sent: GrpcMessage, most_bytes: int) -> bytes:
    body: bytes = sent.body
    if sent.system_properties.body_encoding == BodyEncoding.GZIP:
        reader = zlib.decompressobj(_ANY_WINDOW)
        try:
            body = reader.decompress(body, most_bytes + 1)
        except zlib.error as error:
            raise InvalidArgument(f"a body that cannot be decompressed: {error}") from error
        if len(body) <= most_bytes and (not reader.eof or reader.unused_data):
            raise InvalidArgument("a body that cannot be decompressed: it is cut off, or goes on")
    if not body:
        raise RefusedCall(ReplyCode.MESSAGE_BODY_EMPTY, "a message has a body of 1 byte or more")
    if len(body) > most_bytes:
        raise RefusedCall(
            ReplyCode.MESSAGE_BODY_TOO_LARGE,
            f"a body is over {MAX_BODY_BYTES} bytes, or those of one call together are too long",
        )
    return body


def write_message(
    message: StoredMessage, system: Mapping[str, object], namespace: str = ""
) -> GrpcMessage:
    """Return a stored message as clients read it.

    Args:
        message: The message.
        system: System properties beside those that follow from the message: of a delivery.
        namespace: Namespace of its reader.
    """
    info = message.info
    own = dict(message.properties or {})
    message_id = own.pop(UNIQ_KEY, "") or message.message_id
    keys_text = own.pop(KEYS, None)
    keys = keys_text.split() if keys_text is not None else message.keys
    kind = MessageType.NORMAL
    if message.sharding_key is not None:
        kind = MessageType.FIFO
    elif message.prepared_transaction_offset >= 0:
        kind = MessageType.TRANSACTION
    found = CLASSES["Message"](
        topic=resource_of(topic_of_reader(message), namespace),
        body=message.body,
        system_properties=CLASSES["SystemProperties"](
            tag=message.tag or "",
            keys=[one for one in keys if one != message_id],
            message_id=message_id,
            body_digest=CLASSES["Digest"](
                type=MD5,
                # Clients compare texts; of all digests they agree on this one's.
                checksum=hashlib.md5(message.body, usedforsecurity=False).hexdigest().upper(),
            ),
            body_encoding=BodyEncoding.IDENTITY.value,
            message_type=kind.value,
            born_timestamp=timestamp(info.born_timestamp),
            born_host=info.born_host,
            store_timestamp=timestamp(info.store_timestamp),
            store_host=info.broker_name,
            queue_id=info.queue_id,
            queue_offset=message.queue_offset,
            message_group=message.sharding_key or "",
            **system,
        ),
    )
    for name, value in own.items():
        if name not in _NOT_THE_USERS:
            found.user_properties.add(key=name, value=value)
    return found


def topic_of_reader(message: StoredMessage) -> str:
    """Return the topic by which a client reads a message, and reports on it.

    A retry has the topic that the message was sent to; a dead letter has that of dead letters, to
    which its reader subscribed.
    """
    is_dead = message.info.topic.startswith(DLQ_PREFIX)
    return message.info.topic if is_dead else message.topic


def timestamp(at_ms: int) -> GrpcMessage:
    """Return a point in time, ms of the wall clock, as the protocol has it."""
    return CLASSES["Timestamp"](seconds=at_ms // 1_000, nanos=at_ms % 1_000 * 1_000_000)


def ms_of(time: GrpcMessage) -> int:
    """Return a point in time or a length of time in ms."""
    return int(time.seconds) * 1_000 + int(time.nanos) // 1_000_000

"""Structs of queries: messages by key and by id, and those of a broker and its index process."""

from typing import Annotated, Final

import msgspec

from mqmesh.errors import RemoteProtocolError
from mqmesh.message import BatchInfo, Message, StoredMessage, as_plain
from mqmesh.namespaces import shown_name
from mqmesh.protocol.names import TopicName
from mqmesh.protocol.pulling import MAX_PULL_BYTES
from mqmesh.units import MAX_OFFSET, QueueOffset

MAX_QUERY_MESSAGES: Final = 1_024
DEFAULT_QUERY_MESSAGES: Final = 32
DEFAULT_QUERY_BYTES: Final = 8 * 1024 * 1024

_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_QUERY_MESSAGES)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_PULL_BYTES)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class QueryMessageRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_MESSAGE: messages with a key, newest first; the body of the answer is a msgpack array
    of ``FoundMessage``.

    The topic is the physical one: messages that wait for a retry are in ``%RETRY%<group>``. The
    query sees every message that was acknowledged before, unless the index is behind:
    ``missing_bytes`` says by how much. Each message is read from the log and compared with the
    query. Messages of topics that are not readable are left out.

    Attributes:
        topic: Physical topic.
        key: One of the message's keys.
        begin_timestamp: Smallest store timestamp, ms since 1970 UTC.
        end_timestamp: Largest store timestamp, ms since 1970 UTC.
        max_count: Messages to return.
        max_bytes: Stop when the messages have as many bytes; one is returned, of any size.

    Errors:
        TOPIC_NOT_EXIST: No such topic.
        NO_PERMISSION: The topic is not readable.
        SYSTEM_BUSY: ``index.max_queries`` are under way.
        SERVICE_NOT_AVAILABLE: The index process is not there at the moment.
        REQUEST_CODE_NOT_SUPPORTED: The broker has no index.
    """

    topic: TopicName
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    begin_timestamp: _Time = 0
    end_timestamp: _Time = MAX_OFFSET
    max_count: _Count = DEFAULT_QUERY_MESSAGES
    max_bytes: _Bytes = DEFAULT_QUERY_BYTES


class QueryMessageByIdRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """QUERY_MESSAGE_BY_ID: everything stored under a message id, newest first, as for
    QUERY_MESSAGE.

    That is the message, and its copies that wait for a retry or are dead letters. A client that
    does not know which broker has the message sends the request to all.

    Attributes:
        message_id: 32 hex digits: producer id and sequence.
        max_count: Messages to return.
        max_bytes: Stop when the messages have as many bytes; one is returned, of any size.

    Errors:
        MESSAGE_ILLEGAL: Not 32 hex digits.
        SYSTEM_BUSY: ``index.max_queries`` are under way.
        SERVICE_NOT_AVAILABLE: The index process is not there at the moment.
        REQUEST_CODE_NOT_SUPPORTED: The broker has no index.
    """

    message_id: Annotated[str, msgspec.Meta(max_length=32)]
    max_count: _Count = DEFAULT_QUERY_MESSAGES
    max_bytes: _Bytes = DEFAULT_QUERY_BYTES


class QueryMessageResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to a query; its body is an array of ``FoundMessage``, newest first.

    Attributes:
        message_count: Messages in the body.
        more: More messages match.
        missing_bytes: Bytes of the broker's log that were not searched, because their index is
            being made; 0 when everything was.
    """

    message_count: int
    more: bool = False
    missing_bytes: int = 0


class FoundMessage(msgspec.Struct, frozen=True, gc=False):
    """A message and where it stands; a map on the wire.

    Attributes:
        message: The message, as in a batch.
        queue_offset: Position in its queue.
        batch: Facts of its batch, a map, too: topic, queue_id, base_queue_offset, commitlog_offset,
            store_size, born_timestamp, store_timestamp, born_host, producer_id, first_sequence,
            payload_crc, prepared_transaction_offset; broker_name and store_host are for the client
            to fill in.
    """

    message: Message
    queue_offset: int
    batch: BatchInfo


class AdvanceIndexRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ADVANCE_INDEX: from a broker to its index process: the log may be indexed up to here, where
    consumers see it.

    Sent when that has moved, some twenty times a second at most, before each query, and once a
    second in any case.

    Attributes:
        store_id: Of the broker's store.
        visible_offset: Commit-log offset that consumers can see to.
        min_offset: Commit-log offset before which the log is gone.

    Errors:
        SYSTEM_ERROR: The log cannot be read.
        MESSAGE_ILLEGAL: Another store than before.
    """

    store_id: int
    visible_offset: _Offset
    min_offset: _Offset


class IndexProgress(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Progress of an index process.

    Attributes:
        indexed_through: Commit-log offset to which the newest messages are indexed.
        missing_bytes: Log bytes that a query would not search now.
        waiting: Why it does nothing at the moment; empty if it is not held up.
        segments: Log segments with an index.
        sealed: Those of them whose index is finished.
        disk_bytes: Size of the index.
        batches: Batches indexed since it was started.
        discarded: Parts of the index made anew because they could not be trusted.
        skipped_bytes: Damaged bytes of the log that were passed over.
        queries: Queries answered.
        mismatches: Places where the log had nothing of what the index said.
        texts: Stretches of keys not sorted yet; each makes a look-up slower.
        at_rest: Everything is indexed, sorted and merged: look-ups are as fast as they get.
    """

    indexed_through: int = 0
    missing_bytes: int = 0
    waiting: str = ""
    segments: int = 0
    sealed: int = 0
    disk_bytes: int = 0
    batches: int = 0
    discarded: int = 0
    skipped_bytes: int = 0
    queries: int = 0
    mismatches: int = 0
    texts: int = 0
    at_rest: bool = False


_encoder = msgspec.msgpack.Encoder()
_found_decoder = msgspec.msgpack.Decoder(list[FoundMessage])


def encode_found(messages: list[StoredMessage]) -> bytes:
    """Encodes the body of the answer to a query.

    Args:
        messages: Each with its batch's facts.
    """
    return _encoder.encode(
        [FoundMessage(as_plain(one), one.queue_offset, one.info) for one in messages]
    )


def decode_found(
    body: bytes | memoryview, *, broker_name: str, store_host: str, namespace: str = ""
) -> list[StoredMessage]:
    """Decodes the body of the answer to a query.

    Args:
        body: Of a broker's answer.
        broker_name: That broker's group.
        store_host: Its address, ``host:port``.
        namespace: Taken off the topics of batches and messages.

    Raises:
        RemoteProtocolError: The body is malformed.
    """
    try:
        found = _found_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the messages of a query's answer: {error}") from error
    messages = []
    for one in found:
        topic = shown_name(namespace, one.batch.topic)
        batch = msgspec.structs.replace(
            one.batch, topic=topic, broker_name=broker_name, store_host=store_host
        )
        message = StoredMessage(*msgspec.structs.astuple(one.message))
        message.topic = shown_name(namespace, message.topic)
        message.queue_offset = QueueOffset(one.queue_offset)
        message.batch = batch
        messages.append(message)
    return messages

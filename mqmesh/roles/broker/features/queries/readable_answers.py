"""Answers of the index without the messages of topics that do not permit reading."""

from collections.abc import Callable

import msgspec

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.queries import QueryMessageResponse


class _MessageTopic(msgspec.Struct, array_like=True, frozen=True, gc=False):
    topic: str


class _BatchTopic(msgspec.Struct, frozen=True, gc=False):
    topic: str


class _Topics(msgspec.Struct, frozen=True, gc=False):
    message: _MessageTopic
    batch: _BatchTopic


_raw_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_topics_decoder = msgspec.msgpack.Decoder(_Topics)


def only_readable(
    header: bytes | memoryview, body: bytes | memoryview, may_read: Callable[[str], bool]
) -> tuple[bytes | memoryview, bytes | memoryview]:
    """Leaves messages out of the answer to a query.

    Args:
        header: A ``QueryMessageResponse``.
        body: An array of ``FoundMessage``.
        may_read: Of a topic. Asked for the one that a message names and for the one that it
            stands in, which differ while it waits.

    Returns:
        Header and body, the given ones if nothing has to be left out.

    Raises:
        RemoteProtocolError: They are no such answer.
    """
    try:
        found = _raw_decoder.decode(body)
        kept = []
        for one in found:
            topics = _topics_decoder.decode(one)
            if may_read(topics.message.topic) and may_read(topics.batch.topic):
                kept.append(one)
        if len(kept) == len(found):
            return header, body
        answer = decode_header(QueryMessageResponse, memoryview(header))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the messages of a query's answer: {error}") from error
    return (
        encode_header(msgspec.structs.replace(answer, message_count=len(kept))),
        msgspec.msgpack.encode(kept),
    )

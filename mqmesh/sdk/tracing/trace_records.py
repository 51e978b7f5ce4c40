"""Records of the message trace, as RocketMQ's clients write them into the trace topic.

The body of a trace message is UTF-8 text: records, each closed by 0x02, whose fields 0x01
separates. They are those of ``TraceDataEncoder`` of RocketMQ 4.9.8, and never change; ``Recall``
is of RocketMQ 5's clients alone:

=================  ==================================================================
kind               fields
=================  ==================================================================
``Pub``            time, region, group, topic, message id, tag, keys, store host, body
                   bytes, cost, message type, offset message id, success
``SubBefore``      time, region, group, request id, message id, retry times, keys
``SubAfter``       request id, message id, cost, success, keys, context code, time,
                   group
``EndTransaction`` time, region, group, topic, message id, tag, keys, store host,
                   message type, transaction id, state, from a check
``Recall``         time, region, group, topic, message id, success
=================  ==================================================================

Times are ms since 1970, costs ms, keys are separated by blanks, truth is ``true`` or ``false``. Old
clients leave out the offset message id, the context code, or time and group of a ``SubAfter``; some
have the client's host behind a ``Pub``. For a batch RocketMQ writes one ``Pub``, whose message id
and offset message id are those of all its messages, separated by commas.
"""

import enum
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.units import MAX_TIMESTAMP_MS

REGION: Final = "DefaultRegion"
"""Region that RocketMQ's brokers name by default."""

_FIELD: Final = "\x01"
_RECORD: Final = "\x02"
_BLANK: Final = str.maketrans({_FIELD: " ", _RECORD: " "})
_MAX_NUMBER: Final = (1 << 63) - 1


class TraceKind(enum.StrEnum):
    """Kind of a record."""

    PUB = "Pub"
    """A message was sent."""
    SUB_BEFORE = "SubBefore"
    """A consumer has begun with it."""
    SUB_AFTER = "SubAfter"
    """And ended."""
    END_TRANSACTION = "EndTransaction"
    """A transaction was committed or rolled back."""
    RECALL = "Recall"
    """A delayed message was called back."""


class TraceMessageType(enum.IntEnum):
    """RocketMQ's numbers of kinds of messages."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ContextCode(enum.IntEnum):
    """Result of a listener's call, in RocketMQ's numbers."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURN_NULL = 3
    FAILED = 4


class TraceRecord(msgspec.Struct, frozen=True, gc=False):
    """Trace record; fields that its kind does not have keep their default.

    Attributes:
        kind: Kind of the record.
        time_ms: When it began; of a ``SubAfter``, when it ended. 0 where old clients left it out.
        region: Of the broker.
        group: Producer or consumer group.
        topic: Topic.
        message_id: Id of the message.
        tag: Its tag.
        keys: Its keys, separated by blanks.
        store_host: The broker, ``host:port``.
        size: Bytes of the body.
        cost_ms: Duration.
        message_type: One of ``TraceMessageType``.
        offset_id: Offset message id.
        success: It went well.
        request_id: The same for a ``SubBefore`` and its ``SubAfter``.
        retry_times: Number of times the message was sent back before.
        context_code: One of ``ContextCode``.
        transaction_id: Of the transaction.
        state: ``COMMIT_MESSAGE``, ``ROLLBACK_MESSAGE`` or ``UNKNOW``.
        from_check: The decision answers a check of the broker.
        client_host: Its writer, where the record says so.
    """

    kind: TraceKind
    message_id: str
    time_ms: int = 0
    region: str = ""
    group: str = ""
    topic: str = ""
    tag: str = ""
    keys: str = ""
    store_host: str = ""
    size: int = 0
    cost_ms: int = 0
    message_type: int = TraceMessageType.NORMAL
    offset_id: str = ""
    success: bool = True
    request_id: str = ""
    retry_times: int = 0
    context_code: int = ContextCode.SUCCESS
    transaction_id: str = ""
    state: str = ""
    from_check: bool = False
    client_host: str = ""


def plain_text(text: str) -> str:
    """Return a user's text without the two separators, so that no user can forge records."""
    return text.translate(_BLANK) if _FIELD in text or _RECORD in text else text


def encode_record(one: TraceRecord) -> str:
    """Return a record as text; texts of users must be ``plain_text``."""
    return _ENCODE[one.kind](one)


def decode_records(text: str) -> tuple[list[TraceRecord], int]:
    """Return the records of a trace message.

    Returns:
        Those that can be read, and how many others there are: a sender to the topic can
        write anything.
    """
    found: list[TraceRecord] = []
    strange = 0
    for line in text.split(_RECORD):
        fields = line.split(_FIELD)
        while len(fields) > 1 and not fields[-1]:
            fields.pop()  # as Java's split
        decode = _DECODE.get(fields[0])
        if decode is None:
            strange += line != ""
            continue
        try:
            found.append(decode(fields))
        except (IndexError, ValueError):
            strange += 1
    return found, strange


def pub_format(one: TraceRecord) -> str:
    """Return the shared part of ``Pub`` records that differ in id, tag, keys, size and offset id.

    Returns:
        A format for ``%``, which takes these five.
    """
    return (
        f"Pub\x01{one.time_ms}\x01{_plain(one.region)}\x01{_plain(one.group)}\x01{_plain(one.topic)}"
        f"\x01%s\x01%s\x01%s\x01{_plain(one.store_host)}\x01%d\x01{one.cost_ms}"
        f"\x01{one.message_type:d}\x01%s\x01{_truth(one.success)}\x02"
    )


def sub_before_format(one: TraceRecord) -> str:
    """Return the format for ``SubBefore``: takes message id, retry times and keys."""
    return (
        f"SubBefore\x01{one.time_ms}\x01{_plain(one.region)}\x01{_plain(one.group)}"
        f"\x01{_plain(one.request_id)}\x01%s\x01%d\x01%s\x02"
    )


def sub_after_format(one: TraceRecord) -> str:
    """Return the format for ``SubAfter``: takes message id and keys."""
    return (
        f"SubAfter\x01{_plain(one.request_id)}\x01%s\x01{one.cost_ms}\x01{_truth(one.success)}"
        f"\x01%s\x01{one.context_code:d}\x01{one.time_ms}\x01{_plain(one.group)}\x02"
    )


def _plain(text: str) -> str:
    return text.replace("%", "%%")


def _encode_pub(one: TraceRecord) -> str:
    varying = one.message_id, one.tag, one.keys, one.size, one.offset_id
    return pub_format(one) % varying


def _encode_sub_before(one: TraceRecord) -> str:
    return sub_before_format(one) % (one.message_id, one.retry_times, one.keys)


def _encode_sub_after(one: TraceRecord) -> str:
    return sub_after_format(one) % (one.message_id, one.keys)


def _encode_end(one: TraceRecord) -> str:
    return (
        f"EndTransaction\x01{one.time_ms}\x01{one.region}\x01{one.group}\x01{one.topic}"
        f"\x01{one.message_id}\x01{one.tag}\x01{one.keys}\x01{one.store_host}"
        f"\x01{one.message_type:d}\x01{one.transaction_id}\x01{one.state}"
        f"\x01{_truth(one.from_check)}\x02"
    )


def _encode_recall(one: TraceRecord) -> str:
    return (
        f"Recall\x01{one.time_ms}\x01{one.region}\x01{one.group}\x01{one.topic}"
        f"\x01{one.message_id}\x01{_truth(one.success)}\x02"
    )


def _decode_pub(fields: list[str]) -> TraceRecord:
    has_offset_id = len(fields) >= 14
    return TraceRecord(
        TraceKind.PUB,
        fields[5],
        time_ms=_time(fields[1]),
        region=fields[2],
        group=fields[3],
        topic=fields[4],
        tag=fields[6],
        keys=fields[7],
        store_host=fields[8],
        size=_number(fields[9]),
        cost_ms=_number(fields[10]),
        message_type=_message_type(fields[11]),
        offset_id=fields[12] if has_offset_id else "",
        success=_is_true(fields[13 if has_offset_id else 12]),
        client_host=fields[14] if len(fields) > 14 else "",
    )


def _decode_sub_before(fields: list[str]) -> TraceRecord:
    return TraceRecord(
        TraceKind.SUB_BEFORE,
        fields[5],
        time_ms=_time(fields[1]),
        region=fields[2],
        group=fields[3],
        request_id=fields[4],
        retry_times=_number(fields[6]),
        keys=fields[7] if len(fields) > 7 else "",
    )


def _decode_sub_after(fields: list[str]) -> TraceRecord:
    has_time = len(fields) >= 9
    return TraceRecord(
        TraceKind.SUB_AFTER,
        fields[2],
        request_id=fields[1],
        cost_ms=_number(fields[3]),
        success=_is_true(fields[4]),
        keys=fields[5] if len(fields) > 5 else "",
        context_code=_number(fields[6]) if len(fields) > 6 else ContextCode.SUCCESS,
        time_ms=_time(fields[7]) if has_time else 0,
        group=fields[8] if has_time else "",
    )


def _decode_end(fields: list[str]) -> TraceRecord:
    return TraceRecord(
        TraceKind.END_TRANSACTION,
        fields[5],
        time_ms=_time(fields[1]),
        region=fields[2],
        group=fields[3],
        topic=fields[4],
        tag=fields[6],
        keys=fields[7],
        store_host=fields[8],
        message_type=_message_type(fields[9]),
        transaction_id=fields[10],
        state=fields[11],
        from_check=_is_true(fields[12]),
    )


def _decode_recall(fields: list[str]) -> TraceRecord:
    return TraceRecord(
        TraceKind.RECALL,
        fields[5],
        time_ms=_time(fields[1]),
        region=fields[2],
        group=fields[3],
        topic=fields[4],
        success=_is_true(fields[6]),
    )


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _is_true(text: str) -> bool:
    return text.lower() == "true"


def _time(text: str) -> int:
    value = _number(text)
    if not 0 <= value <= MAX_TIMESTAMP_MS:
        raise ValueError(f"{value} is no time")
    return value


def _number(text: str) -> int:
    if len(text) > 20:
        raise ValueError("too long for a number")
    value = int(text)
    if abs(value) > _MAX_NUMBER:
        raise ValueError("too large for a number")
    return value


def _message_type(text: str) -> int:
    return TraceMessageType(_number(text)).value


_ENCODE: Final[dict[TraceKind, Callable[[TraceRecord], str]]] = {
    TraceKind.PUB: _encode_pub,
    TraceKind.SUB_BEFORE: _encode_sub_before,
    TraceKind.SUB_AFTER: _encode_sub_after,
    TraceKind.END_TRANSACTION: _encode_end,
    TraceKind.RECALL: _encode_recall,
}
_DECODE: Final[dict[str, Callable[[list[str]], TraceRecord]]] = {
    "Pub": _decode_pub,
    "SubBefore": _decode_sub_before,
    "SubAfter": _decode_sub_after,
    "EndTransaction": _decode_end,
    "Recall": _decode_recall,
}

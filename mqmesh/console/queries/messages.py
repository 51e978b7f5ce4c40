"""Messages: found by id, key, queue, or in a topic; and one with its track and trace."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec

from mqmesh.aio import QueryClient, SearchClient, TraceClient
from mqmesh.console.body_view import BodyKind, BodyView, preview, view_body
from mqmesh.console.page import TableArguments, TablePage, Text, Visit, table_page
from mqmesh.errors import (
    BrokerError,
    ConfigError,
    MQMeshError,
    NoPermission,
    TopicNotFound,
)
from mqmesh.filtering.tags import ALL
from mqmesh.message import SCHEDULE_TOPIC, StoredMessage
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.queries import MAX_QUERY_MESSAGES
from mqmesh.protocol.route import MAX_QUEUES_PER_TOPIC
from mqmesh.sdk.admin.searches import MessageFilter
from mqmesh.sdk.admin.traces import TraceSpan
from mqmesh.sdk.admin.tracks import Track
from mqmesh.sdk.admin.views.messages import CopyView, MessageView, message_view, track_view
from mqmesh.units import MAX_TIMESTAMP_MS
from mqmesh.user_times import parse_time

LINE_WIDTH = 1_000
"""Width of the time line, to which spans are scaled."""
MIN_SPAN_WIDTH = 8
MessageId = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]


class MessagesArguments(TableArguments, frozen=True, kw_only=True):
    """Arguments of a search for messages.

    Attributes:
        by: Way of the search: in a ``topic``, by a ``key``, an ``id``, or a place in a ``queue``.
        message_id: Message id, or offset message id.
        topic: Topic; for messages that wait for a retry, the retry topic of their group.
        key: One of the message's keys.
        since: Stored at this time or later: an age such as 1h, or a moment; "" for any.
        until: Stored at this time or before.
        tag: Only with one of these tags: ``A || B``; not beside ``sql``.
        sql: Only those for which an SQL92 expression is true.
        text: Only with this text in the body.
        broker_name: Broker group; "" for all, or the only one.
        queue_id: Queue; -1 for all.
        offset: Offset in the queue.
    """

    by: Literal["topic", "key", "id", "queue"] = "topic"
    message_id: Annotated[str, msgspec.Meta(max_length=300)] = ""
    topic: Text = ""
    key: Text = ""
    since: Text = ""
    until: Text = ""
    tag: Text = ""
    sql: Annotated[str, msgspec.Meta(max_length=16_384)] = ""
    text: Text = ""
    broker_name: Text = ""
    queue_id: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_QUEUES_PER_TOPIC)] = -1
    offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class MessageRow(msgspec.Struct, frozen=True):
    """One message in a list.

    Attributes:
        message_id: Its id.
        offset_message_id: Its place.
        topic: Topic that it is stored in.
        broker_name: Broker group.
        queue_id: Queue.
        queue_offset: Offset in the queue.
        store_timestamp: When it was stored, ms since 1970.
        tag: "" for none.
        keys: Its keys.
        body_size: Bytes.
        preview: Beginning of the body; "" where bodies are not shown.
    """

    message_id: str
    offset_message_id: str
    topic: str
    broker_name: str
    queue_id: int
    queue_offset: int
    store_timestamp: int
    tag: str
    keys: list[str]
    body_size: int
    preview: str


class FoundMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that were found.

    Attributes:
        is_asked: There was something to search for.
        table: The messages, newest first.
        problem: Why the search could not be made; "" if it was.
        notes: Why messages may be missing, by broker group.
    """

    is_asked: bool
    table: TablePage[MessageRow]
    problem: str = ""
    notes: dict[str, str] = {}


class MessageArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the page of a message.

    Attributes:
        message_id: Message id, or offset message id.
        kind: View of the body, if it can be read so; "" for the best one.
    """

    message_id: MessageId
    kind: BodyKind | Literal[""] = ""


class TimedSpan(msgspec.Struct, frozen=True):
    """A span of a trace, and its place on the time line of ``LINE_WIDTH``.

    Attributes:
        span: The span.
        left: Its begin.
        width: Its duration, 8 at least.
    """

    span: TraceSpan
    left: int
    width: int


class MessageDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One message.

    Attributes:
        message: Its fields; the body is in ``body``.
        body: View of the body; None where bodies are not shown.
        copies: Stored messages with its id, oldest first.
        due_ms: Time of its delivery, if it is delayed, ms since 1970; else 0.
        groups: State of the message in each group.
        spans: Its trace, by time.
        lasted_ms: Time between begin and end of the trace.
        notes: Why track or trace may lack something.
    """

    message: MessageView
    body: BodyView | None
    copies: list[CopyView]
    due_ms: int
    groups: list[Track]
    spans: list[TimedSpan]
    lasted_ms: int
    notes: list[str]


async def messages(visit: Visit, arguments: MessagesArguments) -> FoundMessages:
    """Return messages that fit a search."""
    search, given = _WAYS[arguments.by]
    nothing: TablePage[MessageRow] = table_page([], arguments)
    if not getattr(arguments, given):
        return FoundMessages(is_asked=False, table=nothing)
    try:
        found, cut, notes = await search(visit, arguments)
    except (ConfigError, TopicNotFound) as error:
        return FoundMessages(is_asked=True, table=nothing, problem=str(error))
    rows = [message_row(visit, one) for one in found]
    return FoundMessages(is_asked=True, table=table_page(rows, arguments, cut=cut), notes=notes)


_Found = tuple[list[StoredMessage], str, dict[str, str]]


async def _in_topic(visit: Visit, arguments: MessagesArguments) -> _Found:
    from_ms, to_ms = times(visit, arguments.since, arguments.until)
    wanted = MessageFilter(
        tags=arguments.tag or ALL,
        sql=arguments.sql,
        text=arguments.text,
        from_ms=from_ms,
        to_ms=to_ms,
        broker_name=arguments.broker_name,
        queue_id=arguments.queue_id,
    )
    if arguments.tag and arguments.sql:
        raise ConfigError("a tag and SQL92 exclude each other: SQL92 knows TAGS")
    async with visit.client(SearchClient) as client:
        found = await client.search(
            arguments.topic, wanted, max_looked=visit.config.max_query_messages
        )
    notes = {}
    if found.unreadable:
        notes[arguments.topic] = f"{found.unreadable:,} batches cannot be decoded"
    return found.messages, looked_at(found.looked, found.total, "time, broker or queue"), notes


async def _by_key(visit: Visit, arguments: MessagesArguments) -> _Found:
    if not arguments.topic:
        raise ConfigError("a key is looked for in a topic: name it")
    from_ms, to_ms = times(visit, arguments.since, arguments.until)
    most = min(visit.config.max_query_messages, MAX_QUERY_MESSAGES)
    async with visit.client(QueryClient) as client:
        found = await client.by_key(
            arguments.topic, arguments.key, from_ms=from_ms, to_ms=to_ms, max_count=most
        )
    cut = f"There are more than these {most:,}: narrow the time." if found.more else ""
    return found.messages, cut, found.notes


async def _by_id(visit: Visit, arguments: MessagesArguments) -> _Found:
    async with visit.client(QueryClient) as client:
        found, notes = await _copies(client, arguments.message_id)
    return found, "", notes


async def _by_offset(visit: Visit, arguments: MessagesArguments) -> _Found:
    async with visit.client(QueryClient) as client:
        found = await client.by_offset(
            arguments.topic,
            max(arguments.queue_id, 0),
            arguments.offset,
            broker_name=arguments.broker_name,
        )
    return [found], "", {}


_Search = Callable[[Visit, MessagesArguments], Awaitable[_Found]]
_WAYS: dict[str, tuple[_Search, str]] = {
    "topic": (_in_topic, "topic"),
    "key": (_by_key, "key"),
    "id": (_by_id, "message_id"),
    "queue": (_by_offset, "topic"),
}
"""How each way searches, and the argument without which it does not."""


def times(visit: Visit, since: str, until: str) -> tuple[int, int]:
    """Return the times that a user wrote, ms since 1970; all times for empty texts.

    Raises:
        ConfigError: One is no time, or the first is behind the other.
    """
    now_ms = visit.clock.wall_ms()
    from_ms = parse_time(since, now_ms, "From") if since else 0
    to_ms = parse_time(until, now_ms, "To") if until else MAX_TIMESTAMP_MS
    if from_ms > to_ms:
        raise ConfigError(f"From {since} is behind To {until}: nothing fits")
    return from_ms, to_ms


def looked_at(looked: int, total: int, narrow: str) -> str:
    """Return why rows are missing, if not all messages were looked at."""
    if looked >= total:
        return ""
    return f"Looked at {looked:,} of {total:,}, the newest of each queue: narrow {narrow}."


def message_row(visit: Visit, message: StoredMessage) -> MessageRow:
    """Return the row of a message in a list."""
    body = bytes(message.body)
    return MessageRow(
        message.message_id,
        message.offset_message_id,
        message.info.topic,
        message.broker_name,
        message.queue_id,
        message.queue_offset,
        message.store_timestamp,
        message.tag or "",
        list(message.keys),
        len(body),
        preview(body) if visit.config.allow_body_view else "",
    )


async def _copies(
    client: QueryClient, message_id: str
) -> tuple[list[StoredMessage], dict[str, str]]:
    if "#" in message_id:
        return [await client.by_offset_id(message_id)], {}
    found = await client.by_id(message_id, max_count=MAX_QUERY_MESSAGES, with_system=True)
    return found.messages, found.notes


async def stored_message(client: QueryClient, message_id: str) -> StoredMessage:
    """Return a message: of its copies, the one in its own topic, else the newest.

    Raises:
        BrokerError: No broker has it.
    """
    found, notes = await _copies(client, message_id)
    if not found:
        why = "; ".join(f"{name}: {note}" for name, note in notes.items())
        raise BrokerError(
            f"no broker has a message with the id {message_id}" + (f" ({why})" if why else ""),
            code=ResponseCode.QUERY_NOT_FOUND,
        )
    own = [one for one in found if one.info.topic == one.topic]
    shown = [one for one in found if one.info.topic != SCHEDULE_TOPIC]
    return (own or shown or found)[0]


async def message(visit: Visit, arguments: MessageArguments) -> MessageDetails:
    """Return one message with its track and trace."""
    async with visit.client(TraceClient) as client:
        found = await stored_message(client, arguments.message_id)
        notes: list[str] = []
        track = await _try(client.track(found.message_id), notes)
        trace = await _try(client.trace(found.message_id), notes)
    tracked = None if track is None else track_view(found.message_id, track)
    spans = [] if trace is None else trace.spans
    for part in (tracked, trace):
        if part is not None:
            notes += (f"{name}: {note}" for name, note in part.notes.items())
    shown = message_view(found)
    begin_ms, end_ms = _bounds(spans)
    return MessageDetails(
        message=msgspec.structs.replace(shown, body=None, body_base64=None),
        body=shown_body(visit, bytes(found.body), arguments.kind),
        copies=[] if tracked is None else tracked.copies,
        due_ms=0 if tracked is None else tracked.due_ms,
        groups=[] if tracked is None else tracked.groups,
        spans=[_timed(one, begin_ms, end_ms) for one in spans],
        lasted_ms=end_ms - begin_ms,
        notes=list(dict.fromkeys(notes)),
    )


async def _try(answer: Awaitable[Any], notes: list[str]) -> Any:
    """Return an answer that the page can do without; why it is missing becomes a note."""
    try:
        return await answer
    except MQMeshError as error:
        notes.append(str(error))
        return None


def shown_body(visit: Visit, body: bytes, kind: str = "") -> BodyView | None:
    """Return the view of a body; None where bodies are not shown."""
    return view_body(body, kind) if visit.config.allow_body_view else None


def check_bodies_shown(visit: Visit) -> None:
    """Check that the console shows bodies.

    Raises:
        NoPermission: ``allow_body_view`` is off.
    """
    if not visit.config.allow_body_view:
        raise NoPermission("this console shows no bodies: allow_body_view = false in its settings")


def _bounds(spans: list[TraceSpan]) -> tuple[int, int]:
    begin_ms = min((one.time_ms for one in spans), default=0)
    return begin_ms, max((one.time_ms + (one.cost_ms or 0) for one in spans), default=0)


def _timed(span: TraceSpan, begin_ms: int, end_ms: int) -> TimedSpan:
    scale = LINE_WIDTH / max(end_ms - begin_ms, 1)
    width = min(max(round((span.cost_ms or 0) * scale), MIN_SPAN_WIDTH), LINE_WIDTH)
    left = min(round((span.time_ms - begin_ms) * scale), LINE_WIDTH - width)
    return TimedSpan(span, left, width)

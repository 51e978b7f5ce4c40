"""Views of messages, and of their states: dead letters, half messages, delays, tracks."""

import base64
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from mqmesh.checksum import crc32
from mqmesh.message import StoredMessage
from mqmesh.protocol.client_rpc import HandedOver
from mqmesh.protocol.retries import ResendStatus
from mqmesh.protocol.transactions import HalfState
from mqmesh.sdk.admin.dead_letters import DeadLetter, GroupDeadLetters
from mqmesh.sdk.admin.delays import DelayedMessage
from mqmesh.sdk.admin.queries import QueryResult
from mqmesh.sdk.admin.traces import MessageSpans, TraceSpan
from mqmesh.sdk.admin.tracks import MessageTrack, Track
from mqmesh.sdk.admin.transaction_admin import HalfMessage, HalfMessages
from mqmesh.sdk.admin.views.fields import view_of
from mqmesh.units import MAX_TIMESTAMP_MS

_HOUR_MS: Final = 3_600_000
AGES: Final = {
    "< 1 hour": _HOUR_MS,
    "< 1 day": 24 * _HOUR_MS,
    "< 7 days": 7 * 24 * _HOUR_MS,
    "< 30 days": 30 * 24 * _HOUR_MS,
    "older": MAX_TIMESTAMP_MS,
}
"""Steps of ages, and up to how many ms each goes."""


class MessageView(msgspec.Struct, frozen=True, kw_only=True):
    """A stored message with all that is known of it.

    Attributes:
        topic: Topic that it was sent to.
        broker_name: Broker group that has it.
        queue_id: Queue, of the physical topic.
        queue_offset: Position in the queue.
        message_id: Its id, the same in all copies.
        tag: None for none.
        keys: Its keys.
        properties: Its properties.
        sharding_key: None for none.
        flag: Number of the sender's.
        born_timestamp: When it was sent, ms since 1970.
        store_timestamp: When the broker stored it, ms since 1970.
        born_host: Where it was sent.
        reconsume_times: How often it was sent back.
        body: Text; None if the body is not UTF-8.
        body_base64: The body that is not UTF-8.
        physical_topic: Topic that it is stored in.
        offset_message_id: Id by broker address and place in the log.
        commitlog_offset: Start of its batch in the log.
        ordinal: Number in its batch.
        store_size: Bytes of its batch.
        store_host: Broker that stored it.
        delay_level: Level of its delay, 0 for none.
        deliver_at_ms: Time of its delivery, 0 for at once.
        body_size: Bytes.
        body_crc32: Checksum of the body.
    """

    topic: str
    broker_name: str
    queue_id: int
    queue_offset: int
    message_id: str
    tag: str | None
    keys: list[str]
    properties: dict[str, str]
    sharding_key: str | None
    flag: int
    born_timestamp: int
    store_timestamp: int
    born_host: str
    reconsume_times: int
    body: str | None
    body_base64: str | None
    physical_topic: str
    offset_message_id: str
    commitlog_offset: int
    ordinal: int
    store_size: int
    store_host: str
    delay_level: int
    deliver_at_ms: int
    body_size: int
    body_crc32: int


class MessagesView(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that a query found.

    Attributes:
        messages: Newest first.
        more: There are more of them.
        notes: Why a broker could not answer, by its name.
    """

    messages: list[MessageView]
    more: bool
    notes: dict[str, str]


class HandedOverView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was handed to a member of a group; as ``HandedOver``."""

    message_id: str
    group: str
    client_id: str
    result: str
    text: str
    took_ms: int


class ReplayView(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay; as ``ReplayResult``.

    Attributes:
        dry_run: Nothing was copied.
    """

    topic: str
    group: str
    into_topic: str
    dry_run: bool
    found: int
    copied: int
    first_ms: int
    last_ms: int
    unreadable: int


class DeadLettersOfGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """Number of a group's dead letters, and store times of the first and the last one, ms."""

    group: str
    dead_letters: int
    oldest_timestamp: int
    newest_timestamp: int


class DeadLetterView(MessageView, frozen=True, kw_only=True):
    """A dead letter.

    Attributes:
        dlq_offset: Its place in the queue of dead letters.
        reason: Its last failure.
        resent_timestamp: When it was resent, ms; 0 for never.
    """

    dlq_offset: int
    reason: str
    resent_timestamp: int


class UndecodableView(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of dead letters that cannot be decoded.

    Attributes:
        broker_name: Broker group that has it.
        dlq_offset: Place of the first one in the queue of dead letters.
        reason: Why it cannot be decoded.
        resent_timestamp: When it was resent, ms; 0 for never.
        message_count: Messages in it.
        batch_base64: The batch, as it is stored.
    """

    broker_name: str
    dlq_offset: int
    reason: str
    resent_timestamp: int
    message_count: int
    batch_base64: str


class DeadLettersView(msgspec.Struct, kw_only=True):
    """Dead letters of a group, and how old they are.

    Attributes:
        dead_letters: The last ones.
        count: All that were found.
        oldest_timestamp: Store time of the first one, ms; 0 for none.
        newest_timestamp: Store time of the last one, ms; 0 for none.
        ages: How many there are of each step of ``AGES``.
    """

    dead_letters: list[DeadLetterView | UndecodableView] = []
    count: int = 0
    oldest_timestamp: int = 0
    newest_timestamp: int = 0
    ages: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(AGES, 0))

    def add(self, letter: DeadLetter, now_ms: int) -> None:
        """Counts a dead letter, and its age unless that is unknown.

        Args:
            letter: Dead letter that was found.
            now_ms: Wall clock.
        """
        self.count += letter.count
        if letter.message is None:
            return
        stored_ms = letter.message.store_timestamp
        age_ms = now_ms - stored_ms
        self.ages[next(name for name, most_ms in AGES.items() if age_ms < most_ms)] += 1
        self.oldest_timestamp = min(self.oldest_timestamp or stored_ms, stored_ms)
        self.newest_timestamp = max(self.newest_timestamp, stored_ms)


class RefusedResendView(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter that a broker did not resend, and why; without an id if it is undecodable."""

    broker_name: str
    dlq_offset: int
    message_id: str | None
    remark: str


class ResentView(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of resent dead letters, by outcome."""

    dry_run: bool
    resent: int = 0
    already_resent: int = 0
    gone: int = 0
    refused: int = 0
    problems: list[RefusedResendView]


class DelayedView(MessageView, frozen=True, kw_only=True):
    """A delayed message that waits.

    Attributes:
        due_ms: When it is due, ms since 1970.
        real_topic: Topic that it goes to then.
    """

    due_ms: int
    real_topic: str


class HalfView(msgspec.Struct, frozen=True, kw_only=True):
    """A half message that waits; as ``HalfInfo``.

    Attributes:
        state: Name of a ``HalfState``.
        topic: Topic that it goes to when it is committed.
        queue_id: Queue of that topic.
        half_queue_offset: Its place in the half topic.
    """

    message_id: str
    state: str
    group: str
    live_members: int
    topic: str
    broker_name: str
    queue_id: int
    store_timestamp: int
    age_ms: int
    check_times: int
    next_check_ms: int
    half_queue_offset: int


class HalfMessageView(MessageView, frozen=True, kw_only=True):
    """A half message with its contents; as ``HalfView``."""

    state: str
    group: str
    live_members: int
    age_ms: int
    check_times: int
    next_check_ms: int
    half_queue_offset: int


class HalfMessagesView(msgspec.Struct, frozen=True, kw_only=True):
    """Half messages that wait, oldest first, and the numbers of all that wait and are parked."""

    pending: int
    parked: int
    messages: list[HalfView]


class CopyView(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a message; as ``MessageView``."""

    topic: str
    physical_topic: str
    broker_name: str
    queue_id: int
    queue_offset: int
    store_timestamp: int
    reconsume_times: int
    offset_message_id: str


class TrackView(msgspec.Struct, frozen=True, kw_only=True):
    """Track of a message.

    Attributes:
        message_id: Its id.
        due_ms: When it is delivered, of a delayed one, ms since 1970; else 0.
        copies: Its copies, oldest first.
        groups: State of the message in each group.
        notes: Why a broker could not answer, by its name.
    """

    message_id: str
    due_ms: int
    copies: list[CopyView]
    groups: list[Track]
    notes: dict[str, str]


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """Trace of a message; as ``MessageSpans``.

    Attributes:
        track: Track of the message, None if there is a trace, or no copy of it; absent in lists.
    """

    message_id: str
    spans: list[TraceSpan]
    notes: dict[str, str]
    strange: int
    track: TrackView | UnsetType | None = UNSET


class ReceivedMessageView(MessageView, frozen=True, kw_only=True):
    """A message that a simple consumer received.

    Attributes:
        delivery_attempt: How often it was delivered to the group, this time included.
        receipt: Name of the delivery.
    """

    delivery_attempt: int
    receipt: str


def received_view(message: StoredMessage) -> ReceivedMessageView:
    """Makes the view of a message that a simple consumer received."""
    return ReceivedMessageView(
        **msgspec.structs.asdict(message_view(message)),
        delivery_attempt=message.delivery_attempt,
        receipt=message.receipt,
    )


def message_view(message: StoredMessage) -> MessageView:
    """Makes the view of a message."""
    return view_of(MessageView, message, **_of_message(message))


def _of_message(message: StoredMessage) -> dict[str, Any]:
    """Returns the fields of a view that are no attributes of the message."""
    body = message.body
    try:
        text: str | None = body.decode()
    except UnicodeDecodeError:
        text = None
    return {
        "keys": list(message.keys),
        "properties": message.properties or {},
        "body": text,
        "body_base64": base64.b64encode(body).decode() if text is None else None,
        "physical_topic": message.info.topic,
        "body_size": len(body),
        "body_crc32": crc32(body),
    }


def messages_view(result: QueryResult) -> MessagesView:
    """Makes the view of a query's result."""
    return view_of(MessagesView, result, messages=[message_view(one) for one in result.messages])


def handed_over_view(
    message_id: str, group: str, client_id: str, result: HandedOver
) -> HandedOverView:
    """Makes the view of a message that was handed to a member."""
    return view_of(HandedOverView, result, message_id=message_id, group=group, client_id=client_id)


def dead_letter_view(letter: DeadLetter) -> DeadLetterView | UndecodableView:
    """Makes the view of a dead letter, or of a batch that cannot be decoded."""
    head: dict[str, Any] = {
        "broker_name": letter.broker_name,
        "dlq_offset": letter.queue_offset,
        "reason": letter.reason,
        "resent_timestamp": letter.resent_ms,
    }
    if letter.message is None:
        return UndecodableView(
            message_count=letter.count,
            batch_base64=base64.b64encode(letter.undecodable).decode(),
            **head,
        )
    return view_of(DeadLetterView, letter.message, **_of_message(letter.message) | head)


def dead_letter_groups(groups: Mapping[str, GroupDeadLetters]) -> list[DeadLettersOfGroupView]:
    """Makes views of the groups that have dead letters, by name."""
    return [
        DeadLettersOfGroupView(
            group=group,
            dead_letters=one.count,
            oldest_timestamp=one.oldest_ms,
            newest_timestamp=one.newest_ms,
        )
        for group, one in sorted(groups.items())
    ]


def resent_view(
    counts: Counter[ResendStatus], problems: Iterable[tuple[DeadLetter, str]], *, dry_run: bool
) -> ResentView:
    """Makes the view of a resend.

    Args:
        counts: How many dead letters there were of each outcome.
        problems: Those that were refused, and why.
        dry_run: Nothing was resent.
    """
    refused = [
        RefusedResendView(
            broker_name=letter.broker_name,
            dlq_offset=letter.queue_offset,
            message_id=letter.message.message_id if letter.message else None,
            remark=remark,
        )
        for letter, remark in problems
    ]
    numbers = {status.name.lower(): counts[status] for status in ResendStatus}
    return ResentView(dry_run=dry_run, problems=refused, **numbers)


def delayed_view(delayed: DelayedMessage) -> DelayedView:
    """Makes the view of a delayed message."""
    fields = _of_message(delayed.message)
    return view_of(
        DelayedView, delayed.message, due_ms=delayed.due_ms, real_topic=delayed.real_topic, **fields
    )


def half_view(half: HalfMessage) -> HalfView:
    """Makes the view of a half message."""
    return view_of(
        HalfView,
        half.info,
        state=HalfState(half.info.state).name,
        broker_name=half.broker_name,
        half_queue_offset=half.info.queue_offset,
    )


def half_messages_view(found: HalfMessages) -> HalfMessagesView:
    """Makes the view of half messages that wait."""
    return HalfMessagesView(
        pending=found.pending_count,
        parked=found.parked_count,
        messages=[half_view(one) for one in found.messages],
    )


def half_message_view(half: HalfMessage) -> HalfMessageView:
    """Makes the view of a half message with its contents.

    Args:
        half: Half message, as ``TransactionAdmin.half_message`` returns it.
    """
    message = half.message
    assert message is not None, "it was asked for with its contents"
    state = msgspec.structs.asdict(half_view(half))
    return view_of(HalfMessageView, message, **_of_message(message) | state)


def track_view(message_id: str, found: MessageTrack) -> TrackView:
    """Makes the view of a message's track."""
    copies = [
        view_of(CopyView, one, physical_topic=one.info.topic) for one in reversed(found.copies)
    ]
    return view_of(TrackView, found, message_id=message_id, copies=copies, groups=found.tracks)


def trace_view(found: MessageSpans, track: MessageTrack | None) -> TraceView:
    """Makes the view of a message's trace, with its track if there is none."""
    shown = None if track is None else track_view(found.message_id, track)
    return view_of(TraceView, found, track=shown)


def trace_views(found: Iterable[MessageSpans]) -> list[TraceView]:
    """Makes views of the traces of several messages."""
    return [view_of(TraceView, one, track=UNSET) for one in found]

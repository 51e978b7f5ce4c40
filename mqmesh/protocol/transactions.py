"""END_TRANSACTION, CHECK_TRANSACTION_STATE, and the words about half messages that wait.

The body of END_TRANSACTION is 1 to 65,536 entries of 56 bytes, ``<qQQIIB7x16s``: queue offset of
the half batch i64, its producer id u64, its first sequence u64, ordinal of the first message
u32, number of messages u32, decision u8, and the proof that the sender may decide, 16 bytes. The
body of the answer is one byte an entry, an ``EndOutcome``.
"""

import enum
import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import Offset
from mqmesh.protocol.route import Name

MAX_ENDS_PER_REQUEST: Final = 65_536
MAX_LISTED: Final = 10_000

_ENTRY = struct.Struct("<qQQIIB7x16s")


class Decision(enum.IntEnum):
    """Decisions that end a transaction. On the wire and on disk."""

    COMMIT = 1
    """The messages go to their real topic."""
    ROLLBACK = 2
    """No consumer ever sees the messages."""


class EndOutcome(enum.IntEnum):
    """Outcomes of an end. On the wire."""

    ENDED = 0
    """All messages have ended as decided."""
    ENDED_BEFORE = 1
    """All messages had ended so before."""
    DECIDED_OTHERWISE = 2
    """Some messages had ended the other way before."""
    NOT_PENDING = 3
    """No such half messages wait: they ended so long ago that the broker has forgotten how, or
    never existed."""
    TOPIC_GONE = 4
    """The topic does not exist any more, so that they cannot be committed."""
    AGAIN = 5
    """The same, or with ``SYNC_FLUSH`` the half message, is being written; ask again in a moment.
    """
    NOT_PROVEN = 6
    """The proof is neither the producer's key nor a token of this life of the broker."""


class HalfState(enum.IntEnum):
    """States of a half message. On the wire."""

    PENDING = 0
    """Not decided yet."""
    PARKED = 1
    """Checked as often as allowed, in vain; the broker checks it no more."""


class End(msgspec.Struct, frozen=True, gc=False):
    """The end of a run of half messages of one batch.

    Attributes:
        base_queue_offset: Queue offset of the half batch.
        producer_id: Its producer's instance id.
        first_sequence: Sequence of its first message.
        first: Ordinal of the run's first message.
        count: Messages in the run.
        decision: ``Decision`` as a number.
        proof: The instance key of the half batch's producer, or the token of the
            CHECK_TRANSACTION_STATE that is answered: 16 bytes, never to be logged.
    """

    base_queue_offset: int
    producer_id: int
    first_sequence: int
    first: int
    count: int
    decision: int
    proof: bytes = b""

    def __repr__(self) -> str:
        """Return a text for people, without the proof, which must stay secret."""
        return (
            f"End({self.base_queue_offset}, {self.producer_id:#x}, {self.first_sequence}, "
            f"{self.first}, {self.count}, {self.decision})"
        )


class EndTransactionRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """END_TRANSACTION: the producer, or any member of its group that got a check, decides about
    half messages.

    The body is 1 to 65,536 entries of 56 bytes, little endian: ``base_queue_offset`` i64 of the
    half batch (from the answer of SEND_MESSAGE, or from CHECK_TRANSACTION_STATE), ``producer_id``
    u64 and ``first_sequence`` u64 of that batch, ``first`` u32 (ordinal in the batch), ``count``
    u32, ``decision`` u8 (``Decision``), 7 bytes of zero, and 16 bytes of proof: the instance key of
    the producer that sent the half messages, or the ``token`` of the CHECK_TRANSACTION_STATE that
    is answered.

    The answer comes when the decisions are stored, and with them the messages that they commit; its
    body is one byte an entry, an ``EndOutcome``. Repeating the request is harmless.

    Attributes:
        group: Producer group.

    Errors:
        SERVICE_NOT_AVAILABLE: Nothing was decided.
        DISK_FULL: Nothing was decided.
        SYSTEM_BUSY: Nothing was decided.
        MESSAGE_ILLEGAL: Entries that cannot be.
    """

    group: GroupName


class EndTransactionResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Header of the answer to END_TRANSACTION and END_HALF_MESSAGE.

    Attributes:
        status: ``SendStatus`` as a number: how safe the stored decisions are.
    """

    status: int = 0


class CheckTransactionState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CHECK_TRANSACTION_STATE: from a broker to one member of a producer group, oneway: how did
    these local transactions end?

    The body is the half batch, or the part of it that matters; a record batch. The client answers
    by END_TRANSACTION, and sends nothing about those it does not know: the broker sends another
    check later, to this member or another one.

    Attributes:
        group: Producer group.
        base_queue_offset: Queue offset of the half batch.
        ordinals: Messages of it that wait for a decision.
        check_times: Number of checks of them, with this one.
        first_ordinal: Ordinal of the first message in the body.
        token: Proof for the answer that its sender got this check, 16 bytes; valid until the broker
            stops.
    """

    group: GroupName
    base_queue_offset: Offset
    ordinals: Annotated[list[int], msgspec.Meta(max_length=65_536)]
    check_times: int
    first_ordinal: int
    token: Annotated[bytes, msgspec.Meta(max_length=16)]


class ListHalfMessagesRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """LIST_HALF_MESSAGES: half messages that wait for their decision, oldest first.

    Attributes:
        group: Only of this producer group; empty for all.
        topic: Only for this topic; empty for all.
        min_age_ms: Only those that are at least so old.
        parked: Only parked ones.
        max_count: Messages to list.
        namespace: Only messages of this one, also where they are counted; "" for all that the user
            may see.
    """

    group: GroupName = ""
    topic: TopicName = ""
    min_age_ms: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    parked: bool = False
    max_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)] = 100
    namespace: Name = ""


class HalfInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A half message that waits.

    Attributes:
        message_id: 32 hex digits.
        group: Producer group.
        topic: Where it goes when it is committed.
        queue_id: Queue of that topic.
        store_timestamp: When the broker stored it, ms.
        age_ms: How long ago that was.
        check_times: Number of checks that were sent to members of the group.
        next_check_ms: Time until the next check, ms; -1 if there is none.
        state: ``HalfState`` as a number.
        queue_offset: Position in the half topic.
        live_members: Members of the group that a check could be sent to now.
    """

    message_id: str
    group: GroupName
    topic: TopicName
    queue_id: int
    store_timestamp: int
    age_ms: int
    check_times: int
    next_check_ms: int
    state: int
    queue_offset: int
    live_members: int = 0


class HalfList(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to LIST_HALF_MESSAGES.

    Attributes:
        messages: Oldest first.
        pending_count: All that wait at this broker and are not parked.
        parked_count: All that are.
    """

    messages: Annotated[list[HalfInfo], msgspec.Meta(max_length=MAX_LISTED)]
    pending_count: int = 0
    parked_count: int = 0


class ViewHalfMessageRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """VIEW_HALF_MESSAGE: one half message that waits; the answer's body is a record batch of that
    message.

    Attributes:
        message_id: 32 hex digits.

    Errors:
        QUERY_NOT_FOUND: No such half message waits here.
        MESSAGE_ILLEGAL: No message id.
    """

    message_id: Annotated[str, msgspec.Meta(max_length=32)]


class EndHalfMessageRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """END_HALF_MESSAGE: an administrator decides about a half message that waits, parked or not;
    answered as END_TRANSACTION of one entry.

    Attributes:
        message_id: 32 hex digits.
        decision: ``Decision`` as a number.

    Errors:
        QUERY_NOT_FOUND: No such half message waits here.
        SERVICE_NOT_AVAILABLE: Nothing was decided.
        DISK_FULL: Nothing was decided.
        SYSTEM_BUSY: Nothing was decided.
    """

    message_id: Annotated[str, msgspec.Meta(max_length=32)]
    decision: Annotated[int, msgspec.Meta(ge=1, le=2)]


def encode_ends(ends: Sequence[End]) -> bytes:
    """Encodes the body of END_TRANSACTION."""
    return b"".join(
        [
            _ENTRY.pack(
                one.base_queue_offset,
                one.producer_id,
                one.first_sequence,
                one.first,
                one.count,
                one.decision,
                one.proof,
            )
            for one in ends
        ]
    )


def decode_ends(body: bytes | memoryview) -> list[End]:
    """Decodes the body of END_TRANSACTION.

    Raises:
        RemoteProtocolError: A wrong size, no message, or an unknown decision.
    """
    if not len(body) or len(body) % _ENTRY.size or len(body) > _ENTRY.size * MAX_ENDS_PER_REQUEST:
        raise RemoteProtocolError(
            f"{len(body)} bytes are no array of 1 to {MAX_ENDS_PER_REQUEST} ends of {_ENTRY.size}"
        )
    ends = [End(*entry) for entry in _ENTRY.iter_unpack(body)]
    for one in ends:
        if one.decision not in (1, 2) or not 0 < one.count <= 65_536 or one.base_queue_offset < 0:
            raise RemoteProtocolError(f"an end that cannot be: {one}")
    return ends


def encode_end_outcomes(outcomes: Sequence[EndOutcome]) -> bytes:
    """Encodes the body of the answer to END_TRANSACTION."""
    return bytes(outcomes)


def decode_end_outcomes(body: bytes | memoryview, count: int) -> list[EndOutcome]:
    """Decodes the body of the answer to END_TRANSACTION.

    Raises:
        RemoteProtocolError: Another number of outcomes, or an unknown one.
    """
    if len(body) != count:
        raise RemoteProtocolError(f"{len(body)} outcomes of {count} ends")
    try:
        return [EndOutcome(one) for one in bytes(body)]
    except ValueError as error:
        raise RemoteProtocolError(f"an unknown outcome of an end: {error}") from error

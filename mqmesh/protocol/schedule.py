"""Structs of a broker and its schedule service, and the cancelling of delayed messages.

The service opens a session; from then on the broker refuses late requests of earlier
sessions. It pulls the index entries of ``SCHEDULE_TOPIC_XXXX``, keeps the timetable, and
reports to the broker which messages are due. Bodies never leave the broker.
"""

from typing import Annotated, Final

import msgspec

from mqmesh.protocol.names import GroupName
from mqmesh.protocol.route import Epoch
from mqmesh.units import MAX_OFFSET, MAX_TIMESTAMP_MS

MAX_RUNS: Final = 16_384
"""Runs in one DELIVER_DUE."""
MAX_CURSORS: Final = 256
MAX_RETRY_GROUPS: Final = 256
"""Groups in one PULL_SCHEDULE."""

_Offset = Annotated[int, msgspec.Meta(ge=-1, le=MAX_OFFSET)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIMESTAMP_MS)]
_Cursors = Annotated[list[_Offset], msgspec.Meta(max_length=MAX_CURSORS)]


class OpenScheduleRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """OPEN_SCHEDULE: begins a session of a schedule service; requests of earlier sessions are
    refused from then on.

    Attributes:
        service: Its name, for people.
    """

    service: Annotated[str, msgspec.Meta(max_length=255)] = ""


class OpenScheduleResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to OPEN_SCHEDULE: the data that a service needs to begin.

    Attributes:
        session: To be repeated in its requests.
        store_id: Of the store; a timetable belongs to one store.
        epoch: Of the log now; a new timetable begins with it. 0 if the store does not know.
        now_ms: The broker's wall clock.
    """

    session: int
    store_id: int
    epoch: int
    now_ms: _Time


class WaitingRetries(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of a consumer group that wait for a retry.

    Attributes:
        group: Consumer group.
        count: How many.
        oldest_offset: Commit-log offset of the oldest batch with one of them; -1 for none.
    """

    group: GroupName
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
    oldest_offset: _Offset = -1


class PullScheduleRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PULL_SCHEDULE: delayed messages that were stored behind the cursors, and the place from which
    the broker keeps its log.

    Sent after NOTIFY_SCHEDULE, and once a second in any case.

    Attributes:
        session: Of the service.
        cursors: Next queue offset of each queue, by queue id.
        lowest_offset: Commit-log offset of the oldest batch with a message that waits, -1 for none:
            the log is kept from there. Says something only when ``caught_up``.
        caught_up: The timetable knows everything up to the cursors.
        pending: Messages that wait, for people; -1 for unknown.
        epoch: Of the log when the cursors were right: the one of the last answer, or saved beside
            the timetable; 0 if it does not know.
        settled: Next offset of the record queue, behind the newest record whose effect the
            timetable holds; counts where it is ahead of that queue's cursor.
        retries: Messages that wait for a retry, of groups whose number changed.
        is_anew: Numbers of groups that were reported before count no more.

    Errors:
        SERVICE_NOT_AVAILABLE: The session is over.
        OFFSET_ILLEGAL: A queue ends before its cursor, or the log lost its end since ``epoch``: the
            timetable is made anew.
    """

    session: int
    cursors: _Cursors
    lowest_offset: _Offset = -1
    caught_up: bool = False
    pending: int = -1
    epoch: Epoch = 0
    settled: _Offset = 0
    retries: Annotated[list[WaitingRetries], msgspec.Meta(max_length=MAX_RETRY_GROUPS)] = []
    is_anew: bool = False


class ScheduledEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A batch in the schedule topic, without its bodies.

    Attributes:
        commitlog_offset: Where it begins.
        message_count: Messages.
        producer_id: First half of their ids.
        first_sequence: Second half of the first message's id; the others follow by one.
        due_times: As in ``delayed_batch.DelayedMeta``: one for all, or one a message.
        retry_group: Consumer group whose retries they are; empty for messages of producers.
    """

    commitlog_offset: int
    message_count: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    producer_id: int
    first_sequence: int
    due_times: bytes
    retry_group: GroupName = ""


class PullScheduleResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to PULL_SCHEDULE.

    Attributes:
        now_ms: The broker's wall clock.
        cursors: Where to go on.
        entries: Batches that came.
        records: Bodies of records (``schedule_record.py``), in their order. They stand behind
            the entries that they speak of: none comes while there are more entries.
        more: Pull again at once.
        start_offset: Commit-log offset before which nothing is left.
        roll_before: Retention wants to remove the log before this; 0 for no wish.
        epoch: Of the log now; the next pull carries it. 0 if the store does not know.
    """

    now_ms: _Time
    cursors: _Cursors
    entries: list[ScheduledEntry]
    records: list[bytes]
    more: bool
    start_offset: _Offset
    roll_before: _Offset = 0
    epoch: Epoch = 0


class DueStatus:
    """Outcomes of a run; one byte each in the answer. On the wire."""

    DONE: Final = 0
    GONE: Final = 1
    """The run cannot be read any more, and never will be."""
    NOT_DUE: Final = 2
    """The run is not due by the broker's clock."""


class DeliverDueRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """DELIVER_DUE: delivers, cancels or rolls forward delayed messages.

    The body is 1 to 16,384 runs of 16 bytes, ``<QII``: commit-log offset of the batch u64, ordinal
    of the first message u32, number of messages u32. The broker checks by its own clock that they
    are due, stores them and a record of it all or none, and answers when that is stored. A request
    takes a few milliseconds of it; runs that are left over are not in the answer. After an error
    nothing was stored; only of a batch that becomes more than one group of the log the first parts
    may be.

    Attributes:
        session: Of the service.
        action: ``schedule_record.Action``.
        ticket: Of the CANCEL_DELAYED that this carries out, 0 for none.

    Errors:
        SERVICE_NOT_AVAILABLE: The session is over.
        MESSAGE_ILLEGAL: Runs that cannot be.
        DISK_FULL: No room to write.
        SYSTEM_BUSY: Flow control.
    """

    session: int
    action: Annotated[int, msgspec.Meta(ge=1, le=255)]
    ticket: int = 0


class DeliverDueResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to DELIVER_DUE.

    Attributes:
        now_ms: The broker's wall clock.
        statuses: ``DueStatus``, one byte a run, in order. The runs behind were not looked at,
            so that others have their turn: ask again.
        record_offset: Queue offset of the record that was stored, -1 for none.
    """

    now_ms: _Time
    statuses: bytes
    record_offset: _Offset = -1


class CancelDelayedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CANCEL_DELAYED: cancels one delayed message; answered with an empty header once that is
    stored.

    Attributes:
        producer_id: First half of the message's id, u64.
        sequence: Second half, u64.

    Errors:
        CANCEL_REFUSED: Delivered or cancelled before, or being delivered.
        QUERY_NOT_FOUND: Unknown here.
        NO_PERMISSION: Of the topic that the message is for, once the service has found it.
        SERVICE_NOT_AVAILABLE: No schedule service, or no answer from it within 3 s.
    """

    producer_id: Annotated[int, msgspec.Meta(ge=0)]
    sequence: Annotated[int, msgspec.Meta(ge=0)]


class ScheduleNews(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """NOTIFY_SCHEDULE: from a broker to its schedule service, oneway: pull again, or look whether
    this message can be cancelled.

    Attributes:
        ticket: Of a CANCEL_DELAYED that the service is to look at, 0 for "pull again".
        producer_id: First half of the id of the message to be cancelled.
        sequence: Second half.
    """

    ticket: int = 0
    producer_id: int = 0
    sequence: int = 0


class CancelVerdict:
    """Reasons why a message cannot be cancelled. On the wire."""

    UNKNOWN: Final = 1
    OVER: Final = 2
    """The message was delivered or cancelled before."""
    LEAVING: Final = 3
    """The message is being delivered just now."""


class RefuseCancelRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REFUSE_CANCEL: from the schedule service to its broker, oneway: a message cannot be
    cancelled.

    Attributes:
        session: Of the service.
        ticket: Of the CANCEL_DELAYED.
        verdict: ``CancelVerdict``.
    """

    session: int
    ticket: int
    verdict: Annotated[int, msgspec.Meta(ge=0, le=255)]

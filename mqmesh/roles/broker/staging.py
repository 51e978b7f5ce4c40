"""Sends on their way: gathered during a tick for one write, then answered.

Many producers share one sync: see ``commit_point``. Pure: the store's results are given to it.
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from mqmesh.batch.record_batch import Attributes
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.protocol.request import PendingReply
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus

Outcomes = Callable[[list[BatchOutcome]], None]
"""Function that is called with the outcomes of batches, one each."""

_OK: Final = int(ResponseCode.SUCCESS)
_NO_WAIT_STORE: Final = int(Attributes.NO_WAIT_STORE)
_ILLEGAL: Final = int(ResponseCode.MESSAGE_ILLEGAL)
_CONFLICT: Final = int(ResponseCode.SEQUENCE_CONFLICT)
_BUSY: Final = int(ResponseCode.SYSTEM_BUSY)
NEW_PRODUCER_RETRY_MS: Final = 1_000
"""When a producer that there was no room for may try again."""


class OpenSend(msgspec.Struct, eq=False):
    """A SEND_MESSAGE that was not answered yet.

    Attributes:
        pending: Answer that it waits for; None for what the broker itself sends.
        outcomes: One a batch, in the request's order; None where the store decides.
        end_offset: It may be answered once the log is safe to here.
        on_stored: Called instead of an answer, when nobody waits for one.
        is_asked: A client waits for what ``on_stored`` does.
    """

    pending: PendingReply | None
    outcomes: list[BatchOutcome | None]
    end_offset: int = 0
    on_stored: Outcomes | None = None
    is_asked: bool = False


class SendStage(msgspec.Struct, eq=False):
    """Batches to be written at the end of this tick.

    Attributes:
        batches: Batches to put, in order.
        sends: Sends that they belong to, in the same order.
        staged_bytes: Size of the batches.
    """

    batches: list[BatchToPut] = []
    sends: list[OpenSend] = []
    staged_bytes: int = 0


def fill_in(
    sends: Sequence[OpenSend], batches: Sequence[BatchToPut], results: Sequence[PutResult]
) -> None:
    """Gives sends the outcomes that the store decided.

    Args:
        sends: As staged.
        batches: One for each None in their outcomes, in order.
        results: Result of each batch, from the store.
    """
    position = 0
    for send in sends:
        outcomes = send.outcomes
        for index, outcome in enumerate(outcomes):
            if outcome is None:
                result = results[position]
                waits = not batches[position].header.attributes & _NO_WAIT_STORE
                if result.base_queue_offset < 0:
                    outcomes[index] = refusal_of(batches[position], result)
                else:
                    outcomes[index] = BatchOutcome(
                        _OK,
                        0,
                        0,
                        result.base_queue_offset,
                        result.commitlog_offset,
                        result.store_timestamp,
                    )
                position += 1
                if waits and result.end_offset > send.end_offset:
                    send.end_offset = result.end_offset


def fill_in_refusal(sends: Sequence[OpenSend], refusal: BatchOutcome) -> None:
    """Gives sends the outcome that nothing was stored."""
    for send in sends:
        send.outcomes = [refusal if outcome is None else outcome for outcome in send.outcomes]


def fill_in_status(send: OpenSend, status: SendStatus) -> None:
    """Note that a stored send still lacks a copy or a sync."""
    send.outcomes = [
        msgspec.structs.replace(outcome, status=int(status))
        if outcome is not None and outcome.code == _OK
        else outcome
        for outcome in send.outcomes
    ]


def refusal_of(batch: BatchToPut, result: PutResult) -> BatchOutcome:
    """Return the outcome of a batch that the store has refused."""
    if result.status is PutStatus.SEQUENCE_CONFLICT:
        header = batch.header
        return BatchOutcome(
            _CONFLICT,
            remark=f"producer {header.producer_id:016X} sent sequences {header.first_sequence} to "
            f"{header.first_sequence + header.message_count - 1} to queue {batch.queue_id} of "
            f"{batch.topic!r} before, with other content; does it run twice, on a cloned machine?",
        )
    if result.status is PutStatus.TOO_MANY_PRODUCERS:
        return BatchOutcome(
            _BUSY,
            retry_after_ms=NEW_PRODUCER_RETRY_MS,
            remark="too many producers and queues are remembered for repetitions "
            "(storage.max_producer_states, storage.producer_state_min_age_ms)",
        )
    assert result.status is PutStatus.MESSAGE_ILLEGAL
    return BatchOutcome(_ILLEGAL, remark="the batch is larger than a segment of the log")

"""Half messages: ended, asked about, and shown to administrators.

What is decided during a tick is written at its end, at once: a batch of op records and,
behind it, what they commit. Nobody is answered before that is stored.
"""

import logging
from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.half_batch import HALF_QUEUE
from mqmesh.batch.payload import split_payload
from mqmesh.batch.record_batch import read_header, read_payload
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    MQMeshError,
    StorageError,
)
from mqmesh.message import (
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
    format_message_id,
    parse_message_id,
)
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.command import (
    Reply,
    Request,
    encode_header,
    reply_with,
)
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.transactions import (
    CheckTransactionState,
    Decision,
    End,
    EndHalfMessageRequest,
    EndOutcome,
    EndTransactionRequest,
    EndTransactionResponse,
    HalfInfo,
    HalfList,
    HalfState,
    ListHalfMessagesRequest,
    ViewHalfMessageRequest,
    decode_ends,
    encode_end_outcomes,
)
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.storing.inner_send import ensure_topic, inner_send
from mqmesh.roles.broker.features.storing.storing import finish_sends
from mqmesh.roles.broker.features.topics.topics import TopicTable
from mqmesh.roles.broker.features.transactions.check_timetable import Check, Park, Watch
from mqmesh.roles.broker.features.transactions.half_batches import PARKED, PENDING, HalfBatch
from mqmesh.roles.broker.features.transactions.op_records import Op, OpKind, encode_ops, runs_of
from mqmesh.roles.broker.features.transactions.transaction_desk import (
    MAX_STAGED_BYTES,
    MAX_STAGED_RUNS,
    Flight,
    OpenEnd,
)
from mqmesh.roles.broker.features.transactions.transaction_recovery import copy_of
from mqmesh.roles.broker.features.transactions.transaction_table import DecidedRun
from mqmesh.units import MIB, CommitLogOffset

MAX_CHECK_BYTES: Final = 4 * MIB
"""A larger half batch is asked about message by message."""
_OK: Final = int(ResponseCode.SUCCESS)
_KIND_OF: Final = {Decision.COMMIT: OpKind.COMMIT, Decision.ROLLBACK: OpKind.ROLLBACK}

_log = logging.getLogger(__name__)


# ---- Decisions ----------------------------------------------------------------------------


def end_transaction(
    context: BrokerContext, request: Request, asked: EndTransactionRequest
) -> Reply | None:
    """A producer decides about half messages; answered when that is stored."""
    return _decide(context, request, decode_ends(request.command.body), asked.group)


def end_half_message(
    context: BrokerContext, request: Request, asked: EndHalfMessageRequest
) -> Reply | None:
    """An administrator decides about a half message."""
    half, ordinal = _find(context, asked.message_id)
    end = End(half.base, half.producer_id, half.first_sequence, ordinal, 1, asked.decision)
    _log.warning("an administrator ends half message %s: %s", asked.message_id, end.decision)
    return _decide(context, request, [end])


def _decide(
    context: BrokerContext, request: Request, ends: list[End], group: str | None = None
) -> Reply | None:
    desk = context.transactions
    if desk.torn:
        raise BrokerNotAvailable("commits that a crash cut off could not be written again yet")
    table = desk.table
    opened = OpenEnd(request.without_frame(), [], [])
    may_commit = partial(has_queue, context.topics)
    safe_offset = context.commit_point.shown_offset()
    halves = [table.batches.get(end.base_queue_offset) for end in ends]
    for topic in {half.topic for half in halves if half is not None}:
        context.wire.permit(request, topic)  # of all, before anything is decided
    for end, half in zip(ends, halves, strict=True):
        before = table.staged_total
        if group is not None and not desk.proofs.holds(end):
            outcome = EndOutcome.NOT_PROVEN
        elif end.decision == Decision.COMMIT and half is not None and half.end_offset > safe_offset:
            outcome = EndOutcome.AGAIN
        else:
            outcome = table.decide(end, may_commit, group)
        opened.outcomes.append(outcome)
        opened.bases.append(end.base_queue_offset)
        if table.staged_total != before and (not desk.opens or desk.opens[-1] is not opened):
            desk.opens.append(opened)
        if table.staged_bytes >= MAX_STAGED_BYTES or table.staged_count >= MAX_STAGED_RUNS:
            finish_transactions(context)
            finish_sends(context)
    opened.complete = True
    if opened.flights or (desk.opens and desk.opens[-1] is opened):
        return None
    if opened.error is not None:
        raise opened.error
    return _answer_of(context, opened)


def finish_transactions(context: BrokerContext) -> None:
    """Hands what was decided during the tick to the store; before ``finish_sends``."""
    desk = context.transactions
    if not desk.has_work:
        return
    opens, desk.opens = desk.opens, []
    parks, desk.parks = desk.parks, []
    further, desk.ops = desk.ops, []
    runs, ops, copies = _copies(context, desk.table.take(), parks, opens)
    ops += further
    for opened in opens:
        opened.flights += 1
    if not ops:
        _landed(context, Flight([], [], 0, opens), None, 0)
        return
    ops_batch = encode_ops(
        ops,
        producer_id=context.instance_id,
        first_sequence=desk.next_sequence,
        born_timestamp=context.clock.wall_ms(),
    )
    op_count = read_header(ops_batch).message_count
    desk.next_sequence += op_count
    flight = Flight(runs, parks, op_count, opens)

    def on_stored(outcomes: list[BatchOutcome]) -> None:
        bad = next((one for one in outcomes if one.code != _OK), None)
        error = error_of(bad.code, bad.remark, bad.retry_after_ms) if bad is not None else None
        _landed(context, flight, error, max(one.status for one in outcomes))

    try:
        ensure_topic(context, TRANS_OP_HALF_TOPIC)
        inner_send(context, [ops_batch, *copies], on_stored)
    except MQMeshError as error:
        _landed(context, flight, error, 0)


def _copies(
    context: BrokerContext, runs: list[DecidedRun], parks: list[Park], opens: list[OpenEnd]
) -> tuple[list[DecidedRun], list[Op], list[bytes]]:
    """Makes the op records of decisions and of what is parked, and the batches beside them.

    Returns:
        The decisions that can be written, the records, and the batches.
    """
    good: list[DecidedRun] = []
    ops: list[Op] = []
    copies: list[bytes] = []
    source: _HalfSource | None = None
    wanted: list[tuple[HalfBatch, Op, DecidedRun | None]] = [
        (run.batch, _op_of(run), run) for run in runs
    ]
    for park in parks:
        for first, count in runs_of(park.ordinals):
            op = Op(park.batch.base, first, count, OpKind.PARK, park.check_times)
            wanted.append((park.batch, op, None))
    for half, op, run in wanted:
        if op.kind != OpKind.ROLLBACK:
            try:
                if source is None or source.half is not half:
                    source = _HalfSource(context, half)
                copies.append(source.copy(op))
            except MQMeshError as error:
                # Retention took the half messages, or the disk damaged them.
                if run is not None:
                    context.transactions.table.failed([run])
                    for opened in opens:
                        opened.lose(half.base)
                context.transactions.lose(half, str(error))
                continue
        ops.append(op)
        if run is not None:
            good.append(run)
    return good, ops, copies


class _HalfSource:
    """A half batch that copies are made of; taken apart once, however many they are."""

    def __init__(self, context: BrokerContext, half: HalfBatch) -> None:
        self.half = half
        self._data = context.store.read_at(CommitLogOffset(half.commitlog_offset))
        self._header = read_header(self._data)
        self._raws: list[msgspec.Raw] | None = None

    def copy(self, op: Op) -> bytes:
        """The messages of a record."""
        if self._raws is None and op.count < self._header.message_count:
            self._raws = split_payload(read_payload(self._data, self._header))
        copy = copy_of(op, self._header, self._data, self._raws)
        assert copy is not None
        return copy


def _op_of(run: DecidedRun) -> Op:
    return Op(run.batch.base, run.first, run.count, _KIND_OF[Decision(run.decision)])


def _landed(context: BrokerContext, flight: Flight, error: MQMeshError | None, status: int) -> None:
    """What was handed to the store is in the log, or was refused."""
    desk = context.transactions
    if error is None:
        desk.table.op_end += flight.op_count
        desk.table.stored(flight.runs)
        now_ms = context.clock.wall_ms()
        for run in flight.runs:
            desk.count_end(run, now_ms)
        for park in flight.parks:
            _log.error(
                "%d half messages of producer group %s for topic %s, from %s on, were asked about "
                "%d times in vain; they are parked (`mqmesh tx list --parked`)",
                len(park.ordinals),
                park.batch.group,
                park.batch.topic,
                format_message_id(
                    park.batch.producer_id, park.batch.first_sequence + park.ordinals[0]
                ),
                park.check_times,
            )
            for forgotten in desk.table.parked_or_not(park, stored=True):
                _log.error("too many parked half messages: those at %d go", forgotten.base)
    else:
        _log.warning("decisions about half messages could not be stored: %s", error)
        desk.table.failed(flight.runs)
        for park in flight.parks:
            desk.table.parked_or_not(park, stored=False)
    for opened in flight.opens:
        opened.flights -= 1
        opened.error = opened.error or error
        opened.status = max(opened.status, status)
        if opened.complete and not opened.flights:
            if opened.error is not None:
                desk.refused += len(opened.outcomes)
                context.wire.fail(opened.request, opened.error)
            else:
                context.wire.reply(opened.request, _answer_of(context, opened))


def _answer_of(context: BrokerContext, opened: OpenEnd) -> Reply:
    desk = context.transactions
    outcomes = opened.outcomes
    desk.refused += sum(one > EndOutcome.ENDED_BEFORE for one in outcomes)
    header = encode_header(EndTransactionResponse(opened.status))
    return Reply(header, (encode_end_outcomes(outcomes),))


def has_queue(topics: TopicTable, name: str, queue_id: int) -> bool:
    """Tells whether a queue of a topic exists."""
    topic = topics.get(name)
    return topic is not None and queue_id < topic.queue_count


# ---- The check-back router -----------------------------------------------------------------


def check_transactions(context: BrokerContext, now_ms: int) -> None:
    """Asks members of producer groups about what waits for too long; ten times a second."""
    desk = context.transactions
    if desk.torn:
        _write_torn(context)
        return
    _drop_deleted(context)
    for effect in desk.table.tick(now_ms, context.groups.producers):
        if not context.commit_point.is_safe(effect.batch.end_offset):
            # Its sender does not know of it yet.
            if isinstance(effect, Park):
                desk.table.parked_or_not(effect, stored=False)
        elif isinstance(effect, Check):
            _ask(context, effect)
        else:
            desk.parks.append(effect)


def _ask(context: BrokerContext, check: Check) -> None:
    desk = context.transactions
    half = check.batch
    try:
        data = context.store.read_at(CommitLogOffset(half.commitlog_offset))
        header = read_header(data)
        parts = [(0, data, check.ordinals)]
        if header.total_size > MAX_CHECK_BYTES or len(check.ordinals) == 1 < header.message_count:
            parts = [
                (
                    one,
                    redeliver(
                        data,
                        header,
                        first=one,
                        count=1,
                        topic=TRANS_HALF_TOPIC,
                        queue_id=HALF_QUEUE,
                    ),
                    [one],
                )
                for one in check.ordinals
            ]
    except StorageError as error:
        desk.lose(half, str(error))
        return
    for first_ordinal, batch, ordinals in parts:
        question = CheckTransactionState(
            half.group,
            half.base,
            ordinals,
            check.check_times,
            first_ordinal,
            desk.proofs.token(half.base, half.producer_id, half.first_sequence),
        )
        context.wire.notify(
            check.peer, RequestCode.CHECK_TRANSACTION_STATE, encode_header(question), batch
        )
        desk.checks_sent += 1
    for first, count in runs_of(check.ordinals):
        desk.ops.append(Op(half.base, first, count, OpKind.CHECK, check.check_times))


def _drop_deleted(context: BrokerContext) -> None:
    """Retention does not wait for decisions: what it took cannot be committed any more."""
    desk = context.transactions
    oldest = next(iter(desk.table.batches.values()), None)
    if oldest is None:
        return
    minimum = context.store.queue_bounds(TRANS_HALF_TOPIC, HALF_QUEUE)[0]
    while oldest is not None and oldest.base < minimum:
        desk.lose(oldest, "the log does not reach back so far any more (file_reserved_time)")
        oldest = next(iter(desk.table.batches.values()), None)


def _write_torn(context: BrokerContext) -> None:
    """Writes what a crash cut off; nothing is decided before that is done."""
    desk = context.transactions
    if desk.is_mending:
        return  # with SYNC_FLUSH the disk may take longer than a tick

    def on_stored(outcomes: list[BatchOutcome]) -> None:
        desk.is_mending = False
        bad = [one.remark for one in outcomes if one.code != _OK]
        if bad:
            _log.error("commits that a crash cut off could not be written again: %s", bad[0])
        else:
            desk.torn = []

    inner_send(context, desk.torn, on_stored)
    desk.is_mending = True


# ---- Administration --------------------------------------------------------------------------


def list_half_messages(
    context: BrokerContext, request: Request, asked: ListHalfMessagesRequest
) -> Reply:
    """What waits for its decision, oldest first."""
    table = context.transactions.table
    watches = _watches(context)
    members: dict[str, int] = {}
    now_ms = context.clock.wall_ms()
    found: list[HalfInfo] = []
    for half in table.batches.values():
        if (
            (asked.group and half.group != asked.group)
            or (asked.topic and half.topic != asked.topic)
            or now_ms - half.store_timestamp < asked.min_age_ms
            or (asked.parked and not half.parked)
        ):
            continue
        for ordinal, state in enumerate(half.states):
            if len(found) >= asked.max_count:
                break
            if state == PARKED or (state == PENDING and not asked.parked):
                if half.group not in members:
                    members[half.group] = len(context.groups.producers(half.group))
                found.append(_info(context, half, ordinal, watches, members[half.group]))
    return reply_with(HalfList(found, table.pending_count, table.parked_count))


def view_half_message(
    context: BrokerContext, request: Request, asked: ViewHalfMessageRequest
) -> Reply:
    """A half message that waits, with its contents."""
    half, ordinal = _find(context, asked.message_id)
    context.wire.permit(request, half.topic)
    data = context.store.read_at(CommitLogOffset(half.commitlog_offset))
    members = len(context.groups.producers(half.group))
    info = _info(context, half, ordinal, _watches(context), members)
    one = redeliver(
        data,
        read_header(data),
        first=ordinal,
        count=1,
        topic=TRANS_HALF_TOPIC,
        queue_id=HALF_QUEUE,
    )
    return Reply(encode_header(info), (one,))


def _watches(context: BrokerContext) -> dict[int, list[Watch]]:
    found: dict[int, list[Watch]] = {}
    for watch in context.transactions.table.timetable.watches():
        found.setdefault(watch.batch.base, []).append(watch)
    return found


def _info(
    context: BrokerContext,
    half: HalfBatch,
    ordinal: int,
    watches: dict[int, list[Watch]],
    members: int,
) -> HalfInfo:
    watch = next((one for one in watches.get(half.base, ()) if ordinal in one.ordinals), None)
    is_parked = half.states[ordinal] == PARKED
    next_ms = -1
    if watch is not None and not is_parked:
        next_ms = max(watch.due_ms - context.clock.monotonic_ms(), 0)
    return HalfInfo(
        format_message_id(half.producer_id, half.first_sequence + ordinal),
        half.group,
        half.topic,
        half.queue_id,
        half.store_timestamp,
        max(context.clock.wall_ms() - half.store_timestamp, 0),
        watch.checks if watch is not None else context.config.transaction_check_max,
        next_ms,
        HalfState.PARKED if is_parked else HalfState.PENDING,
        half.base + ordinal,
        members,
    )


def _find(context: BrokerContext, message_id: str) -> tuple[HalfBatch, int]:
    found = context.transactions.table.find(*parse_message_id(message_id))
    if found is None:
        raise BrokerError(
            f"no half message {message_id} waits at this broker", code=ResponseCode.QUERY_NOT_FOUND
        )
    return found

"""Half messages: decisions, check-backs, and their lists for administrators.

Decisions of a turn of the loop are written at its end, in groups: op records and, behind them, the
messages that they commit. All of a group is stored or nothing. Requests are answered after that.
"""

import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from mqmesh.batch.half_batch import HALF_QUEUE
from mqmesh.batch.payload import split_payload
from mqmesh.batch.record_batch import BatchHeader, read_header, read_payload
from mqmesh.batch.redelivery import redeliver
from mqmesh.errors import BrokerError, BrokerNotAvailable, MQMeshError, StorageError, SystemBusy
from mqmesh.message import (
    TRANS_HALF_TOPIC,
    TRANS_OP_HALF_TOPIC,
    format_message_id,
    parse_message_id,
)
from mqmesh.metrics import Labelled, counter, gauge, histogram
from mqmesh.namespaces import is_within
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Answer, Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.request import Request
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
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.transactions.check_timetable import (
    Check,
    Park,
    TransactionSettings,
    Watch,
    joined_parks,
)
from mqmesh.roles.broker.features.transactions.half_batches import PARKED, PENDING, HalfBatch
from mqmesh.roles.broker.features.transactions.half_messages import (
    MAX_STAGED_BYTES,
    MAX_STAGED_RUNS,
    Flight,
    OpenEnd,
    PendingHalfMessages,
)
from mqmesh.roles.broker.features.transactions.op_records import Op, OpKind, encode_ops, runs_of
from mqmesh.roles.broker.features.transactions.transaction_recovery import copy_of
from mqmesh.roles.broker.features.transactions.transaction_table import DecidedRun
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.broker.writing.writes import Writes, divided
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import MessageStore
from mqmesh.units import KIB, MIB, CommitLogOffset

MAX_CHECK_BYTES: Final = 4 * MIB
"""A larger half batch is asked about message by message."""
OP_BYTES: Final = 80
"""More than an op record takes: so a group never has more of them than a batch may."""
OPS_ROOM: Final = 1 * KIB
"""More than a batch of op records takes beside them."""
_OK: Final = int(ResponseCode.SUCCESS)
_KIND_OF: Final = {Decision.COMMIT: OpKind.COMMIT, Decision.ROLLBACK: OpKind.ROLLBACK}

_log = logging.getLogger(__name__)


class TransactionsFeature(Feature):
    """Half messages: kept until they are committed or rolled back, with check-backs meanwhile.

    Decisions of a turn of the loop are written at its end, in groups: op records and, behind them,
    the messages that they commit. All of a group is stored or nothing. Requests are answered after
    that.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        half_messages: PendingHalfMessages,
        writes: Writes,
    ) -> None:
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._commit_point = core.commit_point
        self._permit = core.dispatch.permit
        self._stats = core.stats
        self._instance_id = core.instance_id
        self._topics = topics
        self._groups = groups
        self._halves = half_messages
        self._writes = writes

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.END_TRANSACTION: self.end_transaction,
            RequestCode.LIST_HALF_MESSAGES: self.list_half_messages,
            RequestCode.VIEW_HALF_MESSAGE: self.view_half_message,
            RequestCode.END_HALF_MESSAGE: self.end_half_message,
        }

    def configured(self) -> None:
        """Take over timings and limits."""
        table = self._halves.table
        table.settings = table.timetable.settings = settings_of(self._settings.now)

    def stopping(self) -> None:
        """Hand what was decided to the store."""
        self.finish()

    def oldest_ms(self) -> int:
        """Return how long the oldest half message waits that is not parked; 0 if there is none."""
        batches = self._halves.table.batches.values()
        waiting = (one.store_timestamp for one in batches if one.left > one.parked)
        now_ms = self._clock.wall_ms()
        return max(now_ms - next(waiting, now_ms), 0)

    def _has_queue(self, name: str, queue_id: int) -> bool:
        """Return whether a queue of a topic exists."""
        topic = self._topics.get(name)
        return topic is not None and queue_id < topic.queue_count

    # ---- Half messages that come ---------------------------------------------------------

    def admit(self, header: BatchHeader) -> BatchOutcome | None:
        """Admit a half batch; its destinations were checked.

        Returns:
            Its outcome if it was stored before; else None.

        Raises:
            SystemBusy: Too many half messages wait.
            SequenceConflict: Others are stored under their ids.
            BrokerNotAvailable: Its twin is not safe yet.
        """
        halves = self._halves
        try:
            twin = halves.table.admit(
                header.producer_id, header.first_sequence, header.message_count, header.producer_crc
            )
        except SystemBusy:
            self._stats.total.busy_refusals += 1
            raise
        if twin is None:
            self._writes.ensure_topic(TRANS_HALF_TOPIC, HALF_QUEUE + 1)
            return None
        if not self._commit_point.is_safe(twin.end_offset):
            raise BrokerNotAvailable("the same half messages are on their way to the disk")
        self._stats.total.put_duplicates += 1
        return BatchOutcome(_OK, 0, 0, twin.base, twin.commitlog_offset, twin.store_timestamp)

    # ---- Decisions -----------------------------------------------------------------------

    def end_transaction(self, request: Request, header: EndTransactionRequest) -> Answer | None:
        """A producer decides about half messages; answered when that is stored."""
        return self._decide(request, decode_ends(request.command.body), header.group)

    def end_half_message(self, request: Request, header: EndHalfMessageRequest) -> Answer | None:
        """An administrator decides about a half message."""
        half, ordinal = self._find(request, header.message_id)
        end = End(half.base, half.producer_id, half.first_sequence, ordinal, 1, header.decision)
        _log.warning("an administrator ends half message %s: %s", header.message_id, end.decision)
        return self._decide(request, [end])

    def _decide(self, request: Request, ends: list[End], group: str | None = None) -> Answer | None:
        desk = self._halves
        table = desk.table
        opened = OpenEnd(request.later(), [], [])
        may_commit = self._has_queue
        safe_offset = self._commit_point.high_watermark()
        halves = [table.batches.get(end.base_queue_offset) for end in ends]
        namespace = request.peer.principal.namespace
        for topic in {half.topic for half in halves if half is not None}:
            # All of them, before anything is decided.
            if is_within(namespace, topic):
                self._permit(request.peer, request.command.code, topic)
        for end, half in zip(ends, halves, strict=True):
            before = table.staged_total
            is_of_others = half is not None and not is_within(namespace, half.topic)
            if is_of_others or (group is not None and not desk.proofs.holds(end)):
                outcome = EndOutcome.NOT_PROVEN
            elif (
                end.decision == Decision.COMMIT
                and half is not None
                and half.end_offset > safe_offset
            ):
                outcome = EndOutcome.AGAIN
            else:
                outcome = table.decide(end, may_commit, group)
            opened.outcomes.append(outcome)
            opened.bases.append(end.base_queue_offset)
            if table.staged_total != before and (not desk.opens or desk.opens[-1] is not opened):
                desk.opens.append(opened)
            if table.staged_bytes >= MAX_STAGED_BYTES or len(table.runs) >= MAX_STAGED_RUNS:
                self.finish()
                self._writes.write()
        opened.complete = True
        if opened.flights or (desk.opens and desk.opens[-1] is opened):
            return None
        if opened.error is not None:
            raise opened.error
        return self._answer_of(opened)

    def finish(self) -> None:
        """Hands the decisions of the turn to the store; before ``finish_sends``."""
        desk = self._halves
        opens, desk.opens = desk.opens, []
        parks, desk.parks = desk.parks, []
        further, desk.ops = desk.ops, []
        decided = self._decided(desk.table.take(), parks, opens)
        decided += [_Decided([op]) for op in further]
        most_bytes = self._writes.group_bytes - OPS_ROOM
        groups = list(divided(decided, lambda one: one.size, most_bytes))
        for opened in opens:
            opened.flights += max(len(groups), 1)
        if not groups:
            self._landed(Flight([], [], 0, opens), None, 0)
        for group in groups:
            self._store_group(group, opens)

    def _store_group(self, decided: list["_Decided"], opens: list[OpenEnd]) -> None:
        """Stages a batch of op records and, all or none with it, what they commit and park."""
        desk = self._halves
        ops_batch = encode_ops(
            [op for one in decided for op in one.ops],
            producer_id=self._instance_id,
            first_sequence=desk.next_sequence,
            born_timestamp=self._clock.wall_ms(),
        )
        op_count = read_header(ops_batch).message_count
        desk.next_sequence += op_count
        runs = [one.run for one in decided if one.run is not None]
        parks = joined_parks(one.park for one in decided if one.park is not None)
        flight = Flight(runs, parks, op_count, opens)

        def on_stored(outcomes: list[BatchOutcome]) -> None:
            bad = next((one for one in outcomes if one.code != _OK), None)
            error = error_of(bad.code, bad.remark, bad.retry_after_ms) if bad is not None else None
            self._landed(flight, error, max(one.status for one in outcomes))

        try:
            self._writes.ensure_topic(TRANS_OP_HALF_TOPIC)
            copies = [copy for one in decided for copy in one.copies]
            self._writes.put_encoded([ops_batch, *copies], on_stored)
        except MQMeshError as error:
            self._landed(flight, error, 0)

    def _decided(
        self, runs: list[DecidedRun], parks: list[Park], opens: list[OpenEnd]
    ) -> list["_Decided"]:
        """Makes the op records of decisions and of what is parked, and the batches beside them.

        Half messages that are lost are left out.
        """
        wanted = [_Decided([_op_of(run)], run=run) for run in runs]
        for park in parks:
            ops = [
                Op(park.batch.base, first, count, OpKind.PARK, park.check_times)
                for first, count in runs_of(park.ordinals)
            ]
            wanted.append(_Decided(ops, park=park))
        found: list[_Decided] = []
        source: _HalfSource | None = None
        for one in wanted:
            half = one.half
            try:
                for op in one.ops:
                    if op.kind != OpKind.ROLLBACK:
                        if source is None or source.half is not half:
                            source = _HalfSource(self._store, half)
                        one.copies.append(source.copy(op))
            except MQMeshError as error:
                # Retention took the half messages, or the disk damaged them.
                if one.run is not None:
                    self._halves.table.failed([one.run])
                    for opened in opens:
                        opened.lose(half.base)
                self._halves.lose(half, str(error))
                continue
            found += one.parts()
        return found

    def _landed(self, flight: Flight, error: MQMeshError | None, status: int) -> None:
        """Complete a flight: it is in the log, or was refused."""
        desk = self._halves
        if error is None:
            desk.table.op_end += flight.op_count
            desk.table.stored(flight.runs)
            now_ms = self._clock.wall_ms()
            for run in flight.runs:
                desk.count_end(run, now_ms)
            for park in flight.parks:
                _log.error(
                    "%d half messages of producer group %s for topic %s, from %s on, were asked "
                    "about %d times in vain; they are parked (`mqmesh tx list --parked`)",
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
                    opened.pending.fail(opened.error)
                else:
                    opened.pending.done(self._answer_of(opened))

    def _answer_of(self, opened: OpenEnd) -> Reply:
        desk = self._halves
        outcomes = opened.outcomes
        desk.refused += sum(one > EndOutcome.ENDED_BEFORE for one in outcomes)
        header = encode_header(EndTransactionResponse(opened.status))
        return Reply(header, (encode_end_outcomes(outcomes),))

    # ---- The check-back router -----------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Asks members of producer groups about what waits for too long; ten times a second."""
        desk = self._halves
        self._drop_deleted()
        for effect in desk.table.tick(now_ms, self._groups.producers):
            if not self._commit_point.is_safe(effect.batch.end_offset):
                # Its sender does not know of it yet.
                if isinstance(effect, Park):
                    desk.table.parked_or_not(effect, stored=False)
            elif isinstance(effect, Check):
                self._ask(effect)
            else:
                desk.parks.append(effect)

    def _ask(self, check: Check) -> None:
        desk = self._halves
        half = check.batch
        try:
            data = self._store.read_at(CommitLogOffset(half.commitlog_offset))
            header = read_header(data)
            parts = [(0, data, check.ordinals)]
            if (
                header.total_size > MAX_CHECK_BYTES
                or len(check.ordinals) == 1 < header.message_count
            ):
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
            check.peer.notify(RequestCode.CHECK_TRANSACTION_STATE, encode_header(question), batch)
            desk.checks_sent += 1
        for first, count in runs_of(check.ordinals):
            desk.ops.append(Op(half.base, first, count, OpKind.CHECK, check.check_times))

    def _drop_deleted(self) -> None:
        """Retention does not wait for decisions: what it took cannot be committed any more."""
        desk = self._halves
        oldest = next(iter(desk.table.batches.values()), None)
        if oldest is None:
            return
        minimum = self._store.queue_bounds(TRANS_HALF_TOPIC, HALF_QUEUE)[0]
        while oldest is not None and oldest.base < minimum:
            desk.lose(oldest, "the log does not reach back so far any more (file_reserved_time)")
            oldest = next(iter(desk.table.batches.values()), None)

    # ---- Administration ------------------------------------------------------------------

    def list_half_messages(self, request: Request, header: ListHalfMessagesRequest) -> HalfList:
        """Return the half messages that wait for their decision, oldest first."""
        table = self._halves.table
        watches = self._watches()
        members: dict[str, int] = {}
        now_ms = self._clock.wall_ms()
        namespace = request.peer.principal.namespace or header.namespace
        found: list[HalfInfo] = []
        pending, parked = table.pending_count, table.parked_count
        if namespace:
            own = [one for one in table.batches.values() if _is_of(one, namespace)]
            pending = sum(one.states.count(PENDING) for one in own)
            parked = sum(one.parked for one in own)
        for half in table.batches.values():
            if (
                not _is_of(half, namespace)
                or (header.group and half.group != header.group)
                or (header.topic and half.topic != header.topic)
                or now_ms - half.store_timestamp < header.min_age_ms
                or (header.parked and not half.parked)
            ):
                continue
            for ordinal, state in enumerate(half.states):
                if len(found) >= header.max_count:
                    break
                if state == PARKED or (state == PENDING and not header.parked):
                    if half.group not in members:
                        members[half.group] = len(self._groups.producers(half.group))
                    found.append(self._info(half, ordinal, watches, members[half.group]))
        return HalfList(found, pending, parked)

    def view_half_message(self, request: Request, header: ViewHalfMessageRequest) -> Reply:
        """A half message that waits, with its contents."""
        half, ordinal = self._find(request, header.message_id)
        self._permit(request.peer, request.command.code, half.topic)
        data = self._store.read_at(CommitLogOffset(half.commitlog_offset))
        members = len(self._groups.producers(half.group))
        info = self._info(half, ordinal, self._watches(), members)
        one = redeliver(
            data,
            read_header(data),
            first=ordinal,
            count=1,
            topic=TRANS_HALF_TOPIC,
            queue_id=HALF_QUEUE,
        )
        return Reply(encode_header(info), (one,))

    def _watches(self) -> dict[int, list[Watch]]:
        found: dict[int, list[Watch]] = {}
        for watch in self._halves.table.timetable.watches():
            found.setdefault(watch.batch.base, []).append(watch)
        return found

    def _info(
        self,
        half: HalfBatch,
        ordinal: int,
        watches: dict[int, list[Watch]],
        members: int,
    ) -> HalfInfo:
        watch = next((one for one in watches.get(half.base, ()) if ordinal in one.ordinals), None)
        is_parked = half.states[ordinal] == PARKED
        next_ms = -1
        if watch is not None and not is_parked:
            next_ms = max(watch.due_ms - self._clock.monotonic_ms(), 0)
        return HalfInfo(
            format_message_id(half.producer_id, half.first_sequence + ordinal),
            half.group,
            half.topic,
            half.queue_id,
            half.store_timestamp,
            max(self._clock.wall_ms() - half.store_timestamp, 0),
            watch.checks if watch is not None else self._settings.now.transaction_check_max,
            next_ms,
            HalfState.PARKED if is_parked else HalfState.PENDING,
            half.base + ordinal,
            members,
        )

    def _find(self, request: Request, message_id: str) -> tuple[HalfBatch, int]:
        found = self._halves.table.find(*parse_message_id(message_id))
        if found is None or not _is_of(found[0], request.peer.principal.namespace):
            raise BrokerError(
                f"no half message {message_id} waits at this broker",
                code=ResponseCode.QUERY_NOT_FOUND,
            )
        return found

    metrics = (
        gauge(
            "half_messages_pending",
            "half messages that wait for their decision",
            lambda feature: feature._halves.table.pending_count,
            unit="messages",
        ),
        gauge(
            "half_messages_oldest_ms",
            "how long the oldest half message has been waiting, unless it is parked",
            lambda feature: feature.oldest_ms(),
        ),
        gauge(
            "half_messages_parked",
            "half messages asked about in vain",
            lambda feature: feature._halves.table.parked_count,
            unit="messages",
        ),
        counter(
            "half_messages_ended_total",
            "half messages committed and rolled back",
            lambda feature: Labelled(
                list(feature._halves.ended),
                lambda key: (key[0].name.lower(), key[1]),
                lambda key: feature._halves.ended[key],
            ),
            unit="messages",
            labels=("decision", "topic"),
        ),
        histogram(
            "half_message_commit_s",
            "from the storing of half messages to their commit; seconds, as RocketMQ's",
            lambda feature: Labelled(
                list(feature._halves.took),
                lambda topic: (topic,),
                lambda topic: feature._halves.took[topic],
            ),
            unit="s",
            labels=("topic",),
            rocketmq_name="rocketmq_finish_message_latency_milliseconds",
        ),
        counter(
            "half_messages_lost_total",
            "half messages lost with the log",
            lambda feature: feature._halves.lost,
            unit="messages",
        ),
        counter(
            "transaction_checks_total",
            "questions to producers about half messages",
            lambda feature: feature._halves.checks_sent,
        ),
        counter(
            "transaction_ends_refused_total",
            "decisions that could not be carried out",
            lambda feature: feature._halves.refused,
        ),
    )


class _Decided(msgspec.Struct):
    """Op records that are stored together, with the batches of what they commit or park.

    Attributes:
        ops: The records.
        copies: The batches.
        run: Decision that the records and batches belong to.
        park: Half messages that the records park.
    """

    ops: list[Op]
    copies: list[bytes] = []
    run: DecidedRun | None = None
    park: Park | None = None

    @property
    def half(self) -> HalfBatch:
        """The half batch of the decision, or of what is parked."""
        owner = self.run or self.park
        assert owner is not None
        return owner.batch

    def parts(self) -> list["_Decided"]:
        """Return what is stored all or none: each run of messages that are parked by itself."""
        if self.park is None:
            return [self]
        return [
            _Decided(
                [op],
                [copy],
                park=Park(self.park.watch, list(range(op.first, op.first + op.count))),
            )
            for op, copy in zip(self.ops, self.copies, strict=True)
        ]

    @property
    def size(self) -> int:
        """Bytes of all that, about; never too few."""
        return OP_BYTES * len(self.ops) + sum(map(len, self.copies))


class _HalfSource:
    """A half batch that copies are made of; taken apart once, however many they are."""

    def __init__(self, store: MessageStore, half: HalfBatch) -> None:
        self.half = half
        self._data = store.read_at(CommitLogOffset(half.commitlog_offset))
        self._header = read_header(self._data)
        self._raws: list[msgspec.Raw] | None = None

    def copy(self, op: Op) -> bytes:
        """The messages of a record."""
        if self._raws is None and op.count < self._header.message_count:
            self._raws = split_payload(read_payload(self._data, self._header))
        copy = copy_of(op, self._header, self._data, self._raws)
        assert copy is not None
        return copy


def _is_of(half: HalfBatch, namespace: str) -> bool:
    return is_within(namespace, half.topic) and is_within(namespace, half.group)


def _op_of(run: DecidedRun) -> Op:
    return Op(run.batch.base, run.first, run.count, _KIND_OF[Decision(run.decision)])


def settings_of(config: BrokerConfig) -> TransactionSettings:
    """Return the timings and limits of half messages."""
    return TransactionSettings(
        timeout_ms=config.transaction_timeout_ms,
        check_interval_ms=config.transaction_check_interval_ms,
        check_max=config.transaction_check_max,
        pending_max=config.transaction_pending_max,
        parked_max=config.transaction_parked_max,
        busy_retry_after_ms=config.busy_retry_after_ms,
    )

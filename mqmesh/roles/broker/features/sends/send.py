"""SEND_MESSAGE: check each batch, write all batches of a tick at once, answer.

A batch that fails its checks gets an outcome of its own; the others of the
request go on, but for later ones of the same queue: order comes first. Nothing
is answered before the store has it and the commit point says that it is safe, or
the time for that is over.
"""

from typing import Final

from mqmesh.batch.delayed_batch import DelayedMeta, read_delayed_meta
from mqmesh.batch.half_batch import TRANSACTION_TYPE, HalfMeta, read_half_meta
from mqmesh.batch.payload import CODEC_NONE, Buffer
from mqmesh.batch.payload_check import check_payload
from mqmesh.batch.record_batch import (
    Attributes,
    BatchHeader,
    BatchMeta,
    check_batch,
    read_header,
    read_payload,
)
from mqmesh.errors import (
    BrokerNotAvailable,
    CorruptBatch,
    InvalidArgument,
    MessageIllegal,
    MQMeshError,
    StorageError,
    StoreClosed,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import (
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_PROPERTIES_BYTES,
    MAX_SHARDING_KEY_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TOPIC_LENGTH,
    SCHEDULE_TOPIC,
    TRANS_HALF_TOPIC,
)
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, ONEWAY, Reply, Request
from mqmesh.protocol.messaging import BatchOutcome, SendStatus, encode_outcomes
from mqmesh.roles.broker.commit_point import QueueKey
from mqmesh.roles.broker.context import BrokerContext, store_stopped
from mqmesh.roles.broker.features.delays.delays import to_schedule
from mqmesh.roles.broker.features.pulls.pull import wake_pulls
from mqmesh.roles.broker.features.sends.producer_keys import not_its_own
from mqmesh.roles.broker.features.sends.staging import (
    OpenSend,
    fill_in,
    fill_in_refusal,
    fill_in_status,
)
from mqmesh.roles.broker.features.topics.topics import Topic
from mqmesh.roles.broker.features.transactions.half_admission import admit_half, note_half
from mqmesh.roles.broker.saving import write_state
from mqmesh.storage.interface import BatchToPut, PutResult, PutStatus
from mqmesh.units import KIB

MESSAGE_OVERHEAD_BYTES: Final = 4 * (
    MAX_TOPIC_LENGTH + MAX_TAG_LENGTH + MAX_KEYS * (MAX_KEY_LENGTH + 3) + MAX_SHARDING_KEY_LENGTH
) + (2 * MAX_PROPERTIES_BYTES + 1 * KIB)
"""More than a legal message can have beside its body; characters may take four bytes."""

_REFUSED_ATTRIBUTES: Final = 0xFFFF & ~int(
    Attributes.HAS_KEYS | Attributes.HAS_TAGS | Attributes.HAS_DELAY | Attributes.NO_WAIT_STORE
)
_HAS_DELAY: Final = int(Attributes.HAS_DELAY)
_SPECIAL: Final = _HAS_DELAY | TRANSACTION_TYPE
_REFUSED_OF_HALVES: Final = (_REFUSED_ATTRIBUTES | _HAS_DELAY) & ~int(Attributes.TRANSACTION_HALF)

_ANY_TOPIC: Final = ""
"""Stands for the topic of a batch that could not be read."""


def send_message(
    context: BrokerContext, request: Request, asked: tuple[int, int, bytes]
) -> Reply | None:
    """Stages the batches of a request; the answer comes with the end of the tick."""
    command = request.command
    _, batch_count, key = asked
    producer_id = context.producer_keys.show(request.peer, key)
    stage = context.stage
    context.stats.total.send_requests += 1
    try:
        context.commit_point.check_room()
    except SystemBusy:
        context.stats.total.busy_refusals += 1
        raise
    outcomes: list[BatchOutcome | None] = []
    refused: set[QueueKey] = set()
    for header, data, error in _split(command.body, batch_count, producer_id):
        if error is None:
            outcomes.append(_admit(context, request.peer, header, data, refused))
        else:
            refused.add((_ANY_TOPIC, header.queue_id))
            outcomes.append(_refusal(context, error))
    stage.sends.append(OpenSend(request, outcomes))
    stage.staged_bytes += len(command.body)
    if stage.staged_bytes >= context.config.max_staged_bytes:
        finish_sends(context)
    return None


def finish_sends(context: BrokerContext) -> None:
    """Writes what is staged, and answers or lets wait; the end of each tick."""
    if context.state.is_urgent:
        write_state(context)  # what is sent may need it, so that it has to stand in front
    if not context.stage.sends:
        return
    batches, sends = context.stage.take()
    context.transactions.table.staged_halves = 0
    late = context.admission.count_refused(len(sends), context.clock.monotonic_ms())
    if late:
        batches, sends = _refuse_late(context, batches, sends, late)
    try:
        results = context.store.put(batches, context.clock.wall_ms()) if batches else []
    except StorageError as error:
        context.stats.total.put_refused += len(batches)
        refused = store_stopped(error) if isinstance(error, StoreClosed) else error
        fill_in_refusal(sends, _outcome_of(refused))
        for send in sends:
            _answer(context, send)
        return
    fill_in(sends, batches, results)
    safe_offset = context.commit_point.offset()
    arrived = _account(context, batches, results, safe_offset)
    for send in sends:
        if send.end_offset > safe_offset:
            _wait(context, send)
        else:
            _answer(context, send)
    for key in arrived:
        wake_pulls(context, *key)


def _refuse_late(
    context: BrokerContext, batches: list[BatchToPut], sends: list[OpenSend], count: int
) -> tuple[list[BatchToPut], list[OpenSend]]:
    """Refuses the oldest sends; returns what is left.

    Order does not suffer: a producer waits for its answer before it sends to the queue again.
    """
    config = context.config
    late, left = sends[:count], sends[count:]
    refused = sum(send.outcomes.count(None) for send in late)
    context.stats.total.busy_refusals += count
    context.stats.total.put_refused += refused
    error = SystemBusy(
        f"the log is too slow for all sends: some waited for {context.admission.longest_wait_ms} "
        f"ms (wait_time_mills_in_send_queue = {config.wait_time_mills_in_send_queue})",
        retry_after_ms=config.busy_retry_after_ms,
    )
    fill_in_refusal(late, _outcome_of(error))
    for send in late:
        _answer(context, send)
    return batches[refused:], left


def answer_confirmed(context: BrokerContext) -> None:
    """More of the log is safe: answers the sends that waited for it, and wakes pulls."""
    for send in context.commit_point.confirmed():
        _answer(context, send)
    for key in context.commit_point.arrivals():
        if key[0] == SCHEDULE_TOPIC:
            context.schedule.stirred = True
        if key in context.holds.queues:
            wake_pulls(context, *key)


def answer_expired(context: BrokerContext, now_ms: int) -> None:
    """Answers sends that waited for too long; they say who is late."""
    point = context.commit_point
    for send, late in point.expired(now_ms):
        if late is not None:
            context.stats.total.flush_disk_timeouts += 1
            remark = f"{late.name} took over {point.timeout_ms} ms (sync_flush_timeout_ms)"
            context.wire.note_refusal(ResponseCode[late.status.name], remark)
            fill_in_status(send, late.status)
        _answer(context, send)


def _split(
    body: memoryview, batch_count: int, producer_id: int
) -> list[tuple[BatchHeader, memoryview, MQMeshError | None]]:
    """Takes a body apart; a batch whose bytes were changed, or of another producer, comes so.

    Raises:
        CorruptBatch: It cannot be told where a batch ends, or there are more or fewer.
    """
    found: list[tuple[BatchHeader, memoryview, MQMeshError | None]] = []
    position, end = 0, len(body)
    while position < end:
        failure: MQMeshError | None = None
        try:
            header = check_batch(body, position)
            if header.producer_id != producer_id:
                failure = not_its_own(header.producer_id, producer_id)
        except CorruptBatch as error:
            failure = error
            header = read_header(body, position)
            if position + header.total_size > end:
                raise
        start = position
        position += header.total_size
        found.append((header, body[start:position], failure))
    if len(found) != batch_count:
        raise CorruptBatch(f"{len(found)} batches in a request that announced {batch_count}")
    return found


def _admit(
    context: BrokerContext,
    peer: bytes,
    header: BatchHeader,
    data: memoryview,
    refused: set[QueueKey],
) -> BatchOutcome | None:
    """Stages a batch, or adds its queue to those refused and returns what becomes of it."""
    name = _ANY_TOPIC
    try:
        meta = _read_meta(context, header, data)
        name = meta.topic
        if refused and not refused.isdisjoint(
            ((name, header.queue_id), (_ANY_TOPIC, header.queue_id))
        ):
            # Stored now, it would stand before what its sender will repeat.
            raise BrokerNotAvailable(
                f"an earlier batch for queue {header.queue_id} of the same request was refused"
            )
        goal, queue_id, is_half = name, header.queue_id, False
        if isinstance(meta, HalfMeta):
            goal, queue_id, is_half = meta.real_topic, meta.real_queue_id, True
        topic = context.topics.get(goal) or _create(context, peer, goal, queue_id)
        if queue_id >= topic.writable_queues:
            context.topics.require_writable(goal, queue_id)
        if header.attributes & (_REFUSED_OF_HALVES if is_half else _REFUSED_ATTRIBUTES):
            raise MessageIllegal(
                f"attributes {header.attributes:#x}: this broker takes no committed, redelivered, "
                "delayed half or filtered batches from clients"
            )
        limit = context.config.max_message_size
        if header.raw_size > header.message_count * (limit + MESSAGE_OVERHEAD_BYTES):
            raise MessageIllegal(
                f"{header.message_count} messages of {header.raw_size} bytes together; a body "
                f"may have {limit} (max_message_size)"
            )
        _check_messages(context, header, data, goal)
        if is_half:
            twin = admit_half(context, header)
            if twin is not None:
                return twin
        if isinstance(meta, DelayedMeta):
            batch = to_schedule(context, header, data, meta)
        else:
            batch = BatchToPut(name, header.queue_id, header, data, meta.tag_hashes)
    except MQMeshError as error:
        refused.add((name, header.queue_id))
        return _refusal(context, error)
    context.stage.batches.append(batch)
    return None


def _check_messages(
    context: BrokerContext, header: BatchHeader, data: memoryview, topic: str
) -> None:
    config = context.config
    if header.codec == CODEC_NONE:
        payload: Buffer = data[header.total_size - header.payload_size :]
    elif config.check_compressed_batches:
        try:
            payload = read_payload(data, header)
        except CorruptBatch as error:
            raise MessageIllegal(str(error)) from error
    else:
        return
    check_payload(payload, header.message_count, topic, config.max_message_size)


def _read_meta(context: BrokerContext, header: BatchHeader, data: memoryview) -> BatchMeta:
    if header.attributes & _SPECIAL:
        if header.attributes & _HAS_DELAY:
            return read_delayed_meta(data, header)
        return read_half_meta(data, header)
    return context.metas.read(data, header)


def _create(context: BrokerContext, peer: bytes, name: str, queue_id: int) -> Topic:
    config = context.config
    if not config.auto_create_topic_enable:
        raise TopicNotFound(
            f"topic {name[:300]!r} does not exist, and this broker does not create topics by "
            "itself (auto_create_topic_enable)"
        )
    now_ms = context.clock.monotonic_ms()
    context.creation_rates.check(peer, now_ms)
    if queue_id >= config.default_topic_queue_nums:
        raise InvalidArgument(
            f"queue {queue_id} of new topic {name[:300]!r} does not exist: "
            f"default_topic_queue_nums = {config.default_topic_queue_nums}"
        )
    topic = context.topics.create(name, config.default_topic_queue_nums, context.clock.wall_ms())
    context.creation_rates.note(peer, now_ms)
    return topic


def _account(
    context: BrokerContext,
    batches: list[BatchToPut],
    results: list[PutResult],
    safe_offset: int,
) -> dict[QueueKey, None]:
    """Counts what was stored; returns the queues that somebody waits at and can see it."""
    arrived: dict[QueueKey, None] = {}
    total = context.stats.total
    waited_for = context.holds.queues
    for batch, result in zip(batches, results, strict=True):
        if result.status is not PutStatus.PUT_OK:
            if result.status is PutStatus.DUPLICATE:
                total.put_duplicates += 1
            else:
                total.put_refused += 1
            continue
        name, queue_id, header = batch.topic, batch.queue_id, batch.header
        count, size = header.message_count, header.total_size
        total.put_batches += 1
        total.put_messages += count
        total.put_bytes += size
        topic = context.topics.get(name)
        if topic is not None:
            topic.put_messages += count
            topic.put_bytes += size
            topic.last_update[queue_id] = result.store_timestamp
        if name == TRANS_HALF_TOPIC:
            note_half(context, batch, result)
        if result.end_offset > safe_offset:
            context.commit_point.note_arrival((name, queue_id), result.end_offset)
        elif waited_for and (name, queue_id) in waited_for:
            arrived[name, queue_id] = None
    return arrived


def _wait(context: BrokerContext, send: OpenSend) -> None:
    if send.request is not None:
        if send.request.command.flags & ONEWAY:
            return
        send.request = send.request.without_frame()
    context.commit_point.wait(send, send.end_offset, context.clock.monotonic_ms())


def _answer(context: BrokerContext, send: OpenSend) -> None:
    request = send.request
    outcomes = [outcome for outcome in send.outcomes if outcome is not None]
    if request is not None and request.command.flags & ONEWAY:
        _note_refusals(context, outcomes)  # nobody else is told
        return
    assert len(outcomes) == len(send.outcomes)
    if request is None:
        assert send.on_stored is not None
        send.on_stored(outcomes)
        return
    header, remarks = encode_outcomes(outcomes)
    if remarks:
        _note_refusals(context, outcomes)
    context.wire.reply(request, Reply(header, (remarks,) if remarks else ()))


def _note_refusals(context: BrokerContext, outcomes: list[BatchOutcome]) -> None:
    for outcome in outcomes:
        if outcome.code:
            context.wire.note_refusal(outcome.code, outcome.remark)


def _refusal(context: BrokerContext, error: MQMeshError) -> BatchOutcome:
    context.stats.total.put_refused += 1
    return _outcome_of(error)


def _outcome_of(error: MQMeshError) -> BatchOutcome:
    return BatchOutcome(
        vars(error).get("code") or code_of(error),
        int(SendStatus.SEND_OK),
        getattr(error, "retry_after_ms", 0),
        remark=str(error)[:MAX_REMARK_CHARACTERS].encode(errors="replace").decode(),
    )

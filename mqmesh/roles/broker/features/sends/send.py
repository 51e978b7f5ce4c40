"""SEND_MESSAGE: checks each batch, and stages those that are to be written; see ``storing``.

A batch that fails its checks gets an outcome of its own; the others of the
request go on, but for later ones of the same queue: order comes first.
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
    TRACE_TOPIC,
)
from mqmesh.protocol.command import Reply, Request
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.roles.broker.auto_creation import client_of
from mqmesh.roles.broker.commit_point import QueueKey
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.delays.delays import to_schedule
from mqmesh.roles.broker.features.storing.staging import (
    OpenSend,
)
from mqmesh.roles.broker.features.storing.storing import finish_sends, refusal_of
from mqmesh.roles.broker.features.topics.topics import Topic
from mqmesh.roles.broker.features.transactions.half_admission import admit_half
from mqmesh.roles.broker.producer_keys import not_its_own
from mqmesh.storage.interface import BatchToPut
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
    quota = context.quotas.sending.get(request.principal.name)
    try:
        context.commit_point.check_room()
        if quota is not None:
            quota.check(context.clock.monotonic_ms())
    except SystemBusy:
        context.stats.total.busy_refusals += 1
        raise
    outcomes: list[BatchOutcome | None] = []
    refused: set[QueueKey] = set()
    batches = _split(command.body, batch_count, producer_id)
    if quota is not None:
        quota.note(sum(header.message_count for header, _, _ in batches), len(command.body))
    for header, data, error in batches:
        if error is None:
            outcomes.append(_admit(context, request, header, data, refused))
        else:
            refused.add((_ANY_TOPIC, header.queue_id))
            outcomes.append(refusal_of(context, error))
    stage.sends.append(OpenSend(request, outcomes))
    stage.staged_bytes += len(command.body)
    if stage.staged_bytes >= context.config.max_staged_bytes:
        finish_sends(context)
    return None


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
    request: Request,
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
        context.wire.permit(request, goal)
        topic = context.topics.get(goal) or _create(context, request, goal, queue_id)
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
        return refusal_of(context, error)
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


def _create(context: BrokerContext, request: Request, name: str, queue_id: int) -> Topic:
    config = context.config
    if not config.auto_create_topic_enable:
        raise TopicNotFound(
            f"no topic {name[:300]!r}, and this broker does not create topics by "
            "itself (auto_create_topic_enable)"
        )
    now_ms = context.clock.monotonic_ms()
    context.wire.permit_creation(request, name)
    # What the message trace needs is one queue, whose order is that of its time.
    queues = 1 if name == TRACE_TOPIC else config.default_topic_queue_nums
    client = client_of(request)
    context.auto_creation.check_topic(client, queues, now_ms)
    if queue_id >= queues:
        raise InvalidArgument(
            f"queue {queue_id} of new topic {name[:300]!r} does not exist: "
            f"default_topic_queue_nums = {queues}"
        )
    topic = context.topics.create(name, queues, context.clock.wall_ms())
    context.auto_creation.note_topic(client, queues, now_ms)
    return topic

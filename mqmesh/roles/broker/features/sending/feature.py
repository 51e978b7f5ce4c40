"""SEND_MESSAGE: checks each batch, and stages those that are to be written; see ``storing``.

A batch that fails its checks gets an outcome of its own; the others of the
request go on, but for later ones of the same queue: order comes first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from mqmesh.batch.delayed_batch import DelayedMeta, ExpiringMeta, read_delayed_meta
from mqmesh.batch.half_batch import TRANSACTION_TYPE, HalfMeta, read_half_meta
from mqmesh.batch.payload import CODEC_NONE
from mqmesh.batch.payload_check import (
    MESSAGE_OVERHEAD_BYTES,
    check_payload,
    is_surely_sound,
)
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
    NotMaster,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import (
    SCHEDULE_TOPIC,
    TRANS_HALF_TOPIC,
    is_system_topic,
)
from mqmesh.metrics import Histogram, Labelled, LabelValues, counter, gauge, histogram
from mqmesh.namespaces import is_trace_topic
from mqmesh.protocol.codes import error_of
from mqmesh.protocol.command import Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import BatchOutcome, ProducerBatch, ProducerInfo, ProducerRequest
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.auto_creation import AutoCreation, client_of
from mqmesh.roles.broker.commit_point import QueueKey
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.producer_keys import ProducerKeys, not_its_own
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable
from mqmesh.roles.broker.writing.send_admission import SendAdmission
from mqmesh.roles.broker.writing.writes import Writes
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import BatchToPut

_REFUSED_ATTRIBUTES: Final = 0xFFFF & ~int(
    Attributes.HAS_KEYS
    | Attributes.HAS_TAGS
    | Attributes.HAS_DELAY
    | Attributes.NO_WAIT_STORE
    | Attributes.HAS_EXPIRY
    | Attributes.HAS_EXPECTED
)
_HAS_DELAY: Final = int(Attributes.HAS_DELAY)
_HAS_EXPIRY: Final = int(Attributes.HAS_EXPIRY)
_HAS_EXPECTED: Final = int(Attributes.HAS_EXPECTED)
_SPECIAL: Final = _HAS_DELAY | _HAS_EXPIRY | _HAS_EXPECTED | TRANSACTION_TYPE
_REFUSED_OF_HALVES: Final = (_REFUSED_ATTRIBUTES | _HAS_DELAY | _HAS_EXPIRY | _HAS_EXPECTED) & ~int(
    Attributes.TRANSACTION_HALF
)

_ANY_TOPIC: Final = ""
"""Stands for the topic of a batch that could not be read."""


AdmitHalf = Callable[[BatchHeader], BatchOutcome | None]
"""Function that lets a half batch in, or returns the outcome of one that was stored before."""
ToSchedule = Callable[[BatchHeader, memoryview, DelayedMeta], BatchToPut]
"""Function that returns the batch that is stored for one of delayed messages."""


class TableAdmission(Protocol):
    """The tables, which look at what is sent to them.

    Attributes:
        safe_from: A refusal may be answered once the log is safe up to this commit-log offset.
    """

    safe_from: int

    def admit(
        self,
        topic: Topic,
        header: BatchHeader,
        data: memoryview,
        meta: BatchMeta,
        earlier: Sequence[BatchToPut],
    ) -> None:
        """Let a batch for a table in; raise why it is refused."""


_MESSAGE_TYPES: Final = {SCHEDULE_TOPIC: "delay", TRANS_HALF_TOPIC: "transaction"}
"""Others hold what has become an ordinary message."""
_TOPIC_LABELS: Final = ("topic", "message_type", "is_system")


class SendingFeature(Feature):
    """Messages that producers send: checked, and staged for the write at the end of the turn.

    A batch that fails its checks gets an outcome of its own; the others of the request go on, but
    for later ones of the same queue: order comes first.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        writes: Writes,
        admit_half: AdmitHalf,
        to_schedule: ToSchedule,
        metas: MetaCache,
        auto_creation: AutoCreation,
        admission: SendAdmission,
        tables: TableAdmission,
    ) -> None:
        config = core.settings.now
        self._core = core
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._commit_point = core.commit_point
        self._looks_up = core.dispatch.looks_up
        self._permit = core.dispatch.permit
        self._permit_creation = core.dispatch.permit_creation
        self._permit_group = core.dispatch.permit_group
        self._stats = core.stats
        self._quotas = core.quotas
        self._topics = topics
        self._writes = writes
        self._admit_half = admit_half
        self._to_schedule = to_schedule
        self._metas = metas
        self._auto_creation = auto_creation
        self._tables = tables
        self._admission = admission
        self._producer_keys = ProducerKeys(config.max_producers_per_connection)

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.SEND_MESSAGE: self.send_message,
            RequestCode.QUERY_PRODUCER: self.query_producer,
        }

    def tick(self, now_ms: int) -> None:
        """Answer sends that waited for too long."""
        self._writes.answer_expired(now_ms)

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forget the producers of a connection."""
        self._producer_keys.on_disconnect(peer)

    def topic_deleting(self, topic: str) -> None:
        """Delete the messages of a topic."""
        # Staged sends go first, or they would be stored into a topic that is not there.
        self._writes.write()
        self._store.delete_topic(topic)

    def configured(self) -> None:
        """Take over the limits of waiting sends."""
        config, admission = self._settings.now, self._admission
        admission.wait_limit_ms = config.wait_time_mills_in_send_queue
        admission.busy_timeout_ms = config.os_page_cache_busy_timeout_mills

    def stopping(self) -> None:
        """Write what is staged."""
        self._writes.write()

    def stopped(self) -> None:
        """Answer sends that wait for the disk or for followers."""
        if self._core.leadership is not None:
            # They may be stored, or not: who repeats them at the next master does not store them
            # twice.
            self._writes.refuse_all(NotMaster("this replica is stopped"))
        wait_ms = self._commit_point.timeout_ms  # none waits for longer
        self._writes.answer_expired(self._clock.monotonic_ms() + wait_ms)

    def send_message(self, request: Request, fields: tuple[int, int, bytes]) -> Reply | None:
        """Stages the batches of a request; the answer comes with the end of the tick."""
        command = request.command
        _, batch_count, key = fields
        shown = self._producer_keys.of_peer.get(request.peer)
        producer_id = None if shown is None else shown.get(key)
        if producer_id is None:
            producer_id = self._producer_keys.show(request.peer, key)
        self._stats.total.send_requests += 1
        limits = self._quotas.send_limits.get(request.peer.principal.name, ())
        try:
            if not self._commit_point.is_immediate:
                self._commit_point.check_room()
            for limit in limits:
                limit.check(self._clock.monotonic_ms())
        except SystemBusy:
            self._stats.total.busy_refusals += 1
            raise
        outcomes: list[BatchOutcome | None] = []
        refused: set[QueueKey] = set()
        staged: list[BatchToPut] = []
        batches = _split(command.body, batch_count, producer_id)
        if limits:
            count = sum(header.message_count for header, _, _ in batches)
            for limit in limits:
                limit.note(count, len(command.body))
        for header, data, error in batches:
            if error is None:
                outcomes.append(self._admit(request, header, data, refused, staged))
            else:
                refused.add((_ANY_TOPIC, header.queue_id))
                outcomes.append(self._writes.refusal_of(error))
        safe_from = 0
        if self._tables.safe_from:
            safe_from, self._tables.safe_from = self._tables.safe_from, 0
        self._writes.add(request, staged, outcomes, len(command.body), safe_from)
        return None

    def admit_outputs(self, request: Request, batch_count: int, key: bytes) -> list[BatchToPut]:
        """Return the batches of a request that are to be stored with something else, all or none.

        Args:
            request: Its body has the batches.
            batch_count: Number of them.
            key: Key of their producer.

        Raises:
            MQMeshError: Why one of them is refused; as SEND_MESSAGE refuses it, or it has half
                messages or expected revisions; a topic that is missing is not made.
        """
        producer_id = self._producer_keys.show(request.peer, key) if batch_count else 0
        limits = self._quotas.send_limits.get(request.peer.principal.name, ())
        if not self._commit_point.is_immediate:
            self._commit_point.check_room()
        for limit in limits:
            limit.check(self._clock.monotonic_ms())
        staged: list[BatchToPut] = []
        batches = _split(request.command.body, batch_count, producer_id)
        if limits:
            count = sum(header.message_count for header, _, _ in batches)
            for limit in limits:
                limit.note(count, len(request.command.body))
        for header, data, error in batches:
            if error is not None:
                raise error
            if header.attributes & (TRANSACTION_TYPE | _HAS_EXPECTED):
                raise MessageIllegal(
                    "half messages and expected revisions are not stored with what they were made "
                    "of"
                )
            refused = self._admit(request, header, data, set(), staged, creates=False)
            if refused is not None:
                raise error_of(refused.code, refused.remark, refused.retry_after_ms)
        return staged

    def query_producer(self, request: Request, header: ProducerRequest) -> ProducerInfo:
        """Return the batches of a producer that are remembered in a queue.

        Raises:
            TopicNotFound: There is no such topic.
            SystemBusy: One of them is not safe yet.
        """
        self._topics.require(header.topic)
        topic, queue_ids = header.topic, [header.queue_id]
        if header.delayed:
            topic, queue_ids = SCHEDULE_TOPIC, self._store.queues(SCHEDULE_TOPIC)
        batches = []
        for queue_id in queue_ids:
            for batch in self._store.producer_window(topic, queue_id, header.producer_id):
                if not self._commit_point.is_safe(batch.end_offset):
                    raise SystemBusy(
                        f"a batch of producer {header.producer_id:016x} in queue {queue_id} of "
                        f"{topic!r} is not safe yet; ask again"
                    )
                status = int(self._commit_point.status_of(batch.end_offset))
                batches.append(ProducerBatch(batch.first_sequence, batch.message_count, status))
        stats = self._store.stats()
        return ProducerInfo(batches, stats.min_commitlog_offset, stats.max_commitlog_offset)

    def _admit(
        self,
        request: Request,
        header: BatchHeader,
        data: memoryview,
        refused: set[QueueKey],
        batches: list[BatchToPut],
        *,
        creates: bool = True,
    ) -> BatchOutcome | None:
        """Stages a batch, or adds its queue to those refused and returns what becomes of it."""
        name = _ANY_TOPIC
        try:
            if header.attributes & _SPECIAL:
                meta = _read_special_meta(header, data)
            else:
                meta = self._metas.read(data, header)
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
                # Its members are asked about the message.
                self._permit_group(request.peer, RequestCode.SEND_MESSAGE, meta.producer_group)
            if self._looks_up:
                self._permit(request.peer, RequestCode.SEND_MESSAGE, goal)
            topic = self._topics.get(goal) or self._create(request, goal, queue_id, creates)
            if queue_id >= topic.writable_queues:
                self._topics.require_writable(goal, queue_id)
            if header.attributes & (_REFUSED_OF_HALVES if is_half else _REFUSED_ATTRIBUTES):
                raise MessageIllegal(
                    f"attributes {header.attributes:#x}: this broker takes no committed, "
                    "redelivered, delayed half or filtered batches from clients"
                )
            limit = self._settings.now.max_message_size
            if header.raw_size > header.message_count * (limit + MESSAGE_OVERHEAD_BYTES):
                raise MessageIllegal(
                    f"{header.message_count} messages of {header.raw_size} bytes together; a body "
                    f"may have {limit} (max_message_size)"
                )
            if header.codec == CODEC_NONE:
                payload = data[header.total_size - header.payload_size :]
                if not is_surely_sound(payload, header.message_count, goal, limit):
                    check_payload(payload, header.message_count, goal, limit)
            elif self._settings.now.check_compressed_batches:
                self._check_compressed(header, data, goal, limit)
            if isinstance(meta, ExpiringMeta):
                _check_expiry(topic, header, meta)
            if topic.is_table:
                self._tables.admit(topic, header, data, meta, batches)
            if is_half:
                twin = self._admit_half(header)
                if twin is not None:
                    return twin
            if header.attributes & _HAS_DELAY:
                assert isinstance(meta, DelayedMeta)
                batch = self._to_schedule(header, data, meta)
            else:
                batch = BatchToPut(name, header.queue_id, header, data, meta.tag_hashes)
        except MQMeshError as error:
            refused.add((name, header.queue_id))
            return self._writes.refusal_of(error)
        batches.append(batch)
        return None

    def _check_compressed(
        self, header: BatchHeader, data: memoryview, topic: str, limit: int
    ) -> None:
        try:
            payload = read_payload(data, header)
        except CorruptBatch as error:
            raise MessageIllegal(str(error)) from error
        check_payload(payload, header.message_count, topic, limit)

    def _create(self, request: Request, name: str, queue_id: int, creates: bool) -> Topic:
        config = self._settings.now
        if not (creates and config.auto_create_topic_enable):
            raise TopicNotFound(
                f"no topic {name[:300]!r}, and this broker does not create topics by "
                "itself (auto_create_topic_enable)"
            )
        now_ms = self._clock.monotonic_ms()
        self._permit_creation(request.peer, RequestCode.SEND_MESSAGE, name)
        # The message trace needs one queue, whose order is that of its time.
        queues = 1 if is_trace_topic(name) else config.default_topic_queue_nums
        client = client_of(request.peer)
        self._auto_creation.check_topic(client, queues, now_ms)
        if queue_id >= queues:
            raise InvalidArgument(
                f"queue {queue_id} of new topic {name[:300]!r} does not exist: "
                f"default_topic_queue_nums = {queues}"
            )
        topic = self._topics.create(name, queues, self._clock.wall_ms())
        self._auto_creation.note_topic(client, queues, now_ms)
        return topic

    def _by_topic(self, value: Callable[[Topic], int | Histogram]) -> Labelled[Topic]:
        used = (topic for topic in self._topics if topic.put_messages)
        return Labelled(used, lambda topic: _topic_labels(topic.config.topic), value)

    metrics = (
        counter(
            "send_requests_total",
            "requests to store messages",
            lambda feature: feature._stats.total.send_requests,
        ),
        counter(
            "put_batches_total",
            "batches that were stored",
            lambda feature: feature._stats.total.put_batches,
            unit="batches",
        ),
        counter(
            "put_messages_total",
            "messages in them",
            lambda feature: feature._stats.total.put_messages,
            unit="messages",
        ),
        counter(
            "put_bytes_total",
            "their size in the log",
            lambda feature: feature._stats.total.put_bytes,
        ),
        counter(
            "put_duplicates_total",
            "batches that had been stored before",
            lambda feature: feature._stats.total.put_duplicates,
            unit="batches",
        ),
        counter(
            "put_refused_total",
            "batches that were refused",
            lambda feature: feature._stats.total.put_refused,
            unit="batches",
        ),
        counter(
            "busy_refusals_total",
            "requests and batches refused for flow control",
            lambda feature: feature._stats.total.busy_refusals,
        ),
        counter(
            "unsafe_answers_total",
            "answers to sends that were stored, but not by all who should have them",
            lambda feature: {
                (status.name.lower(),): count
                for status, count in feature._stats.unsafe_answers.items()
            },
            labels=("send_status",),
        ),
        gauge(
            "sync_flush_waits",
            "sends that wait for the disk or a follower now",
            lambda feature: feature._commit_point.waiting_count,
        ),
        gauge(
            "send_requests_per_s",
            "requests to store messages, of late",
            lambda feature: feature._stats.rate("send_requests"),
        ),
        gauge(
            "put_messages_per_s",
            "messages stored, of late",
            lambda feature: feature._stats.rate("put_messages"),
            unit="messages",
        ),
        gauge(
            "put_bytes_per_s",
            "bytes stored, of late",
            lambda feature: feature._stats.rate("put_bytes"),
            unit="bytes",
        ),
        counter(
            "topic_put_messages_total",
            "messages stored",
            lambda feature: feature._by_topic(lambda topic: topic.put_messages),
            unit="messages",
            labels=_TOPIC_LABELS,
            rocketmq_name="rocketmq_messages_in_total",
        ),
        counter(
            "topic_put_bytes_total",
            "their size in the log",
            lambda feature: feature._by_topic(lambda topic: topic.put_bytes),
            labels=_TOPIC_LABELS,
            rocketmq_name="rocketmq_throughput_in_total",
        ),
        histogram(
            "topic_message_size_bytes",
            "sizes of the messages stored",
            lambda feature: feature._by_topic(lambda topic: topic.sizes),
            labels=_TOPIC_LABELS,
            rocketmq_name="rocketmq_message_size",
        ),
    )


def _split(
    body: memoryview, batch_count: int, producer_id: int
) -> list[tuple[BatchHeader, memoryview, MQMeshError | None]]:
    """Takes a body apart; a batch whose bytes were changed, or of another producer, comes so.

    Raises:
        CorruptBatch: The end of a batch cannot be found, or there are more or fewer.
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


def _read_special_meta(header: BatchHeader, data: memoryview) -> BatchMeta:
    if header.attributes & TRANSACTION_TYPE:
        return read_half_meta(data, header)
    return read_delayed_meta(data, header)


def _check_expiry(topic: Topic, header: BatchHeader, meta: ExpiringMeta) -> None:
    name = topic.config.topic
    if header.attributes & _HAS_EXPECTED and not topic.is_table:
        raise MessageIllegal(f"topic {name!r} is no table, so that nothing has a revision there")
    if not header.attributes & _HAS_EXPIRY:
        return
    if not topic.expires:
        raise MessageIllegal(
            f"messages of topic {name!r} may have no time to live of their own (message_ttl); "
            f"`mqmesh topic update {name} --message-ttl allow`"
        )
    if not meta.expires_ms or (meta.expires_ms < 0) != bool(header.attributes & _HAS_DELAY):
        raise MessageIllegal(f"expires_ms = {meta.expires_ms} of a batch that expires")


def _topic_labels(topic: str) -> LabelValues:
    kind = _MESSAGE_TYPES.get(topic, "normal")
    return (topic, kind, str(is_system_topic(topic)).lower())

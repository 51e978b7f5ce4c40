"""RESEND_DEAD_LETTERS: dead letters get another chance, each once unless it is forced.

The message and the mark that it was resent are stored all or none, and nothing is answered
before the store has both.
"""

from collections.abc import Iterable, Mapping

from mqmesh.errors import (
    InvalidArgument,
    MQMeshError,
    OffsetIllegal,
    TopicNotFound,
)
from mqmesh.message import (
    DEAD_LETTER_MARKS_TOPIC,
    PROPERTY_RESENT_FROM_DLQ,
    StoredMessage,
    check_group,
    dlq_topic,
    retry_topic,
)
from mqmesh.metrics import counter
from mqmesh.namespaces import namespace_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.request import Request
from mqmesh.protocol.retries import (
    ResendRequest,
    ResendResponse,
    ResendResult,
    ResendStatus,
    ResendTarget,
)
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.retries.dead_letter_marks import DeadLetterMarks, ResentMark
from mqmesh.roles.broker.features.retries.retry_plan import moved, without_retries
from mqmesh.roles.broker.features.retries.send_back import MARK_BYTES, MARKS_ROOM, RETRY_QUEUE
from mqmesh.roles.broker.features.retries.stored_batches import StoredBatches
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.broker.writing.writes import Writes, batch_to_put, divided, refusals
from mqmesh.roles.dispatch import Handler
from mqmesh.sdk.producer.queue_selector import queue_index
from mqmesh.storage.interface import BatchToPut


class DeadLettersFeature(Feature):
    """Dead letters get another chance, each once unless it is forced.

    The message and the mark that it was resent are stored all or none, and nothing is answered
    before the store has both.

    Attributes:
        marks: Dead letters that were resent.
    """

    def __init__(self, core: Core, topics: TopicTable, writes: Writes) -> None:
        self._clock = core.clock
        self._store = core.store
        self._permit = core.dispatch.permit
        self._stats = core.stats
        self._quotas = core.quotas
        self._topics = topics
        self._writes = writes
        self.marks = DeadLetterMarks(core.random)

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.RESEND_DEAD_LETTERS: self.resend}

    def resend(self, request: Request, wanted: ResendRequest) -> ResendResponse | None:
        """Sends dead letters to the retry topic, or to where they were sent at first.

        A member of the group may do it, and needs the right to send for the latter.
        """
        check_group(wanted.group)
        if wanted.target not in set(ResendTarget):
            raise InvalidArgument(f"target {wanted.target!r} is neither RETRY nor TOPIC")
        self._topics.require(dlq_topic(wanted.group))
        self.marks.load(self._store)
        results: list[ResendResult] = []
        batches: list[BatchToPut] = []
        marks: list[ResentMark] = []
        stored = StoredBatches(self._store)
        for queue_offset in wanted.queue_offsets:
            try:
                result = self._look(request, wanted, queue_offset, stored, batches, marks)
            except OffsetIllegal as error:
                result = ResendResult(int(ResendStatus.GONE), 0, _remark(error))
            except MQMeshError as error:
                result = ResendResult(int(ResendStatus.REFUSED), 0, _remark(error))
            results.append(result)
        if not batches:
            return ResendResponse(results)
        self._put(request, results, batches, marks)
        return None

    def sample(self) -> None:
        """Forgets marks whose dead letters retention has removed; now and then."""

        def first_offset_of(group: str) -> int | None:
            topic = dlq_topic(group)
            if self._topics.get(topic) is None:
                return None
            return self._store.queue_bounds(topic, RETRY_QUEUE)[0]

        self.marks.forget(first_offset_of)

    def _look(
        self,
        request: Request,
        wanted: ResendRequest,
        queue_offset: int,
        stored: StoredBatches,
        batches: list[BatchToPut],
        marks: list[ResentMark],
    ) -> ResendResult:
        """Decides about one dead letter; what is to be written is added to batches and marks."""
        found = stored.find(dlq_topic(wanted.group), RETRY_QUEUE, queue_offset)
        if found.messages is None:
            raise InvalidArgument(f"it cannot be decoded, export it instead: {found.error}")
        message = found.messages[queue_offset - found.header.base_queue_offset]
        before_ms = self.marks.resent_ms(wanted.group, queue_offset, message.message_id)
        if before_ms and not wanted.force:
            return ResendResult(int(ResendStatus.ALREADY_RESENT), before_ms)
        name, queue_id = self._target(request, wanted, message)
        if wanted.dry_run:
            return ResendResult(int(ResendStatus.RESENT), before_ms)
        mark = {PROPERTY_RESENT_FROM_DLQ: f"{message.commitlog_offset:X}#{message.ordinal:X}"}
        batches.append(moved(message, [without_retries(message, mark)], name, queue_id))
        resent = ResentMark(
            wanted.group, queue_offset, message.message_id, self._clock.wall_ms(), wanted.target
        )
        if not before_ms:
            self.marks.add([resent])  # at once: it may be named twice
        marks.append(resent)
        return ResendResult(int(ResendStatus.RESENT), before_ms)

    def _target(
        self, request: Request, wanted: ResendRequest, message: StoredMessage
    ) -> tuple[str, int]:
        if wanted.target == ResendTarget.RETRY:
            return retry_topic(wanted.group), RETRY_QUEUE
        self._permit(request.peer, request.command.code, message.topic)
        topic = self._topics.get(message.topic)
        if topic is None:
            raise TopicNotFound(f"no topic {message.topic!r} any more")
        if not topic.writable_queues:
            self._topics.require_writable(message.topic, 0)
        # The number of its queues may have changed; messages of a key stay together all the same.
        return message.topic, queue_index(
            message.sharding_key or message.message_id, topic.writable_queues
        )

    def _put(
        self,
        request: Request,
        results: list[ResendResult],
        batches: list[BatchToPut],
        marks: list[ResentMark],
    ) -> None:
        pending = request.later()
        places = [at for at, one in enumerate(results) if one.status == ResendStatus.RESENT]
        groups: list[list[BatchToPut]] = []

        def forget(some: Iterable[int]) -> None:
            # Those that were forced had been resent before.
            self.marks.remove(marks[at] for at in some if not results[places[at]].resent_ms)

        def stored(outcomes: list[BatchOutcome]) -> None:
            behind = 0
            for group, refused in zip(groups, refusals(outcomes, map(len, groups)), strict=True):
                some = range(behind, behind + len(group) - 1)
                behind = some.stop
                if refused is None:
                    self._stats.total.resent_dead_letters += len(some)
                    size = sum(batch.header.total_size for batch in group)
                    self._quotas.note_stored(namespace_of(marks[0].group), len(some), size)
                    self.marks.add(marks[at] for at in some)
                    continue
                forget(some)
                for at in some:
                    failed = ResendResult(int(ResendStatus.REFUSED), 0, refused.remark)
                    results[places[at]] = failed
            pending.done(ResendResponse(results))

        try:
            self._writes.ensure_topic(DEAD_LETTER_MARKS_TOPIC)
            now_ms = self._clock.wall_ms()
            pairs = zip(batches, marks, strict=True)
            most_bytes = self._writes.group_bytes - MARKS_ROOM
            for part in divided(pairs, _size_of, most_bytes):
                mark = self.marks.encode([mark for _, mark in part], now_ms)
                groups.append([*(batch for batch, _ in part), batch_to_put(mark)])
            self._writes.put_groups(groups, stored)
        except MQMeshError:
            forget(range(len(marks)))
            raise

    metrics = (
        counter(
            "resent_dead_letters_total",
            "dead letters that were sent once more",
            lambda feature: feature._stats.total.resent_dead_letters,
            unit="messages",
        ),
    )


def _size_of(resent: tuple[BatchToPut, ResentMark]) -> int:
    return MARK_BYTES + resent[0].header.total_size


def _remark(error: MQMeshError) -> str:
    return str(error)[:MAX_REMARK_CHARACTERS]

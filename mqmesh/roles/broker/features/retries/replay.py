"""REPLAY_MESSAGES: stored messages once more, for a group or into another topic."""

from collections.abc import Mapping
from typing import Final

from mqmesh.errors import GroupNotFound, InvalidArgument
from mqmesh.message import check_topic, retry_topic
from mqmesh.metrics import counter
from mqmesh.namespaces import namespace_of
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.replay import ReplayRequest, ReplayResponse
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.retries.retry_plan import moved, without_retries
from mqmesh.roles.broker.features.retries.send_back import RETRY_QUEUE
from mqmesh.roles.broker.features.retries.stored_batches import StoredBatches
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.broker.writing.writes import Writes
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import BatchToPut

_OK: Final = int(ResponseCode.SUCCESS)


class ReplayFeature(Feature):
    """Stored messages once more, for a group or into another topic."""

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        writes: Writes,
    ) -> None:
        self._store = core.store
        self._quotas = core.quotas
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._writes = writes
        self._copied = 0

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.REPLAY_MESSAGES: self.replay}

    def replay(self, request: Request, wanted: ReplayRequest) -> None:
        """Copies messages; answered when they are stored."""
        if not wanted.runs:
            raise InvalidArgument("a replay names at least one run of messages")
        topic, queue_id = self._target(wanted)
        batches, count = self._batches(wanted, topic, queue_id)
        pending = request.later()

        def stored(outcomes: list[BatchOutcome]) -> None:
            # One write: the store took all of it or nothing.
            refused = next((one for one in outcomes if one.code != _OK), None)
            if refused is not None:
                pending.fail(error_of(refused.code, refused.remark))
                return
            self._copied += count
            size = sum(batch.header.total_size for batch in batches)
            self._quotas.note_stored(namespace_of(topic), count, size)
            pending.done(ReplayResponse(count))

        self._writes.put(batches, stored)

    def _target(self, wanted: ReplayRequest) -> tuple[str, int]:
        """Return topic and queue of the copies."""
        self._topics.require(wanted.topic)
        if bool(wanted.group) == bool(wanted.into_topic) or wanted.into_topic == wanted.topic:
            raise InvalidArgument("messages are replayed into a group, or into another topic")
        if wanted.group:
            name = check_client_group(wanted.group)
            if self._group_table.get(name) is None and self._groups.find(name) is None:
                raise GroupNotFound(f"no consumer group {name!r}")
            return retry_topic(name), RETRY_QUEUE
        topic = self._topics.require(check_topic(wanted.into_topic))
        queue_id = wanted.queue_id % max(topic.writable_queues, 1)
        self._topics.require_writable(wanted.into_topic, queue_id)
        return wanted.into_topic, queue_id

    def _batches(
        self, wanted: ReplayRequest, topic: str, queue_id: int
    ) -> tuple[list[BatchToPut], int]:
        """Return what is written, all or none, and how many messages of the request that is."""
        found = StoredBatches(self._store)
        batches: list[BatchToPut] = []
        count = size = 0
        for run in wanted.runs:
            place, end = run.first, run.first + run.count
            while place < end:
                batch = found.find(wanted.topic, wanted.queue_id, place)
                if batch.messages is None:
                    raise InvalidArgument(
                        f"the batch at {place} of queue {wanted.queue_id} of topic "
                        f"{wanted.topic!r} cannot be decoded: {batch.error}"
                    )
                first = place - batch.header.base_queue_offset
                part = batch.messages[first : first + end - place]
                copies = [without_retries(message, {}) for message in part]
                copy = moved(part[0], copies, topic, queue_id)
                size += copy.header.total_size
                if batches and size > self._writes.group_bytes:
                    return batches, count
                batches.append(copy)
                count += len(part)
                place += len(part)
        return batches, count

    metrics = (
        counter(
            "replayed_messages_total",
            "messages that were copied for a group, or into another topic, by a replay",
            lambda feature: feature._copied,
            unit="messages",
        ),
    )

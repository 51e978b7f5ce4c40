"""Locks of ordered consumers, and members that give queues back."""

from collections.abc import Mapping

from mqmesh.errors import MQMeshError, NotMaster
from mqmesh.protocol.command import EMPTY_REPLY, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.membership import (
    LOCK_HELD_BY_OTHER,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
    UnlockBatchRequest,
)
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler


class LocksFeature(Feature):
    """Locks of ordered consumers, and members that give queues back."""

    works_at_followers = True

    def __init__(
        self, core: Core, topics: TopicTable, groups: ConsumerGroups, locks: QueueLocks
    ) -> None:
        self._clock = core.clock
        self._leadership = core.leadership
        self._topics = topics
        self._groups = groups
        self._locks = locks

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.LOCK_BATCH_MQ: self.lock_batch_mq,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock_batch_mq,
        }

    def tick(self, now_ms: int) -> None:
        """Free locks whose lease is over."""
        self._locks.tick(now_ms)

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Keep the locks of a lost connection for their grace time only."""
        self._locks.on_disconnect(peer, now_ms)

    def topic_deleted(self, topic: str) -> None:
        """Forget the locks of a topic's queues."""
        self._locks.remove_topic(topic)

    def lock_batch_mq(self, request: Request, wanted: LockBatchRequest) -> LockBatchResponse:
        """A member wants queues for itself alone.

        Raises:
            StaleGeneration: It is no member of the group here.
            NotMaster: Another replica may lead by now, and grants the same queues.
        """
        if self._leadership is not None and (loss := self._leadership.loss) is not None:
            raise NotMaster(loss)
        check_client_group(wanted.group)
        self._groups.require_member(wanted.group, wanted.client_id)
        now_ms = self._clock.monotonic_ms()
        answers = []
        for one in wanted.queues:
            token = LOCK_HELD_BY_OTHER
            if self._exists(one):
                token = self._locks.lock(
                    wanted.group,
                    wanted.client_id,
                    request.peer,
                    (one.topic, one.queue_id),
                    one.token,
                    now_ms,
                )
            answers.append(LockEntry(one.topic, one.queue_id, token))
        return LockBatchResponse(self._locks.lease_ms, answers)

    def unlock_batch_mq(self, request: Request, done: UnlockBatchRequest) -> Reply:
        """A member has done with queues; others may have them. Doing so twice does no harm."""
        check_client_group(done.group)
        for one in done.queues:
            self._locks.unlock(done.group, done.client_id, (one.topic, one.queue_id))
            self._groups.claims.release(done.group, one.topic, one.queue_id, done.client_id)
        return EMPTY_REPLY

    def _exists(self, one: LockEntry) -> bool:
        try:
            return one.queue_id < self._topics.require(one.topic).queue_count
        except MQMeshError:
            return False

"""Locks of ordered consumers, and members that give queues back."""

from collections.abc import Mapping
from typing import Final

from mqmesh.errors import BrokerNotAvailable, MQMeshError, NotMaster
from mqmesh.log_identity import first_number
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
from mqmesh.protocol.request import Peer, PendingReply, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.owner_records import OwnerRecords
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler

LEASE_MS: Final = 3_000
"""Lease of a lock that copies confirm, the same at all replicas whatever their settings: the next
master gives away no queue sooner. Consumers renew it three times meanwhile."""


class LocksFeature(Feature):
    """Locks of ordered consumers, and members that give queues back.

    Where copies confirm the log, a lock is granted or renewed once a record behind the request is
    confirmed, and holders rely on it for no longer than the next master keeps it for them. Then
    none of them is at work when that one gives the queue away, whatever it knows of elections.
    """

    works_at_followers = True

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        locks: QueueLocks,
        owners: OwnerRecords,
    ) -> None:
        self._core = core
        self._clock = core.clock
        self._leadership = core.leadership
        self._owners = owners
        self._renewals: list[tuple[PendingReply, LockBatchResponse]] = []
        self._topics = topics
        self._groups = groups
        self._locks = locks

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.LOCK_BATCH_MQ: self.lock_batch_mq,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock_batch_mq,
        }

    def loaded(self) -> None:
        """Restore members and owners of the epochs before."""
        if not self._core.knows_owners:
            self._owners.drop()
            return
        began_ms, config = self._core.began_ms, self._core.config
        self._owners.restore(
            first_number(self._core.epoch),
            began_ms + max(LEASE_MS, config.client_lost_grace_ms),
            began_ms + max(LEASE_MS, config.rebalance_lock_lost_grace_ms),
            self._clock.monotonic_ms(),
        )

    def tick(self, now_ms: int) -> None:
        """Free locks whose lease is over, and have renewals confirmed, all by one record."""
        self._locks.tick(now_ms)
        if self._renewals:
            renewals, self._renewals = self._renewals, []
            self._core.state.save(lambda error: _answer(renewals, error))

    def stopping(self) -> None:
        """Fail renewals that are not written yet."""
        renewals, self._renewals = self._renewals, []
        _answer(renewals, BrokerNotAvailable("the broker stops, or leads no more"))

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Keep the locks of a lost connection for their grace time only."""
        self._locks.on_disconnect(peer, now_ms)

    def topic_deleted(self, topic: str) -> None:
        """Forget the locks of a topic's queues."""
        self._locks.remove_topic(topic)

    def lock_batch_mq(self, request: Request, wanted: LockBatchRequest) -> LockBatchResponse | None:
        """A member wants queues for itself alone.

        Raises:
            StaleGeneration: It is no member of the group here.
            NotMaster: Another replica may lead by now, and grants the same queues.
            BrokerNotAvailable: Too few replicas are there to confirm the locks.
            SystemBusy: Too many sends and locks wait to be confirmed.
        """
        if self._core.copies_confirm:
            self._core.commit_point.check_room()
        elif self._leadership is not None and (loss := self._leadership.loss) is not None:
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
        if not self._core.copies_confirm:
            return LockBatchResponse(self._locks.lease_ms, answers)
        response = LockBatchResponse(min(LEASE_MS, self._locks.lease_ms), answers)
        pairs = zip(wanted.queues, answers, strict=True)
        if any(0 < new.token != old.token for old, new in pairs):
            self._core.reply_when_saved(request, response)
        else:
            self._renewals.append((request.later(), response))
        return None

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


def _answer(
    renewals: list[tuple[PendingReply, LockBatchResponse]], error: MQMeshError | None
) -> None:
    for pending, response in renewals:
        if error is None:
            pending.done(response)
        else:
            pending.fail(error)

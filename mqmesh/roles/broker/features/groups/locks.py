"""Locks of ordered consumers, and members that give queues back."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from mqmesh.errors import BrokerNotAvailable, MQMeshError, NotMaster, SystemBusy
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
from mqmesh.roles.broker.group_state.consumer_groups import GROUPS_SETTLE_MS, ConsumerGroups
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

    Attributes:
        knows_owners: The log has all owners of the epochs before.
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
        self.knows_owners = False
        self._known_at_ms: int | None = None  # when the log has all owners
        self._core = core
        self._clock = core.clock
        self._leadership = core.leadership
        self._owners = owners
        # Answers that wait for a record that copies confirm, the oldest first; and those of them
        # that the record is not planned of yet.
        self._waiting: dict[PendingReply, LockBatchResponse] = {}
        self._renewals: list[PendingReply] = []
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
        """Find out whether the log has all owners of the epochs before."""
        if self._core.copies_confirm and self._leadership is not None:
            self.knows_owners = self._owners.known_epoch >= self._leadership.owners_from
        if not self.knows_owners:
            self._owners.drop()

    def opened(self) -> None:
        """Restore members and owners of the epochs before, or wait for those who show up."""
        core, config, now_ms = self._core, self._core.config, self._clock.monotonic_ms()
        if self.knows_owners:
            self._owners.restore(
                first_number(core.epoch),
                now_ms + max(LEASE_MS, config.client_lost_grace_ms),
                now_ms + max(LEASE_MS, config.rebalance_lock_lost_grace_ms),
                now_ms,
            )
            self._owners.note_known(core.epoch)
            return
        if core.leadership is not None:
            self._groups.settled_ms = now_ms + GROUPS_SETTLE_MS
        if core.has_past or core.copies_confirm:
            least_ms = LEASE_MS if core.copies_confirm else 0
            settled_ms = now_ms + max(least_ms, config.rebalance_lock_lost_grace_ms)
            # So long a master that is cut off may not know that it is one no more.
            self._known_at_ms = settled_ms + (core.lease_ttl_ms if core.leadership else 0)
            self._locks.wait(settled_ms, self._known_at_ms)

    def tick(self, now_ms: int) -> None:
        """Free locks whose lease is over, and have renewals confirmed, all by one record."""
        self._locks.tick(now_ms)
        if self._known_at_ms is not None and now_ms >= self._known_at_ms:
            self._known_at_ms = None
            self._owners.note_known(self._core.epoch)
        late = [one for one in self._waiting if one.deadline_ms <= now_ms]
        self._answer(late, BrokerNotAvailable(f"no copy confirmed the locks for {LEASE_MS} ms"))
        if self._renewals:
            self._core.state.save(partial(self._answer, self._renewals))
            self._renewals = []

    def stopping(self) -> None:
        """Fail renewals that are not written yet."""
        self._answer(self._renewals, BrokerNotAvailable("the broker stops, or leads no more"))
        self._renewals = []

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
            self._check_room()
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
        # Later it is of no use: the member counts its lease from when it asked.
        pending = request.later(now_ms + LEASE_MS)
        self._waiting[pending] = response
        pairs = zip(wanted.queues, answers, strict=True)
        if any(0 < new.token != old.token for old, new in pairs):
            self._core.state.save(partial(self._answer, [pending]))
        else:
            self._renewals.append(pending)
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

    def _check_room(self) -> None:
        config = self._core.config
        if len(self._waiting) >= config.max_sync_flush_waits:
            raise SystemBusy(
                f"{len(self._waiting)} requests for locks wait for the replicas in sync, no more "
                "may (max_sync_flush_waits)",
                retry_after_ms=config.busy_retry_after_ms,
            )

    def _answer(self, pendings: Iterable[PendingReply], error: MQMeshError | None) -> None:
        for pending in pendings:
            response = self._waiting.pop(pending, None)
            if response is None:
                continue  # it was given up
            if error is None:
                pending.done(response)
            else:
                pending.fail(error)

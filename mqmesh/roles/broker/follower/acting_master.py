"""Service of a follower to consumers while its master is gone, where nobody is elected.

Consumers read there, are members of their groups there, and commit there. The follower holds their
commits, and hands them over to the master when it is back (``features/groups/held_commits.py``).
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from mqmesh.errors import MQMeshError, StorageError
from mqmesh.protocol.command import Command, Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import UpdateConsumerOffsetRequest
from mqmesh.protocol.replication import HandOverCommitsRequest, HeldCommit
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.environment import Environment
from mqmesh.roles.broker.features.groups.held_commits import (
    HELD_FILE,
    HeldCommits,
    decode_held,
)
from mqmesh.roles.broker.follower.replica_link import ReplicaLink
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import GROUPS_SETTLE_MS
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.document_saver import DocumentSaver

RETRY_MS: Final = 1_000
"""A master that did not take what groups committed here is asked again after so long."""

_log = logging.getLogger(__name__)


class ActingMaster:
    """The part of one follower.

    Args:
        given: The process.

    Raises:
        CorruptRecord: The commits that it held cannot be read.
    """

    def __init__(self, given: Environment) -> None:
        self._given = given
        self._saver: DocumentSaver | None = None
        self._link: ReplicaLink | None = None
        self._due_ms = 0
        document = None
        if given.files is not None:
            read, make_saver = given.files
            kept = read(HELD_FILE)
            document = None if kept is None else decode_held(kept)
            self._saver = make_saver(HELD_FILE, lambda: self._held.document())
        self._held = HeldCommits(document)
        self._note_count()

    def begin_log(self, store_id: int, committed: CommittedOffsets) -> None:
        """The log was read: groups go on where they came here."""
        if len(self._held):
            self._held.begin(store_id, committed)
            self._changed()
        self._held.store_id = store_id

    def begin(self, features: BrokerFeatures) -> Mapping[RequestCode, Handler]:
        """Begins to act for the master, which is gone.

        Returns:
            The commands that are served from now on, beside reads.
        """
        _log.warning("the master is gone: consumers go on here, until it is back")
        self._held.apply(features.state.committed)
        # Of another time: what was given to whom since then only the master knows.
        features.state.groups.claims.clear()
        features.state.groups.settled_ms = features.core.clock.monotonic_ms() + GROUPS_SETTLE_MS
        return {
            **features.membership.commands(),
            RequestCode.UNLOCK_BATCH_MQ: features.locks.unlock_batch_mq,
            RequestCode.UPDATE_CONSUMER_OFFSET: partial(self._hold, features),
        }

    def tick(self, link: ReplicaLink | None, now_ms: int) -> None:
        """Time went on, monotonic clock: hands over what it holds, if there is a master."""
        if self._saver is not None:
            self._saver.save_if_failed()
        if not len(self._held) or link is None or not link.streaming:
            return
        if link is self._link and now_ms < self._due_ms:
            return
        self._link, self._due_ms = link, now_ms + RETRY_MS
        commits = self._held.some()
        given = HandOverCommitsRequest(self._given.config.broker_name, self._held.store_id, commits)

        def done(outcome: Command | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                _log.warning("the master has not taken what groups committed here: %s", outcome)
                return
            self._held.forget(commits)
            self._changed()
            self._due_ms = 0
            _log.warning("the master has taken %d offsets that groups committed here", len(commits))

        try:
            link.ask(RequestCode.HAND_OVER_COMMITS, encode_header(given), done)
        except MQMeshError as error:
            _log.warning("the commits of groups here cannot be passed to the master: %s", error)

    def close(self) -> None:
        """Save the commits that are held."""
        try:
            if self._saver is not None:
                self._saver.close()
        except StorageError as error:
            _log.error("what groups committed here is not kept: %s", error)

    def _hold(
        self, features: BrokerFeatures, request: Request, update: UpdateConsumerOffsetRequest
    ) -> Reply | None:
        committed, group = features.state.committed, update.group
        known = [committed.query(group, one.topic, one.queue_id) for one in update.queues]
        try:
            return features.offsets.update_consumer_offset(request, update)
        finally:
            for one, before in zip(update.queues, known, strict=True):
                at = committed.query(group, one.topic, one.queue_id)
                if at != before:
                    epoch = max(one.epoch, features.core.store.epoch())
                    self._held.hold(HeldCommit(group, one.topic, one.queue_id, before, at, epoch))
                    self._changed()

    def _changed(self) -> None:
        self._note_count()
        if self._saver is not None:
            self._saver.save()

    def _note_count(self) -> None:
        self._given.replication.held_commits = len(self._held)

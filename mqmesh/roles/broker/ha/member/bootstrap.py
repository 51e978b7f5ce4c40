"""Making the record of a group that has none: a new one, or one whose record is lost."""

import logging
from collections.abc import Sequence

from mqmesh.coordination.interface import (
    AckReplicas,
    Conflict,
    GroupState,
    MemberIncarnation,
    OnDone,
    Presence,
)
from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.protocol.command import Reply
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.confirm import COPIES_OF_ONE
from mqmesh.roles.broker.ha.in_sync import HAS_VOTERS
from mqmesh.roles.broker.ha.member.process import Replica
from mqmesh.roles.broker.ha.member.replica_session import ReplicaSession
from mqmesh.roles.broker.ha.vote_state import KeptVoteState

_log = logging.getLogger(__name__)


class GroupBootstrap:
    """Makes the record, from one replica.

    Args:
        config: Of the broker.
        session: Of the replica; the record is made with it.
        replica: The process.
        promises: Promises and incarnation of the replica.
    """

    def __init__(
        self,
        config: BrokerConfig,
        session: ReplicaSession,
        replica: Replica,
        promises: KeptVoteState,
    ) -> None:
        self._config = config
        self._session = session
        self._replica = replica
        self._promises = promises
        self._has_refused = False

    def make_group(self, present: Sequence[Presence]) -> None:
        """Makes the record of a new group: all of its replicas are there, and empty.

        The first one need not be empty if it has belonged to no group: it was a broker without
        replicas, and gets some. The others copy what it has, and come in sync then.
        """
        if not self._has_all(present) or self._config.broker_id != 1:
            return
        full = [one.replica_id for one in present if one.end_offset]
        if full and (full != [1] or self._promises.promised_epoch):
            # The record of a group with messages is lost: nobody makes one up.
            if not self._has_refused:
                self._has_refused = True
                _log.error(
                    "the coordinator knows nothing of group %s, and replicas %s have messages: "
                    "nobody leads until an administrator has looked (mqmesh ha init)",
                    self._config.broker_name, full,
                )  # fmt: skip
            return
        reason = "a broker got replicas" if full else "the group is new"
        self._make_record(self._promises.state.member, present, reason, self._on_made)

    def make_anew(
        self, request: Request, replica_ids: Sequence[int], present: Sequence[Presence]
    ) -> None:
        """Make a lost record again for an administrator; the request is answered later.

        Args:
            request: Request of the administrator.
            replica_ids: Replicas that the request names; none for all that a new group has.
            present: All that are there.

        Raises:
            InvalidArgument: Others are there than have to be.
        """
        there = sorted(one.replica_id for one in present)
        wanted = sorted(set(replica_ids)) or self._first_ids()
        if not self._session.is_open or there != wanted:
            raise InvalidArgument(
                f"all {len(wanted)} replicas have to be there, {wanted} (ha.total_replicas, or "
                "who is named: mqmesh ha init --replicas), and nobody else, so that nothing is "
                f"forgotten; now {there} are"
            )
        best = max(present, key=lambda one: (one.last_epoch, one.end_offset, -one.replica_id))
        pending = request.later()

        def on_made(outcome: int | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                pending.fail(outcome)
            else:
                pending.done(Reply())

        member = MemberIncarnation(best.replica_id, best.incarnation)
        self._make_record(member, present, "an administrator made the record anew", on_made)

    def _has_all(self, present: Sequence[Presence]) -> bool:
        ids = sorted(one.replica_id for one in present)
        return self._session.is_open and ids == self._first_ids()

    def _first_ids(self) -> list[int]:
        """Return the ids of the replicas that a new group has."""
        return list(range(1, self._config.ha.total_replicas + 1))

    def _make_record(
        self,
        best: MemberIncarnation,
        present: Sequence[Presence],
        reason: str,
        on_made: OnDone[int],
    ) -> None:
        mode = self._config.ha.ack_replicas
        members: tuple[MemberIncarnation, ...] = (best,)
        if mode in HAS_VOTERS and not any(one.end_offset for one in present):
            members = tuple(MemberIncarnation(one.replica_id, one.incarnation) for one in present)
        # Where there are messages the others come in once they have what the best has: an election
        # among all might not ask it.
        copies = COPIES_OF_ONE if mode is AckReplicas.ONE else len(members) // 2 + 1
        epoch = max(1, *(one.last_epoch for one in present))
        state = GroupState(
            log_id=self._replica.position().store_id,
            epoch=epoch,
            master=None,
            in_sync=members,
            mode=mode,
            copies=copies if mode in HAS_VOTERS else 1,
            voters=tuple(sorted(one.replica_id for one in present)),
            mode_since_epoch=epoch,
            reason=reason,
        )
        self._session.change_record(self._config.broker_name, 0, state, on_made)

    def _on_made(self, outcome: int | MQMeshError) -> None:
        if isinstance(outcome, MQMeshError) and not isinstance(outcome, Conflict):
            _log.warning("the group's record could not be made: %s", outcome)

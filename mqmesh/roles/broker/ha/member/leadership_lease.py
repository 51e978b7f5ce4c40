"""Lease of a leader, by time: its session holds, or all others have promised."""

import logging
from collections.abc import Callable
from functools import partial

from mqmesh.clock import Clock
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import MQMeshError
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import HoldStillRequest
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.lead.failsafe import Failsafe
from mqmesh.roles.broker.ha.lead.isolation import FollowerWatch, is_isolated
from mqmesh.roles.broker.ha.leadership import CUT_OFF, ISOLATED, Leadership
from mqmesh.roles.broker.ha.member.replica_session import ReplicaSession
from mqmesh.roles.broker.ha.replica_peers import ReplicaPeers

_log = logging.getLogger(__name__)


class LeadershipLease:
    """A replica's right to lead, while it does.

    Args:
        config: Of the broker.
        session: Of the replica.
        peers: The other replicas.
        leadership: While it leads.
        clock: Source of time.
    """

    def __init__(
        self,
        config: BrokerConfig,
        session: ReplicaSession,
        peers: ReplicaPeers,
        leadership: Callable[[], Leadership | None],
        clock: Clock,
    ) -> None:
        self._config = config
        self._session = session
        self._peers = peers
        self._leadership = leadership
        self._clock = clock
        self._failsafe = Failsafe(session.ttl_ms, config.ha.failsafe)
        self._followers = FollowerWatch()

    def begin(self, *, is_failsafe: bool) -> None:
        """Begin a new epoch that this replica leads: nobody has promised anything yet.

        Args:
            is_failsafe: It may go on by promises (failsafe).
        """
        self._failsafe = Failsafe(self._session.ttl_ms, is_failsafe)
        self._followers = FollowerWatch()

    def allow_failsafe(self, *, is_failsafe: bool) -> None:
        """Another setting is in force (failsafe)."""
        self._failsafe.is_enabled = is_failsafe

    def holds(self) -> bool:
        """Return whether nobody else can lead by now, as far as that rests on time."""
        if self._session.holds():
            return True
        leadership, now_ms = self._leadership(), self._clock.boot_ms()
        return leadership is not None and self._failsafe.holds(leadership.electable, now_ms)

    def look(self, leadership: Leadership, now_ms: int) -> bool:
        """Check a leader whose session is not renewed, or that reaches too few followers.

        Args:
            leadership: Of now.
            now_ms: Monotonic clock.

        Returns:
            False if it must lead no more.
        """
        if leadership.policy.mode is AckReplicas.NONE:
            boot_ms = self._clock.boot_ms()
            if self._failsafe.must_ask(self._session.left_ms, boot_ms):
                self._ask_to_hold_still(leadership, boot_ms)
        if not leadership.may_answer():
            return False
        was_isolated = leadership.is_isolated
        leadership.is_isolated = is_isolated(leadership, now_ms)
        if leadership.is_isolated and not was_isolated:
            _log.error("sends are refused: %s", ISOLATED)
        elif was_isolated and not leadership.is_isolated:
            _log.warning("sends are taken again: the coordinator or enough followers are reached")
        self._look_for_followers(leadership, now_ms)
        return True

    def _look_for_followers(self, leadership: Leadership, now_ms: int) -> None:
        was_cut_off = leadership.is_cut_off
        leadership.is_cut_off = self._followers.is_cut_off(leadership, now_ms)
        if leadership.is_cut_off is was_cut_off:
            return
        if leadership.is_cut_off:
            _log.error("sends are refused: %s", CUT_OFF)
        else:
            _log.warning("sends are taken again: enough followers are reached")
        self._session.renew_soon()  # replicas that could take over have to know

    def _ask_to_hold_still(self, leadership: Leadership, boot_ms: int) -> None:
        config, failsafe = self._config, self._failsafe
        request = HoldStillRequest(
            config.broker_name, leadership.epoch, config.broker_id, failsafe.ttl_ms
        )

        def on_done(replica_id: int, outcome: Command | MQMeshError) -> None:
            if not isinstance(outcome, MQMeshError):
                failsafe.on_promised(replica_id, boot_ms)

        header = encode_header(request)
        for one in leadership.electable:
            done = partial(on_done, one)
            self._peers.ask(one, RequestCode.HOLD_STILL, header, done, failsafe.ttl_ms)

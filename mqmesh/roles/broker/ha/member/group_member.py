"""A replica among the replicas of its group: the group's record, and whom it follows by it.

Decides whether the broker leads or follows, and whom; what that takes is the process's. Pure
machines (``election``, ``leadership``, ``in_sync``) decide; this module, and the parts in
``member``, report to them what comes from the coordinator, from other replicas and of time, and
carry out what they want.
"""

import logging
from functools import partial
from typing import Final

import msgspec

from mqmesh.coordination.interface import (
    Coordinator,
    GroupState,
    GroupView,
    LiveReplica,
    MemberIncarnation,
    Presence,
    SettingsRecord,
    StateRecord,
)
from mqmesh.errors import InvalidArgument, MQMeshError, NotMaster, StaleEpoch
from mqmesh.host import own_process
from mqmesh.protocol.command import Answer, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    ElectReplicaRequest,
    FenceRequest,
    FenceResponse,
    HaStatus,
    HoldStillRequest,
    InitGroupRequest,
    StandRequest,
)
from mqmesh.protocol.request import Request
from mqmesh.protocol.route import BrokerAddress
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.administration.cluster_settings import ClusterSettings
from mqmesh.roles.broker.ha.administration.group_admin_service import (
    GroupAdminService,
    GroupAdminView,
    check_epoch,
)
from mqmesh.roles.broker.ha.effects import ChangeRecord, Effect, Follow, ReadRecord, ResumeSends
from mqmesh.roles.broker.ha.election import SILENCE_MS
from mqmesh.roles.broker.ha.lead.failsafe import VoteAbstention
from mqmesh.roles.broker.ha.leadership import LEASE_OVER, Leadership, outside
from mqmesh.roles.broker.ha.member.bootstrap import GroupBootstrap
from mqmesh.roles.broker.ha.member.candidate import Candidate
from mqmesh.roles.broker.ha.member.ha_metrics import HaMetrics, MemberStatus
from mqmesh.roles.broker.ha.member.leader_hand_over import LeaderHandOver
from mqmesh.roles.broker.ha.member.leadership_lease import LeadershipLease
from mqmesh.roles.broker.ha.member.process import Replica, World
from mqmesh.roles.broker.ha.member.replica_session import ReplicaSession
from mqmesh.roles.broker.ha.replica_peers import ReplicaPeers
from mqmesh.roles.broker.ha.vote_state import KeptVoteState
from mqmesh.roles.dispatch import Handler

SETTINGS_MS: Final = 5_000
"""Interval at which the settings of the cluster are read."""
STALE_LEADER_MS: Final = 3_000
"""An election that somebody promised something for is over after so long, won or not."""
GIVE_WAY_MS: Final = 2_000
"""A replica that could not begin to lead stays away for so long."""

_log = logging.getLogger(__name__)


class GroupMember:
    """Membership of one replica; its broker reports turns and time.

    Args:
        config: Of the broker.
        address: Where it listens, ``host:port``.
        coordinator: Keeps the group's record.
        promises: Promises of the replica.
        replica: The process.
        peers: The other replicas.
        world: Time and chance.

    Attributes:
        leadership: While it leads.
        view: The group as this replica knows it.
    """

    def __init__(
        self,
        config: BrokerConfig,
        address: BrokerAddress,
        coordinator: Coordinator,
        promises: KeptVoteState,
        replica: Replica,
        peers: ReplicaPeers,
        world: World,
    ) -> None:
        self._config = config
        self._address = address.tcp
        self._server_key = address.server_key
        self._loop, self._clock = world.loop, world.clock
        self._coordinator = coordinator
        self._promises = promises
        self._replica = replica
        self._peers = peers
        self.view = GroupView(config.broker_name, StateRecord(0, None))
        self._is_known = False
        ttl_ms = config.ha.lease_ttl_ms
        self._session = ReplicaSession(coordinator, ttl_ms, self._presence, self._react, world)
        self._settings = ClusterSettings(config)
        self._settings_ms = 0
        self._founding = GroupBootstrap(config, self._session, replica, promises)
        self._chronicle = HaMetrics()
        self._candidacy = Candidate(
            config,
            coordinator,
            self._session,
            peers,
            replica,
            self._chronicle,
            self,
            world,
        )
        self._succession = LeaderHandOver(
            config.broker_id,
            replica,
            lambda: self.leadership,
            self._present,
            self.turn_ended,
            world,
        )
        self._mandate = LeadershipLease(
            config, self._session, peers, lambda: self.leadership, self._clock
        )
        self._started_ms = self._clock.boot_ms()
        self._stillness = VoteAbstention(started_until_ms=self._started_ms + ttl_ms)
        self._leader = ("", -1)
        self._is_outside = False
        self._promised_ms = self._clock.monotonic_ms()
        self._closed = False
        self.leadership: Leadership | None = None
        self._desk = GroupAdminService(
            config.broker_name,
            coordinator,
            GroupAdminView(
                lambda: self.leadership,
                lambda: self._session.session_id,
                self._settings.check,
                self._on_settings,
            ),
            world.loop,
            world.clock,
        )

    @property
    def me(self) -> MemberIncarnation:
        """The replica now."""
        return self._promises.state.member

    @property
    def minimum(self) -> int:
        """Least replicas in sync with ``all`` (min_in_sync_replicas)."""
        return self.config.ha.min_in_sync_replicas

    # ---- For the process -------------------------------------------------------------

    @property
    def handlers(self) -> dict[RequestCode, Handler]:
        """Handlers of the requests that it serves, in every role."""
        return {
            RequestCode.FENCE: self._on_fence,
            RequestCode.STAND_FOR_ELECTION: self._on_stand,
            RequestCode.HOLD_STILL: self._on_hold_still,
            RequestCode.SWITCH_OVER: self._succession.on_request,
            RequestCode.ELECT_REPLICA: self._on_elect,
            RequestCode.INIT_GROUP: self._on_init,
            **self._desk.handlers,
        }

    @property
    def state(self) -> str:
        """State for people; a leader reports its own."""
        if self.leadership is not None:
            return "MASTER"
        if self._is_outside:
            return "OUTSIDE"
        return "CANDIDATE" if self._candidacy.is_standing else "FOLLOWING"

    def status(self) -> MemberStatus:
        """Return the status of the membership now."""
        session, left_ms = self._session, self._session.left_ms
        return MemberStatus(
            self._chronicle.elections,
            max(left_ms, 0),
            # One that nobody can renew is not given up: the coordinator may know it yet.
            session.is_open and left_ms > 0,
            self._promises.promised_epoch,
            session.renewals,
            self._chronicle.set_changes,
            self._chronicle.failover_ms,
            self.leadership is not None and not session.holds(),
            max(session.ttl_ms - left_ms, 0) if session.is_open else -1,
            self.view.record.state,
        )

    def complete(self, status: HaStatus) -> HaStatus:
        """Return a replica's status, completed with that of its membership."""
        one = self.status()
        answer = msgspec.structs.replace(
            status,
            lease_age_ms=one.lease_age_ms,
            failsafe=one.is_failsafe,
            settings=self._settings.in_force(),
            differing=self._settings.differing(),
        )
        if one.state is None:
            return answer
        return msgspec.structs.replace(
            answer,
            voters=list(one.state.voters),
            paused=one.state.paused,
            reason=one.state.reason,
            switched_ms=one.state.switched_ms,
        )

    def start(self) -> None:
        """Looks for its group from now on."""
        self._coordinator.watch([self._config.broker_name], self._on_view)
        self._session.renew()

    def tick(self, now_ms: int) -> None:
        """Time went on; monotonic clock."""
        self._session.renew()
        self._look_at_settings(now_ms)
        if self.leadership is not None:
            # A leader that stops together with its followers leaves them in the set.
            if not self._succession.is_near:
                in_sync = self.leadership.in_sync
                in_sync.on_sessions(
                    frozenset(one.presence.replica_id for one in self.view.members), now_ms
                )
                self._carry_out(in_sync.tick(now_ms))
                self._succession.look_for_preferred(now_ms)
            if self.leadership is not None and not self._mandate.look(self.leadership, now_ms):
                self.step_down(LEASE_OVER)
        else:
            self._suspect(now_ms)
            state = self.view.record.state
            if state is not None and state.master != self._config.broker_id:
                self._follow(state)

    def turn_ended(self) -> None:
        """A turn of the loop is over."""
        if self.leadership is None:
            return
        self._chronicle.look(self.leadership, self._clock.monotonic_ms())
        if self.leadership.is_over:
            self.step_down(self.leadership.is_over)
        else:
            now_ms = self._clock.monotonic_ms()
            self._carry_out(self._succession.tick(now_ms))

    def step_down(self, reason: str) -> None:
        """End the leadership of this replica, since another one leads, or it must not."""
        if self.leadership is None:
            return
        _log.warning("this replica leads no more: %s", reason)
        self._succession.end(NotMaster(reason))
        self.leadership = None
        self._leader = ("", -1)
        self._replica.follow("", 0, 0)
        self._candidacy.rest()
        self._loop.call_later(0, self._react)

    def retire(self) -> bool:
        """Its process is to stop: another one leads first, if it can.

        Returns:
            False while there is something to wait for; then ask again after a turn of the loop.
        """
        return self._succession.retire()

    def leave(self) -> None:
        """Leave the group at the stop, so that it need not wait for the session to end."""
        self._closed = True
        self._succession.close()
        self._candidacy.close()
        self._session.leave()

    def close(self) -> None:
        """Lets go of everything."""
        self._closed = True
        self._succession.close()
        self._candidacy.close()
        self._session.close()
        self._peers.close()
        self._coordinator.close()

    # ---- What it says of itself, and has promised ------------------------------------

    def _presence(self) -> Presence:
        at, state, config = self._replica.position(), self._promises.state, self._config
        return Presence(
            group=config.broker_name,
            replica_id=config.broker_id,
            identity=state.identity,
            incarnation=state.incarnation,
            address=self._address,
            replica_address=self._address,
            server_key=self._server_key,
            last_epoch=at.last_epoch,
            end_offset=at.end,
            synced_offset=at.synced,
            can_lead=at.can_lead,
            is_cut_off=self.leadership is not None and self.leadership.is_cut_off,
            preferred=config.ha.preferred,
            process=own_process(),
        )

    def still_ms(self) -> int:
        """Return for how many ms more this replica has promised not to stand, and not to lead."""
        state = self.view.record.state
        if state is None:
            return 0
        last_epoch, now_ms = self._replica.position().last_epoch, self._clock.boot_ms()
        return self._stillness.left_ms(state, self._config.broker_id, last_epoch, now_ms)

    # ---- Settings of the cluster -----------------------------------------------------

    @property
    def config(self) -> BrokerConfig:
        """The replica's settings, with those of the cluster above them."""
        return self._settings.config

    def _look_at_settings(self, now_ms: int) -> None:
        if now_ms >= self._settings_ms and not self._closed:
            self._settings_ms = now_ms + SETTINGS_MS
            self._desk.read_settings()

    def _on_settings(self, record: SettingsRecord) -> None:
        if self._closed or not self._settings.take(record):
            return
        for one in self._settings.differing():
            _log.warning(
                "ha.%s = %s is not in force: the cluster has %s", one.name, one.own, one.in_force
            )
        for name, problem in self._settings.problems.items():
            _log.error("ha.%s of the cluster cannot be used here: %s", name, problem)
        ttl_ms = self.config.ha.lease_ttl_ms
        self._stillness.started_until_ms = self._started_ms + ttl_ms
        self._session.change_ttl(ttl_ms)
        if self.leadership is not None:
            self._use_settings(self.leadership)

    def _use_settings(self, leadership: Leadership) -> None:
        ha = self.config.ha
        minimum = ha.min_in_sync_replicas
        leadership.policy = msgspec.structs.replace(leadership.policy, minimum=minimum)
        leadership.in_sync.lag_max_ms = ha.replica_lag_max_ms
        self._mandate.allow_failsafe(is_failsafe=ha.failsafe)

    # ---- The group's record ----------------------------------------------------------

    def _on_view(self, view: GroupView) -> None:
        self.view, self._is_known = view, True
        if view.record.state is not None:
            self._settings.on_mode(view.record.state.mode)
        self._peers.meet(view.members, self._config.broker_id)
        self._react()

    def _react(self) -> None:
        """Follows what is known of the group."""
        record = self.view.record
        state, now_ms = record.state, self._clock.monotonic_ms()
        if self._closed or not self._is_known:
            return
        if state is None:
            self._founding.make_group(self._present())
            return
        if self.leadership is not None:
            if state.epoch > self.leadership.epoch:
                self.step_down(f"epoch {state.epoch} has begun")
            elif state.epoch == self.leadership.epoch:
                part = self._succession.part(self.leadership)
                self._carry_out(part.on_read(record, now_ms))
            return
        if state.master == self._config.broker_id:
            self._take_over(record, state)
        else:
            self._follow(state)

    def _follow(self, state: GroupState) -> None:
        if not state.is_voter(self._config.broker_id):
            self._stay_outside(state)
            return
        self._is_outside = False
        leader = self._member(state.master)
        if leader is None or (leader.address, state.epoch) == self._leader:
            return
        if state.epoch < self._promises.promised_epoch:
            if self._clock.monotonic_ms() - self._promised_ms < STALE_LEADER_MS:
                return  # an election is on its way
            # It came to nothing. The leader refuses who has promised more, and leads no more: the
            # next election is for an epoch that this replica can follow.
            _log.warning("this replica has promised more than epoch %d, and says so", state.epoch)
        self._leader = (leader.address, state.epoch)
        self._chronicle.on_followed()
        _log.info("replica %s at %s leads epoch %d", state.master, leader.address, state.epoch)
        self._replica.follow(leader.address, state.epoch, state.unclean_since)

    def _stay_outside(self, state: GroupState) -> None:
        if not self._is_outside:
            self._is_outside, self._leader = True, ("", -1)
            reason = outside(self._config.broker_name, self._config.broker_id, state)
            _log.warning("%s", reason)
            self._replica.stay_outside(reason)

    def _take_over(self, record: StateRecord, state: GroupState) -> None:
        """The record names this replica. Unless it has led this epoch before, it may."""
        is_new = self._replica.position().last_epoch < state.epoch
        if is_new and state.epoch > self._promises.promised_epoch and self._session.is_open:
            if still_ms := self.still_ms():
                self._loop.call_later(still_ms, self._react)
            else:
                self.on_elected(record)

    def _present(self) -> list[Presence]:
        return [one.presence for one in self.view.members]

    def _member(self, replica_id: int | None) -> Presence | None:
        return next((one for one in self._present() if one.replica_id == replica_id), None)

    # ---- Suspicion, and elections ----------------------------------------------------

    def _suspect(self, now_ms: int) -> None:
        if self.view.record.state is None:
            self._founding.make_group(self._present())
        else:
            self._candidacy.suspect(now_ms)

    def on_members(self, members: tuple[LiveReplica, ...]) -> None:
        """Implement ``StandingMember.on_members``."""
        self.view = msgspec.structs.replace(self.view, members=members)
        if self.leadership is None:
            self._suspect(self._clock.monotonic_ms())

    def _know(self, record: StateRecord | None) -> None:
        if record is not None and record.version:
            self.view = msgspec.structs.replace(self.view, record=record)

    def on_not_elected(self, record: StateRecord | None) -> None:
        """Implement ``StandingMember.on_not_elected``."""
        self._know(record)
        self._react()

    def promise(self, epoch: int) -> FenceResponse:
        """VoteState an epoch, unless a higher one was; what the log has is read after it."""
        state = self._promises.state
        if epoch > state.promised_epoch:
            # Nothing of an earlier leader comes after what is answered.
            self._leader, self._is_outside = ("", -1), False
            if self.leadership is None:
                self._replica.follow("", 0, 0)
            self._promises.promise(epoch)
            self._promised_ms = self._clock.monotonic_ms()
            state = self._promises.state
        at = self._replica.position()
        return FenceResponse(
            self._config.broker_id,
            state.promised_epoch,
            state.incarnation,
            at.last_epoch,
            at.end,
            at.can_lead,
            self._config.ha.preferred,
        )

    # ---- What a leader's parts want done ---------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReadRecord):
                self._coordinator.read(self._config.broker_name, self._on_read)
            elif isinstance(effect, ChangeRecord):
                self._change(effect)
            elif isinstance(effect, Follow):
                self._know(effect.record)
                self._succession.on_follow(effect)
                # In a turn of its own: it takes down what this may have come from.
                self._loop.call_later(0, partial(self.step_down, effect.reason))
            elif isinstance(effect, ResumeSends):
                _log.warning("this replica leads on: %s", effect.reason)
                self._succession.end(InvalidArgument(effect.reason))

    def _on_read(self, outcome: StateRecord | MQMeshError) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._closed or isinstance(outcome, MQMeshError):
            return  # it is read again
        if self.leadership is not None:
            part = self._succession.part(self.leadership)
            self._carry_out(part.on_read(outcome, now_ms))

    def _change(self, effect: ChangeRecord) -> None:
        leadership = self.leadership

        def on_changed(outcome: int | MQMeshError) -> None:
            now_ms = self._clock.monotonic_ms()
            if self._closed:
                return
            if leadership is not None and leadership is self.leadership:
                part = self._succession.part(leadership)
                self._carry_out(part.on_outcome(outcome, now_ms))

        group = self._config.broker_name
        self._session.change_record(group, effect.version, effect.state, on_changed)

    def on_elected(self, record: StateRecord) -> None:
        """Implement ``StandingMember.on_elected``."""
        assert record.state is not None
        self.view = msgspec.structs.replace(self.view, record=record)
        epoch = record.state.epoch
        self._settings.on_mode(record.state.mode)
        try:
            self._promises.promise(epoch)
            self.leadership = self._replica.lead(record)
            self._succession.on_lead()
            self._mandate.begin(is_failsafe=self.config.ha.failsafe)
            self.leadership.lease_holds = self._mandate.holds
        except MQMeshError as error:
            _log.critical("this replica was elected and cannot lead epoch %d: %s", epoch, error)
            self._give_way()
            return
        self._chronicle.on_elected(self.leadership, record.state)
        self._leader = ("", -1)
        _log.warning("this replica leads epoch %d: %s", epoch, record.state.reason)
        mode, wanted = record.state.mode.value, self._config.ha.ack_replicas.value
        if mode != wanted:
            _log.warning(
                "ha.ack_replicas = %r is not in force: the group was made with %r", wanted, mode
            )

    def _give_way(self) -> None:
        """Lets another one stand: without a session this replica is not there."""
        self.leadership = None
        self._candidacy.stay_away(GIVE_WAY_MS)
        self._session.give_up(GIVE_WAY_MS)

    # ---- Other replicas --------------------------------------------------------------

    def _on_fence(self, request: Request, header: FenceRequest) -> Answer:
        self._check_group(header.broker_name)
        if header.epoch > self._promises.promised_epoch:
            self._candidacy.on_stale(header.epoch)
            # Before it is answered, since nothing may be confirmed any more once it is.
            self.step_down(f"replica {header.replica_id} stands for epoch {header.epoch}")
        return self.promise(header.epoch)

    def _on_stand(self, request: Request, header: StandRequest) -> Reply:
        self._check_group(header.broker_name)
        if self.leadership is None:
            reason = (
                f"replica {header.replica_id} says that replica {self._config.broker_id} has a "
                "longer log"
            )
            self._candidacy.stand_at_once(reason)
        return Reply()

    def _on_hold_still(self, request: Request, header: HoldStillRequest) -> Reply:
        self._check_group(header.broker_name)
        state = self.view.record.state
        newest = max(self._promises.promised_epoch, 0 if state is None else state.epoch)
        if header.epoch < newest:
            raise StaleEpoch(f"epoch {header.epoch} is over, {newest} was promised or has begun")
        if self.leadership is not None or self._candidacy.is_standing:
            raise InvalidArgument("this replica leads, or stands for election")
        self._stillness.promise(self._clock.boot_ms() + header.ttl_ms)
        return Reply()

    # ---- Administrators --------------------------------------------------------------

    def _on_elect(self, request: Request, header: ElectReplicaRequest) -> Reply:
        state, now_ms = self.view.record.state, self._clock.monotonic_ms()
        if state is None:
            raise InvalidArgument("the coordinator knows nothing of this group")
        check_epoch(header.epoch, state.epoch)
        if not state.is_voter(self._config.broker_id):
            raise InvalidArgument(outside(self._config.broker_name, self._config.broker_id, state))
        if self.leadership is not None or self._replica.silent_ms(now_ms) < SILENCE_MS:
            raise InvalidArgument("the group has a master that lives")
        if not self._session.is_open:
            raise InvalidArgument("this replica does not reach the coordinator")
        if still_ms := self.still_ms():
            raise InvalidArgument(f"it has promised the master not to lead for {still_ms} ms more")
        reason = "an administrator has it lead, whatever it lacks"
        self._candidacy.stand_at_once(reason, is_unclean=True)
        return Reply()

    def _on_init(self, request: Request, header: InitGroupRequest) -> None:
        if not self._is_known or self.view.record.state is not None:
            raise InvalidArgument("the coordinator knows this group, or cannot be asked now")
        self._founding.make_anew(request, header.replica_ids, self._present())

    def _check_group(self, broker_name: str) -> None:
        if broker_name != self._config.broker_name:
            raise InvalidArgument(
                f"this is a replica of {self._config.broker_name!r}, not of {broker_name!r}"
            )

"""Candidate for election: when a replica misses its leader, stands, and carries its election out.

``election``, which is pure, decides; this module carries it out, and reports the outcomes.
"""

import logging
from functools import partial
from typing import Final, Protocol

import msgspec

from mqmesh.coordination.interface import (
    Coordinator,
    GroupState,
    GroupView,
    LiveReplica,
    MemberIncarnation,
    StateRecord,
)
from mqmesh.errors import MQMeshError, StorageError
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import FenceRequest, FenceResponse, StandRequest
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.confirm import least_to_confirm
from mqmesh.roles.broker.ha.effects import (
    AskToStand,
    ChangeRecord,
    Effect,
    Fence,
    Follow,
    Lead,
    ReadRecord,
)
from mqmesh.roles.broker.ha.election import (
    ELECTION_MS,
    SILENCE_MS,
    CandidateStep,
    Election,
    FenceAnswer,
    Suspicion,
    standing_delay_ms,
    suspicion_of,
)
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha.member.ha_metrics import HaMetrics
from mqmesh.roles.broker.ha.member.process import Replica, World
from mqmesh.roles.broker.ha.member.replica_session import ReplicaSession
from mqmesh.roles.broker.ha.replica_peers import ReplicaPeers

STEP_MS: Final = 20
"""Interval at which time is looked at during an election."""
LOOK_MS: Final = 250
"""Interval at which it is asked whether a silent leader renews its session."""
REST_MS: Final = 300
"""After an election that came to nothing, and at most as long again by chance."""

_log = logging.getLogger(__name__)


class StandingMember(Protocol):
    """Membership of the replica that stands, as its elections use it."""

    leadership: Leadership | None

    @property
    def view(self) -> GroupView:
        """State of the group, as far as it is known."""

    @property
    def me(self) -> MemberIncarnation:
        """The replica now."""

    @property
    def minimum(self) -> int:
        """Least replicas in sync with ``all`` (min_in_sync_replicas)."""

    def still_ms(self) -> int:
        """Return for how long it has promised not to stand, ms."""

    def promise(self, epoch: int) -> FenceResponse:
        """Promise an epoch, durably.

        Raises:
            StorageError: The promise cannot be kept.
        """

    def on_members(self, members: tuple[LiveReplica, ...]) -> None:
        """Take over which members are there, as the coordinator says."""

    def on_elected(self, record: StateRecord) -> None:
        """Lead by this record."""

    def on_not_elected(self, record: StateRecord | None) -> None:
        """Lead not; the newest record that is known, None for none."""


class Candidate:
    """The elections that one replica stands for, one at a time.

    Args:
        config: Of the broker.
        coordinator: Keeps the group's record.
        session: Of the replica.
        peers: The other replicas.
        replica: The process.
        chronicle: Notified of a master that is missed.
        member: The replica's membership.
        world: Time and chance.
    """

    def __init__(
        self,
        config: BrokerConfig,
        coordinator: Coordinator,
        session: ReplicaSession,
        peers: ReplicaPeers,
        replica: Replica,
        chronicle: HaMetrics,
        member: StandingMember,
        world: World,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._session = session
        self._peers = peers
        self._replica = replica
        self._chronicle = chronicle
        self._member = member
        self._loop, self._clock, self._chance = world.loop, world.clock, world.chance
        self._election = Election(member.me)
        self._is_stepping = False
        self._is_requested = False
        self._stand_ms: int | None = None
        self._rest_until_ms = 0
        self._look_ms = 0
        self._closed = False

    @property
    def is_standing(self) -> bool:
        """An election is under way."""
        return self._election.step is not CandidateStep.IDLE

    def close(self) -> None:
        """Stands no more."""
        self._closed = True

    # ---- Suspicion -------------------------------------------------------------------

    def suspect(self, now_ms: int) -> None:
        """Looks whether the leader is missed; monotonic clock."""
        if self.is_standing or now_ms < self._rest_until_ms:
            return
        if self._member.still_ms():
            self._stand_ms = None
            return
        silent_ms = self._replica.silent_ms(now_ms)
        if silent_ms >= SILENCE_MS and now_ms >= self._look_ms:
            self._look_ms = now_ms + LOOK_MS
            # The view has renewals only as old as the group's last change.
            self._coordinator.presences(self._config.broker_name, self._on_presences)
        view = self._member.view
        why = self._suspicion(view, now_ms)
        if not why.stands or not self._session.is_open or not self._replica.position().can_lead:
            self._stand_ms = None
        elif self._stand_ms is None:
            drawn = self._chance(16)
            delay_ms = standing_delay_ms(view, self._config.broker_id, drawn)
            self._stand_ms = now_ms + delay_ms
            self._loop.call_later(delay_ms, self._stand_if_due)

    def _on_presences(self, outcome: tuple[LiveReplica, ...] | MQMeshError) -> None:
        if not isinstance(outcome, MQMeshError):
            self._member.on_members(outcome)

    def _suspicion(self, view: GroupView, now_ms: int) -> Suspicion:
        return suspicion_of(
            view,
            self._config.broker_id,
            silent_ms=self._replica.silent_ms(now_ms),
            ttl_ms=self._session.ttl_ms,
            restart_ms=self._config.ha.restart_before_failover_ms,
            minimum=self._member.minimum,
        )

    def _stand_if_due(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._closed or self._member.leadership is not None or self._stand_ms is None:
            return
        why = self._suspicion(self._member.view, now_ms)
        if now_ms >= self._stand_ms and why.stands:
            self._stand_ms = None
            self._stand(str(why.value), now_ms)

    # ---- Elections -------------------------------------------------------------------

    def stand_at_once(self, reason: str, *, is_unclean: bool = False) -> None:
        """Stand for election; the caller has looked whether there is a leader.

        Args:
            reason: For people.
            is_unclean: This replica leads even if it lacks confirmed messages.
        """
        now_ms = self._clock.monotonic_ms()
        self._rest_until_ms = now_ms
        self._stand(reason, now_ms, is_requested=True, is_unclean=is_unclean)

    def _stand(
        self, reason: str, now_ms: int, *, is_requested: bool = False, is_unclean: bool = False
    ) -> None:
        if self.is_standing or not self._session.is_open:
            return
        if still_ms := self._member.still_ms():
            _log.info("this replica has promised not to stand for %d ms more", still_ms)
            return
        # The sender has looked whether there is a leader, and has it fenced by now.
        self._is_requested = is_requested
        _log.warning("this replica stands for election: %s", reason)
        self._chronicle.on_missed(now_ms - self._replica.silent_ms(now_ms))
        self._election.me = self._member.me
        wall_ms = self._clock.wall_ms()
        effects = self._election.stand(
            reason, now_ms, is_unclean=is_unclean, least=self._least(now_ms), wall_ms=wall_ms
        )
        self._carry_out(effects)
        if not self._is_stepping:
            self._is_stepping = True
            self._loop.call_later(STEP_MS, self._step)

    def _least(self, now_ms: int) -> int:
        """So many have to promise at least; 0 for as many as safety needs."""
        view = self._member.view
        if view.record.state is None or self._suspicion(view, now_ms) is not Suspicion.CUT_OFF:
            return 0
        return least_to_confirm(view.record.state, self._member.minimum)

    def _step(self) -> None:
        if self._closed or not self.is_standing:
            self._is_stepping = False
            return
        effects = self._election.tick(self._clock.monotonic_ms())
        self._carry_out(effects)
        self._loop.call_later(STEP_MS, self._step)

    def on_stale(self, epoch: int) -> None:
        """Another replica stands for a later epoch."""
        self._carry_out(self._election.on_stale(epoch))

    def rest(self) -> None:
        """Stands for nothing for a while."""
        self._stand_ms = None
        now_ms = self._clock.monotonic_ms()
        self._rest_until_ms = now_ms + REST_MS + self._chance(16) % REST_MS

    def stay_away(self, away_ms: int) -> None:
        """Suspects nobody for so long."""
        self._rest_until_ms = self._clock.monotonic_ms() + away_ms

    # ---- What an election wants done -------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReadRecord):
                self._coordinator.read(self._config.broker_name, self._on_read)
            elif isinstance(effect, ChangeRecord):
                self._change(effect)
            elif isinstance(effect, Fence):
                self._fence(effect)
            elif isinstance(effect, AskToStand):
                header = encode_header(
                    StandRequest(self._config.broker_name, self._config.broker_id)
                )
                self._peers.ask(
                    effect.replica_id, RequestCode.STAND_FOR_ELECTION, header, _ignore, ELECTION_MS
                )
            elif isinstance(effect, Lead):
                self._member.on_elected(effect.record)
            elif isinstance(effect, Follow):
                _log.info("this replica does not lead: %s", effect.reason)
                self.rest()
                self._member.on_not_elected(effect.record)

    def _on_read(self, outcome: StateRecord | MQMeshError) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._closed or isinstance(outcome, MQMeshError):
            return  # it is read again, or the election ends
        view = msgspec.structs.replace(self._member.view, record=outcome)
        lives = not self._is_requested and not self._suspicion(view, now_ms).stands
        self._carry_out(self._election.on_read(outcome, now_ms, leader_lives=lives))

    def _change(self, effect: ChangeRecord) -> None:
        on_changed = partial(self._on_changed, effect.state)
        group = self._config.broker_name
        self._session.change_record(group, effect.version, effect.state, on_changed)

    def _on_changed(self, wanted: GroupState, outcome: int | MQMeshError) -> None:
        # The outcome of a change that an earlier election gave up does not concern this one.
        if not self._closed and wanted == self._election.wanted:
            self._carry_out(self._election.on_outcome(outcome, self._clock.monotonic_ms()))

    def _fence(self, effect: Fence) -> None:
        config = self._config
        header = encode_header(FenceRequest(config.broker_name, effect.epoch, config.broker_id))
        for replica_id in effect.replica_ids:
            if replica_id == config.broker_id:
                continue
            on_done = partial(self._on_promise, effect.epoch)
            self._peers.ask(replica_id, RequestCode.FENCE, header, on_done, ELECTION_MS)
        try:
            self._on_answer(effect.epoch, self._member.promise(effect.epoch))
        except StorageError as error:
            _log.error("this replica cannot stand, its promise cannot be kept: %s", error)

    def _on_promise(self, epoch: int, outcome: Command | MQMeshError) -> None:
        try:
            if isinstance(outcome, MQMeshError):
                raise outcome
            answer = decode_header(FenceResponse, outcome.header)
        except MQMeshError as error:
            _log.info("a replica does not promise epoch %d: %s", epoch, error)
            return
        if not self._closed:
            self._on_answer(epoch, answer)

    def _on_answer(self, epoch: int, answer: FenceResponse) -> None:
        if answer.promised_epoch > epoch:
            effects = self._election.on_stale(answer.promised_epoch)
        else:
            member = MemberIncarnation(answer.replica_id, answer.incarnation)
            one = FenceAnswer(
                member, answer.last_epoch, answer.log_end, answer.can_lead, answer.preferred
            )
            now_ms = self._clock.monotonic_ms()
            effects = self._election.on_fence_answer(epoch, one, now_ms)
        self._carry_out(effects)


def _ignore(outcome: Command | MQMeshError) -> None:
    """Ignore the outcome: the replica that was asked to stand does, or another one will."""

"""Hand-over of the lead: by an administrator, a preferred replica, a stop of the process.

``lead.switch_over`` decides the steps; the client that asked gets the outcome.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from mqmesh.coordination.interface import Presence
from mqmesh.errors import InvalidArgument, MQMeshError, NotMaster
from mqmesh.protocol.command import Reply
from mqmesh.protocol.replication import SwitchOverRequest, SwitchOverResponse
from mqmesh.protocol.request import PendingReply, Request
from mqmesh.roles.broker.ha.administration.group_admin_service import check_epoch
from mqmesh.roles.broker.ha.effects import Effect, Follow
from mqmesh.roles.broker.ha.in_sync import InSyncSet
from mqmesh.roles.broker.ha.lead.switch_over import (
    PATIENCE_MS,
    Preference,
    Retirement,
    RetirementStep,
    SwitchOver,
    choose_successor,
)
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha.member.process import Replica, World

STEP_MS: Final = 20
"""Interval at which a switch-over is looked at."""

_log = logging.getLogger(__name__)


class LeaderHandOver:
    """The switch-overs of one replica, one at a time, while it leads.

    Args:
        replica_id: Of the replica.
        replica: The process.
        leadership: While it leads.
        present: All replicas that are there.
        on_step: Called repeatedly while one is under way: its owner takes its effects then.
        world: Time.
    """

    def __init__(
        self,
        replica_id: int,
        replica: Replica,
        leadership: Callable[[], Leadership | None],
        present: Callable[[], Sequence[Presence]],
        on_step: Callable[[], None],
        world: World,
    ) -> None:
        self._replica_id = replica_id
        self._replica = replica
        self._leadership = leadership
        self._present = present
        self._on_step = on_step
        self._loop, self._clock = world.loop, world.clock
        self._switch: SwitchOver | None = None
        self._pending: PendingReply | None = None
        self._retirement: Retirement | None = None
        self._preference = Preference()
        self._closed = False

    @property
    def is_near(self) -> bool:
        """A switch-over is under way, or the process is to stop."""
        return self._switch is not None or self._retirement is not None

    def on_lead(self) -> None:
        """Begin a new epoch that this replica leads."""
        self._preference = Preference()

    def tick(self, now_ms: int) -> list[Effect]:
        """Looks how far it is; monotonic clock."""
        return [] if self._switch is None else self._switch.tick(now_ms)

    def part(self, leadership: Leadership) -> SwitchOver | InSyncSet:
        """Return the part that handles the change's outcome: switch-over, or in-sync set."""
        return self._switch or leadership.in_sync

    def look_for_preferred(self, now_ms: int) -> None:
        """Hands the lead to a replica that is preferred, once it was in sync for a while."""
        leadership = self._leadership()
        if leadership is None or not leadership.is_confirmed or leadership.in_sync.pending:
            return
        present = self._present()
        due = self._preference.due(
            leadership.in_sync.state,
            self._replica_id,
            {one.replica_id for one in present if one.preferred and one.can_lead},
            now_ms,
            self._clock.wall_ms(),
        )
        if due is None:
            return
        try:
            self._begin(due, "a preferred replica is in sync", is_by_preference=True)
        except InvalidArgument as error:
            _log.info("preferred replica %d does not lead yet: %s", due, error)

    def retire(self) -> bool:
        """The process is to stop: another one leads first, if it can.

        Returns:
            False while there is something to wait for; then ask again after a turn of the loop.
        """
        now_ms = self._clock.monotonic_ms()
        if self._retirement is None:
            self._retirement = Retirement(now_ms)
        one = self._leadership()
        leads = one is not None and one.is_confirmed and not one.in_sync.state.paused
        step = self._retirement.step(now_ms, leads=leads, is_switching=self._switch is not None)
        if step is RetirementStep.HAND_OVER:
            try:
                self._begin(0, "the master is stopped")
            except InvalidArgument as error:
                _log.info("the lead is not handed over before the stop: %s", error)
                return True
        return step is RetirementStep.STOP

    def on_request(self, request: Request, header: SwitchOverRequest) -> Reply | None:
        """An administrator wants it; is answered when it is known what came of it."""
        leadership = self._leadership()
        if leadership is None or not leadership.is_confirmed:
            raise NotMaster(f"replica {self._replica_id} does not lead")
        check_epoch(header.epoch, leadership.epoch)
        if self._switch is not None:
            raise InvalidArgument(f"replica {self._switch.successor} is taking over already")
        self._begin(header.replica_id, "an administrator wants it so", request)
        return None

    def _begin(
        self,
        wanted: int,
        reason: str,
        request: Request | None = None,
        *,
        is_by_preference: bool = False,
    ) -> None:
        leadership = self._leadership()
        assert leadership is not None, "who hands over leads"
        end, now_ms = self._replica.position().end, self._clock.monotonic_ms()
        present = self._present()
        able = {one.replica_id for one in present if one.can_lead}
        successor = choose_successor(
            leadership,
            end,
            wanted,
            unable=set(leadership.members) - able,
            preferred={one.replica_id for one in present if one.preferred},
        )
        self._switch = SwitchOver(
            leadership,
            successor,
            end,
            now_ms + PATIENCE_MS,
            reason,
            self._clock.wall_ms(),
            leaves=self._retirement is not None,
            is_by_preference=is_by_preference,
        )
        self._pending = None if request is None else request.later()
        _log.warning("replica %d is to take over: %s", successor, reason)
        self._switch.begin()
        self._step()

    def _step(self) -> None:
        if self._switch is not None and not self._closed:
            self._on_step()
            self._loop.call_later(STEP_MS, self._step)

    def on_follow(self, effect: Follow) -> None:
        """This replica is to lead no more; maybe since the successor does."""
        state = None if effect.record is None else effect.record.state
        if self._switch is None:
            return
        if state is not None and state.master == self._switch.successor:
            self._answer(self._switch)
        else:
            self.end(NotMaster(effect.reason))

    def _answer(self, switch: SwitchOver) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            answer = SwitchOverResponse(switch.successor, switch.leadership.epoch + 1)
            pending.done(answer)

    def end(self, error: MQMeshError) -> None:
        """End the hand-over: it came to nothing, or the replica leads no more."""
        if self._switch is None:
            return
        pending, self._pending = self._pending, None
        self._switch = None
        if pending is not None:
            pending.fail(error)

    def close(self) -> None:
        """Looks at nothing any more."""
        self._closed = True

"""Requests of administrators that change the record of a group that elects its master.

The leader changes the members of the group, because it knows the confirmed offset. Any replica
changes whether elections are paused, because the leader may be gone.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.coordination.interface import (
    Conflict,
    Coordinator,
    GroupState,
    OutcomeUnknown,
    SessionId,
    SettingsRecord,
    SettingValue,
)
from mqmesh.errors import BrokerNotAvailable, InvalidArgument, MQMeshError, NotMaster
from mqmesh.protocol.command import Answer
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    ChangeVotersRequest,
    ChangeVotersResponse,
    HaSettings,
    HaSettingsRequest,
    PauseFailoverRequest,
    PauseFailoverResponse,
    PutHaSettingsRequest,
)
from mqmesh.protocol.request import PendingReply, Request
from mqmesh.roles.broker.ha.administration.cluster_settings import checked, settings_of
from mqmesh.roles.broker.ha.administration.record_edit import RecordEdit
from mqmesh.roles.broker.ha.in_sync import REREAD_MS
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.dispatch import Handler

VOTERS_PATIENCE_MS: Final = 2_000
"""Time for the voters left to get what is confirmed, and for the record to be changed."""
LOOK_MS: Final = 20
PUTS: Final = 5
"""Tries of a change of settings whose outcome nobody knows."""

_log = logging.getLogger(__name__)


class ServiceLoop(Protocol):
    """Event loop, as far as the service uses it."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> object:
        """Calls back once."""


class GroupAdminView(msgspec.Struct, frozen=True):
    """Replica, as the service sees it.

    Attributes:
        leadership: While it leads.
        session: At the coordinator, None without one.
        check_settings: Checks that the replica could use them; raises ``InvalidArgument``.
        on_settings: Called with the cluster's settings when they were read or changed.
    """

    leadership: Callable[[], Leadership | None]
    session: Callable[[], SessionId | None]
    check_settings: Callable[[dict[str, SettingValue]], None]
    on_settings: Callable[[SettingsRecord], None]


class GroupAdminService:
    """Serves those requests at one replica.

    Args:
        group: Broker group.
        coordinator: Keeps the group's record.
        view: Of the replica.
        loop: Calls back.
        clock: Source of time.
    """

    def __init__(
        self,
        group: str,
        coordinator: Coordinator,
        view: GroupAdminView,
        loop: ServiceLoop,
        clock: Clock,
    ) -> None:
        self._group = group
        self._coordinator = coordinator
        self._view = view
        self._loop = loop
        self._clock = clock

    @property
    def handlers(self) -> dict[RequestCode, Handler]:
        """Handlers of the requests that it serves."""
        return {
            RequestCode.CHANGE_VOTERS: self._on_change_voters,
            RequestCode.PAUSE_FAILOVER: self._on_pause,
            RequestCode.GET_HA_SETTINGS: self._on_get_settings,
            RequestCode.PUT_HA_SETTINGS: self._on_put_settings,
        }

    # ---- Who belongs to the group ----------------------------------------------------

    def _on_change_voters(self, request: Request, header: ChangeVotersRequest) -> Answer | None:
        leadership = self._view.leadership()
        if leadership is None or not leadership.is_confirmed:
            raise NotMaster("this replica does not lead, or has only begun to")
        check_epoch(header.epoch, leadership.epoch)
        in_sync, deadline_ms = leadership.in_sync, self._clock.monotonic_ms() + VOTERS_PATIENCE_MS
        in_sync.change_voters(
            header.replica_id,
            leadership.policy.minimum,
            adds=header.adds,
            deadline_ms=deadline_ms,
        )
        if in_sync.voters_change is None:
            return self._voters(leadership)
        wanted = in_sync.voters_change.voters
        _log.warning("replicas %s are to belong to %s", list(wanted), self._group)
        self._look(request.later(), leadership, wanted, deadline_ms)
        return None

    def _look(
        self, pending: PendingReply, leadership: Leadership, wanted: tuple[int, ...], until_ms: int
    ) -> None:
        """Answers once it is known what came of it."""
        in_sync = leadership.in_sync
        if in_sync.state.voters == wanted:
            _log.warning("replicas %s belong to %s now", list(wanted), self._group)
            pending.done(self._voters(leadership))
        elif leadership is not self._view.leadership() or (
            in_sync.pending is not None and self._clock.monotonic_ms() >= until_ms
        ):
            pending.fail(
                BrokerNotAvailable(
                    "nobody knows yet whether the record was changed: look who belongs to "
                    f"the group (mqmesh ha status {self._group}), or ask again"
                ),
            )
        elif in_sync.voters_change is None:
            pending.fail(
                BrokerNotAvailable(
                    f"nothing was changed in {VOTERS_PATIENCE_MS} ms: those who would be left lack "
                    "something that is confirmed, or the coordinator does not answer; try again"
                ),
            )
        else:
            look = partial(self._look, pending, leadership, wanted, until_ms)
            self._loop.call_later(LOOK_MS, look)

    def _voters(self, leadership: Leadership) -> ChangeVotersResponse:
        voters = leadership.in_sync.state.voters
        return ChangeVotersResponse(list(voters), leadership.epoch)

    # ---- Whether somebody may stand --------------------------------------------------

    def _on_pause(self, request: Request, header: PauseFailoverRequest) -> None:
        def edit(state: GroupState) -> GroupState:
            check_epoch(header.epoch, state.epoch)
            return msgspec.structs.replace(state, paused=header.paused)

        pending = request.later()

        def on_done(outcome: GroupState | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                pending.fail(outcome)
                return
            _log.warning(
                "%s stands when the master of %s is missed",
                "nobody" if header.paused else "another replica",
                self._group,
            )
            pending.done(PauseFailoverResponse(outcome.epoch))

        call_later, session = self._loop.call_later, self._view.session
        RecordEdit(
            self._coordinator, self._group, session, edit, on_done, call_later=call_later
        ).begin()

    # ---- Settings of the cluster -----------------------------------------------------

    def read_settings(self) -> None:
        """Reads them; if that fails they are read again later."""

        def on_done(outcome: SettingsRecord | MQMeshError) -> None:
            if isinstance(outcome, SettingsRecord):
                self._view.on_settings(outcome)

        self._coordinator.read_settings(on_done)

    def _on_get_settings(self, request: Request, header: HaSettingsRequest) -> None:
        self._coordinator.read_settings(partial(self._reply_settings, request.later()))

    def _on_put_settings(self, request: Request, header: PutHaSettingsRequest) -> None:
        wanted = checked(header.settings)
        self._view.check_settings(wanted)
        self._put_settings(request.later(), header.version, wanted, PUTS)

    def _put_settings(
        self, pending: PendingReply, version: int, wanted: dict[str, SettingValue], tries: int
    ) -> None:
        def on_put(outcome: int | MQMeshError) -> None:
            if isinstance(outcome, int):
                self._reply_settings(pending, SettingsRecord(outcome, wanted))
            elif isinstance(outcome, OutcomeUnknown) and tries > 1:
                # The same again, on the same version: it is settled when that has moved.
                put = partial(self._put_settings, pending, version, wanted, tries - 1)
                self._loop.call_later(REREAD_MS, put)
            elif isinstance(outcome, Conflict) and isinstance(outcome.record, SettingsRecord):
                if outcome.record.settings == wanted:
                    self._reply_settings(pending, outcome.record)
                    return
                newest = outcome.record.version
                why = f"the settings have version {newest} by now, not {version}: look again"
                pending.fail(InvalidArgument(why))
            else:
                pending.fail(outcome)

        self._coordinator.put_settings(version, wanted, on_put)

    def _reply_settings(self, pending: PendingReply, outcome: SettingsRecord | MQMeshError) -> None:
        if isinstance(outcome, MQMeshError):
            pending.fail(outcome)
            return
        self._view.on_settings(outcome)
        settings = HaSettings(outcome.version, settings_of(outcome))
        pending.done(settings)


def check_epoch(seen: int, newest: int) -> None:
    """Check that the group is in the epoch that an administrator saw; 0 for any.

    Raises:
        InvalidArgument: Another one is the newest by now.
    """
    if seen not in (0, newest):
        raise InvalidArgument(f"the epoch is {newest} by now, not {seen}")

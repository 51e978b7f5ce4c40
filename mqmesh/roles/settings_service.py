"""The settings of a process as a service: reports them, and takes changes."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from mqmesh.errors import MQMeshError, SystemBusy
from mqmesh.protocol.admin import (
    ConfigChanges,
    ConfigEntries,
    GetConfigRequest,
    UpdateConfigRequest,
)
from mqmesh.protocol.command import Reply
from mqmesh.protocol.request import PendingReply, Request
from mqmesh.roles.dispatch import Dispatch
from mqmesh.roles.live_settings import LiveSettings, SettingsPlan

OnKept = Callable[[MQMeshError | None], None]
Keep = Callable[[dict[str, str], OnKept], None]
"""Function that puts overrides on disk; it calls back with the outcome, at once or later."""

_log = logging.getLogger(__name__)


class SettingsService:
    """Changes settings, one change after the other: first on disk, then in force, then answered.

    Args:
        settings: Settings of the process.
        keep: Puts changes on disk.
        on_change: Called when other settings are in force.
        dispatch: Dispatch of the process.
    """

    def __init__(
        self,
        settings: LiveSettings[Any],
        keep: Keep,
        on_change: Callable[[], None],
        dispatch: Dispatch,
    ) -> None:
        self._settings = settings
        self._keep = keep
        self._on_change = on_change
        self._dispatch = dispatch
        self._keeping = False

    def get(self, request: Request, header: GetConfigRequest) -> ConfigEntries:
        """Return all settings."""
        return ConfigEntries(self._settings.entries())

    def update(self, request: Request, header: UpdateConfigRequest) -> Reply | None:
        """Changes settings.

        Raises:
            InvalidArgument: A key may not be changed, or a value is wrong.
            SystemBusy: Another change is being written.
        """
        if self._keeping:
            raise SystemBusy("another change of settings is being written", retry_after_ms=100)
        plan = self._settings.plan(header.settings, header.unset)
        summary = ", ".join(f"{one.key}: {one.before} -> {one.after}" for one in plan.changes)
        self._dispatch.describe(summary or "no other value")
        self._keeping = True
        self._keep(plan.overrides, partial(self._kept, request.later(), plan, summary))
        return None

    def _kept(
        self,
        pending: PendingReply,
        plan: SettingsPlan[Any],
        summary: str,
        error: MQMeshError | None,
    ) -> None:
        self._keeping = False
        if error is not None:
            pending.fail(error)
            return
        self._settings.adopt(plan)
        if plan.changes:
            _log.warning("user %r changed settings: %s", pending.peer.principal.name, summary)
            self._on_change()
        pending.done(ConfigChanges(plan.changes))

"""DELETE_EXPIRED_COMMITLOG: a pass of retention that an administrator asks for."""

from collections.abc import Mapping

from mqmesh.errors import UnsupportedCommand
from mqmesh.protocol.admin import CleanRequest
from mqmesh.protocol.command import Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core, only_commitlog
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.retention.cleaning import Answer, Cleaning
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import RetainingStore


class RetentionFeature(Feature):
    """The pass of retention that an administrator waits for.

    Args:
        core: The core of the broker.
    """

    works_at_followers = True

    def __init__(self, core: Core) -> None:
        self._settings = core.settings
        self._store = core.store
        self._cleaning = Cleaning()

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.DELETE_EXPIRED_COMMITLOG: self.delete_expired_commitlog}

    def tick(self, now_ms: int) -> None:
        """Answer who has waited for a pass that is over."""
        self._answer(self._cleaning.take_answer())

    def stopping(self) -> None:
        """Answer who waits for a pass."""
        self._answer(self._cleaning.give_up())

    def delete_expired_commitlog(self, request: Request, header: CleanRequest) -> Reply | None:
        """Begins a pass of retention; answered once it is over.

        Raises:
            UnsupportedCommand: The store removes nothing by itself.
            SystemBusy: A pass is under way.
        """
        store = self._store
        if not isinstance(store, RetainingStore):
            raise UnsupportedCommand(only_commitlog(self._settings.now, "retention"))
        self._cleaning.begin(request.later(), store.retention, dry_run=header.dry_run)
        self.tick(0)
        return None

    def _answer(self, answer: Answer | None) -> None:
        if answer is None:
            return
        pending, result = answer
        if isinstance(result, Exception):
            pending.fail(result)
        else:
            pending.done(result)

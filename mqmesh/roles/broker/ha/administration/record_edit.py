"""A change of a group's record that neither elects anybody nor touches who confirms.

Any replica may make it: it reads, changes by compare-and-swap, and reads again for as long as the
record moves under it. An outcome that nobody knows is settled in the same way: the same change on
the same version, until the version has moved.
"""

from collections.abc import Callable
from typing import Final

from mqmesh.coordination.interface import (
    Conflict,
    Coordinator,
    CoordinatorUnavailable,
    GroupState,
    OnDone,
    OutcomeUnknown,
    SessionId,
    StateRecord,
)
from mqmesh.errors import InvalidArgument, MQMeshError
from mqmesh.roles.broker.ha.in_sync import REREAD_MS

MOST_TRIES: Final = 10
"""A record that moves so often is left to others."""


class RecordEdit:
    """One such change; ``begin`` begins it.

    Args:
        coordinator: Keeps the record.
        group: Broker group.
        session: Of this replica, None without one.
        edit: Makes the next state of one; the same one if nothing is to be changed. May raise.
        on_done: Called with the state that the record has in the end, or why it has not.
        call_later: Has the loop call back after so many ms.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        group: str,
        session: Callable[[], SessionId | None],
        edit: Callable[[GroupState], GroupState],
        on_done: OnDone[GroupState],
        *,
        call_later: Callable[[int, Callable[[], None]], object],
    ) -> None:
        self._coordinator = coordinator
        self._group = group
        self._session = session
        self._edit = edit
        self._on_done = on_done
        self._call_later = call_later
        self._tries = 0
        self._wanted: GroupState | None = None

    def begin(self) -> None:
        """Reads the record."""
        self._coordinator.read(self._group, self._on_read)

    def _on_read(self, outcome: StateRecord | MQMeshError) -> None:
        try:
            if isinstance(outcome, MQMeshError):
                raise outcome
            self._go_on(outcome)
        except MQMeshError as error:
            self._on_done(error)

    def _go_on(self, record: StateRecord) -> None:
        if record.state is None:
            raise InvalidArgument("the coordinator knows nothing of this group")
        wanted = self._edit(record.state)
        if wanted == record.state:
            self._on_done(wanted)
            return
        session = self._session()
        if session is None:
            raise CoordinatorUnavailable("this replica has no session at the coordinator")
        self._tries += 1
        if self._tries > MOST_TRIES:
            raise CoordinatorUnavailable(
                f"the record of {self._group} was changed by others {MOST_TRIES} times; try again"
            )
        self._wanted = wanted
        self._coordinator.change(self._group, record.version, wanted, session, self._on_changed)

    def _on_changed(self, outcome: int | MQMeshError) -> None:
        if isinstance(outcome, int):
            assert self._wanted is not None
            self._on_done(self._wanted)
        elif isinstance(outcome, Conflict):
            assert isinstance(outcome.record, StateRecord)
            self._on_read(outcome.record)
        elif isinstance(outcome, OutcomeUnknown):
            self._call_later(REREAD_MS, self.begin)
        else:
            self._on_done(outcome)

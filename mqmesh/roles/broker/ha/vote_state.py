"""Vote state of a replica: its promises, on its disk before they are sent."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from mqmesh.errors import StaleEpoch
from mqmesh.roles.broker.ha.replica_state import DRAWN_BITS, ReplicaState


class VoteState(Protocol):
    """Vote state, as the link of a follower uses it."""

    @property
    def incarnation(self) -> int:
        """Incarnation of the store; 0 where nobody elects."""

    @property
    def promised_epoch(self) -> int:
        """Epoch promised: the replica follows nobody of an earlier one."""

    def promise(self, epoch: int) -> None:
        """From now on everything of earlier epochs is refused.

        Raises:
            StaleEpoch: A later one was promised.
            StorageError: It cannot be noted.
        """

    def begin_copy(self, store_id: int) -> None:
        """Note that the store's content is to go, for a copy of another one's log.

        Raises:
            StorageError: It cannot be noted.
        """

    def renew(self) -> None:
        """The store lacks what it had acknowledged: from now on it is another member.

        Raises:
            StorageError: It cannot be noted.
        """


class NoVoteState:
    """Vote state of a follower whose master is no matter of elections."""

    incarnation = 0
    promised_epoch = 0

    def promise(self, epoch: int) -> None:
        """Do nothing: there are no elections."""

    def begin_copy(self, store_id: int) -> None:
        """Do nothing: the replica confirms nothing, so its old log does not count."""

    def renew(self) -> None:
        """Do nothing: the replica confirms nothing, so its old log does not count."""


class KeptVoteState:
    """Vote state of a replica that takes part in elections.

    Args:
        state: As it was kept.
        save: Keeps it, durably.
        chance: Draws numbers of so many bits.
    """

    def __init__(
        self,
        state: ReplicaState,
        save: Callable[[ReplicaState], None],
        chance: Callable[[int], int],
    ) -> None:
        self.state = state
        self._save = save
        self._chance = chance

    @property
    def incarnation(self) -> int:
        """Implement ``VoteState``."""
        return self.state.incarnation

    @property
    def promised_epoch(self) -> int:
        """Implement ``VoteState``."""
        return self.state.promised_epoch

    def promise(self, epoch: int) -> None:
        """Implement ``VoteState``."""
        if epoch < self.state.promised_epoch:
            raise StaleEpoch(
                f"epoch {epoch} is over: replica {self.state.replica_id} has promised "
                f"{self.state.promised_epoch}"
            )
        self._keep(self.state.promise(epoch))

    def begin_copy(self, store_id: int) -> None:
        """Implement ``VoteState``."""
        renewed = self.state.renewed(self._chance(DRAWN_BITS))
        self._keep(msgspec.structs.replace(renewed, log_id=store_id))

    def renew(self) -> None:
        """Implement ``VoteState``."""
        self._keep(self.state.renewed(self._chance(DRAWN_BITS)))

    def _keep(self, state: ReplicaState) -> None:
        if state != self.state:
            self._save(state)
            self.state = state

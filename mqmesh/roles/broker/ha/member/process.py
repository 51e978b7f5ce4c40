"""The broker's process, and the world, as a member of a group of replicas uses them."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.coordination.interface import StateRecord
from mqmesh.roles.broker.ha.leadership import Leadership


class LogPosition(msgspec.Struct, frozen=True):
    """Position of a replica's log.

    Attributes:
        store_id: Id of the store that the log belongs to.
        last_epoch: Of its last record, 0 for none.
        end: Commit-log offset behind it.
        synced: The disk has so much of it.
        can_lead: The disk takes writes.
    """

    store_id: int
    last_epoch: int
    end: int
    synced: int
    can_lead: bool = True


class Replica(Protocol):
    """The broker's process, as its member of the group uses it."""

    def position(self) -> LogPosition:
        """Return how far its log goes now."""

    def lead(self, record: StateRecord) -> Leadership:
        """Begin the role of the master, with the epoch of a record.

        Raises:
            StorageError: The role cannot be begun; nobody is followed then.
        """

    def follow(self, leader: str, epoch: int, unclean_since: int) -> None:
        """Follow a leader; ends another role for that.

        Args:
            leader: Where it listens; "" for nobody.
            epoch: That it leads; 0 for nobody's.
            unclean_since: See ``GroupState.unclean_since``.
        """

    def stay_outside(self, reason: str) -> None:
        """Serve nothing and follow nobody, since it does not belong to the group."""

    def silent_ms(self, now_ms: int) -> int:
        """Return the time since the last sign of life of its leader; monotonic clock."""


class MemberLoop(Protocol):
    """Event loop, as far as a member uses it."""

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> object:
        """Calls back once."""


class World(msgspec.Struct, frozen=True):
    """Environment of a member, beside its coordinator.

    Attributes:
        loop: Calls back.
        clock: Source of time.
        chance: Draws numbers of so many bits.
    """

    loop: MemberLoop
    clock: Clock
    chance: Callable[[int], int]

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
        store_id: Whose log it is.
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


class Replica(msgspec.Struct, frozen=True):
    """The broker's process, as its member of the group uses it.

    Attributes:
        position: How far its log goes now.
        lead: Begins the role of the master, with the epoch of a record; raises ``StorageError`` if
            that cannot be begun, and follows nobody then.
        follow: Follows a leader that listens there, or nobody (""), in an epoch; ends another role
            for that. Also gets ``GroupState.unclean_since``.
        stay_outside: Serves nothing and follows nobody, since it does not belong to the group; gets
            the reason.
        silent_ms: Since it heard the leader that it follows; gets the monotonic clock.
    """

    position: Callable[[], LogPosition]
    lead: Callable[[StateRecord], Leadership]
    follow: Callable[[str, int, int], None]
    stay_outside: Callable[[str], None]
    silent_ms: Callable[[int], int]


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

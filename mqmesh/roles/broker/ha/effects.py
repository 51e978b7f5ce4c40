"""Effects that the machines of a replica want; the shell carries them out and reports outcomes."""

import msgspec

from mqmesh.coordination.interface import GroupState, StateRecord


class ReadRecord(msgspec.Struct, frozen=True):
    """The group's record is to be read from the coordinator."""


class ChangeRecord(msgspec.Struct, frozen=True):
    """The group's record is to be changed by compare-and-swap, with the session of now.

    Attributes:
        version: That the change is made on.
        state: The next one.
    """

    version: int
    state: GroupState


class Fence(msgspec.Struct, frozen=True):
    """Replicas are asked to promise an epoch, this one among them; each promise is durable.

    Attributes:
        epoch: To be promised.
        replica_ids: Replicas that are requested to promise it.
    """

    epoch: int
    replica_ids: tuple[int, ...]


class AskToStand(msgspec.Struct, frozen=True):
    """Request to another replica, which has the better position, to stand.

    Attributes:
        replica_id: Which one.
    """

    replica_id: int


class Lead(msgspec.Struct, frozen=True):
    """This replica leads: it writes the marker of the epoch, then opens for followers and clients.

    Attributes:
        record: By which it does.
    """

    record: StateRecord


class Follow(msgspec.Struct, frozen=True):
    """This replica does not lead, or no longer; it answers no more sends.

    Attributes:
        reason: Why, for people.
        record: The group's, if it is known by now.
    """

    reason: str
    record: StateRecord | None = None


class ResumeSends(msgspec.Struct, frozen=True):
    """Sends are taken again: the replica leads on.

    Attributes:
        reason: Why the switch-over was given up.
    """

    reason: str


Effect = ReadRecord | ChangeRecord | Fence | AskToStand | Lead | Follow | ResumeSends

"""What brokers say of a consumer's membership in its group. Pure.

Each broker counts generations of its own. Whoever finds that it joined anew without having
left was removed in between: it hung or was cut off for so long that others took its queues.
"""

import enum

import msgspec

from mqmesh.protocol.membership import HeartbeatResponse, Membership


class Standing(enum.Enum):
    """What a broker's answer to a heartbeat tells."""

    KNOWN = enum.auto()
    """A member, as before; or for the first time, or none."""
    RESTARTED = enum.auto()
    """Another life of the broker: it knows nothing of what we had."""
    REPLACED = enum.auto()
    """We were removed and came back; what we had was given to others."""
    DOUBTED = enum.auto()
    """A member, as before, but a commit was refused: some queue was given to another one,
    who thought to be alone when a broker that came back had not met us yet."""


class _Seen(msgspec.Struct, frozen=True):
    instance_id: int
    joined: int


class Memberships:
    """One consumer's membership at each broker.

    Args:
        group: Its group.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._seen: dict[str, _Seen] = {}
        self._generations: dict[str, int] = {}
        self._doubted: set[str] = set()

    def doubt(self) -> None:
        """A broker refused a commit as that of a member that was replaced."""
        self._doubted.update(self._seen)

    def on_heartbeat(self, broker_name: str, answer: HeartbeatResponse) -> Standing:
        """A broker answered a heartbeat."""
        own = Membership(self._group, 0, 0)
        own = next((one for one in answer.memberships if one.group == self._group), own)
        before = self._seen.get(broker_name)
        self._seen[broker_name] = _Seen(answer.broker_instance_id, own.joined)
        self._generations[broker_name] = own.generation
        doubted = broker_name in self._doubted
        self._doubted.discard(broker_name)
        if before is None:
            return Standing.KNOWN
        if before.instance_id != answer.broker_instance_id:
            return Standing.RESTARTED
        if before.joined and own.joined and before.joined != own.joined:
            return Standing.REPLACED
        return Standing.DOUBTED if doubted else Standing.KNOWN

    def on_claim(self, broker_name: str, generation: int) -> None:
        """A broker gave us queues in a generation."""
        self._generations[broker_name] = generation

    def generation(self, broker_name: str) -> int:
        """The newest generation that a broker told of, 0 for none."""
        return self._generations.get(broker_name, 0)

"""Generations and standing of a consumer in its group, as brokers report them. Pure.

Each broker counts generations of its own. A consumer that joined anew without having
left was removed in between: it hung or was cut off for so long that others took its queues.
"""

import enum
from collections.abc import Iterable

import msgspec

from mqmesh.message import MessageQueue
from mqmesh.protocol.membership import HeartbeatResponse, Membership


class Standing(enum.Enum):
    """Meaning of a broker's answer to a heartbeat."""

    KNOWN = enum.auto()
    """A member, as before; or for the first time, or none."""
    RESTARTED = enum.auto()
    """Another life of the broker: it does not know our former claims."""
    REPLACED = enum.auto()
    """We were removed and came back; our queues were given to others."""
    DOUBTED = enum.auto()
    """A member, as before, but a commit was refused: some queue was given to another one,
    which seemed to be alone when a broker that came back had not met us yet."""


class _Seen(msgspec.Struct, frozen=True):
    instance_id: int
    joined: int


class Memberships:
    """Memberships of one consumer at its brokers.

    Args:
        group: Its group.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._seen: dict[str, _Seen] = {}
        self._generations: dict[str, int] = {}
        self._claims: dict[MessageQueue, int] = {}
        self._doubted: set[str] = set()

    def doubt(self) -> None:
        """Note that a broker refused a commit as that of a member that was replaced."""
        self._doubted.update(self._seen)

    def on_heartbeat(self, broker_name: str, answer: HeartbeatResponse) -> Standing:
        """Note a broker's answer to a heartbeat."""
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
            for queue in self._claims:
                if queue.broker_name == broker_name:
                    self._claims[queue] = own.generation  # it counts anew
            return Standing.RESTARTED
        if before.joined and own.joined and before.joined != own.joined:
            return Standing.REPLACED
        return Standing.DOUBTED if doubted else Standing.KNOWN

    def on_claim(self, queues: Iterable[MessageQueue], generation: int) -> None:
        """Note that a broker gave us queues in a generation."""
        for queue in queues:
            self._generations[queue.broker_name] = self._claims[queue] = generation

    def generation(self, broker_name: str) -> int:
        """Return the newest generation that a broker reported, 0 for none."""
        return self._generations.get(broker_name, 0)

    def claimed(self, queue: MessageQueue) -> int:
        """Return the generation in which a queue was given to us last, 0 for none.

        By the time it is read the group may be further: another member that joined meanwhile
        claims it in that later generation, and must not be taken for us.
        """
        return self._claims.get(queue, 0)

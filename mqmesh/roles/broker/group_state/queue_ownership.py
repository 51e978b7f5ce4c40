"""Ownership of queues, so that a member that was replaced can move nothing. Pure.

A member claims a queue when it asks where to begin in it. A claim carries the generation of
the group: a later generation's claim replaces it, and within one generation a queue is
claimed by one member only, until that one gives it back. Commits and pulls of a member without the
claim are refused: it is a zombie, a member that hung so long that it was replaced.

Claims outlive membership: a member that was removed and comes back goes on with its queues that no
other member got meanwhile. So a queue that was given back is remembered as free.

Where copies confirm the log, claims are in it, and a new master restores them. Elsewhere nothing is
claimed after a restart. Then the first member that commits in a queue, where the group
has come to or further, claims it. A member that would move the group back gets no claim: it was
replaced before the restart, and does not know.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from mqmesh.errors import StaleGeneration
from mqmesh.roles.broker.group_state.queue_locks import OnOwner, ignore_owner

NO_GENERATION: Final = 0
"""Generation in requests of non-members: they assign queues by hand, or administer."""

NOBODY: Final = ""
MOST_CLAIMS: Final = 5_000_000
"""Beyond it the claims of the group that claimed first are forgotten."""

_Queue = tuple[str, int]


class Ownership(msgspec.Struct, frozen=True):
    """A queue was given to a member.

    Attributes:
        client_id: The member; ``NOBODY`` when it gave the queue back.
        generation: Of the group when the queue was given.
    """

    client_id: str
    generation: int


class QueueOwnership:
    """The claims of all groups at one broker.

    Args:
        most: Claims kept.

    Attributes:
        on_owner: Called with group, topic and queue id when another member has a queue, or nobody.
    """

    def __init__(self, most: int = MOST_CLAIMS) -> None:
        self.on_owner: OnOwner = ignore_owner
        self._most = most
        self._groups: dict[str, dict[_Queue, Ownership]] = {}
        self._count = 0

    def find(self, group: str, topic: str, queue_id: int) -> Ownership | None:
        """The claim to a queue, if there is one."""
        return self._groups.get(group, {}).get((topic, queue_id))

    def claim(self, group: str, topic: str, queue_id: int, client_id: str, generation: int) -> None:
        """A member was given a queue and begins to read it.

        Raises:
            StaleGeneration: Another member has it in this generation.
        """
        known = self.find(group, topic, queue_id)
        others = known is not None and known.client_id not in (NOBODY, client_id)
        if known is not None and others and known.generation >= generation:
            raise StaleGeneration(
                f"queue {queue_id} of topic {topic!r} is with {known.client_id} in generation "
                f"{known.generation} of group {group!r}"
            )
        if known is None:
            self._count += 1
        self._groups.setdefault(group, {})[topic, queue_id] = Ownership(client_id, generation)
        if known is None or known.client_id != client_id:
            self.on_owner(group, topic, queue_id)
        while self._count > self._most and len(self._groups) > 1:
            self.forget_group(next(name for name in self._groups if name != group))

    def release(self, group: str, topic: str, queue_id: int, client_id: str) -> None:
        """A member gives a queue back."""
        known = self.find(group, topic, queue_id)
        if known is not None and known.client_id == client_id:
            self._groups[group][topic, queue_id] = Ownership(NOBODY, known.generation)
            self.on_owner(group, topic, queue_id)

    def commit(
        self,
        group: str,
        topic: str,
        queue_id: int,
        client_id: str,
        generation: int,
        *,
        goes_back: bool,
    ) -> None:
        """Checks whether a member may move the group's offset in a queue, and claims a free one.

        Args:
            group, topic, queue_id: Which offset.
            client_id: The member.
            generation: Its generation.
            goes_back: It would move the offset back.

        Raises:
            StaleGeneration: The queue was given to another member.
        """
        self.check_commit(group, topic, queue_id, client_id)
        if self.find(group, topic, queue_id) is None:
            if goes_back:
                raise StaleGeneration(
                    f"queue {queue_id} of topic {topic!r} was given to nobody since this broker "
                    f"was started, and {client_id} is behind what group {group!r} has committed"
                )
            self.claim(group, topic, queue_id, client_id, generation)

    def check_commit(self, group: str, topic: str, queue_id: int, client_id: str) -> None:
        """Check that no other member has a queue.

        Raises:
            StaleGeneration: The queue was given to another member.
        """
        known = self.find(group, topic, queue_id)
        if known is not None and known.client_id != client_id:
            raise StaleGeneration(
                f"queue {queue_id} of topic {topic!r} was given to {known.client_id or 'others'}; "
                f"offsets of {client_id} do not count any more"
            )

    def check_pull(self, group: str, topic: str, queue_id: int, generation: int) -> None:
        """Check that the member that claimed a queue in a generation still has it.

        Raises:
            StaleGeneration: The queue was given to another member since.
        """
        known = self.find(group, topic, queue_id)
        if known is not None and generation != NO_GENERATION and known.generation > generation:
            raise StaleGeneration(
                f"queue {queue_id} of topic {topic!r} was given to {known.client_id or 'others'} "
                f"after generation {generation}"
            )

    def clear(self) -> None:
        """Forget the owners of all queues, as after a restart."""
        self._groups.clear()
        self._count = 0

    def forget_group(self, group: str) -> None:
        """The group was deleted."""
        queues = self._groups.pop(group, {})
        self._count -= len(queues)
        for topic, queue_id in queues:
            self.on_owner(group, topic, queue_id)

    def remove_topic(self, topic: str) -> None:
        """The topic's queues are no more."""
        for group, queues in self._groups.items():
            for queue in [queue for queue in queues if queue[0] == topic]:
                del queues[queue]
                self._count -= 1
                self.on_owner(group, *queue)

    def of_group(self, group: str) -> Iterator[tuple[str, int, str]]:
        """Yield topic, queue id and owner of each queue of a group that is somebody's."""
        for (topic, queue_id), owner in self._groups.get(group, {}).items():
            if owner.client_id != NOBODY:
                yield topic, queue_id, owner.client_id

    def groups(self) -> list[str]:
        """Return the groups whose queues were claimed."""
        return list(self._groups)

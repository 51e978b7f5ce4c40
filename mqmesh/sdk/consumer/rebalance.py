"""Allocation strategies: they divide queues among the members of a group. Pure.

Every member computes the allocation by itself, from the same members and the same queues,
and takes its own part. So a strategy must depend on nothing else.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from mqmesh.errors import InvalidArgument
from mqmesh.message import MessageQueue

VIRTUAL_NODES_DEFAULT: Final = 100


class AllocateStrategy(Protocol):
    """Strategy that divides the queues of a topic among the members of a group."""

    def allocate(
        self,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
    ) -> list[MessageQueue]:
        """Return the queues of one member.

        Args:
            group: Consumer group.
            client_id: The member.
            queues: All queues of the topic, sorted.
            client_ids: All members, sorted, ``client_id`` among them.

        Returns:
            Its part, sorted; nothing if there are more members than queues.
        """


class Average(AllocateStrategy):
    """Allocation of runs of neighbouring queues; the first members get one more.

    Members keep their queues, as far as all get as many: so as few queues move as possible.
    """

    def allocate(
        self,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
    ) -> list[MessageQueue]:
        return self.reallocate(client_id, queues, client_ids, {})

    def reallocate(
        self,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
        owners: Mapping[MessageQueue, str],
    ) -> list[MessageQueue]:
        """Return the queues of one member where it is known who has them now.

        Args:
            client_id, queues, client_ids: As for ``allocate``.
            owners: Members by queue, the same for all who ask; others count for nothing.
        """
        place = _place_of(client_id, client_ids)
        if place is None:
            raise ValueError(f"{client_id} is no member")
        each, more = divmod(len(queues), len(client_ids))
        # By place of the member. Most members have none: nothing here is done for each of them.
        had: dict[int, list[MessageQueue]] = {}
        for queue in queues if owners else ():
            owner = _place_of(owners.get(queue, ""), client_ids)
            if owner is not None:
                had.setdefault(owner, []).append(queue)
        # Members that have more than others keep one more; then the first of those without a queue
        # get one more.
        in_order = sorted(had, key=lambda owner: (-min(len(had[owner]), each + 1), owner))
        shares = {owner: each + (rank < more) for rank, owner in enumerate(in_order)}
        more = max(more - len(had), 0)
        kept = {queue for owner, share in shares.items() for queue in had[owner][:share]}
        free = [queue for queue in queues if queue not in kept]
        # Members take of the free ones in their order.
        before = [owner for owner in had if owner < place]
        others = place - len(before)
        taken = sum(shares[owner] - len(had[owner][: shares[owner]]) for owner in before)
        taken += others * each + min(others, more)
        share = shares.get(place, each + (others < more))
        mine = had.get(place, [])[:share]
        return sorted(mine + free[taken : taken + share - len(mine)])


class AverageByCircle(AllocateStrategy):
    """Queues are dealt out one by one, like cards."""

    def allocate(
        self,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
    ) -> list[MessageQueue]:
        return list(queues[client_ids.index(client_id) :: len(client_ids)])


class ConsistentHash(AllocateStrategy):
    """Few queues change hands when a member comes or goes, at the price of uneven parts.

    Args:
        virtual_nodes: Places of each member on the ring, 1 to 10,000; more make parts more even.

    Raises:
        InvalidArgument: ``virtual_nodes`` is out of bounds.
    """

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES_DEFAULT) -> None:
        if not 1 <= virtual_nodes <= 10_000:
            raise InvalidArgument(f"virtual_nodes must be 1 to 10,000, not {virtual_nodes}")
        self._virtual_nodes = virtual_nodes

    def allocate(
        self,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
    ) -> list[MessageQueue]:
        ring = sorted(
            (_place(f"{member}-{number}"), member)
            for member in client_ids
            for number in range(self._virtual_nodes)
        )
        places = [place for place, _ in ring]

        def owner(queue: MessageQueue) -> str:
            key = f"{queue.topic} {queue.broker_name} {queue.queue_id}"
            return ring[bisect_left(places, _place(key)) % len(ring)][1]

        return [queue for queue in queues if owner(queue) == client_id]


class MachineRoom(AllocateStrategy):
    """Members read the brokers of their own machine room.

    Rooms without a member are shared by all members, so that no queue is left unread.

    Args:
        room_of_broker: Room of a broker group's name; by default what stands before ``@``.
        room_of_client: Room of a client id; by default what stands before ``@`` in the
            client's ``instance_name``, or the whole of it.
    """

    def __init__(
        self,
        room_of_broker: Callable[[str], str] | None = None,
        room_of_client: Callable[[str], str] | None = None,
    ) -> None:
        self._room_of_broker = room_of_broker or _room_of_broker
        self._room_of_client = room_of_client or _room_of_client
        self._average = Average()

    def allocate(
        self,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
    ) -> list[MessageQueue]:
        rooms = {member: self._room_of_client(member) for member in client_ids}
        own = rooms[client_id]
        near = [queue for queue in queues if self._room_of_broker(queue.broker_name) == own]
        neighbours = [member for member in client_ids if rooms[member] == own]
        inhabited = set(rooms.values())
        orphans = [
            queue for queue in queues if self._room_of_broker(queue.broker_name) not in inhabited
        ]
        return sorted(
            self._average.allocate(group, client_id, near, neighbours)
            + self._average.allocate(group, client_id, orphans, client_ids)
        )


class ByConfig(AllocateStrategy):
    """Allocation by configuration: a member reads the queues set for it, regardless of others.

    Args:
        queues: Of one topic or several.
    """

    def __init__(self, queues: Iterable[MessageQueue]) -> None:
        self._queues = frozenset(queues)

    def allocate(
        self,
        group: str,
        client_id: str,
        queues: Sequence[MessageQueue],
        client_ids: Sequence[str],
    ) -> list[MessageQueue]:
        return [queue for queue in queues if queue in self._queues]


ALLOCATE_STRATEGIES: Final[dict[str, Callable[[], AllocateStrategy]]] = {
    "average": Average,
    "average_by_circle": AverageByCircle,
    "consistent_hash": ConsistentHash,
    "machine_room": MachineRoom,
}
"""Strategies by the names that clients may give."""


def allocate_strategy(strategy: AllocateStrategy | str) -> AllocateStrategy:
    """Return a strategy, by itself or by its name.

    Args:
        strategy: ``average``, ``average_by_circle``, ``consistent_hash``, ``machine_room``, or
            a strategy, for example ``ByConfig(queues)``.

    Raises:
        InvalidArgument: There is none of that name.
    """
    if not isinstance(strategy, str):
        return strategy
    make = ALLOCATE_STRATEGIES.get(strategy)
    if make is None:
        raise InvalidArgument(
            f"allocation strategy {strategy!r} is none of {', '.join(ALLOCATE_STRATEGIES)}; "
            "for fixed queues give ByConfig(queues)"
        )
    return make()


def _place_of(client_id: str, client_ids: Sequence[str]) -> int | None:
    place = bisect_left(client_ids, client_id)
    return place if client_ids[place : place + 1] == [client_id] else None


def _place(key: str) -> int:
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _room_of_broker(broker_name: str) -> str:
    room, at, _ = broker_name.partition("@")
    return room if at else ""


def _room_of_client(client_id: str) -> str:
    # A client id is host:pid@instance_name#chance, see ``sdk.options``.
    instance = client_id.partition("@")[2].rpartition("#")[0]
    return instance.partition("@")[0]

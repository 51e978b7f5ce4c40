"""A seed in which members of an ordered group come and go while masters are lost.

All of its faults meet what owners of queues rest on: a master that is cut off together with a
member, one that hands over amid a division, members and masters that stand still.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from harness.simulation.books import ORDER, ORDERED, body_of
from harness.simulation.election import (
    MODES,
    ElectionRun,
    leadership_of,
    promised_epoch_of,
    start_group,
)
from harness.simulation.faults import Faults
from harness.simulation.load import SimulatedProducer, SimulatedPush
from harness.simulation.world import Process
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import MQMeshError
from mqmesh.message import Message, MessageQueue
from mqmesh.sdk.admin.admin import AdminClient

QUEUES: Final = 4
MEMBERS: Final = 3
PRODUCERS: Final = 4
FAULTS: Final = {
    "leader cut off with a member": 6,
    "pause through a failover": 3,
    "switch-over amid a division": 6,
    "broker killed amid a division": 4,
    "pause of a broker": 3,
    "pause in an ordered call": 2,
    "client killed": 3,
    "client stopped": 3,
    "leader cut off": 2,
    "coordinator cut off": 1,
}
ROUNDS: Final = 2
"""So many times more faults than other seeds have."""
WITH_COPIES: Final = tuple(mode for mode in MODES if mode is not AckReplicas.NONE)


class OrderedProducer(SimulatedProducer):
    """Sends ordered messages, faster than they are consumed for a while."""

    def _send(self) -> None:
        if not self.sending:
            return
        chance = self.transport.node.random
        for _ in range(chance.randint(1, 8)):
            number = next(self._numbers)
            key = self.life, number
            queue = MessageQueue(ORDERED, "broker-a", chance.randrange(QUEUES))
            self.books.sent(ORDERED, *key)
            try:
                future = self.api.send_async(Message(ORDERED, body_of(*key)), queue=queue)
            except MQMeshError as error:
                self.books.failed_send(ORDERED, key, error)
                continue
            future.add_done_callback(lambda one, key=key: self.books.outcome(ORDERED, key, one))
        self.later(1_500, self._send)


class OwnersRun(ElectionRun):
    """Such a seed's world while it runs; arguments as for ``Run``.

    Attributes:
        faults: Frequency of each fault.
    """

    option = " --owners"
    faults = FAULTS

    @property
    def profile(self) -> dict[str, int] | None:
        """Frequency of each fault."""
        return self.faults

    def _start(self) -> None:
        world = self.world
        mode = self._mode = WITH_COPIES[self.seed % len(WITH_COPIES)]
        self.books.statuses_hold = True
        self.replicas = start_group(world, mode, zones=False)
        with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
            admin.create_topic(ORDERED, queues=QUEUES)
        self.clients = [
            *(OrderedProducer(world, self.books, f"producer-{n}") for n in range(PRODUCERS)),
            *(SimulatedPush(world, self.books, f"order-{n}", ORDER) for n in range(MEMBERS)),
        ]
        for client in self.clients:
            world.simulation.after(world.simulation.random.randrange(1_000), client.start)
        self._watch()

    def _plan(self, faults: Faults) -> None:
        faults.add("leader cut off with a member", self._cut_off_with_member)
        faults.add("pause through a failover", self._pause_through_failover)
        faults.add("switch-over amid a division", lambda: self._amid_division(self._switch_over))
        faults.add(
            "broker killed amid a division",
            lambda: self._amid_division(lambda: faults.restart(self._replica())),
        )
        for _ in range(ROUNDS):
            super()._plan(faults)

    def _master(self) -> Process | None:
        """Returns the master of the newest epoch; None while that one leads no more.

        Elsewhere one that was cut off from everybody may not know for seconds that it was replaced.
        """
        master = super()._master()
        leadership = None if master is None else leadership_of(master)
        newest = max([*self._leaders, *map(promised_epoch_of, self.replicas)], default=0)
        return master if leadership is not None and leadership.epoch == newest else None

    def _members(self) -> list[SimulatedPush]:
        return [one for one in self.clients if isinstance(one, SimulatedPush)]

    def _member(self) -> SimulatedPush:
        return self.world.simulation.random.choice(self._members())

    def _busiest(self) -> SimulatedPush:
        """Returns the member with most queues: if one more comes, it loses some."""
        leading, held = self._leading(), Counter[str]()
        if leading is not None:
            locks = leading.state.queue_locks
            found = [locks.find(group, queue) for group, queue in locks.locked()]
            held.update(lock.client_id for lock in found if lock is not None)
        return max(self._members(), key=lambda one: held[one.api.client_id])

    def _cut_off_with_member(self) -> None:
        """Cuts the leader and a member off from all others, for long enough to replace both.

        Meanwhile others go and come: the next master divides the queues anew, while the member
        goes on with what it has for as long as its locks last.
        """
        world, leader, member = self.world, self._master(), self._busiest()
        if leader is None or leader.node is None:
            return
        chance, simulation = world.simulation.random, world.simulation
        for process in world.processes():
            other = process.node
            if process is leader or other is None or not other.alive:
                continue
            for one in (leader.node, member.transport.node):
                world.network.cut(one, other)
                world.network.cut(other, one)
        simulation.after(chance.randint(6_000, 12_000), world.network.heal)
        others = [one for one in self._members() if one is not member]
        simulation.after(chance.randint(0, 2_000), chance.choice(others).kill)

    def _pause_through_failover(self) -> None:
        """A member stands still while others get its queues, and another master, and go again."""
        world, member = self.world, self._busiest()
        chance, simulation, node = world.simulation.random, world.simulation, member.transport.node
        if not node.alive or node.paused:
            return
        node.pause()
        world.network.stall(node)
        gone_ms = chance.randint(5_000, 7_000)
        simulation.after(gone_ms, self._switch_over)
        gone_ms += chance.randint(1_000, 4_000)
        for other in self._members():
            if other is not member:
                simulation.after(gone_ms, partial(other.restart, chance.randint(4_000, 8_000)))
        simulation.after(gone_ms + chance.randint(0, 1_000), node.resume)

    def _amid_division(self, harm: Callable[[], None]) -> None:
        """A member goes, comes back, and something happens while queues change hands."""
        chance, member = self.world.simulation.random, self._member()
        if chance.randrange(2):
            member.kill()
        else:
            member.restart()
        self.world.simulation.after(chance.randint(0, 3_000), harm)

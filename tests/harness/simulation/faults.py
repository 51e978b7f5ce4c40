"""Faults of a simulated cluster, planned by its seed."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from harness.simulation.books import ORDER, PULL, PUSH, RECEIVE, Books
from harness.simulation.load import Client, SimulatedPush
from harness.simulation.world import RESTART_MS, Process, World
from mqmesh.transport.simulated.node import SimulatedNode

MOST_FAULTS: Final = 8
MOST_DOWN_MS: Final = 5_000
MOST_STEP_MS: Final = 2_000

MEMBERS: Final = {
    "client killed": 2,
    "client stopped": 3,
    "pause of a consumer": 3,
    "pause in an ordered call": 3,
    "connections of a consumer broken": 1,
    "one-way partition of a consumer": 2,
    "partition": 1,
    "slow network": 2,
}
DISKS: Final = {"broker killed": 6, "full disk": 1, "failing sync": 2, "broker stopped": 1}
PROFILES: Final[tuple[dict[str, int] | None, ...]] = (None, MEMBERS, DISKS)
"""Frequencies of faults by seed; None for all alike. Rare faults meet each other with these."""


class Faults:
    """Plans faults, and ends them.

    Args:
        world: World that they harm.
        books: Records of the faults, which excuse some violations.
        clients: Clients of the world.
        span_ms: Latest beginning of a fault.
        profile: Frequency of each fault; all alike without it.

    Attributes:
        counts: Number of faults by name.
    """

    def __init__(
        self,
        world: World,
        books: Books,
        clients: list[Client],
        span_ms: int,
        profile: dict[str, int] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._world = world
        self._books = books
        self._clients = clients
        self._span_ms = span_ms
        self._profile = profile
        self._over = False
        self._chance = world.simulation.random
        self._kinds: dict[str, Callable[[], None]] = {
            "broker killed": self._kill_broker,
            "broker stopped": self._stop_broker,
            "name server killed": lambda: self._restart(self._chance.choice(world.namesrvs)),
            "schedule service killed": lambda: self._restart(
                self._chance.choice(list(world.schedules.values()))
            ),
            "client killed": lambda: self._chance.choice(clients).kill(),
            "client stopped": lambda: self._chance.choice(clients).restart(),
            "one-way partition": lambda: self._cut(*self._chance.sample(self._nodes(), 2)),
            "one-way partition of a consumer": self._cut_consumer,
            "partition": self._cut_both,
            "pause": lambda: self._pause(self._chance.choice(self._nodes())),
            "pause of a consumer": lambda: self._pause(self._consumer()),
            "pause in an ordered call": self._pause_in_call,
            "connections broken": lambda: self._break(self._chance.choice(self._nodes())),
            "connections of a consumer broken": lambda: self._break(self._consumer()),
            "slow network": self._slow,
            "clock step": self._step_clock,
            "full disk": self._fill_disk,
            "failing sync": self._fail_sync,
        }

    def add(self, name: str, do: Callable[[], None]) -> None:
        """Adds another kind of fault."""
        self._kinds[name] = do

    def pause(self, process: Process) -> None:
        """Stops a process for a while."""
        if process.node is not None and process.node.alive:
            self._pause(process.node)

    def restart(self, process: Process) -> None:
        """Kills a process, and starts it later."""
        self._restart(process)

    def cut_power(self) -> None:
        """Kills all brokers at once; with ``SYNC_FLUSH`` only what was synced is sure to stay."""
        names = list(self._world.brokers)

        def cut() -> None:
            for name in names:
                self._kill(name, by_power_cut=True)

        self._once_written(names, cut)

    def plan(self) -> None:
        """Chooses what happens when."""
        profile = self._profile or dict.fromkeys(self._kinds, 1)
        count = self._chance.randint(1, MOST_FAULTS)
        for name in self._chance.choices(list(profile), list(profile.values()), k=count):
            at_ms = self._chance.randrange(self._span_ms)
            self._world.simulation.after(at_ms, lambda name=name: self._do(name))  # type: ignore[misc]

    def end(self) -> None:
        """Ends all harm: starts processes that are down, and mends cut connections."""
        self._over = True
        world = self._world
        world.network.heal()
        world.network.weather.gust_every = 0
        for disk in world.disks.values():
            disk.full = disk.sync_fails = False
            disk.on_write = None
        for process in world.processes():
            if process.node is not None and process.node.paused:
                process.node.resume()
            world.simulation.after(self._chance.randrange(1_000), process.start)
        for client in self._clients:
            if client.transport.node.paused:
                client.transport.node.resume()

    def _do(self, name: str) -> None:
        if not self._over:
            self.counts[name] += 1
            self._kinds[name]()

    def _down_ms(self) -> int:
        return self._chance.randint(100, MOST_DOWN_MS)

    def _nodes(self) -> list[SimulatedNode]:
        roles = [one.node for one in self._world.processes()]
        found = [*roles, *(client.transport.node for client in self._clients)]
        return [node for node in found if node is not None and node.alive]

    def _restart(self, process: Process) -> None:
        process.kill()
        self._world.simulation.after(self._down_ms(), process.start)

    def _kill_broker(self) -> None:
        name = self._chance.choice(list(self._world.brokers))
        if self._chance.randrange(2):
            self._kill(name)
            return
        self._once_written([name], lambda: self._kill(name))

    def _once_written(self, names: Sequence[str], do: Callable[[], None]) -> None:
        """The worst moment: one of some brokers wrote something, which may not be on disk yet."""
        disks = [self._world.disks[name] for name in names]

        def written() -> None:
            for disk in disks:
                disk.on_write = None
            delay_ms = self._chance.randrange(disks[0].slowest_sync_ms)
            self._world.simulation.after(delay_ms, do)

        for disk in disks:
            disk.on_write = written

    def _kill(self, name: str, *, by_power_cut: bool = False) -> None:
        process = self._world.brokers[name]
        if self._over or not process.up:
            return
        self._books.kills_ms.append(float(self._world.now_ms))
        process.kill()
        if self._world.sync_flush and (by_power_cut or self._chance.randrange(4)):
            self.counts["power lost"] += 1
            self._world.disks[name].lose_power(self._chance.randrange)
        self._world.simulation.after(self._down_ms(), process.start)

    def _stop_broker(self) -> None:
        process = self._world.brokers[self._chance.choice(list(self._world.brokers))]
        process.stop()
        self._world.simulation.after(self._down_ms(), process.start)

    def _consumer(self) -> SimulatedNode:
        names = (PUSH, ORDER, PULL, RECEIVE)
        found = [one for one in self._nodes() if one.name.startswith(names)]
        return self._chance.choice(found or self._nodes())

    def _cut_consumer(self) -> None:
        broker = self._chance.choice(list(self._world.brokers.values())).node
        if broker is not None:
            ends = [broker, self._consumer()]
            self._chance.shuffle(ends)
            self._cut(*ends)

    def _cut(self, one: SimulatedNode, other: SimulatedNode) -> None:
        self._world.network.cut(one, other)
        self._world.simulation.after(2 * self._down_ms(), self._world.network.heal)

    def _cut_both(self) -> None:
        broker = self._chance.choice(list(self._world.brokers.values())).node
        other = self._chance.choice(self._nodes())
        if broker is not None and other is not broker:
            self._world.network.cut(broker, other)
            self._world.network.cut(other, broker)
            self._world.simulation.after(2 * self._down_ms(), self._world.network.heal)

    def _pause(self, node: SimulatedNode) -> None:
        node.pause()
        self._world.network.stall(node)
        self._world.simulation.after(2 * self._down_ms(), node.resume)

    def _pause_in_call(self) -> None:
        # A consumer that stands still with more to do must not go on when another has the queue.
        pushing = [one for one in self._clients if isinstance(one, SimulatedPush)]
        ordered = [one for one in pushing if one.group == ORDER]
        if not ordered:
            self._pause(self._consumer())
            return
        client = self._chance.choice(ordered)

        def begun() -> None:
            client.on_begin = _nothing
            if not self._over:
                self._pause(client.transport.node)

        client.on_begin = begun

    def _break(self, node: SimulatedNode) -> None:
        self._world.network.break_connections(node)

    def _slow(self) -> None:
        weather = self._world.network.weather
        weather.gust_every = self._chance.choice((5, 50))

        def clear() -> None:
            weather.gust_every = 0

        self._world.simulation.after(2 * self._down_ms(), clear)

    def _step_clock(self) -> None:
        node = self._chance.choice(self._nodes())
        step_ms = self._chance.randint(-MOST_STEP_MS, MOST_STEP_MS)
        self._books.early_ms += abs(step_ms)
        node.clock.step(step_ms)

    def _fill_disk(self) -> None:
        disk = self._chance.choice(list(self._world.disks.values()))
        disk.full = True

        def empty() -> None:
            disk.full = False

        self._world.simulation.after(self._down_ms(), empty)

    def _fail_sync(self) -> None:
        disk = self._chance.choice(list(self._world.disks.values()))
        disk.sync_fails = True

        def failed() -> None:
            # It serves until it notices; the next life begins no sooner than this.
            self._books.kills_ms.append(float(self._world.now_ms + RESTART_MS))

        disk.on_failure = failed


def _nothing() -> None:
    """Does nothing: the fault is done."""

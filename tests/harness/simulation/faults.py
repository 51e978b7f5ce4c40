"""What is done to a simulated cluster, by its seed."""

from collections import Counter
from collections.abc import Callable
from typing import Final

from harness.simulation.books import Books
from harness.simulation.load import Client
from harness.simulation.world import Process, World
from mqmesh.transport.simulated.node import SimulatedNode

MOST_FAULTS: Final = 8
MOST_DOWN_MS: Final = 5_000
MOST_STEP_MS: Final = 2_000


class Faults:
    """Plans faults, and ends them.

    Args:
        world: Whom they harm.
        books: Where it is written down what excuses what.
        clients: Of the world.
        span_ms: When the last one begins at the latest.

    Attributes:
        counts: How often which was done.
    """

    def __init__(self, world: World, books: Books, clients: list[Client], span_ms: int) -> None:
        self.counts: Counter[str] = Counter()
        self._world = world
        self._books = books
        self._clients = clients
        self._span_ms = span_ms
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
            "one-way partition": self._cut,
            "partition": self._cut_both,
            "pause": self._pause,
            "connections broken": self._break,
            "slow network": self._slow,
            "clock step": self._step_clock,
            "full disk": self._fill_disk,
            "failing sync": self._fail_sync,
        }

    def plan(self) -> None:
        """Chooses what happens when."""
        for _ in range(self._chance.randint(1, MOST_FAULTS)):
            name = self._chance.choice(list(self._kinds))
            at_ms = self._chance.randrange(self._span_ms)
            self._world.simulation.after(at_ms, lambda name=name: self._do(name))  # type: ignore[misc]

    def end(self) -> None:
        """All harm is over: what is down is started, what was cut is whole."""
        self._over = True
        world = self._world
        world.network.heal()
        world.network.weather.gust_every = 0
        for disk in world.disks.values():
            disk.full = disk.sync_fails = False
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
        self._books.kills_ms.append(float(self._world.now_ms))
        disk = self._world.disks[name]
        process = self._world.brokers[name]
        process.kill()
        if self._world.sync_flush and self._chance.randrange(4):
            self.counts["power lost"] += 1
            disk.lose_power(self._chance.randrange)
        self._world.simulation.after(self._down_ms(), process.start)

    def _stop_broker(self) -> None:
        process = self._world.brokers[self._chance.choice(list(self._world.brokers))]
        process.stop()
        self._world.simulation.after(self._down_ms(), process.start)

    def _cut(self) -> None:
        one, other = self._chance.sample(self._nodes(), 2)
        self._world.network.cut(one, other)
        self._world.simulation.after(2 * self._down_ms(), self._world.network.heal)

    def _cut_both(self) -> None:
        broker = self._chance.choice(list(self._world.brokers.values())).node
        other = self._chance.choice(self._nodes())
        if broker is not None and other is not broker:
            self._world.network.cut(broker, other)
            self._world.network.cut(other, broker)
            self._world.simulation.after(2 * self._down_ms(), self._world.network.heal)

    def _pause(self) -> None:
        node = self._chance.choice(self._nodes())
        ordered = [one for one in self._nodes() if one.name.startswith("order")]
        if ordered and self._chance.randrange(2):
            node = self._chance.choice(ordered)  # who stands still must not believe in its locks
        node.pause()
        self._world.network.stall(node)
        self._world.simulation.after(2 * self._down_ms(), node.resume)

    def _break(self) -> None:
        self._world.network.break_connections(self._chance.choice(self._nodes()))

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
        name = self._chance.choice(list(self._world.disks))
        self._books.kills_ms.append(float(self._world.now_ms))
        self._world.disks[name].sync_fails = True

"""Places with an embedded coordinator: on the simulated transport, and as a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mqmesh.clock import Clock
from mqmesh.coordination.backends import open_coordinator
from mqmesh.coordination.interface import Coordinator
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.coordinator.server import CoordinatorServer
from mqmesh.testing.coordinator_contract import PATIENCE_MS
from mqmesh.transport.simulated.network import Network
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.transport.simulated.simulation import Simulation
from mqmesh.transport.simulated.transport import SimulatedTransport
from mqmesh.transport.zmq.transport import ZmqTransport

PORT = 9_870
STEP_MS = 10


class SimulatedSite:
    """A coordinator with a real file on a simulated network; each client is a node of its own.

    Args:
        folder: Folder of the coordinator's file.
        seed: Seed of all random choices.
    """

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        self.config = CoordinatorConfig(data_dir=str(folder / "coordinator"), listen_port=PORT)
        self.transports: list[SimulatedTransport] = []
        self.clients: list[SimulatedNode] = []
        self._opened: list[Coordinator] = []
        self.node: SimulatedNode
        self.server: CoordinatorServer
        self.start()

    @property
    def clock(self) -> Clock:
        """The monotonic one is everybody's."""
        return self.node.clock

    def transport(self, name: str) -> SimulatedTransport:
        """Makes the transport of a new process."""
        node = SimulatedNode(self.simulation, name)
        node.on_death.append(lambda: self.network.break_connections(node))
        transport = SimulatedTransport(self.network, node)
        self.transports.append(transport)
        return transport

    def start(self) -> None:
        """Starts another life of the coordinator."""
        transport = self.transport("coordinator")
        self.node = transport.node
        self.server = CoordinatorServer(self.config, transport)
        self.server.start()

    def kill(self) -> None:
        """Kills the process as kill -9 does: only what is in the file stays."""
        self.node.kill()
        self.server.stop()

    def restart(self) -> None:
        """Kills and starts it again, long enough apart for clients to notice."""
        self.kill()
        self.simulation.run(500)
        self.start()
        self.simulation.run(500)

    def open(self, cluster: str = "c1", timeout_ms: int = 2_000) -> Coordinator:
        """Opens another client."""
        transport = self.transport(f"client-{len(self.clients)}")
        self.clients.append(transport.node)
        made = open_coordinator(
            f"embedded://127.0.0.1:{PORT}", transport, cluster=cluster, timeout_ms=timeout_ms
        )
        self._opened.append(made)
        # Checks that begin with a change want a connection; others wait for it by themselves.
        self.simulation.run(50)
        return made

    def until(self, is_so: Callable[[], object], limit_ms: int = PATIENCE_MS) -> None:
        """Lets simulated time pass."""
        # In steps: the condition may be the time, which makes no event.
        for _ in range(limit_ms // STEP_MS):
            if self.simulation.run_until(lambda: bool(is_so()), STEP_MS):
                return
        raise AssertionError("waited in vain")

    def close(self) -> None:
        """Closes all; no callback may have failed."""
        for made in self._opened:
            made.close()
        self.server.stop()
        assert sum(one.loop.callback_failures for one in self.transports) == 0


class RealSite:
    """An engine of real processes; one loop that a test turns sends requests over real sockets.

    Args:
        url: Address of the engine.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.transport = ZmqTransport()
        self._opened: list[Coordinator] = []

    @property
    def clock(self) -> Clock:
        """The machine's."""
        return self.transport.clock

    def open(self, cluster: str = "c1", timeout_ms: int = 5_000) -> Coordinator:
        """Opens another client of the engine, which has answered once."""
        made = open_coordinator(self.url, self.transport, cluster=cluster, timeout_ms=timeout_ms)
        self._opened.append(made)
        told: list[object] = []
        made.read_settings(told.append)
        self.until(lambda: told)
        return made

    def until(self, is_so: Callable[[], object], limit_ms: int = PATIENCE_MS) -> None:
        """Turns the loop."""
        end_ms = self.clock.monotonic_ms() + limit_ms
        while not is_so():
            assert self.clock.monotonic_ms() < end_ms, "waited in vain"
            self.transport.loop.tick(20)

    def close(self) -> None:
        """Closes all; no callback may have failed."""
        for made in self._opened:
            made.close()
        self.transport.loop.close()
        self.transport.close()
        assert self.transport.loop.callback_failures == 0

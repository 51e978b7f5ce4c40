"""The processes of a simulated cluster: name servers, brokers, schedule services, and clients."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from harness.simulation.disk import SLOWEST_SYNCS_MS, Disk
from harness.simulation.real_disk import SMALL_FILES, RealDisk
from harness.simulation.secured import Access, key_of
from mqmesh.errors import MQMeshError
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.roles.broker.ha_config import HaConfig
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.coordinator.server import CoordinatorServer
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.gateway.server import GatewayServer
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.namesrv.server import NameServer
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.roles.schedule.server import ScheduleServer
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.storage.index.config import IndexConfig
from mqmesh.storage.interface import FlushDiskType
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.simulated.client import SimulatedClient
from mqmesh.transport.simulated.network import Network
from mqmesh.transport.simulated.node import NodeKilled, SimulatedNode
from mqmesh.transport.simulated.simulation import Simulation
from mqmesh.transport.simulated.transport import SimulatedTransport

NAMESRV_PORT: Final = 9_876
BROKER_PORT: Final = 10_911
COORDINATOR_PORT: Final = 9_870
RESTART_MS: Final = 1_000
"""The supervisor starts what has ended again after so long."""

DELAY_LEVELS: Final = "1s 2s 2s 4s 6s 8s 10s 15s 20s 30s 1m 2m 3m 4m 5m 6m 7m 8m"
"""Levels at which a message that fails twice comes again while the load still runs."""

_log = logging.getLogger(__name__)


class Process:
    """A role's process and those that come after it, each a new node of the same place.

    Args:
        world: World of the process.
        name: Name of the node.
        make: Makes the role.
    """

    def __init__(
        self, world: "World", name: str, make: Callable[["SimulatedTransport"], Any]
    ) -> None:
        self.name = name
        self.world = world
        self.lives = 0
        self.node: SimulatedNode | None = None
        self.transport: SimulatedTransport | None = None
        self.server: Any = None
        self._make = make
        self._dead: list[Any] = []

    @property
    def up(self) -> bool:
        """True if the process runs, or stands still."""
        return self.node is not None and self.node.alive

    def start(self) -> None:
        """Starts the next life, unless one runs."""
        if self.up:
            return
        self.lives += 1
        node = self.node = self.world.node(self.name)
        transport = self.transport = self.world.transport(self.name, node)
        server = self.server = self._make(transport)
        try:
            server.start()
        except NodeKilled:
            return
        except (MQMeshError, OSError) as error:
            _log.info("%s did not start: %s", self.name, error)
            self.kill()
            self.world.simulation.after(RESTART_MS, self.start)
            return
        transport.loop.on_stop(self._ended)

    def kill(self) -> None:
        """Kills the process as kill -9 does."""
        if self.node is not None and self.node.alive:
            self.node.kill()
            self._dead.append(self.server)
            if isinstance(self.server, CoordinatorServer):
                self.server.stop()  # the next life opens the same file
            if isinstance(self.server, BrokerServer):
                self.server.rows.abandon()  # likewise

    def stop(self) -> None:
        """Stops the role as SIGTERM does: the role says goodbye."""
        if self.node is not None and self.node.alive and not self.node.paused:
            try:
                self.server.stop()
            except NodeKilled:
                return
            self.node.kill()

    def release(self) -> None:
        """Closes what dead lives still hold: locks and maps that the kernel would close."""
        if self.node is not None and self.node.alive:
            self.kill()
        for server in self._dead:
            if isinstance(server, ScheduleServer):
                server._close_env(None)
            if isinstance(server, ScheduleServer | GatewayServer):
                lock = server._lock
                if lock is not None:
                    lock.release()

    def _ended(self) -> None:
        # The loop failed: the store has stopped.
        self.stop()
        self.world.simulation.after(RESTART_MS, self.start)


class World:
    """All nodes of one simulation.

    Args:
        seed: Decides what is left to chance.
        folder: For what roles keep in files.
        sync_flush: Brokers answer sends when they are on disk.
        real_store: Brokers have a ``CommitLogStore``, not a light one.
        secure: Clients without a key are refused.

    Attributes:
        access: Keys and access list; None without security.
        disks: Disks of the brokers, by name.
        zone: Zone of all clients.
        failures: Exceptions in callbacks of any node: each is a bug.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        sync_flush: bool = False,
        real_store: bool = False,
        secure: bool = False,
    ) -> None:
        self.simulation = Simulation(seed)
        self.network = Network(self.simulation)
        self.folder = folder
        self.sync_flush = sync_flush
        self.real_store = real_store
        self.zone = ""
        self.disks: dict[str, Disk] = {}
        self.namesrvs: list[Process] = []
        self.brokers: dict[str, Process] = {}
        self.schedules: dict[str, Process] = {}
        self.coordinators: list[Process] = []
        self.transports: list[SimulatedTransport] = []
        self.access = Access(self) if secure else None
        self._places: dict[str, int] = {}
        self.make_broker: Callable[..., BrokerServer] = BrokerServer

    @property
    def now_ms(self) -> int:
        """Simulated time."""
        return self.simulation.now_ms

    @property
    def namesrv_addr(self) -> str:
        """Addresses of the name servers, as clients take them."""
        ports = (NAMESRV_PORT + number for number in range(len(self.namesrvs)))
        return ";".join(f"127.0.0.1:{port}" for port in ports)

    @property
    def failures(self) -> int:
        """Exceptions in callbacks so far."""
        return sum(one.loop.callback_failures for one in self.transports)

    def node(self, name: str) -> SimulatedNode:
        """Makes a new process."""
        node = SimulatedNode(self.simulation, name)
        node.on_death.append(lambda: self.network.break_connections(node))
        return node

    def transport(self, name: str, node: SimulatedNode | None = None) -> SimulatedTransport:
        """Makes the transport of a process with one loop; of a new process if no node is given."""
        node = node or self.node(name)
        ring, guard = None, None
        if self.access is not None:
            ring, guard = self.access.ring(name), self.access.guard(name, node.clock)
        transport = SimulatedTransport(self.network, node, ring, guard)
        self.transports.append(transport)
        return transport

    def connect_to_broker(self, transport: SimulatedTransport, place: str) -> SimulatedClient:
        """Connects to a broker; the transport learns its key here, as no route gives it."""
        endpoint = f"tcp://127.0.0.1:{self.broker_port(place)}"
        if transport.ring is not None:
            transport.ring.learn(endpoint, key_of(place))
        return transport.connect(endpoint)

    def common_addresses(self) -> list[str]:
        """Returns the addresses of name servers and coordinators, which share one key."""
        coordinators = [f"127.0.0.1:{COORDINATOR_PORT}"] if self.coordinators else []
        return [*self.namesrv_addr.split(";"), *coordinators]

    def client_options(self) -> ClientOptions:
        """Returns the options of each client."""
        return ClientOptions(namesrv_addr=self.namesrv_addr, use_ipc=False, zone=self.zone)

    # ---- Roles -------------------------------------------------------------------------

    def add_namesrvs(self, count: int) -> None:
        """Adds name servers that know nothing after a restart."""
        for number in range(count):
            config = NamesrvConfig(
                name=f"namesrv-{number}",
                listen_port=NAMESRV_PORT + number,
                publish_port=NAMESRV_PORT + 100 + number,
            )
            name = f"namesrv-{number}"
            made = Process(self, name, lambda transport, c=config: NameServer(c, transport))  # type: ignore[misc]
            self.namesrvs.append(made)

    def add_coordinator(self) -> str:
        """Adds a coordinator with its file; returns the address where it listens."""
        config = CoordinatorConfig(
            data_dir=str(self.folder / "coordinator"), listen_port=COORDINATOR_PORT
        )
        made = Process(self, "coordinator", lambda transport: CoordinatorServer(config, transport))
        self.coordinators.append(made)
        return f"127.0.0.1:{COORDINATOR_PORT}"

    def add_broker(self, name: str, ha: HaConfig | None = None, *, broker_id: int = 0) -> Process:
        """Adds a broker and its disk; a follower is not among the brokers."""
        if self.real_store:
            seed = self.simulation.random.getrandbits(32)
            disk: Disk = RealDisk(self.folder / f"{name}-{broker_id}-disk", seed)
        else:
            disk = Disk()
        place = f"{name}-r{broker_id}" if broker_id else name
        self.disks[place] = disk
        if self.access is not None:
            self.access.add_broker(place, name)
        disk.slowest_sync_ms = self.simulation.random.choice(SLOWEST_SYNCS_MS)
        config = BrokerConfig(
            broker_name=name,
            broker_id=broker_id,
            ha=ha or HaConfig(),
            listen_port=self.broker_port(place),
            namesrv_addr=self.namesrv_addr.split(";"),
            enable_ipc=False,
            store_path_root_dir=str(self.folder / place),
            index=IndexConfig(enable=False),
            storage=BrokerStoreConfig(
                backend="commitlog" if self.real_store else "simulated",
                flush_disk_type=FlushDiskType.SYNC_FLUSH
                if self.sync_flush
                else FlushDiskType.ASYNC_FLUSH,
                **SMALL_FILES,
            ),
            message_delay_level=DELAY_LEVELS,
            transaction_timeout_ms=2_000,
            transaction_check_interval_ms=3_000,
        )

        def make(transport: SimulatedTransport) -> BrokerServer:
            opener = disk.opener_for(transport.node)
            if transport.ring is not None and config.ha.master_addr:
                # Of the master of a group that does not elect it, as master_server_key says it.
                transport.ring.learn(endpoint_of(config.ha.master_addr), key_of(name))
            return self.make_broker(config, transport, opener=opener, **copies)

        copies = {"copier": disk.copier} if isinstance(disk, RealDisk) else {}
        process = Process(self, place, make)
        if not broker_id:
            self.brokers[name] = process
        return process

    def broker_port(self, place: str) -> int:
        """Returns a broker's port; ``broker-a``, or ``broker-a-r1`` for a follower."""
        self._places.setdefault(place, BROKER_PORT + len(self._places))
        return self._places[place]

    def add_schedule(self, broker_name: str) -> Process:
        """Adds the schedule service of a broker."""
        name = f"schedule-{broker_name}"
        if self.access is not None:
            self.access.add_schedule(name)
        lives = iter(range(1_000))

        def make(transport: SimulatedTransport) -> ScheduleServer:
            life = next(lives)
            folder = self.folder / f"{name}-{life}"
            before = self.folder / f"{name}-{life - 1}"
            if before.exists():
                # The files as the killed process left them; its own copy it still holds.
                shutil.copytree(before, folder, ignore=shutil.ignore_patterns("lock*"))
            config = ScheduleConfig(
                broker_name=broker_name,
                namesrv_addr=self.namesrv_addr.split(";"),
                store_path_root_dir=str(folder),
                use_ipc=False,
                map_size=1 << 20,
            )
            return ScheduleServer(config, transport)

        process = self.schedules[broker_name] = Process(self, name, make)
        return process

    def add_gateway(self) -> Process:
        """Adds the gateway, at port 19876 and from 20911 on."""
        config = GatewayConfig(
            namesrv_addr=self.namesrv_addr.split(";"),
            store_path_root_dir=str(self.folder / "gateway"),
            use_ipc=False,
        )
        return Process(self, "gateway", lambda transport: GatewayServer(config, transport))

    def processes(self) -> list[Process]:
        """Returns all roles."""
        return [
            *self.namesrvs,
            *self.coordinators,
            *self.brokers.values(),
            *self.schedules.values(),
        ]

"""A seed in which a master's machine is lost for good, and its follower is made the master.

Sends wait for the follower, so whatever was acknowledged is there, and whatever a consumer saw
stays. All else that a broker promises holds as over a restart: transactions, delays, order,
offsets.
"""

from pathlib import Path
from typing import Final

from harness.simulation.faults import Faults
from harness.simulation.load import Client, make_clients
from harness.simulation.run import HARM_MS, QUEUES, Run
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import MQMeshError
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import PromoteReplicaRequest
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.sdk.admin.admin import AdminClient

LOST: Final = "broker-a"
FOLLOWER: Final = "broker-a-r1"
FOLLOWER_ID: Final = 1
ASK_AGAIN_MS: Final = 500
MOST_DELAY_MS: Final = 5

CLIENTS_ONLY: Final = {
    "client killed": 2,
    "client stopped": 2,
    "pause of a consumer": 2,
    "pause in an ordered call": 2,
    "connections of a consumer broken": 1,
    "name server killed": 1,
    "schedule service killed": 2,
    "slow network": 2,
}
"""Nothing that parts a master and its follower: alone, a master acknowledges nothing as safe."""


class FailoverRun(Run):
    """Such a seed's world while it runs; arguments as for ``Run``."""

    option = " --failover"

    def __init__(self, seed: int, folder: Path, *, secure: bool = False) -> None:
        super().__init__(seed, folder, secure=secure)
        self.world.real_store = True
        self._master = HaConfig(mode=HaMode.MANUAL, ack_replicas=AckReplicas.ONE)
        self._follower = self._master
        self._is_promoted = False

    @property
    def profile(self) -> dict[str, int]:
        """Frequency of the other faults."""
        return CLIENTS_ONLY

    def _start(self) -> None:
        world = self.world
        world.add_namesrvs(2)
        for name in (LOST, "broker-b"):
            world.add_broker(name, self._master if name == LOST else None)
            world.add_schedule(name)
        port = world.broker_port(LOST)
        follows = HaConfig(
            mode=HaMode.MANUAL, ack_replicas=AckReplicas.ONE, master_addr=f"127.0.0.1:{port}"
        )
        self.follower = world.add_broker(LOST, follows, broker_id=FOLLOWER_ID)
        for process in (*world.processes(), self.follower):
            process.start()
        world.simulation.run(2_000)
        with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
            for topic in self.books.topics:
                admin.create_topic(topic, queues=QUEUES)
        self._start_clients()

    def _make_clients(self) -> list[Client]:
        return make_clients(self.world, self.books)

    def _plan(self, faults: Faults) -> None:
        super()._plan(faults)
        chance = self.world.simulation.random
        self.world.simulation.after(chance.randrange(HARM_MS // 2), self._await_write)

    def _await_write(self) -> None:
        # The worst moment: something was written, and may not be with the follower yet.
        disk, chance = self.world.disks[LOST], self.world.simulation.random

        def written() -> None:
            disk.on_write = None
            self.world.simulation.after(chance.randrange(MOST_DELAY_MS), self._lose_machine)

        disk.on_write = written

    def _lose_machine(self) -> None:
        world = self.world
        lost = world.brokers.pop(LOST)
        self._lost = lost
        self.books.kills_ms.append(float(world.now_ms))
        lost.kill()
        # From now on the group's messages are those of the follower.
        self._lost_disk = world.disks.pop(LOST)
        world.disks[LOST] = world.disks.pop(FOLLOWER)
        world.brokers[LOST] = self.follower
        operator = world.transport("operator")
        connection = world.connect_to_broker(operator, FOLLOWER)

        def ask() -> None:
            connection.request(
                RequestCode.PROMOTE_REPLICA, on_done, header=encode_header(PromoteReplicaRequest())
            )

        def on_done(outcome: Command | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                operator.loop.call_later(ASK_AGAIN_MS, ask)
                return
            self._is_promoted = True
            self.books.kills_ms.append(float(world.now_ms))
            connection.close()

        operator.loop.call_later(world.simulation.random.randrange(3_000), ask)

    def _judged(self) -> list[str]:
        return [] if self._is_promoted else ["C11: the follower was never made the master"]

    def close(self) -> None:
        """Implement ``Run.close``."""
        super().close()
        if hasattr(self, "_lost"):
            self._lost.release()
            self._lost_disk.release()

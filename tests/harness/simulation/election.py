"""A seed in which the replicas of a group elect their master, and lose him again and again.

Sends wait for the replicas in sync, for most of all, or for one follower, so whatever was
acknowledged is there under every master. Beside the histories of clients: in an epoch one replica
confirms, and what it confirmed every later master has (H2, H3). Histories are linearizable queue by
queue, with looks at what a leader shows (H4).
With mode ``none`` a lost master takes what nobody else had; nobody may have seen it (H2).
Histories over failovers show H1 (C1, C3, C5), H5 (C6), H6 (C4) and H7 (C7, C9), the end H8.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.history import ACKED, Commit, Delivery, Look
from harness.simulation.books import delivery_of, key_of
from harness.simulation.disk import Disk
from harness.simulation.faults import Faults
from harness.simulation.real_disk import RealDisk
from harness.simulation.run import QUEUES, Run
from harness.simulation.world import Process, World
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import BrokerNotAvailable, CorruptBatch, CorruptRecord, MQMeshError
from mqmesh.message import TRANS_HALF_TOPIC
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import ChangeVotersRequest, SwitchOverRequest
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha.member.group_member import GroupMember
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import ReplicableLog
from mqmesh.units import MAX_OFFSET, CommitLogOffset

GROUP: Final = "broker-a"
REPLICAS: Final = 3
WATCH_MS: Final = 50
MOST_READ_BACK: Final = 20
"""Number of messages, acknowledged last, of which one is read back."""
READ_BYTES: Final = 1 << 20

MODES: Final = (AckReplicas.ALL, AckReplicas.QUORUM, AckReplicas.ONE, AckReplicas.NONE)
CUT_OFF_MS: Final = 8_000
SETTLED_MS: Final = 30_000
"""Time with mode ``none`` after which a message that is not there counts as lost."""
FAULTS: Final[tuple[dict[str, int] | None, ...]] = (
    {
        "broker killed": 6,
        "power cut of all": 2,
        "pause of a broker": 2,
        "switch-over": 4,
        "broker stopped": 3,
    },
    {
        "partition of replicas": 4,
        "leader cut off": 1,
        "one-way partition": 3,
        "pause of a broker": 2,
        "pause": 1,
    },
    {"coordinator killed": 2, "coordinator cut off": 3, "broker killed": 3, "switch-over": 2},
    None,
)


def start_group(
    world: World, mode: AckReplicas, preferred: int = 0, *, zones: bool = True, minimum: int = 2
) -> list[Process]:
    """Starts a coordinator, two name servers, a schedule service and three replicas.

    Args:
        world: With real stores.
        mode: Replicas that sends wait for.
        preferred: Id of the replica that leads where others could as well, 0 for none.
        zones: Each replica stands in a zone of its own.
        minimum: With ``all``: so many replicas must be in sync (min_in_sync_replicas).

    Returns:
        The replicas, by id; one of them leads.
    """
    world.add_namesrvs(2)
    address = world.add_coordinator()
    ha = HaConfig(
        mode=HaMode.AUTO,
        ack_replicas=mode,
        coordinator=f"embedded://{address}",
        total_replicas=REPLICAS,
        min_in_sync_replicas=minimum if mode is AckReplicas.ALL else 1,
    )
    replicas = [
        world.add_broker(
            GROUP,
            msgspec.structs.replace(ha, preferred=one == preferred, zone=f"z{one}" * zones),
            broker_id=one,
        )
        for one in range(1, REPLICAS + 1)
    ]
    for replica in replicas:
        world.brokers[replica.name] = replica
    world.add_schedule(GROUP)
    for process in world.processes():
        process.start()
    world.simulation.run(3_000)
    return replicas


class ElectionRun(Run):
    """Such a seed's world while it runs; arguments as for ``Run``."""

    option = " --election"

    def __init__(self, seed: int, folder: Path, *, secure: bool = False) -> None:
        super().__init__(seed, folder, secure=secure)
        self.world.real_store = True
        self.replicas: list[Process] = []
        self._leaders: dict[int, str] = {}
        self._confirmed = 0
        self._confirmed_in: dict[int, int] = {}
        self._last: Leadership | None = None
        self._wrong: list[str] = []
        self._mode = AckReplicas.ALL

    @property
    def profile(self) -> dict[str, int] | None:
        """Frequency of each fault; None if all are alike."""
        return FAULTS[self.seed % len(FAULTS)]

    def _start(self) -> None:
        world, seed = self.world, self.seed
        if seed % 2:
            # So that consumers read from a follower, unless that one leads.
            world.zone = f"z{1 + seed // 2 % REPLICAS}"
        mode = self._mode = MODES[seed // len(FAULTS) % len(MODES)]
        self.books.statuses_hold = mode is not AckReplicas.NONE
        self.replicas = start_group(world, mode, zones=bool(world.zone))
        with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
            for topic in self.books.topics:
                admin.create_topic(topic, queues=QUEUES)
        self._start_clients()
        self._watch()

    # ---- What the replicas do ------------------------------------------------------------

    def _watch(self) -> None:
        self._note_change(self._master())
        for process in self.replicas:
            leadership = leadership_of(process)
            if leadership is not None and leadership.is_confirmed:
                self._note(process, leadership)
        # Only the newest: a replica that is cut off, or stands still, may not know yet that another
        # one leads. That one may have led between two looks only; its voters know the epoch.
        newest = max([*self._leaders, *map(promised_epoch_of, self.replicas)])
        for process in self.replicas:
            leadership = leadership_of(process)
            if self._mode is AckReplicas.NONE:
                continue  # what is acknowledged may be shown later, or never
            if leadership is not None and leadership.is_confirmed and leadership.epoch == newest:
                self._read_back(process)
        self.world.simulation.after(WATCH_MS, self._watch)

    def _note(self, process: Process, leadership: Leadership) -> None:
        epoch = leadership.epoch
        before = self._leaders.setdefault(epoch, process.name)
        if before != process.name:
            self._wrong.append(f"H3: {before} and {process.name} confirm in epoch {epoch}")
        if epoch < max(self._leaders) and leadership.confirmed() > self._confirmed:
            self._wrong.append(f"H3: epoch {epoch} confirms after epoch {max(self._leaders)} did")
        confirmed = leadership.confirmed()
        if confirmed < self._confirmed_in.get(epoch, 0):
            self._wrong.append(f"H3: what is confirmed went back in epoch {epoch}")
        self._confirmed_in[epoch] = confirmed
        self._confirmed = max(self._confirmed, confirmed)

    def _read_back(self, master: Process) -> None:
        """Notes the end of a queue that got a message lately, as the leader shows it."""
        store, chance = self._store(master), self.world.simulation.random
        topic = chance.choice(self.books.topics[:2])
        acked = [one for one in self.books.attempts[topic].values() if one.outcome == ACKED]
        if not acked:
            return
        wanted = chance.choice(acked[-MOST_READ_BACK:])
        queue_id = int(wanted.queue.rpartition("/")[2])
        _, end = store.queue_bounds(topic, queue_id)
        now_ms = float(self.world.now_ms)
        self.books.looks[topic].append(Look(wanted.queue, end, now_ms, now_ms))

    def _store(self, process: Process) -> CommitLogStore:
        disk = self.world.disks[process.name]
        assert isinstance(disk, RealDisk)
        return disk.store

    def _master(self) -> Process | None:
        """Returns the master of the newest epoch; a stopped one may not know yet of a newer."""
        epochs = {one: found.epoch for one in self.replicas if (found := leadership_of(one))}
        return max(epochs, key=lambda one: epochs[one], default=None)

    def _leading(self) -> BrokerFeatures | None:
        """Returns the broker that serves as the master of the newest epoch."""
        process = self._master()
        role = _role_of(process) if process is not None and process.up else None
        features: BrokerFeatures | None = None if role is None else role.features
        return features if role is not None and role.serves else None

    def _note_change(self, master: Process | None) -> None:
        leadership = None if master is None else leadership_of(master)
        if leadership is not self._last:
            # Consumers go back by what was not committed yet, at most.
            self.books.kills_ms.append(float(self.world.now_ms))
            self._last = leadership

    def _look(self) -> None:
        world, process = self.world, self._master()
        self._note_change(process)  # else a look comes between a change and the next watch
        broker = self._leading()
        if broker is not None:
            for group, topics in self.books.readers.items():
                for topic in topics:
                    for queue_id, offset in (
                        broker.state.committed.topics(group).get(topic, {}).items()
                    ):
                        _, end = broker.core.store.queue_bounds(topic, queue_id)
                        queue = f"{topic}@{GROUP}/{queue_id}"
                        look = Commit(group, queue, offset, end, float(world.now_ms))
                        self.books.commits.append(look)
        world.simulation.after(1_000, self._look)

    # ---- Faults --------------------------------------------------------------------------

    def _plan(self, faults: Faults) -> None:
        faults.add("pause of a broker", lambda: faults.pause(self._replica()))
        faults.add("partition of replicas", self._part_replicas)
        faults.add("leader cut off", self._cut_leader_off)
        faults.add("coordinator killed", lambda: faults.restart(self.world.coordinators[0]))
        faults.add("coordinator cut off", self._cut_coordinator)
        faults.add("switch-over", self._switch_over)
        faults.add("replica removed", self._remove_replica)
        faults.add("power cut of all", faults.cut_power)
        super()._plan(faults)

    def _switch_over(self) -> None:
        self._ask_master(RequestCode.SWITCH_OVER, SwitchOverRequest())

    def _ask_master(
        self,
        code: RequestCode,
        asked: msgspec.Struct,
        on_done: Callable[[Command | MQMeshError], None] = lambda outcome: None,
    ) -> None:
        """Sends a request of an administrator to the master, if there is one."""
        master, world = self._master(), self.world
        if master is None:
            on_done(BrokerNotAvailable("there is no master"))
            return
        operator = world.transport("operator")
        connection = world.connect_to_broker(operator, master.name)

        def done(outcome: Command | MQMeshError) -> None:
            operator.loop.call_later(0, connection.close)
            on_done(outcome)

        connection.request(code, done, header=encode_header(asked))

    def _remove_replica(self) -> None:
        """Removes a replica from the group for a while, whether it knows of that or not."""
        chance = self.world.simulation.random
        number = chance.randint(1, REPLICAS)
        self._ask_master(RequestCode.CHANGE_VOTERS, ChangeVotersRequest(number, False))
        again_ms = chance.randint(500, 8_000)
        self.world.simulation.after(again_ms, lambda: self._add_replica(number))

    def _add_replica(self, number: int) -> None:
        def done(outcome: Command | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError) or outcome.code != ResponseCode.SUCCESS:
                self.world.simulation.after(500, lambda: self._add_replica(number))

        self._ask_master(RequestCode.CHANGE_VOTERS, ChangeVotersRequest(number, True), done)

    def _replica(self) -> Process:
        """Chooses a replica; the master, more often than not."""
        chance, master = self.world.simulation.random, self._master()
        return master if master and chance.randrange(3) else chance.choice(self.replicas)

    def _part(self, one: Process, other: Process) -> None:
        world, chance = self.world, self.world.simulation.random
        if one.node is None or other.node is None or one is other:
            return
        ways = [(one.node, other.node), (other.node, one.node)]
        for way in ways if chance.randrange(3) else chance.sample(ways, 1):
            world.network.cut(*way)
        world.simulation.after(chance.randint(200, 10_000), world.network.heal)

    def _part_replicas(self) -> None:
        one, chance = self._replica(), self.world.simulation.random
        others = [other for other in self.replicas if other is not one]
        for other in others if chance.randrange(2) else chance.sample(others, 1):
            self._part(one, other)

    def _cut_leader_off(self) -> None:
        """Cuts the leader off from its followers, for long enough to replace it."""
        leader, network = self._master(), self.world.network
        for other in self.replicas:
            if leader and leader.node and other.node and other is not leader:
                network.cut(leader.node, other.node)
                network.cut(other.node, leader.node)
        self.world.simulation.after(CUT_OFF_MS, network.heal)

    def _cut_coordinator(self) -> None:
        self._part(self._replica(), self.world.coordinators[0])

    # ---- Judgement -----------------------------------------------------------------------

    def _drain(self) -> list[str]:
        if self._mode is AckReplicas.NONE:
            self.world.simulation.run(SETTLED_MS)
            master = self._master()
            if len(self._leaders) > 1 and master is not None:
                self._forget_lost(self.world.disks[master.name])
        return super()._drain()

    def _forget_lost(self, disk: Disk) -> None:
        """A master that was lost took along what nobody else had: nobody may have seen it."""
        halves = {key_of(message.body) for message in disk.messages(TRANS_HALF_TOPIC, GROUP)}
        self.books.forget_later(halves)
        for topic in self.books.topics:
            stored = {key_of(message.body) for message in disk.messages(topic, GROUP)}
            lost = self.books.forget(topic, stored)
            seen = {
                one.key
                for group in self.books.readers
                for one in self.books.deliveries[group, topic]
            }
            self._wrong += [
                f"H2: {key} of {topic} was delivered, and is lost" for key in seen & lost
            ]

    def _stored(self) -> dict[str, list[Delivery]]:
        master = self._master()
        if master is None:
            self._wrong.append("H8: nobody leads in the end")
            return {topic: [] for topic in self.books.topics}
        # The last messages may not be confirmed yet, and are there.
        self._store(master).show_to(lambda: MAX_OFFSET)
        found = {}
        for topic in self.books.topics:
            all_ = []
            try:
                messages = self.world.disks[master.name].messages(topic, GROUP)
                all_ = [delivery_of(message) for message in messages]
            except (CorruptBatch, CorruptRecord) as error:
                self.books.wrong["C2"].append(f"{topic} of {master.name} is damaged: {error}")
            found[topic] = sorted(all_, key=lambda one: one.place)
        return found

    def _judged(self) -> list[str]:
        found = list(dict.fromkeys(self._wrong))
        if len(self._leaders) == 0:
            found.append("H8: nobody has ever led")
        logs: list[ReplicableLog] = [self._store(one) for one in self.replicas if one.up]
        found += [
            f"H2: replicas have different bytes from {at} on"
            for log in logs[1:]
            if (at := first_difference(logs[0], log, self._confirmed)) is not None
        ]
        return found


def leadership_of(process: Process) -> Leadership | None:
    member = _member_of(process)
    return None if member is None else member.leadership


def knows_owners(process: Process) -> bool:
    """Returns whether a master's log has all owners of queues of the epochs before."""
    known: bool = _role_of(process).features.locks.knows_owners
    return known


def _role_of(process: Process) -> Any:
    """Returns what a broker serves as."""
    return process.server._role


def promised_epoch_of(process: Process) -> int:
    """Returns the newest epoch that a replica has promised, 0 while it is down."""
    member = _member_of(process)
    return 0 if member is None else member.status().promised_epoch


def _member_of(process: Process) -> GroupMember | None:
    server: BrokerServer | None = process.server
    return server._member if server is not None and process.up else None


def first_difference(one: ReplicableLog, other: ReplicableLog, end: int) -> int | None:
    """Returns where two logs differ before an offset that both reached, or should have."""
    at = 0
    while at < end:
        ours, theirs = (
            log.read_raw(CommitLogOffset(at), max_bytes=READ_BYTES) for log in (one, other)
        )
        # One may have more behind what is confirmed.
        length = min(len(ours.data), len(theirs.data))
        if not length or bytes(ours.data[:length]) != bytes(theirs.data[:length]):
            return at
        at = min(ours.end, theirs.end)
    return None

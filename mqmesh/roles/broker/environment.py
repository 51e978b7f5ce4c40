"""The environment of a broker's role: the process around it, and the features built in it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.coordination.interface import AckReplicas
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import BrokerAddress
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.commit_point import AckParticipant, CommitPoint, Waiter
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.followers.follower_table import FollowerTable
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha_config import HaConfig
from mqmesh.roles.broker.helper_thread import RunAside
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.roles.broker.state_log import StateLog
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.document_saver import MakeSaver, Read
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.roles.shell import RoleShell
from mqmesh.storage.interface import FlushDiskType, MessageStore, replicable
from mqmesh.storage.table_rows import TableRows
from mqmesh.transport.interface import Transport
from mqmesh.units import MAX_OFFSET

NOT_KEPT: Final = "memory"
"""Store backend that forgets everything anyway, so that topics and offsets are not kept either."""


class Environment(msgspec.Struct, frozen=True):
    """The process around a broker's role.

    Attributes:
        settings: Settings.
        transport: Transport of the process.
        clock: Source of time.
        shell: Command server and timers.
        root: Directory of everything that the broker keeps.
        instance_id: Random number of this life of the process.
        address: Where the broker listens.
        files: Reads and saves documents; None if nothing is kept.
        run_aside: Runs work in a helper thread.
        served: Commands that a replica serves in every role.
        state: State of a replica that does not lead.
        on_deposed: Called with the reason when another replica is the master.
        replication: Counters of replication of the process.
        ha: Settings of replication in force; those of a cluster stand above the file's.
        memory_bytes: Memory of the machine; 0 if that is not known.
        index: Connection to the index process; None if there is none.
        rows: Rows of tables; None for some in memory.
    """

    settings: LiveSettings[BrokerConfig]
    transport: Transport
    clock: Clock
    shell: RoleShell
    root: Path
    instance_id: int
    address: BrokerAddress
    files: tuple[Read, MakeSaver] | None
    run_aside: RunAside
    served: Mapping[RequestCode, Handler] = {}
    state: Callable[[], str] = lambda: "FOLLOWING"
    on_deposed: Callable[[str], None] = lambda reason: None
    replication: ReplicaCounts = msgspec.field(default_factory=ReplicaCounts)
    ha: Callable[[], HaConfig] = HaConfig
    memory_bytes: int = 0
    index: IndexerLink | None = None
    rows: TableRows | None = None

    @property
    def config(self) -> BrokerConfig:
        """Settings in force."""
        return self.settings.now


def build_features(
    environment: Environment,
    store: MessageStore,
    leadership: Leadership | None = None,
    *,
    epoch: int = 0,
    is_follower: bool = False,
) -> BrokerFeatures:
    """Return all features of a role; their tables are empty yet.

    Args:
        environment: The process.
        store: Messages.
        leadership: Of a master that was elected.
        epoch: Of a master: generations, lock tokens and sessions of it begin with it.
        is_follower: The role only reads.
    """
    config, clock, shell = environment.config, environment.clock, environment.shell
    server, guard = shell.server, environment.transport.guard
    assert server is not None
    followers = follower_table_of(config, environment.replication, began_ms=clock.monotonic_ms())
    core = Core(
        environment.settings,
        clock,
        store,
        commit_point_of(config, store, followers, leadership),
        StateLog(
            store if config.storage.backend != NOT_KEPT else None, clock, config=config.storage
        ),
        shell.dispatch,
        server.note_refusal,
        instance_id=environment.instance_id,
        random=environment.transport.random,
        root=environment.root,
        run_aside=environment.run_aside,
        replication=environment.replication,
        quotas=None if guard is None else guard.quotas,
        leadership=leadership,
        epoch=epoch,
        is_follower=is_follower,
        has_past=bool(store.topics()),
        memory_bytes=environment.memory_bytes,
        lease_ttl_ms=environment.ha().lease_ttl_ms,
    )
    return BrokerFeatures(core, followers, environment.index, environment.rows)


def commit_point_of(
    config: BrokerConfig,
    store: MessageStore,
    followers: FollowerTable,
    leadership: Leadership | None = None,
) -> CommitPoint[Waiter]:
    """The commit point of a broker: ``SYNC_FLUSH`` waits for the disk, double write for a follower.

    Without elections a put is answered with a status when no follower is there. A group that elects
    its master may lose it at the next election: there a put waits in any case.

    Args:
        config: Of the broker.
        store: Its messages.
        followers: Followers and their positions in its log.
        leadership: Of a master that was elected.
    """
    holders, timeouts = [], []
    if config.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH:
        holders.append(
            AckParticipant("the disk", store.durable_offset, SendStatus.FLUSH_DISK_TIMEOUT)
        )
        timeouts.append(config.sync_flush_timeout_ms)
    late = SendStatus.FLUSH_SLAVE_TIMEOUT
    if leadership is not None and leadership.policy.mode is AckReplicas.NONE:
        # Looked at behind the write: who was stopped in between answers nothing.
        position = lambda: MAX_OFFSET if leadership.may_answer() else 0  # noqa: E731
        holders.append(AckParticipant("the lease", position, late, "ha.lease_ttl_ms"))
    elif leadership is not None:
        holders.append(
            AckParticipant(
                "the replicas in sync", leadership.acknowledged, late, limits_readers=False
            )
        )
    elif config.ha.ack_replicas is not AckReplicas.NONE:
        log = replicable(store)
        holders.append(
            AckParticipant(
                "a follower",
                lambda: followers.position,
                late,
                "ha.slave_timeout_ms",
                lambda: followers.is_available(log.log_end()),
                SendStatus.SLAVE_NOT_AVAILABLE,
            )
        )
        timeouts.append(config.ha.slave_timeout_ms)
    return CommitPoint(
        holders,
        timeout_ms=max(timeouts, default=config.sync_flush_timeout_ms),
        most_waits=config.max_sync_flush_waits,
        retry_after_ms=config.busy_retry_after_ms,
        confirmed=leadership.confirmed if leadership is not None else None,
        admit=leadership.check if leadership is not None else None,
    )


def follower_table_of(
    config: BrokerConfig, counts: ReplicaCounts, *, began_ms: int
) -> FollowerTable:
    """Return the table of a master's followers, which is empty yet.

    Args:
        config: Settings of the broker.
        counts: Counters of replication.
        began_ms: When the role began, monotonic clock.
    """
    ha = config.ha
    return FollowerTable(
        window_bytes=ha.ha_window_bytes,
        fall_behind_bytes=ha.ha_slave_fallbehind_max,
        retain_ms=ha.ha_retain_for_slaves_ms,
        counts_synced=config.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH,
        counts=counts,
        began_ms=began_ms,
    )

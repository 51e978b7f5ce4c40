"""Builds what handlers use, out of the settings, a store, and the tables that its log keeps."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from mqmesh.clock import Clock
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.route import BrokerAddress
from mqmesh.roles.broker.auto_creation import AutoCreation
from mqmesh.roles.broker.commit_point import commit_point_of
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.context import BrokerContext, Wire
from mqmesh.roles.broker.feature import Beginning, RunAside
from mqmesh.roles.broker.features.delays.feature import make_schedule
from mqmesh.roles.broker.features.groups.feature import make_groups, make_locks
from mqmesh.roles.broker.features.pulls.feature import make_filter_servers, make_holds, make_turns
from mqmesh.roles.broker.features.pulls.meta_cache import MetaCache
from mqmesh.roles.broker.features.replicas.feature import make_followers
from mqmesh.roles.broker.features.replicas.read_advice import ReadAdvice
from mqmesh.roles.broker.features.retries.feature import make_retries
from mqmesh.roles.broker.features.sends.feature import make_admission
from mqmesh.roles.broker.features.snapshots.feature import make_snapshots
from mqmesh.roles.broker.features.storing.staging import SendStage
from mqmesh.roles.broker.features.transactions.feature import make_transactions
from mqmesh.roles.broker.ha.ha_config import HaConfig
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha.replica_figures import ReplicaCounts
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.broker.producer_keys import ProducerKeys
from mqmesh.roles.broker.stats import BrokerStats, Periods
from mqmesh.roles.broker.tables import BrokerTables
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.document_saver import MakeSaver, Read
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.roles.shell import RoleShell
from mqmesh.security.quotas import Quotas
from mqmesh.storage.interface import MessageStore, ReplicableLog
from mqmesh.transport.interface import Transport


class BrokerResources(msgspec.Struct, frozen=True):
    """What the process of a broker gives to its role.

    Attributes:
        settings: Settings.
        transport: Of the process.
        clock: Source of time.
        shell: Command server and timers.
        root: Directory of everything that the broker keeps.
        instance_id: Random number of this life of the process.
        address: Where it listens.
        files: Reads and saves documents; None if nothing is kept.
        run_aside: Has another thread do something.
        served: What a replica serves in every role.
        state: What a replica is that does not lead.
        on_deposed: Told that another replica is the master, and why that is known.
        replication: What the process counts of it.
        ha: Those of replication in force, where a cluster's stand above them.
        memory_bytes: Of the machine; 0 if that is not known.
        index: Way to the index process; None if there is none.
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

    @property
    def config(self) -> BrokerConfig:
        """Settings in force."""
        return self.settings.now


def make_tables(given: BrokerResources, store: MessageStore) -> BrokerTables:
    """Tables of topics, groups and offsets, which are empty yet.

    Args:
        given: What the process gives.
        store: Whose log keeps them; what a store in memory forgets anyway is not kept at all.
    """
    is_kept = given.config.storage.backend != "memory"
    return BrokerTables(given.config, given.clock, store if is_kept else None)


def build_context(
    given: BrokerResources,
    store: MessageStore,
    tables: BrokerTables,
    leadership: Leadership | None = None,
    *,
    epoch: int = 0,
    is_follower: bool = False,
) -> BrokerContext:
    """All parts of a role.

    Args:
        given: What the process gives.
        store: Messages.
        tables: Topics, groups and offsets, loaded.
        leadership: Of a master that was elected.
        epoch: Of a master: generations, lock tokens and sessions of it begin with it.
        is_follower: It only reads.
    """
    server = given.shell.server
    guard = given.transport.guard
    assert server is not None
    begins = Beginning(
        given.settings,
        given.clock.monotonic_ms(),
        given.transport.random,
        given.root,
        given.run_aside,
        given.replication,
        epoch,
        was_elected=leadership is not None,
        has_past=bool(store.topics()),
        memory_bytes=given.memory_bytes,
        lease_ttl_ms=given.ha().lease_ttl_ms,
    )
    wire = Wire(
        given.shell.reply,
        given.shell.fail,
        server.notify,
        server.note_refusal,
        server.room,
        given.shell.dispatch.permit,
        given.shell.dispatch.permit_creation,
    )
    return put_together(
        begins,
        wire,
        store,
        tables,
        clock=given.clock,
        instance_id=given.instance_id,
        index=given.index,
        leadership=leadership,
        is_follower=is_follower,
        quotas=None if guard is None else guard.quotas,
    )


def put_together(
    begins: Beginning,
    wire: Wire,
    store: MessageStore,
    tables: BrokerTables,
    *,
    clock: Clock,
    instance_id: int,
    index: IndexerLink | None = None,
    leadership: Leadership | None = None,
    is_follower: bool = False,
    quotas: Quotas | None = None,
) -> BrokerContext:
    """The parts that features make, and what they have in common.

    Args:
        begins: What the role begins with.
        wire: Ways to peers.
        store, tables, index, leadership, is_follower: As for ``build_context``.
        clock: Source of time.
        instance_id: Random number of this life of the process.
        quotas: Of users; None for none.
    """
    config, followers = begins.config, make_followers(begins)
    return BrokerContext(
        settings=begins.settings,
        clock=clock,
        instance_id=instance_id,
        store=store,
        commit_point=commit_point_of(config, store, followers, leadership),
        followers=followers,
        read_advice=ReadAdvice(
            config.ha,
            followers,
            leadership,
            store.log_end if isinstance(store, ReplicableLog) else store.durable_offset,
            begins.memory_bytes,
        ),
        leadership=leadership,
        is_follower=is_follower,
        topics=tables.topics,
        offsets=tables.offsets,
        group_table=tables.groups,
        groups=make_groups(begins),
        locks=make_locks(begins),
        holds=make_holds(begins),
        turns=make_turns(begins),
        stage=SendStage(),
        producer_keys=ProducerKeys(config.max_producers_per_connection),
        metas=MetaCache(),
        stats=BrokerStats(),
        periods=Periods(begins.now_ms),
        wire=wire,
        state=tables.state,
        auto_creation=AutoCreation(
            config.auto_topics_per_minute,
            config.auto_queues_per_minute,
            config.auto_groups_per_minute,
        ),
        quotas=quotas or Quotas(),
        admission=make_admission(begins),
        index=index,
        filter_servers=make_filter_servers(begins),
        snapshots=make_snapshots(begins),
        transactions=make_transactions(begins),
        schedule=make_schedule(begins),
        retries=make_retries(begins),
    )

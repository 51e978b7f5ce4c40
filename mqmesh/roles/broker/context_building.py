"""Builds what handlers use, out of the settings, a store, and the tables that its log keeps."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mqmesh.clock import Clock
from mqmesh.log_identity import first_number
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.route import BrokerAddress
from mqmesh.roles.broker.commit_point import commit_point_of
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.context import BrokerContext, Retries, Wire
from mqmesh.roles.broker.feature import Beginning
from mqmesh.roles.broker.features.delays.schedule_desk import ScheduleDesk
from mqmesh.roles.broker.features.groups.feature import make_groups, make_locks
from mqmesh.roles.broker.features.pulls.filter_servers import FilterServers
from mqmesh.roles.broker.features.pulls.meta_cache import MetaCache
from mqmesh.roles.broker.features.pulls.pull_hold import PullHold
from mqmesh.roles.broker.features.pulls.pull_turns import PullTurns
from mqmesh.roles.broker.features.replicas.follower_table import FollowerTable
from mqmesh.roles.broker.features.retries.dead_letter_marks import DeadLetterMarks
from mqmesh.roles.broker.features.sends.feature import make_admission
from mqmesh.roles.broker.features.snapshots.snapshot_desk import OnDone, SnapshotDesk
from mqmesh.roles.broker.features.storing.staging import SendStage
from mqmesh.roles.broker.features.topics.creation_rates import CreationRates
from mqmesh.roles.broker.features.transactions.feature import make_transactions
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha.replica_figures import ReplicaCounts
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.broker.producer_keys import ProducerKeys
from mqmesh.roles.broker.stats import BrokerStats
from mqmesh.roles.broker.tables import BrokerTables
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.document_saver import MakeSaver, Read
from mqmesh.roles.shell import RoleShell
from mqmesh.storage.interface import FlushDiskType, MessageStore
from mqmesh.transport.interface import Transport


class BrokerResources(msgspec.Struct, frozen=True):
    """What the process of a broker gives to its role.

    Attributes:
        config: Settings.
        transport: Of the process.
        clock: Source of time.
        shell: Command server and timers.
        root: Directory of everything that the broker keeps.
        instance_id: Random number of this life of the process.
        address: Where it listens.
        files: Reads and saves documents; None if nothing is kept.
        run_aside: Has another thread do something.
        elections: What a replica serves in every role, for the others of its group.
        state: What a replica is that does not lead.
        on_deposed: Told that another replica is the master, and why that is known.
        replication: What the process counts of it.
    """

    config: BrokerConfig
    transport: Transport
    clock: Clock
    shell: RoleShell
    root: Path
    instance_id: int
    address: BrokerAddress
    files: tuple[Read, MakeSaver] | None
    run_aside: Callable[[Callable[[], Any], OnDone], None]
    elections: Mapping[RequestCode, Handler] = {}
    state: Callable[[], str] = lambda: "FOLLOWING"
    on_deposed: Callable[[str], None] = lambda reason: None
    replication: ReplicaCounts = msgspec.field(default_factory=ReplicaCounts)


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
    index: IndexerLink | None = None,
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
        index: Way to the index process.
        leadership: Of a master that was elected.
        epoch: Of a master: generations, lock tokens and sessions of it begin with it.
        is_follower: It only reads.
    """
    config, server = given.config, given.shell.server
    assert server is not None
    retry_after_ms, chance = config.busy_retry_after_ms, given.transport.random
    begins = Beginning(
        config,
        given.clock.monotonic_ms(),
        chance,
        epoch,
        was_elected=leadership is not None,
        has_past=bool(store.topics()),
    )
    followers = _make_followers(config, given.replication)
    return BrokerContext(
        config=config,
        clock=given.clock,
        instance_id=given.instance_id,
        store=store,
        commit_point=commit_point_of(config, store, followers, leadership),
        followers=followers,
        leadership=leadership,
        is_follower=is_follower,
        topics=tables.topics,
        offsets=tables.offsets,
        group_table=tables.groups,
        groups=make_groups(begins),
        locks=make_locks(begins),
        holds=PullHold(config.max_held_pulls, retry_after_ms),
        turns=PullTurns(config.max_held_pulls, retry_after_ms),
        stage=SendStage(),
        producer_keys=ProducerKeys(config.max_producers_per_connection),
        metas=MetaCache(),
        stats=BrokerStats(),
        wire=Wire(
            given.shell.reply,
            given.shell.fail,
            server.notify,
            server.note_refusal,
            server.room,
            given.shell.dispatch.permit,
        ),
        state=tables.state,
        creation_rates=CreationRates(config.auto_topics_per_minute),
        admission=make_admission(begins),
        index=index,
        filter_servers=FilterServers(config.filter_server_enable, config.broker_name),
        snapshots=SnapshotDesk(given.run_aside, given.root.absolute()),
        transactions=make_transactions(begins),
        schedule=ScheduleDesk(first_number(epoch)),
        retries=Retries(marks=DeadLetterMarks(chance)),
    )


def _make_followers(config: BrokerConfig, counts: ReplicaCounts) -> FollowerTable:
    return FollowerTable(
        window_bytes=config.ha.ha_window_bytes,
        fall_behind_bytes=config.ha.ha_slave_fallbehind_max,
        retain_ms=config.ha.ha_retain_for_slaves_ms,
        counts_synced=config.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH,
        counts=counts,
    )

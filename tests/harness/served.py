"""The commands of a broker without a process, behind the dispatch that a real one has."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

from mqmesh.clock import Clock
from mqmesh.errors import NoPermission
from mqmesh.protocol.command import Principal
from mqmesh.protocol.commands import CommandSpec, RequestCode, ServedBy
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.environment import commit_point_of, follower_table_of
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.roles.broker.state_log import StateLog
from mqmesh.roles.dispatch import Dispatch, Serve
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.storage.interface import MessageStore
from mqmesh.storage.memory import MemoryStore
from mqmesh.storage.table_rows import TableRows

OF_THE_PROCESS: Final = frozenset({RequestCode.GET_BROKER_CONFIG, RequestCode.UPDATE_BROKER_CONFIG})
"""Commands that the process serves whatever its role is: no feature has them."""


class Guard:
    """Permits everything but what a test forbids.

    Attributes:
        forbidden: Topics and groups.
        told: Lookups: names of commands, and topics.
    """

    def __init__(self) -> None:
        self.forbidden: set[str] = set()
        self.told: list[tuple[str, str]] = []

    def check(self, principal: Principal, spec: CommandSpec, header: Any) -> None:
        """Implement ``Authorizer.check``."""
        if header is not None and spec.request is not None:
            for topic in spec.topic_names(header):
                self.check_topic(principal, spec, topic)

    def check_group(self, principal: Principal, spec: CommandSpec, group: str) -> None:
        """Implement ``Authorizer.check_group``."""
        self.check_topic(principal, spec, group)

    def check_creation(self, principal: Principal, topic: str) -> None:
        """Permits every user to have topics made."""

    def check_topic(self, principal: Principal, spec: CommandSpec, topic: str) -> None:
        """Implement ``Authorizer.check_topic``."""
        self.told.append((spec.code.name, topic))
        if topic in self.forbidden:
            raise NoPermission(f"planned: nothing of {topic!r} for you")


def features_on(
    store: MessageStore,
    config: BrokerConfig,
    clock: Clock,
    guard: Guard | None = None,
    *,
    is_kept: bool = False,
    is_follower: bool = False,
    instance_id: int = 77,
    seed: int = 1,
    epoch: int = 0,
    leadership: Leadership | None = None,
    index: IndexerLink | None = None,
    rows: TableRows | None = None,
) -> BrokerFeatures:
    """Makes the features of a broker without a process.

    Args:
        store: Messages.
        config: Settings.
        clock: Source of time.
        guard: Looks up rights; None permits everything.
        is_kept: Topics, groups and offsets are kept in the store's log.
        is_follower: The role only reads.
        instance_id: Instance id of the process.
        seed: Seed of random numbers.
        epoch: Epoch of a master.
        leadership: Leadership of a master that was elected.
        index: Connection to the index process.
        rows: Rows of tables; None for some in memory.
    """
    followers = follower_table_of(config, ReplicaCounts(), began_ms=clock.monotonic_ms())
    core = Core(
        LiveSettings(config),
        clock,
        store,
        commit_point_of(config, store, followers, leadership),
        StateLog(store if is_kept else None, clock, config=config.storage),
        Dispatch(ServedBy.BROKER, clock.monotonic_ns, guard),
        lambda code, remark: None,
        instance_id=instance_id,
        random=Random(seed),
        root=Path(config.store_path_root_dir),
        run_aside=lambda work, on_done: None,
        replication=ReplicaCounts(),
        leadership=leadership,
        epoch=epoch,
        is_follower=is_follower,
        has_past=leadership is not None and bool(store.topics()),
    )
    return BrokerFeatures(core, followers, index, rows)


def dispatched(features: BrokerFeatures) -> Dispatch:
    """Returns the dispatch of a broker, which serves its commands from now on."""
    dispatch = features.core.dispatch
    dispatch.open(features.commands())
    return dispatch


def served(features: BrokerFeatures) -> dict[int, Serve]:
    """Returns the handlers by request code, all but PING."""
    return dispatched(features).handlers


class KeptState:
    """State that a broker keeps in its log beside messages, without a process.

    Args:
        config: Settings.
        clock: Source of time.
        store: Store of its log; None to keep nothing.

    Attributes:
        topics, groups, offsets: The tables.
        state: The state log.
    """

    def __init__(self, config: BrokerConfig, clock: Clock, store: MessageStore | None) -> None:
        used = MemoryStore(config.storage, clock=clock) if store is None else store
        self._features = features_on(used, config, clock, is_kept=store is not None)
        self.topics = self._features.state.topics
        self.groups = self._features.state.group_table
        self.offsets = self._features.state.committed
        self.state = self._features.core.state
        self._is_kept = store is not None
        # Topics are deleted without a write of what was sent to them: nobody sends here.
        self.topics.on_deleting = self.topics.on_deleted = lambda topic: None

    def load(self) -> None:
        """Reads the log, as a master that begins."""
        self._features.load()
        if self._is_kept:
            self.state.save()

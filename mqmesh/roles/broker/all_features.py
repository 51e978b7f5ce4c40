"""The features of a broker: how they are built, and in which order their hooks are called.

Read this first. Features stand below what they are built on: none is given a neighbour that is
built later, so there is no circle among them.
"""

from collections.abc import Mapping
from typing import Final

from mqmesh.log_identity import first_number
from mqmesh.message import SCHEDULE_TOPIC, TRANS_HALF_TOPIC
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Peer
from mqmesh.roles.broker.auto_creation import AutoCreation
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.window import LeaseNumbers
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.feature import BrokerTurn, Feature
from mqmesh.roles.broker.features.client_rpc.feature import ClientRpcFeature
from mqmesh.roles.broker.features.delays.feature import DelaysFeature
from mqmesh.roles.broker.features.delays.placement import DelayPlacement
from mqmesh.roles.broker.features.delays.schedule_link import ScheduleLink
from mqmesh.roles.broker.features.delivery.feature import DeliveryFeature
from mqmesh.roles.broker.features.filter_servers.feature import FilterServersFeature
from mqmesh.roles.broker.features.groups.connections import ConnectionsFeature
from mqmesh.roles.broker.features.groups.group_admin import GroupAdminFeature
from mqmesh.roles.broker.features.groups.held_commits import (
    HandedOverCommitsFeature,
)
from mqmesh.roles.broker.features.groups.locks import LocksFeature
from mqmesh.roles.broker.features.groups.membership import MembershipFeature
from mqmesh.roles.broker.features.groups.offsets import OffsetsFeature
from mqmesh.roles.broker.features.groups.progress import GroupProgressFeature, ProgressReader
from mqmesh.roles.broker.features.groups.resets import ResetsFeature
from mqmesh.roles.broker.features.processing.feature import ProcessingFeature
from mqmesh.roles.broker.features.pulling.feature import PullingFeature
from mqmesh.roles.broker.features.queries.feature import QueriesFeature
from mqmesh.roles.broker.features.replication.feature import ReplicationFeature
from mqmesh.roles.broker.features.replication.log_checks import LogChecksFeature
from mqmesh.roles.broker.features.request_reply.feature import RequestReplyFeature
from mqmesh.roles.broker.features.retention.feature import RetentionFeature
from mqmesh.roles.broker.features.retries.dead_letters import DeadLettersFeature
from mqmesh.roles.broker.features.retries.replay import ReplayFeature
from mqmesh.roles.broker.features.retries.send_back import SendBackFeature
from mqmesh.roles.broker.features.sending.feature import SendingFeature
from mqmesh.roles.broker.features.snapshots.feature import SnapshotsFeature
from mqmesh.roles.broker.features.tables.feature import StagedTables, TablesFeature
from mqmesh.roles.broker.features.tables.tables import Tables
from mqmesh.roles.broker.features.topics.feature import TopicsFeature
from mqmesh.roles.broker.features.traffic.feature import TrafficFeature
from mqmesh.roles.broker.features.transactions.feature import TransactionsFeature, settings_of
from mqmesh.roles.broker.features.transactions.half_messages import PendingHalfMessages
from mqmesh.roles.broker.followers.follower_table import FollowerTable
from mqmesh.roles.broker.followers.read_advice import ReadAdvice
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_limits import GroupLimits
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.group_state.moved_offsets import OffsetResets
from mqmesh.roles.broker.group_state.owner_records import OwnerRecords
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks
from mqmesh.roles.broker.group_state.used_groups import UsedGroups
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.state_records import (
    DeliveryRecord,
    GroupRecord,
    OffsetsRecord,
    OwnersRecord,
    SentBackRecord,
    TopicRecord,
)
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.broker.write_turn import WriteTurn
from mqmesh.roles.broker.writing.send_admission import SendAdmission
from mqmesh.roles.broker.writing.writes import StoredListener, Writes
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.table_rows import MemoryRows, TableRows

FEATURES: Final[tuple[type[Feature], ...]] = (
    SnapshotsFeature,
    TopicsFeature,
    TrafficFeature,
    RetentionFeature,
    QueriesFeature,
    TransactionsFeature,  # what it decides is sent
    TablesFeature,  # what expires is sent
    SendingFeature,
    PullingFeature,
    DeliveryFeature,
    ProcessingFeature,
    FilterServersFeature,
    RequestReplyFeature,
    ClientRpcFeature,
    MembershipFeature,
    LocksFeature,
    OffsetsFeature,
    ResetsFeature,
    HandedOverCommitsFeature,
    ConnectionsFeature,
    GroupProgressFeature,
    GroupAdminFeature,
    SendBackFeature,
    DeadLettersFeature,
    ReplayFeature,
    DelaysFeature,
    ReplicationFeature,
    LogChecksFeature,
)
"""All features of a broker, in the order in which their hooks are called."""


MOST_RUNS: Final = 200_000
"""Leases and waiting runs of one broker, at 360 bytes of memory each."""


class SharedState:
    """State that several features use, each owned by the feature of its folder.

    Args:
        core: The core of the broker.
        followers: Followers of a master.
        rows: Rows of tables.

    Attributes:
        topics: Topics by name.
        groups: Clients, the members of groups, and the owners of queues.
        group_table: Settings of groups.
        limits: Pauses and rates of groups.
        committed: Offsets that groups have committed.
        windows: Messages that groups hold which acknowledge each.
        moved: Offsets that were moved under running consumers.
        by_group: Messages and bytes handed out to each group.
        queue_locks: Locks of ordered consumers.
        owners: Members and owners of queues, as they are kept in the log.
        half_messages: Half messages that wait for their decision.
        schedule: The schedule service, and who waits for it.
        tables: Rows of tables.
        staged_tables: Batches of tables on the stage.
        listeners: Features that follow what is stored in a topic, by topic.
        admission: Decides which sends have waited for too long.
        auto_creation: Topics, queues and groups that each client created lately by their first use.
        used_groups: Groups that clients use for the first time.
        metas: Batch metas decoded before.
        read_advice: Follower that a consumer should read from.
    """

    def __init__(self, core: Core, followers: FollowerTable, rows: TableRows) -> None:
        config = core.config
        self.topics = _topic_table_of(core)
        self.groups = _consumer_groups_of(core)
        self.group_table = GroupTable(
            config.max_subscription_groups,
            auto_create=config.auto_create_subscription_group,
            busy_retry_after_ms=config.busy_retry_after_ms,
            quotas=core.quotas,
        )
        self.limits = GroupLimits(core.clock)
        self.committed = CommittedOffsets(config.max_consumer_offsets, config.busy_retry_after_ms)
        self.windows = DeliveryWindows(
            LeaseNumbers(first_number(core.epoch), MOST_RUNS),
            self.committed,
            lambda: core.clock.wall_ms() - core.clock.monotonic_ms(),
        )
        self.moved = OffsetResets()
        self.by_group = GroupPulls()
        self.queue_locks = _queue_locks_of(core)
        self.owners = OwnerRecords(self.groups, self.queue_locks, is_kept=core.copies_confirm)
        self.half_messages = PendingHalfMessages(settings_of(config), core.random)
        self.schedule = ScheduleLink(core.epoch)
        self.tables = Tables(core, self.topics, rows)
        self.staged_tables = StagedTables(self.tables)
        self.listeners: dict[str, StoredListener] = {
            TRANS_HALF_TOPIC: self.half_messages,
            SCHEDULE_TOPIC: self.schedule,
        }
        self.admission = _send_admission_of(config)
        self.auto_creation = AutoCreation(
            config.auto_topics_per_minute,
            config.auto_queues_per_minute,
            config.auto_groups_per_minute,
        )
        self.used_groups = UsedGroups(core.clock, self.group_table, self.auto_creation.groups)
        self.metas = MetaCache()
        self.read_advice = ReadAdvice(
            config.ha,
            followers,
            core.leadership,
            lambda: core.store.stats().max_commitlog_offset,
            core.memory_bytes,
        )
        # Tables that are kept in the log; a write has their records in this order.
        core.state.keep(TopicRecord, self.topics, urgent=True)
        core.state.keep(GroupRecord, self.group_table, urgent=True)
        core.state.keep(SentBackRecord, self.committed.sent_back)
        core.state.keep(OffsetsRecord, self.committed)
        # Behind the offsets: a window's floor is newer than what they say of its queue.
        core.state.keep(DeliveryRecord, self.windows, changes_of=self.windows.changes_of)
        core.state.keep(OwnersRecord, self.owners, on_damaged=self.owners.on_damaged)


class BrokerFeatures:
    """All features of a broker in one role; a follower has them, too, and uses those that read.

    Args:
        core: The core of the broker.
        followers: Followers of a master.
        index: Connection to the index process; None if there is none.
        rows: Rows of tables; None for some in memory.

    Attributes:
        core: The core of the broker.
        state: State that several features use.
        turn_ended: Ends a turn of the loop; returns True if the next one has to come at once.
    """

    def __init__(
        self,
        core: Core,
        followers: FollowerTable,
        index: IndexerLink | None = None,
        rows: TableRows | None = None,
    ) -> None:
        self.core = core
        self.state = state = SharedState(core, followers, rows or MemoryRows())
        self.topics = TopicsFeature(core, state.topics, state.committed)
        self.pulling = PullingFeature(
            core,
            state.topics,
            state.groups,
            state.group_table,
            state.moved,
            state.read_advice,
            state.metas,
            state.by_group,
            state.limits,
        )
        self.writes = writes = Writes(
            core,
            state.topics,
            self.pulling,
            state.admission,
            state.listeners,
            state.half_messages.table,
            state.staged_tables,
        )
        placement = DelayPlacement(core, writes, state.schedule)
        self.transactions = TransactionsFeature(
            core, state.topics, state.groups, state.half_messages, writes
        )
        self.tables = TablesFeature(
            core, state.topics, state.staged_tables, writes, lambda: followers.wish
        )
        self.sending = SendingFeature(
            core,
            state.topics,
            writes,
            self.transactions.admit,
            placement.to_schedule,
            state.metas,
            state.auto_creation,
            state.admission,
            self.tables,
        )
        self.delays = DelaysFeature(core, writes, state.schedule)
        self.send_back = SendBackFeature(
            core,
            state.topics,
            state.group_table,
            state.used_groups,
            state.committed,
            writes,
            placement.place,
        )
        self.delivery = self._delivery()
        self.dead_letters = DeadLettersFeature(core, state.topics, writes)
        self.replay = ReplayFeature(core, state.topics, state.groups, state.group_table, writes)
        self._build_groups()
        self._build_others(followers, index)
        self._turn = self._write_turn()
        self.turn_ended = self._end_follower_turn if core.is_follower else self._turn.end
        self._put_in_order()

    def _write_turn(self) -> WriteTurn:
        state = self.state
        return WriteTurn(
            self.core,
            state.half_messages,
            state.groups,
            state.schedule,
            self.writes,
            state.admission,
            self.transactions,
            self.pulling,
            self.delivery,
            self.membership,
            self.delays,
            self.replication,
            state.tables,
        )

    def _delivery(self) -> DeliveryFeature:
        state = self.state
        return DeliveryFeature(
            self.core,
            state.topics,
            state.groups,
            state.group_table,
            state.committed,
            state.windows,
            state.by_group,
            state.limits,
            state.metas,
            self.send_back,
            state.listeners,
        )

    def _build_others(self, followers: FollowerTable, index: IndexerLink | None) -> None:
        core, state = self.core, self.state
        self.queries = QueriesFeature(core, state.topics, index)
        self.snapshots = SnapshotsFeature(core, index)
        self.filter_servers = FilterServersFeature(core)
        self.request_reply = RequestReplyFeature(core, state.groups)
        self.client_rpc = ClientRpcFeature(core, state.topics, state.groups)
        self.retention = RetentionFeature(core)
        self.traffic = TrafficFeature(core, state.topics, state.by_group)
        self.replication = ReplicationFeature(core, followers, self.writes)
        self.log_checks = LogChecksFeature(core)

    def _build_groups(self) -> None:
        core, state = self.core, self.state
        self.membership = MembershipFeature(
            core,
            state.groups,
            state.group_table,
            state.queue_locks,
            state.auto_creation,
            state.used_groups,
            self.delivery.queues.note_subscriptions,
        )
        self.locks = LocksFeature(core, state.topics, state.groups, state.queue_locks, state.owners)
        self.offsets = OffsetsFeature(
            core,
            state.topics,
            state.groups,
            state.committed,
            state.moved,
            state.queue_locks,
            state.used_groups,
        )
        self.processing = ProcessingFeature(
            core,
            self.writes,
            self.sending.admit_outputs,
            self.delivery.settlements.plan_processed,
            self.offsets.plan_processed,
        )
        self.resets = ResetsFeature(
            core,
            state.topics,
            state.groups,
            state.group_table,
            state.committed,
            state.moved,
            state.by_group,
            self.pulling,
            self.send_back.forget_sent_back,
            state.windows,
        )
        self.handed_over = HandedOverCommitsFeature(
            core, state.topics, state.committed, state.moved
        )
        progress = ProgressReader(
            core,
            state.topics,
            state.groups,
            state.group_table,
            state.committed,
            state.by_group,
            state.schedule.retries,
            state.windows,
        )
        self.group_progress = GroupProgressFeature(core, state.topics, state.groups, progress)
        self.connections = ConnectionsFeature(core, state.groups)
        self.group_admin = GroupAdminFeature(
            core, state.topics, state.groups, state.group_table, progress, state.windows
        )

    def _put_in_order(self) -> None:
        built = {type(one): one for one in vars(self).values() if isinstance(one, Feature)}
        self._by_kind: dict[type[Feature], Feature] = {kind: built[kind] for kind in FEATURES}
        self._in_order = tuple(self._by_kind.values())
        self._called = [
            one for one in self._in_order if not self.core.is_follower or one.works_at_followers
        ]
        self.state.topics.on_deleting = self._topic_deleting
        self.state.topics.on_deleted = self._topic_deleted
        self.state.group_table.on_deleting = self._group_deleting
        self.state.group_table.on_deleted = self._group_deleted

    def of(self, kind: type[Feature]) -> Feature:
        """Return the feature of a kind."""
        return self._by_kind[kind]

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Return the handlers of the role."""
        if self.core.is_follower:
            return {
                code: handler
                for one in self._called
                for code, handler in one.follower_commands().items()
            }
        return {code: handler for one in self._called for code, handler in one.commands().items()}

    def load(self) -> None:
        """Takes over what the log says of topics, groups and offsets.

        Raises:
            CorruptRecord: It is damaged. Offsets are never begun anew in silence.
        """
        self.core.state.load()
        for one in self._in_order:
            one.loaded()

    def opened(self) -> None:
        """Begin to serve clients; called once, by a master."""
        for one in self._in_order:
            one.opened()

    def _end_follower_turn(self, turn: BrokerTurn) -> bool:
        pulls_left = self.pulling.begin_turn()
        self.membership.send_notices()
        return pulls_left

    def durable(self) -> None:
        """Answers what waited for the disk: the log was synced further."""
        if not self.core.is_follower:
            self._turn.durable()

    def tick(self, now_ms: int) -> None:
        """Checks deadlines; monotonic clock."""
        for one in self._called:
            one.tick(now_ms)

    def sample(self) -> None:
        """Does what is done each second."""
        for one in self._called:
            one.sample()

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forgets a connection that broke; monotonic clock."""
        for one in self._called:
            one.client_gone(peer, now_ms)

    def configured(self) -> None:
        """Takes over settings that were changed."""
        for one in self._in_order:
            one.configured()

    def stopping(self) -> None:
        """Finishes what was begun; the broker stops, or leads no more."""
        for one in self._called:
            one.stopping()

    def stopped(self) -> None:
        """Answers everybody who still waits: nothing becomes durable any more."""
        for one in self._called:
            one.stopped()

    def _topic_deleting(self, topic: str) -> None:
        for one in self._in_order:
            one.topic_deleting(topic)

    def _topic_deleted(self, topic: str) -> None:
        for one in self._in_order:
            one.topic_deleted(topic)

    def _group_deleting(self, group: str) -> None:
        for one in self._in_order:
            one.group_deleting(group)

    def _group_deleted(self, group: str) -> None:
        for one in self._in_order:
            one.group_deleted(group)


def _consumer_groups_of(core: Core) -> ConsumerGroups:
    """Return the clients and groups of a role that begins: none."""
    config = core.config
    return ConsumerGroups(
        grace_ms=config.client_lost_grace_ms,
        expiry_ms=config.client_channel_expired_timeout_ms,
        most_clients=config.max_clients,
        first_generation=first_number(core.epoch),
        busy_retry_after_ms=config.busy_retry_after_ms,
    )


def _queue_locks_of(core: Core) -> QueueLocks:
    """Return the locks of a role that begins: none."""
    config = core.config
    return QueueLocks(
        lease_ms=config.rebalance_lock_max_live_time_ms,
        lost_grace_ms=config.rebalance_lock_lost_grace_ms,
        most=config.max_consumer_offsets,
        first_token=first_number(core.epoch) + 1,
        busy_retry_after_ms=config.busy_retry_after_ms,
    )


def _topic_table_of(core: Core) -> TopicTable:
    """Return the topics of a role that begins: none, until the state log is loaded."""
    config = core.config
    return TopicTable(
        config.max_topics,
        config.busy_retry_after_ms,
        most_auto=config.max_auto_topics,
        quotas=core.quotas,
    )


def _send_admission_of(config: BrokerConfig) -> SendAdmission:
    """Return the decisions about waiting sends of a role that begins."""
    return SendAdmission(
        wait_limit_ms=config.wait_time_mills_in_send_queue,
        busy_timeout_ms=config.os_page_cache_busy_timeout_mills,
    )

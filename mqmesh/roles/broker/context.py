"""The context of a broker's handlers: what they may use."""

from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import BrokerNotAvailable, StoreClosed
from mqmesh.protocol.command import Reply, Request
from mqmesh.protocol.pulling import MAX_PULL_BYTES
from mqmesh.roles.broker.auto_creation import AutoCreation
from mqmesh.roles.broker.commit_point import CommitPoint
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.features.admin.cleaning import CleaningDesk
from mqmesh.roles.broker.features.delays.schedule_desk import ScheduleDesk
from mqmesh.roles.broker.features.groups.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.features.groups.consumer_offsets import CommittedOffsets
from mqmesh.roles.broker.features.groups.groups_table import GroupTable
from mqmesh.roles.broker.features.groups.offset_resets import OffsetResets
from mqmesh.roles.broker.features.groups.queue_locks import QueueLocks
from mqmesh.roles.broker.features.pulls.filter_servers import FilterServers
from mqmesh.roles.broker.features.pulls.group_pulls import GroupPulls
from mqmesh.roles.broker.features.pulls.meta_cache import MetaCache
from mqmesh.roles.broker.features.pulls.pull_hold import PullHold
from mqmesh.roles.broker.features.pulls.pull_turns import PullTurns
from mqmesh.roles.broker.features.replicas.follower_table import FollowerTable
from mqmesh.roles.broker.features.replicas.read_advice import ReadAdvice
from mqmesh.roles.broker.features.replies.reply_table import ReplyTable
from mqmesh.roles.broker.features.retries.dead_letter_marks import DeadLetterMarks
from mqmesh.roles.broker.features.retries.sent_back_marks import SentBackMarks
from mqmesh.roles.broker.features.sends.send_admission import SendAdmission
from mqmesh.roles.broker.features.snapshots.snapshot_desk import SnapshotDesk
from mqmesh.roles.broker.features.storing.staging import OpenSend, SendStage
from mqmesh.roles.broker.features.topics.topics import TopicTable
from mqmesh.roles.broker.features.transactions.transaction_desk import TransactionDesk
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.broker.producer_keys import ProducerKeys
from mqmesh.roles.broker.state_log import StateLog
from mqmesh.roles.broker.stats import BrokerStats, Periods
from mqmesh.roles.listings import Listings
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.security.quotas import Quotas
from mqmesh.storage.interface import MessageStore

QUESTION_TIMEOUT_MS: Final = 12_000
"""A consumer that has not answered a question by then will not; it has itself 10 s for most."""


class Wire(msgspec.Struct, frozen=True):
    """How a handler that answers later, or speaks first, reaches a peer.

    Attributes:
        reply: Answers a request.
        fail: Answers a request with an error.
        note_refusal: Counts and logs a refusal that the answer to a request only contains: response
            code and remark.
        notify: Sends a peer a oneway command: routing id, code, encoded header, and the body in
            pieces.
        permit: Looks up the right of whoever sent a request to a topic that its header does not
            tell; raises ``NoPermission``.
        permit_creation: The same of the right to have a topic made by sending to it.
        room: How many bytes an answer to a peer may have now, at least 1; raises ``SystemBusy`` if
            there is none.
    """

    reply: Callable[[Request, Reply], None]
    fail: Callable[[Request, Exception], None]
    notify: Callable[..., None]
    note_refusal: Callable[[int, str], None] = lambda code, remark: None
    room: Callable[[bytes], int] = lambda peer: MAX_PULL_BYTES
    permit: Callable[[Request, str], None] = lambda request, topic: None
    permit_creation: Callable[[Request, str], None] = lambda request, topic: None


class Retries(msgspec.Struct, frozen=True):
    """What a broker remembers of failed messages.

    Attributes:
        marks: Dead letters that were resent.
        sent_back: Messages that were sent back.
    """

    marks: DeadLetterMarks
    sent_back: SentBackMarks = msgspec.field(default_factory=SentBackMarks)


class BrokerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a running broker. Handlers change them only through their methods.

    Attributes:
        settings: Settings.
        clock: Source of time.
        instance_id: Random number of this life of the process.
        store: Messages.
        commit_point: How far the log is safe, and sends that wait until it is.
        topics: Topic table.
        offsets: Consumer offsets.
        groups: Clients and consumer groups.
        locks: Queues of ordered consumers.
        holds: Pulls that wait for a message.
        turns: Pulls that wait for their turn.
        stage: Sends of this tick.
        producer_keys: What producers' connections have shown.
        metas: Batch metas decoded before.
        stats: Counters.
        wire: Ways to peers.
        state: Writes changes of topics, groups and offsets into the log.
        admission: Decides which sends have waited for too long.
        auto_creation: What each client has made lately by using it.
        quotas: How much users may send and read.
        index: Way to the index process, None if there is none.
        schedule: The schedule service, and who waits for it.
        replies: Replies to requests that are under way.
        questions: Of administrators to consumers, under way.
        retries: What is remembered of failed messages.
        group_table: Settings of consumer groups.
        pulls: What groups were handed out.
        resets: Offsets that were moved under running consumers.
        group_listings: Names of groups, for those who ask for all in pages.
        filter_servers: Where filters in Python run.
        transactions: Half messages.
        snapshots: The snapshot that is being made.
        followers: Replicas that get this master's log.
        read_advice: Which follower readers are told to read from.
        leadership: Of a master that was elected: who is in sync, and what is confirmed.
        is_follower: It only reads.
        periods: How much was stored and handed out of late, today and yesterday.
        cleaning: The pass of retention that somebody waits for.
    """

    settings: LiveSettings[BrokerConfig]
    clock: Clock
    instance_id: int
    store: MessageStore
    commit_point: CommitPoint[OpenSend]
    topics: TopicTable
    offsets: CommittedOffsets
    groups: ConsumerGroups
    locks: QueueLocks
    holds: PullHold
    stage: SendStage
    producer_keys: ProducerKeys
    metas: MetaCache
    stats: BrokerStats
    wire: Wire
    state: StateLog
    admission: SendAdmission
    auto_creation: AutoCreation
    quotas: Quotas = msgspec.field(default_factory=Quotas)
    index: IndexerLink | None = None
    schedule: ScheduleDesk
    replies: ReplyTable = msgspec.field(default_factory=ReplyTable)
    questions: ReplyTable = msgspec.field(
        default_factory=lambda: ReplyTable(QUESTION_TIMEOUT_MS, "questions of administrators")
    )
    retries: Retries
    group_table: GroupTable
    pulls: GroupPulls = msgspec.field(default_factory=GroupPulls)
    resets: OffsetResets = msgspec.field(default_factory=OffsetResets)
    group_listings: Listings[list[str]] = msgspec.field(default_factory=Listings)
    filter_servers: FilterServers
    turns: PullTurns
    transactions: TransactionDesk
    snapshots: SnapshotDesk
    followers: FollowerTable
    read_advice: ReadAdvice
    leadership: Leadership | None = None
    is_follower: bool = False
    periods: Periods
    cleaning: CleaningDesk = msgspec.field(default_factory=CleaningDesk)

    @property
    def config(self) -> BrokerConfig:
        """Settings in force."""
        return self.settings.now


def store_stopped(error: StoreClosed) -> BrokerNotAvailable:
    """What clients are told when the store does not write any more."""
    return BrokerNotAvailable(f"this broker does not write any more: {error}")

"""The master of a broker group: serves everything, and alone adds to the log."""

from functools import partial

from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import NotMaster
from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.context_building import BrokerResources, build_context, make_tables
from mqmesh.roles.broker.feature import BrokerTurn
from mqmesh.roles.broker.features.groups.feature import GROUPS_SETTLE_MS
from mqmesh.roles.broker.features.groups.held_commits import take_own_commits
from mqmesh.roles.broker.features.replicas.feature import REPLICAS
from mqmesh.roles.broker.features.storing.storing import refuse_all
from mqmesh.roles.broker.features.transactions.half_checkpoint_file import HalfCheckpointFile
from mqmesh.roles.broker.features.transactions.transactions import has_queue
from mqmesh.roles.broker.ha.ha_config import HaMode
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.index.indexer_link import LogExtent
from mqmesh.roles.broker.role import MASTER_ID, BrokerRole
from mqmesh.roles.broker.state_answers import write_state
from mqmesh.storage.interface import MessageStore
from mqmesh.units import MAX_OFFSET


def _everything() -> int:
    return MAX_OFFSET


class MasterRole(BrokerRole):
    """A master, from now on.

    Args:
        given: What the process gives.
        store: Messages, open.
        epoch: That it begins; generations and lock tokens begin with it.
        leadership: Of one that was elected. Until what it inherited is confirmed it serves nobody
            but replicas: consumers would not see yet what they have seen.

    Raises:
        CorruptRecord: What the log tells of topics, groups or offsets is damaged.
        StorageError: Half messages cannot be recovered.
    """

    def __init__(
        self,
        given: BrokerResources,
        store: MessageStore,
        epoch: int,
        leadership: Leadership | None = None,
    ) -> None:
        super().__init__(given, MASTER_ID)
        self._leadership = leadership
        self._is_open = leadership is None
        self._half_checkpoint: HalfCheckpointFile | None = None
        # What is read now is known to nobody else. Nor does it end where this replica, as a
        # follower, was told that it is confirmed: what is behind that is its log, too.
        store.show_to(_everything)
        tables = make_tables(given, store)
        tables.load()
        context = build_context(given, store, tables, leadership, epoch=epoch)
        if leadership is None and given.config.ha.mode is HaMode.MANUAL:
            self._wait_for_followers(context)
        write_state(context)  # shows from the beginning whether there is room
        self._recover_transactions(context)
        if leadership is not None or given.config.ha.ack_replicas is not AckReplicas.NONE:
            # What a follower lacks may be lost with this machine, and nobody shall have seen it.
            store.show_to(context.commit_point.shown_offset)
        self._serve(context, FEATURES)
        if leadership is not None:
            given.shell.dispatch.refuse(
                f"epoch {leadership.epoch} of {given.config.broker_name} begins: the followers are "
                "to have its first record"
            )
            self._open(
                {
                    code: handler
                    for code, handler in self._handlers().items()
                    if code in REPLICAS.commands
                }
            )

    def turn_ended(self, turn: BrokerTurn) -> bool:
        """See ``BrokerRole.turn_ended``."""
        again = super().turn_ended(turn)
        if not self._is_open and self._leadership is not None and self._leadership.is_confirmed:
            self._is_open = True
            self._open(self._handlers())
            self.announce()
        return again

    def announce(self) -> None:
        """See ``BrokerRole.announce``."""
        if self._is_open:
            super().announce()

    def depose(self, reason: str) -> None:
        """It is the master no more: whoever waits for an answer is told at once."""
        context, error = self.context, NotMaster(reason)
        if context is None or not self.serves:
            return
        refuse_all(context, error)
        context.state.abandon(error)
        self._rest(reason, NotMaster)
        refuse_all(context, error)  # decisions on half messages became sends meanwhile

    def tick(self, now_ms: int) -> None:
        """See ``BrokerRole.tick``."""
        context = self.context
        # Where there are followers, offsets that were committed here and are not in the log are
        # lost with each master: they go there at once.
        if self.serves and context is not None:
            if self._leadership or len(context.followers) or context.state.is_due:
                write_state(context)
        super().tick(now_ms)

    def save(self) -> None:
        """See ``BrokerRole.save``."""
        if self.serves and self.context is not None:
            write_state(self.context)
        if self.context is not None and self._half_checkpoint is not None:
            self._half_checkpoint.save()

    def close(self) -> None:
        """See ``BrokerRole.close``."""
        super().close()
        if self._half_checkpoint is not None:
            self._half_checkpoint.close()
            self._half_checkpoint = None

    def log_extent(self) -> LogExtent | None:
        """See ``BrokerRole.log_extent``."""
        context = self.context
        if context is None or not self._is_open:
            return None
        stats = context.store.stats()
        visible = context.commit_point.visible(stats.max_commitlog_offset)
        return LogExtent(stats.store_id, stats.min_commitlog_offset, visible)

    def _wait_for_followers(self, context: BrokerContext) -> None:
        """Groups may have come further at a follower while nobody was the master here."""
        given = self._given
        if context.store.topics():
            # A follower hands that over as soon as it has met this master.
            context.groups.settled_ms = given.clock.monotonic_ms() + GROUPS_SETTLE_MS
        if given.files is not None:
            take_own_commits(context, *given.files)

    def _recover_transactions(self, context: BrokerContext) -> None:
        document = None
        given = self._given
        if given.files is not None:
            self._half_checkpoint = HalfCheckpointFile(context.transactions, *given.files)
            document = self._half_checkpoint.load()
        context.transactions.recover(
            context.store,
            document,
            partial(has_queue, context.topics),
            wall_ms=given.clock.wall_ms(),
            now_ms=given.clock.monotonic_ms(),
            segment_bytes=given.config.storage.mapped_file_size_commit_log,
        )

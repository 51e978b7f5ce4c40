"""The master of a broker group: serves everything, and alone adds to the log."""

import logging
from typing import Final

from mqmesh.errors import NotMaster, StorageError
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.config import MASTER_ID
from mqmesh.roles.broker.environment import Environment, build_features
from mqmesh.roles.broker.features.transactions.half_messages import PendingHalfMessages
from mqmesh.roles.broker.group_state.consumer_groups import GROUPS_SETTLE_MS
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.broker.index.indexer_link import LogExtent
from mqmesh.roles.broker.role import BrokerRole
from mqmesh.roles.document_saver import MakeSaver, Read
from mqmesh.storage.interface import MessageStore

TRANSACTIONS_FILE: Final = "transactions.json"
LEAST_WAIT_MS: Final = 3
"""Least pause before leases and waits that are due are ended."""

_log = logging.getLogger(__name__)


class MasterRole(BrokerRole):
    """A master, from now on.

    Args:
        given: The process.
        store: Messages, open.
        epoch: That it begins; generations and lock tokens begin with it.
        leadership: Of one that was elected. Until what it inherited is confirmed it serves nobody
            but replicas: consumers would not see yet what they have seen.

    Raises:
        CorruptRecord: State of topics, groups or offsets in the log is damaged.
        StorageError: Half messages cannot be recovered.
    """

    def __init__(
        self,
        given: Environment,
        store: MessageStore,
        epoch: int,
        leadership: Leadership | None = None,
    ) -> None:
        super().__init__(given, MASTER_ID)
        self._leadership = leadership
        self.is_open = leadership is None
        self._half_checkpoint: HalfCheckpointFile | None = None
        # Only this replica reads the log now, and reads it to its end: not just to the offset that
        # it knew, as a follower, to be confirmed.
        store.show_to(None)
        features = build_features(given, store, leadership, epoch=epoch)
        core = features.core
        features.delivery.on_due = self._plan_ends
        features.load()
        # The first record of a life shows whether there is room for others.
        core.state.save()
        if leadership is None and given.config.ha.mode is HaMode.MANUAL:
            self._wait_for_followers(features)
        core.write_state()
        self._recover_transactions(features)
        if not core.commit_point.is_immediate:
            # Records that the disk or a follower lacks may be lost, so consumers must not see them.
            store.show_to(core.commit_point.high_watermark)
        self._handlers = features.commands()
        self._serve(features, self._handlers)
        if self.is_open:
            features.opened()
        if leadership is not None:
            given.shell.dispatch.refuse(
                f"epoch {leadership.epoch} of {given.config.broker_name} begins: the followers are "
                "to have its first record"
            )
            served = {*features.replication.commands(), *features.log_checks.commands()}
            self._open(
                {code: handler for code, handler in self._handlers.items() if code in served}
            )

    def open_if_confirmed(self) -> None:
        """Implement ``BrokerRole.open_if_confirmed``."""
        leadership, features = self._leadership, self.features
        if leadership is not None and leadership.is_confirmed and features is not None:
            self.is_open = True
            features.opened()
            self._open(self._handlers)
            self.announce()

    def announce(self) -> None:
        """Implement ``BrokerRole.announce``."""
        if self.is_open:
            super().announce()

    def depose(self, reason: str) -> None:
        """End the role of this master: clients that wait for an answer get an error at once."""
        features, error = self.features, NotMaster(reason)
        if features is None or not self.serves:
            return
        features.writes.refuse_all(error)
        features.core.state.abandon(error)
        self._rest(reason, NotMaster)
        # Decisions on half messages became sends meanwhile.
        features.writes.refuse_all(error)

    def tick(self, now_ms: int) -> None:
        """Implement ``BrokerRole.tick``."""
        features = self.features
        # Where there are followers, offsets that were committed here and are not in the log are
        # lost with each master: they go there at once.
        if self.serves and features is not None:
            has_followers = len(features.replication.followers) > 0
            if self._leadership or has_followers or features.core.state.is_due:
                features.core.write_state()
        super().tick(now_ms)

    def _plan_ends(self, due_ms: int) -> None:
        """Have leases and waits that end before the next tick end in time; monotonic clock."""
        wait_ms = max(due_ms - self._given.clock.monotonic_ms(), LEAST_WAIT_MS)
        self._given.transport.loop.call_later(wait_ms, self._end_due)

    def _end_due(self) -> None:
        if self.serves and self.features is not None:
            self.features.delivery.tick(self._given.clock.monotonic_ms())

    def save(self) -> None:
        """Implement ``BrokerRole.save``."""
        if self.serves and self.features is not None:
            self.features.core.write_state()
        if self.features is not None and self._half_checkpoint is not None:
            self._half_checkpoint.save()

    def close(self) -> None:
        """Implement ``BrokerRole.close``."""
        super().close()
        if self._half_checkpoint is not None:
            self._half_checkpoint.close()
            self._half_checkpoint = None

    def log_extent(self) -> LogExtent | None:
        """Implement ``BrokerRole.log_extent``."""
        if self.features is None or not self.is_open:
            return None
        core = self.features.core
        stats = core.store.stats()
        visible = core.commit_point.visible(stats.max_commitlog_offset)
        return LogExtent(stats.store_id, stats.min_commitlog_offset, visible)

    def _wait_for_followers(self, features: BrokerFeatures) -> None:
        """Groups may have come further at a follower while nobody was the master here."""
        given = self._given
        if features.core.store.topics():
            # A follower hands that over as soon as it has met this master.
            features.state.groups.settled_ms = given.clock.monotonic_ms() + GROUPS_SETTLE_MS
        if given.files is not None:
            features.handed_over.take_own_commits(*given.files)

    def _recover_transactions(self, features: BrokerFeatures) -> None:
        document = None
        given = self._given
        if given.files is not None:
            self._half_checkpoint = HalfCheckpointFile(features.state.half_messages, *given.files)
            document = self._half_checkpoint.load()
        features.state.half_messages.recover(
            features.core.store,
            document,
            wall_ms=given.clock.wall_ms(),
            now_ms=given.clock.monotonic_ms(),
        )


class HalfCheckpointFile:
    """The half checkpoint of one broker on disk; see ``half_checkpoint``.

    Args:
        half_messages: Half messages of the broker.
        read: Reads a document by its name, None if there is none.
        make_saver: Makes what saves a document: of its name, and what makes its text.
    """

    def __init__(
        self, half_messages: PendingHalfMessages, read: Read, make_saver: MakeSaver
    ) -> None:
        self._half_messages = half_messages
        self._read = read
        self._saver = make_saver(TRANSACTIONS_FILE, half_messages.dump)

    def load(self) -> bytes | None:
        """The checkpoint; None if there is none, or none that can be read."""
        try:
            return self._read(TRANSACTIONS_FILE)
        except StorageError as error:
            # The half topic and the op topic say the same, in more words.
            _log.error("%s", error)
            return None

    def save(self) -> None:
        """Saves the checkpoint if it has changed."""
        self._saver.save_if_failed()
        if self._half_messages.is_changed:
            self._saver.save()

    def close(self) -> None:
        """Waits until everything is written."""
        try:
            self._saver.close()
        except StorageError as error:
            # As above: the next start reads more of the log, and that is all.
            _log.error("%s", error)

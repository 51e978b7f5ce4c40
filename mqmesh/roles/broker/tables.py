"""The tables of a broker: topics, consumer offsets, consumer groups; loaded, and kept on disk."""

import logging
from collections.abc import Callable
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import CorruptRecord, StorageError
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.features.groups.consumer_offsets import CommittedOffsets
from mqmesh.roles.broker.features.groups.groups_table import GroupTable
from mqmesh.roles.broker.features.topics.topics import TopicTable
from mqmesh.roles.broker.life import LIFE_FILE
from mqmesh.roles.document_saver import DocumentSaver, OnSaved
from mqmesh.storage.interface import MessageStore

TOPICS_FILE: Final = "topics.json"
OFFSETS_FILE: Final = "consumer_offsets.json"
GROUPS_FILE: Final = "subscription_groups.json"

CallSoon = Callable[[Callable[[], None]], None]
Read = Callable[[str], bytes | None]
MakeSaver = Callable[[str, Callable[[], bytes]], DocumentSaver]

_log = logging.getLogger(__name__)


class BrokerTables:
    """What a broker keeps beside its messages.

    Args:
        config: Settings.
        clock: Source of time.
        call_soon: The event loop's way to call something soon.

    Attributes:
        topics: Topic table.
        offsets: Consumer offsets.
        groups: Settings of consumer groups.
    """

    def __init__(self, config: BrokerConfig, clock: Clock, call_soon: CallSoon) -> None:
        retry_after_ms = config.busy_retry_after_ms
        self.topics = TopicTable(
            config.max_topics, retry_after_ms, most_auto=config.max_auto_topics
        )
        self.offsets = CommittedOffsets(config.max_consumer_offsets, retry_after_ms)
        self.groups = GroupTable(
            config.max_subscription_groups,
            auto_create=config.auto_create_subscription_group,
            busy_retry_after_ms=retry_after_ms,
        )
        self._config = config
        self._clock = clock
        self._call_soon = call_soon
        self._savers: dict[str, DocumentSaver] = {}
        self._saved_changes = 0

    def load(
        self, store: MessageStore, read: Read, make_saver: MakeSaver, *, is_first_life: bool = False
    ) -> None:
        """Takes over what is on disk, and keeps it up to date from now on.

        Args:
            store: Messages; what it has of topics and the topic table has not, is taken in.
            read: Reads a document by its name, None if there is none.
            make_saver: Makes what saves a document: of its name, and what makes its text.
            is_first_life: No broker has served with these tables before, so that it may have
                had no offsets.

        Raises:
            StorageError: A document cannot be read, or the offsets are gone. They are never
                begun anew in silence.
        """
        for name, table in (
            (TOPICS_FILE, self.topics),
            (OFFSETS_FILE, self.offsets),
            (GROUPS_FILE, self.groups),
        ):
            document = read(name)
            if document is not None:
                table.load(document)
            elif name == OFFSETS_FILE:
                _check_loss(store, is_first_life=is_first_life)
            self._savers[name] = make_saver(name, table.dump)
        self._adopt(store)
        self._bound_offsets(store)

    def _bound_offsets(self, store: MessageStore) -> None:
        # Offsets are saved beside the log, so what they count may be lost: other messages will
        # stand there, and must not be passed over.
        saved_epoch = self.offsets.epoch

        def end_of(topic: str, queue_id: int) -> int:
            end = store.queue_bounds(topic, queue_id)[1]
            if 0 < saved_epoch < store.epoch():
                try:
                    cut = store.cut_offset(topic, queue_id, saved_epoch)
                except CorruptRecord as error:
                    _log.error("queue %d of %r is damaged: %s", queue_id, topic, error)
                    return end
                return end if cut is None else min(end, cut)
            return end

        moved = self.offsets.bound(end_of, store.epoch())
        if moved:
            _log.warning("%d committed offsets stood behind the end of the log: moved back", moved)
        if self.offsets.changes != self._saved_changes:
            self.save_offsets()

    def _adopt(self, store: MessageStore) -> None:
        # A crash may come between a topic's first message and the saving of the table.
        found = [(name, max(store.queues(name), default=0)) for name in store.topics()]
        now_ms = self._clock.wall_ms()
        adopted = self.topics.adopt(found, self._config.default_topic_queue_nums, now_ms)
        if adopted:
            _log.warning("%d topics of the store were missing in the topic table", adopted)
            self.save_topics(None)

    def save_topics(self, on_saved: OnSaved | None) -> None:
        """Saves the topic table, then calls back in the loop's thread."""
        self._save(TOPICS_FILE, on_saved)

    def save_offsets(self, on_saved: OnSaved | None = None) -> None:
        """Saves the consumer offsets without waiting for their turn, then calls back."""
        self._saved_changes = self.offsets.changes
        self._save(OFFSETS_FILE, on_saved)

    def offsets_failure(self) -> StorageError | None:
        """Why the consumer offsets could not be saved the last time; None if they could."""
        saver = self._savers.get(OFFSETS_FILE)
        return None if saver is None else saver.failure

    def take_room(self) -> None:
        """Takes room for the next save of each table, before anything is acknowledged."""
        for saver in self._savers.values():
            saver.take_room()

    def look_for_room(self) -> None:
        """Where there was none, tries again; costs next to nothing while there is."""
        for saver in self._savers.values():
            saver.look_for_room()

    def save_groups(self, on_saved: OnSaved | None = None) -> None:
        """Saves the settings of the groups, then calls back."""
        self._save(GROUPS_FILE, on_saved)

    def tick(self) -> None:
        """Saves offsets that changed, and tries again what could not be saved."""
        for saver in self._savers.values():
            saver.save_if_failed()
        if self._savers and self.offsets.changes != self._saved_changes:
            self.save_offsets()

    def close(self) -> None:
        """Saves what is not saved yet, waiting for the disk."""
        for saver in self._savers.values():
            try:
                saver.close()
            except StorageError as error:
                _log.error("what changed last is lost: %s", error)
        self._savers.clear()

    def _save(self, name: str, on_saved: OnSaved | None) -> None:
        saver = self._savers.get(name)
        if saver is not None:
            saver.save(on_saved)
        elif on_saved is not None:
            # Tables of a store in memory are not kept at all.
            self._call_soon(lambda: on_saved(None))


def _check_loss(store: MessageStore, *, is_first_life: bool) -> None:
    """Tells a loss of the offsets from a new broker."""
    if not is_first_life:
        raise CorruptRecord(
            f"{OFFSETS_FILE} and its backup are gone, and every consumer group would begin anew; "
            f"put a copy into config/ of the store, or remove {LIFE_FILE} and {LIFE_FILE}.bak "
            "there to start without it"
        )
    if store.topics():
        _log.error(
            "the store has messages, and there are no consumer offsets: every group begins anew"
        )

"""A store that no broker has open, for tools: read record by record, never changed.

Nothing is recovered, and nothing is written except the lock file, and that only where it can be. So
a tool reports the state of the files as it is.
"""

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import MAGIC, BatchHeader, BatchMeta, read_header, read_meta
from mqmesh.errors import ConfigError, CorruptBatch, CorruptRecord, StoreLocked
from mqmesh.log_identity import EpochStart
from mqmesh.storage.backends import backend_of
from mqmesh.storage.commitlog.checkpoint import read_boot_id, read_checkpoint
from mqmesh.storage.files.atomic_file import peek_document, storage_error
from mqmesh.storage.files.open_files import OpenFiles
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.storage.lmdb import layout
from mqmesh.storage.lmdb.env import DATA_FILE, LmdbEnv
from mqmesh.storage.lmdb.opening import DIRECTORY, FIRST_MAP_BYTES, check_log, load
from mqmesh.storage.log.control_record import ControlKind, ControlRecord, decode_control_record
from mqmesh.storage.log.epochs import NAME as EPOCHS
from mqmesh.storage.log.epochs import decode_epochs
from mqmesh.storage.log.log_start import NAME, read_log_start
from mqmesh.storage.log.scan import EVERYTHING, Damaged, LogScanner
from mqmesh.storage.log.segments import FoundSegments
from mqmesh.storage.log.store_key import StoreKey, read_store_key
from mqmesh.storage.log.tail_cut import NAME as TAIL_CUT
from mqmesh.storage.log.tail_cut import read_log_cut
from mqmesh.storage.queues.consume_queue import ENTRY_SIZE, entries_of
from mqmesh.storage.queues.producer_states import ProducerStates
from mqmesh.storage.queues.queue_table import QueueTable, decode_table

_MOST_OPEN: Final = 64
_ANY_PRODUCERS: Final = 10_000_000


class Item(NamedTuple):
    """A record of the log, or a stretch of it that holds no good one.

    Attributes:
        start: Commit-log offset of its first byte.
        end: Commit-log offset of the log's next record.
        header: Header of a batch.
        meta: Meta of a batch.
        epoch: Epoch of a good record; 0 in stores that have none.
        deleted_topic: Name in the marker that a topic was deleted.
        data: Bytes of a batch; valid until the next item is requested.
        wrong: Reason why a stretch is damaged, None for a good record.
    """

    start: int
    end: int
    header: BatchHeader | None = None
    meta: BatchMeta | None = None
    epoch: int = 0
    deleted_topic: str | None = None
    data: Buffer = b""
    wrong: str | None = None


class QueueBounds(NamedTuple):
    """Bounds of a message queue, as the store has noted them."""

    topic: str
    queue_id: int
    first: int
    end: int


class StoppedStore(ABC):
    """A stopped store, locked while it is open.

    Attributes:
        backend: Name of its backend.
        start: Commit-log offset of the oldest record.
        kept_from: Commit-log offset at which retention lets the log begin, so that records between
            here and ``start`` are lost; ``start`` if that is not known.
        likely_end: Lower bound of the log's end, for progress.
        clean: The last stop was an orderly one.
        torn_bytes: Bytes that a crash has left behind the last record, which the next start cuts
            off; known when ``items`` has come to its end.
        epochs: Epochs of the log; None if they are not known.
        deletions: Commit-log offset by topic: batches before it were deleted with an earlier
            topic of that name. Deletions that the log's control records name may be missing.
    """

    backend: str
    start: int
    kept_from: int
    likely_end: int
    clean: bool
    torn_bytes: int = 0
    epochs: Sequence[EpochStart] | None = None
    deletions: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def items(self, start: int | None = None) -> Iterator[Item]:
        """Yield the log, record by record.

        Args:
            start: Commit-log offset of the first record; None for the oldest.

        Raises:
            StorageError: The log cannot be read.
        """

    @abstractmethod
    def queues(self) -> list[QueueBounds]:
        """Queues and their bounds; empty if the next start determines them anew."""

    @abstractmethod
    def wrong_entry(self, item: Item) -> str | None:
        """Return the fault of a batch's entries in its queue; None if there is none.

        Raises:
            StorageError: The entries cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the files and releases the lock."""


@contextlib.contextmanager
def open_stopped(directory: Path) -> Iterator[StoppedStore]:
    """Opens a stopped store.

    Args:
        directory: Directory that is ``store_path_root_dir`` for the broker.

    Raises:
        ConfigError: A broker has the store open, the directory is missing, or it is no store.
        StorageError: The store cannot be read.
    """
    try:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not there, or no directory")
        backend = backend_of(directory)
    except OSError as error:
        raise storage_error(error, f"{directory} cannot be read") from error
    if backend is None:
        raise ConfigError(f"{directory} holds no store: it has neither commitlog/ nor lmdb/")
    try:
        lock = StoreLock(directory, to_write=False)
    except StoreLocked as error:
        raise ConfigError(f"{error}; stop the broker first") from error
    with contextlib.ExitStack() as resources:
        resources.callback(lock.release)
        store: StoppedStore
        store = StoppedLmdb(directory) if backend == "lmdb" else StoppedCommitLog(directory)
        resources.callback(store.close)
        yield store


class StoppedCommitLog(StoppedStore):
    """A store of the backend ``commitlog``.

    Attributes:
        store_id: Identity of the store; None if neither checkpoint nor log has given it yet.
        log_directory: Directory of the segments.
        key: Key that makes the checks of its records.
    """

    backend = "commitlog"

    def __init__(self, directory: Path) -> None:
        """Reads the key, the checkpoint and the queue table.

        Raises:
            StorageError: The files cannot be read.
        """
        self.log_directory = directory / "commitlog"
        self._queue_root = directory / "consumequeue"
        self._segments = FoundSegments(self.log_directory)
        self._files = OpenFiles(_MOST_OPEN)
        self._names: dict[tuple[str, int], list[tuple[int, str]]] = {}
        # A store without a log has no record to check, and perhaps no key yet.
        self.key = read_store_key(directory) if len(self._segments) else StoreKey.random()
        checkpoint = read_checkpoint(directory / "checkpoint")
        self.clean = checkpoint is not None and checkpoint.clean
        self.store_id = None if checkpoint is None else checkpoint.store_id
        same_boot = checkpoint is not None and checkpoint.boot_id == read_boot_id()
        # In these cases recovery trusts good records behind a bad one.
        self._trusts_all = checkpoint is None or (same_boot and not checkpoint.clean)
        self._synced = 0 if checkpoint is None else checkpoint.synced_through
        self.start = next((segment.start for segment in self._segments), 0)
        begins = read_log_start(directory / NAME)
        self.kept_from = self.start if begins is None else min(begins, self.start)
        try:
            self._cut_at = read_log_cut(directory / TAIL_CUT) or EVERYTHING
        except OSError as error:
            raise storage_error(error, f"{directory / TAIL_CUT} cannot be read") from error
        self._synced = min(self._synced, self._cut_at)
        self.likely_end = max(self._synced, self.start)
        self.epochs = _load_epochs(directory / EPOCHS)
        self._rows: dict[tuple[str, int], QueueBounds] = {}
        self._entries_through = 0
        table = self._load_table(directory / "queue-table")
        # While the log is being cut, the next start determines the bounds of the queues.
        if table is not None and checkpoint is not None and self._cut_at == EVERYTHING:
            through = checkpoint.dispatched_through if same_boot else checkpoint.synced_through
            if checkpoint.tails_left or not (same_boot or checkpoint.clean):
                through = checkpoint.queues_synced_through
            self._entries_through = min(table.head.through, through)
            self.deletions = table.deletions
            self._rows = {
                (row.topic, row.queue_id): QueueBounds(row.topic, row.queue_id, row.first, row.end)
                for row in table.queues
            }

    def _load_table(self, path: Path) -> QueueTable | None:
        document = peek_document(path)
        try:
            return None if document is None else decode_table(document)
        except CorruptRecord:
            # The next start makes everything anew from the log.
            return None

    @property
    def synced_through(self) -> int:
        """Commit-log offset of a record, or of the end, before which the log was synced."""
        return self._synced

    def items(self, start: int | None = None) -> Iterator[Item]:
        """Implement ``StoppedStore.items``."""
        position = max(self.start, start or 0)
        scanner = LogScanner(self._segments, key=self.key, store_id=self.store_id)
        try:
            beyond = partial(self._beyond, scanner)
            for found in scanner.walk(position, epoch=0, beyond=beyond, stop=self._cut_at):
                position = found.end
                if isinstance(found, Damaged):
                    yield Item(found.start, found.end, wrong=found.reason)
                else:
                    item = _item(found.start, found.end, found.batch, found.marker, found.data)
                    yield item._replace(epoch=found.epoch)
            self.store_id = scanner.store_id
            self.torn_bytes = scanner.last_byte(position) - position
        finally:
            scanner.close()

    def _beyond(self, scanner: LogScanner, position: int, epoch: int) -> int | None:
        if position < self._synced:
            return scanner.resync(position, self._synced, epoch=epoch) or self._synced
        return scanner.resync(position, EVERYTHING, epoch=epoch) if self._trusts_all else None

    def queues(self) -> list[QueueBounds]:
        """Implement ``StoppedStore.queues``."""
        return list(self._rows.values())

    def wrong_entry(self, item: Item) -> str | None:
        """Implement ``StoppedStore.wrong_entry``."""
        header, meta = item.header, item.meta
        assert header is not None and meta is not None
        if item.end > self._entries_through:
            return None
        row = self._rows.get((meta.topic, header.queue_id))
        if row is None:
            return "the queue table does not know the queue"
        base = header.base_queue_offset
        skipped = max(0, row.first - base)
        wanted = entries_of(item.start, header.total_size, header.message_count, meta.tag_hashes)
        wanted = wanted[skipped * ENTRY_SIZE :]
        found = self._read_entries(row, (base + skipped) * ENTRY_SIZE, len(wanted))
        if len(found) < len(wanted):
            return "entries are missing"
        return None if found == wanted else "entries differ from the log"

    def _read_entries(self, row: QueueBounds, position: int, size: int) -> bytes:
        names = self._names.get((row.topic, row.queue_id))
        if names is None:
            names = self._names[row.topic, row.queue_id] = self._list(row.topic, row.queue_id)
        parts = []
        number = bisect_right(names, (position, "\U0010ffff")) - 1
        while size > 0 and 0 <= number < len(names):
            start, path = names[number]
            stop = names[number + 1][0] if number + 1 < len(names) else EVERYTHING
            try:
                wanted = min(size, stop - position)
                part = os.pread(self._files.get(path), wanted, position - start)
            except OSError as error:
                raise storage_error(error, f"{path} cannot be read") from error
            parts.append(part)
            if len(part) < wanted:
                break
            position, size, number = position + wanted, size - wanted, number + 1
        return b"".join(parts)

    def _list(self, topic: str, queue_id: int) -> list[tuple[int, str]]:
        name = hashlib.blake2b(topic.encode(), digest_size=16).hexdigest()
        found = []
        for path in (self._queue_root / name).glob(f"{queue_id}-*"):
            position = path.name.partition("-")[2]
            if position.isdecimal():
                found.append((int(position), str(path)))
        return sorted(found)

    def close(self) -> None:
        """Implement ``StoppedStore.close``."""
        self._files.close()


class StoppedLmdb(StoppedStore):
    """A store of the backend ``lmdb``."""

    backend = "lmdb"

    def __init__(self, directory: Path) -> None:
        """Reads the queues.

        Raises:
            ConfigError: There is no environment.
            StorageError: The environment cannot be read.
        """
        if not (directory / DIRECTORY / DATA_FILE).is_file():
            raise ConfigError(f"{directory / DIRECTORY} holds no {DATA_FILE}")
        self._env = LmdbEnv(directory / DIRECTORY, map_size=FIRST_MAP_BYTES, read_only=True)
        self._contents = load(self._env, ProducerStates(_ANY_PRODUCERS))
        self.start = self.kept_from = 0
        self.likely_end = self._contents.end
        self.clean = self._contents.started_clean

    def items(self, start: int | None = None) -> Iterator[Item]:
        """Implement ``StoppedStore.items``."""
        store_id = self._contents.head.store_id
        for low, high, wrong in check_log(self._env, store_id, start or 0):
            if wrong is not None:
                yield Item(low, high, wrong=wrong)
                continue
            data = self._env.get(layout.log_key(low)) or b""
            is_batch = data.startswith(MAGIC)
            header = read_header(data) if is_batch else None
            yield _item(low, high, header, None if is_batch else decode_control_record(data), data)

    def queues(self) -> list[QueueBounds]:
        """Implement ``StoppedStore.queues``."""
        return [
            QueueBounds(topic, queue.queue_id, 0, queue.end)
            for topic, queues in self._contents.topics.items()
            for queue in queues.values()
        ]

    def wrong_entry(self, item: Item) -> str | None:
        """Implement ``StoppedStore.wrong_entry``."""
        header, meta = item.header, item.meta
        assert header is not None and meta is not None
        topic_id = self._contents.topic_ids.get(meta.topic)
        if topic_id is None:
            return "the topic is not known"
        key = layout.entry_key(topic_id, header.queue_id, header.base_queue_offset)
        found = self._env.get(key)
        if found is None:
            return "entries are missing"
        wanted = layout.encode_entry(
            item.start,
            header.total_size,
            header.message_count,
            header.store_timestamp,
            meta.tag_hashes,
        )
        return None if found == wanted else "entries differ from the log"

    def close(self) -> None:
        """Implement ``StoppedStore.close``."""
        self._env.close()


def _load_epochs(path: Path) -> Sequence[EpochStart] | None:
    document = peek_document(path)
    try:
        return None if document is None else decode_epochs(document)
    except CorruptRecord:
        return None  # the next start reads them from the log


def _item(
    start: int, end: int, header: BatchHeader | None, marker: ControlRecord | None, data: Buffer
) -> Item:
    if header is not None:
        try:
            return Item(start, end, header=header, meta=read_meta(data, header), data=data)
        except CorruptBatch as error:
            return Item(start, end, wrong=str(error))
    if marker is not None and marker.kind is ControlKind.TOPIC_DELETED:
        return Item(start, end, deleted_topic=marker.data.decode("utf-8", "replace"))
    return Item(start, end)

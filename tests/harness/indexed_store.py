"""A store with its message index in one process, and the scan that the index must equal."""

import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from harness.store_files import StoreFiles
from mqmesh.batch.record_batch import (
    check_batch,
    check_stored,
    decode_messages,
    encode_batch,
    read_meta,
)
from mqmesh.message import Message, StoredMessage
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.index.dispatcher import Dispatcher
from mqmesh.storage.index.message_index import MessageIndex
from mqmesh.storage.index.search import IdQuery, KeyQuery, Search
from mqmesh.storage.interface import BatchToPut, PutResult, StoreConfig
from mqmesh.storage.lmdb.env import DATA_FILE
from mqmesh.storage.log.control_record import (
    CONTROL_RECORD_MAGIC,
    CONTROL_RECORD_SIZE,
    ControlKind,
    decode_control_record,
)
from mqmesh.storage.log.store_key import read_store_key
from mqmesh.testing.store_contract import NOW
from mqmesh.units import KIB, MAX_TIMESTAMP_MS, MIB, TimestampMs

PATIENCE: Final = 100_000
"""Steps."""
Found = list[tuple[int, int]]
"""Commit-log offset of the batch and ordinal of each message, newest batch first."""


def make_messages_batch(
    messages: Sequence[Message],
    *,
    topic: str = "topic",
    queue_id: int = 0,
    producer_id: int = 1,
    first_sequence: int = 0,
    attributes: int = 0,
    compress_over_bytes: int | None = None,
) -> BatchToPut:
    """Makes a batch of whole messages.

    Args:
        messages: At least one.
        topic: Physical topic.
        queue_id: Queue id, from 0.
        producer_id: Id of the producer.
        first_sequence: Sequence of the first message.
        attributes: Attributes of the batch.
        compress_over_bytes: The same as for ``encode_batch``.
    """
    data = encode_batch(
        messages,
        topic=topic,
        queue_id=queue_id,
        producer_id=producer_id,
        first_sequence=first_sequence,
        born_timestamp=NOW,
        attributes=attributes,
        compress_over_bytes=compress_over_bytes,
    )
    header = check_batch(data)
    return BatchToPut(topic, queue_id, header, memoryview(data), read_meta(data, header).tag_hashes)


class IndexedStore:
    """A commit log store and the index that follows it, both turned by hand.

    Attributes:
        files: The store's files.
        store: The store, open.
        index: The index, open.
        dispatcher: Follows the log.
        has_room: True if the disk has capacity left.
        boot_id: Boot id of the system; a test may restart it.
    """

    def __init__(
        self,
        directory: Path,
        config: StoreConfig | None = None,
        *,
        map_size: int = 1 * MIB,
        step_bytes: int = 4 * KIB,
        most_open: int = 4,
        suspect: bool = False,
    ) -> None:
        """Opens both.

        Args:
            directory: The store's; the index is below it.
            config: Settings of the store.
            map_size: Room for an environment at first.
            step_bytes: Log bytes for one step.
            most_open: Parts to keep open.
            suspect: The process that used the index before died by a fault.
        """
        self.files = StoreFiles(directory, config)
        self._map_size = map_size
        self._step_bytes = step_bytes
        self._most_open = most_open
        self.has_room = True
        self.boot_id = b"system's boot id"
        self.sequence = 0
        self.now_ms = 0
        self.store: CommitLogStore = self.files.open()
        self.open_index(suspect=suspect)

    @property
    def index_directory(self) -> Path:
        """Folder of the index."""
        return self.files.directory / "index"

    def open_index(self, *, suspect: bool = False) -> None:
        """Opens the index, as its process does when it starts.

        Args:
            suspect: The process died by a fault before.
        """
        self.index = MessageIndex(
            self.index_directory, map_size=self._map_size, most_open=self._most_open
        )
        if suspect:
            self.index.suspect_all()
        self.dispatcher = Dispatcher(
            self.files.directory / "commitlog",
            self.index,
            key=read_store_key(self.files.directory),
            store_id=self.store.stats().store_id,
            boot_id=self.boot_id,
            step_bytes=self._step_bytes,
            room=lambda: self.has_room,
        )

    def close_index(self) -> None:
        """Closes the index; nothing is synced, as when the process is killed."""
        self.dispatcher.close()
        self.index.close()

    def reopen(self, *, suspect: bool = False) -> None:
        """Ends the index's process and starts it again."""
        self.close_index()
        self.open_index(suspect=suspect)

    def reopen_store(self) -> None:
        """Closes and opens everything."""
        self.close_index()
        self.store.close()
        self.store = self.files.open()
        self.open_index()

    def close(self) -> None:
        """Closes both."""
        self.close_index()
        self.store.close()

    # ---- Filling ---------------------------------------------------------------------

    def put(
        self,
        messages: Sequence[Message],
        *,
        stored_ms: int = NOW,
        producer_id: int = 1,
        first_sequence: int | None = None,
        attributes: int = 0,
        topic: str | None = None,
        compress_over_bytes: int | None = None,
    ) -> PutResult:
        """Stores a batch; sequences follow one another unless they are given."""
        first = self.sequence if first_sequence is None else first_sequence
        if first_sequence is None:
            self.sequence += len(messages)
        batch = make_messages_batch(
            messages,
            topic=topic or messages[0].topic,
            producer_id=producer_id,
            first_sequence=first,
            attributes=attributes,
            compress_over_bytes=compress_over_bytes,
        )
        (result,) = self.store.put([batch], TimestampMs(stored_ms))
        return result

    def tell(self) -> None:
        """Reports the end of the log to the index, as the broker does."""
        stats = self.store.stats()
        self.dispatcher.advance(stats.max_commitlog_offset, stats.min_commitlog_offset, self.now_ms)

    def step(self) -> bool:
        """Lets the dispatcher do one piece of work, and time pass as it wishes.

        Returns:
            False if there is nothing to do.
        """
        delay_ms = self.dispatcher.step(self.now_ms)
        self.now_ms += delay_ms or 0
        return delay_ms is not None

    def catch_up(self, *, steps: int = PATIENCE) -> int:
        """Lets the dispatcher work until there is nothing to do.

        Returns:
            Steps that it took.
        """
        self.tell()
        for step in range(steps):
            if not self.step():
                return step
        if steps == PATIENCE:
            raise AssertionError("the index never catches up")
        return steps

    # ---- Asking ----------------------------------------------------------------------

    def search(
        self, query: KeyQuery | IdQuery, *, most_messages: int = 100_000, most_bytes: int = 1 << 40
    ) -> Search:
        """Runs a query to its end."""
        search = Search(
            self.index,
            self.dispatcher,
            query,
            most_messages=most_messages,
            most_bytes=most_bytes,
        )
        for _ in range(PATIENCE):
            if search.step():
                return search
        raise AssertionError("the search never ends")

    def by_key(
        self, key: str, topic: str = "topic", from_ms: int = 0, to_ms: int = MAX_TIMESTAMP_MS
    ) -> Found:
        """Returns the places of messages with a key."""
        return places(self.search(KeyQuery(topic, key, from_ms, to_ms)).messages)

    def by_id(self, producer_id: int, sequence: int) -> Found:
        """Returns the places of messages with an id."""
        return places(self.search(IdQuery(producer_id, sequence)).messages)

    # ---- The scan --------------------------------------------------------------------

    def scan(self) -> list[StoredMessage]:
        """Returns all messages of the log that count, oldest first: read without any index."""
        # A file that a helper thread prepares has another name until it is a segment.
        folder = self.files.directory / "commitlog"
        segments = sorted(path for path in folder.iterdir() if path.name.isdecimal())
        visible = self.store.stats().max_commitlog_offset
        found: list[StoredMessage] = []
        for path in segments:
            for record in _records(path, visible):
                if isinstance(record, str):
                    found = [one for one in found if one.info.topic != record]
                else:
                    found += record
        return found

    def check(self, each: int = 1) -> None:
        """Compares every key and every id there is, and some that are not, with the scan.

        Args:
            each: Ask for one of so many ids only.
        """
        messages = self.scan()
        by_key: dict[tuple[str, str], Found] = {}
        by_id: dict[tuple[int, int], Found] = {}
        for message in reversed(messages):
            place = (int(message.commitlog_offset), message.ordinal)
            info = message.info
            for key in set(message.keys):
                by_key.setdefault((info.topic, key), []).append(place)
            sequence = info.first_sequence + message.ordinal
            by_id.setdefault((info.producer_id, sequence), []).append(place)
        for (topic, key), expected in by_key.items():
            assert self.by_key(key, topic) == expected, (topic, key)
        for (producer_id, sequence), expected in islice(by_id.items(), 0, None, each):
            assert self.by_id(producer_id, sequence) == expected, (producer_id, sequence)
        assert self.by_key("a key that no message has") == []
        assert self.by_id(1 << 63, 1 << 63) == []

    # ---- Damage ----------------------------------------------------------------------

    def data_files(self) -> list[Path]:
        """Returns LMDB's files, oldest segment first."""
        return sorted(self.index_directory.glob(f"*/{DATA_FILE}"))

    def copy_index(self, name: str) -> Path:
        """Copies the index as it is on disk; the index should be closed."""
        target = self.files.directory.with_name(name)
        shutil.copytree(self.index_directory, target)
        return target

    def restore_index(self, copy: Path) -> None:
        """Puts a copy in the place of the index, which must be closed."""
        shutil.rmtree(self.index_directory)
        shutil.copytree(copy, self.index_directory)


def places(messages: Sequence[StoredMessage]) -> Found:
    """Returns the places of messages."""
    return [(int(message.commitlog_offset), message.ordinal) for message in messages]


def _records(path: Path, visible: int) -> Iterator[list[StoredMessage] | str]:
    """Yields messages of each batch of a segment; of a deletion, the topic."""
    data = path.read_bytes()
    position = 0
    while position + CONTROL_RECORD_SIZE <= len(data) and int(path.name) + position < visible:
        if data[position : position + 4] == CONTROL_RECORD_MAGIC:
            marker = decode_control_record(data, position)
            position += marker.total_size
            if marker.kind is ControlKind.END:
                return
            if marker.kind is ControlKind.TOPIC_DELETED:
                yield marker.data.decode()
            continue
        header = check_stored(data, position)
        yield decode_messages(data, header, position=position)
        position += header.total_size

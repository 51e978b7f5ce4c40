"""Looks messages up: the index names places where they may be, and the log confirms them.

A place from the index counts only after the log has confirmed it: a batch that is not there, or has
no such message, is a mismatch, which is counted and logged.
"""

import logging
from typing import Final

import msgspec

from mqmesh.batch.payload import Buffer
from mqmesh.batch.record_batch import BatchHeader, decode_messages, read_meta
from mqmesh.errors import CorruptBatch, OffsetOutOfRange, StorageError
from mqmesh.message import HIDDEN_TOPICS, StoredMessage
from mqmesh.storage.index.dispatcher import Dispatcher
from mqmesh.storage.index.message_index import MessageIndex
from mqmesh.units import MAX_TIMESTAMP_MS

log = logging.getLogger(__name__)

PLACES_AT_ONCE: Final = 64
"""Places looked up by one call; some hold no message yet, or none for users."""

_BEYOND: Final = (1 << 32) - 1


class KeyQuery(msgspec.Struct, frozen=True):
    """Messages with a key.

    Attributes:
        topic: Physical topic.
        key: One of the message's keys.
        from_ms: Smallest store timestamp.
        to_ms: Largest store timestamp.
    """

    topic: str
    key: str
    from_ms: int = 0
    to_ms: int = MAX_TIMESTAMP_MS


class IdQuery(msgspec.Struct, frozen=True):
    """The message with an id, and all others that were stored under it: retries, dead letters.

    Attributes:
        producer_id: First half of the id.
        sequence: Second half.
    """

    producer_id: int
    sequence: int


class Search:
    """One query in progress, in steps that read at most one batch each.

    Attributes:
        messages: Messages found so far, newest first by place in the log.
        more: There may be more messages than were requested.
        mismatches: Number of places that the index named and the log did not confirm.
    """

    def __init__(
        self,
        index: MessageIndex,
        dispatcher: Dispatcher,
        query: KeyQuery | IdQuery,
        *,
        most_messages: int,
        most_bytes: int,
    ) -> None:
        """Reads nothing yet.

        Args:
            index: The index to search.
            dispatcher: Source of the log and of the deletions.
            query: Query for a key or an id.
            most_messages: Stop at this number of messages, from 1.
            most_bytes: Stop when their bodies have as many bytes; one is returned whatever its
                size.
        """
        self._index = index
        self._dispatcher = dispatcher
        self._query = query
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._segments = index.starts
        self._segment = -1
        self._windows: list[tuple[int, int]] = []
        self._below = _BEYOND
        self._candidates: list[int] = []
        self._size = 0
        self._missing_bytes = dispatcher.missing_bytes
        self.messages: list[StoredMessage] = []
        self.more = False
        self.mismatches = 0

    @property
    def missing_bytes(self) -> int:
        """Log bytes that were not searched, because they have no index yet or any more."""
        return max(self._missing_bytes, self._dispatcher.missing_bytes)

    def step(self) -> bool:
        """Searches a little further.

        Returns:
            True when the search is over.
        """
        if self._candidates:
            self._look_at(self._candidates.pop())
            return self.more
        if self._windows:
            self._collect()
            return False
        if not self._segments:
            return True
        self._enter(self._segments.pop())
        return False

    def _enter(self, segment: int) -> None:
        """Continues with the next older segment."""
        part = self._index.part(segment)
        if part is None:
            return  # it counts as missing
        self._segment = segment
        self._below = _BEYOND
        query = self._query
        if isinstance(query, KeyQuery) and (query.from_ms > 0 or query.to_ms < MAX_TIMESTAMP_MS):
            self._windows = part.windows(query.from_ms, query.to_ms)
        else:
            self._windows = [(0, _BEYOND)]

    def _collect(self) -> None:
        """Gets the next places of the segment from the index."""
        start, stop = self._windows[0]
        # By now other work may have changed the part, or removed it.
        part = self._index.part(self._segment)
        if part is None:
            self._windows = []
            return
        self._below = min(self._below, stop)
        query = self._query
        try:
            if isinstance(query, KeyQuery):
                places, floor = part.key_places(
                    query.topic, query.key, below=self._below, most=PLACES_AT_ONCE
                )
            else:
                places, floor = part.id_places(
                    query.producer_id, query.sequence, below=self._below, most=PLACES_AT_ONCE
                )
        except StorageError as error:
            self._windows = []
            self._dispatcher.lose(self._segment, str(error))
            return
        self._candidates = [place for place in reversed(places) if place >= start]
        self._below = floor
        if floor <= start:
            del self._windows[0]

    def _look_at(self, place: int) -> None:
        """Reads the batch at a place from the log, and takes its matching messages."""
        offset = self._segment + place
        if offset < self._dispatcher.minimum:
            return
        try:
            header, data = self._dispatcher.reader.read_batch(offset)
            if not self._may_match(header):
                return
            topic = read_meta(data, header).topic
            if topic in HIDDEN_TOPICS or offset < self._dispatcher.deletions.get(topic, -1):
                return
            messages = self._matching(topic, header, data)
        except OffsetOutOfRange:
            return  # its file was removed meanwhile
        except (CorruptBatch, StorageError) as error:
            self._count_mismatch(offset, str(error))
            return
        if messages:
            self._take(messages)
        else:
            self._count_mismatch(offset, "the batch has no such message")

    def _may_match(self, header: BatchHeader) -> bool:
        query = self._query
        if isinstance(query, KeyQuery):
            return query.from_ms <= header.store_timestamp <= query.to_ms
        # Neighbours of the requested batch have the same hash.
        position = query.sequence - header.first_sequence
        return query.producer_id == header.producer_id and 0 <= position < header.message_count

    def _matching(self, topic: str, header: BatchHeader, data: Buffer) -> list[StoredMessage]:
        """Return the messages of a batch that match the query, last first."""
        query = self._query
        if isinstance(query, IdQuery):
            return [decode_messages(data, header)[query.sequence - header.first_sequence]]
        if topic != query.topic:
            return []
        # Only few messages of a large batch have the key: decoding all would take longer than the
        # search.
        some = decode_messages(data, header, containing=query.key.encode())
        return [message for message in reversed(some) if query.key in message.keys]

    def _take(self, messages: list[StoredMessage]) -> None:
        for message in messages:
            size = len(message.body)
            if len(self.messages) >= self._most_messages or (
                self.messages and self._size + size > self._most_bytes
            ):
                self.more = True
                return
            self.messages.append(message)
            self._size += size

    def _count_mismatch(self, offset: int, reason: str) -> None:
        self.mismatches += 1
        log.warning("the index leads to %d, and the log disagrees: %s", offset, reason)

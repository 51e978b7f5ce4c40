"""Batches of delayed messages that were read from the log, kept for the next ones of them."""

from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import DelayedMeta, due_times, read_delayed_meta
from mqmesh.batch.payload import split_payload
from mqmesh.batch.record_batch import Attributes, BatchHeader, read_header, read_payload
from mqmesh.errors import CorruptRecord
from mqmesh.message import SCHEDULE_TOPIC
from mqmesh.storage.interface import MessageStore
from mqmesh.units import MIB, CommitLogOffset

MOST_OPENED_BYTES: Final = 32 * MIB


class OpenedBatch(msgspec.Struct):
    """A batch of the schedule topic, ready to have messages taken out of it."""

    data: bytes
    header: BatchHeader
    meta: DelayedMeta
    due_times: tuple[int, ...]
    raws: list[msgspec.Raw] | None = None

    @property
    def size(self) -> int:
        """About what it takes, in bytes."""
        return len(self.data) + self.header.raw_size

    def split(self) -> list[msgspec.Raw]:
        """Its messages, each still encoded."""
        if self.raws is None:
            self.raws = split_payload(read_payload(self.data, self.header))
        return self.raws


class OpenedBatches:
    """The batches that messages came from of late: the next ones are often of the same."""

    def __init__(self) -> None:
        self._opened: dict[int, OpenedBatch] = {}
        self._bytes = 0

    def open(self, store: MessageStore, offset: int) -> OpenedBatch:
        """A batch that begins at a commit-log offset.

        Raises:
            CorruptRecord, CorruptBatch, OffsetOutOfRange: There is no batch of delayed messages.
        """
        found = self._opened.pop(offset, None)
        if found is None:
            data = store.read_at(CommitLogOffset(offset))
            header = read_header(data)
            meta = read_delayed_meta(data, header)
            if not (
                header.attributes & Attributes.HAS_DELAY
                and meta.topic == SCHEDULE_TOPIC
                and meta.real_topic
            ):
                raise CorruptRecord(f"the batch at {offset} is not one of delayed messages")
            found = OpenedBatch(data, header, meta, due_times(meta, header))
            self._bytes += found.size
        self._opened[offset] = found
        while self._bytes > MOST_OPENED_BYTES and len(self._opened) > 1:
            # In the order of their last use.
            self._bytes -= self._opened.pop(next(iter(self._opened))).size
        return found

    def drop(self, offset: int) -> None:
        """Nothing more is wanted of a batch."""
        found = self._opened.pop(offset, None)
        if found is not None:
            self._bytes -= found.size

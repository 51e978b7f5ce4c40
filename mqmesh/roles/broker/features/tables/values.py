"""Values of tables that are read from the log."""

from collections import OrderedDict
from typing import Final

from mqmesh.batch.record_batch import read_header, read_meta
from mqmesh.errors import CorruptBatch, CorruptRecord, OffsetOutOfRange
from mqmesh.message import CARRIED_TOPIC
from mqmesh.roles.broker.features.tables.changes import read_carried, read_changes
from mqmesh.roles.broker.features.tables.row import PUT, Revision, Row
from mqmesh.storage.interface import MessageStore
from mqmesh.units import CommitLogOffset

MOST_BATCHES: Final = 4
"""Decoded batches that are kept: neighbours often have their values in one."""


class TableValues:
    """Reader of values; short ones of the newest revisions stand in the rows.

    Attributes:
        read_bytes: Bytes of the batches that were read for them.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.read_bytes = 0
        self._batches: OrderedDict[int, dict[tuple[bytes, int], bytes]] = OrderedDict()

    def value(self, key: bytes, row: Row, revision: Revision) -> bytes:
        """Return the value of one of a row's revisions; empty for a tombstone.

        Raises:
            CorruptRecord: It cannot be read from the log.
        """
        if revision.operation != PUT:
            return b""
        if revision is row.revisions[0] and row.value is not None:
            return row.value
        place = revision.place
        batch = self._batches.get(place)
        if batch is None:
            batch = self._batches[place] = self._read(place)
            if len(self._batches) > MOST_BATCHES:
                self._batches.popitem(last=False)
        found = batch.get((key, revision.revision))
        if found is None:
            raise CorruptRecord(f"revision {revision.revision} of {key!r} is not at {place}")
        return found

    def _read(self, place: int) -> dict[tuple[bytes, int], bytes]:
        try:
            data = self._store.read_at(CommitLogOffset(place))
            self.read_bytes += len(data)
            header = read_header(data)
            if read_meta(data, header).topic == CARRIED_TOPIC:
                changes = [one.change for one in read_carried(data, header)]
            else:
                changes = read_changes(data, header, 0)
        except (CorruptBatch, OffsetOutOfRange) as error:
            raise CorruptRecord(f"a value of a table cannot be read: {error}") from error
        return {(one.key, one.revision.revision): one.value for one in changes}

"""Tables of keys and values, for people: which there are, and what a key of one has."""

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.tables import LEAST_TABLE_BYTES, ReadTableRequest, TableEntries
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.tables.entries import KvEntry, entries_of


class TableStatus(msgspec.Struct, frozen=True):
    """A table.

    Attributes:
        table: Name.
        broker_name: Broker group that has it.
        history: Revisions of each key that are kept.
        keys: Keys that have a value.
        bytes: Bytes of keys and values, of all revisions.
        revision: Newest one that is readable.
    """

    table: str
    broker_name: str
    history: int
    keys: int
    bytes: int
    revision: int


class TableAdmin(AdminClient):
    """Client for a look at tables; as ``AdminClient``. Programs take ``KeyValue``."""

    def tables(self) -> list[TableStatus]:
        """Return all tables, by name.

        Raises:
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        configs = self.topic_configs()
        found = []
        for name, readings in self.runtime_info().items():
            for one in configs.get(name, []):
                if one.history:
                    keys, size, revision = (
                        int(readings.number(metric, one.topic, default=0))
                        for metric in ("table_keys", "table_live_bytes", "table_revision")
                    )
                    found.append(TableStatus(one.topic, name, one.history, keys, size, revision))
        return sorted(found, key=lambda one: one.table)

    def table_keys(
        self, table: str, prefix: str = "", *, after: str = "", limit: int = 1_000
    ) -> TableEntries:
        """Return keys of a table, in the order of their UTF-8, without their values.

        Args:
            table: Name of the table.
            prefix: Of the keys; "" for all.
            after: Only keys behind this one; "" for all.
            limit: How many, 1 to 1,000.

        Raises:
            TopicNotFound: There is none.
            InvalidArgument: It is an ordinary topic of several broker groups.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        request = ReadTableRequest(table, prefix=prefix, after=after, limit=limit, keys_only=True)
        return self._read(request)[0]

    def table_history(self, table: str, key: str) -> TableEntries:
        """Return the revisions of a key that are kept, oldest first, without values.

        Errors as of ``table_keys``.
        """
        return self._read(ReadTableRequest(table, [key], history=True, keys_only=True))[0]

    def table_value(self, table: str, key: str, revision: int) -> KvEntry | None:
        """Return one revision of a key with its value, None if it is not kept.

        Errors as of ``table_keys``.
        """
        request = ReadTableRequest(
            table, [key], newer_than=revision - 1, history=True, max_bytes=LEAST_TABLE_BYTES
        )
        return next((one for one in self._read(request)[1] if one.revision == revision), None)

    def _read(self, request: ReadTableRequest) -> tuple[TableEntries, list[KvEntry]]:
        names = sorted({one.broker_name for one in self.route(request.topic).queues})
        if len(names) != 1:
            raise InvalidArgument(
                f"topic {request.topic!r} lies on {', '.join(names) or 'no broker'}, and a table "
                "on one broker group"
            )
        endpoint = self._master_of(names[0], self._masters())
        answer = self._request(endpoint, RequestCode.READ_TABLE, encode_header(request))
        header = decode_header(TableEntries, answer.header)
        return header, entries_of(header.entries, answer.body)

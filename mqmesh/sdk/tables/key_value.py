"""Tables of keys and values: the newest revisions of each key, kept by one broker group."""

import logging
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, Self

from mqmesh.batch.delayed_batch import ExpectingMeta
from mqmesh.batch.native_encode import encode_at_once
from mqmesh.batch.payload import COMPRESS_OVER_BYTES, Payload, encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.checksum import crc32
from mqmesh.errors import (
    BrokerError,
    ClientClosed,
    InvalidArgument,
    NoPermission,
    NoRoute,
    RevisionConflict,
    TopicNotFound,
)
from mqmesh.message import (
    MAX_DELAY_MS,
    MAX_MESSAGE_BYTES_DEFAULT,
    Message,
    check_number,
    check_topic,
)
from mqmesh.message_checks import check_messages
from mqmesh.namespaces import prefix_of
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.admin import UpdateTopicRequest
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus, decode_outcomes, encode_send
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.route import MAX_HISTORY, TopicConfig
from mqmesh.protocol.tables import (
    MAX_KEY_BYTES,
    MAX_TABLE_KEYS,
    PROPERTY_KV_OPERATION,
    KvOperation,
    ReadTableRequest,
    TableEntries,
)
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, NamesrvAddr, born_host
from mqmesh.sdk.connector.patient_client import PatientClient
from mqmesh.sdk.tables.entries import KvEntry, entries_of
from mqmesh.sdk.tables.watch import TableWatch
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport
from mqmesh.units import MIB

PATIENCE_MS: Final = 30_000
"""Shorter than brokers know a producer for sure (``storage.producer_state_min_age_ms``)."""
WATCH_GROUP: Final = "mqmesh-query"
"""Group of the pulls of watches: brokers keep nothing of it."""
WATCH_WAIT_MS: Final = 5_000
MOST_AT_ONCE: Final = 1_000
"""Keys of one request of ``put_many``."""
MOST_BYTES_AT_ONCE: Final = 1 * MIB

_OK: Final = int(ResponseCode.SUCCESS)
_CONFLICT: Final = int(ResponseCode.REVISION_CONFLICT)
_TOMBSTONE: Final = {PROPERTY_KV_OPERATION: KvOperation.DEL.value}
_log = logging.getLogger(__name__)


class KeyValue(PatientClient):
    """A table of keys and values::

        with KeyValue("settings", create=True, history=5) as kv:
            revision = kv.put("shop/berlin", b"open")
            kv.update("shop/berlin", b"closed", revision=revision)
            entry = kv.get("shop/berlin")

    One request at a time, in the caller's thread; threads may share it, and wait for one another.
    While the broker is away calls wait for it, and are repeated: a write that was stored is not
    stored twice, nor does it fail because of itself. Programs with asyncio take
    ``mqmesh.aio.KeyValue``.

    Args:
        table: Name of the table, which is a topic.
        namesrv_addr: As of ``AdminClient``.
        create: Make the table where there is none, with one queue on one broker group.
        history: Revisions of each key that a new table keeps, 1 to 64.
        broker: Broker group of a new table; by default the name of the table says which.
        max_message_size: Longest value, in bytes; what the broker takes.
        timeout_ms: For each try, 1 to 3,600,000 ms.
        patience_ms: For all tries of a call together, from 0, which is one try.
        transport: The world; ZeroMQ by default.
        credentials, namespace: As of ``AdminClient``.

    Raises:
        InvalidArgument: A name or a number that is none.
    """

    def __init__(
        self,
        table: str,
        namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV,
        *,
        create: bool = False,
        history: int = 1,
        broker: str = "",
        max_message_size: int = MAX_MESSAGE_BYTES_DEFAULT,
        timeout_ms: int = 3_000,
        patience_ms: int = PATIENCE_MS,
        transport: Transport | None = None,
        credentials: str | Credentials = "",
        namespace: str | None = None,
    ) -> None:
        self._table = check_topic(table)
        if not 1 <= history <= MAX_HISTORY:
            raise InvalidArgument(f"history = {history}; a table keeps 1 to {MAX_HISTORY}")
        super().__init__(
            namesrv_addr,
            timeout_ms=timeout_ms,
            patience_ms=patience_ms,
            transport=transport,
            credentials=credentials,
            namespace=namespace,
        )
        self._given_transport = transport
        self._credentials = credentials
        self._twins: set[KeyValue] = set()
        self._ends = False
        self._create = create
        self._history = history
        self._wanted_broker = broker
        self._max_message_size = max_message_size
        self._broker = ""
        self._key = secrets.token_bytes(16)
        self._producer_id = producer_id_of(self._key)
        self._next_sequence = 0
        self._write_lock = ranked_lock(LockRank.TABLE)

    def __enter__(self) -> Self:
        """Make the table if it is to be made; else the first call looks for it."""
        if self._create:
            self._where()
        return self

    @property
    def table(self) -> str:
        """Name of the table."""
        return self._table

    # ---- Writes ----------------------------------------------------------------------

    def put(self, key: str, value: bytes, *, ttl_ms: int | None = None) -> int:
        """Writes a value, whatever was there.

        Args:
            key: 1 to 255 characters, and bytes as UTF-8.
            value: 1 byte to ``max_message_size``.
            ttl_ms: It expires after so long, 1 ms to 40 years; None for never.

        Returns:
            Its revision.

        Raises:
            InvalidArgument: The key, value or time is outside of its bounds.
            RequestTimeout: The broker was away for too long; the value may be stored, or not.
            BrokerError: The broker refused.
        """
        return self._write([(key, value)], None, ttl_ms)

    def create(self, key: str, value: bytes, *, ttl_ms: int | None = None) -> int:
        """Writes the value of a key that has none; else as ``put``.

        Raises:
            RevisionConflict: It has one.
        """
        return self._write([(key, value)], [0], ttl_ms)

    def update(self, key: str, value: bytes, *, revision: int, ttl_ms: int | None = None) -> int:
        """Writes a value if a revision is still the newest one of its key; else as ``put``.

        Args:
            key: Key.
            value: Value.
            revision: Of the entry that was read before; 0 as ``create``.
            ttl_ms: As of ``put``.

        Raises:
            RevisionConflict: Another client wrote meanwhile; nothing was stored.
        """
        check_number("revision", revision, 2**63 - 1)
        return self._write([(key, value)], [revision], ttl_ms)

    def delete(self, key: str, *, revision: int | None = None) -> int:
        """Deletes a key, also one that has no value; watchers see a tombstone.

        Args:
            key: Key.
            revision: Only if this is still the newest one; None for whatever is there.

        Returns:
            Revision of the tombstone.

        Raises:
            RevisionConflict: Another client wrote meanwhile; nothing was deleted.
            InvalidArgument, RequestTimeout, BrokerError: As of ``put``.
        """
        if revision is not None:
            check_number("revision", revision, 2**63 - 1)
        return self._write([(key, None)], None if revision is None else [revision], None)

    def put_many(self, values: Mapping[str, bytes], *, ttl_ms: int | None = None) -> dict[str, int]:
        """Writes many values, in order, 1,000 a request.

        After an error some of them are stored, those in front.

        Args:
            values: Values by key.
            ttl_ms: Of all of them, as of ``put``.

        Returns:
            Revisions by key.

        Raises:
            InvalidArgument, RequestTimeout, BrokerError: As of ``put``.
        """
        revisions: dict[str, int] = {}
        for part in _parts(values.items()):
            first = self._write(part, None, ttl_ms)
            revisions.update((key, first + at) for at, (key, _) in enumerate(part))
        return revisions

    # ---- Reads -----------------------------------------------------------------------

    def get(self, key: str) -> KvEntry | None:
        """Return the newest entry of a key; None if it has no value.

        Raises:
            InvalidArgument: That is no key.
            RequestTimeout: The broker was away for too long.
            BrokerError: The broker refused.
        """
        found = self._read(ReadTableRequest(self._table, [check_key(key)]))[1]
        return found[0] if found else None

    def get_many(self, keys: Iterable[str]) -> dict[str, KvEntry]:
        """Return the newest entries of keys, those that have values; errors as of ``get``."""
        wanted = [check_key(key) for key in keys]
        found: dict[str, KvEntry] = {}
        at = 0
        while at < len(wanted):
            some = wanted[at : at + MAX_TABLE_KEYS]
            answer, entries = self._read(ReadTableRequest(self._table, some))
            found.update((one.key, one) for one in entries)
            at += some.index(answer.after) + 1 if answer.more else len(some)
        return found

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that have values, in the order of their UTF-8; errors as of ``get``.

        Args:
            prefix: Of the keys; "" for all.
        """
        for _, some in self._pages(ReadTableRequest(self._table, prefix=prefix, keys_only=True)):
            for one in some:
                yield one.key

    def entries(self, prefix: str = "") -> Iterator[KvEntry]:
        """Yield the newest entries of all keys that have values; as ``keys``."""
        for _, some in self._pages(ReadTableRequest(self._table, prefix=prefix)):
            yield from some

    def history(self, key: str) -> list[KvEntry]:
        """Return the entries of a key that are kept, oldest first, tombstones among them.

        Errors as of ``get``.
        """
        found: list[KvEntry] = []
        keys, more = [check_key(key)], True
        while more:
            newer_than = found[-1].revision if found else 0
            answer, some = self._read(
                ReadTableRequest(self._table, keys, newer_than=newer_than, history=True)
            )
            found += some
            more = answer.more
        return found

    def read_pages(
        self,
        prefix: str = "",
        *,
        newer_than: int = 0,
        deleted: bool = False,
        keys_only: bool = False,
    ) -> Iterator[tuple[int, list[KvEntry]]]:
        """Yield the table's revision and some entries, until all were there; errors as of ``get``.

        Args:
            prefix: Of the keys; "" for all.
            newer_than: Only keys whose newest revision is above this one.
            deleted: Tombstones, too.
            keys_only: Without values.
        """
        request = ReadTableRequest(
            self._table,
            prefix=prefix,
            newer_than=newer_than,
            deleted=deleted,
            keys_only=keys_only,
        )
        return self._pages(request)

    def watch(self, prefix: str = "", *, include_current: bool = True) -> Iterator[KvEntry]:
        """Yield the changes of keys as they come, until this client is closed or the loop is left.

        It has a connection of its own, so other calls do not wait for it. A key that changes
        quickly may come with its newest revision only when the watch was slower than the log lives:
        it then reads the table again, and goes on. Keys that were deleted meanwhile come as
        tombstones.

        Args:
            prefix: Of the keys; "" for all.
            include_current: Begin with what the keys have now.

        Raises:
            RequestTimeout: The broker was away for too long.
            BrokerError: The broker refused.
        """
        broker = self._where()
        # A world that was given is the watch's alone.
        twin = self if self._given_transport is not None else self.twin()
        self._twins.add(twin)
        watch = TableWatch(
            prefix,
            lambda since, keys_only: twin.read_pages(
                prefix, newer_than=since, deleted=True, keys_only=keys_only
            ),
            lambda at, epoch: twin._pull(broker, at, epoch),
        )
        try:
            yield from watch.changes(include_current=include_current)
        except ClientClosed:
            if not self._ends:
                raise
        finally:
            self._twins.discard(twin)
            if twin is not self:
                twin.close()

    def twin(self) -> Self:
        """Return another client of the same table, with connections of its own."""
        twin = type(self)(
            self._table,
            self._namesrvs,
            max_message_size=self._max_message_size,
            timeout_ms=self._timeout_ms,
            patience_ms=self.patience_ms,
            credentials=self._credentials,
            namespace=self.namespace,
        )
        twin._broker = self._broker
        return twin

    def close(self) -> None:
        """Closes all connections, and ends its watches; idempotent."""
        self._ends = True
        for twin in list(self._twins):
            for channel in list(twin._channels.values()):
                channel.cancel()
        super().close()

    # ---- Helpers ---------------------------------------------------------------------

    def _pull(self, broker: str, at: int, epoch: int) -> Command:
        request = PullRequest(
            WATCH_GROUP, self._table, 0, at, suspend_timeout_ms=WATCH_WAIT_MS, epoch=epoch
        )

        def once() -> Command:
            return self.ask_once(
                broker,
                RequestCode.PULL_MESSAGE,
                encode_header(request),
                timeout_ms=WATCH_WAIT_MS + self._timeout_ms,
            )

        return self.patiently(once, f"broker {broker}")

    def _pages(self, request: ReadTableRequest) -> Iterator[tuple[int, list[KvEntry]]]:
        after, more = "", True
        while more:
            answer, entries = self._read(_behind(request, after))
            yield answer.revision, entries
            after, more = answer.after, answer.more

    def _read(self, request: ReadTableRequest) -> tuple[TableEntries, list[KvEntry]]:
        answer = self.ask(self._where(), RequestCode.READ_TABLE, encode_header(request))
        header = decode_header(TableEntries, answer.header)
        return header, entries_of(header.entries, answer.body)

    def _write(
        self,
        changes: Sequence[tuple[str, bytes | None]],
        expected: Sequence[int] | None,
        ttl_ms: int | None,
    ) -> int:
        """Store changes, all in one batch; returns the revision of the first one."""
        messages = [self._message(key, value) for key, value in changes]
        prefix = prefix_of(self.namespace)
        topic = prefix + self._table
        payload = self._payload(messages, prefix)
        now_ms = self._transport.clock.wall_ms()
        attributes, packed, expires_ms = 0, b"", 0
        if expected is not None:
            attributes |= Attributes.HAS_EXPECTED
            packed = struct.pack(f"<{len(expected)}q", *expected)
        if ttl_ms is not None:
            check_number("ttl_ms", ttl_ms, MAX_DELAY_MS)
            if not ttl_ms:
                raise InvalidArgument("ttl_ms = 0: the value would never be there; take delete()")
            attributes |= Attributes.HAS_EXPIRY
            expires_ms = now_ms + ttl_ms
        meta = ExpectingMeta(topic, b"", born_host(), expires_ms=expires_ms, expected=packed)
        broker = self._where()
        # In the order of their numbers, or the broker would take a late one for another's.
        with self._write_lock:
            data = b"".join(
                batch_parts(
                    payload,
                    topic=topic,
                    queue_id=0,
                    producer_id=self._producer_id,
                    first_sequence=self._next_sequence,
                    born_timestamp=now_ms,
                    born_host=born_host(),
                    attributes=attributes,
                    meta=meta if attributes else None,
                )
            )
            self._next_sequence += len(messages)
            return self.patiently(lambda: self._send(broker, data), f"broker {broker}")

    def _send(self, broker: str, data: bytes) -> int:
        header = encode_send(self._timeout_ms, 1, self._key)
        answer = self.ask_once(broker, RequestCode.SEND_MESSAGE, header, [data])
        (outcome,) = decode_outcomes(answer.header, answer.body)
        if outcome.code not in (_OK, _CONFLICT):
            self._endpoints.pop(broker, None)  # it may come back elsewhere
            raise error_of(outcome.code, outcome.remark, outcome.retry_after_ms)
        if outcome.code == _CONFLICT:
            revision = outcome.base_queue_offset + 1
            raise RevisionConflict(outcome.remark, code=_CONFLICT, revision=revision)
        if outcome.status:
            _log.warning("a write to table %s: %s", self._table, SendStatus(outcome.status))
        return outcome.base_queue_offset + 1

    def _message(self, key: str, value: bytes | None) -> Message:
        check_key(key)
        if value is None:
            return Message(self._table, b"\0", keys=(key,), properties=_TOMBSTONE)
        return Message(self._table, value, keys=(key,))

    def _payload(self, messages: list[Message], prefix: str) -> Payload:
        payload = encode_at_once(
            messages,
            max_body_bytes=self._max_message_size,
            is_one=True,
            compress_over_bytes=COMPRESS_OVER_BYTES,
            prefix=prefix,
        )
        if payload is not None:
            return payload
        checked = check_messages(messages, max_message_size=self._max_message_size)
        return encode_payload(checked, compress_over_bytes=COMPRESS_OVER_BYTES, prefix=prefix)

    def _where(self) -> str:
        """Return the broker group that has the table."""
        if not self._broker:
            broker = self.patiently(self._find, f"table {self._table!r}")
            self._check_is_table(broker)
            self._broker = broker
        return self._broker

    def _find(self) -> str:
        try:
            names = sorted({one.broker_name for one in self.route(self._table).queues})
        except TopicNotFound as error:
            if not self._create:
                # The advice of name servers makes a topic, which would be no table.
                advice = str(error).replace("`mqmesh topic create ", "`mqmesh table create ")
                raise TopicNotFound(advice) from error
            return self._make()
        if len(names) != 1:
            raise self._misplaced(names)
        return names[0]

    def _check_is_table(self, broker: str) -> None:
        """Ask the broker for nothing, which it refuses of an ordinary topic; that takes messages.

        Raises:
            MessageIllegal: The topic is none.
        """
        request = ReadTableRequest(self._table, limit=1, keys_only=True)
        with suppress(NoPermission):  # of a client that only writes
            self.ask(broker, RequestCode.READ_TABLE, encode_header(request))

    def _misplaced(self, names: Iterable[str]) -> InvalidArgument:
        return InvalidArgument(
            f"topic {self._table!r} lies on {', '.join(names) or 'no broker'}, and a table on one "
            "broker group; delete it where it is not wanted (mqmesh topic delete --broker)"
        )

    def _make(self) -> str:
        masters = self._masters()
        names = sorted(masters)
        # The same for all who make it at a time.
        name = self._wanted_broker or names[crc32(self._table.encode()) % len(names)]
        if name not in masters:
            raise NoRoute(f"no master is known of broker group {name!r}; there are {names}")
        # Ordered, so that the name servers keep its place while its broker is away.
        config = TopicConfig(self._table, 1, 1, order=True, history=self._history)
        request = UpdateTopicRequest(config, must_be_new=True)
        try:
            self._put_topic(masters, {name: request})
        except BrokerError:
            # Another client may have been quicker.
            if name not in self.topic_configs(self._table):
                raise
        found = self.topic_configs(self._table)
        if len(found) > 1:
            # Another client, which knew other broker groups, made it elsewhere meanwhile.
            raise self._misplaced(sorted(found))
        return name


def check_key(key: str) -> str:
    """Return a key of a table.

    Raises:
        InvalidArgument: It is none.
    """
    if not isinstance(key, str):
        raise InvalidArgument(f"a key is a str, not {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key {key!r} has no UTF-8 form: {error.reason}") from None
    if not 0 < size <= MAX_KEY_BYTES:
        raise InvalidArgument(
            f"a key of {size} bytes as UTF-8; 1 to {MAX_KEY_BYTES} are allowed: {key[:64]!r}"
        )
    return key


def _behind(request: ReadTableRequest, after: str) -> ReadTableRequest:
    return ReadTableRequest(
        request.topic,
        prefix=request.prefix,
        after=after,
        newer_than=request.newer_than,
        deleted=request.deleted,
        keys_only=request.keys_only,
    )


def _parts(items: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Yield what fits one request each."""
    part: list[tuple[str, bytes]] = []
    size = 0
    for key, value in items:
        size += len(value) + len(key)
        if part and (len(part) == MOST_AT_ONCE or size > MOST_BYTES_AT_ONCE):
            yield part
            part, size = [], len(value) + len(key)
        part.append((key, value))
    if part:
        yield part

"""Filter of a pull's expression: reduces whole batches to the messages that match.

Tags are looked up in the consume queue, so a batch without a match is never read. Messages of a
batch that do not match are cut out before they cross the network. Work is bounded for each pull,
however many messages match and however far they inflate: an answer may end anywhere, even within a
batch, and the consumer goes on from there.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import has_expired
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import BatchHeader, check_batch, read_payload
from mqmesh.batch.sparse_batch import cut_batch
from mqmesh.errors import CorruptBatch, UnsupportedCommand
from mqmesh.filtering.predicate import Predicate
from mqmesh.filtering.tags import expression_hashes
from mqmesh.message import tag_hash
from mqmesh.protocol.pulling import ExpressionType
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.storage.interface import GetResult, GetStatus, MessageStore
from mqmesh.units import KIB, MAX_OFFSET, MIB, QueueOffset

MAX_READ_BYTES: Final = 1 * MIB
"""Read for one answer with tags; at least one batch, whatever its size."""
MAX_JUDGED_BYTES: Final = 512 * KIB
"""Read for one answer with SQL92, likewise."""
MAX_VERIFIED_BYTES: Final = 1 * MIB
"""Checked for one answer; at least one batch, whatever its size."""
MAX_RAW_BYTES: Final = 4 * MIB
"""Inflated for one answer, if a batch does not take more by itself."""
MAX_LOOKS: Final = 25_000
"""Work for one answer, in units of about 50 ns."""
LOOKS_A_BATCH: Final = 100
LOOKS_A_MESSAGE: Final = 4
LOOKS_A_LEAF: Final = 2
MAX_COMPILED: Final = 256
"""SQL92 expressions that are remembered."""


class PullFilter(msgspec.Struct, frozen=True):
    """An expression, understood.

    Attributes:
        tag_hashes: Messages of other tags do not fit; None if tags do not matter.
        predicate: Fits messages by their properties; None if tags suffice.
    """

    tag_hashes: frozenset[int] | None
    predicate: Predicate | None = None

    @property
    def looks(self) -> int:
        """Number of looks that a message costs, see ``MAX_LOOKS``."""
        leaf_count = 0 if self.predicate is None else self.predicate.leaf_count
        return LOOKS_A_MESSAGE + LOOKS_A_LEAF * leaf_count


EVERYTHING: Final = PullFilter(None)
"""The filter that all messages fit."""


def pull_filter(expression: str, expression_type: str) -> PullFilter | None:
    """Understands a subscription's expression.

    Returns:
        None if all messages fit.

    Raises:
        InvalidArgument: Says where it is wrong.
        UnsupportedCommand: A language that this broker does not know.
    """
    if expression_type == ExpressionType.TAG:
        hashes = expression_hashes(expression)
        return None if hashes is None else PullFilter(hashes)
    if expression_type == ExpressionType.SQL92:
        return _sql_filter(expression)
    if expression_type == ExpressionType.PYTHON:
        raise UnsupportedCommand("filters in Python are pulled through a filter server")
    raise UnsupportedCommand(
        f"expression type {expression_type!r} is none of {', '.join(ExpressionType)}"
    )


@lru_cache(maxsize=MAX_COMPILED)
def _sql_filter(expression: str) -> PullFilter:
    predicate = Predicate(expression)
    tags = predicate.tags
    return PullFilter(None if tags is None else frozenset(map(tag_hash, tags)), predicate)


def without_expired(found: GetResult, queue_offset: int, now_ms: int) -> GetResult:
    """Return a result of a read without the batches whose messages have expired.

    Args:
        found: Result of the store, whole batches.
        queue_offset: Queue offset of the first message wanted.
        now_ms: Wall clock.
    """
    if found.status is not GetStatus.FOUND:
        return found
    pieces: list[bytes | memoryview] = []
    expired = 0
    for data in found.data:
        try:
            batches = list(iter_batches(data))
        except CorruptBatch:
            return found  # the consumer finds that out, too, and asks again
        live = [batch for header, batch in batches if not has_expired(batch, header, now_ms)]
        if len(live) == len(batches):
            pieces.append(data)
            continue
        pieces += live
        for header, batch in batches:
            if has_expired(batch, header, now_ms):
                expired += header.next_queue_offset - max(header.base_queue_offset, queue_offset)
    if not expired:
        return found
    return GetResult(
        GetStatus.FOUND if pieces else GetStatus.NO_MATCHED_MESSAGE,
        found.next_queue_offset,
        found.min_queue_offset,
        found.max_queue_offset,
        pieces,
        found.message_count - expired,
    )


def get_filtered(
    store: MessageStore,
    metas: MetaCache,
    place: tuple[str, int, int],
    wanted: PullFilter,
    *,
    max_bytes: int,
    verify: bool = False,
    most_messages: int | None = None,
    now_ms: int | None = None,
) -> GetResult:
    """Reads of a queue what fits; as ``MessageStore.get``, but that messages are left out.

    Args:
        store: Where to read.
        metas: Batch metas decoded before.
        place: Topic, queue id and the offset of the first message wanted.
        wanted: Expression that messages must match.
        max_bytes: Bytes of the answer; at least one message comes, even if it is larger.
        verify: As for ``MessageStore.get``.
        most_messages: The answer ends behind so many, from 1; None for any number.
        now_ms: Wall clock: messages that have expired are left out; None for none.

    Raises:
        CorruptRecord: As ``MessageStore.get``.
    """
    most = MAX_READ_BYTES if wanted.predicate is None else MAX_JUDGED_BYTES
    found = store.get(
        *place, max_bytes=min(max_bytes, most), tag_hashes=wanted.tag_hashes, verify=verify
    )
    if now_ms is not None:
        found = without_expired(found, place[2], now_ms)
    return sift(found, metas, place[2], wanted, most_messages)


def sift(
    found: GetResult,
    metas: MetaCache,
    queue_offset: int,
    wanted: PullFilter,
    most_messages: int | None = None,
) -> GetResult:
    """Return the messages of a read's result that match, as ``get_filtered`` does.

    Args:
        found: Result of the store, whole batches.
        metas: Batch metas decoded before.
        queue_offset: Queue offset of the first message wanted.
        wanted: Expression that messages must match.
        most_messages: The answer ends behind so many, from 1; None for any number.
    """
    if found.status is not GetStatus.FOUND:
        return found
    sieve = _Sieve(wanted, metas, queue_offset, found.next_queue_offset, most_messages)
    for header, batch in chain.from_iterable(map(iter_batches, found.data)):
        if not sieve.take(batch, header):
            break
    return GetResult(
        GetStatus.FOUND if sieve.message_count else GetStatus.NO_MATCHED_MESSAGE,
        QueueOffset(sieve.next_queue_offset),
        found.min_queue_offset,
        found.max_queue_offset,
        sieve.pieces,
        sieve.message_count,
    )


class _Sieve:
    """Sieve of the batches that were read for one answer.

    Attributes:
        pieces: Of the answer, in order.
        message_count: Messages in them.
        next_queue_offset: Where to go on.
    """

    def __init__(
        self,
        wanted: PullFilter,
        metas: MetaCache,
        queue_offset: int,
        next_queue_offset: int,
        most_messages: int | None,
    ) -> None:
        self.pieces: list[bytes | memoryview] = []
        self.message_count = 0
        self.next_queue_offset = next_queue_offset
        self._wanted = wanted
        self._metas = metas
        self._queue_offset = queue_offset
        self._looks_left = MAX_LOOKS
        self._raw_left = MAX_RAW_BYTES
        self._most_messages = MAX_OFFSET if most_messages is None else most_messages

    def take(self, data: memoryview, header: BatchHeader) -> bool:
        """Takes what fits of a batch; False if nothing behind it may be looked at."""
        first = max(self._queue_offset - header.base_queue_offset, 0)
        room = self._most_messages - self.message_count
        if self._looks_left <= 0 or self._raw_left <= 0 or room <= 0:
            self.next_queue_offset = header.base_queue_offset + first
            return False
        self._looks_left -= LOOKS_A_BATCH
        looked_at = max(self._looks_left // self._wanted.looks, 1)
        stop = min(header.message_count, first + min(looked_at, room))
        try:
            stop = self._sift(data, header, first, stop)
        except CorruptBatch:
            # It is damaged, or its producer wrote nonsense. Nothing is left out in silence:
            # the consumer gets it, cannot read it either, and says so.
            self.pieces.append(data)
            self.message_count += header.message_count - first
            self.next_queue_offset = header.next_queue_offset
            return False
        if stop < header.message_count:
            self.next_queue_offset = header.base_queue_offset + stop
            return False
        return True

    def _sift(self, data: memoryview, header: BatchHeader, first: int, stop: int) -> int:
        """Takes what fits from ``first`` to ``stop``, or all; returns how far it came."""
        wanted = self._wanted
        meta = self._metas.read(data, header)
        payload: memoryview | bytes | None = None
        if wanted.predicate is None:
            uniform = len(meta.tag_hashes) <= 8
            fits = wanted.tag_hashes is None or (
                uniform and int.from_bytes(meta.tag_hashes, "little") in wanted.tag_hashes
            )
            count = header.message_count - first
            if fits and self.message_count + count <= self._most_messages:
                self._add(count, [data])
                return header.message_count
            # Check a batch before it is left out or cut: the consumer cannot find its damage.
            check_batch(data)
            if uniform and not fits:  # the store could not know
                return header.message_count
            self._looks_left -= (stop - first) * LOOKS_A_MESSAGE
            if wanted.tag_hashes is None or fits:
                selected = b"\x01" * (stop - first)
            else:
                hashes = memoryview(meta.tag_hashes).cast("Q")[first:stop]
                selected = bytes(map(wanted.tag_hashes.__contains__, hashes))
        else:
            check_batch(data)
            self._looks_left -= (stop - first) * wanted.looks
            self._raw_left -= header.raw_size
            payload = read_payload(data, header)
            selected = wanted.predicate.select(payload, first, stop, header.message_count)
        count = selected.count(1)
        if count == header.message_count - first:
            self._add(count, [data])
        elif count:
            if payload is None:
                self._raw_left -= header.raw_size
                payload = read_payload(data, header)
            self._add(count, cut_batch(header, meta, payload, bytes(first) + selected))
        return stop

    def _add(self, count: int, pieces: Iterable[bytes | memoryview]) -> None:
        self.message_count += count
        self.pieces += pieces

"""Messages of a lease as an answer carries them: stored batches, whole or cut down to them."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import has_expired
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.payload import split_payload
from mqmesh.batch.record_batch import (
    Attributes,
    BatchHeader,
    BatchMeta,
    check_batch,
    decode_messages,
    read_payload,
    read_sparse_meta,
)
from mqmesh.batch.sparse_batch import cut_messages
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.roles.broker.delivery_state.key_order import KeyedOffset
from mqmesh.roles.broker.delivery_state.runs import MAX_RUN
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.reading.pull_filter import PullFilter, get_filtered, sift
from mqmesh.storage.interface import GetResult, GetStatus, MessageStore
from mqmesh.units import KIB, MIB, QueueOffset

_SPARSE: Final = int(Attributes.SPARSE)

MAX_SPLIT: Final = 64
"""Batches that stay split, the last ones that were cut."""
MAX_SPLIT_BYTES: Final = 1 * MIB
"""Larger ones are split each time."""

Piece = bytes | memoryview


class _KeyOnly(msgspec.Struct, array_like=True, gc=False):
    # A message of which the sharding key is made, and nothing else.
    topic: msgspec.Raw
    body: msgspec.Raw
    tag: msgspec.Raw = msgspec.Raw()
    keys: msgspec.Raw = msgspec.Raw()
    properties: msgspec.Raw = msgspec.Raw()
    flag: msgspec.Raw = msgspec.Raw()
    sharding_key: str | None = None


_OF_DIGITS: Final = bytes(at & 1 for at in range(256))
"""Byte of a binary digit: "0" and "1" are an even and an odd number."""
_decode_key = msgspec.msgpack.Decoder(_KeyOnly).decode


class Read(msgspec.Struct):
    """Messages that were read for a lease.

    Attributes:
        first: Queue offset of bit 0.
        end: Where to go on reading.
        bits: Messages that were found, a bit each.
        pieces: Their batches, in pieces.
        size: Bytes of the pieces.
        gone: Of those that were asked for by their bits: messages that are not in the log any more.
        expired: Messages that were left out because they have expired.
        is_expired: Those of the bits have expired: they go to no member.
    """

    first: int
    end: int
    bits: int = 0
    pieces: list[Piece] = []
    size: int = 0
    gone: int = 0
    expired: int = 0
    is_expired: bool = False

    def add(self, offset: int, mask: int, *pieces: Piece) -> None:
        """Add messages, a bit each from an offset on, with their batch."""
        self.bits |= mask << (offset - self.first)
        self.pieces += pieces
        self.size += sum(map(len, pieces))


class Expiry(msgspec.Struct, frozen=True):
    """Treatment of messages that have expired.

    Attributes:
        now_ms: Wall clock.
        buries: They become dead letters; else they are passed over.
    """

    now_ms: int
    buries: bool


class SplitBatch(msgspec.Struct, frozen=True, gc=False):
    """Batch divided into its messages, which are still encoded.

    Attributes:
        header: Its header.
        meta: Its meta.
        messages: All of them.
    """

    header: BatchHeader
    meta: BatchMeta
    messages: list[msgspec.Raw]

    def cut(self, first: int, mask: int) -> tuple[bytes, ...]:
        """Return the batch cut down to some messages, a bit each from a queue offset on."""
        places = _places_of(first - self.header.base_queue_offset, mask)
        return cut_messages(self.header, self.meta, self.messages, places, places[-1] + 1)


class SplitBatches:
    """Batches that were cut last: the next receives want the rest of them, without the store."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], SplitBatch] = {}
        self._bases: dict[tuple[str, int], list[int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, queue: tuple[str, int], queue_offset: int) -> SplitBatch | None:
        """Return the batch of a message, if it is kept."""
        bases = self._bases.get(queue)
        at = 0 if bases is None else bisect_right(bases, queue_offset)
        if bases is None or not at:
            return None
        found = self._kept[*queue, bases[at - 1]]
        return found if queue_offset < found.header.next_queue_offset else None

    def keep(self, queue: tuple[str, int], batch: SplitBatch) -> None:
        """Keep a batch, which is not kept yet, in place of the one that is kept for longest."""
        if len(self._kept) >= MAX_SPLIT:
            self._drop(next(iter(self._kept)))
        base = batch.header.base_queue_offset
        self._kept[*queue, base] = batch
        insort(self._bases.setdefault(queue, []), base)

    def forget(self, topic: str) -> None:
        """Forget the batches of a topic, which was deleted."""
        for key in [key for key in self._kept if key[0] == topic]:
            self._drop(key)

    def _drop(self, key: tuple[str, int, int]) -> None:
        topic, queue_id, base = key
        del self._kept[key]
        bases = self._bases[topic, queue_id]
        bases.remove(base)
        if not bases:
            del self._bases[topic, queue_id]


class LeaseReader:
    """Reader of messages for leases.

    Args:
        store: Where they are.
        metas: Batch metas decoded before.

    Attributes:
        split: Batches that were cut last.
    """

    def __init__(self, store: MessageStore, metas: MetaCache) -> None:
        self._store = store
        self._metas = metas
        self.split = SplitBatches()

    def read_new(
        self,
        queue: tuple[str, int],
        start: int,
        most: int,
        max_bytes: int,
        wanted: PullFilter | None,
        *,
        least: int = MAX_RUN,
        verify: bool = False,
        expiry: Expiry | None = None,
    ) -> Read:
        """Read the next messages of a queue.

        Args:
            queue: Topic and queue id.
            start: Queue offset of the first one.
            most: Most messages, up to ``MAX_RUN``.
            max_bytes: Most bytes; at least one batch is read.
            wanted: Messages that fit; None for all.
            least: With so many no batch is cut to have more: whole ones cost far less, here and at
                the member, and the next read begins at a batch again.
            verify: As for ``MessageStore.get``.
            expiry: Treatment of messages that have expired; None where none expires.

        Returns:
            Some, or none: then those before ``end`` are to be passed over.

        Raises:
            CorruptRecord: As ``MessageStore.get``.
        """
        if wanted is not None:
            return self._read_filtered(queue, start, most, max_bytes, wanted, verify, expiry)
        read = Read(start, start)
        uncut = most - least
        known = None if verify or expiry is not None else self.split.find(queue, start)
        if known is not None and (least > 0 or most >= known.header.next_queue_offset - start):
            count = min(known.header.next_queue_offset - start, most, MAX_RUN)
            mask = (1 << count) - 1
            read.add(start, mask, *known.cut(start, mask))
            read.end = start + count
            if read.end < known.header.next_queue_offset:
                return read
        while (left := most - read.bits.bit_count()) > 0 and read.size < max_bytes:
            size = min(max_bytes - read.size, left * KIB)
            try:
                found = self._store.get(*queue, read.end, max_bytes=size, verify=verify)
            except CorruptRecord:
                if not read.bits:
                    raise
                break
            if found.status is GetStatus.OFFSET_TOO_SMALL and not read.bits:
                return Read(found.next_queue_offset, found.next_queue_offset)
            if found.status is not GetStatus.FOUND:
                break
            for data in found.data:
                for header, batch in iter_batches(data):
                    if not self._add_new(read, queue, header, batch, most, uncut, expiry):
                        return read
            if read.end < found.next_queue_offset or (read.expired and not read.bits):
                break
        return read

    def read_again(
        self,
        queue: tuple[str, int],
        first: int,
        bits: int,
        most: int,
        max_bytes: int,
        *,
        wanted: PullFilter | None = None,
        verify: bool = False,
        expiry: Expiry | None = None,
    ) -> Read:
        """Read messages that are known.

        Args:
            queue: Topic and queue id.
            first: Queue offset of bit 0.
            bits: Which.
            most: Most messages.
            max_bytes: Most bytes; at least one batch is read.
            wanted: Messages that fit; None for all.
            verify: As for ``MessageStore.get``.
            expiry: As for ``read_new``.

        Returns:
            Some of them, from the lowest on; ``gone`` has those of them that are not there, or do
            not fit.

        Raises:
            CorruptRecord: As ``MessageStore.get``.
        """
        read = Read(first, first)
        is_plain = not verify and wanted is None and expiry is None
        while bits and (left := most - read.bits.bit_count()) > 0 and read.size < max_bytes:
            place = first + (bits & -bits).bit_length() - 1
            known = self.split.find(queue, place) if is_plain else None
            if known is not None:
                base = max(known.header.base_queue_offset, first)
                held = (1 << (known.header.next_queue_offset - base)) - 1
                mask = _lowest(bits >> (base - first) & held, left)
                read.add(base, mask, *known.cut(base, mask))
                bits &= ~(mask << (base - first))
                continue
            try:
                found = self._store.get(*queue, place, max_bytes=1, verify=verify)
            except CorruptRecord:
                if not read.bits:
                    raise
                break
            if found.status in (GetStatus.NO_NEW_MESSAGE, GetStatus.OFFSET_OVERFLOW):
                break  # not to be seen yet
            if found.status is not GetStatus.FOUND or not found.data:
                behind = max(found.next_queue_offset, place + 1)
                done = bits & ((1 << min(behind - first, bits.bit_length())) - 1)
                read.gone |= done
            else:
                header, batch = next(iter_batches(found.data[0]))
                done = self._add_again(
                    read, queue, header, batch, bits, place, left, wanted, expiry
                )
            if not done:
                break
            bits &= ~done
        return read

    def read_keys(
        self,
        queue: tuple[str, int],
        start: int,
        max_bytes: int,
        wanted: PullFilter | None,
        *,
        verify: bool = False,
    ) -> tuple[list[KeyedOffset], int]:
        """Read the sharding keys of the next messages of a queue.

        Args:
            queue: Topic and queue id.
            start: Queue offset of the first one.
            max_bytes: Most bytes; at least one batch is read.
            wanted: Messages that fit; None for all.
            verify: As for ``MessageStore.get``.

        Returns:
            Messages that fit, in order, and where to go on reading; ``start`` at the end.

        Raises:
            CorruptRecord: As ``MessageStore.get``.
        """
        place = (*queue, start)
        if wanted is None:
            found = self._store.get(*place, max_bytes=max_bytes, verify=verify)
        else:
            found = get_filtered(
                self._store, self._metas, place, wanted, max_bytes=max_bytes, verify=verify
            )
        if found.status in (GetStatus.OFFSET_TOO_SMALL, GetStatus.NO_MATCHED_MESSAGE):
            return [], found.next_queue_offset
        if found.status is not GetStatus.FOUND:
            return [], start
        keys: list[KeyedOffset] = []
        for header, batch in iter_batches(b"".join(found.data)):
            keys += [pair for pair in self._keys(queue, header, batch) if pair[0] >= start]
        return keys, found.next_queue_offset

    def keys_of(self, queue: tuple[str, int], offsets: Iterable[int]) -> list[KeyedOffset]:
        """Return the sharding keys of messages, in order; none for those that cannot be read."""
        wanted = dict.fromkeys(sorted(offsets))
        found: list[KeyedOffset] = []
        known: dict[int, str | None] = {}
        for offset in wanted:
            if offset not in known:
                known = {}
                with suppress(CorruptBatch, CorruptRecord):
                    result = self._store.get(*queue, offset, max_bytes=1)
                    if result.status is GetStatus.FOUND:
                        known = dict(self._keys(queue, *next(iter_batches(result.data[0]))))
            found.append((offset, known.get(offset)))
        return found

    def failures_of(self, queue: tuple[str, int], first: int, bits: int) -> dict[int, int]:
        """Return how often messages of a retry topic had failed before.

        Args:
            queue: Topic and queue id.
            first: Queue offset of bit 0.
            bits: Which.

        Returns:
            Messages, as bits, by number of failures; 0 for those that cannot be read.
        """
        found: dict[int, int] = {}
        while bits:
            lowest = bits & -bits
            place = first + lowest.bit_length() - 1
            try:
                result = self._store.get(*queue, place, max_bytes=1)
                messages = []
                if result.status is GetStatus.FOUND:
                    header, batch = next(iter_batches(result.data[0]))
                    messages = decode_messages(batch, header)
            except (CorruptBatch, CorruptRecord):
                messages = []
            by_offset = {int(one.queue_offset): one.reconsume_times for one in messages}
            failures = by_offset.get(place, 0)
            found[failures] = found.get(failures, 0) | lowest
            bits ^= lowest
            for offset, failures in by_offset.items():
                bit = 1 << offset - first if offset > place else 0
                if bits & bit:
                    found[failures] = found.get(failures, 0) | bit
                    bits ^= bit
        return found

    # ---- Helpers ---------------------------------------------------------------------

    def _add_new(
        self,
        read: Read,
        queue: tuple[str, int],
        header: BatchHeader,
        batch: memoryview,
        most: int,
        uncut: int,
        expiry: Expiry | None,
    ) -> bool:
        """Add messages of the next batch; False if nothing behind them is wanted."""
        first, end = max(header.base_queue_offset, read.end), header.next_queue_offset
        if not read.bits:
            read.first = first
        left = most - read.bits.bit_count()
        count = min(end - first, left, read.first + MAX_RUN - first)
        if count <= 0 or (left <= uncut and first + count < end):
            return False
        mask = (1 << count) - 1
        if expiry is not None and has_expired(batch, header, expiry.now_ms):
            if not expiry.buries:
                read.expired += end - first
                read.end = end
            elif not read.bits:
                read.bits, read.end, read.is_expired = mask, first + count, True
            return not expiry.buries
        read.add(first, mask, *self._pieces(queue, header, batch, first, mask))
        read.end = first + count
        return True

    def _add_again(
        self,
        read: Read,
        queue: tuple[str, int],
        header: BatchHeader,
        batch: memoryview,
        bits: int,
        place: int,
        most: int,
        wanted: PullFilter | None,
        expiry: Expiry | None,
    ) -> int:
        """Add messages of a batch, the first of which is at a place.

        Returns:
            Messages that were found or are gone, as bits; 0 where none may be added any more.
        """
        base = max(header.base_queue_offset, read.first)
        shift = base - read.first
        gone = bits & ((1 << shift) - 1)
        mask = bits >> shift & ((1 << (header.next_queue_offset - base)) - 1)
        if mask and wanted is not None:
            # From the first open one on: only so many are judged at a time.
            judged, fitting = self._sift(header, batch, place, wanted)
            mask &= judged << (place - base)
            unwanted = mask & ~(fitting << (place - base))
            gone |= unwanted << shift
            mask ^= unwanted
            assert mask or gone
        mask = _lowest(mask, most)
        if mask and expiry is not None and has_expired(batch, header, expiry.now_ms):
            if expiry.buries and read.bits:
                return 0
            if expiry.buries:
                read.gone |= gone
                read.bits, read.is_expired = mask << shift, True
                return 0
            read.expired += mask.bit_count()
            gone |= mask << shift
            mask = 0
        if mask:
            read.add(base, mask, *self._pieces(queue, header, batch, base, mask))
        read.gone |= gone
        return gone | mask << shift

    def _read_filtered(
        self,
        queue: tuple[str, int],
        start: int,
        most: int,
        max_bytes: int,
        wanted: PullFilter,
        verify: bool,
        expiry: Expiry | None,
    ) -> Read:
        place, read = (*queue, start), Read(start, start)
        if expiry is not None and expiry.buries:
            # A batch at a time: it has expired, or not.
            hashes = wanted.tag_hashes
            found = self._store.get(*place, max_bytes=1, tag_hashes=hashes, verify=verify)
            if found.status is GetStatus.FOUND:
                header, batch = next(iter_batches(found.data[0]))
                read.is_expired = has_expired(batch, header, expiry.now_ms)
            found = sift(found, self._metas, start, wanted)
        else:
            found = get_filtered(
                self._store,
                self._metas,
                place,
                wanted,
                max_bytes=max_bytes,
                verify=verify,
                now_ms=None if expiry is None else expiry.now_ms,
            )
        if found.status is GetStatus.OFFSET_TOO_SMALL:
            return Read(found.next_queue_offset, found.next_queue_offset)
        if found.status is GetStatus.NO_MATCHED_MESSAGE:
            read.first = read.end = found.next_queue_offset
        if found.status is not GetStatus.FOUND:
            return read
        for header, batch in iter_batches(b"".join(found.data)):
            held = _offsets_of(header, batch)
            offsets = [at for at in held if at >= start]
            if not read.bits:
                read.first = offsets[0]
            taken = [at for at in offsets[:most] if at < read.first + MAX_RUN]
            mask = sum(1 << (at - read.first) for at in taken)
            if len(taken) == len(held):
                read.add(read.first, mask, batch)
            elif taken:
                low = taken[0] - read.first
                again = self.read_again(queue, taken[0], mask >> low, most, max_bytes)
                read.add(taken[0], again.bits, *again.pieces)
            most -= len(taken)
            if len(taken) < len(offsets):
                read.end = taken[-1] + 1 if taken else read.end
                return read
            read.end = header.next_queue_offset
        read.end = found.next_queue_offset
        return read

    def _sift(
        self, header: BatchHeader, batch: memoryview, first: int, wanted: PullFilter
    ) -> tuple[int, int]:
        """Return which messages of a batch were judged, and which fit, as bits from one on."""
        end = header.next_queue_offset
        bounds = QueueOffset(first), QueueOffset(end)
        found = GetResult(GetStatus.FOUND, bounds[1], *bounds, [batch], header.message_count)
        found = sift(found, self._metas, first, wanted)
        judged = (1 << found.next_queue_offset - first) - 1
        fitting = 0
        try:
            for sifted, data in iter_batches(b"".join(found.data)):
                fitting |= sum(1 << at - first for at in _offsets_of(sifted, data) if at >= first)
        except CorruptBatch:
            return judged, judged  # members find that out, too
        return judged, fitting

    def _open(self, queue: tuple[str, int], header: BatchHeader, batch: memoryview) -> SplitBatch:
        """Return a batch divided into its messages, which are still encoded.

        Raises:
            CorruptBatch: It is damaged.
        """
        known = self.split.find(queue, header.base_queue_offset)
        if known is not None:
            return known
        check_batch(batch)
        # A copy, since what is kept must not keep a map of the log.
        messages = split_payload(bytes(read_payload(batch, header)))
        found = SplitBatch(header, self._metas.read(batch, header), messages)
        # In a sparse one messages are not where their offsets are.
        if header.raw_size <= MAX_SPLIT_BYTES and not header.attributes & _SPARSE:
            self.split.keep(queue, found)
        return found

    def _keys(
        self, queue: tuple[str, int], header: BatchHeader, batch: memoryview
    ) -> list[KeyedOffset]:
        """Return the sharding keys of a batch, which members report if it is damaged."""
        offsets: Sequence[int] = range(header.base_queue_offset, header.next_queue_offset)
        try:
            if header.attributes & _SPARSE:
                check_batch(batch)
                offsets = _offsets_of(header, batch)
                keys = [one.sharding_key for one in decode_messages(batch, header)]
            else:
                keys = [_sharding_key(one) for one in self._open(queue, header, batch).messages]
        except CorruptBatch:
            return [(at, None) for at in offsets]
        return list(zip(offsets, keys, strict=True))

    def _pieces(
        self,
        queue: tuple[str, int],
        header: BatchHeader,
        batch: memoryview,
        first: int,
        mask: int,
    ) -> tuple[Piece, ...]:
        """Return a batch cut down to some messages, a bit each from ``first`` on."""
        if mask.bit_count() == header.message_count:
            return (batch,)
        try:
            return self._open(queue, header, batch).cut(first, mask)
        except CorruptBatch:
            # Nothing is left out in silence: the member cannot read it either, and says so.
            return (batch,)


def _places_of(skipped: int, mask: int) -> Sequence[int]:
    """Return the places in a batch of the messages of a mask behind some skipped ones."""
    places = range(skipped, skipped + mask.bit_length())
    if mask.bit_count() == len(places):
        return places
    return list(compress(places, f"{mask:b}"[::-1].encode().translate(_OF_DIGITS)))


def _offsets_of(header: BatchHeader, batch: memoryview) -> list[int]:
    base = header.base_queue_offset
    if header.attributes & _SPARSE:
        _, ordinals = read_sparse_meta(batch, header)
        return [base + at for at in ordinals]
    return list(range(base, header.next_queue_offset))


def _sharding_key(message: msgspec.Raw) -> str | None:
    try:
        return _decode_key(message).sharding_key
    except msgspec.MsgspecError as error:
        raise CorruptBatch(f"a message cannot be read: {error}") from error


def _lowest(bits: int, most: int) -> int:
    """Return the lowest bits, at most so many."""
    if bits.bit_count() <= most:
        return bits
    taken = (1 << most) - 1
    if bits & taken == taken:
        return taken  # nearly always
    taken = 0
    for _ in range(most):
        low = bits & -bits
        taken |= low
        bits ^= low
    return taken

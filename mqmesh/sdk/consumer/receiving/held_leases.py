"""Leases that a simple consumer holds, and the messages of them that it has not given out. Pure."""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import BatchHeader, check_stored, decode_messages
from mqmesh.errors import CorruptBatch, MQMeshError, RemoteProtocolError
from mqmesh.message import StoredMessage
from mqmesh.protocol.delivery import MessageLease, SettleAction, Settlement


class HeldLease(msgspec.Struct, eq=False):
    """One lease.

    Attributes:
        broker_name: Broker group that gave it.
        topic: Topic that was received from; not that of retries.
        lease: As the broker gave it.
        bits: Messages that are not settled, a bit each from the first one on.
        until_ms: When it ends, monotonic clock.
        buffered: How many messages of it no caller got yet.
        reported: Messages that callers have reported on, as bits.
    """

    broker_name: str
    topic: str
    lease: MessageLease
    bits: int
    until_ms: int
    buffered: int = 0
    reported: int = 0

    @property
    def has_open(self) -> bool:
        """True if callers have messages of it that they did not report on."""
        return (self.bits & ~self.reported).bit_count() > self.buffered

    def settlement(
        self, bits: int, action: SettleAction, delay_ms: int = -1, reason: str = ""
    ) -> Settlement:
        """Return the settlement of some of its messages, a bit each from its first one on."""
        one = self.lease
        return Settlement(
            one.lease,
            one.queue_id,
            one.first,
            bits.to_bytes((bits.bit_length() + 7) // 8, "little"),
            int(action),
            delay_ms,
            reason,
            one.is_retry,
        )


class ReceivedAnswer(msgspec.Struct):
    """Messages of one answer.

    Attributes:
        held: Their leases.
        messages: In order, those of each batch with their lease.
        unreadable: Leases with messages that cannot be decoded, which, and why.
        unwanted: The same of messages that only have the hash of a wanted tag.
        damaged: The same of messages behind damage, where no message can be picked out.
        error: The damage; None for none.
    """

    held: list[HeldLease]
    messages: list[tuple[HeldLease, list[StoredMessage]]]
    unreadable: list[tuple[HeldLease, int, str]]
    unwanted: list[tuple[HeldLease, int]]
    damaged: list[tuple[HeldLease, int]]
    error: MQMeshError | None = None


def read_answer(
    leases: Sequence[MessageLease],
    bodies: Iterable[memoryview],
    *,
    broker_name: str,
    topic: str,
    tags: frozenset[str] | None,
    now_ms: int,
    namespace: str = "",
) -> ReceivedAnswer:
    """Read the answer to a receive.

    Args:
        leases: Of its header.
        bodies: Batches, in the order of the leases.
        broker_name: Broker group.
        topic: Topic that was received from.
        tags: Tags that are wanted; None for all messages.
        now_ms: When the leases began, monotonic clock.
        namespace: Of the client; "" for none.

    Returns:
        The readable messages; ``error`` is a ``CorruptBatch`` if the answer was damaged, on a disk
        or on its way, a ``RemoteProtocolError`` if it has less batches than leases.
    """
    found = ReceivedAnswer([], [], [], [], [])
    batches = chain.from_iterable(iter_batches(body, check_stored) for body in bodies)
    for lease in leases:
        one = HeldLease(broker_name, topic, lease, 0, now_ms + lease.length_ms)
        found.held.append(one)
        left = lease.count
        while left > 0 and found.error is None:
            try:
                header, batch = next(batches)
            except StopIteration:
                found.error = RemoteProtocolError(f"lease {lease.lease} came without its messages")
            except CorruptBatch as error:
                found.error = error
            else:
                left -= _take(found, one, header, batch, tags, namespace)
        if left > 0:
            behind = ((1 << (lease.end - lease.first)) - 1) & ~one.bits
            one.bits |= behind
            found.damaged.append((one, behind))
    return found


def _take(
    found: ReceivedAnswer,
    one: HeldLease,
    header: BatchHeader,
    batch: memoryview,
    tags: frozenset[str] | None,
    namespace: str,
) -> int:
    """Take the messages of a lease out of a batch; return how many it has."""
    lease = one.lease
    try:
        messages = decode_messages(
            batch,
            header,
            broker_name=one.broker_name,
            fencing_token=lease.lease,
            attempt=lease.attempt,
            namespace=namespace,
        )
    except CorruptBatch as error:
        first = max(header.base_queue_offset, lease.first)
        count = max(min(header.next_queue_offset, lease.end) - first, 1)
        bits = ((1 << count) - 1) << (first - lease.first)
        one.bits |= bits
        found.unreadable.append((one, bits, str(error)))
        return count
    offsets = _offsets(messages)
    if offsets and (offsets[0] < lease.first or offsets[-1] >= lease.end):
        messages = [each for each in messages if lease.first <= each.queue_offset < lease.end]
        offsets = _offsets(messages)
    one.bits |= bits_of(offsets, lease.first)
    if tags is not None and not lease.is_retry:
        # The broker compared hashes of tags.
        unwanted = [each.queue_offset for each in messages if each.tag not in tags]
        if unwanted:
            found.unwanted.append((one, bits_of(unwanted, lease.first)))
            messages = [each for each in messages if each.tag in tags]
    if messages:
        one.buffered += len(messages)
        found.messages.append((one, messages))
    return max(len(offsets), 1)


def bits_of(offsets: Collection[int], first: int) -> int:
    """Return queue offsets as bits.

    Args:
        offsets: Some, in any order; they may be double.
        first: Queue offset of bit 0.
    """
    different = set(offsets)
    if not different:
        return 0
    low, size = min(different), len(different)
    if max(different) - low + 1 == size:
        return ((1 << size) - 1) << (low - first)  # nearly always
    return sum(1 << (offset - first) for offset in different)


def _offsets(messages: Sequence[StoredMessage]) -> Sequence[int]:
    """Return the queue offsets of the messages of a batch."""
    if not messages:
        return ()
    low, high = messages[0].queue_offset, messages[-1].queue_offset
    if high - low + 1 == len(messages):
        return range(low, high + 1)  # nearly always
    return [each.queue_offset for each in messages]

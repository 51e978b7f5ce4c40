"""Admission of messages to open batches, in C where that could be compiled.

Most messages of a busy producer join a batch that is open already. In Python that costs 2 us each,
and 8 with tag, keys and properties, nearly all of it the interpreter's own; ``native/admission.c``
does the same in 0.15 us, for messages that are not delayed. It leaves other messages to the careful
way, as the plain classes here do with all but the plainest ones. Without a compiler everything
works, more slowly.
"""

import _thread
import threading
from collections.abc import Callable
from typing import ClassVar, Final, cast

from mqmesh.message import FIELD_LIMITS, RESERVED_PROPERTIES, Message
from mqmesh.message_checks import is_plain
from mqmesh.sdk.producer.lanes import PlainOpenBatch, TopicLanes
from mqmesh.sdk.producer.pace import GIVE_WAY_MESSAGES
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_result import SendFuture

try:
    from mqmesh._native import Admission as NativeAdmission
    from mqmesh._native import OpenBatch as NativeOpenBatch
except ImportError:
    NativeAdmission = NativeOpenBatch = None  # type: ignore[assignment,misc]

MESSAGE_OVERHEAD_BYTES: Final = 64
"""Memory charged for a message beside its body."""
STRING_OVERHEAD_BYTES: Final = 16
"""The same for each of its texts; more than on the wire, so that few fit into one batch."""
LOCK_TYPE: Final = _thread.LockType
"""Type of the locks that ``threading.Lock`` makes."""


class PlainAdmission:
    """State that the open batches of a producer share: the lock, the capacity, the limits.

    Args:
        topics: Lanes of the topics that were sent to before.
        lock: Guards lanes, batches and ``bytes``.
        clock_ns: The monotonic clock.
        give_way: Called, without the lock, each ``GIVE_WAY_MESSAGES`` of a batch with their bytes.
        options: The producer's.

    Attributes:
        batch_type: Class of the open batches.
        bytes: Memory charged for all messages without an outcome.
        admitted_bytes: ``join`` lets messages in while ``bytes`` is below; -1 for none any more.
    """

    __slots__ = (
        "_clock_ns",
        "_give_way",
        "_lock",
        "_max_batch_bytes",
        "_max_batch_messages",
        "_max_message_size",
        "_timeout_ms",
        "_topics",
        "admitted_bytes",
        "bytes",
    )
    batch_type: ClassVar[type[PlainOpenBatch]] = PlainOpenBatch

    def __init__(
        self,
        topics: dict[str, TopicLanes],
        lock: threading.Lock,
        clock_ns: Callable[[], int],
        give_way: Callable[[int], None],
        options: ProducerOptions,
    ) -> None:
        self.bytes = 0
        self.admitted_bytes = options.buffer_memory_bytes
        self._topics = topics
        self._lock = lock
        self._clock_ns = clock_ns
        self._give_way = give_way
        self._timeout_ms = options.send_msg_timeout_ms
        self._max_message_size = options.max_message_size
        self._max_batch_bytes = options.batch_size_bytes
        self._max_batch_messages = options.batch_messages

    def join(self, message: Message) -> SendFuture | None:
        """Add a message to the open batch of its lane, as ``SendBuffer.append`` would.

        Nothing needs to be scheduled: that was done for the batch's first message.

        Args:
            message: Anything; it is checked.

        Returns:
            Its future; None when it must be added otherwise.
        """
        if not is_plain(message, self._max_message_size):
            return None
        topic = self._topics.get(message.topic)
        if topic is None:
            return None
        deadline_ms = self._clock_ns() // 1_000_000 + self._timeout_ms
        size = len(message.body) + MESSAGE_OVERHEAD_BYTES
        with self._lock:
            batch = topic.sticky.open
            if (
                batch is None
                or not batch.usual
                or batch.bound
                or not batch.deadline_ms <= deadline_ms <= batch.deadline_max_ms
                or batch.size + size >= self._max_batch_bytes
                or len(batch.messages) + 1 >= self._max_batch_messages
                or self.bytes >= self.admitted_bytes
            ):
                return None
            future = SendFuture(batch.pending, len(batch.messages))
            batch.messages.append(message)
            batch.deadline_ms = deadline_ms
            batch.size += size
            self.bytes += size
        if not (future.index + 1) % GIVE_WAY_MESSAGES:
            self._give_way(GIVE_WAY_MESSAGES * size)
        return future


def is_compiled() -> bool:
    """Return True when messages join batches in C."""
    return NativeAdmission is not None


def make_admission(
    topics: dict[str, TopicLanes],
    lock: threading.Lock,
    clock_ns: Callable[[], int],
    give_way: Callable[[int], None],
    options: ProducerOptions,
) -> PlainAdmission:
    """Make the admission to open batches, in C if possible; arguments as of ``PlainAdmission``.

    The part in C looks at the lock and does not take it, which only the interpreter's own allows.
    """
    if NativeAdmission is None or type(lock) is not LOCK_TYPE:
        return PlainAdmission(topics, lock, clock_ns, give_way, options)
    native = NativeAdmission(
        topics=topics,
        lock=lock,
        clock_ns=clock_ns,
        give_way=give_way,
        make_future=SendFuture,
        reserved=RESERVED_PROPERTIES,
        message_type=Message,
        batch_type=NativeOpenBatch,
        timeout_ms=options.send_msg_timeout_ms,
        max_bytes=options.buffer_memory_bytes,
        limits=(
            options.max_message_size,
            options.batch_size_bytes,
            options.batch_messages,
            MESSAGE_OVERHEAD_BYTES,
            STRING_OVERHEAD_BYTES,
            GIVE_WAY_MESSAGES,
        ),
        field_limits=FIELD_LIMITS,
    )
    return cast("PlainAdmission", native)

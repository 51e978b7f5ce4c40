"""The fast path of asynchronous sends, in C where that could be compiled.

Most messages of a busy producer join a batch that is open already. In Python that costs 1 µs each,
and 15 with tag, keys and properties, nearly all of it the interpreter's own; ``native/send.c``
does the same in 0.2 to 0.4 µs, for messages that are not delayed, if their sender names no queue
and wants no call. It hands all others to ``Producer.send_async``, and so it does where it cannot
tell, or the buffer is locked. Without it (no compiler when mqmesh was installed) everything works,
more slowly.
"""

from collections.abc import Callable
from typing import Any

from mqmesh.message import FIELD_LIMITS, RESERVED_PROPERTIES, Message
from mqmesh.sdk.producer.lanes import Lane, TopicLanes
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.sdk.producer.send_buffer import (
    MESSAGE_OVERHEAD_BYTES,
    STRING_OVERHEAD_BYTES,
    SendBuffer,
)
from mqmesh.sdk.producer.send_result import PendingBatch, SendFuture
from mqmesh.sdk.producer.sender import GIVE_WAY_MESSAGES

try:
    from mqmesh._native import FastSend
except ImportError:
    FastSend = None  # type: ignore[assignment,misc]


def is_compiled() -> bool:
    """True when the fast path can be taken."""
    return FastSend is not None


def fast_send(
    send_async: Callable[..., SendFuture],
    buffer: SendBuffer,
    topics: dict[str, TopicLanes],
    *,
    clock_ns: Callable[[], int],
    give_way: Callable[[int], Any],
    options: ProducerOptions,
) -> Callable[..., SendFuture] | None:
    """``send_async`` by the fast path.

    Args:
        send_async: The careful way; takes over whatever the fast path does not.
        buffer: Where messages go; its limits are those of ``options``.
        topics: Lanes of the topics that messages were sent to before.
        clock_ns: The monotonic clock of deadlines.
        give_way: See ``Sender.give_way``.
        options: The producer's.

    Returns:
        None when it was not compiled.
    """
    if FastSend is None:
        return None
    return FastSend(
        otherwise=send_async,
        buffer=buffer,
        topics=topics,
        lock=buffer.lock,
        clock_ns=clock_ns,
        give_way=give_way,
        reserved=RESERVED_PROPERTIES,
        message_type=Message,
        lanes_type=TopicLanes,
        lane_type=Lane,
        batch_type=PendingBatch,
        future_type=SendFuture,
        timeout_ms=options.send_msg_timeout_ms,
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

"""The fast path of asynchronous sends, in C where that could be compiled.

Most messages of a busy producer join a batch that is open already. In Python that costs 1 µs each,
nearly all of it the interpreter's own; ``_fast_send.c`` does the same in 0.2 µs, for messages that
want nothing special: no queue, no sharding key, no delay, no properties, no callback. It hands
all others to ``Producer.send_async``, and so it does where it cannot tell, or the buffer is
locked. Without it (no compiler when mqmesh was installed) everything works, more slowly.
"""

from collections.abc import Callable
from typing import Any

from mqmesh.message import (
    MAX_KEY_LENGTH,
    MAX_KEYS,
    MAX_TAG_LENGTH,
    NO_KEYS,
    Message,
)
from mqmesh.sdk.lanes import Lane, TopicLanes
from mqmesh.sdk.producer_options import ProducerOptions
from mqmesh.sdk.send_buffer import (
    MESSAGE_OVERHEAD_BYTES,
    STRING_OVERHEAD_BYTES,
    SendBuffer,
)
from mqmesh.sdk.send_result import PendingBatch, SendFuture
from mqmesh.sdk.sender import GIVE_WAY_MESSAGES

try:
    from mqmesh.sdk import _fast_send
except ImportError:
    _fast_send = None  # type: ignore[assignment]


def is_compiled() -> bool:
    """True when the fast path can be taken."""
    return _fast_send is not None


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
    if _fast_send is None:
        return None
    return _fast_send.FastSend(
        otherwise=send_async,
        buffer=buffer,
        topics=topics,
        lock=buffer.lock,
        clock_ns=clock_ns,
        give_way=give_way,
        no_keys=NO_KEYS,
        message_type=Message,
        lanes_type=TopicLanes,
        lane_type=Lane,
        batch_type=PendingBatch,
        future_type=SendFuture,
        timeout_ms=options.send_msg_timeout_ms,
        limits=(
            options.max_message_size,
            MAX_TAG_LENGTH,
            MAX_KEYS,
            MAX_KEY_LENGTH,
            options.batch_size_bytes,
            options.batch_messages,
            MESSAGE_OVERHEAD_BYTES,
            STRING_OVERHEAD_BYTES,
            GIVE_WAY_MESSAGES,
        ),
    )

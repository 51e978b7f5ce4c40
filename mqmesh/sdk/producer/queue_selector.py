"""Choice of a message's queue. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from mqmesh.checksum import crc32
from mqmesh.message import Message, MessageQueue

QueueSelector = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]
"""Chooses one of the queues for a message; the third argument is the sender's own."""


def queue_index(sharding_key: str, queue_count: int) -> int:
    """Return the queue of a sharding key: hash first, then modulo.

    Args:
        sharding_key: Any text.
        queue_count: At least 1.

    Returns:
        The same index for the same key and count, in every process and version.
    """
    return crc32(sharding_key.encode()) % queue_count


class QueueChoice(TypedDict, total=False):
    """Choice of a message's queue and life time, as keyword arguments of ``Producer.send``."""

    queue: MessageQueue | None
    selector: QueueSelector | None
    arg: Any
    priority: int | None
    ttl_ms: int | None


class SendChoice(QueueChoice, total=False):
    """The same with the time that a send may take."""

    timeout_ms: int | None

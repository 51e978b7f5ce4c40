"""What a listener answers."""

import enum
from collections.abc import Callable

from mqmesh.message import StoredMessage


class ConsumeResult(enum.Enum):
    """What became of messages that a listener was given."""

    SUCCESS = "SUCCESS"
    """They are done and need not come again."""
    RECONSUME_LATER = "RECONSUME_LATER"
    """They shall come again after a while. Raising an exception means the same."""
    SUSPEND_CURRENT_QUEUE_A_MOMENT = RECONSUME_LATER
    """The same, by the name that RocketMQ has for it in ordered consumption."""


Listener = Callable[[list[StoredMessage]], ConsumeResult]
"""Consumes messages of one queue, in order; called from several threads at once."""

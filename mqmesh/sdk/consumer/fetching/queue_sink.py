"""Where the messages of a queue go that a consumer was given."""

from collections.abc import Callable
from typing import Protocol

from mqmesh.sdk.consumer.fetching.pull_loop import Sink


class QueueSink(Sink, Protocol):
    """Where the messages of an assigned queue go."""

    def commit_offset(self) -> int:
        """All before this queue offset need not come again."""

    def drop(self) -> None:
        """The queue was given away."""

    def is_idle(self) -> bool:
        """True when nothing is being worked on that the queue's next owner must wait for."""
        return True

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Calls back when ``is_idle`` is true, after ``drop``."""
        callback()

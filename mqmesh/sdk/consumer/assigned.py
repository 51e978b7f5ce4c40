"""A queue that a consumer was given, and what became of it there."""

from typing import Generic, TypeVar

from mqmesh.sdk.consumer.fetching.pull_loop import PullLoop, QueueSink
from mqmesh.sdk.consumer.queue_starts import Start

S = TypeVar("S", bound=QueueSink)


class Assigned(Start, Generic[S], eq=False):
    """A queue that this consumer was given.

    Attributes:
        sink: Where its messages go; None until it is known where to begin.
        loop: Its pulls.
        committed_offset: What was committed last, -1 for nothing yet.
        committed_ms: When that was, monotonic.
    """

    sink: S | None = None
    loop: PullLoop | None = None
    committed_offset: int = -1
    committed_ms: int = 0

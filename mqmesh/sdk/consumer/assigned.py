"""Queue that a consumer was given, and its state there."""

from typing import Generic, TypeVar

from mqmesh.message import MessageQueue
from mqmesh.sdk.consumer.fetching.pull_loop import PullLoop, QueueSink
from mqmesh.sdk.consumer.start_offsets import Start

S = TypeVar("S", bound=QueueSink)


class Assigned(Start, Generic[S], eq=False):
    """A queue that this consumer was given.

    Attributes:
        sink: Sink of its messages; None until it is known where to begin.
        loop: Its pulls.
        committed_offset: Offset committed last, -1 for nothing yet.
        committed_ms: When that was, monotonic.
    """

    sink: S | None = None
    loop: PullLoop | None = None
    committed_offset: int = -1
    committed_ms: int = 0


class AssignedQueues(dict[MessageQueue, Assigned[S]], Generic[S]):
    """The queues that a consumer was given; those of a topic are found without looking at all."""

    def __init__(self) -> None:
        super().__init__()
        self._of_topic: dict[str, dict[MessageQueue, None]] = {}

    def __setitem__(self, queue: MessageQueue, one: Assigned[S]) -> None:
        super().__setitem__(queue, one)
        self._of_topic.setdefault(queue.topic, {})[queue] = None

    def __delitem__(self, queue: MessageQueue) -> None:
        super().__delitem__(queue)
        queues = self._of_topic[queue.topic]
        del queues[queue]
        if not queues:
            del self._of_topic[queue.topic]

    def of_topic(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic, in the order in which they were given."""
        return list(self._of_topic.get(topic, ()))

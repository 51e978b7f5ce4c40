"""Workers that call listeners, as steps of the simulation: a call takes time, and may never end."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.listening.consume_service import ConsumeService, Turn, Workers
from mqmesh.sdk.consumer.listening.consume_work import QueueWork
from mqmesh.sdk.transactions.listener_pool import ListenerPool
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.transport.simulated.transport import SimulatedTransport

CALL_MS: Final = 20
"""A call takes up to so long, mostly."""
LONG_CALL_MS: Final = 3_000
ORDERED_CALL_MS: Final = 500
LONG_CALL_EVERY: Final = 100


def call_ms(node: SimulatedNode, usual_ms: int = CALL_MS) -> int:
    """Returns the duration of the next call, in ms."""
    chance = node.random
    return chance.randrange(LONG_CALL_MS if chance.randrange(LONG_CALL_EVERY) == 0 else usual_ms)


class SimulatedWorkers(Workers):
    """The workers of one consumer.

    Args:
        node: The consumer's process.
        service: Service whose turns they take.
        most: Most calls at a time.
        on_call: Called with the first message of each call, and the work of its queue.
    """

    def __init__(
        self,
        node: SimulatedNode,
        service: ConsumeService,
        most: int,
        on_call: Callable[[StoredMessage, QueueWork], None],
    ) -> None:
        self._node = node
        self._service = service
        self._most = most
        self._on_call = on_call
        self._busy = 0
        service.attach(self)

    def wake(self, count: int) -> None:
        """Implement ``Workers.wake``."""
        for _ in range(min(count, self._most - self._busy)):
            self._busy += 1
            self._node.after(0, self._look)

    def close(self, timeout_s: float) -> bool:
        """Implement ``Workers.close``."""
        return self._node.wait_until(lambda: self._busy == 0, int(timeout_s * 1_000))

    def _look(self) -> None:
        turn = self._service.take()
        if turn is None:
            self._busy -= 1
        else:
            self._call(turn, next(turn.calls, None))

    def _call(self, turn: Turn, messages: list[StoredMessage] | None) -> None:
        if messages is None:
            self._done(turn)
            return
        result: object
        self._on_call(messages[0], turn.work)
        try:
            result = turn.work.listener(messages)
        except Exception as error:
            result = error
        if isinstance(result, Future):
            result.add_done_callback(lambda one: self._end_later(turn, one.exception()))
        else:
            self._end_later(turn, result)

    def _end_later(self, turn: Turn, result: object) -> None:
        usual_ms = ORDERED_CALL_MS if turn.work.in_order else CALL_MS
        self._node.after(call_ms(self._node, usual_ms), lambda: self._end(turn, result))

    def _end(self, turn: Turn, result: object) -> None:
        try:
            messages = turn.calls.send(result)
        except StopIteration:
            self._done(turn)
        else:
            self._call(turn, messages)

    def _done(self, turn: Turn) -> None:
        self._service.end(turn)
        self._look()


class SimulatedPool(ListenerPool):
    """The threads of a transaction producer."""

    def __init__(self, transport: SimulatedTransport, name: str, most: int) -> None:
        super().__init__(name, most, transport.loop)
        self._node = transport.node

    def submit(self, task: Callable[[], None]) -> None:
        """Runs it a little later."""
        self._node.after(self._node.random.randrange(CALL_MS), task)

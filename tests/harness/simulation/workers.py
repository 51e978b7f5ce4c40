"""Those who call listeners, as steps of the simulation: a call takes time, and may never end."""

from collections import deque
from collections.abc import Callable
from typing import Final

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.fetching.process_queue import DONE, Span
from mqmesh.sdk.consumer.fetching.pulled_batch import PulledBatch
from mqmesh.sdk.consumer.listening.consume_result import why_again
from mqmesh.sdk.consumer.listening.consume_work import (
    OnFailed,
    Portion,
    QueueWork,
    Waiting,
    find_waiting,
    make_portions,
    park,
)
from mqmesh.sdk.consumer.listening.orderly_queue import OrderlyQueue, QueueState
from mqmesh.sdk.consumer.listening.orderly_service import OrderlyWorkers, ToDeadLetters
from mqmesh.sdk.transactions.listener_pool import ListenerPool
from mqmesh.transport.simulated.node import SimulatedNode

CALL_MS: Final = 20
"""A call takes up to so long, mostly."""
LONG_CALL_MS: Final = 3_000
LONG_CALL_EVERY: Final = 200


def call_ms(node: SimulatedNode) -> int:
    """How long the next call takes."""
    chance = node.random
    return chance.randrange(LONG_CALL_MS if chance.randrange(LONG_CALL_EVERY) == 0 else CALL_MS)


class SimulatedWorkers:
    """The workers of one concurrent consumer; see ``Workers``.

    Args:
        node: The consumer's process.
        most: Calls at a time.
        on_failed: Takes over the messages of a failed call.
    """

    def __init__(self, node: SimulatedNode, most: int, on_failed: OnFailed) -> None:
        self._node = node
        self._most = most
        self._on_failed = on_failed
        self._ready: deque[Portion] = deque()
        self._busy = 0
        self._closed = False

    def submit(self, work: QueueWork, batches: list[PulledBatch], span: Span) -> None:
        """See ``Workers.submit``."""
        self._add(work, list(make_portions(work, batches, span)))

    def submit_again(
        self, work: QueueWork, messages: list[StoredMessage], span: Span, attempt: int
    ) -> None:
        """See ``Workers.submit_again``."""
        self._add(work, [Portion(work, messages, span, attempt)])

    def revoke(self, work: QueueWork) -> None:
        """See ``Workers.revoke``."""
        work.revoked = True
        for portion in self._ready:
            if portion.work is work:
                portion.revoke()

    def is_idle(self, work: QueueWork) -> bool:
        """See ``Workers.is_idle``."""
        return True

    def when_idle(self, work: QueueWork, callback: Callable[[], None]) -> None:
        """See ``Workers.when_idle``."""
        callback()

    def follow(self, work: QueueWork, before: QueueWork) -> None:
        """See ``Workers.follow``."""

    def waiting(self) -> dict[QueueWork, Waiting]:
        """See ``Workers.waiting``."""
        return find_waiting(self._ready)

    def close(self, timeout_s: float) -> bool:
        """See ``Workers.close``."""
        self._closed = True
        for portion in self._ready:
            portion.revoke()
        self._ready.clear()
        return self._node.wait_until(lambda: self._busy == 0, int(timeout_s * 1_000))

    def _add(self, work: QueueWork, portions: list[Portion]) -> None:
        if not self._closed and not work.revoked:
            self._ready.extend(portions)
            self._wake()

    def _wake(self) -> None:
        while self._ready and self._busy < self._most:
            portion = self._ready[0]
            portion.open()
            call = next(portion.calls, None)
            if call is None:
                self._ready.popleft()
                portion.work.on_progress()
                continue
            self._busy += 1
            messages = call if isinstance(call, list) else [call]
            self._node.after(0, lambda p=portion, m=messages: self._begin(p, m))  # type: ignore[misc]

    def _begin(self, portion: Portion, messages: list[StoredMessage]) -> None:
        result: object
        try:
            result = portion.work.listener(messages.copy())
        except Exception as error:
            result = error
        self._node.after(call_ms(self._node), lambda: self._end(portion, messages, result))

    def _end(self, portion: Portion, messages: list[StoredMessage], result: object) -> None:
        self._busy -= 1
        cause = why_again(result)
        if cause is None:
            portion.span.mark(messages[0].queue_offset, messages[-1].queue_offset, DONE)
        else:
            own = park(portion.span, messages)
            if own and not portion.work.revoked:
                self._on_failed(portion, own, cause)
        portion.work.on_progress()
        if not self._closed:
            self._wake()


class SimulatedOrderlyWorkers(OrderlyWorkers):
    """The workers of one ordered consumer.

    Args:
        node: The consumer's process.
        most: Queues at a time.
        suspend_ms, call_later, to_dead_letters: As for ``OrderlyWorkers``.
        on_call: Told the first message of each call, and what stands for the time of owning.
    """

    def __init__(
        self,
        node: SimulatedNode,
        most: int,
        suspend_ms: int,
        call_later: Callable[[int, Callable[[], None]], object],
        to_dead_letters: ToDeadLetters,
        on_call: Callable[[StoredMessage, object], None],
    ) -> None:
        super().__init__(suspend_ms, call_later, to_dead_letters)
        self._node = node
        self._most = most
        self._on_call = on_call
        self._busy = 0

    def close(self, timeout_s: float) -> bool:
        """See ``Workers.close``."""
        self._closed = True
        self._ready.clear()
        return self._node.wait_until(lambda: self._busy == 0, int(timeout_s * 1_000))

    def _wake(self) -> None:
        self._node.after(0, self._take)

    def _take(self) -> None:
        if not self._ready or self._closed or self._busy >= self._most:
            return
        work = self._ready.popleft()
        work.state = QueueState.RUNNING
        self._busy += 1
        self._call(work)

    def _call(self, work: OrderlyQueue) -> None:
        messages = work.next_call()
        if messages is None or self._closed:
            self._leave(work)
            self._settle(work, None, None)
            return
        result: object
        self._on_call(messages[0], work)
        try:
            result = work.listener(messages.copy())
        except Exception as error:
            result = error
        self._node.after(call_ms(self._node), lambda: self._end(work, messages, result))

    def _end(self, work: OrderlyQueue, messages: list[StoredMessage], result: object) -> None:
        cause = why_again(result)
        if cause is None:
            work.succeed()
            self._call(work)
            return
        self.failures += 1
        failure = work.fail(cause)
        self._leave(work)
        self._settle(work, failure, cause)

    def _leave(self, work: OrderlyQueue) -> None:
        self._busy -= 1
        self._wake()


class SimulatedPool(ListenerPool):
    """The threads of a transaction producer."""

    def __init__(self, node: SimulatedNode, name: str, most: int) -> None:
        super().__init__(name, most)
        self._node = node

    def submit(self, task: Callable[[], None]) -> None:
        """Runs it a little later."""
        self._node.after(self._node.random.randrange(CALL_MS), task)

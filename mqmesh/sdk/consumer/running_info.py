"""Introspection of a running consumer, for administrators and brokers."""

import asyncio
from collections import defaultdict
from typing import Any, Final

import msgspec

from mqmesh.errors import NoPermission
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.client_rpc import (
    MAX_IN_FLIGHT,
    NEVER,
    InFlightMessage,
    RunningInfo,
    RunningInfoRequest,
    RunningQueue,
)
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import TopicConsumption
from mqmesh.sdk.consumer.assigned import Assigned
from mqmesh.sdk.consumer.consumer_engine import ConsumerEngine
from mqmesh.sdk.consumer.fetching.pull_loop import PullLoop, PullMeter
from mqmesh.sdk.consumer.introspection.consumption import SAMPLE_MS, Consumption, TopicTotals
from mqmesh.sdk.consumer.introspection.questions import OnAnswer
from mqmesh.sdk.consumer.introspection.stacks import read_stacks
from mqmesh.sdk.consumer.listening.consume_service import ConsumeService, Tally

MAX_TOPICS: Final = 1_024
"""Most topics that a heartbeat reports."""


class Introspection:
    """Introspection of a consumer. Methods are for the client loop, unless stated.

    Args:
        kind: ``push`` or ``pull``.
        engine: The consumer's; its heartbeats and answers report more from now on.
        service: Calls listeners; None where messages are polled.

    Attributes:
        loop: Event loop of coroutines that the consumer has called; None without any.
    """

    def __init__(
        self, kind: str, engine: ConsumerEngine[Any], service: ConsumeService | None = None
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._kind = kind
        self._engine = engine
        self._service = service
        self._consumption = Consumption(engine.group, self._totals, engine.held)
        engine.stats = self._stats
        engine.answerers[RequestCode.GET_CONSUMER_RUNNING_INFO] = self._answer

    def begin(self) -> None:
        """Looks at totals now and then; before the engine is started."""
        self._sample()
        self._engine.client.loop.call_every(SAMPLE_MS, self._sample)

    # ---- What was done ----------------------------------------------------------------

    def _now_ms(self) -> int:
        return self._engine.client.loop.clock.monotonic_ms()

    def _sample(self) -> None:
        self._consumption.sample(self._now_ms())

    def _stats(self) -> list[TopicConsumption]:
        return self._consumption.stats(self._now_ms())[:MAX_TOPICS]

    def _totals(self) -> dict[str, TopicTotals]:
        tallies = {} if self._service is None else self._service.tallies()
        held = self._engine.held()
        at_hand: dict[str, int] = defaultdict(int)
        for message in self._with_listeners():
            at_hand[message.info.topic] += 1
        found = {}
        for topic, meter in self._engine.meters.items():
            one = tallies.get(topic, Tally())
            done = one.messages - one.failed - at_hand[topic]
            if self._service is None:
                done = meter.messages - held.get(topic, (0, 0))[0]
            found[topic] = _totals(one, done, meter)
        return found

    def _with_listeners(self) -> list[StoredMessage]:
        return [] if self._service is None else self._service.with_listeners

    # ---- Answers ----------------------------------------------------------------------

    def _answer(
        self, broker_name: str, question: bytes, body: memoryview, on_answer: OnAnswer
    ) -> None:
        header = decode_header(RunningInfoRequest, memoryview(question))
        if not self._engine.options.admin_introspection:
            raise NoPermission(
                f"{self._engine.client.client_id} answers nothing (admin_introspection = False)"
            )
        on_answer(self._running_info(with_stacks=header.with_stacks))

    def _running_info(self, *, with_stacks: bool) -> RunningInfo:
        engine, now_ms = self._engine, self._now_ms()
        messages = self._with_listeners()
        counts: dict[MessageQueue, int] = defaultdict(int)
        for message in messages:
            counts[message.message_queue] += 1
        return RunningInfo(
            engine.client.client_id,
            engine.group,
            self._kind,
            engine.positions.started_at_ms,
            self._properties(),
            engine.subscriptions(),
            [
                _queue(queue, engine.assigned[queue], counts, now_ms)
                for queue in sorted(engine.assigned)
            ],
            self._stats(),
            [self._in_flight(one, now_ms) for one in messages[:MAX_IN_FLIGHT]],
            read_stacks(f"mqmesh-{engine.group}", self.loop) if with_stacks else "",
        )

    def _properties(self) -> dict[str, str]:
        options, client = self._engine.options, self._engine.client.options
        shown = {**msgspec.structs.asdict(options), "asyncio": self.loop is not None}
        for name in ("namesrv_addr", "instance_name", "use_ipc", "heartbeat_broker_interval_ms"):
            shown[name] = getattr(client, name)
        return {name: str(value) for name, value in sorted(shown.items())}

    def _in_flight(self, message: StoredMessage, now_ms: int) -> InFlightMessage:
        queue = message.message_queue
        since_ms = self._engine.begun_ms(message)
        return InFlightMessage(
            message.message_id,
            queue.topic,
            queue.broker_name,
            queue.queue_id,
            message.queue_offset,
            NEVER if since_ms is None else now_ms - since_ms,
        )


def _totals(tally: Tally, done: int, meter: PullMeter) -> TopicTotals:
    return TopicTotals(
        tally.calls,
        max(done, 0),
        tally.failed,
        tally.busy_ns,
        meter.messages,
        meter.pulls,
        meter.waited_ms,
    )


def _queue(
    queue: MessageQueue, one: Assigned[Any], in_flight: dict[MessageQueue, int], now_ms: int
) -> RunningQueue:
    sink, loop = one.sink, one.loop
    name = (queue.topic, queue.broker_name, queue.queue_id)
    if sink is None or loop is None:
        return RunningQueue(*name, "starting")
    cached, size_bytes = sink.held()
    done = sink.commit_offset()
    return RunningQueue(
        *name,
        _state(loop),
        sink.next_offset,
        done,
        one.committed_offset,
        cached,
        size_bytes,
        in_flight.get(queue, 0) or sink.polled(),
        now_ms - loop.answered_ms if loop.answered_ms else NEVER,
        now_ms - one.committed_ms if one.committed_ms else NEVER,
    )


def _state(loop: PullLoop) -> str:
    if loop.stopped:
        return "damaged"
    if loop.paused:
        return "paused"
    return "full" if loop.waiting_for_room else "pulling"

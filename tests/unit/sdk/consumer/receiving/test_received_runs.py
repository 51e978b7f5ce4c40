"""Messages of leases that a push consumer holds: what of them keeps its lease."""

from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

from harness.batches import encode_flights, stored_batch

from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.delivery import DeliveryMode, MessageLease, ReceiveResponse
from mqmesh.protocol.membership import Subscription
from mqmesh.sdk.consumer.fetching.process_queue import DONE
from mqmesh.sdk.consumer.fetching.pull_loop import PullCounters
from mqmesh.sdk.consumer.receiving.received_runs import ReceivedRuns, RunSettings
from mqmesh.testing.clock import ManualClock


class Looked(dict):
    """Messages of which none is looked at because another one was done."""

    def items(self):
        raise AssertionError("all of a lease is looked at for one message")

    __iter__ = keys = values = items


def nothing(*_, **__) -> Any:
    """Stand in for what the test does not look at."""


def test_a_lease_is_kept_until_all_of_its_messages_are_reported():
    requests: list[Any] = []
    client: Any = SimpleNamespace(
        client_id="member",
        namespace="",
        transport=SimpleNamespace(random=Random(7), condition=nullcontext),
        loop=SimpleNamespace(clock=ManualClock()),
        brokers=SimpleNamespace(connection=nothing),
        post=lambda callback: callback(),
        call_later=nothing,
        request=lambda _broker, _code, on_answer, **_: requests.append(on_answer),
    )
    settings = RunSettings(
        delivery=DeliveryMode.MESSAGE,
        invisible_ms=0,
        workers=1,
        batch_size=2,
        consume_timeout_ms=60_000,
        suspend_ms=1_000,
    )
    runs = ReceivedRuns("group", client, settings, PullCounters(), {}, nothing, nothing, nothing)
    works: list[Any] = []
    service: Any = SimpleNamespace(
        submit_portions=lambda portions: works.extend(one.work for one in portions)
    )
    runs.attach(service)
    runs.follow(Subscription("flights"), [MessageQueue("flights", "broker-a", 3)])
    header = encode_header(ReceiveResponse([MessageLease(1, 3, 0, 2, 2, 1, 30_000)]))
    body = stored_batch(
        encode_flights(*(Message("flights", b"body") for _ in range(2))), base_queue_offset=0
    )
    requests.pop()(Command(0, 0, 0, memoryview(header), memoryview(body)))
    (_, held), (run,) = runs.receiver.held("broker-a", 1), works
    run.open = Looked(run.open)
    left = []
    for offset in (1, 0):
        run.span.mark(offset, offset, DONE)
        run.on_progress()
        left.append(held.buffered)
    assert left == [1, 0]

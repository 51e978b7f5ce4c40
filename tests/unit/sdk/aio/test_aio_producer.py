"""The asyncio producer on a simulated network, turned by the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from harness.simulated_cluster import Fault, FaultKind

from mqmesh.aio import Producer
from mqmesh.errors import (
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    NoRoute,
    QueueFull,
    SystemBusy,
)
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import SendStatus


def message(body: str = "x", **fields) -> Message:
    return Message("t", body.encode(), **fields)


@pytest.fixture
def run(world):
    """Runs a test's coroutine, and the network beside it."""

    async def both(coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(coroutine)
        while not task.done():
            world.network.run(1)
            await asyncio.sleep(0)
        return task.result()

    return lambda coroutine: asyncio.run(both(coroutine))


@pytest.fixture
def make(world):
    def make(**options) -> Producer:
        producer = Producer(
            "g",
            namesrv_addr=world.cluster.namesrv_addr,
            transport=world.network.transport(),
            **options,
        )
        world.producers.append(producer._inner)
        return producer

    return make


def test_a_send_is_awaited_gathered_or_made_a_task(world, run, make):
    async def main() -> None:
        async with make() as producer:
            await producer.send(message("first"))
            sends = [producer.send(message(str(n))) for n in range(50)]
            assert all(asyncio.isfuture(one) for one in sends), "gather makes no task of it"
            task = asyncio.create_task(producer.send(message("task")))
            async with asyncio.TaskGroup() as group:
                grouped = group.create_task(producer.send(message("group")))
            results = [*await asyncio.gather(*sends), await task, grouped.result()]
            assert {one.status for one in results} == {SendStatus.SEND_OK}
            assert len({one.message_id for one in results}) == 52
            assert await sends[0] == results[0], "also a second time"
            assert len(world.broker.sends) == 2, "all after the first one share a request"

    run(main())


def test_a_send_that_fails_raises_where_it_is_awaited(world, run, make):
    async def main() -> None:
        async with make() as producer:
            await producer.send(message("first"))
            bad = producer.send(message("x", sharding_key=5))
            refused = producer.send(message("y"), queue=MessageQueue("t", "a", 99))
            task = asyncio.create_task(producer.send(message("z"), timeout_ms=0))
            good = producer.send(message("good"))
            found = await asyncio.gather(bad, refused, task, good, return_exceptions=True)
            assert [type(one) for one in found[:3]] == [InvalidArgument] * 3
            assert found[3].status is SendStatus.SEND_OK

    run(main())


def test_a_send_that_is_cancelled_is_sent_all_the_same(world, run, make):
    async def main() -> None:
        async with make() as producer:
            await producer.send(message("first"))
            task = asyncio.create_task(producer.send(message("task")))
            await asyncio.sleep(0)
            task.cancel()
            plain = producer.send(message("plain"))
            plain.close()
            other = producer.send(message("other"))
            plain.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(asyncio.CancelledError):
                await plain
            assert (await other).status is SendStatus.SEND_OK

    run(main())
    assert sorted(world.stored()) == [b"first", b"other", b"plain", b"task"]


def test_every_way_of_sending(world, run, make):
    async def main() -> None:
        async with make() as producer:
            one = await producer.send(message("1"), queue=MessageQueue("t", "a", 2))
            assert one.status is SendStatus.SEND_OK
            assert one.message_queue.queue_id == 2
            two = await producer.send(message("2"), selector=lambda q, _, n: q[n], arg=1)
            assert two.message_queue.queue_id == 1
            batch = await producer.send_batch([message("3"), message("4")])
            assert batch.message_count == 2
            await producer.send_oneway(message("5"), queue=MessageQueue("t", "a", 0))
            assert len(await producer.fetch_publish_queues("t")) == 4

    run(main())
    assert sorted(world.stored()) == [b"1", b"2", b"3", b"4", b"5"]


def test_sends_side_by_side_share_batches(world, run, make):
    async def main() -> None:
        async with make() as producer:
            await producer.send(message("first"))
            before = len(world.broker.sends)
            results = await asyncio.gather(*(producer.send(message(str(n))) for n in range(200)))
            assert len({one.message_id for one in results}) == 200
            assert len(world.broker.sends) - before <= 8

    run(main())


def test_errors_come_where_the_send_is_awaited(world, run, make):
    async def main() -> None:
        async with make() as producer:
            await producer.send(message("0"))
            world.broker.faults.append(
                Fault(FaultKind.REFUSE, ResponseCode.SYSTEM_BUSY, retry_after_ms=9)
            )
            with pytest.raises(SystemBusy) as caught:
                await producer.send(message("1"))
            assert caught.value.retry_after_ms == 9
            for nonsense in (None, b"x", message(""), Message("%RETRY%g", b"x"), Message([], b"x")):
                with pytest.raises(InvalidArgument):
                    await producer.send(nonsense)
            for nonsense in ([], None, message(), [message(), Message("u", b"x")], iter([])):
                with pytest.raises(InvalidArgument):
                    await producer.send_batch(nonsense)
            world.broker.crash()
            with pytest.raises(EndpointUnreachable):
                await producer.send(message("2"), timeout_ms=300)

    run(main())


def test_waiting_for_a_first_route_does_not_hold_up_the_event_loop(world, run, make):
    async def main() -> None:
        async with make(send_msg_timeout_ms=200) as producer:
            turns = 0
            waiting = asyncio.ensure_future(producer.send(Message("missing", b"x")))
            while not waiting.done():
                turns += 1
                await asyncio.sleep(0)
            assert turns > 10
            with pytest.raises(NoRoute):
                await waiting

    run(main())


def test_a_send_waits_for_a_route_as_long_as_it_may_take(world, run, make):
    async def main() -> None:
        async with make(send_msg_timeout_ms=600_000) as producer:
            missing = Message("missing", b"x")
            for send in (producer.send, producer.request):
                with pytest.raises(NoRoute):
                    await send(missing, timeout_ms=20)
            with pytest.raises(NoRoute):
                await producer.send_batch([missing], timeout_ms=20)
            with pytest.raises(InvalidArgument, match="timeout_ms must be an int of 1 to"):
                await producer.send(missing, timeout_ms=0)

    run(main())


def test_sends_that_wait_for_the_first_route_keep_their_order(world, run, make):
    async def main() -> None:
        async with make() as producer:
            sends = [producer.send(message(str(n), sharding_key="k")) for n in range(100)]
            await asyncio.gather(*sends)

    run(main())
    assert world.stored() == [b"%d" % n for n in range(100)]


def test_all_that_wait_for_a_missing_route_fail_together_but_for_the_cancelled(world, run, make):
    async def main() -> None:
        async with make(send_msg_timeout_ms=200) as producer:
            tasks = [
                asyncio.ensure_future(producer.send(Message("missing", b"x"))) for _ in range(20)
            ]
            await asyncio.sleep(0)
            tasks[3].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            kinds = [type(one) for one in results]
            assert kinds == [NoRoute] * 3 + [asyncio.CancelledError] + [NoRoute] * 16
            assert (await producer.send(message("there"))).queue_offset == 0

    run(main())


def test_waiting_for_room_does_not_hold_up_the_event_loop(world, run, make):
    async def main() -> None:
        async with make(buffer_memory_bytes=500, send_msg_timeout_ms=20_000) as producer:
            await producer.send(message("0"))
            world.broker.faults.append(Fault(FaultKind.LATE, 300))
            sends = [asyncio.ensure_future(producer.send(message("x" * 200))) for _ in range(20)]
            await asyncio.gather(*sends)

    run(main())
    assert len(world.stored()) == 21


def test_no_room_in_time_is_told(world, run, make):
    async def main() -> None:
        async with make(buffer_memory_bytes=100, send_msg_timeout_ms=100) as producer:
            await producer.send(message("0"))
            world.broker.faults.append(Fault(FaultKind.LOSE))
            first = asyncio.ensure_future(producer.send(message("x" * 200), timeout_ms=600_000))
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await producer.send(message("1"))
            first.cancel()

    run(main())


def test_a_cancelled_send_leaves_nothing_behind(world, run, make):
    async def main() -> None:
        async with make() as producer:
            await producer.send(message("0"))
            sends = [asyncio.ensure_future(producer.send(message(str(n)))) for n in range(1, 10)]
            await asyncio.sleep(0)
            for one in sends[::2]:
                one.cancel()
            done = await asyncio.gather(*sends, return_exceptions=True)
            assert [isinstance(one, asyncio.CancelledError) for one in done] == [
                n % 2 == 0 for n in range(9)
            ]

    run(main())
    assert len(world.stored()) == 10, "the messages are on their way all the same"


def test_it_must_be_started_and_not_closed(world, run, make):
    async def main() -> None:
        producer = make()
        sends = [
            lambda: producer.send(message()),
            lambda: producer.send(None),
            lambda: producer.send_batch([message()]),
            lambda: producer.send_oneway(message()),
            lambda: producer.fetch_publish_queues("t"),
        ]
        for send in sends:
            with pytest.raises(ClientClosed, match="start"):
                await send()
        await producer.start()
        await producer.start()
        await producer.close()
        await producer.close()
        for send in sends[:1] + sends[2:]:
            with pytest.raises(ClientClosed, match="closed"):
                await send()
        with pytest.raises(ClientClosed):
            await producer.start()

    run(main())


def test_it_belongs_to_its_event_loop(world, run, make):
    producer = make()

    async def start() -> None:
        await producer.start()
        await producer.send(message("1"))

    async def use() -> None:
        with pytest.raises(InvalidArgument, match="event loop"):
            await producer.send(message("2"))

    run(start())
    run(use())
    assert world.stored() == [b"1"]


def test_sends_under_way_end_when_it_is_closed(world, run, make):
    async def main() -> None:
        producer = make(close_timeout_ms=1)
        await producer.start()
        await producer.send(message("0"))
        world.broker.crash()
        sends = [asyncio.ensure_future(producer.send(message(str(n)))) for n in range(5)]
        await asyncio.sleep(0)
        await producer.close()
        done = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(one) for one in done} <= {ClientClosed}

    run(main())

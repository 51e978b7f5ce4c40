from __future__ import annotations

import asyncio
import threading

import pytest
from harness.waits import finish, make_waits

from mqmesh.errors import InvalidArgument
from mqmesh.message import MessageQueue
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.aio.completions import Completions
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.producer.send_result import SendFuture


def test_futures_that_are_done_together_share_a_wake_up() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakes = 0
        call_soon = loop.call_soon_threadsafe

        def count(*arguments):
            nonlocal wakes
            wakes += 1
            return call_soon(*arguments)

        loop.call_soon_threadsafe = count  # type: ignore[method-assign]
        completions = Completions(loop)
        futures = [completions.new_future() for _ in range(100)]
        for future in futures:
            completions.add(future)
        await asyncio.gather(*futures)
        assert wakes == 1
        late = completions.new_future()
        completions.add(late)
        await late
        assert wakes == 2
        del loop.call_soon_threadsafe

    asyncio.run(main())


def test_futures_are_done_from_another_thread() -> None:
    async def main() -> None:
        completions = Completions(asyncio.get_running_loop())
        futures = [completions.new_future() for _ in range(50)]
        thread = threading.Thread(target=lambda: [completions.add(one) for one in futures])
        thread.start()
        await asyncio.wait_for(asyncio.gather(*futures), 10)
        thread.join()

    asyncio.run(main())


def test_a_cancelled_future_is_left_alone() -> None:
    async def main() -> None:
        completions = Completions(asyncio.get_running_loop())
        cancelled, other = completions.new_future(), completions.new_future()
        cancelled.cancel()
        completions.add(cancelled)
        completions.add(other)
        await other
        assert cancelled.cancelled()

    asyncio.run(main())


def test_after_the_end_of_its_event_loop_nobody_waits() -> None:
    async def main() -> tuple[Completions, asyncio.Future[None]]:
        completions = Completions(asyncio.get_running_loop())
        return completions, completions.new_future()

    completions, future = asyncio.run(main())
    for _ in range(3):
        completions.add(future)
    assert not future.done()
    assert not completions._done


def test_another_event_loop_is_refused() -> None:
    async def make() -> Completions:
        return Completions(asyncio.get_running_loop())

    completions = asyncio.run(make())

    async def use() -> None:
        with pytest.raises(InvalidArgument, match="event loop"):
            completions.new_future()

    asyncio.run(use())


def batch_of_sends(count: int) -> tuple[PendingBatch, list[SendFuture]]:
    queue = MessageQueue("t", "a", 0)
    batch = PendingBatch(*make_waits(), queue, 0, False, 0, 0, True)
    return batch, [SendFuture(batch, number) for number in range(count)]


def test_one_callback_serves_all_messages_of_a_batch() -> None:
    async def main() -> None:
        completions = Completions(asyncio.get_running_loop())
        batch, sends = batch_of_sends(50)
        waiting = [completions.wait_for(one) for one in sends]
        assert len(batch.callbacks) == 1
        waiting[7].cancel()
        thread = threading.Thread(target=lambda: finish(batch, BatchOutcome(0, 0)))
        thread.start()
        thread.join()
        assert not waiting[0].done(), "it is told in the event loop"
        late = completions.wait_for(sends[3])
        del waiting[7]
        results = await asyncio.wait_for(asyncio.gather(*waiting, late), 10)
        assert results[0].queue_offset == results[-1].queue_offset - 3
        assert not completions._waiting
        again = completions.wait_for(sends[3])  # of a batch that is done and told
        await asyncio.wait_for(again, 10)
        assert not completions._waiting

    asyncio.run(main())

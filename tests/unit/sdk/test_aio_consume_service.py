"""Coroutine listeners: no message is left lying because a task was just about to end."""

from __future__ import annotations

import asyncio

import pytest

from mqmesh.message import StoredMessage
from mqmesh.sdk.aio_consume_service import AioConsumeService
from mqmesh.sdk.consume_result import ConsumeResult
from mqmesh.sdk.consume_service import QueueWork
from mqmesh.sdk.process_queue import DONE, Span
from mqmesh.units import QueueOffset


@pytest.mark.parametrize("tasks", [1, 2, 20])
def test_what_comes_while_the_last_task_ends_is_handed_out(tasks):
    async def run():
        handled, done = [], asyncio.Event()

        async def listen(messages):
            handled.extend(message.queue_offset for message in messages)
            if len(handled) < 50:
                send(len(handled))  # comes into the loop before it hears of this task's end
            else:
                done.set()
            return ConsumeResult.SUCCESS

        def send(offset):
            message = StoredMessage("t", b"x", queue_offset=QueueOffset(offset))
            service.submit_again(work, [message], span, 0)

        work = QueueWork(listen, 1, lambda: None, lambda error: None)
        span = Span(0, bytearray(50), 0)
        service = AioConsumeService(tasks, lambda work: listen, lambda *arguments: None)
        service.attach(asyncio.get_running_loop())
        send(0)
        async with asyncio.timeout(10):
            await done.wait()
        assert handled == list(range(50))
        await asyncio.sleep(0)
        assert span.states == bytes([DONE]) * 50

    asyncio.run(run())

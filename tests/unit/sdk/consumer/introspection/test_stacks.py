"""Where the threads and tasks of this process stand, as text."""

from __future__ import annotations

import asyncio
import threading

from mqmesh.protocol.client_rpc import MAX_STACKS_LENGTH
from mqmesh.sdk.consumer.introspection import stacks
from mqmesh.sdk.consumer.introspection.stacks import read_stacks


def test_threads_whose_names_begin_so_stand_in_front():
    go_on = threading.Event()

    def stand_here():
        go_on.wait(60)

    threads = [threading.Thread(target=stand_here, name=name) for name in ("zz-1", "other")]
    for thread in threads:
        thread.start()
    try:
        text = read_stacks("zz-")
    finally:
        go_on.set()
    assert text.startswith("thread zz-1\n")
    assert "in stand_here" in text
    assert "thread other\n" in text
    assert "thread MainThread\n" in text


def test_tasks_are_told_down_to_what_they_wait_for():
    async def innermost(go_on):
        await go_on.wait()

    async def outermost(go_on):
        await innermost(go_on)

    async def scene():
        go_on = asyncio.Event()
        task = asyncio.create_task(outermost(go_on), name="a-task")
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        text = await asyncio.to_thread(read_stacks, "zz-", loop)
        go_on.set()
        await task
        return text

    text = asyncio.run(scene())
    own = text[text.index("task a-task") :]
    assert own.index("in outermost") < own.index("in innermost") < own.index("in wait")


def test_what_is_too_long_is_cut_off(monkeypatch):
    monkeypatch.setattr(stacks, "MAX_STACKS_LENGTH", 100)
    text = read_stacks("zz-")
    assert len(text) == 100 < MAX_STACKS_LENGTH
    assert text.endswith("… cut off")

"""Stacks of the threads and tasks of this process, as text."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from mqmesh.protocol.client_rpc import MAX_STACKS_LENGTH

MAX_DEPTH: Final = 64
"""Frames of one thread or task, the innermost ones."""


def read_stacks(first: str, loop: asyncio.AbstractEventLoop | None = None) -> str:
    """Return the stacks of all threads, and of all tasks of an asyncio loop.

    Args:
        first: Threads whose names begin so stand in front.
        loop: Event loop whose tasks are listed too, in front of all.

    Returns:
        At most ``MAX_STACKS_LENGTH`` characters; the rest is cut off.
    """
    names = {one.ident: one.name for one in threading.enumerate()}
    frames = sorted(
        sys._current_frames().items(),
        key=lambda item: (not names.get(item[0], "").startswith(first), item[0]),
    )
    parts = [] if loop is None else list(_tasks(loop))
    parts += [_stack(f"thread {names.get(ident, ident)}", frame) for ident, frame in frames]
    text = "\n".join(parts)
    cut = "\n… cut off"
    return text if len(text) <= MAX_STACKS_LENGTH else text[: MAX_STACKS_LENGTH - len(cut)] + cut


def _stack(name: str, frame: FrameType) -> str:
    return name + "\n" + "".join(traceback.format_stack(frame)[-MAX_DEPTH:])


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    for task in sorted(asyncio.all_tasks(loop), key=lambda one: one.get_name()):
        frames = list(_awaited(task.get_coro()))[-MAX_DEPTH:]
        lines = traceback.StackSummary.from_list(
            [(one.f_code.co_filename, one.f_lineno, one.f_code.co_name, None) for one in frames]
        ).format()
        yield f"task {task.get_name()}\n" + "".join(lines)


def _awaited(waits: Any) -> Iterator[FrameType]:
    """Return the frames of a waiting coroutine and of those it waits for, down to the last."""
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is None:
            return
        yield frame
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)

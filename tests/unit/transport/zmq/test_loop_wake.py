"""A wake-up is never lost, whenever it comes."""

import os
import select
from collections.abc import Iterator

import pytest

from mqmesh.transport.zmq import loop as loop_module
from mqmesh.transport.zmq.loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    loop.tick(0)  # which opens its pipe
    yield loop
    loop.close()


def is_woken(loop: EventLoop) -> bool:
    poll = select.poll()  # unlike select.select it takes descriptors beyond 1,023
    poll.register(loop._wake_read, select.POLLIN)
    return bool(poll.poll(0))


def test_a_call_ends_the_wait(loop):
    loop.call_soon_threadsafe(lambda: None)
    assert is_woken(loop)


def test_a_wake_up_while_the_pipe_is_read_does_not_silence_the_next_one(loop, monkeypatch):
    def read_and_wake(descriptor: int, size: int) -> bytes:
        loop.wake()
        return os.read(descriptor, size)

    class Meddling:
        read = staticmethod(read_and_wake)

        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

    loop.wake()
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "os", Meddling())
        loop.tick(0)
    called = []
    loop.call_soon_threadsafe(lambda: called.append(True))
    assert is_woken(loop)
    loop.tick(0)
    assert called


def test_a_call_made_while_the_pipe_is_read_is_carried_out_in_the_same_tick(loop, monkeypatch):
    called = []

    class Meddling:
        @staticmethod
        def read(descriptor: int, size: int) -> bytes:
            data = os.read(descriptor, size)
            loop.call_soon_threadsafe(lambda: called.append(True))
            return data

        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

    loop.wake()
    with monkeypatch.context() as patch:
        patch.setattr(loop_module, "os", Meddling())
        loop.tick(0)
    assert called

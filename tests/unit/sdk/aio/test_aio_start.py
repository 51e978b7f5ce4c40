"""Consumers that cannot be started may be started again."""

from __future__ import annotations

import asyncio

import pytest

import mqmesh
import mqmesh.aio
from mqmesh.errors import TooManyOpenFiles
from mqmesh.sdk.consumer.receive_engine import ReceiveEngine


@pytest.fixture
def started(monkeypatch):
    """Starts of engines, of which the first one fails."""
    started = []

    def start(engine):
        started.append(engine)
        if len(started) == 1:
            raise TooManyOpenFiles("ulimit -n is 20")

    monkeypatch.setattr(ReceiveEngine, "start", start)
    monkeypatch.setattr(ReceiveEngine, "leave", lambda engine: None)
    return started


def test_a_simple_consumer_that_could_not_be_started_is_closed_and_may_be_started_again(started):
    consumer = mqmesh.SimpleConsumer("g", namesrv_addr="127.0.0.1:1")
    with pytest.raises(TooManyOpenFiles):
        consumer.start()
    consumer.start()
    consumer.close()
    assert len(set(started)) == 2


def test_one_of_asyncio_may_be_started_again_too(started):
    async def run():
        consumer = mqmesh.aio.SimpleConsumer("g", namesrv_addr="127.0.0.1:1")
        with pytest.raises(TooManyOpenFiles):
            await consumer.start()
        await consumer.start()
        await consumer.close()

    asyncio.run(run())
    assert len(set(started)) == 2

"""Blocks of processing: which messages are refused when nothing was stored."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from harness.pulled import pulled

from mqmesh.errors import ClientClosed, NoRoute, SendInDoubt, StaleReceipt
from mqmesh.sdk.aio.processing import Processing as CoroutineProcessing
from mqmesh.sdk.consumer.processing import Processing


class Client:
    """A client whose commits end with an error."""

    def __init__(self, error):
        self.error = error

    def call(self, function, timeout_ms):
        raise self.error


@pytest.mark.parametrize(
    ("error", "refused"),
    [(StaleReceipt("x"), 1), (NoRoute("x"), 1), (SendInDoubt("x"), 0), (ClientClosed("x"), 0)],
)
def test_messages_are_refused_unless_they_may_be_done(error, refused, monkeypatch):
    failed = []
    block = Processing(Client(error), [pulled(0)], lambda *given: None, failed.append)
    with pytest.raises(type(error)), block:
        pass
    future: Future = Future()
    future.set_exception(error)
    monkeypatch.setattr(block, "commit_later", lambda: future)

    async def refuse(error):
        failed.append(error)

    async def of_coroutines():
        with pytest.raises(type(error)):
            async with CoroutineProcessing(block, refuse):
                pass

    asyncio.run(of_coroutines())
    assert failed == [error] * 2 * refused

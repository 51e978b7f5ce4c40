"""The application without a cluster: pytest examples/test_faststream_app.py"""

import asyncio
from importlib import import_module
from pathlib import Path

import pytest

from mqmesh.faststream import TestMQMeshBroker


def test_an_order_is_billed_and_the_bill_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    shop = import_module("faststream_app")

    async def program() -> None:
        async with TestMQMeshBroker(shop.broker) as broker:
            await broker.publish(shop.Order(id="1", item="pear"), "orders")
            shop.bill.mock.assert_called_once_with({"id": "1", "item": "pear"})
            shop.send_by_post.mock.assert_called_once_with(
                {"order": {"id": "1", "item": "pear"}, "price": 4}
            )
            shop.enter_in_books.mock.assert_called_once_with(
                [{"order": {"id": "1", "item": "pear"}, "price": 4}]
            )
            reply = await broker.request("apple", "prices")
            assert await reply.decode() == 3

    asyncio.run(program())

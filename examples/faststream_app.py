"""A FastStream application: it bills orders, and answers what an apple costs.

mqmesh up                                     # in one terminal; pip install '.[faststream]'
python examples/faststream_app.py             # in another one; Ctrl-C or SIGTERM ends it in order
"""

import asyncio
import os
from typing import Annotated

from faststream import Context, FastStream
from pydantic import BaseModel

from mqmesh import ConsumeFromWhere
from mqmesh.faststream import MQMeshBroker, MQMeshMessage, MQMeshResponse

FIRST = ConsumeFromWhere.FIRST_OFFSET
PRICES = {"apple": 3, "pear": 4}

broker = MQMeshBroker(os.environ.get("MQMESH_NAMESRV"))  # None for what `mqmesh up` starts
app = FastStream(broker)


class Order(BaseModel):
    id: str
    item: str


class Bill(BaseModel):
    order: Order
    price: int


# An item without a price will not get one by trying again: its order is a dead letter.
@broker.subscriber(
    "orders", group="billing", dead_letter_on=(LookupError,), consume_from_where=FIRST
)
@broker.publisher("bills")
async def bill(order: Order) -> MQMeshResponse:
    answer = Bill(order=order, price=PRICES[order.item])
    return MQMeshResponse(answer, keys=[order.id], tag="expensive" if answer.price > 3 else "cheap")


@broker.subscriber("bills", group="post", expression="expensive", consume_from_where=FIRST)
async def send_by_post(bill: Bill, message: Annotated[MQMeshMessage, Context("message")]) -> None:
    print(f"bill of {bill.price} for order {bill.order.id}, message {message.message_id}")


# All bills that wait, up to a hundred, in one call.
@broker.subscriber(
    "bills",
    group="books",
    batch=True,
    consume_message_batch_max_size=100,
    consume_from_where=FIRST,
)
async def enter_in_books(bills: list[Bill]) -> None:
    print("in the books:", [bill.price for bill in bills])


@broker.subscriber("prices", group="shop", consume_from_where=FIRST)
async def price(item: str) -> int:
    return PRICES[item]


@app.after_startup
async def order_something() -> None:
    await broker.publish(Order(id="1", item="pear"), "orders", keys=["1"])
    reply = await broker.request("apple", "prices", timeout_ms=30_000)
    print("an apple costs", await reply.decode())


if __name__ == "__main__":
    asyncio.run(app.run())

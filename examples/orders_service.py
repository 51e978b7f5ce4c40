"""A web service that sends orders, and a worker that bills them.

mqmesh up                                     # in one terminal; pip install fastapi uvicorn
uvicorn --app-dir examples orders_service:app # in another one
python examples/orders_service.py             # the worker; Ctrl-C or SIGTERM ends it in order
curl localhost:8000/orders -H 'Content-Type: application/json' -d '{"id": "1", "item": "apple"}'
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel

from mqmesh import App, ConsumeFromWhere, Message, Producer

TOPIC = "orders"
NAMESRV = os.environ.get("MQMESH_NAMESRV")  # None for what `mqmesh up` starts
producer = Producer("shop", namesrv_addr=NAMESRV)  # connects when it starts, behind any fork


class Order(BaseModel):
    id: str
    item: str


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
    with producer:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
def place(order: Order) -> dict[str, str]:
    body = order.model_dump_json().encode()
    sent = producer.send(Message(TOPIC, body, keys=[order.id], sharding_key=order.id))
    return {"message_id": sent.message_id}


worker = App("billing-worker", namesrv_addr=NAMESRV)


@worker.subscriber(TOPIC, group="billing", consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
def bill(order: Order) -> None:
    print(f"billed order {order.id}: {order.item}")  # an exception: it comes again later


if __name__ == "__main__":
    worker.run()

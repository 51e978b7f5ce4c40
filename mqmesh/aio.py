"""mqmesh for asyncio programs: the same names as in ``mqmesh``, with await.

::

    async with Producer("orders") as producer:
        await producer.send(Message("orders", b"one"))

    async with PullConsumer("billing") as consumer:
        await consumer.subscribe("orders")
        async for message in consumer:
            ...

Messages, results and errors are those of ``mqmesh``. A client belongs to the event loop that
it was started in.
"""

from mqmesh.sdk.aio_consumer import PullConsumer, PushConsumer
from mqmesh.sdk.aio_producer import Producer

__all__ = ["Producer", "PullConsumer", "PushConsumer"]

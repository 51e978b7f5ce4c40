"""mqmesh for asyncio programs: the same names as in ``mqmesh``, with await.

::

    async with Producer("orders") as producer:
        await producer.send(Message("orders", b"one"))

    async with PullConsumer("billing") as consumer:
        await consumer.subscribe("orders")
        async for message in consumer:
            ...

    async with TransactionProducer("orders", listener) as producer:
        async with producer.transaction(Message("orders", b"two")) as tx:
            await database.execute(..., tx.message_id)

    async with GroupAdmin() as admin:
        print(await admin.progress("billing"))

Messages, results and errors are those of ``mqmesh``. A client belongs to the event loop that
it was started in.
"""

from mqmesh.sdk.aio.admin import (
    AccessClient,
    AdminClient,
    BrokerAdmin,
    ClusterAdmin,
    DeadLetterClient,
    DelayClient,
    GroupAdmin,
    HaAdmin,
    MemberClient,
    NamesrvAdmin,
    ProbeClient,
    QueryClient,
    ReplayClient,
    SearchClient,
    TableAdmin,
    TraceClient,
    TrackClient,
    TransactionAdmin,
)
from mqmesh.sdk.aio.app import App
from mqmesh.sdk.aio.consumer import PullConsumer, PushConsumer
from mqmesh.sdk.aio.key_value import KeyValue
from mqmesh.sdk.aio.producer import Producer
from mqmesh.sdk.aio.simple_consumer import SimpleConsumer
from mqmesh.sdk.aio.transactions import TransactionListener, TransactionProducer
from mqmesh.sdk.client.run import run_async as run

__all__ = [
    "AccessClient",
    "AdminClient",
    "App",
    "BrokerAdmin",
    "ClusterAdmin",
    "DeadLetterClient",
    "DelayClient",
    "GroupAdmin",
    "KeyValue",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "ProbeClient",
    "QueryClient",
    "ReplayClient",
    "SearchClient",
    "SimpleConsumer",
    "TableAdmin",
    "TraceClient",
    "TrackClient",
    "HaAdmin",
    "MemberClient",
    "NamesrvAdmin",
    "TransactionAdmin",
    "TransactionListener",
    "TransactionProducer",
    "run",
]

"""mqmesh for FastStream (``pip install 'mqmesh[faststream]'``).

::

    from faststream import FastStream
    from mqmesh.faststream import MQMeshBroker

    broker = MQMeshBroker("localhost:9876")
    app = FastStream(broker)

    @broker.subscriber("orders", group="billing")
    @broker.publisher("bills")
    async def bill(order: Order) -> Bill: ...

See docs/faststream.md.
"""

from mqmesh.sdk.faststream.broker import (
    MQMeshBroker,
    MQMeshRoute,
    MQMeshRoutePublisher,
    MQMeshRouter,
)
from mqmesh.sdk.faststream.codec import MQMeshCodec
from mqmesh.sdk.faststream.message import Delivery, MQMeshMessage
from mqmesh.sdk.faststream.publisher import MQMeshPublisher
from mqmesh.sdk.faststream.publishing import MQMeshPublishCommand, MQMeshResponse
from mqmesh.sdk.faststream.subscriber import MQMeshSubscriber
from mqmesh.sdk.faststream.testing import TestMQMeshBroker

__all__ = [
    "Delivery",
    "MQMeshBroker",
    "MQMeshCodec",
    "MQMeshMessage",
    "MQMeshPublishCommand",
    "MQMeshPublisher",
    "MQMeshResponse",
    "MQMeshRoute",
    "MQMeshRoutePublisher",
    "MQMeshRouter",
    "MQMeshSubscriber",
    "TestMQMeshBroker",
]

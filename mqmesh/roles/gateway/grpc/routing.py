"""Routes for clients by gRPC: all broker groups have the address of the client's request."""

from collections.abc import Callable, Iterator
from typing import Final

from mqmesh.errors import BrokerNotAvailable, MQMeshError, TopicNotFound
from mqmesh.message import AUTO_CREATE_TOPIC, check_group, check_topic
from mqmesh.protocol.grpc.codes import IPV4, MessageType, QueuePermission
from mqmesh.protocol.grpc.messages import CLASSES, GrpcMessage
from mqmesh.protocol.route import Perm, QueueData, TopicRoute
from mqmesh.roles.gateway.grpc.clients import GrpcClients, check_endpoints, name_of
from mqmesh.roles.gateway.grpc.session import GrpcMethod, ServedCall
from mqmesh.roles.gateway.messages import Address
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.sdk.client.route_cache import MASTER_ID

ANY_QUEUE: Final = -1
"""Id of the one queue of an assignment: messages come from all of the broker group's."""
_TYPES: Final = [
    MessageType.NORMAL.value,
    MessageType.FIFO.value,
    MessageType.DELAY.value,
    MessageType.TRANSACTION.value,
]


class GrpcRouting:
    """Methods about routes.

    Args:
        upstream: Source of routes.
        ports: The broker groups that are served.
        clients: Clients.
        address: Where the gateway listens, for clients that do not say where they found it.
    """

    def __init__(
        self, upstream: Upstream, ports: BrokerPorts, clients: GrpcClients, address: Address
    ) -> None:
        self._upstream = upstream
        self._ports = ports
        self._clients = clients
        self._address = address

    def methods(self) -> dict[str, GrpcMethod]:
        """Return the methods about routes."""
        return {
            "QueryRoute": GrpcMethod("QueryRouteRequest", "QueryRouteResponse", self._route),
            "QueryAssignment": GrpcMethod(
                "QueryAssignmentRequest", "QueryAssignmentResponse", self._assign
            ),
        }

    def find(
        self, topic: str, on_done: Callable[[TopicRoute | MQMeshError], None], *, creates: bool
    ) -> None:
        """Find the route of a topic.

        Args:
            topic: Topic.
            on_done: Called with the route, or why there is none; maybe before this returns.
            creates: A topic that is unknown has the queues of the pattern, where brokers make
                topics by themselves.
        """

        def done(found: TopicRoute | MQMeshError) -> None:
            if isinstance(found, TopicNotFound) and creates:
                missing = found

                def pattern(found: TopicRoute | MQMeshError) -> None:
                    on_done(missing if isinstance(found, MQMeshError) else found)

                self._upstream.find_route(AUTO_CREATE_TOPIC, pattern)
            elif isinstance(found, MQMeshError):
                on_done(found)
            elif self._ports.groups().keys().isdisjoint(one.broker_name for one in found.queues):
                on_done(BrokerNotAvailable(f"no broker group of {topic!r} is served"))
            else:
                on_done(found)

        self._upstream.find_route(topic, done)

    def _route(self, call: ServedCall, request: GrpcMessage) -> None:
        topic = name_of(request.topic)
        check_topic(topic)
        check_endpoints(request.endpoints)

        def done(found: TopicRoute | MQMeshError) -> None:
            if isinstance(found, MQMeshError):
                call.fail(found)
            else:
                queues = list(self._queues(request, found))
                call.answer(message_queues=queues)

        client = self._clients.find(call.client_id)
        is_consumer = client is not None and bool(client.group)
        self.find(topic, done, creates=not is_consumer)

    def _assign(self, call: ServedCall, request: GrpcMessage) -> None:
        topic = name_of(request.topic)
        check_topic(topic)
        check_group(name_of(request.group))
        check_endpoints(request.endpoints)

        def done(found: TopicRoute | MQMeshError) -> None:
            if isinstance(found, MQMeshError):
                call.fail(found)
                return
            served = self._ports.groups()
            queues = [
                self._queue(request, one, ANY_QUEUE, QueuePermission.READ)
                for one in found.queues
                if one.perm & Perm.READ and one.broker_name in served
            ]
            call.answer(
                assignments=[CLASSES["Assignment"](message_queue=queue) for queue in queues]
            )

        self.find(topic, done, creates=False)

    def _queues(self, request: GrpcMessage, route: TopicRoute) -> Iterator[GrpcMessage]:
        served = self._ports.groups()
        for one in route.queues:
            if one.broker_name not in served:
                continue
            readable = one.read_queue_nums if one.perm & Perm.READ else 0
            writable = one.write_queue_nums if may_write(route, one) else 0
            for queue_id in range(max(readable, writable)):
                may = QueuePermission.READ_WRITE
                if queue_id >= writable:
                    may = QueuePermission.READ
                elif queue_id >= readable:
                    may = QueuePermission.WRITE
                yield self._queue(request, one, queue_id, may)

    def _queue(
        self, request: GrpcMessage, data: QueueData, queue_id: int, may: QueuePermission
    ) -> GrpcMessage:
        return CLASSES["MessageQueue"](
            topic=request.topic,
            id=queue_id,
            permission=may.value,
            accept_message_types=[*_TYPES, *([MessageType.PRIORITY] if data.priorities else ())],
            broker=CLASSES["Broker"](
                name=data.broker_name, id=0, endpoints=self._endpoints(request.endpoints)
            ),
        )

    def _endpoints(self, wanted: GrpcMessage) -> GrpcMessage:
        """Return where a client finds the gateway: as it says itself, which it has reached."""
        if wanted.addresses:
            return wanted
        host, port = self._address.host, self._address.port
        address = CLASSES["Address"](host=host, port=port)
        return CLASSES["Endpoints"](scheme=IPV4, addresses=[address])


def may_write(route: TopicRoute, data: QueueData) -> bool:
    """Return True if a broker group takes messages, or will when it has elected its master."""
    if data.perm & Perm.WRITE:
        return True
    group = next((one for one in route.brokers if one.broker_name == data.broker_name), None)
    return (
        group is not None
        and group.is_elected
        and MASTER_ID not in group.addresses
        and bool(data.perm & Perm.READ)
    )

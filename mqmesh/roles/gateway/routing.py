"""Routes for RocketMQ's clients: every broker group stands at one address, the gateway's port."""

from collections.abc import Callable

import msgspec

from mqmesh.errors import BrokerNotAvailable, MQMeshError, TopicNotFound
from mqmesh.message import RETRY_PREFIX
from mqmesh.namespaces import is_trace_topic
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GetGroupsRequest, GroupSummaries
from mqmesh.protocol.remoting.bodies import RouteBody, RouteBroker, RouteQueue, encode_body
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.route import Perm, TopicRoute
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.replies import REPLY_TOPIC
from mqmesh.roles.gateway.session import Handler, RemotingSession, text_field
from mqmesh.roles.gateway.upstream import Upstream


class Routing:
    """Answers of the gateway's name server port.

    Args:
        upstream: Source of routes.
        ports: Addresses of broker groups.
        has_members: Returns True for a consumer group that has members here.
    """

    def __init__(
        self, upstream: Upstream, ports: BrokerPorts, has_members: Callable[[str], bool]
    ) -> None:
        self._upstream = upstream
        self._ports = ports
        self._has_members = has_members

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of requests for routes."""
        return {RemotingCode.GET_ROUTEINFO_BY_TOPIC: self._route}

    def _route(self, session: RemotingSession, request: RemotingCommand) -> None:
        topic = text_field(request, "topic")
        if topic.endswith(REPLY_TOPIC) and topic[: -len(REPLY_TOPIC)] in self._clusters():
            session.answer(request, body=encode_body(self._route_to_all()))
            return

        def done(found: TopicRoute | MQMeshError) -> None:
            if isinstance(found, TopicNotFound) and self._is_retry_topic(topic):
                # The topic comes with the first retry. A client that did not know it until then
                # would get that retry only after its next look at routes, 30 s later.
                session.answer(request, body=encode_body(self._route_to_all()))
            elif isinstance(found, TopicNotFound) and is_trace_topic(topic):
                # RocketMQ has it from the beginning, and clients of 5 drop traces without it. The
                # first one makes it.
                session.answer(request, body=encode_body(self._route_to_all()))
            elif isinstance(found, TopicNotFound) and topic in self._clusters():
                # RocketMQ's brokers have a topic of that name, by which tools find those of a
                # cluster: `topicStatus -c` of 5.
                session.answer(request, body=encode_body(self._route_to_all(topic)))
            elif isinstance(found, TopicNotFound) and topic.startswith(RETRY_PREFIX):
                self._look_for_group(session, request, found, list(self._ports.groups()))
            elif isinstance(found, MQMeshError):
                session.fail(request, found)
            elif self._ports.groups().keys().isdisjoint(one.broker_name for one in found.queues):
                session.fail(request, BrokerNotAvailable(f"no broker group of {topic!r} is served"))
            else:
                session.answer(request, body=encode_body(self._body(found)))

        self._upstream.find_route(topic, done)

    def _look_for_group(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        missing: MQMeshError,
        broker_names: list[str],
    ) -> None:
        """Answer with a route where the group is known: RocketMQ's tools find groups by it."""
        if not broker_names:
            session.fail(request, missing)
            return
        name, *others = broker_names

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                known = decode_header(GroupSummaries, answer.header).groups
            except MQMeshError as error:
                self._look_for_group(session, request, error, others)
                return
            if known:
                session.answer(request, body=encode_body(self._route_to_all()))
            else:
                self._look_for_group(session, request, missing, others)

        header = encode_header(GetGroupsRequest(text_field(request, "topic")[len(RETRY_PREFIX) :]))
        self._upstream.ask(name, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, header, done)

    def _is_retry_topic(self, topic: str) -> bool:
        return topic.startswith(RETRY_PREFIX) and self._has_members(
            topic.removeprefix(RETRY_PREFIX)
        )

    def _body(self, route: TopicRoute) -> RouteBody:
        order: str | msgspec.UnsetType = msgspec.UNSET
        if route.order:
            order = ";".join(f"{one.broker_name}:{one.write_queue_nums}" for one in route.queues)
        served = self._ports.groups()
        clusters = {
            one.broker_name: one.cluster_name for one in route.brokers if one.broker_name in served
        }
        return RouteBody(
            [
                RouteQueue(one.broker_name, one.read_queue_nums, one.write_queue_nums, one.perm)
                for one in route.queues
            ],
            [
                RouteBroker(cluster, name, {0: str(self._ports.address(name))})
                for name, cluster in clusters.items()
            ],
            order_topic_conf=order,
        )

    def _clusters(self) -> set[str]:
        return set(self._ports.groups().values())

    def _route_to_all(self, only: str = "") -> RouteBody:
        """Return the route of a topic that no broker has: one queue at each broker group.

        Args:
            only: A cluster; "" for the groups of all.
        """
        groups = self._ports.groups()
        if only:
            groups = {name: cluster for name, cluster in groups.items() if cluster == only}
        return RouteBody(
            [RouteQueue(name, 1, 1, Perm.READ_WRITE.value) for name in groups],
            [
                RouteBroker(cluster, name, {0: str(self._ports.address(name))})
                for name, cluster in groups.items()
            ],
        )

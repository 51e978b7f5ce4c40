"""Search for the routes of a client's topics at name servers, and their refresh."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from mqmesh.errors import ClientClosed, MQMeshError, RemoteProtocolError, TopicNotFound
from mqmesh.message import RETRY_PREFIX
from mqmesh.namespaces import add_namespace
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import (
    MAX_TOPICS_PER_REQUEST,
    GetRouteRequest,
    GetRoutesRequest,
    RouteHint,
    TopicRoute,
    TopicRoutes,
    topic_hash,
)
from mqmesh.sdk.client.namesrv_link import NamesrvLink
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.transport.endpoints import learn_keys, usable_brokers
from mqmesh.transport.interface import Transport

LOST_MASTER_MS: Final = 500
"""Interval of requests for routes while a group's master cannot be reached."""

MOST_REQUESTS: Final = 4
"""Requests in flight; topics that are wanted meanwhile go together into the next one."""

MOST_REPORTED: Final = 1_000
"""Different problems of routes that are logged in a client's life."""

OnRoute = Callable[[TopicRoute | MQMeshError], None]

_log = logging.getLogger(__name__)


class RouteFinder:
    """Finder of topic routes at the name servers; in the client loop.

    Args:
        transport: Of the client.
        addresses: ``host:port`` of each name server.
        options: Intervals of requests.
        routes: Cache of found routes.
        on_changed: Called with topics whose routes are others now, before the callers for them.
        lost: Returns brokers that cannot be reached.
        closed: Returns True when no request is sent any more.

    Attributes:
        problem: Why the last question got no answer; None if it got one. Any thread may read it.
    """

    def __init__(
        self,
        transport: Transport,
        addresses: list[str],
        options: ClientOptions,
        routes: RouteCache,
        *,
        on_changed: Callable[[set[str]], None],
        lost: Callable[[], list[str]],
        closed: Callable[[], bool],
    ) -> None:
        self._addresses = addresses
        self._transport = transport
        self._loop = transport.loop
        self._options = options
        self._routes = routes
        self._on_changed = on_changed
        self._lost = lost
        self._closed = closed
        self._link: NamesrvLink | None = None
        self._namespace = options.namespace or ""
        self._topics: set[str] = set()
        self._by_hash: dict[int, str] = {}
        self._missing: set[str] = set()
        self._wanted: dict[str, None] = {}
        self._requests = 0
        self._asking: dict[str, list[OnRoute]] = {}
        self._ask_again: set[str] = set()
        self._probes: set[str] = set()
        self._look_planned = False
        self._reported: set[str] = set()
        self.problem: MQMeshError | None = None

    def start(self) -> None:
        """Connects to a name server; from any thread, once, before the client loop begins."""
        self._link = NamesrvLink(
            self._transport,
            self._addresses,
            timeout_ms=self._options.namesrv_timeout_ms,
            on_hint=self._take_hint,
            on_connected=self.refresh_all,
        )
        self._loop.call_every(self._options.poll_name_server_interval_ms, self.refresh_all)

    def close(self) -> None:
        """Closes the connection."""
        if self._link is not None:
            self._link.close()

    def find(self, topic: str, on_done: OnRoute, *, anew: bool = False) -> None:
        """Asks for a topic's route and keeps it fresh from now on.

        Args:
            topic: Topic.
            on_done: Called with the route, or ``TopicNotFound``, or why no name server answered.
            anew: It has changed just now: an answer that is on its way may be of before.

        Raises:
            LocalProtocolError: The name cannot be encoded.
        """
        encode_header(GetRouteRequest(topic))  # or the others in its request would fail, too
        self._want(topic, on_done, anew=anew)
        self._ask_wanted()

    def refresh(self, topics: Iterable[str]) -> None:
        """Asks for routes again."""
        for topic in list(topics):
            self._want(topic, _ignore, anew=True)
        self._ask_wanted()

    def refresh_all(self) -> None:
        """Asks for the routes of all topics again."""
        self.refresh(self._topics)

    def forget(self, topic: str) -> None:
        """Stops refreshing a topic."""
        self._topics.discard(topic)
        self._by_hash.pop(topic_hash(add_namespace(self._namespace, topic)), None)
        self._missing.discard(topic)

    def _take_hint(self, hint: RouteHint) -> None:
        if hint.topics:
            # A hint that lists topics lists all that changed, whichever brokers carry them.
            known = map(self._by_hash.get, hint.topics)
            self.refresh(one for one in known if one is not None)
            return
        route = self._routes.route
        self.refresh(one for one in self._topics if route(one) is not None or not _comes_late(one))

    def _look_again(self) -> None:
        self._look_planned = False
        topics = set(self._missing)
        for broker_name in self._lost():
            # A group without its master elects another one, or waits for it: hints report that,
            # and may be lost. One topic of the group shows whether it is time to ask for all.
            one = next(iter(self._topics.intersection(self._routes.topics_of(broker_name))), None)
            if one is not None:
                self._probes.add(one)
                topics.add(one)
        self.refresh(topics)
        self._plan_look()

    def _plan_look(self) -> None:
        """Asks for missing routes now and then. Idle clients sleep: only while one is missing."""
        is_lost = any(self._routes.is_used(broker_name) for broker_name in self._lost())
        if (self._missing or is_lost) and not (self._look_planned or self._closed()):
            interval_ms = self._options.missing_route_interval_ms
            delay_ms = min(LOST_MASTER_MS, interval_ms) if is_lost else interval_ms
            self._look_planned = True
            self._loop.call_later(delay_ms, self._look_again)

    def _want(self, topic: str, on_done: OnRoute, *, anew: bool) -> None:
        if topic not in self._topics:
            self._topics.add(topic)
            self._by_hash[topic_hash(add_namespace(self._namespace, topic))] = topic
        asking = self._asking.get(topic)
        if asking is None:
            self._asking[topic] = [on_done]
            self._wanted[topic] = None
            return
        if on_done is not _ignore:
            asking.append(on_done)
        if anew and topic not in self._wanted:
            self._ask_again.add(topic)

    def _ask_wanted(self) -> None:
        """Requests wanted routes: many topics in one request, few requests at a time."""
        assert self._link is not None
        while self._wanted and self._requests < MOST_REQUESTS:
            topics = list(islice(self._wanted, MAX_TOPICS_PER_REQUEST))
            for topic in topics:
                del self._wanted[topic]
            self._requests += 1
            if len(topics) == 1:
                code = RequestCode.GET_ROUTEINFO_BY_TOPIC
                header = encode_header(GetRouteRequest(topics[0]))
            else:
                code = RequestCode.GET_ROUTES_OF_TOPICS
                header = encode_header(GetRoutesRequest(topics))
            self._link.request(code, header, partial(self._take, topics))

    def _take(self, topics: list[str], answer: Command | MQMeshError) -> None:
        self._requests -= 1
        if self._closed():
            # It came with the last turn; its receiver would try to connect.
            answer = ClientClosed("the client is closed")
            topics += self._wanted
            self._wanted.clear()
        try:
            found = self._read(topics, answer)
            self.problem = None
        except MQMeshError as error:
            self.problem = None if isinstance(error, TopicNotFound) else error
            found = dict.fromkeys(topics, error)
        changed = {
            topic
            for topic, outcome in found.items()
            if isinstance(outcome, TopicRoute) and self._routes.update(outcome)
        }
        if changed:
            self._on_changed(changed)
        for topic in topics:
            self._end(topic, found.get(topic))
        for topic in self._probes.intersection(topics):
            self._probes.discard(topic)
            if topic in changed:
                for broker_name in self._routes.brokers_of(topic):
                    self.refresh(self._topics.intersection(self._routes.topics_of(broker_name)))
        self._ask_wanted()
        self._plan_look()

    def _end(self, topic: str, outcome: TopicRoute | MQMeshError | None) -> None:
        """Ends a search; None where the answer had no room for the topic."""
        if outcome is None:
            self._wanted[topic] = None
            return
        if topic in self._topics and self._routes.route(topic) is None and not _comes_late(topic):
            self._missing.add(topic)
        else:
            self._missing.discard(topic)
        asking = self._asking.pop(topic, [])
        is_wanted_again = topic in self._ask_again and topic in self._topics
        self._ask_again.discard(topic)
        if is_wanted_again and not self._closed():
            self._want(topic, _ignore, anew=False)
        for on_done in asking:
            on_done(outcome)

    def _read(
        self, topics: list[str], answer: Command | MQMeshError
    ) -> Mapping[str, TopicRoute | MQMeshError]:
        """Outcomes that an answer has for topics.

        Raises:
            MQMeshError: The outcome of all of them.
        """
        if isinstance(answer, MQMeshError):
            raise answer
        if len(topics) == 1:
            route = decode_header(TopicRoute, answer.header)
            brokers = usable_brokers(route.brokers, self._report)
            route = msgspec.structs.replace(route, brokers=brokers)
            found: dict[str, TopicRoute | MQMeshError] = {route.topic: route}
        else:
            routes = decode_header(TopicRoutes, answer.header)
            brokers = usable_brokers(routes.brokers, self._report)
            routes = msgspec.structs.replace(routes, brokers=brokers)
            found = {**routes.of_topics()}
            for topic in routes.missing:
                found[topic] = TopicNotFound(f"no topic {topic!r} on a broker that runs")
        if found.keys().isdisjoint(topics):
            raise RemoteProtocolError(f"a name server's answer has none of {len(topics)} topics")
        for group in brokers:
            learn_keys(self._transport.ring, group.addresses.values())
        return found

    def _report(self, problem: str) -> None:
        """Logs once what each answer brings again."""
        if problem not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(problem)
            _log.warning("%s", problem)


def _comes_late(topic: str) -> bool:
    """Return True for topics that may never exist: not requested at each second or hint."""
    return topic.startswith(RETRY_PREFIX)


def _ignore(_outcome: TopicRoute | MQMeshError) -> None:
    """Ignore the outcome, for callers that only want the cache refreshed."""

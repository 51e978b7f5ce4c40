"""Asks name servers for the routes of a client's topics, and keeps them fresh."""

from collections.abc import Callable, Iterable
from typing import Final

from mqmesh.errors import ClientClosed, MQMeshError, RemoteProtocolError, TopicNotFound
from mqmesh.message import RETRY_PREFIX
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.route import GetRouteRequest, RouteHint, TopicRoute
from mqmesh.sdk.client.namesrv_link import NamesrvLink
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.transport.endpoints import learn_keys
from mqmesh.transport.interface import Transport

LOST_MASTER_MS: Final = 500
"""While a group's master cannot be reached routes are asked for so often."""

OnRoute = Callable[[TopicRoute | MQMeshError], None]


class RouteFinder:
    """Finds topic routes at the name servers; in the client loop.

    Args:
        transport: Of the client.
        addresses: ``host:port`` of each name server.
        options: How often to ask.
        routes: Where what was found is kept.
        on_changed: Told a topic whose route is another one now, before whoever asked for it.
        lost: Which brokers cannot be reached.
        closed: True when nobody is asked any more.

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
        on_changed: Callable[[str], None],
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
        self._topics: set[str] = set()
        self._asking: dict[str, list[OnRoute]] = {}
        self._ask_again: set[str] = set()
        self._missing_planned = False
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
            on_done: Told the route, or ``TopicNotFound``, or why no name server answered.
            anew: It has changed just now: an answer that is on its way may be of before.
        """
        header = encode_header(GetRouteRequest(topic))
        self._topics.add(topic)
        asking = self._asking.get(topic)
        if asking is not None:
            asking.append(on_done)
            if anew:
                self._ask_again.add(topic)
            return
        assert self._link is not None
        self._asking[topic] = [on_done]
        self._link.request(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            header,
            lambda answer: self._take_route(topic, answer),
        )

    def refresh(self, topics: Iterable[str]) -> None:
        """Asks for routes again."""
        for topic in list(topics):
            self.find(topic, _ignore, anew=True)

    def refresh_all(self) -> None:
        """Asks for the routes of all topics again."""
        self.refresh(self._topics)

    def forget(self, topic: str) -> None:
        """Stops refreshing a topic."""
        self._topics.discard(topic)

    def _take_hint(self, hint: RouteHint) -> None:
        missing = [
            topic
            for topic in self._topics
            if self._routes.route(topic) is None
            and (topic in hint.topics or not hint.topics or not _comes_late(topic))
        ]
        self.refresh({*self._routes.concerned(hint), *missing} & self._topics)

    def _refresh_missing(self) -> None:
        self._missing_planned = False
        self._look_for_missing(again=True)

    def _look_for_missing(self, *, again: bool = False) -> None:
        """Asks for missing routes now and then. Idle clients sleep: only while one is missing."""
        missing = {
            topic
            for topic in self._topics
            if self._routes.route(topic) is None and not _comes_late(topic)
        }
        # A group without its master elects another one, or waits for it: hints tell of that, and
        # may be lost.
        lost = {
            topic
            for name in self._lost()
            for topic in self._topics
            if name in self._routes.brokers_of(topic)
        }
        if again:
            self.refresh(missing | lost)
        if (missing or lost) and not (self._missing_planned or self._closed()):
            interval_ms = self._options.missing_route_interval_ms
            delay_ms = min(LOST_MASTER_MS, interval_ms) if lost else interval_ms
            self._missing_planned = True
            self._loop.call_later(delay_ms, self._refresh_missing)

    def _take_route(self, topic: str, answer: Command | MQMeshError) -> None:
        asking = self._asking.pop(topic, [])
        outcome: TopicRoute | MQMeshError
        if self._closed():
            # It came with the last turn; whoever took it would try to connect.
            answer = ClientClosed("the client is closed")
        if isinstance(answer, MQMeshError):
            outcome = answer
        else:
            try:
                outcome = decode_header(TopicRoute, answer.header)
                for group in outcome.brokers:
                    learn_keys(self._transport.ring, group.addresses.values())
            except RemoteProtocolError as error:
                outcome = error
        is_answer = isinstance(outcome, TopicRoute | TopicNotFound)
        self.problem = None if is_answer else outcome  # type: ignore[assignment]
        if isinstance(outcome, TopicRoute) and self._routes.update(outcome):
            self._on_changed(topic)
        for on_done in asking:
            on_done(outcome)
        if topic in self._ask_again:
            self._ask_again.discard(topic)
            if topic in self._topics and not self._closed():
                self.find(topic, _ignore)
        self._look_for_missing()


def _comes_late(topic: str) -> bool:
    """True for topics that may never come: nobody asks for them each second, or at each hint."""
    return topic.startswith(RETRY_PREFIX)


def _ignore(_outcome: TopicRoute | MQMeshError) -> None:
    """For those who do not ask but want the cache refreshed."""

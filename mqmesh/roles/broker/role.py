"""Role of a broker at a time: the master of its group, or a follower.

A role is begun on an open store, builds its features and links out of it, and drops them
when it ends; the store stays. The process reports turns and time to it.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from mqmesh.errors import BrokerError, BrokerNotAvailable, NotMaster, StaleEpoch
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Peer
from mqmesh.protocol.route import DataVersion
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.environment import Environment
from mqmesh.roles.broker.feature import BrokerTurn
from mqmesh.roles.broker.index.indexer_link import TICK_MS as INDEX_TICK_MS
from mqmesh.roles.broker.index.indexer_link import LogExtent
from mqmesh.roles.broker.namesrv_links import GOODBYE_MS, NamesrvLinks
from mqmesh.roles.dispatch import Handler
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Connection

_log = logging.getLogger(__name__)


class BrokerRole:
    """The base of both roles, master and follower.

    Args:
        given: The process.
        broker_id: Id of the broker at the name servers: 0 for the master.

    Attributes:
        features: Features of the role; None while there are none.
        serves: False once the role serves nothing more.
        is_open: False while clients are refused until what the role inherited is confirmed.
        index: Connection to the index process, None if there is none. It outlives the role.
        links: Name servers.
    """

    def __init__(self, given: Environment, broker_id: int) -> None:
        self._given = given
        self._announced: DataVersion | None = None
        self.features: BrokerFeatures | None = None
        self.serves = False
        self.is_open = True
        self.index = given.index
        self.links = NamesrvLinks(
            given.config,
            given.address,
            given.instance_id,
            broker_id=broker_id,
            connect=self._connect,
            clock=given.clock,
            call_soon=partial(given.transport.loop.call_later, 0),
            on_stale=self._on_stale,
            access=given.shell.access,
        )

    def _serve(self, features: BrokerFeatures, handlers: Mapping[RequestCode, Handler]) -> None:
        """Opens commands, and calls the hooks of features from now on."""
        self.features = features
        self.serves = True
        self._open(handlers)

    def _open(self, handlers: Mapping[RequestCode, Handler]) -> None:
        """Serves these commands, those of every role, and metrics."""
        shell = self._given.shell
        shell.dispatch.open(
            {
                RequestCode.GET_BROKER_RUNTIME_INFO: shell.runtime_info,
                **handlers,
                **self._given.served,
            }
        )

    def _rest(self, reason: str, kind: type[BrokerError] = BrokerNotAvailable) -> None:
        """Serve nothing more, and fail requests that wait."""
        if self.serves and self.features is not None:
            self.features.stopping()
        self.serves = False
        self._given.shell.dispatch.refuse(reason, kind)
        self._open({})

    def announce(self) -> None:
        """Registers it with the name servers.

        Raises:
            ConfigError: The address of one is none.
        """
        assert self.features is not None
        self.links.follow(self.features.core, self.features.state.topics)

    def settings_changed(self) -> None:
        """Other settings are in force."""
        if self.features is not None:
            self.features.configured()

    def save(self) -> None:
        """Saves what is saved now and then."""

    def turn_ended(self, turn: BrokerTurn) -> bool:
        """A turn of the loop is over; True if the next has to come at once."""
        features = self.features
        if features is None or not self.serves:
            return False
        if features.state.topics.version is not self._announced:
            self._announced = features.state.topics.version
            self.links.topics_changed()
        again = features.turn_ended(turn)
        if not self.is_open:
            self.open_if_confirmed()
        return again

    def open_if_confirmed(self) -> None:
        """Serve clients from now on, if what the role inherited is confirmed."""

    def tick(self, now_ms: int) -> None:
        """Time went on; monotonic clock."""
        if self.features is not None and self.serves:
            self.features.tick(now_ms)
            self.links.tick()
        self._tick_index()
        if self.index is not None and self.index.is_behind:
            # Only while the log grows: an idle broker is to sleep.
            self._given.transport.loop.call_later(INDEX_TICK_MS, self._tick_index)

    def log_extent(self) -> LogExtent | None:
        """Return the extent of the log that is to be indexed; None while that is not known."""
        return None

    def sample(self) -> None:
        """Does what is done each second."""
        if self.features is not None and self.serves:
            self.features.sample()

    def durable(self) -> None:
        """The log was synced further."""
        if self.features is not None and self.serves:
            self.features.durable()

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """A connection broke."""
        if self.features is not None and self.serves:
            self.features.client_gone(peer, now_ms)

    def say_goodbye(self, tick: Callable[[int], None]) -> None:
        """Finish what was begun and notify name servers, since the broker stops.

        Args:
            tick: Takes a turn of the loop, waiting so many ms at most.
        """
        features, clock = self.features, self._given.clock
        if features is None or not self.serves:
            return
        features.stopping()
        self.save()
        self.links.unregister()
        until_ms = clock.monotonic_ms() + GOODBYE_MS
        while features.core.commit_point.waiting_count or self.links.in_flight:
            now_ms = clock.monotonic_ms()
            if now_ms >= until_ms:
                break
            tick(min(until_ms - now_ms, 20))
            features.durable()
        features.stopped()

    def close(self) -> None:
        """Drops everything that was built."""
        self.features, self.serves = None, False
        self.links.close()

    def _tick_index(self) -> None:
        if self.index is not None and self._given.shell.state == "running":
            self.index.tick()

    def _on_stale(self, error: StaleEpoch) -> None:
        """Another replica is the master: what this one took now would be lost when it follows."""
        if self.serves:
            _log.critical("this broker serves nothing any more: %s", error)
            self._rest(str(error), NotMaster)
            self._given.on_deposed(str(error))

    def _connect(self, address: str, on_connection: Callable[[bool], None]) -> Connection:
        return self._given.transport.connect(endpoint_of(address), on_connection=on_connection)

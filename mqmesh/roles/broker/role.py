"""What a broker is at a time: the master of its group, or a follower.

A role is begun on an open store, builds its context, features and links out of it, and drops them
when it ends; the store stays. The process tells it of turns and of time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from mqmesh.errors import BrokerError, BrokerNotAvailable, NotMaster, StaleEpoch
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.route import DataVersion
from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.context_building import BrokerResources
from mqmesh.roles.broker.feature import BrokerTurn, Feature, Features
from mqmesh.roles.broker.index.indexer_link import TICK_MS as INDEX_TICK_MS
from mqmesh.roles.broker.index.indexer_link import LogExtent
from mqmesh.roles.broker.namesrv_links import GOODBYE_MS, NamesrvLinks
from mqmesh.roles.dispatch import Handler
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Connection

MASTER_ID: Final = 0

_log = logging.getLogger(__name__)


class BrokerRole:
    """What all roles do.

    Args:
        given: What the process gives.
        broker_id: Under which the name servers know it: 0 for the master.

    Attributes:
        context: What handlers use; None while there is none.
        index: Way to the index process, None if there is none. It outlives the role.
        links: Name servers.
    """

    def __init__(self, given: BrokerResources, broker_id: int) -> None:
        self._given = given
        self._features: Features | None = None
        self._announced: DataVersion | None = None
        self.context: BrokerContext | None = None
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

    def _serve(self, context: BrokerContext, features: Sequence[Feature]) -> None:
        """Opens the commands of features, and calls their hooks from now on."""
        self.context = context
        self._features = Features(features, context)
        self._open(self._features.handlers)

    def _open(self, handlers: Mapping[RequestCode, Handler]) -> None:
        """Serves these commands, those of every role, and figures."""
        shell = self._given.shell
        shell.dispatch.open(
            {
                RequestCode.GET_BROKER_RUNTIME_INFO: shell.runtime_info,
                **handlers,
                **self._given.served,
            }
        )

    def _handlers(self) -> Mapping[RequestCode, Handler]:
        """Those of all features."""
        assert self._features is not None
        return self._features.handlers

    def _rest(self, reason: str, kind: type[BrokerError] = BrokerNotAvailable) -> None:
        """Serves nothing more; who waits is told."""
        if self._features is not None:
            self._features.stopping()
        self._features = None
        self._given.shell.dispatch.refuse(reason, kind)
        self._open({})

    @property
    def serves(self) -> bool:
        """False once it serves nothing more."""
        return self._features is not None

    def announce(self) -> None:
        """Registers it with the name servers.

        Raises:
            ConfigError: The address of one is none.
        """
        assert self.context is not None
        self.links.follow(self.context)

    def settings_changed(self) -> None:
        """Other settings are in force."""
        if self.context is not None:
            for feature in FEATURES:
                feature.configured(self.context)

    def save(self) -> None:
        """Saves what is saved now and then."""

    def turn_ended(self, turn: BrokerTurn) -> bool:
        """A turn of the loop is over; True if the next has to come at once."""
        if self._features is None:
            return False
        if self.context is not None and self.context.topics.version is not self._announced:
            self._announced = self.context.topics.version
            self.links.topics_changed()
        return self._features.turn_ended(turn)

    def tick(self, now_ms: int) -> None:
        """Time went on; monotonic clock."""
        if self._features is not None:
            self._features.tick(now_ms)
            self.links.tick()
        self._tick_index()
        if self.index is not None and self.index.is_behind:
            # Only while the log grows: an idle broker is to sleep.
            self._given.transport.loop.call_later(INDEX_TICK_MS, self._tick_index)

    def log_extent(self) -> LogExtent | None:
        """How far the log goes that is to be indexed; None while that is not known."""
        return None

    def sample(self, now_ms: int) -> None:
        """It is time for what is done now and then."""
        if self.context is not None and self._features is not None:
            self.context.stats.sample(now_ms)
            self._features.sample()

    def durable(self) -> None:
        """The log was synced further."""
        if self._features is not None:
            self._features.durable()

    def client_gone(self, peer: bytes, now_ms: int) -> None:
        """A connection broke."""
        if self._features is not None:
            self._features.client_gone(peer, now_ms)

    def say_goodbye(self, tick: Callable[[int], None]) -> None:
        """The broker stops: what was begun is finished, name servers are told.

        Args:
            tick: Takes a turn of the loop, waiting so many ms at most.
        """
        context, features, clock = self.context, self._features, self._given.clock
        if context is None or features is None:
            return
        features.stopping()
        self.save()
        self.links.unregister()
        until_ms = clock.monotonic_ms() + GOODBYE_MS
        while context.commit_point.waiting_count or self.links.in_flight:
            now_ms = clock.monotonic_ms()
            if now_ms >= until_ms:
                break
            tick(min(until_ms - now_ms, 20))
            features.durable()
        features.stopped()

    def close(self) -> None:
        """Drops everything that was built."""
        self.context = self._features = None
        self.links.close()

    def _tick_index(self) -> None:
        if self.index is not None and self._given.shell.state == "running":
            self.index.tick()

    def _on_stale(self, error: StaleEpoch) -> None:
        """Another replica is the master: what this one took now would be lost when it follows."""
        if self._features is not None:
            _log.critical("this broker serves nothing any more: %s", error)
            self._rest(str(error), NotMaster)
            self._given.on_deposed(str(error))

    def _connect(self, address: str, on_connection: Callable[[bool], None]) -> Connection:
        return self._given.transport.connect(endpoint_of(address), on_connection=on_connection)

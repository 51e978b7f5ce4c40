"""The broker's words with its name servers; when to speak is ``registration``'s decision."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from mqmesh.clock import Clock
from mqmesh.errors import MQMeshError, StaleEpoch
from mqmesh.message import AUTO_CREATE_TOPIC
from mqmesh.metrics import Measured, gauge
from mqmesh.protocol.admin import AccessListInfo, GetAccessListRequest
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import (
    BrokerAddress,
    Perm,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    TopicConfig,
    UnregisterBrokerRequest,
)
from mqmesh.roles.access_keeper import AccessKeeper
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.broker.registration import Registration, RegistrationPlan
from mqmesh.roles.broker.topic_state.topic_table import TopicTable

REGISTER_TIMEOUT_MS: Final = 3_000
GOODBYE_MS: Final = 500
"""Time for which a stop waits for name servers, and for the disk."""

_log = logging.getLogger(__name__)


class NamesrvClient(Protocol):
    """Connection to a name server, such as ``mqmesh.transport.zmq.client.CommandClient``."""

    connected: bool

    @property
    def in_flight(self) -> int:
        """Requests without an outcome yet."""

    def request(
        self,
        code: int,
        on_done: Callable[[Command | MQMeshError], None],
        *,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Sends a request; its outcome comes to ``on_done``."""

    def close(self) -> None:
        """Closes the connection."""


Connect = Callable[[str, Callable[[bool], None]], NamesrvClient]


class NamesrvLinks:
    """The broker's connections to its name servers; ``RegistrationPlan`` decides when to speak.

    Args:
        config: Settings of the broker.
        address: Where the broker listens.
        instance_id: Random number of this life of the process.
        broker_id: 0 for the master of the group.
        connect: Makes a connection to ``host:port`` that reports when it stands and breaks.
        clock: Source of time.
        call_soon: Makes the loop call in its next turn.
        on_stale: Called with the reason when a master of a later epoch was there.
        access: Its access list, which catches up with the name servers'; None for none.

    Attributes:
        wiped_write_perm: A name server said that an administrator drains this broker.
    """

    def __init__(
        self,
        config: BrokerConfig,
        address: BrokerAddress,
        instance_id: int,
        *,
        broker_id: int,
        connect: Connect,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        on_stale: Callable[[StaleEpoch], None],
        access: AccessKeeper | None = None,
    ) -> None:
        self._config = config
        self._address = address
        self._instance_id = instance_id
        self._broker_id = broker_id
        self._connect = connect
        self._clock = clock
        self._call_soon = call_soon
        self._on_stale = on_stale
        self._access = access
        self._plan = RegistrationPlan(len(config.namesrv_addr), config.register_broker_interval_ms)
        self._clients: list[NamesrvClient] = []
        self._broker: tuple[Core, TopicTable] | None = None
        self._tick_planned = False
        self.wiped_write_perm = False

    @property
    def registered_count(self) -> int:
        """Name servers that know this broker's topics."""
        return self._plan.registered_count

    @property
    def in_flight(self) -> int:
        """Requests to name servers without an outcome yet."""
        return sum(client.in_flight for client in self._clients if client.connected)

    def follow(self, core: Core, topics: TopicTable) -> None:
        """Registers a broker from now on; connects to every name server when called first.

        Args:
            core: The core of the broker.
            topics: Its topics.

        Raises:
            ConfigError: One of the addresses is none.
        """
        self._broker = core, topics
        if self._clients:
            return
        for index, address in enumerate(self._config.namesrv_addr):
            self._clients.append(self._connect(address, partial(self._on_connection, index)))

    def tick(self) -> None:
        """Sends the registrations that are due."""
        self._tick_planned = False
        if self._broker is None:
            return
        now_ms = self._clock.monotonic_ms()
        core, topics = self._broker
        for registration in self._plan.tick(topics.version, now_ms):
            self._register(core, topics, registration)

    def topics_changed(self) -> None:
        """Registers soon; many changes in one turn of the loop travel together."""
        if not self._tick_planned:
            self._tick_planned = True
            self._call_soon(self.tick)

    def unregister(self) -> None:
        """Report to the name servers that this broker goes, so that no client waits for it."""
        self._broker = None
        config = self._config
        header = encode_header(
            UnregisterBrokerRequest(
                config.cluster_name, config.broker_name, self._broker_id, self._instance_id
            )
        )
        for client in self._clients:
            if client.connected:
                client.request(
                    RequestCode.UNREGISTER_BROKER, _ignore, header=header, timeout_ms=GOODBYE_MS
                )

    def close(self) -> None:
        """Closes the connections."""
        self._broker = None
        for client in self._clients:
            client.close()
        self._clients.clear()

    def _register(self, core: Core, topics: TopicTable, registration: Registration) -> None:
        config = self._config
        with_topics, since = registration.with_topics, registration.since
        names = topics.changes.since(since) if since is not None else []
        if names is None:
            with_topics, since, names = True, None, []
        found = [(name, topics.get(name)) for name in names]
        request = RegisterBrokerRequest(
            config.cluster_name,
            config.broker_name,
            self._broker_id,
            self._address,
            topics.version,
            announced_topics(topics, core.config) if with_topics else None,
            Perm.READ_WRITE.value,
            self._instance_id,
            # Alone in its group it is the master whatever its log has gone through.
            0 if config.ha.mode is HaMode.OFF else core.store.epoch(),
            config.ha.mode is HaMode.AUTO,
            since,
            [topic.config for _, topic in found if topic is not None],
            [name for name, topic in found if topic is None],
        )
        try:
            self._clients[registration.server].request(
                RequestCode.REGISTER_BROKER,
                partial(self._on_answer, registration.server),
                header=encode_header(request),
                timeout_ms=REGISTER_TIMEOUT_MS,
            )
        except MQMeshError as error:
            self._on_answer(registration.server, error)

    def _on_answer(self, server: int, answer: Command | MQMeshError) -> None:
        now_ms = self._clock.monotonic_ms()
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            response = decode_header(RegisterBrokerResponse, answer.header)
        except MQMeshError as error:
            _log.warning("name server %s: %s", self._config.namesrv_addr[server], error)
            self._plan.on_failure(server, now_ms)
            if isinstance(error, StaleEpoch):
                self._on_stale(error)
            return
        self.wiped_write_perm = response.wiped_write_perm
        self._plan.on_answer(server, response, now_ms)
        if self._access is not None and response.access_version > self._access.version:
            self._ask_access_list(server, self._access)
        self.tick()

    def _ask_access_list(self, server: int, access: AccessKeeper) -> None:
        on_answer = partial(self._on_access_list, server, access)
        try:
            self._clients[server].request(
                RequestCode.GET_ACCESS_LIST,
                on_answer,
                header=encode_header(GetAccessListRequest(access.version)),
                timeout_ms=REGISTER_TIMEOUT_MS,
            )
        except MQMeshError as error:
            on_answer(error)

    def _on_access_list(
        self, server: int, access: AccessKeeper, answer: Command | MQMeshError
    ) -> None:
        where = self._config.namesrv_addr[server]
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            access.catch_up(decode_header(AccessListInfo, answer.header).text)
        except MQMeshError as error:
            # It is asked again with the next registration.
            _log.error("the access list of name server %s is not taken: %s", where, error)

    def _on_connection(self, server: int, connected: bool) -> None:
        self._plan.on_connection(server, connected, self._clock.monotonic_ms())
        _log.info(
            "name server %s is %s",
            self._config.namesrv_addr[server],
            "connected" if connected else "gone",
        )
        self.tick()


def announced_topics(table: TopicTable, config: BrokerConfig) -> list[TopicConfig]:
    """The topic table as name servers get it.

    A broker that creates topics by itself adds the pattern they are made by, so that
    producers know where the first message of a new topic may go.
    """
    topics = table.configs()
    if config.auto_create_topic_enable:
        queues = config.default_topic_queue_nums
        topics.append(TopicConfig(AUTO_CREATE_TOPIC, queues, queues))
    return topics


def _ignore(outcome: Command | MQMeshError) -> None:
    """Take no note of an answer: this broker leaves."""


REGISTRATION_METRICS: Final[tuple[Measured[NamesrvLinks], ...]] = (
    gauge(
        "namesrvs_registered",
        "name servers that know this broker",
        lambda links: links.registered_count,
    ),
    gauge("wiped_write_perm", "whether it is drained", lambda links: links.wiped_write_perm),
)

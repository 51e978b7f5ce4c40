"""Administration of a cluster: questions to name servers and brokers, and changes of topics."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import msgspec

from mqmesh.errors import (
    AuthenticationFailed,
    ClientClosed,
    EndpointUnreachable,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    NotMaster,
    RemoteProtocolError,
    SystemBusy,
    TooManyOpenFiles,
    TopicNotFound,
    TransportError,
    UnsupportedCommand,
)
from mqmesh.hosts import is_address
from mqmesh.message import check_topic
from mqmesh.metrics import MetricReading, Readings
from mqmesh.protocol.admin import (
    MAX_TOPICS_PER_CREATION,
    CreateTopicsRequest,
    GetTopicConfigRequest,
    RoleInfo,
    RuntimeInfo,
    RuntimeInfoRequest,
    TopicConfigs,
    TopicStats,
    TopicStatsRequest,
    UpdateTopicRequest,
)
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.gateway import GatewayClient, GatewayClients, GatewayClientsRequest
from mqmesh.protocol.route import (
    MAX_QUEUES_PER_TOPIC,
    BrokerAddress,
    BrokerData,
    ClusterInfo,
    DeleteTopicRequest,
    GetClusterRequest,
    GetRouteRequest,
    Perm,
    TopicConfig,
    TopicList,
    TopicListRequest,
    TopicRoute,
)
from mqmesh.protocol.snapshots import CreateSnapshotRequest, SnapshotInfo
from mqmesh.protocol.topic_schema import (
    MAX_SCHEMA_CHARACTERS,
    PutTopicSchemaRequest,
    TopicSchema,
    TopicSchemaRequest,
)
from mqmesh.sdk.admin.json_schema import schema_of
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.options import (
    DEFAULT_NAMESRV,
    NamesrvAddr,
    client_transport,
    find_namespace,
    namesrv_addresses,
)
from mqmesh.security.keys import Credentials
from mqmesh.transport.endpoints import endpoint_of, learn_keys, usable_brokers
from mqmesh.transport.interface import Channel, Transport

NAMESRV_TIMEOUT_MS: Final = 1_000
"""Longest wait for one name server, when there is another one to ask."""
MASTER_ID: Final = 0
ANNOUNCE_TIMEOUT_MS: Final = 2_000
SNAPSHOT_TIMEOUT_MS: Final = 600_000
ANNOUNCE_FIRST_PAUSE_S: Final = 0.001
ANNOUNCE_PAUSE_S: Final = 0.01
"""The longest pause between looks at a name server."""
MOST_RESTARTS: Final = 3
"""Most restarts of a paged listing, when the other side has forgotten its place."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class TopicDeletion(msgspec.Struct, frozen=True):
    """Result of a topic's deletion.

    Attributes:
        brokers: Broker groups that forgot the topic.
        silent_namesrvs: Name servers that did not answer; they learn it from the brokers.
    """

    brokers: list[str]
    silent_namesrvs: list[str]


class AdminClient:
    """Administration, one request at a time, in the caller's thread.

    Threads may share a client: their requests wait for one another.

    Args:
        namesrv_addr: ``host:port`` of the name servers, as a list, or as a text separated by
            commas or semicolons.
        timeout_ms: For each answer, 1 to 3,600,000 ms.
        broker_name: The only broker group that requests go to; all by default.
        transport: The world; ZeroMQ by default.
        credentials, namespace: As of ``ClientOptions``.

    Attributes:
        namespace: Of the client; "" for none.

    Raises:
        InvalidArgument: An address or namespace that is none.
        ConfigError: The file of credentials cannot be used.
    """

    def __init__(
        self,
        namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV,
        *,
        timeout_ms: int = 3_000,
        broker_name: str = "",
        transport: Transport | None = None,
        credentials: str | Credentials = "",
        namespace: str | None = None,
    ) -> None:
        self._namesrvs = namesrv_addresses(namesrv_addr)
        self._timeout_ms = timeout_ms
        self._broker_name = broker_name
        self.namespace = find_namespace(namespace)
        self._transport = client_transport(transport, credentials, namespace=self.namespace)
        self._channels: dict[str, Channel] = {}
        self._closed = False
        self._lock = ranked_lock(LockRank.ADMIN)

    def close(self) -> None:
        """Closes all connections; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for channel in self._channels.values():
                    channel.close()
                self._channels.clear()
                self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # ---- Looking ---------------------------------------------------------------------

    def ping(self, endpoint: str) -> RoleInfo:
        """Return a process's report of itself.

        Args:
            endpoint: ``host:port`` or any ZeroMQ endpoint.

        Raises:
            TransportError: No answer.
            BrokerError, ProtocolError: A bad one.
        """
        answer = self._request(endpoint_of(endpoint), RequestCode.PING, b"")
        return decode_header(RoleInfo, answer.header)

    def cluster(self) -> ClusterInfo:
        """Return all broker groups that a name server knows.

        Raises:
            TransportError: No name server answers.
        """
        found = self._ask_namesrv(
            RequestCode.GET_BROKER_CLUSTER_INFO, GetClusterRequest(), ClusterInfo
        )
        return msgspec.structs.replace(found, brokers=self._usable(found.brokers))

    def topics(self) -> list[str]:
        """Names of all topics, sorted.

        Raises:
            TransportError: No name server answers.
        """
        code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        return sorted(self._ask_namesrv(code, TopicListRequest(), TopicList).topics)

    def route(self, topic: str) -> TopicRoute:
        """Return the brokers that carry a topic.

        Raises:
            TopicNotFound: No name server knows it.
            TransportError: No name server answers.
        """
        request = GetRouteRequest(check_topic(topic))
        found = self._ask_namesrv(RequestCode.GET_ROUTEINFO_BY_TOPIC, request, TopicRoute)
        return msgspec.structs.replace(found, brokers=self._usable(found.brokers))

    def topic_configs(self, topic: str = "") -> dict[str, list[TopicConfig]]:
        """Return the configuration of a topic, or of all topics, by broker group.

        Raises:
            TopicNotFound: No broker has the topic.
            TransportError: A name server or broker does not answer.
            BrokerError: A broker refuses.
        """
        header = encode_header(GetTopicConfigRequest(check_topic(topic) if topic else ""))

        def ask(endpoint: str) -> list[TopicConfig]:
            try:
                answer = self._request(endpoint, RequestCode.GET_TOPIC_CONFIG, header)
            except TopicNotFound:
                return []
            return decode_header(TopicConfigs, answer.header).topics

        found = self._each(self._masters(), ask)
        if topic and not any(found.values()):
            raise TopicNotFound(f"no topic {topic!r} on a broker that runs")
        return {name: configs for name, configs in found.items() if configs or not topic}

    def topic_stats(self, topic: str) -> dict[str, TopicStats]:
        """Return where each queue of a topic begins and ends, by broker group.

        Raises:
            TopicNotFound: No broker has it.
            TransportError: A name server or broker does not answer.
        """
        carriers = {queue.broker_name for queue in self.route(topic).queues}
        code = RequestCode.GET_TOPIC_STATS_INFO
        return self.ask_masters(code, TopicStatsRequest(topic), TopicStats, carriers)

    def runtime_info(self, broker_name: str = "") -> dict[str, Readings]:
        """Metrics of every master, by broker group; ``docs/reference/metrics.md`` lists them.

        Args:
            broker_name: Only of this group.

        Raises:
            NoRoute: No master is known, or none of that group.
            TransportError: A name server or broker does not answer.
        """
        masters = self._masters()
        if broker_name:
            masters = {broker_name: self._master_of(broker_name, masters)}
        return self._each(masters, self._metrics)

    def role_info(self, endpoint: str) -> Readings:
        """Return the metrics of one process of any role.

        Args:
            endpoint: ``host:port`` or any ZeroMQ endpoint.

        Raises:
            TransportError: No answer.
            BrokerError, ProtocolError: A bad one.
        """
        return self._metrics(endpoint_of(endpoint))

    def gateway_clients(self, endpoint: str) -> list[GatewayClient]:
        """Return RocketMQ's clients at a gateway, by client id.

        Args:
            endpoint: Where the gateway answers, ``ipc://`` and the path of its socket.

        Raises:
            TransportError: No answer.
            BrokerError, ProtocolError: A bad one.
        """
        found: list[GatewayClient] = []
        code = RequestCode.GET_GATEWAY_CLIENTS
        while True:
            after = (found[-1].client_id, found[-1].user) if found else ("", "")
            header = encode_header(GatewayClientsRequest(*after, self.namespace))
            answer = self._request(endpoint_of(endpoint), code, header)
            page = decode_header(GatewayClients, answer.header)
            found += page.clients
            if not page.more:
                return found
            last = page.clients[-1:]
            check_advance(endpoint, after, (last[0].client_id, last[0].user) if last else ("", ""))

    def _metrics(self, endpoint: str) -> Readings:
        found: list[MetricReading] = []
        request, restarts = RuntimeInfoRequest(), 0
        while True:
            code, header = RequestCode.GET_BROKER_RUNTIME_INFO, encode_header(request)
            page = decode_header(RuntimeInfo, self._request(endpoint, code, header).header)
            if request.listing and page.listing != request.listing:
                found, restarts = [], restarts + 1
                check_restarts(endpoint, restarts)
            found += page.metrics
            if page.next_place < 0:
                return Readings(found)
            if page.listing == request.listing:
                check_advance(endpoint, request.place, page.next_place)
            request = RuntimeInfoRequest(page.listing, page.next_place)

    def ask_masters(
        self,
        code: RequestCode,
        request: msgspec.Struct,
        kind: type[_T],
        broker_names: Collection[str] | None = None,
    ) -> dict[str, _T]:
        """Asks masters with a command that has no method of its own here.

        Args:
            code: Command that only reads; ``mqmesh/protocol/commands.py`` lists them.
            request: Header of its request.
            kind: Type of its answer's header.
            broker_names: Only these broker groups; those without a master are left out.

        Returns:
            Answers, by broker group.

        Raises:
            NoRoute: No master is known.
            TransportError: A name server or broker does not answer.
            BrokerError, ProtocolError: A broker refuses, or gives a bad answer.
        """
        header = encode_header(request)
        masters = self._masters()
        if broker_names is not None:
            masters = {name: where for name, where in masters.items() if name in broker_names}
        return self._each(
            masters,
            lambda endpoint: decode_header(kind, self._request(endpoint, code, header).header),
        )

    # ---- Changing --------------------------------------------------------------------

    def create_topic(
        self,
        topic: str | TopicConfig,
        *,
        queues: int | None = None,
        perm: Perm | None = None,
        order: bool | None = None,
        exist_ok: bool = False,
    ) -> dict[str, TopicConfig]:
        """Creates a topic on every master, as ``put_topic`` does, if it is a new one.

        Masters that have it with these very settings have them from a former try that failed half
        way: only the others get the request then, so that repeating the call finishes it.

        Args:
            topic: Its name; or a ``TopicConfig``, which says the next three as well.
            queues: Read and write queues on each broker, 1 to 65,536; 4 by default.
            perm: Permissions; reading and writing by default.
            order: The route keeps the queues of a broker that is down; by default it does not.
            exist_ok: Where the topic exists it is left as it is, and is no error unless it differs
                from ``queues``, ``perm`` or ``order``, where these are given. One that differs from
                a ``TopicConfig`` is no error: compare the returned ones.

        Returns:
            Settings that are in force, by broker group.

        Raises:
            InvalidArgument: The name is illegal, or ``queues``; or, with ``exist_ok``, the topic
                exists with another value of ``queues``, ``perm`` or ``order``: nothing was changed.
            BrokerError: It exists, among other reasons.
            NoRoute, TransportError: As for ``put_topic``.
        """
        given: dict[str, Any] = {}
        if isinstance(topic, str):
            given = _given_settings(queues, perm, order)
            topic = TopicConfig(topic, **given)
        check_topic(topic.topic)
        masters = self._masters()
        there: dict[str, TopicConfig] = {}
        with suppress(TopicNotFound):
            there = {name: one for name, (one,) in self.topic_configs(topic.topic).items()}
        if exist_ok:
            _check_left(there, given)
        kept, missing = left_to_make(masters, there, topic, exist_ok=exist_ok)
        request = UpdateTopicRequest(topic, must_be_new=True)
        return kept | self._put_topic(masters, dict.fromkeys(missing, request))

    def create_topics(
        self,
        topics: Iterable[str | TopicConfig],
        *,
        queues: int | None = None,
        perm: Perm | None = None,
        order: bool | None = None,
        exist_ok: bool = False,
    ) -> dict[str, dict[str, TopicConfig]]:
        """Creates many topics on every master: one request for each 10,000 topics.

        A master makes all topics of a request, or none. Repeating a call that failed finishes it,
        as for ``create_topic``.

        Args:
            topics: Names, or ``TopicConfig``s, which say the next three as well; each topic once.
            queues, perm, order, exist_ok: Of each topic, as for ``create_topic``.

        Returns:
            Settings that are in force, by topic and broker group.

        Raises:
            InvalidArgument: As for ``create_topic``; or a topic is named twice.
            BrokerError, NoRoute, TransportError: As for ``create_topic``.
        """
        given = _given_settings(queues, perm, order)
        wanted: dict[str, TopicConfig] = {}
        limits: dict[str, dict[str, Any]] = {}
        for one in [topics] if isinstance(topics, str) else topics:
            config = TopicConfig(one, **given) if isinstance(one, str) else one
            if check_topic(config.topic) in wanted:
                raise InvalidArgument(f"topic {config.topic!r} is named twice")
            wanted[config.topic] = config
            limits[config.topic] = given if isinstance(one, str) else {}
        if not wanted:
            return {}
        masters = self._masters()
        there: dict[str, dict[str, TopicConfig]] = {name: {} for name in wanted}
        for broker_name, configs in self.topic_configs().items():
            for config in configs:
                if config.topic in there:
                    there[config.topic][broker_name] = config
        done: dict[str, dict[str, TopicConfig]] = {}
        missing: dict[str, list[TopicConfig]] = {name: [] for name in masters}
        for name, config in wanted.items():
            if exist_ok:
                _check_left(there[name], limits[name])
            done[name], left = left_to_make(masters, there[name], config, exist_ok=exist_ok)
            for broker_name in left:
                missing[broker_name].append(config)
        self._create_all(masters, {name: some for name, some in missing.items() if some})
        for broker_name, configs in missing.items():
            for config in configs:
                done[config.topic][broker_name] = config
        return done

    def put_topic(
        self,
        config: TopicConfig | Mapping[str, TopicConfig],
        *,
        hide_messages: bool = False,
    ) -> dict[str, TopicConfig]:
        """Creates or changes a topic on every master.

        It returns when the name servers' routes have it: a message that is sent next
        finds the topic. If they take too long it returns all the same.

        Args:
            config: Wanted; or, where it is not to be the same everywhere, by broker group: masters
                of others are left alone then.
            hide_messages: Consumers may lose queues with unread messages: fewer read queues, or no
                permission to read. The messages are back with the queues.

        Returns:
            Settings that are now in force, by broker group.

        Raises:
            InvalidArgument: The name is illegal.
            NoRoute: No master is known.
            BrokerError, TransportError: A broker refused or did not answer; the sentence
                says which ones had done it before. Repeating the call is safe. A broker refuses
                a change that would hide unread messages, and says how many.
        """
        for one in [config] if isinstance(config, TopicConfig) else config.values():
            check_topic(one.topic)
        masters = self._masters()
        wanted = dict.fromkeys(masters, config) if isinstance(config, TopicConfig) else config
        requests = {
            name: UpdateTopicRequest(one, may_hide=hide_messages) for name, one in wanted.items()
        }
        return self._put_topic(masters, requests)

    def topic_schema(self, topic: str) -> str:
        """Return the document about the bodies of a topic, a JSON Schema; "" if it has none.

        Raises:
            TopicNotFound: No broker has the topic.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        request = TopicSchemaRequest(check_topic(topic))
        code, carriers = RequestCode.GET_TOPIC_SCHEMA, self.topic_configs(topic)
        found = self.ask_masters(code, request, TopicSchema, carriers)
        return next((one.schema for one in found.values() if one.schema), "")

    def put_topic_schema(self, topic: str, schema: str) -> None:
        """Stores the schema of a topic's bodies at every master that has the topic.

        Brokers check no message by it.

        Args:
            topic: Topic.
            schema: A JSON Schema of up to 65,536 characters; empty to remove it.

        Raises:
            InvalidArgument: It is longer, or no JSON Schema that `mqmesh topic check` understands.
            TopicNotFound: No broker has the topic.
            BrokerError, TransportError: As for ``put_topic``. Repeating the call is safe.
        """
        if len(schema) > MAX_SCHEMA_CHARACTERS:
            raise InvalidArgument(
                f"the schema has {len(schema):,} characters; {MAX_SCHEMA_CHARACTERS:,} are allowed"
            )
        if schema:
            schema_of(schema)
        header = encode_header(PutTopicSchemaRequest(check_topic(topic), schema))
        carriers = self.topic_configs(topic)
        masters = {name: where for name, where in self._masters().items() if name in carriers}
        code = RequestCode.PUT_TOPIC_SCHEMA
        self._each(masters, lambda endpoint: self._request(endpoint, code, header), changes=True)

    def delete_topic(self, topic: str) -> TopicDeletion:
        """Deletes a topic and its messages from every master, then from the name servers.

        Where the client is for one broker group, from that one only.

        Raises:
            InvalidArgument: The name is illegal.
            TopicNotFound: The topic does not exist.
            BrokerError, TransportError: As for ``put_topic``.
        """
        request = encode_header(DeleteTopicRequest(check_topic(topic)))
        carriers = {queue.broker_name for queue in self.route(topic).queues}
        masters = {name: where for name, where in self._masters().items() if name in carriers}
        if self._broker_name and not masters:
            raise TopicNotFound(f"no topic {topic!r} on broker {self._broker_name}")

        def delete(endpoint: str) -> None:
            try:
                self._request(endpoint, RequestCode.DELETE_TOPIC_IN_BROKER, request)
            except TopicNotFound:
                return  # a former try got so far

        deleted = self._each(masters, delete, changes=True)
        silent = []
        for address in () if self._broker_name else self._namesrvs:
            try:
                self._request(
                    endpoint_of(address),
                    RequestCode.DELETE_TOPIC_IN_NAMESRV,
                    request,
                    NAMESRV_TIMEOUT_MS,
                )
            except TopicNotFound:
                continue
            except TransportError:
                silent.append(address)
        return TopicDeletion(list(deleted), silent)

    def create_snapshot(
        self, broker_name: str, *, archive: str = "", timeout_ms: int = SNAPSHOT_TIMEOUT_MS
    ) -> SnapshotInfo:
        """Makes a snapshot of a broker's store, on the broker's machine.

        Args:
            broker_name: Broker group; its master makes it.
            archive: Archive that takes it in and deletes it then; the broker keeps it until then,
                as far as there is room. Empty for none: newer snapshots replace it.
            timeout_ms: Until it is whole, 1 to 3,600,000 ms.

        Raises:
            NoRoute: No master of that group is known.
            SystemBusy: It is making one already.
            BrokerError, TransportError: It could not, or did not answer.
        """
        answer = self._request(
            self._master_of(broker_name, self._masters()),
            RequestCode.CREATE_SNAPSHOT,
            encode_header(CreateSnapshotRequest(archive)),
            timeout_ms,
        )
        return decode_header(SnapshotInfo, answer.header)

    # ---- Helpers ---------------------------------------------------------------------

    def _put_topic(
        self, masters: dict[str, str], wanted: Mapping[str, UpdateTopicRequest]
    ) -> dict[str, TopicConfig]:
        done = self._put(masters, RequestCode.UPDATE_AND_CREATE_TOPIC, wanted, TopicConfig)
        if done:
            self._wait_announced(done)
        return done

    def _create_all(
        self, masters: Mapping[str, str], missing: Mapping[str, Sequence[TopicConfig]]
    ) -> None:
        at = {masters[name]: configs for name, configs in missing.items()}

        def create(endpoint: str) -> None:
            configs = at[endpoint]
            for start in range(0, len(configs), MAX_TOPICS_PER_CREATION):
                some = list(configs[start : start + MAX_TOPICS_PER_CREATION])
                header = encode_header(CreateTopicsRequest(some))
                self._request(endpoint, RequestCode.CREATE_TOPICS, header)

        self._each({name: masters[name] for name in missing}, create, changes=True)
        if missing:
            # A broker registers changes in their order.
            self._wait_announced({name: configs[-1] for name, configs in missing.items()})

    def _put(
        self,
        masters: dict[str, str],
        code: int,
        wanted: Mapping[str, msgspec.Struct],
        kind: type[_T],
    ) -> dict[str, _T]:
        """Has each master take its settings; returns those in force, by broker group."""
        headers = {self._master_of(name, masters): encode_header(wanted[name]) for name in wanted}

        def put(endpoint: str) -> _T:
            return decode_header(kind, self._request(endpoint, code, headers[endpoint]).header)

        return self._each({name: masters[name] for name in wanted}, put, changes=True)

    def _wait_announced(self, configs: dict[str, TopicConfig]) -> None:
        """Waits until every name server that answers has the brokers' new configuration."""
        clock = self._transport.clock
        end_ms = clock.monotonic_ms() + ANNOUNCE_TIMEOUT_MS
        for address in self._namesrvs:
            pause_s = ANNOUNCE_FIRST_PAUSE_S
            while clock.monotonic_ms() < end_ms:
                try:
                    if self._announces(endpoint_of(address), configs):
                        break
                except TopicNotFound:
                    pass
                except MQMeshError:
                    break
                self._transport.pause(pause_s)
                pause_s = min(2 * pause_s, ANNOUNCE_PAUSE_S)

    def _announces(self, endpoint: str, configs: dict[str, TopicConfig]) -> bool:
        code = RequestCode.GET_ROUTEINFO_BY_TOPIC
        for topic in {config.topic for config in configs.values()}:
            header = encode_header(GetRouteRequest(topic))
            answer = self._request(endpoint, code, header, NAMESRV_TIMEOUT_MS)
            route = decode_header(TopicRoute, answer.header)
            queues = {
                one.broker_name: (one.read_queue_nums, one.write_queue_nums) for one in route.queues
            }
            for name, config in configs.items():
                counts = config.read_queue_nums, config.write_queue_nums
                if config.topic == topic and queues.get(name) != counts:
                    return False
        return True

    def _usable(self, brokers: list[BrokerData]) -> list[BrokerData]:
        found = usable_brokers(brokers, _log.warning)
        for group in found:
            learn_keys(self._transport.ring, group.addresses.values())
        return found

    def _masters(self) -> dict[str, str]:
        """Return the endpoint of each group's master; of the client's group only, if it has one."""
        found = {
            name: endpoint_of(address.tcp)
            for name, address in masters_of(self.cluster().brokers).items()
        }
        if not found:
            raise NoRoute(f"name server {self._namesrvs[0]} knows no running broker")
        if not self._broker_name:
            return dict(sorted(found.items()))
        return {self._broker_name: self._master_of(self._broker_name, found)}

    def _master_of(self, broker_name: str, masters: dict[str, str]) -> str:
        if broker_name not in masters:
            known = ", ".join(sorted(masters))
            raise NoRoute(f"no master is known of broker group {broker_name!r}; there are {known}")
        return masters[broker_name]

    def _ask_namesrv(self, code: int, request: msgspec.Struct, kind: type[_T]) -> _T:
        header = encode_header(request)
        alone = len(self._namesrvs) == 1
        timeout_ms = self._timeout_ms if alone else min(NAMESRV_TIMEOUT_MS, self._timeout_ms)
        failures: list[TransportError] = []
        for address in self._namesrvs:
            try:
                answer = self._request(endpoint_of(address), code, header, timeout_ms)
            except UnsupportedCommand as error:
                text = f"{address} is no name server: {error}"
                raise UnsupportedCommand(text, code=error.code) from error
            except TransportError as error:
                failures.append(error)
                continue
            # The name server that answered is the first from now on. Another list, because other
            # threads may be going through this one.
            self._namesrvs = sorted(self._namesrvs, key=lambda one: one != address)
            return decode_header(kind, answer.header)
        raise no_namesrv_answers(failures)

    def _each(
        self, masters: dict[str, str], work: Callable[[str], _T], *, changes: bool = False
    ) -> dict[str, _T]:
        """Asks each master; a failure names its master, and those changed before."""
        done: dict[str, _T] = {}
        for name, endpoint in masters.items():
            try:
                done[name] = work(endpoint)
            except MQMeshError as error:
                before = f" (done already at {', '.join(done)})" if done and changes else ""
                error.args = (f"broker {name}: {error}{before}", *error.args[1:])
                raise
        return done

    def _request(
        self,
        endpoint: str,
        code: int,
        header: bytes,
        timeout_ms: int | None = None,
        parts: Sequence[bytes | memoryview] = (),
    ) -> Command:
        try:
            return self._ask_channel(endpoint, code, header, timeout_ms, parts)
        except NotMaster as error:
            if not is_address(error.master):
                raise
            # The route was older than an election.
            return self._ask_channel(endpoint_of(error.master), code, header, timeout_ms, parts)

    def _ask_channel(
        self,
        endpoint: str,
        code: int,
        header: bytes,
        timeout_ms: int | None,
        parts: Sequence[bytes | memoryview],
    ) -> Command:
        self._find_key(endpoint)
        with self._lock:  # a channel serves one request at a time
            if self._closed:
                raise ClientClosed("the admin client is closed")
            channel = self._channels.get(endpoint)
            if channel is None:
                channel = self._channels[endpoint] = self._transport.channel(endpoint)
            return channel.request(
                code, *parts, header=header, timeout_ms=timeout_ms or self._timeout_ms
            )

    def _find_key(self, endpoint: str) -> None:
        """Find the key that a server must prove, if its endpoint is not known yet."""
        ring = self._transport.ring
        own = {endpoint_of(address) for address in self._namesrvs}
        if ring is None or endpoint in self._channels or endpoint in own or ring.knows(endpoint):
            return
        with suppress(TransportError):  # the request itself reports the error then
            self.cluster()


def no_namesrv_answers(failures: Sequence[TransportError]) -> TransportError:
    """Returns the error of a request that no name server answered.

    Args:
        failures: Errors of the name servers, in the order of the requests; at least one.

    Returns:
        The first refusal of a key or for want of one, since nothing else matters then; else an
        error of the last one's class that names all reasons.
    """
    for failure in failures:
        if isinstance(failure, AuthenticationFailed | TooManyOpenFiles):
            return failure
    # A server that ended a handshake runs, and the message says what it may want.
    is_there = any(isinstance(one, EndpointUnreachable) and one.is_known for one in failures)
    advice = "" if is_there else "; is the cluster running? `mqmesh up` starts one"
    error = type(failures[-1])(f"no name server answers ({'; '.join(map(str, failures))}){advice}")
    error.__cause__ = failures[-1]
    return error


def check_advance(endpoint: str, before: object, after: object) -> None:
    """Check that a page of a listing ends behind the one before it.

    Args:
        endpoint: Of the process that answered.
        before: End of the page before; of a type that can be compared.
        after: End of this one.

    Raises:
        RemoteProtocolError: It does not: asking for the next page would never end.
    """
    if not before < after:  # type: ignore[operator]
        raise RemoteProtocolError(
            f"{endpoint} has more of its listing, but the page behind {before!r:.100} ends at "
            f"{after!r:.100}"
        )


def check_restarts(endpoint: str, restarts: int) -> None:
    """Checks how often a listing was restarted, since half of it would pass for all.

    Raises:
        SystemBusy: Too often.
    """
    if restarts > MOST_RESTARTS:
        raise SystemBusy(
            f"{endpoint} forgot {restarts} times where its listing was: it keeps a few, and too "
            "many ask for pages at the same time (exporters, monitors, group list); ask again"
        )


def _given_settings(queues: int | None, perm: Perm | None, order: bool | None) -> dict[str, Any]:
    """Return the settings of a topic that were given, by their names in ``TopicConfig``."""
    given: dict[str, Any] = {}
    if queues is not None:
        if type(queues) is not int or not 1 <= queues <= MAX_QUEUES_PER_TOPIC:
            raise InvalidArgument(
                f"queues must be an int of 1 to {MAX_QUEUES_PER_TOPIC}, not {queues!r:.100}"
            )
        given |= {"read_queue_nums": queues, "write_queue_nums": queues}
    if perm is not None:
        given["perm"] = int(perm)
    if order is not None:
        given["order"] = order
    return given


def _check_left(there: Mapping[str, TopicConfig], given: Mapping[str, Any]) -> None:
    """Check that topics that are left as they are have the settings that were given.

    Raises:
        InvalidArgument: One has another value.
    """
    for broker_name, config in there.items():
        differing = {
            key: getattr(config, key) for key in given if getattr(config, key) != given[key]
        }
        if differing:
            found = ", ".join(f"{key} {value}" for key, value in differing.items())
            wanted = ", ".join(f"{key} {given[key]}" for key in differing)
            raise InvalidArgument(
                f"topic {config.topic!r} exists on {broker_name} with {found}, not {wanted}; it "
                "was left as it is (put_topic changes it)"
            )


def left_to_make(
    masters: Iterable[str], there: Mapping[str, _T], wanted: _T, *, exist_ok: bool
) -> tuple[dict[str, _T], list[str]]:
    """Return the settings that stay as they are, and the masters that have to make new ones.

    Args:
        masters: Broker groups.
        there: Settings of that name that some of the masters have.
        wanted: Settings to make.
        exist_ok: True: all present settings stay. False: only those equal to ``wanted``, which a
            former try has made.

    Returns:
        The settings that stay, by broker group; and the masters that have to make new ones. If
        there is no such master, and ``exist_ok`` is False, all masters: each then refuses, because
        the settings exist.
    """
    kept = {name: one for name, one in there.items() if exist_ok or one == wanted}
    missing = [name for name in masters if name not in kept]
    return (kept, missing) if missing or exist_ok else ({}, list(masters))


def masters_of(brokers: Iterable[BrokerData]) -> dict[str, BrokerAddress]:
    """Address of each broker group's master, where there is one, by name."""
    return {
        broker.broker_name: broker.addresses[MASTER_ID]
        for broker in brokers
        if MASTER_ID in broker.addresses
    }

"""Collection of metrics: queries the processes of a cluster, each with a deadline.

Processes are queried at the same time, over ZeroMQ. One that does not answer is reported as
``mqmesh_up`` 0 and delays the others by no more than ``timeout_ms``.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import MQMeshError
from mqmesh.metrics import MetricKind, Readings
from mqmesh.protocol.route import BrokerData
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.families import ExportedMetric, Families, Series
from mqmesh.roles.exporter.globs import Globs
from mqmesh.roles.exporter.names import (
    NODE_LABELS,
    Node,
    broker_series,
    group_series,
    metric_series,
)
from mqmesh.roles.exporter.rates import DayTotals, Rates
from mqmesh.roles.exporter.rocketmq4 import RocketMQ4Names
from mqmesh.roles.supervisor.run_file import RoleEntry
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.client.options import WHOLE_CLUSTER, client_transport, find_credentials

NO_CLUSTER: Final = "DefaultCluster"
"""Cluster of processes that know no name of theirs."""
UNKNOWN: Final = "process"
"""Type of a process that has never said what it is."""

_log = logging.getLogger(__name__)


class _NodeAnswer(msgspec.Struct, frozen=True):
    """Answer of a process; no readings from one that did not answer."""

    node: Node
    readings: Readings | None
    series: list[Series]
    groups_left_out: int = 0


AskAll = Callable[[Callable[[Node], _NodeAnswer], Iterable[Node]], Iterable[_NodeAnswer]]


class Collector:
    """Collector of all metrics of a cluster; used by one thread at a time.

    Args:
        config: Settings.
        clock: Source of time.
        others: Processes that are to be there, whether name servers know them or not.
        ask_all: Asks all of many nodes, several at the same time, like ``map``.
        connect: Makes an administration client for an endpoint ("" for the name servers),
            restricted to a broker group unless that is empty.
        known: Brokers by endpoint, and when name servers knew them last, wall clock; kept up to
            date, so that its owner misses those that are gone already.

    Raises:
        ConfigError: The file of credentials cannot be used.
    """

    def __init__(
        self,
        config: ExporterConfig,
        clock: Clock,
        others: Callable[[], Iterable[RoleEntry]] = tuple,
        ask_all: AskAll = map,
        connect: Callable[[str, str], GroupAdmin] | None = None,
        known: dict[str, tuple[Node, int]] | None = None,
    ) -> None:
        if connect is None:
            find_credentials(config.credentials)  # or no look would ever go well
        self._config = config
        self._clock = clock
        self._connect = connect or self._connect_by_zmq
        self._globs = Globs(config.topic_regex, config.group_regex)
        self._rates = Rates()
        self._rocketmq4 = RocketMQ4Names(self._rates, DayTotals())
        # One client for each process, since a client is of one thread at a time.
        self._clients: dict[tuple[str, str], GroupAdmin] = {}
        self._brokers: list[BrokerData] = []
        self._known = {} if known is None else known
        self._silent: set[str] = set()
        # A process that does not answer has the names that it gave before.
        self._named_nodes: dict[str, Node] = {}
        self._keys = dict(config.server_keys)
        self._others = others
        self._ask_all = ask_all

    def close(self) -> None:
        """Closes all connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def collect(self) -> Families:
        """Queries all processes, and waits for the answers."""
        began_ms = self._clock.monotonic_ms()
        names = self._config.namesrv_addr
        self._brokers = self._known_brokers()
        clusters = {one.cluster_name for one in self._brokers}
        cluster = min(clusters, default=NO_CLUSTER)
        nodes = [Node(cluster, "namesrv", one, one) for one in names]
        brokers = list(_broker_nodes(self._brokers))
        nodes += self._nodes_beside(cluster, {one.endpoint for one in brokers})
        nodes += brokers
        self._forget_others(nodes)
        answers = list(_once(self._ask_all(self._ask, nodes)))
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        answers += self._left([one.node for one in answers], wall_ms)
        self._log_silent(answers)
        series: list[Series] = []
        for one in answers:
            series += self._series(one, now_ms, wall_ms)
        self._rates.end_round()
        series += _exporter_series(cluster, answers, now_ms - began_ms)
        return Families(self._globs.kept(series))

    def _series(self, answer: _NodeAnswer, now_ms: int, wall_ms: int) -> Iterator[Series]:
        node, readings = answer.node, answer.readings
        yield Series(_UP, (*node.labels,), float(readings is not None))
        if readings is None:
            return
        yield from metric_series(node, readings)
        if node.is_leader:
            yield from broker_series(node, readings, wall_ms)
            if self._config.rocketmq4_names:
                yield from self._rocketmq4.broker(node, readings, now_ms, wall_ms)
        yield from answer.series

    # ---- Asking ----------------------------------------------------------------------

    def _known_brokers(self) -> list[BrokerData]:
        """Return all brokers by the name servers; those of last time if none answers."""
        try:
            return self._client("").cluster().brokers
        except MQMeshError as error:
            _log.debug("no name server lists the brokers: %s", error)
            return self._brokers

    def _ask(self, node: Node) -> _NodeAnswer:
        """Perhaps in a thread of its own."""
        client = self._client(node.endpoint, node.broker_name)
        try:
            readings = client.role_info(node.endpoint)
            if not node.node_type:
                info = client.ping(node.endpoint)
                node = msgspec.structs.replace(node, node_type=info.role, node_id=info.name)
            node = self._named_nodes[node.endpoint] = _named(node, readings)
            series, left_out = self._groups(client, node) if node.is_leader else ([], 0)
        except MQMeshError as error:
            _log.debug("%s at %s does not answer: %s", node.node_type, node.endpoint, error)
            last_known = self._named_nodes.get(node.endpoint, node)
            names = {"node_type": last_known.node_type or UNKNOWN, "node_id": last_known.node_id}
            return _NodeAnswer(msgspec.structs.replace(node, **names), None, [])
        return _NodeAnswer(node, readings, series, left_out)

    def _groups(self, client: GroupAdmin, node: Node) -> tuple[list[Series], int]:
        """Return the series of consumer groups, and how many groups are left out."""
        series: list[Series] = []
        left_out = 0
        for progress in client.all_progress().values():
            wanted = [one for one in progress.groups if self._globs.takes_group(one.group)]
            kept = wanted[: self._config.max_groups]
            left_out += len(wanted) - len(kept)
            for group in kept:
                series += group_series(node, group, progress.now_ms)
                if self._config.rocketmq4_names:
                    series += self._rocketmq4.group(node, group, progress.now_ms)
        return series, left_out

    def _nodes_beside(self, cluster: str, listed: set[str]) -> Iterator[Node]:
        """Yield the queried nodes beside name servers and the brokers that they list."""
        found = {one: Node(cluster, "", one, one) for one in self._config.other_addr}
        for entry in self._others():
            endpoint = entry.endpoint.removeprefix("tcp://")  # as name servers write it
            self._keys[endpoint] = entry.server_key
            found[endpoint] = Node(cluster, entry.role, entry.name, endpoint)
        yield from (node for endpoint, node in found.items() if endpoint not in listed)

    def _left(self, nodes: Collection[Node], now_ms: int) -> Iterator[_NodeAnswer]:
        """Yield brokers that name servers knew a while ago: they drop one that is gone at once."""
        there = {node.endpoint for node in nodes}
        self._known |= {node.endpoint: (node, now_ms) for node in nodes if node.broker_name}
        for endpoint, (node, known_ms) in list(self._known.items()):
            if now_ms - known_ms > self._config.forget_ms:
                del self._known[endpoint]
            elif endpoint not in there:
                yield _NodeAnswer(node, None, [])

    def _client(self, endpoint: str, broker_name: str = "") -> GroupAdmin:
        # A broker may be queried before name servers know its group: then about itself alone.
        client = self._clients.get((endpoint, broker_name))
        if client is None:
            client = self._clients[endpoint, broker_name] = self._connect(endpoint, broker_name)
        return client

    def _connect_by_zmq(self, endpoint: str, broker_name: str) -> GroupAdmin:
        config = self._config
        return GroupAdmin(
            config.namesrv_addr,
            timeout_ms=config.timeout_ms,
            broker_name=broker_name,
            transport=client_transport(None, config.credentials, self._keys),
            namespace=WHOLE_CLUSTER,
        )

    def _forget_others(self, nodes: Collection[Node]) -> None:
        wanted = {(node.endpoint, node.broker_name) for node in nodes}
        for gone in self._clients.keys() - {("", ""), *wanted}:
            self._clients.pop(gone).close()
        for endpoint in self._named_nodes.keys() - {node.endpoint for node in nodes}:
            del self._named_nodes[endpoint]

    def _log_silent(self, answers: Iterable[_NodeAnswer]) -> None:
        silent = {one.node.endpoint for one in answers if one.readings is None}
        for endpoint in sorted(silent - self._silent):
            _log.warning("%s does not answer", endpoint)
        for endpoint in sorted(self._silent - silent):
            _log.info("%s answers again", endpoint)
        self._silent = silent


def _broker_nodes(brokers: Iterable[BrokerData]) -> Iterator[Node]:
    for group in brokers:
        for broker_id, address in sorted(group.addresses.items()):
            yield Node(
                group.cluster_name,
                "broker",
                group.broker_name if broker_id == 0 else f"{group.broker_name}-r{broker_id}",
                address.tcp,
                broker_id == 0,
                group.broker_name,
            )


def _once(answers: Iterable[_NodeAnswer]) -> Iterator[_NodeAnswer]:
    """Leaves out brokers of a run file that name servers know by another address."""
    all_answers = list(answers)
    listed = {one.node.node_id for one in all_answers if one.node.broker_name}
    for one in all_answers:
        is_ours = one.node.node_type == "broker" and not one.node.broker_name
        if not is_ours or one.node.node_id not in listed:
            yield one


def _named(node: Node, readings: Readings) -> Node:
    """Return a node with the name that its readings give.

    A replica has its number whether it leads or not: its totals are those of its process.
    """
    if node.broker_name:
        own_id = int(readings.number("broker_id", default=0))
        name = f"{node.broker_name}-r{own_id}" if own_id else node.broker_name
        return msgspec.structs.replace(node, node_id=name)
    return node


_UP: Final = ExportedMetric("mqmesh_up", MetricKind.GAUGE, "the process answers", NODE_LABELS)


def _exporter_series(cluster: str, answers: list[_NodeAnswer], took_ms: int) -> Iterator[Series]:
    node = (cluster, "exporter", "exporter")

    def series(name: str, help: str, value: float) -> Series:
        return Series(ExportedMetric(name, MetricKind.GAUGE, help, NODE_LABELS), node, value)

    yield series("mqmesh_scrape_duration_seconds", "how long it took to ask all", took_ms / 1_000)
    left_out = sum(one.groups_left_out for one in answers)
    yield series("mqmesh_exporter_groups_left_out", "consumer groups beyond max_groups", left_out)

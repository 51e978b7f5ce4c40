"""Export of a cluster's setup into a document, and import."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from mqmesh.errors import (
    GroupNotFound,
    MQMeshError,
    TopicNotFound,
    UnsupportedCommand,
)
from mqmesh.message import is_system_topic
from mqmesh.metrics import Readings
from mqmesh.protocol.admin import (
    AccessListInfo,
    ConfigEntries,
    GetAccessListRequest,
    GetConfigRequest,
    GetTopicConfigRequest,
    TopicConfigs,
    TopicStats,
    TopicStatsRequest,
    UpdateTopicRequest,
)
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import DeleteGroupRequest, GroupConfig, UpdateGroupRequest
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.route import DeleteTopicRequest, Perm, TopicConfig
from mqmesh.protocol.topic_schema import PutTopicSchemaRequest, TopicSchema, TopicSchemaRequest
from mqmesh.sdk.admin.cluster_plan import (
    BrokerSetup,
    ClusterSetup,
    GroupSetup,
    ImportAction,
    ImportStep,
    ImportThing,
    TopicSetup,
    make_plan,
)
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin


class TopicTraffic(msgspec.Struct, frozen=True):
    """Traffic of a topic, and to one of the groups that read it; all brokers together.

    Attributes:
        topic: Topic.
        group: Consumer group; "" for a topic that none reads.
        in_per_s: Messages stored a second, in the last minute or two.
        out_per_s: Messages handed out to the group, the same.
        in_today: Messages stored since midnight (UTC), or since a broker's start.
        out_today: Messages handed out to the group, the same.
        backlog: Messages that the group has not done.
    """

    topic: str
    group: str
    in_per_s: float
    out_per_s: float
    in_today: int
    out_today: int
    backlog: int

    @property
    def is_active(self) -> bool:
        """Something came or went today."""
        return self.in_today > 0 or self.out_today > 0


class ClusterAdmin(GroupAdmin, NamesrvAdmin):
    """The setup of a whole cluster, and its traffic; arguments as for ``AdminClient``."""

    def export(self, *, configs: bool = False) -> ClusterSetup:
        """Return topics, groups, key/value configuration, drained brokers and access list.

        No messages, no offsets, no keys; nor topics that a cluster makes by itself: retry and dead
        letter topics.

        Args:
            configs: Also the settings of brokers that are not the default, for people to read.

        Raises:
            NoRoute: No master is known.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        request = GetTopicConfigRequest("")
        found = self.ask_masters(RequestCode.GET_TOPIC_CONFIG, request, TopicConfigs)
        topics = {name: one.topics for name, one in found.items()}
        schemas = {name: self._schemas(name, one.with_schema) for name, one in found.items()}
        groups = self.groups()
        readings = self.runtime_info()
        brokers = {
            name: BrokerSetup(
                {
                    one.topic: _topic_setup(one, schemas[name].get(one.topic, ""))
                    for one in topics[name]
                    if not is_system_topic(one.topic)
                },
                {
                    one.config.group: _group_setup(one.config)
                    for one in groups.get(name, [])
                    if one.is_configured
                },
                self._is_drained(name, topics[name], readings[name]),
                self._settings(endpoint) if configs else None,
            )
            for name, endpoint in self._masters().items()
        }
        moment = datetime.fromtimestamp(self._transport.clock.wall_ms() / 1_000, UTC)
        return ClusterSetup(
            exported_at=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            brokers=brokers,
            kv={space: self.list_kv(space) for space in self.kv_namespaces()},
            access_list=self._access_list(),
        )

    def traffic(self) -> list[TopicTraffic]:
        """Return the traffic of all topics, to each group that reads them; by topic and group.

        A broker counts 1,000 topics and 1,000 pairs of topic and group apart: of what is beyond
        them, rates and totals are 0.

        Raises:
            NoRoute: No master is known.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        topics = {one.topic for found in self.topic_configs().values() for one in found}
        sums = _sums_by_labels(self.runtime_info().values())
        backlogs: dict[tuple[str, str], int] = {}
        for progress in self.all_progress().values():
            for group in progress.groups:
                is_known = group.message_model != MessageModel.BROADCASTING
                for one in group.topics:
                    pair = one.topic, group.group
                    backlogs[pair] = backlogs.get(pair, 0) + (one.lag if is_known else 0)
        read = {topic for topic, _ in backlogs}
        pairs = [*backlogs, *((topic, "") for topic in topics - read)]
        return [
            TopicTraffic(
                topic,
                group,
                sums["topic_put_messages_per_s", topic],
                sums["group_get_messages_per_s", topic, group],
                int(sums["topic_put_messages_today", topic]),
                int(sums["group_get_messages_today", topic, group]),
                backlogs.get((topic, group), 0),
            )
            for topic, group in sorted(pairs)
            if not is_system_topic(topic)
        ]

    def plan_import(
        self, wanted: ClusterSetup, *, prune: bool = False, force: bool = False
    ) -> list[ImportStep]:
        """Return the steps that set the cluster up as a document says; change nothing.

        Args:
            wanted: The document.
            prune: Delete topics and groups that it does not have.
            force: Carry out steps that lose messages, too.

        Raises:
            NoRoute: No master is known.
            TransportError, BrokerError: As for ``export``.
        """
        found = self.export()
        filled = {
            name: self._with_messages(name, set(there.topics) - set(wanted.brokers[name].topics))
            for name, there in found.brokers.items()
            if prune and not force and name in wanted.brokers
        }
        return make_plan(wanted, found, prune=prune, force=force, filled=filled)

    def carry_out(
        self,
        wanted: ClusterSetup,
        steps: Sequence[ImportStep],
        on_done: Callable[[ImportStep], None] = lambda step: None,
    ) -> int:
        """Carries out the steps of a plan, but for its conflicts.

        Args:
            wanted: The document that it was made from.
            steps: The plan.
            on_done: Called with each step that is done.

        Returns:
            How many steps changed something.

        Raises:
            BrokerError, TransportError: A broker or name server refused or did not answer; the
                sentence says where, and how many steps were done before. Plan and carry out again:
                the new plan leaves out the steps that are done.
        """
        masters, done = self._masters(), 0
        made: dict[str, TopicConfig] = {}
        for step in steps:
            if step.action in (ImportAction.LEAVE, ImportAction.CONFLICT):
                continue
            try:
                self._do(wanted, step, masters.get(step.broker_name, ""))
            except MQMeshError as error:
                where = f"{step.action} {step.thing} {step.name}"
                where += f" at {step.broker_name}" if step.broker_name else ""
                error.args = (f"{where}: {error} (done before: {done} steps; repeat it)",)
                raise
            done += 1
            on_done(step)
            if step.thing is ImportThing.TOPIC and step.action is not ImportAction.DELETE:
                setup = wanted.brokers[step.broker_name].topics[step.name]
                made[step.broker_name] = _topic_config(step.name, setup)
        for broker_name, last in made.items():
            self._wait_announced({broker_name: last})  # brokers announce all of theirs at once
        return done

    def _do(self, wanted: ClusterSetup, step: ImportStep, endpoint: str) -> None:
        gone = step.action is ImportAction.DELETE
        if step.thing is ImportThing.KV:
            space, _, key = step.name.partition("/")
            if gone:
                self.delete_kv(space, key)
            else:
                self.put_kv(space, key, wanted.kv[space][key])
            return
        here = wanted.brokers[step.broker_name]
        if step.thing is ImportThing.DRAINED:
            (self.drain if here.drained else self.undrain)(step.broker_name)
            return
        request: msgspec.Struct
        schema: PutTopicSchemaRequest | None = None
        if step.thing is ImportThing.TOPIC and gone:
            code, request = RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest(step.name)
        elif step.thing is ImportThing.TOPIC:
            code = RequestCode.UPDATE_AND_CREATE_TOPIC
            # A plan with fewer read queues is carried out by force only.
            setup = here.topics[step.name]
            request = UpdateTopicRequest(_topic_config(step.name, setup), may_hide=True)
            if setup.schema or step.action is ImportAction.CHANGE:
                schema = PutTopicSchemaRequest(step.name, setup.schema)
        elif gone:
            code, request = RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest(step.name)
        else:
            group = GroupConfig(step.name, **msgspec.structs.asdict(here.groups[step.name]))
            code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
            request = UpdateGroupRequest(group)
        try:
            self._request(endpoint, code, encode_header(request))
            if schema is not None:
                self._request(endpoint, RequestCode.PUT_TOPIC_SCHEMA, encode_header(schema))
        except (TopicNotFound, GroupNotFound):
            if not gone:
                raise

    def _schemas(self, broker_name: str, topics: Sequence[str]) -> dict[str, str]:
        code, found = RequestCode.GET_TOPIC_SCHEMA, dict[str, str]()
        for topic in topics:
            answers = self.ask_masters(code, TopicSchemaRequest(topic), TopicSchema, [broker_name])
            found[topic] = next((one.schema for one in answers.values()), "")
        return found

    def _is_drained(self, name: str, topics: Sequence[TopicConfig], readings: Readings) -> bool:
        """Return whether routes have it drained; a broker learns it with its next heartbeat."""
        for one in topics:
            if not one.perm & Perm.WRITE:
                continue
            try:
                queues = self.route(one.topic).queues
            except TopicNotFound:
                continue
            for queue in queues:
                if queue.broker_name == name:
                    return not queue.perm & Perm.WRITE
        return readings["wiped_write_perm"] == 1

    def _with_messages(self, broker_name: str, topics: set[str]) -> frozenset[str]:
        endpoint = self._master_of(broker_name, self._masters())
        code, found = RequestCode.GET_TOPIC_STATS_INFO, set()
        for topic in topics:
            answer = self._request(endpoint, code, encode_header(TopicStatsRequest(topic)))
            queues = decode_header(TopicStats, answer.header).queues
            if any(one.max_queue_offset > one.min_queue_offset for one in queues):
                found.add(topic)
        return frozenset(found)

    def _settings(self, endpoint: str) -> dict[str, object]:
        header = encode_header(GetConfigRequest())
        answer = self._request(endpoint, RequestCode.GET_BROKER_CONFIG, header)
        return {
            one.key: msgspec.json.decode(one.value)
            for one in decode_header(ConfigEntries, answer.header).entries
            if one.value != one.default
        }

    def _access_list(self) -> str:
        request = GetAccessListRequest()
        try:
            return self._ask_namesrv(RequestCode.GET_ACCESS_LIST, request, AccessListInfo).text
        except UnsupportedCommand:
            return ""  # security is off there


_TRAFFIC_METRICS: Final = frozenset(
    {
        "topic_put_messages_per_s",
        "group_get_messages_per_s",
        "topic_put_messages_today",
        "group_get_messages_today",
    }
)


def _sums_by_labels(brokers: Iterable[Readings]) -> defaultdict[tuple[str, ...], float]:
    """Metrics of all brokers together: by name, and labels."""
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for readings in brokers:
        for one in readings:
            if one.metric.name in _TRAFFIC_METRICS:
                for sample in one.samples:
                    if isinstance(sample.value, int | float):
                        sums[one.metric.name, *sample.labels] += sample.value
    return sums


def _topic_setup(config: TopicConfig, schema: str) -> TopicSetup:
    settings = msgspec.structs.asdict(config)
    del settings["topic"]
    return TopicSetup(**settings, schema=schema)


def _topic_config(name: str, setup: TopicSetup) -> TopicConfig:
    settings = msgspec.structs.asdict(setup)
    del settings["schema"]
    return TopicConfig(name, **settings)


def _group_setup(config: GroupConfig) -> GroupSetup:
    settings = msgspec.structs.asdict(config)
    del settings["group"]
    return GroupSetup(**settings)

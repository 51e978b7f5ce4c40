"""Jobs on consumer groups at a broker group's port: settings, members, progress, offsets."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mqmesh.errors import (
    BrokerError,
    ClientNotOnline,
    GroupNotFound,
    InvalidArgument,
    TopicNotFound,
)
from mqmesh.protocol.admin import TopicStats, TopicStatsRequest
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.groups import (
    BY_CONSUMER,
    AllClients,
    AllClientsRequest,
    CloneOffsetRequest,
    ConsumerConnections,
    ConsumerConnectionsRequest,
    ConsumeStats,
    ConsumeStatsRequest,
    DeleteGroupRequest,
    GetGroupsRequest,
    GroupConfig,
    GroupSummaries,
    GroupSummary,
    OffsetChange,
    OffsetChanges,
    ProducerConnections,
    ProducerConnectionsRequest,
    QueueProgress,
    ResetOffsetRequest,
    ResetWhere,
    UpdateGroupRequest,
)
from mqmesh.protocol.membership import MessageModel, Subscription
from mqmesh.protocol.remoting.admin_bodies import (
    ConnectionBody,
    ConsumerConnectionBody,
    ConsumeStatsBody,
    ConsumeStatsListBody,
    GroupConfigBody,
    GroupConfigListBody,
    GroupConfigsBody,
    OffsetBody,
    ProducerBody,
    ProducerConnectionBody,
    ProducersBody,
    ResetBody,
    SubscribedBody,
    SubscriptionAnswer,
    TimeSpanBody,
    TimeSpansBody,
    TopicListBody,
)
from mqmesh.protocol.remoting.bodies import QueueName, decode_body
from mqmesh.protocol.remoting.codes import LANGUAGES, VERSION, RemotingCode
from mqmesh.protocol.remoting.loose_json import encode_table
from mqmesh.roles.gateway.admin.jobs import Job, JobAnswer, JobHandler

RETRY_MAX_TIMES: Final = 16
"""RocketMQ's default, which its tools send in any case: consumers say how often they try."""
MOST_GROUPS: Final = 1_000
"""Groups whose progress one answer has."""


class GroupJobs:
    """Jobs on groups that RocketMQ's brokers do.

    Args:
        address_of: Returns the address of a client that is connected here; "" for others.
        own_address: Returns the address that clients know a broker group by.
        wall_ms: Wall clock.
    """

    def __init__(
        self,
        address_of: Callable[[str], str],
        own_address: Callable[[str], object],
        wall_ms: Callable[[], int],
    ) -> None:
        self._address_of = address_of
        self._own_address = own_address
        self._wall_ms = wall_ms

    def jobs(self) -> Mapping[int, JobHandler]:
        """Return the jobs by request code."""
        return {
            RemotingCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self._put,
            RemotingCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self._put_many,
            RemotingCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self._all_settings,
            RemotingCode.GET_SUBSCRIPTIONGROUP_CONFIG: self._settings,
            RemotingCode.DELETE_SUBSCRIPTIONGROUP: self._delete,
            RemotingCode.GET_CONSUMER_CONNECTION_LIST: self._members,
            RemotingCode.QUERY_TOPICS_BY_CONSUMER: self._topics,
            RemotingCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self._subscription,
            RemotingCode.GET_PRODUCER_CONNECTION_LIST: self._producers,
            RemotingCode.GET_ALL_PRODUCER_INFO: self._all_producers,
            RemotingCode.GET_CONSUME_STATS: self._progress,
            RemotingCode.GET_BROKER_CONSUME_STATS: self._all_progress,
            RemotingCode.QUERY_CONSUME_TIME_SPAN: self._times,
            RemotingCode.INVOKE_BROKER_TO_RESET_OFFSET: self._reset,
            RemotingCode.CLONE_GROUP_OFFSET: self._clone,
        }

    # ---- Settings ------------------------------------------------------------------------

    async def _put(self, job: Job) -> JobAnswer:
        await _put_group(job, decode_body(GroupConfigBody, job.request.body))
        return JobAnswer()

    async def _put_many(self, job: Job) -> JobAnswer:
        for one in decode_body(GroupConfigListBody, job.request.body).group_config_list:
            await _put_group(job, one)
        return JobAnswer()

    async def _all_settings(self, job: Job) -> JobAnswer:
        found = {one.config.group: _body(one.config) for one in await all_groups(job)}
        return JobAnswer(GroupConfigsBody(found))

    async def _settings(self, job: Job) -> JobAnswer:
        group = job.text("group")
        found = await find_group(job, group)
        if found is None:
            raise GroupNotFound(f"no group {group!r:.200} at broker group {job.broker_name}")
        return JobAnswer(_body(found.config))

    async def _delete(self, job: Job) -> JobAnswer:
        header = DeleteGroupRequest(job.text("groupName"))
        await job.change(RequestCode.DELETE_SUBSCRIPTIONGROUP, header)
        return JobAnswer()

    # ---- Members -------------------------------------------------------------------------

    async def _members(self, job: Job) -> JobAnswer:
        found = await _find_members(job, job.text("consumerGroup"))
        subscriptions: dict[str, SubscribedBody] = {}
        for one in found.members:
            subscriptions |= {sub.topic: _subscribed(sub) for sub in one.data.subscriptions}
        data = found.members[0].data
        body = ConsumerConnectionBody(
            [self._connection(one.client_id, one.language, one.version) for one in found.members],
            subscriptions,
            "CONSUME_PASSIVELY",
            data.message_model,
            f"CONSUME_FROM_{data.consume_from_where}",
        )
        return JobAnswer(body)

    async def _topics(self, job: Job) -> JobAnswer:
        found = await find_group(job, job.text("group"))
        topics = found.topics if found is not None else []
        return JobAnswer(TopicListBody(topics, str(self._own_address(job.broker_name))))

    async def _subscription(self, job: Job) -> JobAnswer:
        group, topic = job.text("group"), job.text("topic", "*")
        try:
            found = await _find_members(job, group)
        except ClientNotOnline:
            return JobAnswer(SubscriptionAnswer(msgspec.UNSET, group, topic))
        named = [sub for one in found.members for sub in one.data.subscriptions]
        of_topic = next((sub for sub in named if sub.topic == topic), None)
        body = SubscriptionAnswer(
            msgspec.UNSET if of_topic is None else _subscribed(of_topic), group, topic
        )
        return JobAnswer(body)

    async def _producers(self, job: Job) -> JobAnswer:
        group = job.text("producerGroup")
        code, header = RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerConnectionsRequest(group)
        found = (await job.ask(code, header, ProducerConnections)).members
        if not found:
            raise BrokerError(f"the producer group [{group}] not exist: no member is connected")
        return JobAnswer(
            ProducerConnectionBody(
                [self._connection(one.client_id, one.language, one.version) for one in found]
            )
        )

    async def _all_producers(self, job: Job) -> JobAnswer:
        groups: dict[str, list[ProducerBody]] = {}
        header, now_ms = AllClientsRequest(), self._wall_ms()
        while True:
            page = await job.ask(RequestCode.GET_ALL_CLIENTS, header, AllClients)
            for one in page.clients:
                known = self._connection(one.client_id, one.language, one.version)
                for group in one.producer_groups:
                    body = ProducerBody(
                        one.client_id,
                        known.client_addr,
                        known.language,
                        known.version,
                        now_ms - one.silent_ms,
                    )
                    groups.setdefault(group, []).append(body)
            if not page.more or not page.clients:
                return JobAnswer(ProducersBody(groups))
            header = AllClientsRequest(page.clients[-1].client_id)

    def _connection(self, client_id: str, language: str, version: str) -> ConnectionBody:
        address = self._address_of(client_id) or client_id.partition("@")[0]
        is_number = version.isascii() and version.isdecimal()
        return ConnectionBody(
            client_id,
            address,
            language if language in LANGUAGES else "OTHER",
            int(version) if is_number else VERSION,
        )

    # ---- Progress ------------------------------------------------------------------------

    async def _progress(self, job: Job) -> JobAnswer:
        group = job.text("consumerGroup")
        named = [one for one in job.text("topicList", ";").split(";") if one]
        queues, per_s = list[QueueProgress](), 0.0
        for topic in named or [job.text("topic", "")]:
            try:
                stats = await _find_progress(job, group, topic)
            except TopicNotFound:
                continue
            queues += [one for page in stats for one in page.queues]
            per_s += stats[0].consume_tps
        if all(one.consumer_offset < 0 for one in queues) and await _is_broadcasting(job, group):
            queues = []  # offsets are with the members, and RocketMQ's tools say so without rows
        return JobAnswer(_stats_body(job.broker_name, queues, per_s))

    async def _all_progress(self, job: Job) -> JobAnswer:
        found: list[dict[str, list[ConsumeStatsBody]]] = []
        lag = in_flight = 0
        for one in (await all_groups(job))[:MOST_GROUPS]:
            stats = await _find_progress(job, one.config.group)
            topics: dict[str, list[QueueProgress]] = {}
            for queue in [queue for page in stats for queue in page.queues]:
                topics.setdefault(queue.topic, []).append(queue)
                lag += queue.max_queue_offset - max(queue.consumer_offset, 0)
                in_flight += _pulled(queue) - max(queue.consumer_offset, 0)
            bodies = [_stats_body(job.broker_name, queues, 0.0) for queues in topics.values()]
            found.append({one.config.group: bodies})
        address = str(self._own_address(job.broker_name))
        return JobAnswer(ConsumeStatsListBody(address, found, lag, in_flight))

    async def _times(self, job: Job) -> JobAnswer:
        group, topic = job.text("group"), job.text("topic")
        code = RequestCode.GET_TOPIC_STATS_INFO
        found = await job.ask(code, TopicStatsRequest(topic), TopicStats)
        stats = await _find_progress(job, group, topic)
        now_ms = stats[0].now_ms
        waits = {one.queue_id: one.oldest_timestamp for page in stats for one in page.queues}
        spans = [
            TimeSpanBody(
                QueueName(topic, job.broker_name, one.queue_id),
                one.first_timestamp or -1,
                one.last_update_timestamp or -1,
                waits.get(one.queue_id) or one.last_update_timestamp or -1,
                now_ms - waits[one.queue_id] if waits.get(one.queue_id) else 0,
            )
            for one in found.queues
        ]
        return JobAnswer(TimeSpansBody(spans))

    # ---- Offsets -------------------------------------------------------------------------

    async def _reset(self, job: Job) -> JobAnswer:
        group, topic = job.text("group"), job.text("topic")
        time_ms, queue_id = job.number("timestamp", -1), max(job.number("queueId", -1), -1)
        offset = job.number("offset", -1)
        where = ResetWhere.TIMESTAMP if time_ms >= 0 else ResetWhere.LAST
        if queue_id >= 0 and offset >= 0:
            where = ResetWhere.OFFSET
        elif not job.flag("isForce", True):
            raise InvalidArgument(
                "mqmesh moves a group wherever it is asked to; leave out the option that keeps "
                "offsets from going forward (force = false)"
            )
        header = ResetOffsetRequest(group, topic, where, queue_id, max(time_ms, 0), offset)
        changes: list[OffsetChange] = []
        while True:
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            page = await job.ask(code, header, OffsetChanges)
            changes += page.queues
            if not page.more or not page.queues:
                break
            header = msgspec.structs.replace(header, after_queue_id=page.queues[-1].queue_id)
        pairs = [
            (QueueName(topic, job.broker_name, one.queue_id), one.new_offset) for one in changes
        ]
        return JobAnswer(ResetBody(encode_table(pairs)))

    async def _clone(self, job: Job) -> JobAnswer:
        header = CloneOffsetRequest(
            job.text("srcGroup"), job.text("destGroup"), job.text("topic", "")
        )
        await job.ask(RequestCode.CLONE_GROUP_OFFSET, header, OffsetChanges)
        return JobAnswer()


async def all_groups(job: Job, broker_name: str = "") -> list[GroupSummary]:
    """Return all groups that a broker knows.

    Args:
        job: Job that sends the request.
        broker_name: Broker group; by default that of the request.

    Raises:
        MQMeshError: It refuses, or does not answer.
    """
    code, header = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, GetGroupsRequest()
    found: list[GroupSummary] = []
    while True:
        page = await job.ask(code, header, GroupSummaries, broker_name)
        found += page.groups
        if not page.more or not page.groups:
            return found
        header = GetGroupsRequest(after=page.groups[-1].config.group)


async def find_group(job: Job, group: str) -> GroupSummary | None:
    """Return a group; None if the broker does not know it.

    Raises:
        MQMeshError: It refuses, or does not answer.
    """
    code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    found = (await job.ask(code, GetGroupsRequest(group), GroupSummaries)).groups
    return found[0] if found else None


async def _find_members(job: Job, group: str) -> ConsumerConnections:
    """Return the members of a group.

    Raises:
        ClientNotOnline: There are none.
    """
    code, header = RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerConnectionsRequest(group)
    try:
        found = await job.ask(code, header, ConsumerConnections)
    except GroupNotFound as error:
        raise ClientNotOnline(f"the consumer group[{group}] not online: {error}") from error
    if not found.members:
        raise ClientNotOnline(f"the consumer group[{group}] not online")
    return found


async def _is_broadcasting(job: Job, group: str) -> bool:
    try:
        found = await _find_members(job, group)
    except ClientNotOnline:
        return False
    return found.members[0].data.message_model == MessageModel.BROADCASTING


async def _find_progress(job: Job, group: str, topic: str = "") -> list[ConsumeStats]:
    """Return the progress of a group in pages, at least one."""
    header = ConsumeStatsRequest(group, topic)
    found: list[ConsumeStats] = []
    while True:
        page = await job.ask(RequestCode.GET_CONSUME_STATS, header, ConsumeStats)
        found.append(page)
        if not page.more or not page.queues:
            return found
        last = page.queues[-1]
        header = ConsumeStatsRequest(group, topic, last.topic, last.queue_id)


async def _put_group(job: Job, wanted: GroupConfigBody) -> None:
    known = await find_group(job, wanted.group_name)
    tries = wanted.retry_max_times
    # Settings that RocketMQ does not have stay as they are.
    config = GroupConfig(wanted.group_name) if known is None else known.config
    config = msgspec.structs.replace(
        config,
        delivery=DeliveryMode.FIFO.value if wanted.consume_message_orderly else config.delivery,
        consume_enable=wanted.consume_enable,
        consume_broadcast_enable=wanted.consume_broadcast_enable,
        retry_max_times=BY_CONSUMER if tries < 0 or tries == RETRY_MAX_TIMES else tries,
        notify_consumer_ids_changed_enable=wanted.notify_consumer_ids_changed_enable,
    )
    code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    await job.ask(code, UpdateGroupRequest(config), GroupConfig)


def _body(config: GroupConfig) -> GroupConfigBody:
    tries = config.retry_max_times
    return GroupConfigBody(
        config.group,
        config.consume_enable,
        consume_broadcast_enable=config.consume_broadcast_enable,
        consume_message_orderly=config.delivery == DeliveryMode.FIFO,
        retry_max_times=RETRY_MAX_TIMES if tries < 0 else tries,
        notify_consumer_ids_changed_enable=config.notify_consumer_ids_changed_enable,
    )


def _subscribed(one: Subscription) -> SubscribedBody:
    tags = [] if one.expression == "*" else [tag.strip() for tag in one.expression.split("||")]
    is_tag = one.expression_type == "TAG"
    return SubscribedBody(
        one.topic, one.expression, one.expression_type, list(dict.fromkeys(tags)) if is_tag else []
    )


def _stats_body(broker_name: str, queues: list[QueueProgress], per_s: float) -> ConsumeStatsBody:
    pairs = [
        (
            QueueName(one.topic, broker_name, one.queue_id),
            OffsetBody(
                one.max_queue_offset,
                max(one.consumer_offset, 0),
                _pulled(one),
                one.oldest_timestamp,
            ),
        )
        for one in queues
    ]
    return ConsumeStatsBody(per_s, encode_table(pairs))


def _pulled(one: QueueProgress) -> int:
    return max(one.pull_offset, one.consumer_offset, 0)

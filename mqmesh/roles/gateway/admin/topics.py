"""Jobs on topics at a broker group's port: settings, statistics, queues, consumers."""

from collections.abc import Mapping
from contextlib import suppress

import msgspec

from mqmesh.errors import InvalidArgument, NoPermission, TopicNotFound
from mqmesh.message import (
    DLQ_PREFIX,
    RESERVED_TOPICS,
    RETRY_PREFIX,
    check_topic,
    is_system_topic,
)
from mqmesh.protocol.admin import (
    MAX_QUEUE_ENTRIES,
    GetTopicConfigRequest,
    QueueEntries,
    QueueEntriesRequest,
    TopicConfigs,
    TopicStats,
    TopicStatsRequest,
    UpdateTopicRequest,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import DeleteGroupRequest, GroupNames, TopicConsumersRequest
from mqmesh.protocol.remoting.admin_bodies import (
    GroupListBody,
    QueueUnitBody,
    QueueUnitsBody,
    TopicConfigBody,
    TopicConfigListBody,
    TopicConfigsBody,
    TopicListBody,
    TopicOffsetBody,
    TopicStatsBody,
)
from mqmesh.protocol.remoting.bodies import QueueName, decode_body
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.remoting.loose_json import encode_table
from mqmesh.protocol.route import DeleteTopicRequest, Perm, TopicConfig
from mqmesh.roles.gateway.admin.groups import find_group
from mqmesh.roles.gateway.admin.jobs import Job, JobAnswer, JobHandler
from mqmesh.roles.gateway.messages import log_offset


class TopicJobs:
    """Jobs on topics that RocketMQ's brokers do."""

    def jobs(self) -> Mapping[int, JobHandler]:
        """Return the jobs by request code."""
        return {
            RemotingCode.UPDATE_AND_CREATE_TOPIC: self._put,
            RemotingCode.UPDATE_AND_CREATE_TOPIC_LIST: self._put_many,
            RemotingCode.GET_ALL_TOPIC_CONFIG: self._all_settings,
            RemotingCode.GET_TOPIC_CONFIG: self._settings,
            RemotingCode.DELETE_TOPIC_IN_BROKER: self._delete,
            RemotingCode.GET_TOPIC_STATS_INFO: self._stats,
            RemotingCode.GET_EARLIEST_MSG_STORETIME: self._first_time,
            RemotingCode.QUERY_TOPIC_CONSUME_BY_WHO: self._consumers,
            RemotingCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self._system_topics,
            RemotingCode.QUERY_CONSUME_QUEUE: self._queue,
        }

    async def _put(self, job: Job) -> JobAnswer:
        config = TopicConfig(
            job.text("topic"),
            job.number("readQueueNums"),
            job.number("writeQueueNums"),
            job.number("perm"),
            job.flag("order"),
        )
        await self._put_one(job, config)
        return JobAnswer()

    async def _put_many(self, job: Job) -> JobAnswer:
        for one in decode_body(TopicConfigListBody, job.request.body).topic_config_list:
            await self._put_one(
                job,
                TopicConfig(
                    one.topic_name, one.read_queue_nums, one.write_queue_nums, one.perm, one.order
                ),
            )
        return JobAnswer()

    async def _put_one(self, job: Job, wanted: TopicConfig) -> None:
        check_topic(wanted.topic)
        if wanted.topic.startswith(DLQ_PREFIX) and wanted.perm & Perm.READ:
            return  # administrators make RocketMQ's readable before they look at them
        try:
            known = await _find_topic(job, wanted.topic)
        except TopicNotFound:
            known = wanted
        # Settings that RocketMQ does not have stay as they are.
        config = msgspec.structs.replace(
            known,
            read_queue_nums=wanted.read_queue_nums,
            write_queue_nums=wanted.write_queue_nums,
            perm=wanted.perm,
            order=wanted.order,
        )
        code = RequestCode.UPDATE_AND_CREATE_TOPIC
        await job.ask(code, UpdateTopicRequest(config), TopicConfig)

    async def _all_settings(self, job: Job) -> JobAnswer:
        code, header = RequestCode.GET_TOPIC_CONFIG, GetTopicConfigRequest()
        found = (await job.ask(code, header, TopicConfigs)).topics
        return JobAnswer(TopicConfigsBody({one.topic: _body(one) for one in found}))

    async def _settings(self, job: Job) -> JobAnswer:
        return JobAnswer(_body(await _find_topic(job, job.text("topic"))))

    async def _delete(self, job: Job) -> JobAnswer:
        topic = job.text("topic")
        for prefix in RETRY_PREFIX, DLQ_PREFIX:
            if topic.startswith(prefix):
                await self._delete_of_group(job, topic, topic.removeprefix(prefix))
                return JobAnswer()
        check_topic(topic)
        if is_system_topic(topic):
            raise InvalidArgument(f"topic {topic!r} is one of the system's, and cannot be deleted")
        # One that is not there is deleted well: tools ask all brokers, and ask again.
        with suppress(TopicNotFound):
            await job.change(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest(topic))
        return JobAnswer()

    async def _delete_of_group(self, job: Job, topic: str, group: str) -> None:
        """Delete retries and dead letters of a group that is deleted: mqadmin does so next."""
        if await find_group(job, group) is not None:
            raise NoPermission(f"topic {topic!r} belongs to group {group}, which is still there")
        code = RequestCode.DELETE_SUBSCRIPTIONGROUP
        await job.change(code, DeleteGroupRequest(group, remove_topics=True))

    async def _stats(self, job: Job) -> JobAnswer:
        topic = job.text("topic")
        code = RequestCode.GET_TOPIC_STATS_INFO
        found = await job.ask(code, TopicStatsRequest(topic), TopicStats)
        pairs = [
            (
                QueueName(topic, job.broker_name, one.queue_id),
                TopicOffsetBody(
                    one.min_queue_offset, one.max_queue_offset, one.last_update_timestamp
                ),
            )
            for one in found.queues
        ]
        return JobAnswer(TopicStatsBody(encode_table(pairs)))

    async def _first_time(self, job: Job) -> JobAnswer:
        """Return when the first message of a queue was stored; -1 of an empty one."""
        code, queue_id = RequestCode.GET_TOPIC_STATS_INFO, job.number("queueId")
        found = await job.ask(code, TopicStatsRequest(job.text("topic")), TopicStats)
        times = [one.first_timestamp for one in found.queues if one.queue_id == queue_id]
        return JobAnswer(fields={"timestamp": str((times and times[0]) or -1)})

    async def _consumers(self, job: Job) -> JobAnswer:
        code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
        found = await job.ask(code, TopicConsumersRequest(job.text("topic")), GroupNames)
        return JobAnswer(GroupListBody(found.groups))

    async def _system_topics(self, job: Job) -> JobAnswer:
        code, header = RequestCode.GET_TOPIC_CONFIG, GetTopicConfigRequest()
        found = (await job.ask(code, header, TopicConfigs)).topics
        return JobAnswer(
            TopicListBody([one.topic for one in found if one.topic in RESERVED_TOPICS])
        )

    async def _queue(self, job: Job) -> JobAnswer:
        header = QueueEntriesRequest(
            job.text("topic"),
            job.number("queueId", 0),
            max(job.number("index", 0), 0),
            min(max(job.number("count", 10), 1), MAX_QUEUE_ENTRIES),
        )
        found = await job.ask(RequestCode.QUERY_CONSUME_QUEUE, header, QueueEntries)
        units = [
            QueueUnitBody(
                log_offset(max(one.commitlog_offset, 0), 0),
                one.size,
                one.tag_hash & 0x7FFFFFFFFFFFFFFF,
                msg=one.problem or msgspec.UNSET,
            )
            for one in found.entries
        ]
        return JobAnswer(QueueUnitsBody(units, found.min_queue_offset, found.max_queue_offset))


async def _find_topic(job: Job, topic: str) -> TopicConfig:
    """Return the settings of a topic.

    Raises:
        TopicNotFound: The broker has none of that name.
    """
    code = RequestCode.GET_TOPIC_CONFIG
    found = (await job.ask(code, GetTopicConfigRequest(topic), TopicConfigs)).topics
    if not found:
        raise TopicNotFound(f"no topic {topic!r:.200} at broker group {job.broker_name}")
    return found[0]


def _body(config: TopicConfig) -> TopicConfigBody:
    return TopicConfigBody(
        config.topic,
        config.read_queue_nums,
        config.write_queue_nums,
        config.perm,
        order=config.order,
    )

"""Jobs at the port of the name server: the cluster, lists of topics, key/value pairs, draining."""

from collections.abc import Mapping

import msgspec

from mqmesh.message import RESERVED_TOPICS, retry_topic
from mqmesh.protocol.admin import (
    ConfigEntries,
    GetConfigRequest,
    UpdateConfigRequest,
)
from mqmesh.protocol.command import decode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.remoting.admin_bodies import ClusterBody, TableBody, TopicListBody
from mqmesh.protocol.remoting.bodies import RouteBroker
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.route import (
    DeleteTopicRequest,
    KvRequest,
    KvResponse,
    TopicList,
    TopicListRequest,
    WipeWritePermRequest,
    WipeWritePermResponse,
)
from mqmesh.roles.gateway.admin.groups import all_groups
from mqmesh.roles.gateway.admin.jobs import Job, JobAnswer, JobHandler
from mqmesh.roles.gateway.admin.settings import encode_properties, parse_properties
from mqmesh.roles.gateway.ports import BrokerPorts


class NamesrvJobs:
    """Jobs that RocketMQ's name server does.

    Args:
        ports: Broker groups and their addresses.
    """

    def __init__(self, ports: BrokerPorts) -> None:
        self._ports = ports

    def jobs(self) -> Mapping[int, JobHandler]:
        """Return the jobs by request code."""
        return {
            RemotingCode.PUT_KV_CONFIG: self._put_pair,
            RemotingCode.GET_KV_CONFIG: self._pair,
            RemotingCode.DELETE_KV_CONFIG: self._delete_pair,
            RemotingCode.GET_KVLIST_BY_NAMESPACE: self._pairs,
            RemotingCode.GET_BROKER_CLUSTER_INFO: self._cluster,
            RemotingCode.WIPE_WRITE_PERM_OF_BROKER: self._drain,
            RemotingCode.ADD_WRITE_PERM_OF_BROKER: self._drain,
            RemotingCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            RemotingCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RemotingCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RemotingCode.GET_UNIT_TOPIC_LIST: _no_topics,
            RemotingCode.GET_HAS_UNIT_SUB_TOPIC_LIST: _no_topics,
            RemotingCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _no_topics,
            RemotingCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RemotingCode.GET_NAMESRV_CONFIG: self._settings,
            RemotingCode.UPDATE_NAMESRV_CONFIG: self._change_settings,
        }

    async def _cluster(self, job: Job) -> JobAnswer:
        groups = self._ports.groups()
        clusters: dict[str, list[str]] = {}
        for name, cluster in groups.items():
            clusters.setdefault(cluster, []).append(name)
        brokers = {
            name: RouteBroker(cluster, name, {0: str(self._ports.address(name))})
            for name, cluster in groups.items()
        }
        return JobAnswer(ClusterBody(brokers, clusters))

    async def _topics(self, job: Job) -> JobAnswer:
        code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        topics = set((await job.ask_namesrv(code, TopicListRequest(), TopicList)).topics)
        # RocketMQ's groups have their retry topics from the first heartbeat on, and its tools find
        # the groups by them.
        for name in self._ports.groups():
            topics |= {retry_topic(one.config.group) for one in await all_groups(job, name)}
        return JobAnswer(TopicListBody(sorted(topics)))

    async def _topics_of_cluster(self, job: Job) -> JobAnswer:
        if job.text("cluster") in self._ports.groups().values():
            return await self._topics(job)
        return JobAnswer(TopicListBody([]))

    async def _system_topics(self, job: Job) -> JobAnswer:
        code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        topics = (await job.ask_namesrv(code, TopicListRequest(), TopicList)).topics
        # Tools ask that broker for its own ones, too.
        names = list(self._ports.groups())
        address = str(self._ports.address(names[0])) if names else msgspec.UNSET
        return JobAnswer(TopicListBody([one for one in topics if one in RESERVED_TOPICS], address))

    async def _delete_topic(self, job: Job) -> JobAnswer:
        header = DeleteTopicRequest(job.text("topic"))
        await job.change_namesrvs(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)
        return JobAnswer()

    async def _drain(self, job: Job) -> JobAnswer:
        restore = job.request.code == RemotingCode.ADD_WRITE_PERM_OF_BROKER
        header = WipeWritePermRequest(job.text("brokerName"), restore)
        answer = await job.change_namesrvs(RequestCode.WIPE_WRITE_PERM_OF_BROKER, header)
        count = decode_header(WipeWritePermResponse, answer.header).topic_count
        return JobAnswer(fields={"addTopicCount" if restore else "wipeTopicCount": str(count)})

    # ---- Key/value pairs -----------------------------------------------------------------

    async def _put_pair(self, job: Job) -> JobAnswer:
        header = KvRequest(job.text("namespace"), job.text("key"), job.text("value"))
        await job.change_namesrvs(RequestCode.PUT_KV_CONFIG, header)
        return JobAnswer()

    async def _delete_pair(self, job: Job) -> JobAnswer:
        header = KvRequest(job.text("namespace"), job.text("key"))
        await job.change_namesrvs(RequestCode.DELETE_KV_CONFIG, header)
        return JobAnswer()

    async def _pair(self, job: Job) -> JobAnswer:
        header = KvRequest(job.text("namespace"), job.text("key"))
        found = await job.ask_namesrv(RequestCode.GET_KV_CONFIG, header, KvResponse)
        return JobAnswer(fields={"value": found.pairs.get(header.key, "")})

    async def _pairs(self, job: Job) -> JobAnswer:
        header = KvRequest(job.text("namespace"))
        found = await job.ask_namesrv(RequestCode.LIST_KV_CONFIG, header, KvResponse)
        return JobAnswer(TableBody(found.pairs))

    # ---- Settings ------------------------------------------------------------------------

    async def _settings(self, job: Job) -> JobAnswer:
        found = await job.ask_namesrv(
            RequestCode.GET_NAMESRV_CONFIG, GetConfigRequest(), ConfigEntries
        )
        values = {one.key: str(msgspec.json.decode(one.value)) for one in found.entries}
        return JobAnswer(encode_properties(values))

    async def _change_settings(self, job: Job) -> JobAnswer:
        wanted = UpdateConfigRequest(parse_properties(job.request.body))
        await job.change_namesrvs(RequestCode.UPDATE_NAMESRV_CONFIG, wanted)
        return JobAnswer()


async def _no_topics(job: Job) -> JobAnswer:
    """Answer that no topic is one of a unit: mqmesh has no units."""
    return JobAnswer(TopicListBody([]))

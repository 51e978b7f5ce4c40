"""Settings of consumer groups, and the list of groups for administrators."""

import heapq
from collections.abc import Mapping
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import dlq_topic, retry_topic
from mqmesh.metrics import gauge
from mqmesh.namespaces import is_within
from mqmesh.protocol.command import EMPTY_REPLY, Answer, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import (
    MAX_GROUPS_PER_ANSWER,
    DeleteGroupRequest,
    GetGroupsRequest,
    GroupConfig,
    GroupSummaries,
    GroupSummary,
    UpdateGroupRequest,
    check_client_group,
)
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.groups.connections import connections_of, failures_of
from mqmesh.roles.broker.features.groups.progress import ProgressReader
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler

QUEUES_PER_LIST: Final = 4_096
"""A list of groups ends its page when so many queues were looked at."""


class GroupAdminFeature(Feature):
    """Settings of consumer groups, and the list of groups for administrators."""

    works_at_followers = True

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        progress: ProgressReader,
        windows: DeliveryWindows,
    ) -> None:
        self._core = core
        self._settings = core.settings
        self._clock = core.clock
        self._commit_point = core.commit_point
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._progress = progress
        self._windows = windows

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            **self.follower_commands(),
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update_and_create_group,
            RequestCode.DELETE_SUBSCRIPTIONGROUP: self.delete_group,
        }

    def follower_commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.follower_commands``."""
        return {RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.get_groups}

    def configured(self) -> None:
        """Take over whether groups get settings by themselves."""
        self._group_table.auto_create = self._settings.now.auto_create_subscription_group

    def update_and_create_group(
        self, request: Request, wanted: UpdateGroupRequest
    ) -> Answer | None:
        """Makes or changes the settings of a group; answered once that is on disk.

        Raises:
            InvalidArgument: Its delivery mode would change, and it has members, or messages that
                are settled would come again.
        """
        self._commit_point.check_room()
        is_other = self._is_other_delivery(wanted.config)
        changed = self._group_table.update(
            wanted.config,
            must_exist=wanted.must_exist,
            must_be_new=wanted.must_be_new,
        )
        if is_other:
            self._windows.drop_group(wanted.config.group)
        reply = wanted.config
        if not changed:
            return reply
        self._core.reply_when_saved(request, reply)
        return None

    def _is_other_delivery(self, config: GroupConfig) -> bool:
        """Return whether a group's delivery mode would change, and check that it may."""
        known = self._group_table.get(config.group)
        if known is None or known.delivery == config.delivery:
            return False
        group = self._groups.find(config.group)
        if group is not None:
            raise InvalidArgument(
                f"consumer group {config.group!r} has delivery = {known.delivery}, and "
                f"{len(group.members)} members, for example {min(group.members)}; stop them first"
            )
        for (_, topic, queue_id), window in self._windows.of_group(config.group).items():
            settled = window.next_offset - window.floor - window.unsettled
            if settled:
                raise InvalidArgument(
                    f"{settled} messages of queue {queue_id} of {topic!r} are settled behind "
                    f"others of group {config.group!r} that are not: they would come again with "
                    f"delivery = {config.delivery}; let members settle the others, or move the "
                    "group's offset"
                )
        return True

    def get_groups(self, request: Request, query: GetGroupsRequest) -> GroupSummaries:
        """One group, or all, in pages."""
        if query.group:
            check_client_group(query.group)
            known = query.group in self._progress.names()
            return GroupSummaries([self._summary(query.group)] if known else [])
        namespace = request.peer.principal.namespace or query.namespace
        names = (
            name
            for name in self._progress.names()
            if name > query.after and is_within(namespace, name)
        )
        page = heapq.nsmallest(MAX_GROUPS_PER_ANSWER + 1, names)
        found: list[GroupSummary] = []
        queues = 0
        for name in page[:MAX_GROUPS_PER_ANSWER]:
            found.append(self._summary(name))
            queues += self._progress.queue_count(name)
            if queues >= QUEUES_PER_LIST:
                break
        return GroupSummaries(found, len(found) < len(page))

    def delete_group(self, request: Request, wanted: DeleteGroupRequest) -> Reply | None:
        """Forgets a group; answered once that is on disk.

        Raises:
            InvalidArgument: It has members, with whose next word it would be there again.
        """
        name = check_client_group(wanted.group)
        group = self._groups.find(name)
        if group is not None:
            raise InvalidArgument(
                f"consumer group {name!r} has {len(group.members)} members, for example "
                f"{min(group.members)}; stop them first"
            )
        self._commit_point.check_room()
        self._group_table.delete(name)
        topics = [retry_topic(name), dlq_topic(name)] if wanted.remove_topics else []
        for topic in topics:
            if self._topics.get(topic) is not None:
                self._topics.delete(topic, self._clock.wall_ms())
        self._core.reply_when_saved(request, EMPTY_REPLY)
        return None

    def _summary(self, name: str) -> GroupSummary:
        group = self._groups.find(name)
        config = self._group_table.get(name)
        own = retry_topic(name)
        topics = [one for one in self._progress.topics_of(name) if one != own]
        is_known = not self._progress.broadcasts(name)
        retrying = self._progress.lag_of(name, own)
        if is_known:
            retrying += self._progress.waiting_retries(name)[0]
        lag = sum(self._progress.lag_of(name, one) for one in topics) + retrying
        return GroupSummary(
            config=config or GroupConfig(name),
            is_configured=config is not None,
            members=0 if group is None else len(group.members),
            message_model=self._groups.model_of(name),
            topics=topics,
            lag=lag if is_known else 0,
            consume_tps=self._progress.rate(name),
            retrying=retrying,
            dead=self._progress.lag_of("", dlq_topic(name)),
            differing=0 if group is None else group.check.differing,
            failures=failures_of(connections_of(self._groups, name, self._clock.monotonic_ms())),
        )

    metrics = (
        gauge(
            "subscription_groups",
            "consumer groups with settings",
            lambda feature: len(feature._group_table),
            rocketmq_name="rocketmq_consumer_group_number",
        ),
    )

"""Administration of consumer groups: questions to brokers, changes of groups and offsets."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from mqmesh.errors import GroupNotFound, InvalidArgument, MQMeshError, TopicNotFound
from mqmesh.message import (
    check_consumer_group,
    check_group,
    check_number,
    check_topic,
    retry_topic,
)
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    LeaseInfo,
    LeaseList,
    ListLeasesRequest,
    ReleasedLeases,
    ReleaseLeasesRequest,
)
from mqmesh.protocol.groups import (
    CloneOffsetRequest,
    ConsumerConnection,
    ConsumerConnections,
    ConsumerConnectionsRequest,
    ConsumeStats,
    ConsumeStatsRequest,
    DeleteGroupRequest,
    GetGroupsRequest,
    GroupConfig,
    GroupFailures,
    GroupNames,
    GroupsProgress,
    GroupsProgressRequest,
    GroupSummaries,
    GroupSummary,
    GroupTopics,
    OffsetChange,
    OffsetChanges,
    ProducerConnection,
    ProducerConnections,
    ProducerConnectionsRequest,
    QueueProgress,
    ResetOffsetRequest,
    ResetWhere,
    TopicConsumersRequest,
    UpdateGroupRequest,
)
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.policies import FOREVER_MS, check_group_policies, paused
from mqmesh.sdk.admin.admin import AdminClient, check_advance, check_restarts, left_to_make
from mqmesh.units import MAX_OFFSET

_T = TypeVar("_T")


class QueueLag(msgspec.Struct, frozen=True):
    """Progress of a group in one queue.

    Attributes:
        broker_name: Broker group of the queue.
        progress: Offsets at the broker; ``consumer_offset`` is -1 where the group never was.
        lag_ms: Waiting time of the oldest message that is not done.
        is_known: False for a group that broadcasts: its members keep their offsets by themselves,
            and the lag is given as 0.
    """

    broker_name: str
    progress: QueueProgress
    lag_ms: int
    is_known: bool = True

    @property
    def lag(self) -> int:
        """Messages that are not done."""
        window = self.progress.window
        if window is not None:
            return window.ready + window.in_flight + window.waiting
        return max(self.progress.max_queue_offset - self._begin, 0) if self.is_known else 0

    @property
    def in_flight(self) -> int:
        """Messages of them that were handed out, and are with a consumer."""
        if self.progress.window is not None:
            return self.progress.window.in_flight
        return min(max(self.progress.pull_offset - self._begin, 0), self.lag)

    @property
    def _begin(self) -> int:
        return max(self.progress.consumer_offset, self.progress.min_queue_offset)


class AllProgress(msgspec.Struct, frozen=True):
    """Progress of all groups of a broker.

    Attributes:
        groups: In no order.
        now_ms: The broker's wall clock, which their timestamps are to be compared with.
    """

    groups: list[GroupTopics]
    now_ms: int


class GroupProgress(msgspec.Struct, frozen=True):
    """Progress of a group.

    Attributes:
        group: Consumer group.
        queues: By topic, broker and queue; its retry topic is one of the topics.
        consume_tps: Messages handed out a second of late.
        dead: Messages in its dead letter topic.
        members: Connected consumers.
        message_model: Of its members, "" without any.
        differing: Members that subscribe differently from the group.
        waiting_retries: Messages that failed and wait for their retry.
        waiting_retries_ms: Time since the oldest of them failed last.
        failures: Deliveries and failures of its members in the last ten minutes.
    """

    group: str
    queues: list[QueueLag]
    consume_tps: float
    dead: int
    members: int
    message_model: str
    differing: int
    waiting_retries: int = 0
    waiting_retries_ms: int = 0
    failures: GroupFailures = GroupFailures()

    @property
    def broadcasts(self) -> bool:
        """True if members keep their offsets themselves: the lag is not known, and given as 0."""
        return self.message_model == MessageModel.BROADCASTING

    @property
    def lag(self) -> int:
        """Messages that are not done, those that are tried again later among them."""
        return sum(one.lag for one in self.queues) + self.waiting_retries

    @property
    def lag_ms(self) -> int:
        """Waiting time of the oldest of them, in ms."""
        return max([one.lag_ms for one in self.queues] + [self.waiting_retries_ms])

    @property
    def in_flight(self) -> int:
        """Messages that are with consumers."""
        return sum(one.in_flight for one in self.queues)

    @property
    def retrying(self) -> int:
        """Messages that failed and are not done: they wait for their retry, or are due."""
        own = retry_topic(self.group)
        due = sum(one.lag for one in self.queues if one.progress.topic == own)
        return due + self.waiting_retries


class OffsetMove(msgspec.Struct, frozen=True):
    """Change that a reset makes, or would make, in a queue.

    Attributes:
        broker_name: Broker group of the queue.
        change: Old and new offset, and where the queue begins and ends.
    """

    broker_name: str
    change: OffsetChange

    @property
    def reread(self) -> int:
        """Messages that come again."""
        if self.change.old_offset < 0:
            return 0
        return max(self.change.old_offset - self.change.new_offset, 0)

    @property
    def skipped(self) -> int:
        """Messages that will not come; all before the new offset if the group never was here."""
        begin = max(self.change.old_offset, self.change.min_queue_offset)
        return max(self.change.new_offset - begin, 0)


class OffsetMoves(msgspec.Struct, frozen=True):
    """Changes that a reset makes, or would make.

    Attributes:
        queues: By topic, broker and queue.
        members_notified: Connected members that are notified.
        dry_run: Nothing was changed.
    """

    queues: list[OffsetMove]
    members_notified: int
    dry_run: bool

    @property
    def reread(self) -> int:
        """Messages that come again."""
        return sum(one.reread for one in self.queues)

    @property
    def skipped(self) -> int:
        """Messages that will not come."""
        return sum(one.skipped for one in self.queues)


class GroupAdmin(AdminClient):
    """Administration of consumer groups, one request at a time, in the caller's thread."""

    # ---- Looking ---------------------------------------------------------------------

    def leases(self, group: str, topic: str = "") -> dict[str, list[LeaseInfo]]:
        """Return the leases of a group's members, and messages that wait for a retry, by broker.

        Args:
            group: Consumer group that acknowledges each message.
            topic: Only of this topic; empty for all.

        Raises:
            InvalidArgument: A name is illegal.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        check_consumer_group(group)

        def ask(endpoint: str) -> list[LeaseInfo]:
            found: list[LeaseInfo] = []
            while True:
                request = ListLeasesRequest(group, topic)
                if found:
                    last = found[-1]
                    request = ListLeasesRequest(group, topic, last.topic, last.queue_id, last.first)
                page = self._ask(endpoint, RequestCode.LIST_LEASES, request, LeaseList)
                found += page.leases
                if not page.more or not page.leases:
                    return found

        return self._each(self._masters(), ask)

    def groups(self, group: str = "") -> dict[str, list[GroupSummary]]:
        """Return a group, or all groups, by broker group; a broker that knows none is left out.

        Raises:
            InvalidArgument: The name is illegal.
            GroupNotFound: No broker knows the group.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        if group:
            check_consumer_group(group)

        def ask(endpoint: str) -> list[GroupSummary]:
            found: list[GroupSummary] = []
            while True:
                after = found[-1].config.group if found else ""
                request = GetGroupsRequest(group, after, self.namespace)
                page = self._ask(
                    endpoint,
                    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
                    request,
                    GroupSummaries,
                )
                found += page.groups
                if not page.more:
                    return found
                check_advance(endpoint, after, found[-1].config.group if page.groups else "")

        by_broker = self._each(self._masters(), ask)
        if group and not any(by_broker.values()):
            raise GroupNotFound(f"no consumer group {group!r} on a broker that runs")
        return {name: found for name, found in by_broker.items() if found}

    def connections(self, group: str) -> list[ConsumerConnection]:
        """Return the members of a consumer group, by client id; none if none is connected.

        Raises:
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        request = ConsumerConnectionsRequest(check_consumer_group(group))

        def ask(endpoint: str) -> list[ConsumerConnection]:
            code = RequestCode.GET_CONSUMER_CONNECTION_LIST
            try:
                return self._ask(endpoint, code, request, ConsumerConnections).members
            except GroupNotFound:
                return []

        found: dict[str, ConsumerConnection] = {}
        for members in self._each(self._masters(), ask).values():
            for one in members:
                known = found.get(one.client_id)
                if known is None or (one.difference and not known.difference):
                    found[one.client_id] = one
        return [found[client_id] for client_id in sorted(found)]

    def producer_connections(self, group: str) -> list[ProducerConnection]:
        """Return the members of a producer group, by client id.

        Raises:
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        request = ProducerConnectionsRequest(check_group(group))
        code = RequestCode.GET_PRODUCER_CONNECTION_LIST
        found: dict[str, ProducerConnection] = {}
        answers = self._each(
            self._masters(),
            lambda endpoint: self._ask(endpoint, code, request, ProducerConnections),
        )
        for answer in answers.values():
            found |= {one.client_id: one for one in answer.members}
        return [found[client_id] for client_id in sorted(found)]

    def progress(self, group: str, topic: str = "") -> GroupProgress:
        """Return the progress of a group in each queue.

        Args:
            group: Consumer group.
            topic: Only this one; empty for all topics of the group.

        Raises:
            InvalidArgument: A name is illegal.
            GroupNotFound: No broker knows the group.
            TopicNotFound: No broker has the topic.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        check_consumer_group(group)
        if topic:
            check_topic(topic)
        summaries = [one for found in self.groups(group).values() for one in found]

        def ask(endpoint: str) -> ConsumeStats | None:
            try:
                return self._stats(endpoint, group, topic)
            except TopicNotFound:
                return None

        answers = self._each(self._masters(), ask)
        if topic and all(answer is None for answer in answers.values()):
            raise TopicNotFound(f"no topic {topic!r} on a broker that runs")
        stats = [answer for answer in answers.values() if answer is not None]
        model = next((one.message_model for one in summaries if one.message_model), "")
        is_known = model != MessageModel.BROADCASTING
        queues = [
            QueueLag(
                broker_name,
                one,
                _waits_ms(one.oldest_timestamp, answer.now_ms) if is_known else 0,
                is_known,
            )
            for broker_name, answer in answers.items()
            if answer is not None
            for one in answer.queues
        ]
        queues.sort(key=lambda q: (q.progress.topic, q.broker_name, q.progress.queue_id))
        return GroupProgress(
            group,
            queues,
            sum(one.consume_tps for one in stats),
            sum(one.dead for one in summaries),
            max(one.members for one in summaries),
            model,
            max(one.differing for one in summaries),
            sum(one.waiting_retries for one in stats),
            max((_waits_ms(one.waiting_since, one.now_ms) for one in stats), default=0),
            # Every member reports to each broker that it uses.
            max((one.failures for one in summaries), key=lambda one: one.deliveries),
        )

    def all_progress(self) -> dict[str, AllProgress]:
        """Return the progress of all groups, by broker group; read in pages of the broker's choice.

        Raises:
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """

        def ask(endpoint: str) -> AllProgress:
            found, now_ms, restarts = dict[str, GroupTopics](), 0, 0
            request = GroupsProgressRequest(namespace=self.namespace)
            while True:
                code = RequestCode.GET_GROUPS_PROGRESS
                page = self._ask(endpoint, code, request, GroupsProgress)
                if request.listing and page.listing != request.listing:
                    found, restarts = {}, restarts + 1
                    check_restarts(endpoint, restarts)
                now_ms = page.now_ms
                for part in page.groups:
                    before = found.get(part.group)
                    if before is not None:
                        part = msgspec.structs.replace(part, topics=[*before.topics, *part.topics])
                    found[part.group] = part
                if page.next_place < 0:
                    return AllProgress(list(found.values()), now_ms)
                if page.listing == request.listing:
                    check_advance(
                        endpoint,
                        (request.place, request.after_topic),
                        (page.next_place, page.after_topic),
                    )
                request = GroupsProgressRequest(
                    page.listing, page.next_place, page.after_topic, self.namespace
                )

        return self._each(self._masters(), ask)

    def topic_consumers(self, topic: str) -> list[str]:
        """Return the groups that read a topic, sorted.

        Raises:
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        request = TopicConsumersRequest(check_topic(topic))
        code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
        answers = self._each(
            self._masters(), lambda endpoint: self._ask(endpoint, code, request, GroupNames)
        )
        return sorted({name for answer in answers.values() for name in answer.groups})

    # ---- Changing --------------------------------------------------------------------

    def create_group(
        self, config: GroupConfig, *, exist_ok: bool = False
    ) -> dict[str, GroupConfig]:
        """Creates a group on every master, if it is a new one.

        Masters that have it with these very settings have them from a former try that failed half
        way: only the others get the request then, so that repeating the call finishes it.

        Args:
            config: Wanted settings.
            exist_ok: Settings of the group that exist are left as they are, and are no error.

        Returns:
            Settings that are now in force, by broker group.

        Raises:
            InvalidArgument: The name is illegal, or a policy makes no sense.
            BrokerError: It exists, among other reasons.
            TransportError: As for ``put_group``.
        """
        check_consumer_group(config.group)
        check_group_policies(config)
        masters = self._masters()
        there: dict[str, GroupConfig] = {}
        with suppress(GroupNotFound):
            found = self.groups(config.group)
            there = {name: one.config for name, (one,) in found.items() if one.is_configured}
        kept, missing = left_to_make(masters, there, config, exist_ok=exist_ok)
        request = UpdateGroupRequest(config, must_be_new=True)
        return kept | self._put_group(masters, dict.fromkeys(missing, request))

    def put_group(self, config: GroupConfig | Mapping[str, GroupConfig]) -> dict[str, GroupConfig]:
        """Creates a group, or changes its settings, on every master.

        Args:
            config: Wanted; or, where it is not to be the same everywhere, by broker group: masters
                of others are left alone then.

        Returns:
            Settings that are now in force, by broker group.

        Raises:
            InvalidArgument: The name is illegal, or a policy makes no sense.
            BrokerError, TransportError: A broker refused or did not answer; the sentence says
                which ones had done it before. Repeating the call is safe.
        """
        for one in [config] if isinstance(config, GroupConfig) else config.values():
            check_consumer_group(one.group)
            check_group_policies(one)
        masters = self._masters()
        wanted = dict.fromkeys(masters, config) if isinstance(config, GroupConfig) else config
        requests = {name: UpdateGroupRequest(one) for name, one in wanted.items()}
        return self._put_group(masters, requests)

    def change_group(
        self, group: str, change: Callable[[GroupConfig], GroupConfig]
    ) -> dict[str, GroupConfig]:
        """Changes the settings of a group on every master, each of those that it has there.

        Args:
            group: Consumer group, known to a broker; others get its settings from defaults.
            change: Makes the new settings from those that are in force.

        Returns:
            Settings that are now in force, by broker group.

        Raises:
            GroupNotFound: No broker knows it.
            InvalidArgument, BrokerError, TransportError: As for ``put_group``.
        """
        present = self.groups(check_consumer_group(group))
        now = {name: GroupConfig(group) for name in self._masters()}
        now |= {name: one.config for name, (one,) in present.items()}
        return self.put_group({name: change(one) for name, one in now.items()})

    def pause_group(
        self, group: str, topic: str = "", *, until_ms: int = FOREVER_MS
    ) -> dict[str, GroupConfig]:
        """Pauses a group: its members get no messages for a while, and keep running.

        Args:
            group: Consumer group.
            topic: Only messages of this one; empty for all, retries among them.
            until_ms: Wall clock of the brokers, ms since 1970; without it, until it is resumed.

        Returns:
            Settings that are now in force, by broker group.

        Raises:
            GroupNotFound: No broker knows it.
            InvalidArgument, BrokerError, TransportError: As for ``put_group``.
        """
        check_number("until_ms", until_ms, FOREVER_MS)
        now_ms = self._transport.clock.wall_ms()
        return self.change_group(group, lambda one: paused(one, until_ms, topic, now_ms))

    def resume_group(self, group: str, topic: str = "") -> dict[str, GroupConfig]:
        """Ends a pause at once.

        Args:
            group: Consumer group.
            topic: Only that of this topic; empty for all pauses.

        Returns:
            Settings that are now in force, by broker group.

        Raises:
            GroupNotFound: No broker knows it.
            InvalidArgument, BrokerError, TransportError: As for ``put_group``.
        """
        return self.pause_group(group, topic, until_ms=0)

    def release_leases(self, group: str, member: str) -> int:
        """End the leases of a member, so that others get its messages at once.

        Args:
            group: Consumer group that acknowledges each message.
            member: Its client id.

        Returns:
            Number of messages, on all brokers.

        Raises:
            InvalidArgument: The name of the group is illegal.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        request = ReleaseLeasesRequest(check_consumer_group(group), member)
        code = RequestCode.RELEASE_LEASES
        answers = self._each(
            self._masters(), lambda endpoint: self._ask(endpoint, code, request, ReleasedLeases)
        )
        return sum(one.messages for one in answers.values())

    def delete_group(self, group: str, *, remove_topics: bool = False) -> list[str]:
        """Deletes a group and its offsets on every broker.

        Args:
            group: Without members.
            remove_topics: Delete its retry and dead letter topics, too.

        Returns:
            Broker groups that knew it.

        Raises:
            InvalidArgument: The name is illegal.
            GroupNotFound: No broker knows it.
            BrokerError: It has members, among other reasons.
        """
        check_consumer_group(group)
        known = self.groups(group)
        request = DeleteGroupRequest(group, remove_topics)
        header, code = encode_header(request), RequestCode.DELETE_SUBSCRIPTIONGROUP
        self._each(
            self._masters(),
            lambda endpoint: self._request(endpoint, code, header),
            changes=True,
        )
        return list(known)

    def reset_offset(
        self,
        group: str,
        topic: str,
        where: ResetWhere,
        *,
        timestamp_ms: int = 0,
        queue_offset: int = -1,
        queue_id: int = -1,
        broker_name: str = "",
        dry_run: bool = False,
    ) -> OffsetMoves:
        """Resets the offsets of a group in a topic, with or without members.

        Running consumers drop the messages that they hold and go on there at once. The group need
        not have read the topic before.

        Args:
            group: Consumer group.
            topic: Topic.
            where: First message, behind the last one, at a time or at an offset.
            timestamp_ms: For ``TIMESTAMP``, ms since 1970.
            queue_offset: For ``OFFSET``, which is of one queue.
            queue_id: Only this queue; -1 for all.
            broker_name: Only this broker group; empty for all.
            dry_run: Change nothing, and report what would change.

        Raises:
            GroupNotFound: No broker knows the group.
            TopicNotFound: No broker has the topic.
            OffsetIllegal: The queue does not reach there.
            InvalidArgument: An illegal name, an offset without the queue it is for, a negative
                time or offset.
            TransportError, BrokerError: A broker does not answer or refuses; the sentence says
                which ones had done it before. Repeating the call is safe.
        """
        check_consumer_group(group)
        check_topic(topic)
        check_number("timestamp_ms", timestamp_ms, MAX_OFFSET)
        if where is ResetWhere.OFFSET:
            check_number("queue_offset", queue_offset, MAX_OFFSET)
        self.groups(group)
        masters = self._carriers_of(topic, broker_name)
        if where is ResetWhere.OFFSET and (queue_id < 0 or len(masters) > 1):
            raise InvalidArgument(
                f"an offset is of one queue: say which of topic {topic!r}"
                + (f", and on which broker: {', '.join(masters)}" if len(masters) > 1 else "")
            )
        request = ResetOffsetRequest(
            group, topic, where, queue_id, timestamp_ms, queue_offset, dry_run
        )

        def ask(endpoint: str) -> OffsetChanges:
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            answer = self._ask(endpoint, code, request, OffsetChanges)
            queues, notified = answer.queues, answer.members_notified
            after = request.after_queue_id
            while answer.more:
                last = answer.queues[-1].queue_id if answer.queues else after
                check_advance(endpoint, after, last)
                after = last
                rest = msgspec.structs.replace(request, after_queue_id=after)
                answer = self._ask(endpoint, code, rest, OffsetChanges)
                queues += answer.queues
            return OffsetChanges(queues, notified)

        return _moves(self._each(masters, ask, changes=not dry_run), dry_run)

    def clone_offset(
        self, source: str, target: str, topic: str = "", *, dry_run: bool = False
    ) -> OffsetMoves:
        """Sets the offsets of a group to those of another; queues that the other never read stay.

        Args:
            source: Group to copy from.
            target: Group to copy to; made if it is not there.
            topic: Only this one; empty for all topics of the source.
            dry_run: Change nothing, and report what would change.

        Raises:
            GroupNotFound: No broker knows the source.
            InvalidArgument: An illegal name, or both are the same.
            TransportError, BrokerError: As for ``reset_offset``.
        """
        check_consumer_group(source)
        check_consumer_group(target)
        request = CloneOffsetRequest(source, target, check_topic(topic) if topic else "", dry_run)
        self.groups(source)
        answers = self._each(
            self._masters(),
            lambda endpoint: self._ask(
                endpoint, RequestCode.CLONE_GROUP_OFFSET, request, OffsetChanges
            ),
            changes=not dry_run,
        )
        return _moves(answers, dry_run)

    def skip_backlog(self, group: str, topic: str = "", *, dry_run: bool = False) -> OffsetMoves:
        """Skips the backlog of a group: it goes on behind the end of a topic, or of all.

        Messages that wait for a retry stay, unless their topic is named.

        Raises:
            MQMeshError: As for ``reset_offset``.
        """
        check_consumer_group(group)
        if topic:
            check_topic(topic)
        topics = {one for found in self.groups(group).values() for s in found for one in s.topics}
        moves: list[OffsetMoves] = []
        for one in [topic] if topic else sorted(topics):
            try:
                moves.append(self.reset_offset(group, one, ResetWhere.LAST, dry_run=dry_run))
            except MQMeshError as error:
                before = f" (done before: {len(moves)} topics)" if moves else ""
                error.args = (f"topic {one}: {error}{before}", *error.args[1:])
                raise
        notified = max((one.members_notified for one in moves), default=0)
        return OffsetMoves([queue for one in moves for queue in one.queues], notified, dry_run)

    # ---- Helpers ---------------------------------------------------------------------

    def _ask(self, endpoint: str, code: int, request: msgspec.Struct, kind: type[_T]) -> _T:
        return decode_header(kind, self._request(endpoint, code, encode_header(request)).header)

    def _put_group(
        self, masters: dict[str, str], wanted: Mapping[str, UpdateGroupRequest]
    ) -> dict[str, GroupConfig]:
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        return self._put(masters, code, wanted, GroupConfig)

    def _stats(self, endpoint: str, group: str, topic: str) -> ConsumeStats:
        """Return what a broker says of a group, all of its pages in one."""
        found: list[QueueProgress] = []
        request = ConsumeStatsRequest(group, topic)
        while True:
            page = self._ask(endpoint, RequestCode.GET_CONSUME_STATS, request, ConsumeStats)
            found += page.queues
            if not page.more or not page.queues:
                return msgspec.structs.replace(page, queues=found, more=False)
            last = page.queues[-1]
            before = (request.after_topic, request.after_queue_id)
            check_advance(endpoint, before, (last.topic, last.queue_id))
            request = ConsumeStatsRequest(group, topic, last.topic, last.queue_id)

    def _carriers_of(self, topic: str, broker_name: str) -> dict[str, str]:
        """Masters that carry a topic, or the one that is meant."""
        masters = self._masters()
        if broker_name and broker_name not in masters:
            raise InvalidArgument(
                f"no running master of broker group {broker_name!r}; there are {', '.join(masters)}"
            )
        carriers = {queue.broker_name for queue in self.route(topic).queues}
        wanted = {broker_name} if broker_name else carriers
        return {name: where for name, where in masters.items() if name in wanted}


def _waits_ms(timestamp: int, now_ms: int) -> int:
    return max(now_ms - timestamp, 0) if timestamp else 0


def _moves(answers: dict[str, OffsetChanges], dry_run: bool) -> OffsetMoves:
    queues = [
        OffsetMove(broker_name, change)
        for broker_name, answer in answers.items()
        for change in answer.queues
    ]
    queues.sort(key=lambda m: (m.change.topic, m.broker_name, m.change.queue_id))
    notified = max((answer.members_notified for answer in answers.values()), default=0)
    return OffsetMoves(queues, notified, dry_run)

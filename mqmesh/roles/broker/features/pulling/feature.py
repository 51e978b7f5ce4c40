"""PULL_MESSAGE: whole batches from a queue, or a place to wait for them."""

from collections.abc import Mapping
from typing import Final

import msgspec

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import BrokerNotAvailable, CorruptBatch, MQMeshError, SystemBusy, TopicNotFound
from mqmesh.message import is_system_topic
from mqmesh.metrics import Labelled, counter, gauge
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.pulling.held_pulls import HeldPull, PullHold
from mqmesh.roles.broker.features.pulling.pull_turns import PullTurns
from mqmesh.roles.broker.followers.read_advice import ReadAdvice
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_limits import GroupLimits
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls, HandedOut
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.group_state.moved_offsets import OffsetResets
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.reading.pull_filter import (
    EVERYTHING,
    MAX_VERIFIED_BYTES,
    get_filtered,
    pull_filter,
    sift,
    without_expired,
)
from mqmesh.roles.broker.topic_state.topic_retention import shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import GetResult, GetStatus
from mqmesh.units import QueueOffset

JUDGED_AS_BYTES: Final = 256
"""Bytes of a turn's budget for each message that an expression judges: also those that nobody gets
take time."""
PASSED_OVER_MS: Final = 1_000
"""A pull waits no longer once messages were passed over that its expression does not want."""

_FOUND = int(PullStatus.FOUND)
_NO_NEW_MSG = int(PullStatus.NO_NEW_MSG)
_NO_MATCHED_MSG = int(PullStatus.NO_MATCHED_MSG)
_OFFSET_ILLEGAL = int(PullStatus.OFFSET_ILLEGAL)
_OFFSET_RESET = int(PullStatus.OFFSET_RESET)
_OFFSET_CUT = int(PullStatus.OFFSET_CUT)
_MESSAGES_LOST = int(PullStatus.MESSAGES_LOST)


_GROUP_LABELS: Final = ("topic", "consumer_group", "is_system")


class PullingFeature(Feature):
    """Messages that consumers pull, or wait for.

    Args:
        core: The core of the broker.
        topics: Topics.
        groups: Members of groups, and the owners of queues.
        group_table: Settings of groups.
        resets: Offsets that were moved under running consumers.
        read_advice: Follower that a consumer should read from.
        metas: Batch metas decoded before.
        by_group: Messages and bytes handed out to each group.
        limits: Pauses and rates of groups.

    Attributes:
        holds: Pulls that wait for a message.
        held_back: Pulls that wait because their group is paused, or has had its messages.
        turns: Pulls that wait for the next turn of the loop.
        waited_for: Queues that somebody waits at, by topic and queue id.
    """

    works_at_followers = True

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        resets: OffsetResets,
        read_advice: ReadAdvice,
        metas: MetaCache,
        by_group: GroupPulls,
        limits: GroupLimits,
    ) -> None:
        config = core.settings.now
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._stats = core.stats
        self._quotas = core.quotas
        self._is_follower = core.is_follower
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._resets = resets
        self._read_advice = read_advice
        self._metas = metas
        self.holds = PullHold(config.max_held_pulls, config.busy_retry_after_ms)
        self.held_back = PullHold(config.max_held_pulls, config.busy_retry_after_ms)
        self.turns = PullTurns(config.max_held_pulls, config.busy_retry_after_ms)
        self.waited_for = self.holds.queues
        self._pulls_of_groups = by_group
        self._limits = limits

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.PULL_MESSAGE: self.pull_message}

    follower_commands = commands

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forget the pulls of a connection."""
        self.holds.release_peer(peer)
        self.held_back.release_peer(peer)
        self.turns.release_peer(peer)

    def topic_deleted(self, topic: str) -> None:
        """Fail the pulls that wait at the queues of a topic."""
        self._pulls_of_groups.forget_topic(topic)
        for held in self.holds.release_topic(topic) + self.held_back.release_topic(topic):
            held.pending.fail(TopicNotFound(f"topic {topic!r} was deleted"))

    def configured(self) -> None:
        """Take over how many pulls may wait."""
        most = self._settings.now.max_held_pulls
        self.holds.most = self.held_back.most = self.turns.most = most

    def pull_message(self, request: Request, pull: PullRequest) -> Reply | None:
        """Answers with messages at once, or holds the pull until there are some."""
        self._stats.total.pull_requests += 1
        self._groups.claims.check_pull(pull.group, pull.topic, pull.queue_id, pull.generation)
        limits = self._group_table.check_pull(pull.group, self._groups.model_of)
        moved = self._moved(pull, pull.queue_offset) or self._cut(pull)
        if moved is not None:
            return moved
        wait_ms = min(pull.suspend_timeout_ms, self._settings.now.long_polling_max_ms)
        if limits is not None and self._limits.is_held(limits, pull.topic):
            return self._hold_back(request, pull, wait_ms)
        turn_is_over = self.turns.left <= 0
        queue_offset = pull.queue_offset
        if not turn_is_over:
            result = self._get(request.peer, pull, queue_offset)
            # A consumer that has not seen this epoch learns it at once, and commits where it is.
            is_new_epoch = 0 < pull.epoch < self._store.epoch()
            if not wait_ms or is_new_epoch or not _is_waiting(result):
                return self._reply(pull, result)
            queue_offset = result.next_queue_offset
        now_ms = self._clock.monotonic_ms()
        held = HeldPull(request.later(now_ms + wait_ms), pull, queue_offset)
        try:
            if turn_is_over:
                self.turns.wait(held)
                return None
            _hurry(held, now_ms)
            self.holds.hold(held)
        except SystemBusy:
            self._stats.total.busy_refusals += 1
            raise
        self._stats.total.pulls_held += 1
        return None

    def _hold_back(self, request: Request, pull: PullRequest, wait_ms: int) -> Reply | None:
        """Lets a pull wait until its group may have messages again."""
        self._limits.held_back += 1
        if not wait_ms:
            return self._nothing(pull, pull.queue_offset)
        pending = request.later(self._clock.monotonic_ms() + wait_ms)
        self.held_back.hold(HeldPull(pending, pull, pull.queue_offset))
        return None

    def _is_held_back(self, pull: PullRequest) -> bool:
        limits = self._group_table.limits_of(pull.group)
        return limits is not None and self._limits.is_held(limits, pull.topic)

    def _go_on_after_limits(self) -> None:
        """Answers pulls whose group may have messages again."""
        queues = self.held_back.queues
        for key in list(queues):
            if all(self._is_held_back(held.pull) for held in queues[key]):
                continue
            for held in self.held_back.release(*key):
                try:
                    self._go_on(held)
                except MQMeshError as error:
                    held.pending.fail(error)

    def wake(self, topic: str, queue_id: int) -> None:
        """Messages came into a queue: answers those who wait at it, as far as they want them."""
        for held in self.holds.release(topic, queue_id):
            try:
                if self.turns.left > 0:
                    self._go_on(held)
                else:
                    self.turns.wait(held)
            except MQMeshError as error:
                held.pending.fail(error)

    def is_waiting(self, group: str, topic: str, queue_id: int) -> bool:
        """Return whether a pull of a group waits at a queue."""
        return any(hold.is_waiting(group, topic, queue_id) for hold in (self.holds, self.held_back))

    def group_deleted(self, group: str) -> None:
        """Forget what was handed out to a group."""
        self._pulls_of_groups.forget(group)
        self._limits.forget(group)

    def begin_turn(self) -> bool:
        """A turn of the loop is over: answers of those who wait for another as many as it may.

        Returns:
            True if some wait on, so that the next turn has to come at once.
        """
        return self.turns.begin() and self.answer_waiting()

    def answer_waiting(self) -> bool:
        """Answer of those who wait for another turn as many as this one may; see ``begin_turn``.

        Returns:
            True if some wait on, so that the next turn has to come at once.
        """
        turns = self.turns
        while (held := turns.take()) is not None:
            try:
                self._go_on(held)
            except MQMeshError as error:
                held.pending.fail(error)
        return len(turns) > 0

    def _go_on(self, held: HeldPull) -> None:
        """Answers a pull that waited, or lets it wait for a message."""
        self._group_table.check_pull(held.pull.group, self._groups.model_of)
        moved = self._moved(held.pull, held.queue_offset)
        if moved is not None:
            held.pending.done(moved)
            return
        if self._is_held_back(held.pull):
            if self._clock.monotonic_ms() < held.pending.deadline_ms:
                self.held_back.hold(held)
            else:
                held.pending.done(self._nothing(held.pull, held.queue_offset))
            return
        result = self._get(held.pending.peer, held.pull, held.queue_offset)
        if _is_waiting(result):
            held.queue_offset = result.next_queue_offset
            now_ms = self._clock.monotonic_ms()
            if now_ms < held.pending.deadline_ms:
                _hurry(held, now_ms)
                self.holds.hold(held)
                return
        held.pending.done(self._reply(held.pull, result))

    def tick(self, now_ms: int) -> None:
        """Answers pulls whose time is over; there may be something after all."""
        for held in self.held_back.tick(now_ms):
            held.pending.done(self._nothing(held.pull, held.queue_offset))
        if self.held_back.queues:
            self._go_on_after_limits()
        for held in self.holds.tick(now_ms):
            try:
                if self._is_held_back(held.pull):
                    held.pending.done(self._nothing(held.pull, held.queue_offset))
                    continue
                result = self._get(held.pending.peer, held.pull, held.queue_offset)
                held.pending.done(self._reply(held.pull, result))
            except MQMeshError as error:
                held.pending.fail(error)

    def stopping(self) -> None:
        """Fail all pulls that wait: the broker stops."""
        self.fail_all(BrokerNotAvailable(f"broker {self._settings.now.broker_name} is stopping"))

    def fail_all(self, error: MQMeshError) -> None:
        """Answer all pulls that wait with an error."""
        waiting = self.holds.release_all() + self.held_back.release_all()
        for held in waiting + self.turns.release_all():
            held.pending.fail(error)

    def _get(self, peer: Peer, pull: PullRequest, queue_offset: int) -> GetResult:
        # Asked before anything is read: who does not take its answers costs no reading.
        most = min(pull.max_bytes, peer.room(), self.turns.most_bytes)
        quota = self._quotas.reading.get(peer.principal.name)
        if quota is not None:
            quota.check(self._clock.monotonic_ms())
        topic = self._topics.get(pull.topic)
        if topic is None or pull.queue_id >= topic.readable_queues:
            topic = self._topics.require_readable(pull.topic, pull.queue_id)
        if topic.retains:
            low, high = self._bounds(pull)
            if queue_offset < low:
                return GetResult(GetStatus.OFFSET_TOO_SMALL, low, low, high)
        wanted = pull_filter(pull.expression, pull.expression_type)
        place = pull.topic, pull.queue_id, queue_offset
        limits = self._group_table.limits_of(pull.group)
        most_messages = None if limits is None else self._limits.most_messages(limits)
        if wanted is None:
            # A client may ask for it as often as it likes, and checksums cost time, too.
            if pull.verify:
                most = min(most, MAX_VERIFIED_BYTES)
            result = self._store.get(*place, max_bytes=most, verify=pull.verify)
            result = _up_to_hole(result, queue_offset, GetStatus.MESSAGES_LOST)
            if topic.expires:
                all_found = result.message_count
                result = without_expired(result, queue_offset, self._clock.wall_ms())
                self._stats.total.expired_messages += all_found - result.message_count
                result = _up_to_hole(result, pull.queue_offset, GetStatus.NO_MATCHED_MESSAGE)
            if most_messages is not None and result.message_count > most_messages:
                result = sift(result, self._metas, queue_offset, EVERYTHING, most_messages)
        else:
            result = get_filtered(
                self._store,
                self._metas,
                place,
                wanted,
                max_bytes=most,
                verify=pull.verify,
                most_messages=most_messages,
                now_ms=self._clock.wall_ms() if topic.expires else None,
            )
            self.turns.left -= JUDGED_AS_BYTES * max(result.next_queue_offset - queue_offset, 0)
        if result.status is GetStatus.OFFSET_OVERFLOW and self._is_follower:
            # The master has it, or the consumer would not ask: it will come.
            bounds = result.min_queue_offset, result.max_queue_offset
            result = GetResult(GetStatus.NO_NEW_MESSAGE, QueueOffset(queue_offset), *bounds)
        size = sum(map(len, result.data)) if result.status is GetStatus.FOUND else 0
        if result.next_queue_offset > queue_offset:
            self._pulls_of_groups.note(
                pull.group,
                pull.topic,
                pull.queue_id,
                result.next_queue_offset,
                result.message_count,
                size,
                self._clock.monotonic_ms(),
            )
        if size:
            self.turns.left -= size
            topic.get_messages += result.message_count
            topic.get_bytes += size
            total = self._stats.total
            total.get_messages += result.message_count
            total.get_bytes += size
            if quota is not None:
                quota.note(result.message_count, size)
            if limits is not None:
                self._limits.note(limits, result.message_count)
        return result

    def _moved(self, pull: PullRequest, queue_offset: int) -> Reply | None:
        """The answer to a pull whose group was sent elsewhere in the queue; None for others."""
        target = self._resets.on_pull(pull.group, pull.topic, pull.queue_id, queue_offset)
        if target is None:
            return None
        bounds = self._bounds(pull)
        epoch = self._store.epoch()
        return Reply(encode_header(PullResponse(_OFFSET_RESET, target, *bounds, 0, epoch)))

    def _cut(self, pull: PullRequest) -> Reply | None:
        """The answer to a pull from behind where the log lost its end since; None for others.

        Other messages may stand there by now, and those from the cut on were never seen.
        """
        epoch = self._store.epoch()
        if pull.epoch == 0 or pull.epoch >= epoch:
            return None  # nearly always: this is asked with every pull
        cut = self._store.cut_offset(pull.topic, pull.queue_id, pull.epoch)
        if cut is None or pull.queue_offset <= cut:
            return None
        bounds = self._bounds(pull)
        return Reply(encode_header(PullResponse(_OFFSET_CUT, cut, *bounds, 0, epoch)))

    def _bounds(self, pull: PullRequest) -> tuple[QueueOffset, QueueOffset]:
        """Return where the queue of a pull begins for its reader, and where it ends."""
        return shown_bounds(self._store, self._topics, self._clock, pull.topic, pull.queue_id)

    def _nothing(self, pull: PullRequest, queue_offset: int) -> Reply:
        """The answer to a pull whose group gets nothing just now."""
        bounds = self._bounds(pull)
        nothing = GetResult(GetStatus.NO_NEW_MESSAGE, QueueOffset(queue_offset), *bounds)
        return self._reply(pull, nothing)

    def _reply(self, pull: PullRequest, result: GetResult) -> Reply:
        next_queue_offset = result.next_queue_offset
        if result.status is GetStatus.FOUND:
            status = _FOUND
        elif result.status is GetStatus.NO_NEW_MESSAGE:
            # While it was held, messages may have been passed over that the filter does not want.
            status = _NO_NEW_MSG if next_queue_offset == pull.queue_offset else _NO_MATCHED_MSG
        elif result.status is GetStatus.NO_MATCHED_MESSAGE:
            status = _NO_MATCHED_MSG
        elif result.status is GetStatus.MESSAGES_LOST:
            status = _MESSAGES_LOST
        else:
            status = _OFFSET_ILLEGAL
        header = PullResponse(
            status,
            next_queue_offset,
            result.min_queue_offset,
            result.max_queue_offset,
            self._read_advice.replica_for(pull, result),
            self._store.epoch(),
        )
        return Reply(encode_header(header), result.data, apart=pull.apart)

    def _by_group(self, name: str) -> Labelled[tuple[str, str, HandedOut]]:
        return Labelled(
            self._pulls_of_groups.handed_out(),
            lambda one: (one[0], one[1], str(is_system_topic(one[0])).lower()),
            lambda one: getattr(one[2], name),
        )

    def _paused(self) -> Labelled[GroupConfig]:
        found = [one for one in self._group_table.limited() if self._limits.is_paused(one)]
        return Labelled(found, lambda one: (one.group,), lambda one: 1)

    metrics = (
        counter(
            "pull_requests_total",
            "requests for messages",
            lambda feature: feature._stats.total.pull_requests,
        ),
        counter(
            "pulls_held_total",
            "pulls that had to wait for a message",
            lambda feature: feature._stats.total.pulls_held,
        ),
        gauge(
            "held_pulls", "pulls that wait for a message now", lambda feature: len(feature.holds)
        ),
        gauge(
            "held_back_pulls",
            "pulls that wait now because their group is paused, or at its messages a second",
            lambda feature: len(feature.held_back),
        ),
        gauge(
            "group_paused",
            "1 for a group that gets nothing now, of all topics or of one: it is paused",
            lambda feature: feature._paused(),
            labels=("consumer_group",),
        ),
        counter(
            "pulls_held_back_total",
            "pulls that waited because their group is paused, or at its messages a second",
            lambda feature: feature._limits.held_back,
        ),
        counter(
            "expired_messages_total",
            "messages that groups did not get because their time to live was over",
            lambda feature: feature._stats.total.expired_messages,
            unit="messages",
        ),
        counter(
            "get_messages_total",
            "messages that were handed out",
            lambda feature: feature._stats.total.get_messages,
            unit="messages",
        ),
        counter(
            "get_bytes_total",
            "bytes that were handed out",
            lambda feature: feature._stats.total.get_bytes,
        ),
        gauge(
            "get_messages_per_s",
            "messages handed out, of late",
            lambda feature: feature._stats.rate("get_messages"),
            unit="messages",
        ),
        gauge(
            "get_bytes_per_s",
            "bytes handed out, of late",
            lambda feature: feature._stats.rate("get_bytes"),
            unit="bytes",
        ),
        counter(
            "group_get_messages_total",
            "messages handed out to a group",
            lambda feature: feature._by_group("messages"),
            unit="messages",
            labels=_GROUP_LABELS,
            rocketmq_name="rocketmq_messages_out_total",
        ),
        counter(
            "group_get_bytes_total",
            "bytes handed out to a group",
            lambda feature: feature._by_group("stored_bytes"),
            labels=_GROUP_LABELS,
            rocketmq_name="rocketmq_throughput_out_total",
        ),
    )


def _hurry(held: HeldPull, now_ms: int) -> None:
    """Shorten the deadline of a pull that passed messages over: the group's offset keeps up so;
    but not to now, or a consumer that wants nothing of a busy topic would ask for each message."""
    if held.queue_offset > held.pull.queue_offset:
        held.pending.deadline_ms = min(held.pending.deadline_ms, now_ms + PASSED_OVER_MS)


def _up_to_hole(result: GetResult, queue_offset: int, status: GetStatus) -> GetResult:
    """Return the result of a read up to the first message that is missing.

    A client that wants everything takes no answer that leaves something out, unless the answer
    says to pass it: by its status and the offset behind.

    Args:
        result: Of a read without a filter.
        queue_offset: That the client asked for.
        status: Of an answer whose first message is missing.
    """
    if result.status is GetStatus.NO_MATCHED_MESSAGE:
        return msgspec.structs.replace(result, status=status)
    missing = result.next_queue_offset - queue_offset - result.message_count
    if result.status is not GetStatus.FOUND or missing <= 0:
        return result
    bounds = result.min_queue_offset, result.max_queue_offset
    expected = queue_offset
    good: list[bytes | memoryview] = []
    for data in result.data:
        position = 0
        while position < len(data):
            try:
                header = read_header(data, position)
            except CorruptBatch:
                return result  # the client finds that out, too
            if header.base_queue_offset > expected and expected == queue_offset:
                following = QueueOffset(header.base_queue_offset)
                return GetResult(status, following, *bounds)
            if header.base_queue_offset > expected:
                if position:
                    good.append(memoryview(data)[:position])
                count = expected - queue_offset
                return GetResult(GetStatus.FOUND, QueueOffset(expected), *bounds, good, count)
            expected = header.next_queue_offset
            position += header.total_size
        good.append(data)
    return result


def _is_waiting(result: GetResult) -> bool:
    """True when the consumer stands at the end of the queue."""
    if result.status is GetStatus.NO_NEW_MESSAGE:
        return True
    return (
        result.status is GetStatus.NO_MATCHED_MESSAGE
        and result.next_queue_offset >= result.max_queue_offset
    )

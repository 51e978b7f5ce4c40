"""PULL_MESSAGE: whole batches from a queue, or a place to wait for them."""

from typing import Final

from mqmesh.batch.record_batch import read_header
from mqmesh.errors import BrokerNotAvailable, CorruptBatch, MQMeshError, SystemBusy, TopicNotFound
from mqmesh.protocol.command import Reply, Request, encode_header
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.pulls.pull_filter import get_filtered, pull_filter
from mqmesh.roles.broker.features.pulls.pull_hold import HeldPull
from mqmesh.storage.interface import GetResult, GetStatus
from mqmesh.units import MIB, QueueOffset

MAX_VERIFIED_BYTES: Final = 1 * MIB
"""Checked for one answer; at least one batch, whatever its size."""
JUDGED_AS_BYTES: Final = 256
"""Of a turn's budget, for each message that an expression judges: also those that nobody gets
take time."""
PASSED_OVER_MS: Final = 1_000
"""A pull waits no longer once messages were passed over that its expression does not want."""

_FOUND = int(PullStatus.FOUND)
_NO_NEW_MSG = int(PullStatus.NO_NEW_MSG)
_NO_MATCHED_MSG = int(PullStatus.NO_MATCHED_MSG)
_OFFSET_ILLEGAL = int(PullStatus.OFFSET_ILLEGAL)
_OFFSET_RESET = int(PullStatus.OFFSET_RESET)
_OFFSET_CUT = int(PullStatus.OFFSET_CUT)


def pull_message(context: BrokerContext, request: Request, pull: PullRequest) -> Reply | None:
    """Answers with messages at once, or holds the pull until there are some."""
    context.stats.total.pull_requests += 1
    context.groups.claims.check_pull(pull.group, pull.topic, pull.queue_id, pull.generation)
    context.group_table.check_pull(pull.group, context.groups.model_of)
    moved = _moved(context, pull, pull.queue_offset) or _cut(context, pull)
    if moved is not None:
        return moved
    wait_ms = min(pull.suspend_timeout_ms, context.config.long_polling_max_ms)
    turn_is_over = context.turns.left <= 0
    queue_offset = pull.queue_offset
    if not turn_is_over:
        result = _get(context, request, pull, queue_offset)
        # Who has not seen this epoch is told of it at once, and commits where it is.
        is_news = 0 < pull.epoch < context.store.epoch()
        if not wait_ms or is_news or not _is_waiting(result):
            return _reply(context, pull, result)
        queue_offset = result.next_queue_offset
    now_ms = context.clock.monotonic_ms()
    held = HeldPull(request.without_frame(), pull, queue_offset, now_ms + wait_ms)
    try:
        if turn_is_over:
            context.turns.wait(held)
            return None
        _hurry(held, now_ms)
        context.holds.hold(held)
    except SystemBusy:
        context.stats.total.busy_refusals += 1
        raise
    context.stats.total.pulls_held += 1
    return None


def wake_pulls(context: BrokerContext, topic: str, queue_id: int) -> None:
    """Messages came into a queue: answers those who wait at it, as far as they want them."""
    for held in context.holds.release(topic, queue_id):
        try:
            if context.turns.left > 0:
                _go_on(context, held)
            else:
                context.turns.wait(held)
        except MQMeshError as error:
            context.wire.fail(held.request, error)


def begin_pull_turn(context: BrokerContext) -> bool:
    """A turn of the loop is over: answers of those who wait for another as many as it may.

    Returns:
        True if some wait on, so that the next turn has to come at once.
    """
    turns = context.turns
    turns.begin()
    while (held := turns.take()) is not None:
        try:
            _go_on(context, held)
        except MQMeshError as error:
            context.wire.fail(held.request, error)
    return len(turns) > 0


def _go_on(context: BrokerContext, held: HeldPull) -> None:
    """Answers a pull that waited, or lets it wait for a message."""
    context.group_table.check_pull(held.pull.group, context.groups.model_of)
    moved = _moved(context, held.pull, held.queue_offset)
    if moved is not None:
        context.wire.reply(held.request, moved)
        return
    result = _get(context, held.request, held.pull, held.queue_offset)
    if _is_waiting(result):
        held.queue_offset = result.next_queue_offset
        now_ms = context.clock.monotonic_ms()
        if now_ms < held.deadline_ms:
            _hurry(held, now_ms)
            context.holds.hold(held)
            return
    context.wire.reply(held.request, _reply(context, held.pull, result))


def _hurry(held: HeldPull, now_ms: int) -> None:
    """What was passed over is told soon, so that the group's offset keeps up; but not at once,
    or a consumer that wants nothing of a busy topic would ask for each of its messages."""
    if held.queue_offset > held.pull.queue_offset:
        held.deadline_ms = min(held.deadline_ms, now_ms + PASSED_OVER_MS)


def answer_expired_pulls(context: BrokerContext, now_ms: int) -> None:
    """Answers pulls whose time is over; there may be something after all."""
    for held in context.holds.tick(now_ms):
        try:
            result = _get(context, held.request, held.pull, held.queue_offset)
            context.wire.reply(held.request, _reply(context, held.pull, result))
        except MQMeshError as error:
            context.wire.fail(held.request, error)


def fail_pulls_of(context: BrokerContext, topic: str) -> None:
    """A topic was deleted: tells those who wait at its queues."""
    for held in context.holds.release_topic(topic):
        context.wire.fail(held.request, TopicNotFound(f"topic {topic!r} was deleted"))


def fail_all_pulls(context: BrokerContext) -> None:
    """The broker stops: tells all who wait."""
    fail_pulls(context, BrokerNotAvailable(f"broker {context.config.broker_name} is stopping"))


def fail_pulls(context: BrokerContext, error: MQMeshError) -> None:
    """Tells all who wait that it is in vain, and why."""
    for held in context.holds.release_all() + context.turns.release_all():
        context.wire.fail(held.request, error)


def _get(
    context: BrokerContext, request: Request, pull: PullRequest, queue_offset: int
) -> GetResult:
    # Asked before anything is read: who does not take its answers costs no reading.
    most = min(pull.max_bytes, context.wire.room(request.peer), context.turns.most_bytes)
    quota = context.quotas.reading.get(request.principal.name)
    if quota is not None:
        quota.check(context.clock.monotonic_ms())
    topic = context.topics.get(pull.topic)
    if topic is None or pull.queue_id >= topic.readable_queues:
        topic = context.topics.require_readable(pull.topic, pull.queue_id)
    wanted = pull_filter(pull.expression, pull.expression_type)
    place = pull.topic, pull.queue_id, queue_offset
    if wanted is None:
        # A client may ask for it as often as it likes, and checksums cost time, too.
        if pull.verify:
            most = min(most, MAX_VERIFIED_BYTES)
        found = context.store.get(*place, max_bytes=most, verify=pull.verify)
        result = _up_to_hole(found, pull.queue_offset)
    else:
        result = get_filtered(
            context.store,
            context.metas,
            place,
            wanted,
            max_bytes=most,
            verify=pull.verify,
        )
        context.turns.left -= JUDGED_AS_BYTES * max(result.next_queue_offset - queue_offset, 0)
    if result.status is GetStatus.OFFSET_OVERFLOW and context.is_follower:
        # The master has it, or the consumer would not ask: it will come.
        bounds = result.min_queue_offset, result.max_queue_offset
        result = GetResult(GetStatus.NO_NEW_MESSAGE, QueueOffset(queue_offset), *bounds)
    size = sum(map(len, result.data)) if result.status is GetStatus.FOUND else 0
    if result.next_queue_offset > queue_offset:
        context.pulls.note(
            pull.group,
            pull.topic,
            pull.queue_id,
            result.next_queue_offset,
            result.message_count,
            size,
            context.clock.monotonic_ms(),
        )
    if size:
        context.turns.left -= size
        topic.get_messages += result.message_count
        topic.get_bytes += size
        total = context.stats.total
        total.get_messages += result.message_count
        total.get_bytes += size
        if quota is not None:
            quota.note(result.message_count, size)
    return result


def _up_to_hole(result: GetResult, queue_offset: int) -> GetResult:
    """What was read, up to the first message that was lost to damage.

    A client that wants everything takes no answer that leaves something out, unless it is told
    to pass it: by NO_MATCHED_MSG and the offset behind.

    Args:
        result: Of a read without a filter.
        queue_offset: That the client asked for.
    """
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
                return GetResult(GetStatus.NO_MATCHED_MESSAGE, following, *bounds)
            if header.base_queue_offset > expected:
                if position:
                    good.append(memoryview(data)[:position])
                count = expected - queue_offset
                return GetResult(GetStatus.FOUND, QueueOffset(expected), *bounds, good, count)
            expected = header.next_queue_offset
            position += header.total_size
        good.append(data)
    return result


def _moved(context: BrokerContext, pull: PullRequest, queue_offset: int) -> Reply | None:
    """The answer to a pull whose group was sent elsewhere in the queue; None for others."""
    target = context.resets.on_pull(pull.group, pull.topic, pull.queue_id, queue_offset)
    if target is None:
        return None
    bounds = context.store.queue_bounds(pull.topic, pull.queue_id)
    epoch = context.store.epoch()
    return Reply(encode_header(PullResponse(_OFFSET_RESET, target, *bounds, 0, epoch)))


def _cut(context: BrokerContext, pull: PullRequest) -> Reply | None:
    """The answer to a pull from behind where the log lost its end since; None for others.

    Other messages may stand there by now, and those from the cut on were never seen.
    """
    epoch = context.store.epoch()
    if pull.epoch == 0 or pull.epoch >= epoch:
        return None  # nearly always: this is asked with every pull
    cut = context.store.cut_offset(pull.topic, pull.queue_id, pull.epoch)
    if cut is None or pull.queue_offset <= cut:
        return None
    bounds = context.store.queue_bounds(pull.topic, pull.queue_id)
    return Reply(encode_header(PullResponse(_OFFSET_CUT, cut, *bounds, 0, epoch)))


def _is_waiting(result: GetResult) -> bool:
    """True when the consumer stands at the end of the queue."""
    if result.status is GetStatus.NO_NEW_MESSAGE:
        return True
    return (
        result.status is GetStatus.NO_MATCHED_MESSAGE
        and result.next_queue_offset >= result.max_queue_offset
    )


def _reply(context: BrokerContext, pull: PullRequest, result: GetResult) -> Reply:
    next_queue_offset = result.next_queue_offset
    if result.status is GetStatus.FOUND:
        status = _FOUND
    elif result.status is GetStatus.NO_NEW_MESSAGE:
        # While it was held, messages may have been passed over that the filter does not want.
        status = _NO_NEW_MSG if next_queue_offset == pull.queue_offset else _NO_MATCHED_MSG
    elif result.status is GetStatus.NO_MATCHED_MESSAGE:
        status = _NO_MATCHED_MSG
    else:
        status = _OFFSET_ILLEGAL
    header = PullResponse(
        status,
        next_queue_offset,
        result.min_queue_offset,
        result.max_queue_offset,
        context.read_advice.replica_for(pull, result),
        context.store.epoch(),
    )
    return Reply(encode_header(header), result.data, apart=pull.apart)

"""Requests of RocketMQ's consumers: pulls and offsets."""

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import (
    CorruptBatch,
    EndpointUnreachable,
    MQMeshError,
    OffsetIllegal,
    StaleGeneration,
    TopicNotFound,
)
from mqmesh.message import RETRY_PREFIX, StoredMessage
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import ResetOffsetRequest, ResetWhere
from mqmesh.protocol.pulling import (
    MAX_SUSPEND_MS,
    ConsumerOffsets,
    ExpressionType,
    OffsetResponse,
    PullRequest,
    PullResponse,
    PullStatus,
    QueryConsumerOffsetRequest,
    QueueBoundsRequest,
    QueueBoundsResponse,
    QueueOffsetEntry,
    SearchOffsetRequest,
    UpdateConsumerOffsetRequest,
)
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.members import (
    MOST_CLAIMS,
    GatewayMember,
    GatewayMembers,
    QueueKey,
    broker_of,
)
from mqmesh.roles.gateway.messages import tag_expression, to_record
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.session import (
    Handler,
    RemotingSession,
    number_field,
    text_field,
)
from mqmesh.roles.gateway.upstream import REQUEST_MS, Upstream
from mqmesh.units import KIB

PULL_BYTES: Final = 256 * KIB
"""Bytes of one pull from a broker; a client gets those that it does not take with the next."""
ANSWER_BYTES: Final = 1024 * KIB
"""Bytes of records that one answer has, unless one record alone has more."""
MOST_MESSAGES: Final = 1_024
MISSING_TOPIC_MS: Final = 1_000
"""Pulls of a retry topic that is not there yet are answered after this, not to be repeated at
once."""

KEPT_MS: Final = 10_000
"""Time after which messages that no client took are dropped, to be pulled again."""
DECODED_BYTES: Final = 4 * 1024 * KIB
"""Bytes of messages, decompressed, that one answer of a broker may take, unless one batch alone has
more."""
MOST_FROM_FIRST: Final = 100_000
"""Longest queue, in messages, that a new group gets from its first message; in a longer one the
client's ``consumeFromWhere`` counts. RocketMQ: while message 0 is in memory
(``checkInMemByConsumeOffset``)."""
STALE_MS: Final = 1_000
"""A pull of a member whose queue was given to another one is answered so late: RocketMQ's clients
pull again at once."""

BROKEN_MS: Final = 200
"""Interval at which a pull that may wait is repeated while its broker cannot be reached. RocketMQ's
clients would log an error, and pull again after 3 s (``pullTimeDelayMillsWhenException``)."""

COMMIT_OFFSET: Final = 1
SUSPEND: Final = 2
HAS_SUBSCRIPTION: Final = 4
"""Bits of a pull's system flag."""


_log = logging.getLogger(__name__)


class PulledRun(msgspec.Struct, eq=False):
    """Messages of a queue that a broker gave, behind one another.

    Attributes:
        first: Offset from which on they are all that the subscription wants.
        next: Offset behind them.
        offsets: Queue offsets of the messages.
        messages: The messages.
        size: Bytes of the messages.
        bounds: First and last offset of the queue when they came.
        came_ms: Time of their arrival, monotonic clock.
    """

    first: int
    next: int
    offsets: list[int]
    messages: list[StoredMessage]
    size: int
    bounds: tuple[int, int]
    came_ms: int


_RunKey = tuple[str, str, int, str, str]
"""Broker group, topic, queue, type and text of the expression."""


class PullCache:
    """Messages that brokers gave beyond what a pull took; the oldest go when there is no room.

    Args:
        max_bytes: Bytes of messages that are kept.
        now_ms: Monotonic clock.

    Attributes:
        held_bytes: Bytes of the messages that are there.
    """

    def __init__(self, max_bytes: int, now_ms: Callable[[], int]) -> None:
        self._max_bytes = max_bytes
        self._now_ms = now_ms
        self._runs: dict[_RunKey, PulledRun] = {}
        self.held_bytes = 0

    def find(self, key: _RunKey, offset: int) -> PulledRun | None:
        """Return the run that has the messages from an offset on."""
        run = self._runs.get(key)
        if run is None or not run.first <= offset < run.next:
            return None
        if self._now_ms() - run.came_ms > KEPT_MS:
            # By now the topic may be another one, or the time of the messages over.
            self.drop(key)
            return None
        return run

    def keep(self, key: _RunKey, run: PulledRun) -> None:
        """Keep a run in place of the former one of its queue and expression."""
        self.drop(key)
        self._runs[key] = run
        self.held_bytes += run.size
        while self.held_bytes > self._max_bytes and self._runs:
            self.drop(next(iter(self._runs)))

    def drop(self, key: _RunKey) -> None:
        """Drop a run that no client needs."""
        old = self._runs.pop(key, None)
        if old is not None:
            self.held_bytes -= old.size

    def drop_broker(self, broker_name: str) -> None:
        """Drop what a broker group gave: another replica may have other messages there."""
        for key in [key for key in self._runs if key[0] == broker_name]:
            self.drop(key)


def read_run(
    key: _RunKey, found: PullResponse, body: memoryview, offset: int, now_ms: int
) -> PulledRun | None:
    """Return the messages of an answer from an offset on, up to damage or ``DECODED_BYTES``.

    Returns:
        None if nothing stands before the damage.
    """
    end, size = -1, 0
    messages: list[StoredMessage] = []
    try:
        for header, batch in iter_batches(body):
            end = header.base_queue_offset
            if size and size + header.raw_size > DECODED_BYTES:
                break
            check_stored(batch)
            messages += decode_messages(batch, header, broker_name=key[0])
            size += header.raw_size
            end = header.next_queue_offset
        else:
            end = found.next_queue_offset
    except CorruptBatch as error:
        _log.error("messages of %s from offset %d on: %s", key[1], end, error)
        if end <= offset:
            return None
    wanted = [one for one in messages if one.queue_offset >= offset]
    offsets: list[int] = [one.queue_offset for one in wanted]
    bounds = (found.min_queue_offset, found.max_queue_offset)
    return PulledRun(offset, end, offsets, wanted, size, bounds, now_ms)


class Consuming:
    """Handlers of consumers' requests.

    Args:
        upstream: Way to the brokers.
        members: GatewayMembers of groups.
        ports: Addresses of broker groups.
        cache: Messages that pulls left.

    Attributes:
        messages: Messages that were given to clients.
    """

    def __init__(
        self, upstream: Upstream, members: GatewayMembers, ports: BrokerPorts, cache: PullCache
    ) -> None:
        self._upstream = upstream
        self._members = members
        self._ports = ports
        self._cache = cache
        self.messages = 0

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of consumers' requests."""
        return {
            RemotingCode.PULL_MESSAGE: self._pull,
            RemotingCode.LITE_PULL_MESSAGE: self._pull,
            RemotingCode.QUERY_CONSUMER_OFFSET: self._query_offset,
            RemotingCode.UPDATE_CONSUMER_OFFSET: self._update_offset,
            RemotingCode.GET_MAX_OFFSET: self._bound,
            RemotingCode.GET_MIN_OFFSET: self._bound,
            RemotingCode.SEARCH_OFFSET_BY_TIMESTAMP: self._search_offset,
        }

    # ---- Pulls ---------------------------------------------------------------------------

    def _pull(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name, flag = broker_of(session), number_field(request, "sysFlag", 0)
        group, topic = text_field(request, "consumerGroup"), text_field(request, "topic")
        queue = (group, topic, number_field(request, "queueId"))
        offset = number_field(request, "queueOffset")
        member = self._members.of(session)
        if flag & COMMIT_OFFSET and number_field(request, "commitOffset", 0) > 0:
            commit = number_field(request, "commitOffset")
            self._commit(broker_name, member, queue, commit, _ignore)
        wanted = self._expression(request, flag, member, group, topic)
        if wanted is None:
            # Without it the client would get what it did not subscribe to.
            session.answer(
                request,
                RemotingStatus.SUBSCRIPTION_NOT_EXIST,
                remark=f"no heartbeat of this client says what group {group} wants of {topic}",
            )
            return
        key = (broker_name, topic, queue[2], *wanted)
        run = self._cache.find(key, offset)
        if run is not None:
            self._give(session, request, key, run, offset)
            return
        suspend_ms = 0
        if flag & SUSPEND:
            wanted_ms = number_field(request, "suspendTimeoutMillis", 0)
            suspend_ms = min(max(wanted_ms, 0), MAX_SUSPEND_MS)
        self._ask(session, request, key, queue, offset, suspend_ms)

    def _ask(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        key: _RunKey,
        queue: QueueKey,
        offset: int,
        suspend_ms: int,
        *,
        verify: bool = False,
    ) -> None:
        """Ask the broker for the messages of a pull."""
        member, clock = self._members.of(session), self._upstream.loop.clock
        until_ms = clock.monotonic_ms() + suspend_ms
        pull = PullRequest(
            *queue,
            max(offset, 0),
            PULL_BYTES,
            suspend_ms,
            key[4],
            key[3],
            generation=0 if member is None else member.claims.get(queue, 0),
            verify=verify,
            epoch=0 if member is None else member.epochs.get(queue, 0),
        )

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(PullResponse, answer.header)
                if member is not None and len(member.epochs) < MOST_CLAIMS:
                    member.epochs[queue] = found.epoch
                damaged = self._pulled(session, request, key, found, answer.body, offset)
            except TopicNotFound as error:
                self._missing_topic(session, request, queue[1], offset, error)
            except StaleGeneration:
                self._lost_queue(member, queue)
                self._later(session, request, offset, STALE_MS)
            except EndpointUnreachable as error:
                left_ms = until_ms - clock.monotonic_ms() - BROKEN_MS
                if left_ms <= 0 or session.is_closed or self._upstream.closed:
                    session.fail(request, error)
                    return
                again = partial(self._ask, session, request, key, queue, offset, left_ms)
                self._upstream.loop.call_later(BROKEN_MS, again)
            except MQMeshError as error:
                session.fail(request, error)
            else:
                if damaged and verify:
                    text = f"the messages of {queue[1]!r} at offset {offset} are damaged"
                    session.fail(request, CorruptBatch(text))
                elif damaged:
                    self._ask(session, request, key, queue, offset, suspend_ms, verify=True)

        if suspend_ms:
            session.park(request)
        self._upstream.request(
            key[0],
            RequestCode.PULL_MESSAGE,
            done,
            header=encode_header(pull),
            timeout_ms=suspend_ms + REQUEST_MS,
        )

    def _lost_queue(self, member: GatewayMember | None, queue: QueueKey) -> None:
        """Note that a broker gave a member's queue to another one.

        The member is to look at its group again. If the queue is its own after that, it goes on
        without a claim, as at RocketMQ: its clients do not claim again what they have.
        """
        if member is not None:
            member.claims.pop(queue, None)
            self._members.notify_changed(member, queue[0])

    def _later(
        self, session: RemotingSession, request: RemotingCommand, offset: int, delay_ms: int
    ) -> None:
        session.park(request)
        self._upstream.loop.call_later(
            delay_ms,
            lambda: _give_none(session, request, RemotingStatus.PULL_NOT_FOUND, offset, (0, 0)),
        )

    def _expression(
        self,
        request: RemotingCommand,
        flag: int,
        member: GatewayMember | None,
        group: str,
        topic: str,
    ) -> tuple[str, str] | None:
        """Return type and text of the expression of a pull; None if it is unknown."""
        if flag & HAS_SUBSCRIPTION and request.fields.get("subscription"):
            kind = request.fields.get("expressionType") or ExpressionType.TAG.value
            return kind, tag_expression(request.fields["subscription"], kind)
        if member is not None and topic == RETRY_PREFIX + group and member.consumes(group):
            return ExpressionType.TAG.value, "*"
        known = None if member is None else member.subscription(group, topic)
        return None if known is None else (known.expression_type, known.expression)

    def _pulled(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        key: _RunKey,
        found: PullResponse,
        body: memoryview,
        offset: int,
    ) -> bool:
        """Answer a pull; return True, without an answer, if its first batch is damaged."""
        bounds = (found.min_queue_offset, found.max_queue_offset)
        if offset < 0:
            _give_none(session, request, RemotingStatus.PULL_OFFSET_MOVED, bounds[0], bounds)
        elif found.status == PullStatus.NO_NEW_MSG:
            _give_none(session, request, RemotingStatus.PULL_NOT_FOUND, offset, bounds)
        elif found.status in (PullStatus.NO_MATCHED_MSG, PullStatus.MESSAGES_LOST):
            code = RemotingStatus.PULL_RETRY_IMMEDIATELY
            _give_none(session, request, code, found.next_queue_offset, bounds)
        elif found.status == PullStatus.OFFSET_ILLEGAL:
            right = min(max(offset, bounds[0]), bounds[1])
            _give_none(session, request, RemotingStatus.PULL_OFFSET_MOVED, right, bounds)
        elif found.status != PullStatus.FOUND:
            code = RemotingStatus.PULL_OFFSET_MOVED
            _give_none(session, request, code, found.next_queue_offset, bounds)
        else:
            run = read_run(key, found, body, offset, self._upstream.loop.clock.monotonic_ms())
            if run is None:
                return True
            self._cache.keep(key, run)
            self._give(session, request, key, run, offset)
        return False

    def _give(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        key: _RunKey,
        run: PulledRun,
        offset: int,
    ) -> None:
        most = min(max(number_field(request, "maxMsgNums", 32), 1), MOST_MESSAGES)
        at = bisect_left(run.offsets, offset)
        address, records, size = self._ports.address(key[0]), list[bytes](), 0
        for message in run.messages[at : at + most]:
            record = to_record(message, address)
            if records and size + len(record) > ANSWER_BYTES:
                break
            records.append(record)
            size += len(record)
        after = at + len(records)
        following = run.offsets[after] if after < len(run.offsets) else run.next
        if after >= len(run.offsets):
            self._cache.drop(key)
        if not records:
            code = RemotingStatus.PULL_RETRY_IMMEDIATELY
            _give_none(session, request, code, following, run.bounds)
            return
        self.messages += len(records)
        session.answer(request, fields=_places(following, run.bounds), body=b"".join(records))

    def _missing_topic(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        topic: str,
        offset: int,
        error: MQMeshError,
    ) -> None:
        if not topic.startswith(RETRY_PREFIX):
            session.fail(request, error)
            return
        # Shown before it is there; see ``routing``.
        self._later(session, request, offset, MISSING_TOPIC_MS)

    # ---- Offsets -------------------------------------------------------------------------

    def _query_offset(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name, key = broker_of(session), _queue_key(request)
        group, topic, queue_id = key
        member = self._members.of(session)
        claims = member is not None and member.consumes(group)
        queue = QueueOffsetEntry(topic, queue_id)

        def ask(client_id: str) -> None:
            header = encode_header(QueryConsumerOffsetRequest(group, [queue], client_id))
            self._upstream.ask(broker_name, RequestCode.QUERY_CONSUMER_OFFSET, header, done)

        def done(answer: Command | MQMeshError) -> None:
            nonlocal claims
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(ConsumerOffsets, answer.header)
            except StaleGeneration:
                if claims:
                    # Another member has it in this generation, and does not know yet, or is one
                    # that gives nothing back, as RocketMQ's: they go on without a claim.
                    claims = False
                    ask("")
                else:
                    session.drop(request)
                return
            except TopicNotFound:
                offset = 0 if topic.startswith(RETRY_PREFIX) else -1
                _answer_offset(session, request, offset)
                return
            except MQMeshError as error:
                # Clients up to 4.9 take any error for "never consumed", and skip the backlog.
                _log.info("the offset of group %s in %s: %s; no answer", group, topic, error)
                session.drop(request)
                return
            if member is not None and found.generation and len(member.claims) < MOST_CLAIMS:
                member.claims[key] = member.generations[group] = found.generation
            offset = found.queues[0].queue_offset if found.queues else -1
            if offset < 0 and request.fields.get("setZeroIfNotFound", "").lower() != "false":
                self._answer_first(session, request)
            else:
                _answer_offset(session, request, offset)

        ask(session.client_id if claims else "")

    def _answer_first(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Have a group begin with a queue's first message where none was deleted yet.

        RocketMQ does so, wherever the client wants to begin: messages sent before a new
        service runs for the first time are not lost. In a longer queue the client's wish counts.
        """
        _, topic, queue_id = _queue_key(request)

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(QueueBoundsResponse, answer.header)
            except TopicNotFound:
                found = QueueBoundsResponse(0, 0)
            except MQMeshError as error:
                _log.info("the bounds of %s are unknown: %s; no answer", topic, error)
                session.drop(request)  # see above
                return
            is_short = found.min_queue_offset == 0 < found.max_queue_offset <= MOST_FROM_FIRST
            _answer_offset(session, request, 0 if is_short else -1)

        header = encode_header(QueueBoundsRequest(topic, queue_id))
        self._upstream.ask(broker_of(session), RequestCode.QUERY_QUEUE_BOUNDS, header, done)

    def _update_offset(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name, key = broker_of(session), _queue_key(request)
        member, offset = self._members.of(session), number_field(request, "commitOffset")

        def done(error: MQMeshError | None) -> None:
            if error is None:
                session.answer(request)
                return
            if isinstance(error, StaleGeneration) and member is not None:
                self._members.notify_changed(member, key[0])
            is_member = member is not None and member.consumes(key[0])
            # Tools wait for an answer. Consumers do not: the last commit of one that has left must
            # not undo a reset.
            if isinstance(error, OffsetIllegal) and not (is_member or request.is_oneway):
                self._reset(session, request, key, offset)
                return
            session.fail(request, error)

        self._commit(broker_name, member, key, offset, done)

    def _reset(
        self, session: RemotingSession, request: RemotingCommand, key: QueueKey, offset: int
    ) -> None:
        """Reset the offset of a group in a queue for a tool, also right behind another reset."""
        group, topic, queue_id = key

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                session.fail(request, answer)
            else:
                session.answer(request)

        header = encode_header(
            ResetOffsetRequest(group, topic, ResetWhere.OFFSET, queue_id, queue_offset=offset)
        )
        code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        self._upstream.ask(broker_of(session), code, header, done)

    def _commit(
        self,
        broker_name: str,
        member: GatewayMember | None,
        key: QueueKey,
        offset: int,
        on_done: Callable[[MQMeshError | None], None],
    ) -> None:
        group, topic, queue_id = key
        generation = 0
        if member is not None and key in member.claims:
            generation = member.generations.get(group, 0)
        update = UpdateConsumerOffsetRequest(
            group,
            member.client_id if member is not None and generation else "",
            [QueueOffsetEntry(topic, queue_id, offset)],
            generation,
        )

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, StaleGeneration):
                self._lost_queue(member, key)
            elif not isinstance(answer, MQMeshError) and member is not None and generation:
                member.claims[key] = generation  # a commit claims, too
            on_done(answer if isinstance(answer, MQMeshError) else None)

        header = encode_header(update)
        self._upstream.ask(broker_name, RequestCode.UPDATE_CONSUMER_OFFSET, header, done)

    def _bound(self, session: RemotingSession, request: RemotingCommand) -> None:
        topic, queue_id = text_field(request, "topic"), number_field(request, "queueId")
        is_last = request.code == RemotingCode.GET_MAX_OFFSET

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(QueueBoundsResponse, answer.header)
                offset = found.max_queue_offset if is_last else found.min_queue_offset
            except TopicNotFound as error:
                if not topic.startswith(RETRY_PREFIX):
                    session.fail(request, error)
                    return
                offset = 0
            except MQMeshError as error:
                session.fail(request, error)
                return
            session.answer(request, fields={"offset": str(offset)})

        header = encode_header(QueueBoundsRequest(topic, queue_id))
        self._upstream.ask(broker_of(session), RequestCode.QUERY_QUEUE_BOUNDS, header, done)

    def _search_offset(self, session: RemotingSession, request: RemotingCommand) -> None:
        # The upper boundary is the last message that is not later than the time.
        upper = request.fields.get("boundaryType", "").upper() == "UPPER"

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(OffsetResponse, answer.header).queue_offset
            except MQMeshError as error:
                session.fail(request, error)
            else:
                session.answer(request, fields={"offset": str(max(found - upper, 0))})

        header = encode_header(
            SearchOffsetRequest(
                text_field(request, "topic"),
                number_field(request, "queueId"),
                max(number_field(request, "timestamp") + upper, 0),
            )
        )
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        self._upstream.ask(broker_of(session), code, header, done)


def _answer_offset(session: RemotingSession, request: RemotingCommand, offset: int) -> None:
    if offset < 0:
        group, topic, queue_id = _queue_key(request)
        remark = f"group {group} has no offset in queue {queue_id} of topic {topic}"
        session.answer(request, RemotingStatus.QUERY_NOT_FOUND, remark=remark)
    else:
        session.answer(request, fields={"offset": str(offset)})


def _queue_key(request: RemotingCommand) -> QueueKey:
    return (
        text_field(request, "consumerGroup"),
        text_field(request, "topic"),
        number_field(request, "queueId"),
    )


def _places(following: int, bounds: tuple[int, int]) -> dict[str, str]:
    return {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(following),
        "minOffset": str(bounds[0]),
        "maxOffset": str(bounds[1]),
        **_NO_FLAGS,
    }


_NO_FLAGS: Final = {"topicSysFlag": "0", "groupSysFlag": "0"}


def _give_none(
    session: RemotingSession,
    request: RemotingCommand,
    code: RemotingStatus,
    following: int,
    bounds: tuple[int, int],
) -> None:
    session.answer(request, code, _places(following, bounds), remark=code.name)


def _ignore(error: MQMeshError | None) -> None:
    """Ignore what became of a commit that a pull carried: the next one repeats it."""

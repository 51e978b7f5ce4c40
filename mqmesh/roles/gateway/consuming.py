"""Requests of RocketMQ's consumers: pulls and offsets."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import (
    CorruptBatch,
    MQMeshError,
    StaleGeneration,
    TopicNotFound,
)
from mqmesh.message import RETRY_PREFIX, StoredMessage
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
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
from mqmesh.roles.gateway.messages import to_record
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
"""Bytes that one pull asks a broker for; what a client does not take of them it gets next."""
ANSWER_BYTES: Final = 1024 * KIB
"""Bytes of records that one answer has, unless one record alone has more."""
MOST_MESSAGES: Final = 1_024
MISSING_TOPIC_MS: Final = 1_000
"""Pulls of a retry topic that is not there yet are answered after this, not to be repeated at
once."""

COMMIT_OFFSET: Final = 1
SUSPEND: Final = 2
HAS_SUBSCRIPTION: Final = 4
"""Bits of a pull's system flag."""


class PulledRun(msgspec.Struct, eq=False):
    """Messages of a queue that a broker gave, behind one another.

    Attributes:
        first: Offset from which on they are all that the subscription wants.
        next: Offset behind them.
        offsets: Of the messages.
        messages: The messages.
        size: Bytes of their batches.
        bounds: First and last offset of the queue when they came.
    """

    first: int
    next: int
    offsets: list[int]
    messages: list[StoredMessage]
    size: int
    bounds: tuple[int, int]


_RunKey = tuple[str, str, int, str, str]


class PullCache:
    """Messages that brokers gave beyond what a pull took; the oldest go when there is no room.

    Args:
        max_bytes: Bytes of batches that are kept.

    Attributes:
        held_bytes: Bytes of the batches that are there.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._runs: dict[_RunKey, PulledRun] = {}
        self.held_bytes = 0

    def find(self, key: _RunKey, offset: int) -> PulledRun | None:
        """Return the run that has the messages from an offset on."""
        run = self._runs.get(key)
        return run if run is not None and run.first <= offset < run.next else None

    def keep(self, key: _RunKey, run: PulledRun) -> None:
        """Keep a run in place of the former one of its queue and expression."""
        self.drop(key)
        self._runs[key] = run
        self.held_bytes += run.size
        while self.held_bytes > self._max_bytes and self._runs:
            self.drop(next(iter(self._runs)))

    def drop(self, key: _RunKey) -> None:
        """Drop a run that nobody needs."""
        old = self._runs.pop(key, None)
        if old is not None:
            self.held_bytes -= old.size

    def drop_broker(self, broker_name: str) -> None:
        """Drop what a broker group gave: another replica may have other messages there."""
        for key in [key for key in self._runs if key[0] == broker_name]:
            self.drop(key)


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
        queue_id, offset = number_field(request, "queueId"), number_field(request, "queueOffset")
        most = min(max(number_field(request, "maxMsgNums", 32), 1), MOST_MESSAGES)
        member = self._members.of(session)
        if flag & COMMIT_OFFSET and number_field(request, "commitOffset", 0) > 0:
            commit = number_field(request, "commitOffset")
            self._commit(broker_name, member, (group, topic, queue_id), commit, _ignore)
        kind, expression = self._expression(request, flag, member, group, topic)
        key = (broker_name, topic, queue_id, kind, expression)
        run = self._cache.find(key, offset)
        if run is not None:
            self._give(session, request, key, run, offset, most)
            return
        suspend_ms = 0
        if flag & SUSPEND:
            wanted_ms = number_field(request, "suspendTimeoutMillis", 0)
            suspend_ms = min(max(wanted_ms, 0), MAX_SUSPEND_MS)
        asked = PullRequest(
            group,
            topic,
            queue_id,
            max(offset, 0),
            PULL_BYTES,
            suspend_ms,
            expression,
            kind,
            generation=0 if member is None else member.claims.get((group, topic, queue_id), 0),
        )

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(PullResponse, answer.header)
                self._pulled(session, request, key, found, answer.body, offset, most)
            except TopicNotFound as error:
                self._missing_topic(session, request, topic, offset, error)
            except StaleGeneration:
                if member is not None:
                    self._members.notify_changed(member, group)
                _give_none(session, request, RemotingStatus.PULL_NOT_FOUND, offset, (0, 0))
            except MQMeshError as error:
                session.fail(request, error)

        self._upstream.request(
            broker_name,
            RequestCode.PULL_MESSAGE,
            done,
            header=encode_header(asked),
            timeout_ms=suspend_ms + REQUEST_MS,
        )

    def _expression(
        self,
        request: RemotingCommand,
        flag: int,
        member: GatewayMember | None,
        group: str,
        topic: str,
    ) -> tuple[str, str]:
        """Return type and text of the expression of a pull."""
        if flag & HAS_SUBSCRIPTION and request.fields.get("subscription"):
            kind = request.fields.get("expressionType") or ExpressionType.TAG.value
            return kind, request.fields["subscription"]
        known = None if member is None else member.subscription(group, topic)
        if known is None:
            return ExpressionType.TAG.value, "*"
        return known.expression_type, known.expression

    def _pulled(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        key: _RunKey,
        found: PullResponse,
        body: memoryview,
        offset: int,
        most: int,
    ) -> None:
        bounds = (found.min_queue_offset, found.max_queue_offset)
        if found.status == PullStatus.NO_NEW_MSG:
            _give_none(session, request, RemotingStatus.PULL_NOT_FOUND, offset, bounds)
        elif found.status == PullStatus.NO_MATCHED_MSG:
            code = RemotingStatus.PULL_RETRY_IMMEDIATELY
            _give_none(session, request, code, found.next_queue_offset, bounds)
        elif found.status == PullStatus.OFFSET_ILLEGAL:
            right = min(max(offset, bounds[0]), bounds[1])
            _give_none(session, request, RemotingStatus.PULL_OFFSET_MOVED, right, bounds)
        elif found.status != PullStatus.FOUND:
            code = RemotingStatus.PULL_OFFSET_MOVED
            _give_none(session, request, code, found.next_queue_offset, bounds)
        else:
            messages = self._decode(key, body, offset)
            offsets = [one.queue_offset for one in messages]
            run = PulledRun(
                offset, found.next_queue_offset, [*offsets], messages, len(body), bounds
            )
            self._cache.keep(key, run)
            self._give(session, request, key, run, offset, most)

    def _decode(self, key: _RunKey, body: memoryview, offset: int) -> list[StoredMessage]:
        """Return the messages of an answer from an offset on; damaged batches are passed over."""
        address = self._ports.address(key[0])
        messages: list[StoredMessage] = []
        for header, batch in iter_batches(body):
            try:
                check_stored(batch)
                messages += decode_messages(
                    batch, header, broker_name=key[0], store_host=str(address)
                )
            except CorruptBatch:
                continue
        return [one for one in messages if one.queue_offset >= offset]

    def _give(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        key: _RunKey,
        run: PulledRun,
        offset: int,
        most: int,
    ) -> None:
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
        self._upstream.loop.call_later(
            MISSING_TOPIC_MS,
            lambda: _give_none(session, request, RemotingStatus.PULL_NOT_FOUND, offset, (0, 0)),
        )

    # ---- Offsets -------------------------------------------------------------------------

    def _query_offset(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name, key = broker_of(session), _queue_key(request)
        group, topic, queue_id = key
        member = self._members.of(session)
        claims = member is not None and member.consumes(group)
        queue = QueueOffsetEntry(topic, queue_id)

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(ConsumerOffsets, answer.header)
            except TopicNotFound as error:
                if topic.startswith(RETRY_PREFIX):
                    session.answer(request, fields={"offset": "0"})
                else:
                    session.fail(request, error)
                return
            except MQMeshError as error:
                session.fail(request, error)
                return
            if member is not None and found.generation and len(member.claims) < MOST_CLAIMS:
                member.claims[key] = member.generations[group] = found.generation
            offset = found.queues[0].queue_offset if found.queues else -1
            if offset < 0:
                remark = f"group {group} has no offset in queue {queue_id} of topic {topic}"
                session.answer(request, RemotingStatus.QUERY_NOT_FOUND, remark=remark)
            else:
                session.answer(request, fields={"offset": str(offset)})

        client_id = session.client_id if claims else ""
        header = encode_header(QueryConsumerOffsetRequest(group, [queue], client_id))
        self._upstream.ask(broker_name, RequestCode.QUERY_CONSUMER_OFFSET, header, done)

    def _update_offset(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name, key = broker_of(session), _queue_key(request)
        member, offset = self._members.of(session), number_field(request, "commitOffset")

        def done(error: MQMeshError | None) -> None:
            if error is None:
                session.answer(request)
                return
            if isinstance(error, StaleGeneration) and member is not None:
                self._members.notify_changed(member, key[0])
            session.fail(request, error)

        self._commit(broker_name, member, key, offset, done)

    def _commit(
        self,
        broker_name: str,
        member: GatewayMember | None,
        key: QueueKey,
        offset: int,
        on_done: Callable[[MQMeshError | None], None],
    ) -> None:
        group, topic, queue_id = key
        is_member = member is not None and member.consumes(group)
        update = UpdateConsumerOffsetRequest(
            group,
            member.client_id if member is not None and is_member else "",
            [QueueOffsetEntry(topic, queue_id, offset)],
            member.generations.get(group, 0) if member is not None and is_member else 0,
        )

        def done(answer: Command | MQMeshError) -> None:
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
        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(OffsetResponse, answer.header)
            except MQMeshError as error:
                session.fail(request, error)
            else:
                session.answer(request, fields={"offset": str(found.queue_offset)})

        header = encode_header(
            SearchOffsetRequest(
                text_field(request, "topic"),
                number_field(request, "queueId"),
                max(number_field(request, "timestamp"), 0),
            )
        )
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        self._upstream.ask(broker_of(session), code, header, done)


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
    }


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

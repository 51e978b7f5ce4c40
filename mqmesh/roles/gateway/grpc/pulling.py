"""Calls of pull consumers, which read queues and keep their offsets themselves.

No official client makes these calls yet. A pull consumer is no member of its group: it reads any
queue of its route.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from mqmesh.errors import BrokerNotAvailable, CorruptBatch, MQMeshError
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.grpc.codes import OffsetPolicy, RefusedCall, ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, GrpcMessage
from mqmesh.protocol.membership import Subscription
from mqmesh.protocol.pulling import (
    MAX_SUSPEND_MS,
    ConsumerOffsets,
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
from mqmesh.roles.gateway.consuming import ANSWER_BYTES, PULL_BYTES, PullCache, PulledRun, read_run
from mqmesh.roles.gateway.grpc.clients import (
    BEFORE_DEADLINE_MS,
    RECEIVE_BATCH,
    GrpcClient,
    GrpcClients,
    names_of,
    subscription_of,
    topic_of,
)
from mqmesh.roles.gateway.grpc.converting import ms_of, write_message
from mqmesh.roles.gateway.grpc.session import OK, GrpcMethod, ServedCall
from mqmesh.roles.gateway.upstream import REQUEST_MS, Upstream

MOST_PULLED: Final = 32
"""Messages of one pull: a client gets them as messages of their own."""

_NOTHING: Final = CLASSES["Status"](
    code=ReplyCode.MESSAGE_NOT_FOUND.value, message="no message there"
)
_T = TypeVar("_T")


class _Pull(msgspec.Struct, eq=False):
    """A call that reads a queue."""

    call: ServedCall
    client: GrpcClient
    group: str
    broker_name: str
    queue_id: int
    subscription: Subscription
    offset: int
    max_messages: int
    until_ms: int
    namespace: str

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        """Key of what the queue has for its subscription."""
        wanted = self.subscription
        topic = wanted.topic
        return self.broker_name, topic, self.queue_id, wanted.expression_type, wanted.expression


class GrpcPulling:
    """Methods of pull consumers.

    Args:
        upstream: Way to the brokers.
        clients: All clients.
        cache: Messages that pulls left.

    Attributes:
        messages: Messages that were given to clients.
    """

    def __init__(self, upstream: Upstream, clients: GrpcClients, cache: PullCache) -> None:
        self._upstream = upstream
        self._clients = clients
        self._cache = cache
        self.messages = 0

    def methods(self) -> dict[str, GrpcMethod]:
        """Return the methods of pull consumers."""
        handlers = {
            "PullMessage": self._pull,
            "UpdateOffset": self._update_offset,
            "GetOffset": self._get_offset,
            "QueryOffset": self._query_offset,
        }
        return {
            name: GrpcMethod(f"{name}Request", f"{name}Response", handler)
            for name, handler in handlers.items()
        }

    # ---- Pulls ---------------------------------------------------------------------------

    def _pull(self, call: ServedCall, request: GrpcMessage) -> None:
        queue = request.message_queue
        group, topic = names_of(request.group, queue.topic)
        self._check(queue)
        client = self._clients.of(call)
        client.check_receives(queue.broker.name)
        now_ms = self._upstream.loop.clock.monotonic_ms()
        until_ms = now_ms + min(max(ms_of(request.long_polling_timeout), 0), MAX_SUSPEND_MS)
        if call.deadline_ms:
            until_ms = max(min(until_ms, call.deadline_ms - BEFORE_DEADLINE_MS), now_ms)
        pull = _Pull(
            call,
            client,
            group,
            queue.broker.name,
            queue.id,
            subscription_of(topic, request.filter_expression),
            _checked(request.offset),
            min(max(request.batch_size, 1) if request.batch_size else RECEIVE_BATCH, MOST_PULLED),
            until_ms,
            queue.topic.resource_namespace,
        )
        run = self._cache.find(pull.key, pull.offset)
        if run is None:
            client.begin_receive(pull.broker_name)
            self._ask(pull)
        else:
            self._give(pull, run)

    def _ask(self, pull: _Pull, *, verify: bool = False) -> None:
        wanted = pull.subscription
        suspend_ms = max(pull.until_ms - self._upstream.loop.clock.monotonic_ms(), 0)
        outgoing = PullRequest(
            pull.group,
            wanted.topic,
            pull.queue_id,
            pull.offset,
            PULL_BYTES,
            suspend_ms,
            wanted.expression,
            wanted.expression_type,
            verify=verify,
        )

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(PullResponse, answer.header)
                damaged = self._pulled(pull, found, answer.body)
                if damaged and verify:
                    raise CorruptBatch(f"the messages at offset {pull.offset} are damaged")
            except MQMeshError as error:
                pull.call.fail(error)
            else:
                if damaged:
                    self._ask(pull, verify=True)
                    return
            pull.client.end_receive(pull.broker_name)

        self._upstream.request(
            pull.broker_name,
            RequestCode.PULL_MESSAGE,
            done,
            header=encode_header(outgoing),
            timeout_ms=suspend_ms + REQUEST_MS,
        )

    def _pulled(self, pull: _Pull, found: PullResponse, body: memoryview) -> bool:
        """Answer a pull; return True, without an answer, if its first batch is damaged."""
        if found.status == PullStatus.FOUND:
            now_ms = self._upstream.loop.clock.monotonic_ms()
            run = read_run(pull.key, found, body, pull.offset, now_ms)
            if run is None:
                return True
            self._cache.keep(pull.key, run)
            self._give(pull, run)
        elif found.status == PullStatus.OFFSET_ILLEGAL:
            first, end = found.min_queue_offset, found.max_queue_offset
            text = f"offset {pull.offset} is none of the queue: it has {first} to {end}"
            status = CLASSES["Status"](code=ReplyCode.ILLEGAL_OFFSET.value, message=text)
            next_offset = min(max(pull.offset, first), end)
            pull.call.answer_all([{"next_offset": next_offset}, {"status": status}])
        else:
            # No new message, or none that is wanted, up to there.
            next_offset = found.next_queue_offset
            if found.status == PullStatus.NO_NEW_MSG:
                next_offset = pull.offset
            pull.call.answer_all([{"next_offset": next_offset}, {"status": _NOTHING}])
        return False

    def _give(self, pull: _Pull, run: PulledRun) -> None:
        at = bisect_left(run.offsets, pull.offset)
        answers: list[dict[str, object]] = []
        size = 0
        for message in run.messages[at : at + pull.max_messages]:
            size += len(message.body)
            if answers and size > ANSWER_BYTES:
                break
            system = {"delivery_attempt": message.reconsume_times + 1}
            answers.append({"message": write_message(message, system, pull.namespace)})
        after = at + len(answers)
        self.messages += len(answers)
        following = run.offsets[after] if after < len(run.offsets) else run.next
        if after >= len(run.offsets):
            self._cache.drop(pull.key)
        status = OK if answers else _NOTHING
        pull.call.answer_all([*answers, {"next_offset": following}, {"status": status}])

    # ---- Offsets -------------------------------------------------------------------------

    def _update_offset(self, call: ServedCall, request: GrpcMessage) -> None:
        group, topic = names_of(request.group, request.message_queue.topic)
        entry = QueueOffsetEntry(topic, request.message_queue.id, _checked(request.offset))
        header = encode_header(UpdateConsumerOffsetRequest(group, "", [entry], 0))
        broker_name = self._check(request.message_queue)

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                call.fail(answer)
            else:
                call.answer()

        self._upstream.ask(broker_name, RequestCode.UPDATE_CONSUMER_OFFSET, header, done)

    def _get_offset(self, call: ServedCall, request: GrpcMessage) -> None:
        group, topic = names_of(request.group, request.message_queue.topic)
        entry = QueueOffsetEntry(topic, request.message_queue.id)

        def read(found: ConsumerOffsets) -> int:
            offset = found.queues[0].queue_offset if found.queues else -1
            if offset < 0:
                text = f"group {group!r} has no offset in queue {entry.queue_id} of {topic!r}"
                raise RefusedCall(ReplyCode.OFFSET_NOT_FOUND, text)
            return offset

        header = QueryConsumerOffsetRequest(group, [entry], "")
        code = RequestCode.QUERY_CONSUMER_OFFSET
        self._find(call, request.message_queue, code, header, ConsumerOffsets, read)

    def _query_offset(self, call: ServedCall, request: GrpcMessage) -> None:
        queue, policy = request.message_queue, request.query_offset_policy
        topic = topic_of(queue.topic)
        if policy == OffsetPolicy.TIMESTAMP:
            at_ms = max(ms_of(request.timestamp), 0)
            search = SearchOffsetRequest(topic, queue.id, at_ms)
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
            self._find(call, queue, code, search, OffsetResponse, lambda found: found.queue_offset)
            return

        def read(found: QueueBoundsResponse) -> int:
            if policy == OffsetPolicy.END:
                return found.max_queue_offset
            return found.min_queue_offset

        bounds = QueueBoundsRequest(topic, queue.id)
        code = RequestCode.QUERY_QUEUE_BOUNDS
        self._find(call, queue, code, bounds, QueueBoundsResponse, read)

    def _find(
        self,
        call: ServedCall,
        queue: GrpcMessage,
        code: RequestCode,
        header: msgspec.Struct,
        kind: type[_T],
        read: Callable[[_T], int],
    ) -> None:
        """Answer a call with the offset that stands in a broker's answer."""

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                fields: Mapping[str, object] = {"offset": read(decode_header(kind, answer.header))}
            except MQMeshError as error:
                call.fail(error)
            else:
                call.answer(**fields)

        self._upstream.ask(self._check(queue), code, encode_header(header), done)

    def _check(self, queue: GrpcMessage) -> str:
        """Return the broker group of a queue.

        Raises:
            RefusedCall: It is no single queue.
            BrokerNotAvailable: The broker group is unknown.
        """
        broker_name: str = queue.broker.name
        if queue.id < 0:
            text = f"queue {queue.id} stands for several: take one of QueryRoute"
            raise RefusedCall(ReplyCode.BAD_REQUEST, text)
        if not self._upstream.routes.address(broker_name):
            raise BrokerNotAvailable(f"broker group {broker_name!r:.100} is not there")
        return broker_name


def _checked(offset: int) -> int:
    """Return an offset of a request.

    Raises:
        RefusedCall: It is negative.
    """
    if offset < 0:
        raise RefusedCall(ReplyCode.ILLEGAL_OFFSET, f"offset {offset}; 0 and more may be")
    return offset

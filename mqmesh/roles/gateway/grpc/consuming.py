"""Calls of consumers, which acknowledge each message; see docs/per-message.md."""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from mqmesh.errors import BrokerNotAvailable, MQMeshError, StaleGeneration
from mqmesh.message import StoredMessage
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    BY_SCHEDULE,
    MAX_INVISIBLE_MS,
    MAX_NACK_MS,
    MIN_INVISIBLE_MS,
    ReceiveRequest,
    ReceiveResponse,
    SettleAction,
    Settlement,
)
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.grpc.codes import ClientType, RefusedCall, ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, GrpcMessage, duration
from mqmesh.protocol.membership import Subscription
from mqmesh.protocol.pulling import MAX_SUSPEND_MS
from mqmesh.roles.gateway.grpc.clients import (
    BEFORE_DEADLINE_MS,
    RECEIVE_BATCH,
    GrpcClient,
    GrpcClients,
    delivery_of,
    names_of,
    selector_of,
    subscription_of,
)
from mqmesh.roles.gateway.grpc.converting import (
    ms_of,
    timestamp,
    topic_of_reader,
    write_message,
)
from mqmesh.roles.gateway.grpc.handles import Handles, Receipt
from mqmesh.roles.gateway.grpc.leases import ClientLeases, Reports
from mqmesh.roles.gateway.grpc.session import OK, GrpcMethod, ServedCall, status_of
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.sdk.consumer.receiving.held_leases import (
    HeldLease,
    ReceivedAnswer,
    bits_of,
    read_answer,
)
from mqmesh.units import KIB

MOST_RECEIVED: Final = 32
"""Messages of one receive: a client gets them as messages of their own."""
MOST_ACKED: Final = 1_024
"""Entries of one acknowledgement."""
MOST_ACK_BYTES: Final = 512 * KIB
ANSWER_MS: Final = 10_000
"""Longest wait for a broker's answer beyond the time that it may hold the request."""

_NOTHING: Final = CLASSES["Status"](
    code=ReplyCode.MESSAGE_NOT_FOUND.value, message="no new message"
)
_log = logging.getLogger(__name__)


class _Receive(msgspec.Struct, eq=False):
    """A call that waits for messages."""

    call: ServedCall
    client: GrpcClient
    group: str
    broker_name: str
    subscription: Subscription
    max_messages: int
    invisible_ms: int
    is_renewed: bool
    attempt_id: int
    until_ms: int
    namespace: str
    tries: int = 0


class GrpcConsuming:
    """Methods of consumers.

    Args:
        upstream: Way to the brokers.
        clients: Clients.
        leases: Leases of the clients.
        reports: Reports on their way.
        handles: Makes receipts.

    Attributes:
        messages: Messages that were given to clients.
    """

    def __init__(
        self,
        upstream: Upstream,
        clients: GrpcClients,
        leases: ClientLeases,
        reports: Reports,
        handles: Handles,
    ) -> None:
        self._upstream = upstream
        self._clients = clients
        self._leases = leases
        self._reports = reports
        self._handles = handles
        # Clients whose last answer of a broker was damaged: their next read is verified.
        self._damaged: dict[tuple[str, str, str], None] = {}
        self.messages = 0

    def methods(self) -> dict[str, GrpcMethod]:
        """Return the methods of consumers."""
        return {
            "ReceiveMessage": GrpcMethod(
                "ReceiveMessageRequest", "ReceiveMessageResponse", self._receive
            ),
            "AckMessage": GrpcMethod(
                "AckMessageRequest",
                "AckMessageResponse",
                self._ack,
                max_request_bytes=MOST_ACK_BYTES,
            ),
            "ChangeInvisibleDuration": GrpcMethod(
                "ChangeInvisibleDurationRequest", "ChangeInvisibleDurationResponse", self._change
            ),
            "ForwardMessageToDeadLetterQueue": GrpcMethod(
                "ForwardMessageToDeadLetterQueueRequest",
                "ForwardMessageToDeadLetterQueueResponse",
                self._reject,
            ),
        }

    # ---- Receives ------------------------------------------------------------------------

    def _receive(self, call: ServedCall, request: GrpcMessage) -> None:
        group, topic = names_of(request.group, request.message_queue.topic)
        wanted = subscription_of(topic, request.filter_expression)
        if self._leases.is_full:
            raise RefusedCall(
                ReplyCode.TOO_MANY_REQUESTS,
                f"clients have {self._leases.messages} messages without a report; no more may be "
                "received (max_receipts)",
            )
        invisible_ms = ms_of(request.invisible_duration)
        is_renewed = bool(request.auto_renew)
        if not is_renewed and not MIN_INVISIBLE_MS <= invisible_ms <= MAX_INVISIBLE_MS:
            raise _wrong_duration(invisible_ms)
        client = self._clients.of(call)
        broker_name = request.message_queue.broker.name
        client.check_receives(broker_name)
        self._clients.subscribe(client, group, wanted)
        now_ms = self._now_ms()
        wait_ms = min(ms_of(request.long_polling_timeout), MAX_SUSPEND_MS)
        until_ms = now_ms + max(wait_ms, 0)
        if call.deadline_ms:
            until_ms = max(min(until_ms, call.deadline_ms - BEFORE_DEADLINE_MS), now_ms)
        receive = _Receive(
            call,
            client,
            group,
            broker_name,
            wanted,
            min(max(request.batch_size, 1) if request.batch_size else RECEIVE_BATCH, MOST_RECEIVED),
            0 if is_renewed else invisible_ms,
            is_renewed,
            _number_of(request.attempt_id),
            until_ms,
            request.message_queue.topic.resource_namespace,
        )
        if not self._upstream.routes.address(broker_name):
            raise BrokerNotAvailable(f"broker group {broker_name!r:.100} is not there")

        def found(config: GroupConfig | MQMeshError) -> None:
            # A client that may not see them joins as it did before, or as the first member of a new
            # group.
            if not isinstance(config, MQMeshError):
                client.delivery = delivery_of(config)
            self._join(receive)

        client.begin_receive(broker_name)
        self._clients.find_group(group, broker_name, found)

    def _join(self, receive: _Receive) -> None:
        def joined(error: MQMeshError | None) -> None:
            if error is None and not receive.call.is_over:
                self._ask(receive)
                return
            receive.client.end_receive(receive.broker_name)
            if error is not None:
                receive.call.fail(error)

        self._clients.join(receive.client, receive.broker_name, joined)

    def _ask(self, receive: _Receive) -> None:
        wanted = receive.subscription
        suspend_ms = max(receive.until_ms - self._now_ms(), 0)
        is_damaged = _source(receive) in self._damaged
        self._damaged.pop(_source(receive), None)
        outgoing = ReceiveRequest(
            receive.group,
            wanted.topic,
            receive.client.client_id,
            receive.max_messages,
            invisible_ms=receive.invisible_ms,
            suspend_timeout_ms=suspend_ms,
            expression=wanted.expression,
            expression_type=wanted.expression_type,
            verify=is_damaged,
            attempt_id=receive.attempt_id,
        )
        self._upstream.request(
            receive.broker_name,
            RequestCode.RECEIVE_MESSAGE,
            partial(self._received, receive),
            header=encode_header(outgoing),
            timeout_ms=suspend_ms + ANSWER_MS,
        )

    def _received(self, receive: _Receive, answer: Command | MQMeshError) -> None:
        call = receive.call
        if isinstance(answer, StaleGeneration) and not receive.tries and not call.is_over:
            # The broker was started anew, or had removed the client: it joins once more.
            receive.tries += 1
            joined = receive.client.brokers.get(receive.broker_name)
            if joined is not None:
                joined.heartbeat = None
            self._join(receive)
            return
        receive.client.end_receive(receive.broker_name)
        try:
            if isinstance(answer, MQMeshError):
                raise answer
            leases = decode_header(ReceiveResponse, answer.header).leases
            found = read_answer(
                leases,
                (memoryview(answer.body), *answer.further),
                broker_name=receive.broker_name,
                topic=receive.subscription.topic,
                tags=selector_of(receive.subscription).wanted_tags(),
                now_ms=self._now_ms(),
            )
        except MQMeshError as error:
            call.fail(error)
            return
        self._report_unreadable(receive, found)
        is_gone = call.is_over or call.session.is_full
        if is_gone or self._clients.find(receive.client.client_id) is not receive.client:
            for held in found.held:
                if held.buffered:
                    self._settle(receive, held, _bits(held, found), SettleAction.RETURN)
            call.fail(BrokerNotAvailable("the client takes no answers, or is gone"))
            return
        self._give(receive, found)

    def _give(self, receive: _Receive, found: ReceivedAnswer) -> None:
        call = receive.call
        if not found.messages:
            call.answer(status=_NOTHING)
            return
        offsets: dict[HeldLease, list[int]] = {}
        for held, some in found.messages:
            offsets.setdefault(held, []).extend(one.queue_offset for one in some)
        for held, own in offsets.items():
            self._leases.add(
                *(receive.client.client_id, receive.group, held, own, receive.is_renewed),
                call.session,
            )
        self.messages += sum(map(len, offsets.values()))
        now_ms = self._upstream.loop.clock.wall_ms()
        answers: list[dict[str, object]] = [{"delivery_timestamp": timestamp(now_ms)}]
        for held, some in found.messages:
            for one in some:
                delivery = self._delivery(receive, held, one)
                answers.append({"message": write_message(one, delivery, receive.namespace)})
        answers.append({"status": OK})

        def lost() -> None:
            for held in offsets:
                self._leases.give_back(held)

        call.answer_all(answers, lost)

    def _delivery(
        self, receive: _Receive, held: HeldLease, message: StoredMessage
    ) -> dict[str, object]:
        lease = held.lease
        receipt = Receipt(
            held.broker_name, lease.lease, lease.queue_id, message.queue_offset, lease.is_retry
        )
        context = _context(receive.group, topic_of_reader(message))
        found: dict[str, object] = {
            "receipt_handle": self._handles.seal(receipt, context),
            "delivery_attempt": message.delivery_attempt,
            "invisible_duration": duration(lease.length_ms),
        }
        if self._upstream.routes.priorities(held.topic):
            found["priority"] = message.priority
        return found

    def _report_unreadable(self, receive: _Receive, found: ReceivedAnswer) -> None:
        """Report on what no client can be given."""
        for held, bits in found.unwanted:
            self._settle(receive, held, bits, SettleAction.ACK)
        for held, bits, reason in found.unreadable:
            self._settle(receive, held, bits, SettleAction.REJECT, reason)
        if found.error is not None:
            _log.warning("an answer of broker %s is damaged: %s", receive.broker_name, found.error)
            self._damaged[_source(receive)] = None
            for held, bits in found.damaged:
                self._settle(receive, held, bits, SettleAction.RETURN)

    def _settle(
        self, receive: _Receive, held: HeldLease, bits: int, action: SettleAction, reason: str = ""
    ) -> None:
        def done(error: MQMeshError | None) -> None:
            if error is not None:
                _log.info("%s of messages did not count: %s", action.name, error)

        self._reports.add(
            receive.broker_name,
            receive.group,
            held.topic,
            receive.client.client_id,
            held.settlement(bits, action, BY_SCHEDULE, reason),
            done,
        )

    # ---- Reports -------------------------------------------------------------------------

    def _ack(self, call: ServedCall, request: GrpcMessage) -> None:
        group, topic = names_of(request.group, request.topic)
        entries = request.entries
        if not 0 < len(entries) <= MOST_ACKED:
            raise RefusedCall(
                ReplyCode.BAD_REQUEST, f"{len(entries)} entries; 1 to {MOST_ACKED} may be"
            )
        results = [
            CLASSES["AckMessageResultEntry"](
                message_id=one.message_id, receipt_handle=one.receipt_handle, status=OK
            )
            for one in entries
        ]
        left = len(results)

        def done(result: GrpcMessage, error: MQMeshError | None) -> None:
            nonlocal left
            if error is not None:
                result.status.CopyFrom(status_of(error))
            left -= 1
            if left:
                return
            codes = {one.status.code for one in results}
            status = results[0].status
            if len(codes) > 1:
                status = CLASSES["Status"](code=ReplyCode.MULTIPLE_RESULTS.value)
            call.answer(status=status, entries=results)

        for one, result in zip(entries, results, strict=True):
            try:
                receipt = self._unseal(one.receipt_handle, group, topic)
            except MQMeshError as error:
                done(result, error)
                continue
            self._report(call, group, topic, receipt, SettleAction.ACK, 0, partial(done, result))

    def _change(self, call: ServedCall, request: GrpcMessage) -> None:
        group, topic = names_of(request.group, request.topic)
        receipt = self._unseal(request.receipt_handle, group, topic)
        length_ms = ms_of(request.invisible_duration)
        if not 0 <= length_ms <= MAX_INVISIBLE_MS:
            raise _wrong_duration(length_ms)

        def done(error: MQMeshError | None) -> None:
            if error is not None:
                call.fail(error)
            else:
                call.answer(receipt_handle=request.receipt_handle)

        lease = self._leases.find(receipt)
        client = self._clients.find(call.client_id)
        is_push = client is not None and client.kind == ClientType.PUSH_CONSUMER
        if is_push or (lease is not None and lease.is_renewed):
            # A push consumer says by this that it failed.
            has_schedule = client is None or client.has_schedule
            delay_ms = min(length_ms, MAX_NACK_MS) if has_schedule else BY_SCHEDULE
            self._report(call, group, topic, receipt, SettleAction.NACK, delay_ms, done)
        elif lease is not None:
            self._leases.change(lease, receipt.queue_offset, length_ms, done)
        else:
            # Another gateway gave it: all of its lease is extended.
            length_ms = max(length_ms, MIN_INVISIBLE_MS)
            self._report(call, group, topic, receipt, SettleAction.EXTEND, length_ms, done)

    def _reject(self, call: ServedCall, request: GrpcMessage) -> None:
        group, topic = names_of(request.group, request.topic)
        receipt = self._unseal(request.receipt_handle, group, topic)

        def done(error: MQMeshError | None) -> None:
            if error is not None:
                call.fail(error)
            else:
                call.answer()

        reason = f"given up by its consumer, delivery {request.delivery_attempt}"
        self._report(call, group, topic, receipt, SettleAction.REJECT, BY_SCHEDULE, done, reason)

    def _report(
        self,
        call: ServedCall,
        group: str,
        topic: str,
        receipt: Receipt,
        action: SettleAction,
        delay_ms: int,
        on_done: Callable[[MQMeshError | None], None],
        reason: str = "",
    ) -> None:
        """Report on one message."""
        if action != SettleAction.EXTEND:
            self._leases.take(receipt)
        settlement = Settlement(
            receipt.lease,
            receipt.queue_id,
            receipt.queue_offset,
            b"\1",
            int(action),
            delay_ms,
            reason,
            receipt.is_retry,
        )
        self._reports.add(receipt.broker_name, group, topic, call.client_id, settlement, on_done)

    def _unseal(self, text: str, group: str, topic: str) -> Receipt:
        return self._handles.unseal(Receipt, text, _context(group, topic))

    def _now_ms(self) -> int:
        return self._upstream.loop.clock.monotonic_ms()


def _wrong_duration(length_ms: int) -> RefusedCall:
    return RefusedCall(
        ReplyCode.ILLEGAL_INVISIBLE_TIME,
        f"an invisible duration of {length_ms} ms; {MIN_INVISIBLE_MS} to {MAX_INVISIBLE_MS} may be",
    )


def _source(receive: _Receive) -> tuple[str, str, str]:
    return receive.client.client_id, receive.broker_name, receive.subscription.topic


def _bits(held: HeldLease, found: ReceivedAnswer) -> int:
    """Return the messages of a lease that can be given out."""
    own = [some for one, some in found.messages if one is held]
    return bits_of([one.queue_offset for some in own for one in some], held.lease.first)


def _context(group: str, topic: str) -> str:
    return f"{group}/{topic}"


def _number_of(attempt_id: str) -> int:
    """Return the number by which a broker knows an attempt; 0 for none."""
    if not attempt_id:
        return 0
    return int.from_bytes(hashlib.blake2b(attempt_id.encode(), digest_size=8).digest()) >> 1 or 1

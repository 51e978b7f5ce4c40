"""Calls of producers: sends, ends of transactions and their check-backs, recalls."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.half_batch import read_half_meta
from mqmesh.batch.record_batch import check_batch, decode_messages
from mqmesh.clock import Clock
from mqmesh.errors import InvalidArgument, MQMeshError, NoRoute, TopicNotFound
from mqmesh.message import Message, MessageQueue, check_topic
from mqmesh.message_checks import check_messages
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.grpc.codes import MessageType, RefusedCall, ReplyCode, Resolution
from mqmesh.protocol.grpc.messages import CLASSES, GrpcMessage, check_send
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import TopicRoute
from mqmesh.protocol.schedule import CancelDelayedRequest
from mqmesh.protocol.transactions import CheckTransactionState, Decision, EndOutcome
from mqmesh.roles.gateway.grpc.clients import MAX_BODY_BYTES, GrpcClients, name_of
from mqmesh.roles.gateway.grpc.converting import read_message, write_message
from mqmesh.roles.gateway.grpc.handles import Handles, RecallHandle, TransactionHandle
from mqmesh.roles.gateway.grpc.routing import GrpcRouting, may_write
from mqmesh.roles.gateway.grpc.session import OK, GrpcMethod, ServedCall, status_of
from mqmesh.roles.gateway.messages import UNIQ_KEY
from mqmesh.roles.gateway.sends import MAX_BATCH_MESSAGES, Sends, Stored
from mqmesh.roles.gateway.transactions import GatewayTransactions
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.sdk.producer.queue_selector import queue_index
from mqmesh.sdk.transactions.transaction_ends import HalfPlace
from mqmesh.units import MIB

MOST_SENT_BYTES: Final = 16 * MIB
"""Bodies of one call, decompressed."""

_DECISIONS: Final = {Resolution.COMMIT: Decision.COMMIT, Resolution.ROLLBACK: Decision.ROLLBACK}
_UNSAFE: Final = {
    SendStatus.FLUSH_DISK_TIMEOUT: ReplyCode.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: ReplyCode.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: ReplyCode.HA_NOT_AVAILABLE,
}
"""Stored, but not as safely as it should be: clients send the message again."""


class _SendCall(msgspec.Struct, eq=False):
    """A call with messages that are on their way."""

    call: ServedCall
    entries: list[GrpcMessage]
    left: int


class GrpcProducing:
    """Methods of producers.

    Args:
        upstream: Way to the brokers.
        routing: Source of routes.
        clients: Clients; producers among them are queried about their transactions.
        sends: Sends to brokers.
        transactions: Sends decisions about half messages.
        handles: Makes transaction ids and recall handles.
        key: Key of the gateway as a producer, which proves its own transactions.
        clock: Clock for delays.
    """

    def __init__(
        self,
        upstream: Upstream,
        routing: GrpcRouting,
        clients: GrpcClients,
        sends: Sends,
        transactions: GatewayTransactions,
        handles: Handles,
        key: bytes,
        clock: Clock,
    ) -> None:
        self._upstream = upstream
        self._routing = routing
        self._clients = clients
        self._sends = sends
        self._transactions = transactions
        self._handles = handles
        self._key = key
        self._clock = clock
        self._turn: Iterator[int] = itertools.count()

    def methods(self) -> dict[str, GrpcMethod]:
        """Return the methods of producers."""
        return {
            "SendMessage": GrpcMethod(
                "SendMessageRequest",
                "SendMessageResponse",
                self._send,
                max_request_bytes=0,
                check=check_send,
            ),
            "EndTransaction": GrpcMethod(
                "EndTransactionRequest", "EndTransactionResponse", self._end
            ),
            "RecallMessage": GrpcMethod(
                "RecallMessageRequest", "RecallMessageResponse", self._recall
            ),
        }

    def on_check(self, broker_name: str, command: Command) -> bool:
        """Ask a producer how transactions ended.

        Returns:
            False if no producer by gRPC can be queried.

        Raises:
            ProtocolError: The command cannot be read.
            CorruptBatch: Its batch is damaged.
        """
        check = decode_header(CheckTransactionState, command.header)
        streams = self._clients.producers(check.group)
        if not streams:
            return False
        batch = bytes(command.body)
        header = check_batch(batch)
        read_half_meta(batch, header)
        messages = decode_messages(batch, header, broker_name=broker_name)
        stream = streams[next(self._turn) % len(streams)]
        for ordinal in check.ordinals:
            number = ordinal - check.first_ordinal
            if not 0 <= number < len(messages):
                continue
            message = messages[number]
            handle = TransactionHandle(
                broker_name,
                check.base_queue_offset,
                header.producer_id,
                header.first_sequence - check.first_ordinal,
                ordinal,
                self._handles.hide(check.token, broker_name, check.base_queue_offset),
            )
            stream.send(
                recover_orphaned_transaction_command=CLASSES["RecoverOrphanedTransactionCommand"](
                    message=write_message(
                        message, {"delivery_attempt": 1}, stream.headers.get("x-mq-namespace", "")
                    ),
                    transaction_id=self._handles.seal(handle, message.topic),
                )
            )
        return True

    # ---- Sends ---------------------------------------------------------------------------

    def _send(self, call: ServedCall, request: GrpcMessage) -> None:
        sent = request.messages
        if not 0 < len(sent) <= MAX_BATCH_MESSAGES:
            raise InvalidArgument(f"{len(sent)} messages in a send; 1 to {MAX_BATCH_MESSAGES} may")
        now_ms = self._clock.wall_ms()
        size, unchecked = 0, []
        for one in sent:
            unchecked.append(read_message(one, now_ms, MOST_SENT_BYTES - size))
            size += len(unchecked[-1].body)
        messages = check_messages(unchecked, max_message_size=MAX_BODY_BYTES)
        types = [one.system_properties.message_type for one in sent]
        for message, kind in zip(messages, types, strict=True):
            if kind == MessageType.TRANSACTION and message.deliver_at_ms:
                raise RefusedCall(
                    ReplyCode.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
                    "a transactional message cannot be delayed",
                )

        def found(route: TopicRoute | MQMeshError) -> None:
            self._sends.release(size)
            try:
                if isinstance(route, MQMeshError):
                    raise route
                queues = _writable(messages[0].topic, route)
                levels = max(one.priorities for one in route.queues)
                choices = [_choices(queues, levels, one.system_properties) for one in sent]
            except MQMeshError as error:
                call.fail(error)
                return
            entries = [CLASSES["SendResultEntry"](status=OK) for _ in messages]
            sending = _SendCall(call, entries, len(messages))
            for number, message in enumerate(messages):
                self._send_one(sending, number, message, types[number], choices[number])

        self._sends.hold(size)
        self._routing.find(messages[0].topic, found, creates=True)

    def _send_one(
        self,
        sending: _SendCall,
        number: int,
        message: Message,
        kind: int,
        queues: list[MessageQueue],
    ) -> None:
        if message.sharding_key is not None:
            queue = queues[queue_index(message.sharding_key, len(queues))]
        else:
            queue = queues[next(self._turn) % len(queues)]
        half_group = ""
        if kind == MessageType.TRANSACTION:
            # Producers have no groups any more: those of a topic are one, as at RocketMQ's proxy.
            half_group = message.topic
        done = partial(self._sent, sending, number, message, queue, half_group)
        try:
            if half_group:
                client = self._clients.of(sending.call)
                self._clients.produces(client, half_group, queue.broker_name)
            self._sends.send(queue, [message], done, half_group)
        except MQMeshError as error:
            done(error)

    def _sent(
        self,
        sending: _SendCall,
        number: int,
        message: Message,
        queue: MessageQueue,
        half_group: str,
        result: Stored | MQMeshError,
    ) -> None:
        entry = sending.entries[number]
        if isinstance(result, MQMeshError):
            if isinstance(result, TopicNotFound):
                self._upstream.refresh(queue.topic)
            entry.status.CopyFrom(status_of(result))
        else:
            self._note_place(entry, message, queue, half_group, result)
        sending.left -= 1
        if not sending.left:
            codes = {one.status.code for one in sending.entries}
            status = sending.entries[0].status
            if len(codes) > 1:
                status = CLASSES["Status"](code=ReplyCode.MULTIPLE_RESULTS.value)
            sending.call.answer(status=status, entries=sending.entries)

    def _note_place(
        self,
        entry: GrpcMessage,
        message: Message,
        queue: MessageQueue,
        half_group: str,
        stored: Stored,
    ) -> None:
        message_id = message.property(UNIQ_KEY, "") or ""
        entry.message_id = entry.transaction_id = message_id
        entry.offset = stored.queue_offset
        producer_id = self._sends.producer_id
        if half_group:
            half = TransactionHandle(
                queue.broker_name,
                stored.base_queue_offset,
                producer_id,
                stored.first_sequence,
                stored.ordinal,
                self._handles.hide(self._key, queue.broker_name, stored.base_queue_offset),
            )
            entry.transaction_id = self._handles.seal(half, message.topic)
        if message.deliver_at_ms or message.delay_level:
            sequence = stored.first_sequence + stored.ordinal
            recall = RecallHandle(queue.broker_name, producer_id, sequence, message_id)
            entry.recall_handle = self._handles.seal(recall, message.topic)
        code = _UNSAFE.get(SendStatus(stored.status))
        if code is not None:
            text = f"stored, but not as safely as it should be: {SendStatus(stored.status).name}"
            entry.status.CopyFrom(CLASSES["Status"](code=code.value, message=text))

    # ---- Ends and recalls ----------------------------------------------------------------

    def _end(self, call: ServedCall, request: GrpcMessage) -> None:
        topic = name_of(request.topic)
        check_topic(topic)
        half = self._handles.unseal(TransactionHandle, request.transaction_id, topic)
        decision = _DECISIONS.get(request.resolution)
        if decision is None:
            call.answer()  # not known yet: the producer is queried again
            return
        place = HalfPlace(
            half.broker_name,
            half.base_queue_offset,
            half.producer_id,
            half.first_sequence,
            self._handles.hide(half.hidden, half.broker_name, half.base_queue_offset),
        )

        def ended(outcome: EndOutcome | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                call.fail(outcome)
            elif outcome <= EndOutcome.ENDED_BEFORE:
                call.answer()
            else:
                text = f"the transaction cannot be ended so: {outcome.name}"
                call.fail(RefusedCall(ReplyCode.INVALID_TRANSACTION_ID, text))

        self._transactions.end(topic, place, half.ordinal, decision, ended)

    def _recall(self, call: ServedCall, request: GrpcMessage) -> None:
        topic = name_of(request.topic)
        check_topic(topic)
        recall = self._handles.unseal(RecallHandle, request.recall_handle, topic)

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                call.fail(answer)
            else:
                call.answer(message_id=recall.message_id)

        header = encode_header(CancelDelayedRequest(recall.producer_id, recall.sequence))
        self._upstream.ask(recall.broker_name, RequestCode.CANCEL_DELAYED, header, done)


def _writable(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """Return the queues that may be sent to.

    Raises:
        NoRoute: There are none.
    """
    found = [
        MessageQueue(topic, one.broker_name, queue_id)
        for one in route.queues
        if may_write(route, one)
        for queue_id in range(one.write_queue_nums)
    ]
    if not found:
        raise NoRoute(f"topic {topic!r} has no queue that may be written to")
    return found


def _choices(queues: list[MessageQueue], levels: int, system: GrpcMessage) -> list[MessageQueue]:
    """Return the queues that a message may go to.

    Args:
        queues: All that may be written to.
        levels: Priorities of the topic, each of which is a queue; 0 for a topic without.
        system: System properties of the message.

    Raises:
        RefusedCall: The topic has no such priority.
    """
    priority = system.priority
    if not levels and system.message_type != MessageType.PRIORITY:
        return queues
    found = [one for one in queues if one.queue_id == priority]
    if not levels or not found:
        raise RefusedCall(
            ReplyCode.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"topic {queues[0].topic!r} has {levels} priorities, from 0, and not {priority}",
        )
    return found

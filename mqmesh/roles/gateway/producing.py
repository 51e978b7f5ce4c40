"""Requests of RocketMQ's producers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import (
    InvalidArgument,
    MQMeshError,
    NoPermission,
    RemoteProtocolError,
    TopicNotFound,
)
from mqmesh.message import (
    RETRY_PREFIX,
    Message,
    MessageQueue,
    check_group,
    check_topic,
    format_message_id,
    is_closed_topic,
)
from mqmesh.message_checks import check_messages
from mqmesh.namespaces import is_trace_topic
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.remoting.records import decode_batch, decode_properties, decompress
from mqmesh.protocol.schedule import CancelDelayedRequest
from mqmesh.roles.gateway.members import broker_of
from mqmesh.roles.gateway.messages import (
    DELAYS,
    TRACED,
    UNIQ_KEY,
    log_offset,
    offset_message_id,
    read_recall_handle,
    recall_handle,
    send_fields,
    split_trace,
    to_message,
)
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.send_backs import GatewaySendBacks
from mqmesh.roles.gateway.sends import MAX_BATCH_MESSAGES, Sends, Stored
from mqmesh.roles.gateway.session import Handler, RemotingSession, text_field
from mqmesh.roles.gateway.transactions import GatewayTransactions
from mqmesh.roles.gateway.upstream import Upstream

PREPARED: Final = 0x4
"""Bit of the system flag of a half message."""
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024

_STATUS: Final = {
    SendStatus.SEND_OK: RemotingStatus.SUCCESS,
    SendStatus.FLUSH_DISK_TIMEOUT: RemotingStatus.FLUSH_DISK_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: RemotingStatus.FLUSH_SLAVE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: RemotingStatus.SLAVE_NOT_AVAILABLE,
}


class Producing:
    """Handlers of sends.

    Args:
        upstream: Source of routes.
        sends: Sends to brokers.
        ports: Addresses of broker groups.
        transactions: Notes half messages.
        send_backs: Takes messages that consumers send to retry topics by themselves.
        clock: Clock for delays.
    """

    def __init__(
        self,
        upstream: Upstream,
        sends: Sends,
        ports: BrokerPorts,
        transactions: GatewayTransactions,
        send_backs: GatewaySendBacks,
        clock: Clock,
    ) -> None:
        self._upstream = upstream
        self._sends = sends
        self._ports = ports
        self._transactions = transactions
        self._send_backs = send_backs
        self._clock = clock

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of producers' requests."""
        return {
            RemotingCode.SEND_MESSAGE: self._send,
            RemotingCode.SEND_MESSAGE_V2: self._send,
            RemotingCode.SEND_BATCH_MESSAGE: self._send,
            RemotingCode.RECALL_MESSAGE: self._recall,
        }

    def _send(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name = broker_of(session)
        is_short = request.code != RemotingCode.SEND_MESSAGE
        fields = send_fields(request.fields, is_short=is_short)
        system_flag = _number(fields, "sysFlag", 0)
        topic = fields.get("topic", "")
        if topic.startswith(RETRY_PREFIX):
            properties = decode_properties(fields.get("properties", ""))
            self._send_backs.send_back_by_id(session, request, topic, properties)
            return
        try:
            check_topic(topic)
        except InvalidArgument as error:
            session.fail(request, error, RemotingStatus.INVALID_PARAMETER)
            return
        if is_closed_topic(topic):
            raise NoPermission(f"topic {topic!r} is reserved; users may not send to it")
        half_group = fields.get("producerGroup", "") if system_flag & PREPARED else ""
        queue = MessageQueue(topic, broker_name, _number(fields, "queueId"))
        messages = check_messages(
            self._messages(request, fields, system_flag), max_message_size=MAX_MESSAGE_BYTES
        )
        delays = {(one.delay_level, one.deliver_at_ms) for one in messages}
        if (half_group or len(messages) > 1) and delays != {(0, 0)}:
            what = "a half message" if half_group else "a batch"
            raise InvalidArgument(f"{what} cannot be delayed; send its messages one by one")
        if system_flag & PREPARED:
            check_group(half_group)
        sent = partial(self._sent, session, request, queue, messages, half_group)
        self._sends.send(queue, messages, sent, half_group)

    def _messages(
        self, request: RemotingCommand, fields: Mapping[str, str], system_flag: int
    ) -> Sequence[Message]:
        topic, now_ms = fields.get("topic", ""), self._clock.wall_ms()
        if request.code == RemotingCode.SEND_BATCH_MESSAGE:
            if not DELAYS.isdisjoint(decode_properties(fields.get("properties", ""))):
                raise InvalidArgument("a batch cannot be delayed; send its messages one by one")
            return [
                to_message(topic, one.body, one.properties, one.flag, now_ms)
                for one in decode_batch(request.body, MAX_BATCH_MESSAGES)
            ]
        body = decompress(request.body, system_flag, MAX_MESSAGE_BYTES)
        properties = decode_properties(fields.get("properties", ""))
        message = to_message(topic, body, properties, _number(fields, "flag", 0), now_ms)
        return split_trace(message) if is_trace_topic(topic) else [message]

    def _sent(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        queue: MessageQueue,
        messages: Sequence[Message],
        half_group: str,
        result: Stored | MQMeshError,
    ) -> None:
        if isinstance(result, MQMeshError):
            if isinstance(result, TopicNotFound):
                self._upstream.refresh(queue.topic)
            session.fail(request, result)
            return
        address = self._ports.address(queue.broker_name)
        first = log_offset(result.commitlog_offset, result.ordinal)
        count = len(messages) if request.code == RemotingCode.SEND_BATCH_MESSAGE else 1
        ids = [offset_message_id(address, first + at) for at in range(count)]
        sequence = result.first_sequence + result.ordinal
        message_id = format_message_id(self._sends.producer_id, sequence)
        answer = {
            "msgId": ",".join(ids),
            "queueId": str(queue.queue_id),
            "queueOffset": str(result.queue_offset),
            "transactionId": messages[0].property(UNIQ_KEY, "") or message_id,
            **TRACED,
        }
        if half_group:
            self._transactions.note_sent(queue.broker_name, first, half_group, result)
        if messages[0].deliver_at_ms:
            answer["recallHandle"] = recall_handle(queue.broker_name, messages[0], message_id)
        session.answer(request, _STATUS[SendStatus(result.status)], answer)

    def _recall(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name, topic = broker_of(session), text_field(request, "topic")
        message_id, *own_id = read_recall_handle(
            text_field(request, "recallHandle"), topic, broker_name
        )

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                session.fail(request, answer)
            else:
                session.answer(request, fields={"msgId": message_id})

        header = encode_header(CancelDelayedRequest(*own_id))
        self._upstream.ask(broker_name, RequestCode.CANCEL_DELAYED, header, done)


def _number(fields: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = fields.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 11):
        raise RemoteProtocolError(f"{name} of a send must be a number from 0: {text!r:.50}")
    number = int(text)
    if number >= 2**31:
        raise RemoteProtocolError(f"{name} of a send must be below 2**31, not {number}")
    return number

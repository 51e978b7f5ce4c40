"""Requests of RocketMQ's producers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import InvalidArgument, MQMeshError, RemoteProtocolError, TopicNotFound
from mqmesh.message import RETRY_PREFIX, TRACE_TOPIC, Message, MessageQueue, check_group
from mqmesh.message_checks import check_messages
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.remoting.records import decode_batch, decode_properties, decompress
from mqmesh.roles.gateway.members import broker_of
from mqmesh.roles.gateway.messages import (
    UNIQ_KEY,
    log_offset,
    offset_message_id,
    send_fields,
    split_trace,
    to_message,
)
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.send_backs import GatewaySendBacks
from mqmesh.roles.gateway.sends import MAX_BATCH_MESSAGES, Sends, Stored
from mqmesh.roles.gateway.session import Handler, RemotingSession
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
        clock: For delays.
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
            return [
                to_message(topic, one.body, one.properties, one.flag, now_ms)
                for one in decode_batch(request.body, MAX_BATCH_MESSAGES)
            ]
        body = decompress(request.body, system_flag, MAX_MESSAGE_BYTES)
        properties = decode_properties(fields.get("properties", ""))
        message = to_message(topic, body, properties, _number(fields, "flag", 0), now_ms)
        return split_trace(message) if topic == TRACE_TOPIC else [message]

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
        answer = {
            "msgId": ",".join(ids),
            "queueId": str(queue.queue_id),
            "queueOffset": str(result.queue_offset),
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
        }
        if half_group:
            self._transactions.note_sent(queue.broker_name, first, half_group, result)
            answer["transactionId"] = messages[0].property(UNIQ_KEY, "") or ids[0]
        session.answer(request, _STATUS[SendStatus(result.status)], answer)


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

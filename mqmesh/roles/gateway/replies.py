"""Replies to requests: from RocketMQ's consumers to requesting clients, and to its producers."""

import logging
import random
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import ClientNotOnline, InvalidArgument, MQMeshError, RemoteProtocolError
from mqmesh.message import (
    PROPERTY_CORRELATION_ID,
    PROPERTY_REPLY_TO_CLIENT,
    Message,
    as_system,
    without_reserved,
)
from mqmesh.message_checks import check_messages
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.remoting.records import decode_properties, decompress, encode_properties
from mqmesh.protocol.replies import AcknowledgeReply, PushReply, SendReplyRequest
from mqmesh.roles.gateway.members import GatewayMembers, broker_of
from mqmesh.roles.gateway.messages import (
    send_fields,
    to_message,
    to_properties,
    writable,
)
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.session import Handler, RemotingSession
from mqmesh.roles.gateway.upstream import Upstream

MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
TAKE_MS: Final = 2_000
"""Time for a client to take a reply; the broker waits no longer."""
REPLY_TOPIC: Final = "_REPLY_TOPIC"
"""End of the topic that RocketMQ's consumers send replies to, behind the name of the cluster; no
such topic is stored."""

_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()
_log = logging.getLogger(__name__)


class GatewayReplies:
    """Replies that pass the gateway.

    Args:
        upstream: Way to the brokers.
        members: Clients that are connected here.
        ports: Addresses of broker groups.
        clock: Clock for delays.
        chance: Source of chance for numbers of tries.
    """

    def __init__(
        self,
        upstream: Upstream,
        members: GatewayMembers,
        ports: BrokerPorts,
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self._upstream = upstream
        self._members = members
        self._ports = ports
        self._clock = clock
        self._chance = chance

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of replies."""
        return {
            RemotingCode.SEND_REPLY_MESSAGE: self._send,
            RemotingCode.SEND_REPLY_MESSAGE_V2: self._send,
        }

    def on_push(self, broker_name: str, command: Command) -> None:
        """Hand a reply to the requesting client.

        Raises:
            RemoteProtocolError: It is no reply.
        """
        push = decode_header(PushReply, command.header)
        try:
            reply = _decoder.decode(command.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"a reply that cannot be read: {error}") from error
        member = self._members.find(broker_name, push.client_id)
        if member is None:
            return  # the broker learns soon that it is gone, and the replier tries again

        def answered(answer: RemotingCommand | None) -> None:
            timer.cancel()
            if answer is not None:
                taken = answer.code == RemotingStatus.SUCCESS
                header = encode_header(AcknowledgeReply(push.token, taken))
                self._upstream.oneway(broker_name, RequestCode.ACKNOWLEDGE_REPLY, header)

        address = str(self._ports.address(broker_name))
        now = str(self._clock.wall_ms())
        properties = to_properties(reply) | {PROPERTY_CORRELATION_ID: push.correlation_id}
        fields = {
            "producerGroup": "mqmesh",
            "topic": reply.topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": "1",
            "queueId": "0",
            "sysFlag": "0",
            "bornTimestamp": now,
            "flag": str(reply.flag),
            "properties": encode_properties(writable(properties)).decode(),
            "reconsumeTimes": "0",
            "unitMode": "false",
            "bornHost": address,
            "storeHost": address,
            "storeTimestamp": now,
        }
        try:
            code = RemotingCode.PUSH_REPLY_MESSAGE_TO_CLIENT
            give_up = member.session.ask(code, fields, bytes(reply.body), answered)
        except MQMeshError as error:
            _log.warning("a reply cannot be handed over: %s", error)
            return
        timer = self._upstream.loop.call_later(TAKE_MS, give_up)

    def _send(self, session: RemotingSession, request: RemotingCommand) -> None:
        is_short = request.code == RemotingCode.SEND_REPLY_MESSAGE_V2
        fields = send_fields(request.fields, is_short=is_short)
        properties = decode_properties(fields.get("properties", ""))
        client_id = properties.get(PROPERTY_REPLY_TO_CLIENT, "")
        correlation_id = properties.get(PROPERTY_CORRELATION_ID, "")
        if not client_id or not 0 < len(correlation_id) <= 64:
            raise InvalidArgument(
                f"a reply needs the properties {PROPERTY_REPLY_TO_CLIENT} and "
                f"{PROPERTY_CORRELATION_ID} (64 characters) of the request"
            )
        flag = fields.get("sysFlag", "0")
        system_flag = int(flag) if flag.isascii() and flag.isdecimal() and len(flag) < 10 else 0
        body = decompress(request.body, system_flag, MAX_REPLY_BYTES)
        plain = to_message(fields.get("topic", ""), body, properties, 0, self._clock.wall_ms())
        own = (without_reserved(plain).properties or {}) | {PROPERTY_CORRELATION_ID: correlation_id}
        reply = as_system(plain, own)
        (checked,) = check_messages((reply,), max_message_size=MAX_REPLY_BYTES)
        attempt_id = self._chance.getrandbits(63)
        header = encode_header(SendReplyRequest(client_id, correlation_id, attempt_id))
        encoded = _encoder.encode(checked)
        first = broker_of(session)
        # The requesting client may be connected to another broker group only.
        left = [first, *(name for name in self._ports.groups() if name != first)]

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, ClientNotOnline) and left:
                ask()
            elif isinstance(answer, MQMeshError):
                session.fail(request, answer)
            else:
                session.answer(request, fields={"msgId": "", "queueId": "0", "queueOffset": "0"})

        def ask() -> None:
            code = RequestCode.SEND_REPLY_MESSAGE
            self._upstream.request(
                left.pop(0), code, done, encoded, header=header, timeout_ms=2 * TAKE_MS
            )

        ask()

"""Messages that consumers of RocketMQ send back: by their place, or as sends to a retry topic."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mqmesh.batch.record_batch import read_header, read_meta
from mqmesh.errors import MQMeshError, OffsetIllegal, RemoteProtocolError
from mqmesh.message import RETRY_PREFIX
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import ViewMessageRequest
from mqmesh.protocol.queries import (
    QueryMessageByIdRequest,
    QueryMessageRequest,
    decode_found,
)
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.retries import (
    DEFAULT_MAX_RECONSUME_TIMES,
    TO_DEAD_LETTERS,
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
)
from mqmesh.roles.gateway.members import broker_of
from mqmesh.roles.gateway.messages import (
    DELAY_LEVEL,
    MESSAGE_ID_DIGITS,
    ORDINALS,
    RETRY_TOPIC,
    UNIQ_KEY,
)
from mqmesh.roles.gateway.session import Handler, RemotingSession, number_field, text_field
from mqmesh.roles.gateway.upstream import Upstream

RECONSUME_TIME: Final = "RECONSUME_TIME"
MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
MOST_FOUND: Final = 32


class GatewaySendBacks:
    """Handlers of messages that are sent back.

    Args:
        upstream: Way to the brokers.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of requests that send a message back."""
        return {RemotingCode.CONSUMER_SEND_MSG_BACK: self._send_back}

    def send_back_by_id(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        retry_topic: str,
        properties: Mapping[str, str],
    ) -> None:
        """Send a message back that a consumer sends to its retry topic by itself.

        Consumers in order give up so, and all others when the broker refused their request. The
        message that is stored is found by its id, and sent back as any: so it keeps its id, and its
        tries are counted.

        Args:
            session: Connection of the consumer.
            request: The send.
            retry_topic: Topic of the send: ``%RETRY%`` and the group.
            properties: Properties of the message.

        Raises:
            RemoteProtocolError: The message says no id or no topic.
        """
        message_id, topic = properties.get(UNIQ_KEY, ""), properties.get(RETRY_TOPIC, "")
        if not message_id or not topic:
            raise RemoteProtocolError(
                f"a send to {retry_topic!r:.100} needs the properties {UNIQ_KEY} and {RETRY_TOPIC} "
                "of the message that is sent back; the topic is reserved for those"
            )
        tries, most = _number(properties, RECONSUME_TIME), _number(properties, MAX_RECONSUME_TIMES)
        level = _number(properties, DELAY_LEVEL)
        if most and tries >= most:
            level = TO_DEAD_LETTERS
        group = retry_topic.removeprefix(RETRY_PREFIX)

        def found(place: tuple[int, int] | MQMeshError) -> None:
            if isinstance(place, MQMeshError):
                session.fail(request, place)
                return
            entry = SendBackEntry(
                topic, *place, delay_level=level, reconsume_times=max(tries - 1, 0)
            )
            # A plain send is answered with a place; that of the message is the best there is.
            stored = {"msgId": "", "queueId": str(place[0]), "queueOffset": str(place[1])}
            self._send_entry(session, request, group, entry, most or -1, stored)

        self._find(broker_of(session), topic, message_id, found)

    def _find(
        self,
        broker_name: str,
        topic: str,
        message_id: str,
        on_done: Callable[[tuple[int, int] | MQMeshError], None],
    ) -> None:
        """Find queue and offset of a message by the client's id, or by mqmesh's."""
        by_key = QueryMessageRequest(topic, message_id, max_count=MOST_FOUND)
        lookups: list[tuple[RequestCode, msgspec.Struct]] = [(RequestCode.QUERY_MESSAGE, by_key)]
        if len(message_id) == MESSAGE_ID_DIGITS:
            by_id = QueryMessageByIdRequest(message_id, MOST_FOUND)
            lookups.append((RequestCode.QUERY_MESSAGE_BY_ID, by_id))

        def ask() -> None:
            code, query = lookups.pop(0)
            self._upstream.ask(broker_name, code, encode_header(query), found)

        def found(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                messages = decode_found(answer.body, broker_name=broker_name, store_host="")
            except MQMeshError as error:
                on_done(error)
                return
            for one in messages:
                ids = one.property(UNIQ_KEY), one.message_id
                if one.info.topic == topic and message_id in ids:
                    on_done((one.queue_id, one.queue_offset))
                    return
            if lookups:
                ask()
            else:
                on_done(OffsetIllegal(f"topic {topic!r} has no message {message_id} here"))

        ask()

    def _send_back(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Send a message back; it is named by its offset in the log, so first its queue is read."""
        broker_name, offset = broker_of(session), number_field(request, "offset")
        start, ordinal = divmod(offset, ORDINALS)

        def viewed(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                header = read_header(answer.body)
                topic = read_meta(answer.body, header).topic
                if ordinal >= header.message_count:
                    raise OffsetIllegal(f"no message is at the offset {offset} of the log")
                place = header.base_queue_offset + ordinal
                self._send_back_from(session, request, topic, header.queue_id, place)
            except MQMeshError as error:
                session.fail(request, error)

        header = encode_header(ViewMessageRequest(max(start, 0)))
        self._upstream.ask(broker_name, RequestCode.VIEW_MESSAGE, header, viewed)

    def _send_back_from(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        topic: str,
        queue_id: int,
        queue_offset: int,
    ) -> None:
        most = number_field(request, "maxReconsumeTimes", DEFAULT_MAX_RECONSUME_TIMES)
        level = max(number_field(request, "delayLevel", 0), TO_DEAD_LETTERS)
        entry = SendBackEntry(topic, queue_id, queue_offset, delay_level=level)
        self._send_entry(session, request, text_field(request, "group"), entry, most)

    def _send_entry(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        group: str,
        entry: SendBackEntry,
        most: int,
        fields: dict[str, str] | None = None,
    ) -> None:
        """Send a message back, and answer when it is stored."""
        most = most if most >= 0 else DEFAULT_MAX_RECONSUME_TIMES
        back = SendBackRequest(group, [entry], most)

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                result = decode_header(SendBackResponse, answer.header).results[0]
                if result.code != ResponseCode.SUCCESS:
                    raise error_of(result.code, result.remark)
            except MQMeshError as error:
                session.fail(request, error)
            else:
                session.answer(request, fields=fields)

        header = encode_header(back)
        self._upstream.ask(broker_of(session), RequestCode.CONSUMER_SEND_MSG_BACK, header, done)


def _number(properties: Mapping[str, str], name: str) -> int:
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0

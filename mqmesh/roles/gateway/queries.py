"""Queries of RocketMQ's clients: messages by key, by the client's id, and by offset id."""

from typing import Final

import msgspec

from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import MQMeshError, OffsetIllegal, TopicNotFound
from mqmesh.message import StoredMessage
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import ViewMessageRequest
from mqmesh.protocol.queries import (
    MAX_QUERY_MESSAGES,
    QueryMessageByIdRequest,
    QueryMessageRequest,
    decode_found,
)
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.members import broker_of
from mqmesh.roles.gateway.messages import MESSAGE_ID_DIGITS, ORDINALS, to_record
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.session import Handler, RemotingSession, number_field, text_field
from mqmesh.roles.gateway.upstream import Upstream

NEVER: Final = str(2**63 - 1)
UNIQUE_QUERY: Final = "_UNIQUE_KEY_QUERY"
"""Field of a query by the id of a message."""


class Queries:
    """Handlers of queries.

    Args:
        upstream: Way to the brokers.
        ports: Addresses of broker groups.
    """

    def __init__(self, upstream: Upstream, ports: BrokerPorts) -> None:
        self._upstream = upstream
        self._ports = ports

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of queries."""
        return {
            RemotingCode.QUERY_MESSAGE: self._query,
            RemotingCode.VIEW_MESSAGE_BY_ID: self._view,
        }

    def _query(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Find messages by a key; the id that a client gave a message is one of its keys."""
        broker_name, topic = broker_of(session), text_field(request, "topic")
        key, most = text_field(request, "key"), number_field(request, "maxNum", 32)
        most = min(max(most, 1), MAX_QUERY_MESSAGES)
        by_key = QueryMessageRequest(
            topic,
            key,
            max(number_field(request, "beginTimestamp", 0), 0),
            max(number_field(request, "endTimestamp", 2**63 - 1), 0),
            most,
        )
        lookups: list[tuple[RequestCode, msgspec.Struct]] = [(RequestCode.QUERY_MESSAGE, by_key)]
        if UNIQUE_QUERY in request.fields and len(key) == MESSAGE_ID_DIGITS:
            # The id of a message of mqmesh's clients, which is none of its keys.
            by_id = QueryMessageByIdRequest(key, most)
            lookups.append((RequestCode.QUERY_MESSAGE_BY_ID, by_id))

        def ask() -> None:
            code, query = lookups.pop(0)
            self._upstream.ask(broker_name, code, encode_header(query), done)

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = [
                    one
                    for one in decode_found(answer.body, broker_name=broker_name, store_host="")
                    if one.info.topic == topic
                ]
                found.sort(key=lambda one: (one.info.commitlog_offset, one.ordinal))
            except TopicNotFound:
                found = []
            except MQMeshError as error:
                session.fail(request, error)
                return
            if not found and lookups:
                ask()
            elif found:
                fields = {"indexLastUpdateTimestamp": NEVER, "indexLastUpdatePhyoffset": NEVER}
                session.answer(request, fields=fields, body=self._records(broker_name, found))
            else:
                remark = f"no message of topic {topic} has the key"
                session.answer(request, RemotingStatus.QUERY_NOT_FOUND, remark=remark)

        ask()

    def _view(self, session: RemotingSession, request: RemotingCommand) -> None:
        broker_name, offset = broker_of(session), number_field(request, "offset")
        start, ordinal = divmod(offset, ORDINALS)

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                batch = bytes(answer.body)
                found = decode_messages(batch, check_stored(batch), broker_name=broker_name)
                if ordinal >= len(found):
                    raise OffsetIllegal(f"no message is at the offset {offset} of the log")
            except MQMeshError as error:
                session.fail(request, error)
                return
            session.answer(request, body=self._records(broker_name, [found[ordinal]]))

        header = encode_header(ViewMessageRequest(max(start, 0)))
        self._upstream.ask(broker_name, RequestCode.VIEW_MESSAGE, header, done)

    def _records(self, broker_name: str, messages: list[StoredMessage]) -> bytes:
        address = self._ports.address(broker_name)
        return b"".join([to_record(one, address) for one in messages])

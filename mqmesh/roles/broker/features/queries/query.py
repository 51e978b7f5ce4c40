"""Messages by key and by id: passed on to the index process, answered when it answers.

The index does not know of permissions, so messages of topics that do not permit reading are
left out of its answers here.
"""

from collections.abc import Callable

from mqmesh.errors import MQMeshError, NoPermission, RemoteProtocolError, UnsupportedCommand
from mqmesh.message import parse_message_id
from mqmesh.protocol.command import Command, Reply, Request
from mqmesh.protocol.queries import QueryMessageByIdRequest, QueryMessageRequest
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.queries.readable_answers import only_readable


def query_message(context: BrokerContext, request: Request, query: QueryMessageRequest) -> None:
    """Messages with a key."""
    context.topics.require(query.topic)
    context.topics.check_readable(query.topic)
    _pass_on(context, request, context.topics.may_read)


def query_message_by_id(
    context: BrokerContext, request: Request, asked: QueryMessageByIdRequest
) -> None:
    """Messages with an id."""
    parse_message_id(asked.message_id)
    bare = request.without_frame()

    def may_read(topic: str) -> bool:
        try:
            context.wire.permit(bare, topic)
        except NoPermission:
            return False
        return context.topics.may_read(topic)

    _pass_on(context, request, may_read)


def _pass_on(context: BrokerContext, request: Request, may_read: Callable[[str], bool]) -> None:
    if context.index is None:
        raise UnsupportedCommand(
            "this broker has no index of keys and message ids (index.enable, storage.backend)"
        )
    asked = request.without_frame()

    def answer(outcome: Command | MQMeshError) -> None:
        if isinstance(outcome, MQMeshError):
            context.wire.fail(asked, outcome)
        else:
            try:
                header, body = only_readable(outcome.header, outcome.body, may_read)
            except RemoteProtocolError as error:
                context.wire.fail(asked, error)
            else:
                context.wire.reply(asked, Reply(bytes(header), (body,)))

    context.index.query(request.command.code, bytes(request.command.header), answer)

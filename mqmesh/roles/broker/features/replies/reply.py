"""SEND_REPLY_MESSAGE: a reply goes to the client that asked, and is not stored.

The replier is answered when the client has acknowledged the reply, so it knows what became of
it, and tries again when the connection to the client broke in between.
"""

from mqmesh.errors import ClientNotOnline, MessageIllegal
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Reply, Request, encode_header, reply_with
from mqmesh.protocol.replies import (
    AcknowledgeReply,
    PushReply,
    SendReplyRequest,
    SendReplyResponse,
)
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.sends.send import MESSAGE_OVERHEAD_BYTES
from mqmesh.units import MAX_OFFSET


def send_reply_message(
    context: BrokerContext, request: Request, asked: SendReplyRequest
) -> Reply | None:
    """Pushes a reply to the client that asked; the answer comes with its acknowledgement.

    Raises:
        ClientNotOnline: It is not connected to this broker, now.
        MessageIllegal: The reply is too large.
        SystemBusy: Too many replies are under way.
    """
    body = request.command.body
    most = context.config.max_message_size + MESSAGE_OVERHEAD_BYTES
    if not 0 < len(body) <= most:
        raise MessageIllegal(
            f"a reply of {len(body)} bytes; 1 to {most} are allowed (max_message_size)"
        )
    client = context.groups.client(asked.client_id)
    if client is None or client.lost_at_ms is not None:
        context.stats.total.replies_undeliverable += 1
        raise ClientNotOnline(f"client {asked.client_id[:300]!r} is not connected to this broker")
    token = context.replies.open(
        request.without_frame(),
        client.peer,
        context.clock.monotonic_ms(),
        context.config.max_open_replies,
    )
    push = encode_header(PushReply(token, asked.correlation_id, asked.attempt_id))
    context.stats.total.replies_pushed += 1
    context.wire.notify(client.peer, RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, push, body)
    return None


def acknowledge_reply(context: BrokerContext, request: Request, told: AcknowledgeReply) -> Reply:
    """The client that asked says what became of a reply; one that is not open is ignored."""
    waiting = context.replies.on_acknowledged(request.peer, told.token)
    if waiting is not None:
        context.wire.reply(waiting, reply_with(SendReplyResponse(told.taken)))
    return Reply()


def on_requester_lost(context: BrokerContext, peer: bytes) -> None:
    """A connection broke: those who replied by it are told that the reply may be lost."""
    _give_up(context, context.replies.on_disconnect(peer))


def answer_expired_replies(context: BrokerContext, now_ms: int) -> None:
    """Gives up replies that were not acknowledged in time."""
    _give_up(context, context.replies.expire(now_ms))


def give_up_replies(context: BrokerContext) -> None:
    """The broker stops, or leads no more: acknowledgements will not be taken any more.

    Whoever asked is at the next master soon, and the replier tries there.
    """
    _give_up(context, context.replies.expire(MAX_OFFSET))


def _give_up(context: BrokerContext, requests: list[Request]) -> None:
    for request in requests:
        context.stats.total.replies_undeliverable += 1
        context.wire.fail(
            request, ClientNotOnline("the client that asked did not acknowledge the reply")
        )

"""Structs of replies to requests, from a replier through a broker to the requesting client.

A request is an ordinary message with properties that name the client that waits for a reply. A
reply is not stored: the broker hands it to the connection of that client, and reports to the
replier whether the client took it. The body of a reply is one message, as in a record batch: a
msgpack array of its fields.
"""

from typing import Annotated

import msgspec

from mqmesh.protocol.route import Name

CorrelationId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
"""Names one request of one client."""


class SendReplyRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """SEND_REPLY_MESSAGE: a reply for the requesting client, by way of the broker that the request
    was read from.

    Requests are ordinary messages with the properties CORRELATION_ID, REPLY_TO_CLIENT (a client id)
    and TTL (ms that the client waits). The body is the reply: the msgpack array of one message, as
    in a record batch. It is not stored: the broker pushes it to the connection of that client's
    last heartbeat, and answers when the client has acknowledged it. A client that is away for a
    moment may be tried again, with the same ``attempt_id``.

    Attributes:
        client_id: Requesting client; the request's property REPLY_TO_CLIENT.
        correlation_id: Which request; its property CORRELATION_ID.
        attempt_id: The same for every try to deliver this reply, any number else.

    Errors:
        CLIENT_NOT_ONLINE: Not connected, the connection broke, or no acknowledgement within 2 s.
        MESSAGE_ILLEGAL: The size of the reply.
        SYSTEM_BUSY: ``max_open_replies`` is reached.
    """

    client_id: Name
    correlation_id: CorrelationId
    attempt_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class SendReplyResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to SEND_REPLY_MESSAGE.

    Attributes:
        taken: The client waited for the reply and has it; False when it waits no more.
    """

    taken: bool


class PushReply(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PUSH_REPLY_MESSAGE_TO_CLIENT: from a broker to the requesting client, oneway, with the reply
    as the body.

    The client sends ACKNOWLEDGE_REPLY in any case; a reply that it took before under the same
    ``attempt_id`` counts as taken.

    Attributes:
        token: To be repeated in ACKNOWLEDGE_REPLY.
        correlation_id: Which request.
        attempt_id: Of the replier.
        client_id: Requesting client; a gateway's connection has many.
    """

    token: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    correlation_id: CorrelationId
    attempt_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    client_id: Name = ""


class AcknowledgeReply(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ACKNOWLEDGE_REPLY: outcome of a pushed reply; sent oneway. An unknown token is ignored.

    Attributes:
        token: Of the push.
        taken: As in ``SendReplyResponse``.
    """

    token: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    taken: bool

"""Structs of replies to requests, from a replier through a broker to the client that asked.

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
    """SEND_REPLY_MESSAGE, with the reply as the body.

    Attributes:
        client_id: Client that asked; the request's property REPLY_TO_CLIENT.
        correlation_id: Which request; its property CORRELATION_ID.
        attempt_id: The same for every try to deliver this reply, any number else.
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
    """PUSH_REPLY_MESSAGE_TO_CLIENT, from the broker, oneway, with the reply as the body.

    Attributes:
        token: To be repeated in ACKNOWLEDGE_REPLY.
        correlation_id: Which request.
        attempt_id: Of the replier.
    """

    token: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    correlation_id: CorrelationId
    attempt_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class AcknowledgeReply(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ACKNOWLEDGE_REPLY: a client says what became of a pushed reply; sent oneway.

    Attributes:
        token: Of the push.
        taken: As in ``SendReplyResponse``.
    """

    token: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    taken: bool

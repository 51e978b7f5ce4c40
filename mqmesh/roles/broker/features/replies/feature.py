"""Replies to requests, handed on to who asked."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.replies import reply


def _forget_requester(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    reply.on_requester_lost(context, peer)


REPLIES: Final = Feature(
    commands={
        RequestCode.SEND_REPLY_MESSAGE: reply.send_reply_message,
        RequestCode.ACKNOWLEDGE_REPLY: reply.acknowledge_reply,
    },
    tick=reply.answer_expired_replies,
    client_gone=_forget_requester,
)

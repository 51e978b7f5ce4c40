"""Replies to requests, handed on to who asked."""

from typing import Final

from mqmesh.figures import counter
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
    stopping=reply.give_up_replies,
    figures=(
        counter(
            "replies_pushed_total",
            "replies handed to clients that asked",
            lambda broker: broker.stats.total.replies_pushed,
            unit="messages",
        ),
        counter(
            "replies_undeliverable_total",
            "replies whose client was not there, or did not acknowledge",
            lambda broker: broker.stats.total.replies_undeliverable,
            unit="messages",
        ),
    ),
)

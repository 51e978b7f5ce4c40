"""Questions of administrators to consumers, handed on to them."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.asking import asking


def _forget_client(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    asking.on_client_lost(context, peer)


ASKING: Final = Feature(
    commands={
        RequestCode.GET_CONSUMER_RUNNING_INFO: asking.get_running_info,
        RequestCode.CONSUME_MESSAGE_DIRECTLY: asking.consume_directly,
        RequestCode.ANSWER_OF_CLIENT: asking.answer_of_client,
    },
    tick=asking.answer_expired_questions,
    client_gone=_forget_client,
    stopping=asking.give_up_questions,
)

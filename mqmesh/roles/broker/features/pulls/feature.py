"""Messages that consumers pull, or wait for; and where their filters in Python run."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import BrokerTurn, Feature
from mqmesh.roles.broker.features.pulls import filter_server, pull


def _begin_turn(context: BrokerContext, turn: BrokerTurn) -> bool:
    return pull.begin_pull_turn(context)


def _forget_peer(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    context.holds.release_peer(peer)
    context.turns.release_peer(peer)
    context.filter_servers.on_disconnect(peer)


PULLS: Final = Feature(
    commands={
        RequestCode.PULL_MESSAGE: pull.pull_message,
        RequestCode.REGISTER_FILTER_SERVER: filter_server.register_filter_server,
        RequestCode.GET_FILTER_SERVER: filter_server.get_filter_server,
    },
    turn_ended=_begin_turn,
    tick=pull.answer_expired_pulls,
    client_gone=_forget_peer,
    stopping=pull.fail_all_pulls,
)

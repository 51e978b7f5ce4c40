"""Half messages: kept until they are committed or rolled back, asked about when nobody says."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import BrokerTurn, Feature
from mqmesh.roles.broker.features.transactions import transactions


def _finish(context: BrokerContext, turn: BrokerTurn) -> None:
    transactions.finish_transactions(context)


TRANSACTIONS: Final = Feature(
    commands={
        RequestCode.END_TRANSACTION: transactions.end_transaction,
        RequestCode.LIST_HALF_MESSAGES: transactions.list_half_messages,
        RequestCode.VIEW_HALF_MESSAGE: transactions.view_half_message,
        RequestCode.END_HALF_MESSAGE: transactions.end_half_message,
    },
    turn_ended=_finish,
    tick=transactions.check_transactions,
    stopping=transactions.finish_transactions,
)

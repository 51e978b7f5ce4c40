"""Half messages: kept until they are committed or rolled back, asked about when nobody says."""

from typing import Final

from mqmesh.figures import Labelled, counter, gauge, histogram
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Beginning, BrokerTurn, Feature
from mqmesh.roles.broker.features.transactions import transactions
from mqmesh.roles.broker.features.transactions.check_timetable import TransactionSettings
from mqmesh.roles.broker.features.transactions.transaction_desk import TransactionDesk


def make_transactions(begins: Beginning) -> TransactionDesk:
    """Half messages of a role that begins: to be recovered."""
    return TransactionDesk(_settings(begins.config), begins.chance)


def _settings(config: BrokerConfig) -> TransactionSettings:
    return TransactionSettings(
        timeout_ms=config.transaction_timeout_ms,
        check_interval_ms=config.transaction_check_interval_ms,
        check_max=config.transaction_check_max,
        pending_max=config.transaction_pending_max,
        parked_max=config.transaction_parked_max,
        busy_retry_after_ms=config.busy_retry_after_ms,
    )


def _configure(context: BrokerContext) -> None:
    table = context.transactions.table
    table.settings = table.timetable.settings = _settings(context.config)


def _finish(context: BrokerContext, turn: BrokerTurn) -> None:
    transactions.finish_transactions(context)


def oldest_ms(context: BrokerContext) -> int:
    """How long the oldest half message waits that is not parked; 0 if there is none."""
    batches = context.transactions.table.batches.values()
    waiting = (one.store_timestamp for one in batches if one.left > one.parked)
    now_ms = context.clock.wall_ms()
    return max(now_ms - next(waiting, now_ms), 0)


TRANSACTIONS: Final = Feature(
    commands={
        RequestCode.END_TRANSACTION: transactions.end_transaction,
        RequestCode.LIST_HALF_MESSAGES: transactions.list_half_messages,
        RequestCode.VIEW_HALF_MESSAGE: transactions.view_half_message,
        RequestCode.END_HALF_MESSAGE: transactions.end_half_message,
    },
    turn_ended=_finish,
    configured=_configure,
    tick=transactions.check_transactions,
    stopping=transactions.finish_transactions,
    figures=(
        gauge(
            "half_messages_pending",
            "half messages that wait for their decision",
            lambda broker: broker.transactions.table.pending_count,
            unit="messages",
        ),
        gauge(
            "half_messages_oldest_ms",
            "how long the oldest half message has been waiting, unless it is parked",
            oldest_ms,
            unit="ms",
        ),
        gauge(
            "half_messages_parked",
            "half messages asked about in vain",
            lambda broker: broker.transactions.table.parked_count,
            unit="messages",
        ),
        counter(
            "half_messages_ended_total",
            "half messages committed and rolled back",
            lambda broker: Labelled(
                list(broker.transactions.ended),
                lambda key: (key[0].name.lower(), key[1]),
                lambda key: broker.transactions.ended[key],
            ),
            unit="messages",
            labels=("decision", "topic"),
        ),
        histogram(
            "half_message_commit_s",
            "from the storing of half messages to their commit; seconds, as RocketMQ's",
            lambda broker: Labelled(
                list(broker.transactions.took),
                lambda topic: (topic,),
                lambda topic: broker.transactions.took[topic],
            ),
            unit="s",
            labels=("topic",),
            metric="rocketmq_finish_message_latency_milliseconds",
        ),
        counter(
            "half_messages_lost_total",
            "half messages lost with the log",
            lambda broker: broker.transactions.lost,
            unit="messages",
        ),
        counter(
            "transaction_checks_total",
            "questions to producers about half messages",
            lambda broker: broker.transactions.checks_sent,
        ),
        counter(
            "transaction_ends_refused_total",
            "decisions that could not be carried out",
            lambda broker: broker.transactions.refused,
        ),
    ),
)

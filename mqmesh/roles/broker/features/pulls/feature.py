"""Messages that consumers pull, or wait for; and where their filters in Python run."""

from typing import Final

from mqmesh.figures import Labelled, counter, gauge
from mqmesh.message import is_system_topic
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Beginning, BrokerTurn, Feature
from mqmesh.roles.broker.features.pulls import filter_server, pull
from mqmesh.roles.broker.features.pulls.filter_servers import FilterServers
from mqmesh.roles.broker.features.pulls.group_pulls import HandedOut
from mqmesh.roles.broker.features.pulls.pull_hold import PullHold
from mqmesh.roles.broker.features.pulls.pull_turns import PullTurns


def make_holds(begins: Beginning) -> PullHold:
    """Pulls that wait for a message: none."""
    return PullHold(begins.config.max_held_pulls, begins.config.busy_retry_after_ms)


def make_turns(begins: Beginning) -> PullTurns:
    """Pulls that wait for their turn: none."""
    return PullTurns(begins.config.max_held_pulls, begins.config.busy_retry_after_ms)


def make_filter_servers(begins: Beginning) -> FilterServers:
    """Filter servers of the broker: none has come yet."""
    return FilterServers(begins.config.filter_server_enable, begins.config.broker_name)


def _configure(context: BrokerContext) -> None:
    context.holds.most = context.turns.most = context.config.max_held_pulls


def _begin_turn(context: BrokerContext, turn: BrokerTurn) -> bool:
    return pull.begin_pull_turn(context)


def _forget_peer(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    context.holds.release_peer(peer)
    context.turns.release_peer(peer)
    context.filter_servers.on_disconnect(peer)


def _forget_topic(context: BrokerContext, topic: str) -> None:
    context.pulls.forget_topic(topic)
    pull.fail_pulls_of(context, topic)


def _by_group(context: BrokerContext, name: str) -> Labelled[tuple[str, str, HandedOut]]:
    return Labelled(
        context.pulls.handed_out(),
        lambda one: (one[0], one[1], str(is_system_topic(one[0])).lower()),
        lambda one: getattr(one[2], name),
    )


_GROUP_LABELS: Final = ("topic", "consumer_group", "is_system")

PULLS: Final = Feature(
    commands={
        RequestCode.PULL_MESSAGE: pull.pull_message,
        RequestCode.REGISTER_FILTER_SERVER: filter_server.register_filter_server,
        RequestCode.GET_FILTER_SERVER: filter_server.get_filter_server,
    },
    turn_ended=_begin_turn,
    tick=pull.answer_expired_pulls,
    client_gone=_forget_peer,
    topic_deleted=_forget_topic,
    configured=_configure,
    stopping=pull.fail_all_pulls,
    figures=(
        counter(
            "pull_requests_total",
            "requests for messages",
            lambda broker: broker.stats.total.pull_requests,
        ),
        counter(
            "pulls_held_total",
            "pulls that had to wait for a message",
            lambda broker: broker.stats.total.pulls_held,
        ),
        gauge("held_pulls", "pulls that wait for a message now", lambda broker: len(broker.holds)),
        counter(
            "get_messages_total",
            "messages that were handed out",
            lambda broker: broker.stats.total.get_messages,
            unit="messages",
        ),
        counter(
            "get_bytes_total",
            "bytes that were handed out",
            lambda broker: broker.stats.total.get_bytes,
            unit="bytes",
        ),
        gauge(
            "get_messages_per_s",
            "messages handed out, of late",
            lambda broker: broker.stats.rate("get_messages"),
            unit="messages",
        ),
        gauge(
            "get_bytes_per_s",
            "bytes handed out, of late",
            lambda broker: broker.stats.rate("get_bytes"),
            unit="bytes",
        ),
        gauge(
            "filter_servers",
            "filter servers that are there",
            lambda broker: len(broker.filter_servers.told),
        ),
        gauge(
            "filters",
            "filters in Python",
            lambda broker: sum(one.filters for one in broker.filter_servers.told),
        ),
        gauge(
            "filters_parked",
            "filters that are parked because they kill their process",
            lambda broker: sum(one.parked for one in broker.filter_servers.told),
        ),
        gauge(
            "filter_matches",
            "messages that filters wanted, told by the filter servers that are there",
            lambda broker: sum(one.matched for one in broker.filter_servers.told),
            unit="messages",
        ),
        gauge(
            "filter_misses",
            "messages that filters did not want, likewise",
            lambda broker: sum(one.passed_over for one in broker.filter_servers.told),
            unit="messages",
        ),
        counter(
            "group_get_messages_total",
            "messages handed out to a group",
            lambda broker: _by_group(broker, "messages"),
            unit="messages",
            labels=_GROUP_LABELS,
            metric="rocketmq_messages_out_total",
        ),
        counter(
            "group_get_bytes_total",
            "bytes handed out to a group",
            lambda broker: _by_group(broker, "stored_bytes"),
            unit="bytes",
            labels=_GROUP_LABELS,
            metric="rocketmq_throughput_out_total",
        ),
    ),
)

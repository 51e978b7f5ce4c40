"""Differences from RocketMQ that are meant, with their reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.oracle.compare import Meant, differences, golden_path, judge, load

HARMLESS = "no client looks at it"
MALFORMED = "only programs that are broken send it; the sentence says what is wrong"
OWN_NAMES = "names of topics and groups are mqmesh's: dots may stand in topics, not in groups"
RESERVED = "topics of the system are mqmesh's: users may not make them or send to them"
CHECKED = "what cannot be right is refused with a sentence instead of being taken"
PLACES = "where a message waited meanwhile is not kept in its properties"
NO_EQUAL = "mqmesh has no equal of it"
INNER = "a figure of the inside of RocketMQ's broker"

REQUESTS = [
    Meant("*", "fields.MSG_REGION", HARMLESS),  # of answers that are refusals
    Meant("*", "fields.TRACE_ON", HARMLESS),
    Meant("*", "fields.forbiddenType", HARMLESS),
    Meant("routes: without a topic", "code", MALFORMED),
    Meant("pairs: put without a value", "*", MALFORMED),
    Meant("draining: *, no such broker", "*", CHECKED),
    Meant("draining: change no setting", "*", CHECKED),
    Meant("topics: make: a dot", "*", OWN_NAMES),
    Meant("topics: make: of *", "*", RESERVED),
    Meant("topics: make: no queues", "*", CHECKED),
    Meant("topics: make: perm 9", "*", CHECKED),
    Meant("topics: all settings", "body.*apping*", "there are no static topics"),
    Meant("topics: no queue", "code", CHECKED),
    Meant("sends: empty body", "code", "13, after which clients do not try again"),
    Meant("sends: batch of nothing", "code", MALFORMED),
    Meant("sends: batch that is cut", "code", MALFORMED),
    Meant("sends: queue beyond the last", "code", "13, as of all that is wrong with a message"),
    Meant("sends: any queue", "*", "a send names its queue, as all clients do"),
    Meant(
        "limits: no such topic, nothing like it", "*", "`auto_create_topic_enable` decides alone"
    ),
    Meant("limits: read only", "*", "a topic's permission holds for sends, too"),
    Meant("limits: topic: *", "*", RESERVED),
    Meant("limits: without a *", "code", MALFORMED),
    Meant("limits: queue is no number", "code", MALFORMED),
    Meant("limits: delay level -1", "*", MALFORMED),
    Meant("limits: delay level x", "code", MALFORMED),
    Meant("limits: timer: for ever", "*", "a delay may be of any length"),
    Meant("sends: what is stored", "body.0.properties.WAIT", HARMLESS),
    Meant("sends: what is stored", "body.1.bornTimestamp", "the born time is the gateway's"),
    Meant(
        "sends: what is stored", "body.4.properties.UNIQ_KEY", "clients give each message its id"
    ),
    Meant("delays: *", "body.0.properties.REAL_*", PLACES),
    Meant("delays: *", "body.0.properties.TIMER_*", PLACES),
    Meant("delays: *", "body.0.properties.DELAY", PLACES),
    Meant("recalls: again", "*", "what is not delayed any more cannot be called back"),
    Meant("recalls: of another topic", "code", CHECKED),
    Meant("recalls: no handle", "code", MALFORMED),
    Meant("recalls: without a handle", "code", MALFORMED),
    Meant("pulls: SQL, wrong", "*", CHECKED),
    Meant("pulls: another language", "*", CHECKED),
    Meant(
        "offsets: commit, no such group", "*", "a commit makes the group, as its first pull does"
    ),
    Meant("offsets: commit* beyond", "*", CHECKED),
    Meant("offsets: commit, no such queue", "*", CHECKED),
    Meant("offsets: commit -5", "*", CHECKED),
    Meant("offsets: commit without an offset", "*", MALFORMED),
    Meant("offsets: GET_M*_OFFSET, no such *", "*", CHECKED),
    Meant("offsets: by time: no such topic", "*", CHECKED),
    Meant(
        "members: *", "fields.IS_SU*", "heartbeats are whole ones, as for a broker of RocketMQ 4"
    ),
    Meant("members: *", "*.subVersion", HARMLESS),
    Meant("members: topics", "body.topicList*", "what members subscribe to counts, too"),
    Meant("members: heartbeat with a wrong one", "*", CHECKED),
    Meant("members: a bad name of a group", "*", OWN_NAMES),
    Meant("locks: running, not there", "code", "206, CONSUMER_NOT_ONLINE"),
    Meant("locks: running", "body.*", HARMLESS),
    Meant("retries: *", "body.*.properties.REAL_*", PLACES),
    Meant("retries: *", "body.*.properties.DELAY", PLACES),
    Meant("retries: *", "body.*.properties.WAIT", HARMLESS),
    Meant("retries: *", "body.*.properties.ORIGIN_MESSAGE_ID", "`UNIQ_KEY` stays the same"),
    Meant("ordered_dead_letters: give up", "fields.*", "what is stored is another message's copy"),
    Meant("ordered_dead_letters: dead letter", "body.0.properties.*", PLACES),
    Meant("transactions: *", "body.*properties.REAL_*", PLACES),
    Meant("transactions: *", "body.*properties.PGROUP", PLACES),
    Meant("transactions: *", "body.*properties.TRAN*_*", PLACES),
    Meant("transactions: *", "body.*properties.WAIT", HARMLESS),
    Meant("transactions: asked", "body.0.queueOffset", HARMLESS),
    Meant("transactions: asked", "fields.topic", "the check-back names the topic that was sent to"),
    Meant(
        "transactions: no such half message", "*", "a gateway may have forgotten it: it is asked"
    ),
    Meant("transactions: of another group", "*", "a gateway may have forgotten it: it is asked"),
    Meant("queries: *", "fields.indexLastUpdate*", HARMLESS),
    Meant("queries: without a key", "code", MALFORMED),
    Meant("replies: *", "fields.*", "replies are handed over, and not stored"),
    Meant("replies: reply to nobody", "code", "206, CONSUMER_NOT_ONLINE"),
    Meant("replies: reply without a client", "code", MALFORMED),
    Meant("groups: make: a bad name", "*", OWN_NAMES),
    Meant("groups: *settings", "body.*", NO_EQUAL),
    Meant("groups: no settings", "*", "a question about a group does not make it"),
    Meant("groups: times", "body.*Str", HARMLESS),
    Meant("broker_itself: state", "body.*", INNER),
    Meant("broker_itself: settings", "body.*", NO_EQUAL),
    Meant("broker_itself: change what is no setting", "*", CHECKED),
    Meant("broker_itself: no statistics", "*", "what was never counted is 0"),
    Meant("broker_itself: hand to nobody", "code", MALFORMED),
    Meant("all_codes: *", "200*", "POP by remoting is not served"),
    Meant("all_codes: *", "40?", "POP by remoting is not served"),
    Meant("all_codes: *", "30??", "users and rights are those of `mqmesh acl`"),
    Meant("all_codes: *", "*", NO_EQUAL),
]

CLIENT = [
    Meant("*", "properties.REAL_*", PLACES),
    Meant("*", "properties.DELAY", PLACES),
    Meant("*", "delayTimeLevel", PLACES),
    Meant("*", "properties.ORIGIN_MESSAGE_ID", "`UNIQ_KEY` stays the same"),
    Meant("bad: no such queue", "code", "13, as of all that is wrong with a message"),
    Meant("bad: offsets of an unknown topic", "*", CHECKED),
    Meant("bad: read only", "*", "a topic's permission holds for sends, too"),
    Meant("delays: *", "properties.TIMER_*", PLACES),
    Meant("ordered: dead letter", "properties.*RECONSUME_TIME*", PLACES),
    Meant("replies: replied", "properties.*", "replies are handed over, and not stored"),
    Meant(
        "sends: got xx", "sysFlag", "bodies are stored as they were before the client compressed"
    ),
    Meant("transactions: *", "properties.PGROUP", PLACES),
    Meant("mqadmin: clusterList", "DefaultCluster *", "the version is mqmesh's"),
    Meant("mqadmin: brokerStatus *", "*", INNER),
    Meant("mqadmin: consumerProgress *", "oj-admin *", "the time is that of the next message"),
    Meant("mqadmin: queryMsgBy*", "Properties: *", HARMLESS),  # WAIT
    Meant("mqadmin: queryMsgBy*", "MessageTrack *", "mqadmin itself counts as a group there"),
]

NOT_AT_ALL = "tools 4.9.8 fail at a broker of RocketMQ 5"
RETRY_TOPICS = "a group that is known has its retry topic, and answers for itself"

TOOLS = [
    Meant("clusterList", "*", NOT_AT_ALL),
    Meant("exportConfigs *", "*", NOT_AT_ALL),
    Meant("exportMetrics *", "*", NOT_AT_ALL),
    Meant("clusterList", "DefaultCluster *", "the version is mqmesh's"),
    Meant("queryMsg*", "Properties: *", HARMLESS),  # WAIT
    Meant("*rint*", "MSGID: *", HARMLESS),
    Meant("consumeMessage *", "MSGID: *", HARMLESS),
    Meant("consumerConnection *", "*", RETRY_TOPICS),
    Meant("consumerStatus *", "*", RETRY_TOPICS),
    Meant("consumerProgress *", "*", RETRY_TOPICS),
    Meant("cloneGroupOffset *", "*", RETRY_TOPICS),
    Meant("getConsumerConfig *", "consumeFromMinEnable = *", NO_EQUAL),
    Meant("updateNamesrvConfig *", "*", CHECKED),
    Meant("getNamesrvConfig", "*", NO_EQUAL),
    Meant("getBrokerConfig *", "*", NO_EQUAL),
    Meant("brokerStatus *", "*", INNER),
]

OPEN = "RocketMQ 5.3.3 lets any user do it; here it needs a right"
OWN = "a user who may consume may also ask where topics and groups stand, and move own groups"

RIGHTS = [
    Meant("shop: make a group", "*", OPEN),
    Meant("shop: settings of the broker", "*", OPEN),
    Meant("shop: change the broker", "*", OPEN),
    Meant("shop: all topics", "*", OPEN),
    Meant("*: route", "*", "a real name server asks nobody for a signature"),
    Meant("shop: end of a queue", "shop", OWN),
    Meant("shop: statistics of a topic", "shop", OWN),
    Meant("shop: progress of a group", "shop", OWN),
    Meant("shop: reset", "shop", OWN),
    Meant("shop: leave", "other", "nobody is taken out of a group but the client itself"),
    Meant("shop: lock", "other", "who is no member gets no lock: 1"),
]

GRPC = [
    Meant("refused", "*", "`auto_create_topic_enable` decides alone"),
    Meant("sent to an unknown topic", "*", "`auto_create_topic_enable` decides alone"),
]

MEANT: dict[str, list[Meant]] = {
    "requests": REQUESTS,
    "client": CLIENT,
    "tools": TOOLS,
    "rights": RIGHTS,
    "grpc": GRPC,
}
"""Of single requests, what the Java client sees and mqadmin 4.9.8 prints, users, and gRPC."""


def unlike_rocketmq(root: Path, kind: str, answers: Mapping[str, Any]) -> str:
    """Return what differs and is not meant to, and what is meant to differ and does not.

    Args:
        root: The checkout.
        kind: Name of the golden file.
        answers: Of mqmesh.
    """
    found = differences(load(golden_path(root, kind)), answers)
    return "\n".join(str(one) for some in judge(found, MEANT[kind]) for one in some)

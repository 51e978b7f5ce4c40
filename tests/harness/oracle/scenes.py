"""Requests of RocketMQ's remoting protocol, code by code, good and bad ones, and what comes back.

Each scene has topics and groups of its own and leaves nothing that another would see.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

from harness.oracle.wire import (
    KEY_ID,
    Connection,
    Keys,
    View,
    batch_of,
    json_of,
    messages,
    names,
    properties_text,
    records_of,
    shape,
    shown,
    size,
    whole,
)
from harness.patience import until
from mqmesh.protocol.remoting.codes import RemotingCode as Code
from mqmesh.protocol.remoting.codes import RemotingStatus
from mqmesh.protocol.remoting.frame import ONEWAY, RemotingCommand


class Site:
    """A RocketMQ, real or not, and what it answered in one scene.

    Args:
        namesrv: Address of its name server.
        scene: Name of the scene.
        keys: Keys that sign its requests; None for no signature.

    Attributes:
        answers: By scene and name, as they are compared.
        said: Remarks of the answers, which are not compared.
    """

    def __init__(self, namesrv: str, scene: str, keys: Keys | None = None) -> None:
        self.namesrv = namesrv
        self._keys = keys
        self.answers: dict[str, Any] = {}
        self.said: dict[str, str] = {}
        self._scene = scene
        with self.connection(namesrv) as own:
            found = json_of(own.ask(Code.GET_BROKER_CLUSTER_INFO).body)
        (self.broker_name,) = found["brokerAddrTable"]
        self.cluster = found["brokerAddrTable"][self.broker_name]["cluster"]
        self.broker_address = found["brokerAddrTable"][self.broker_name]["brokerAddrs"]["0"]

    @contextmanager
    def connection(self, address: str = "", client_id: str = "oracle") -> Iterator[Connection]:
        """Opens a connection, to the broker unless another address is said."""
        opened = Connection(address or self.broker_address, client_id, self._keys)
        try:
            yield opened
        finally:
            opened.close()

    def note(self, name: str, answer: RemotingCommand, view: View = size) -> RemotingCommand:
        """Notes an answer."""
        key = f"{self._scene}: {name}"
        assert key not in self.answers, f"{key} is there twice"
        self.answers[key] = shown(answer, view)
        if answer.remark:
            self.said[key] = answer.remark
        return answer

    def note_value(self, name: str, value: Any) -> None:
        """Notes what was seen."""
        self.answers[f"{self._scene}: {name}"] = value


# ---- Steps -------------------------------------------------------------------------------


def put_topic(broker: Connection, topic: str, queues: int = 1, perm: int = 6) -> RemotingCommand:
    return broker.ask(
        Code.UPDATE_AND_CREATE_TOPIC,
        topic=topic,
        defaultTopic="TBW102",
        readQueueNums=queues,
        writeQueueNums=queues,
        perm=perm,
        topicFilterType="SINGLE_TAG",
        topicSysFlag=0,
        order=False,
    )


def group_settings(group: str, **more: Any) -> dict[str, Any]:
    return {
        "groupName": group,
        "consumeEnable": True,
        "consumeFromMinEnable": False,
        "consumeBroadcastEnable": False,
        "consumeMessageOrderly": False,
        "retryQueueNums": 1,
        "retryMaxTimes": 5,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
        "notifyConsumerIdsChangedEnable": True,
        **more,
    }


def put_group(broker: Connection, group: str, **more: Any) -> RemotingCommand:
    code = Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    return broker.ask(code, group_settings(group, **more))


def fields_of_send(
    topic: str, properties: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """The short fields of a send; ``more`` are changes, None leaves one out."""
    fields = {
        "a": "oracle-p",
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": 0,
        "f": 0,
        "g": int(time.time() * 1_000),
        "h": 0,
        "i": properties_text(properties or {}),
        "j": 0,
        "k": False,
        "m": False,
        **more,
    }
    return {name: value for name, value in fields.items() if value is not None}


def send(
    broker: Connection,
    topic: str,
    body: bytes = b"hello",
    properties: dict[str, str] | None = None,
    **more: Any,
) -> RemotingCommand:
    return broker.ask(Code.SEND_MESSAGE_V2, body, **fields_of_send(topic, properties, **more))


def fields_of_pull(topic: str, offset: int = 0, **more: Any) -> dict[str, Any]:
    fields = {
        "consumerGroup": "oracle-pull",
        "topic": topic,
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
        **more,
    }
    return {name: value for name, value in fields.items() if value is not None}


def pull(broker: Connection, topic: str, offset: int = 0, **more: Any) -> RemotingCommand:
    return broker.ask(Code.PULL_MESSAGE, **fields_of_pull(topic, offset, **more))


def wait_messages(broker: Connection, topic: str, count: int, **more: Any) -> RemotingCommand:
    """Pulls until a queue has so many messages from its beginning on."""

    def look() -> RemotingCommand | None:
        answer = pull(broker, topic, **more)
        is_there = answer.code == 0 and len(records_of(answer.body)) >= count
        return answer if is_there else None

    found = until(look)
    assert found is not None
    return found


def heartbeat(
    connection: Connection, group: str, *topics: str, expression: str = "*", **more: Any
) -> RemotingCommand:
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "unitMode": False,
        "subscriptionDataSet": [
            {
                "topic": topic,
                "subString": expression,
                "tagsSet": [] if expression == "*" else [expression],
                "codeSet": [],
                "subVersion": 1,
                "expressionType": "TAG",
                "classFilterMode": False,
            }
            | more
            for topic in topics
        ],
    }
    body = {
        "clientID": connection.client_id,
        "producerDataSet": [{"groupName": f"{group}-p"}],
        "consumerDataSet": [consumer] if topics else [],
    }
    return connection.ask(Code.HEART_BEAT, body)


# ---- Name server -------------------------------------------------------------------------


def routes(site: Site) -> None:
    with site.connection() as broker, site.connection(site.namesrv) as namesrv:
        put_topic(broker, "oracle-route", 3)

        def route(topic: str) -> RemotingCommand:
            return namesrv.ask(Code.GET_ROUTEINFO_BY_TOPIC, topic=topic)

        until(lambda: route("oracle-route").code == 0)
        site.note("a topic", route("oracle-route"), whole)
        site.note("no such topic", route("oracle-nowhere"))
        site.note("of topics that are made", route("TBW102"), shape)
        site.note("of replies", route(f"{site.cluster}_REPLY_TOPIC"), shape)
        site.note("of the cluster", route(site.cluster), shape)
        site.note("without a topic", namesrv.ask(Code.GET_ROUTEINFO_BY_TOPIC))
        site.note("cluster", namesrv.ask(Code.GET_BROKER_CLUSTER_INFO), whole)

        def own(answer: RemotingCommand) -> Any:
            found = json_of(answer.body)
            topics = [one for one in found.pop("topicList") if one.startswith("oracle-rou")]
            return found | {"topicList": topics}

        site.note("topics", namesrv.ask(Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER), own)
        of_cluster = namesrv.ask(Code.GET_TOPICS_BY_CLUSTER, cluster=site.cluster)
        site.note("topics of the cluster", of_cluster, own)
        nowhere = namesrv.ask(Code.GET_TOPICS_BY_CLUSTER, cluster="nowhere")
        site.note("topics of no cluster", nowhere, own)
        site.note("system topics", namesrv.ask(Code.GET_SYSTEM_TOPIC_LIST_FROM_NS), shape)
        for code in (
            Code.GET_UNIT_TOPIC_LIST,
            Code.GET_HAS_UNIT_SUB_TOPIC_LIST,
            Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        ):
            site.note(code.name, namesrv.ask(code), whole)
        gone = namesrv.ask(Code.DELETE_TOPIC_IN_NAMESRV, topic="oracle-never")
        site.note("delete an unknown topic", gone)


def pairs(site: Site) -> None:
    with site.connection(site.namesrv) as namesrv:
        space = {"namespace": "oracle"}

        def ask(code: Code, **more: Any) -> RemotingCommand:
            return namesrv.ask(code, **space, **more)

        site.note("get none", ask(Code.GET_KV_CONFIG, key="a"))
        site.note("list none", ask(Code.GET_KVLIST_BY_NAMESPACE))
        site.note("put", ask(Code.PUT_KV_CONFIG, key="a", value="1"))
        site.note("get", ask(Code.GET_KV_CONFIG, key="a"))
        site.note("list", ask(Code.GET_KVLIST_BY_NAMESPACE), whole)
        site.note("delete", ask(Code.DELETE_KV_CONFIG, key="a"))
        site.note("delete again", ask(Code.DELETE_KV_CONFIG, key="a"))
        site.note("put without a value", ask(Code.PUT_KV_CONFIG, key="a"))


def draining(site: Site) -> None:
    with site.connection(site.namesrv) as namesrv:
        wipe, add = Code.WIPE_WRITE_PERM_OF_BROKER, Code.ADD_WRITE_PERM_OF_BROKER
        for name, code in ("wipe", wipe), ("add", add):
            answer = namesrv.ask(code, brokerName=site.broker_name)
            for one in answer.fields:
                answer.fields[one] = str(int(answer.fields[one]) > 0)
            site.note(name, answer)
            site.note(f"{name}, no such broker", namesrv.ask(code, brokerName="nowhere"))
        settings = namesrv.ask(Code.GET_NAMESRV_CONFIG)
        site.note("settings of the name server", settings)
        site.note("change no setting", namesrv.ask(Code.UPDATE_NAMESRV_CONFIG, b"nothing=1\n"))


# ---- Topics ------------------------------------------------------------------------------


def topics(site: Site) -> None:
    with site.connection() as broker:
        site.note("make", put_topic(broker, "oracle-topic", 2))
        site.note("make again", put_topic(broker, "oracle-topic", 2))
        site.note("more queues", put_topic(broker, "oracle-topic", 3))
        for name, topic in {
            "a blank": "a b",
            "a dot": "a.b",
            "a comma": "a,b",
            "a percent sign": "a%b",
            "other letters": "größe",
            "nothing": "",
            "127 characters": "t" * 127,
            "128 characters": "t" * 128,
            "of the system": "SCHEDULE_TOPIC_XXXX",
            "of made topics": "TBW102",
            "of retries": "%RETRY%oracle-topic",
        }.items():
            site.note(f"make: {name}", put_topic(broker, topic))
        site.note("make: no queues", put_topic(broker, "oracle-topic-0", 0))
        site.note("make: perm 9", put_topic(broker, "oracle-topic-9", perm=9))
        site.note("make: perm 0", put_topic(broker, "oracle-topic-00", perm=0))
        answer = broker.ask(Code.UPDATE_AND_CREATE_TOPIC, topic="oracle-topic-x")
        site.note("make: without settings", answer)
        site.note("settings", broker.ask(Code.GET_TOPIC_CONFIG, topic="oracle-topic"), whole)
        site.note("no settings", broker.ask(Code.GET_TOPIC_CONFIG, topic="oracle-nothing"))

        def one(answer: RemotingCommand) -> Any:
            found = json_of(answer.body)
            return {key: type(found[key]).__name__ for key in found} | {
                "topicConfigTable": shape_of(found["topicConfigTable"]["oracle-topic"])
            }

        site.note("all settings", broker.ask(Code.GET_ALL_TOPIC_CONFIG), one)
        send(broker, "oracle-topic")
        wait_messages(broker, "oracle-topic", 1)
        stats = broker.ask(Code.GET_TOPIC_STATS_INFO, topic="oracle-topic")
        site.note("state", stats, whole)
        site.note("no state", broker.ask(Code.GET_TOPIC_STATS_INFO, topic="oracle-nothing"))
        who = broker.ask(Code.QUERY_TOPIC_CONSUME_BY_WHO, topic="oracle-topic")
        site.note("who consumes", who, shape)
        nobody = broker.ask(Code.QUERY_TOPIC_CONSUME_BY_WHO, topic="oracle-nothing")
        site.note("who consumes nothing", nobody, whole)
        site.note("of the system", broker.ask(Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER), shape)
        queue = {"topic": "oracle-topic", "queueId": 0, "index": 0, "count": 3}
        site.note("queue", broker.ask(Code.QUERY_CONSUME_QUEUE, **queue), shape)
        queue["queueId"] = 9
        site.note("no queue", broker.ask(Code.QUERY_CONSUME_QUEUE, **queue), shape)
        site.note("delete", broker.ask(Code.DELETE_TOPIC_IN_BROKER, topic="oracle-topic"))
        site.note("delete again", broker.ask(Code.DELETE_TOPIC_IN_BROKER, topic="oracle-topic"))
        site.note("delete ''", broker.ask(Code.DELETE_TOPIC_IN_BROKER, topic=""))
        gone = broker.ask(Code.DELETE_TOPIC_IN_BROKER, topic="RMQ_SYS_TRACE_TOPIC")
        site.note("delete of the system", gone)


def shape_of(value: dict[str, Any]) -> Any:
    return {
        key: type(one).__name__ if not isinstance(one, (str, int)) else one
        for key, one in sorted(value.items())
    }


# ---- Sends -------------------------------------------------------------------------------


def sends(site: Site) -> None:
    topic = "oracle-send"
    with site.connection() as broker:
        put_topic(broker, topic, 2)
        properties = {"UNIQ_KEY": KEY_ID, "KEYS": "k1 k2", "TAGS": "a", "WAIT": "true", "own": "ö"}
        site.note("short names", send(broker, topic, properties=properties, h=7))
        long = {
            "producerGroup": "oracle-p",
            "topic": topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 4,
            "queueId": 0,
            "sysFlag": 0,
            "bornTimestamp": 1,
            "flag_": 0,
            "properties": "",
            "reconsumeTimes": 0,
            "unitMode": False,
        }
        site.note("long names", broker.ask(Code.SEND_MESSAGE, b"long", **long))
        site.note("empty body", send(broker, topic, b""))
        broker.post(Code.SEND_MESSAGE_V2, b"one way", ONEWAY, **fields_of_send(topic))
        wait_messages(broker, topic, 3)
        batch = batch_of([(b"b1", {"UNIQ_KEY": KEY_ID}), (b"b2", {"KEYS": "k3"})])
        fields = fields_of_send(topic, {"UNIQ_KEY": KEY_ID}, m=True)
        site.note("batch", broker.ask(Code.SEND_BATCH_MESSAGE, batch, **fields))
        site.note("batch of nothing", broker.ask(Code.SEND_BATCH_MESSAGE, b"", **fields))
        site.note("batch that is cut", broker.ask(Code.SEND_BATCH_MESSAGE, batch[:-5], **fields))
        late = fields_of_send(topic, {"DELAY": "1"}, m=True)
        site.note("batch with a delay", broker.ask(Code.SEND_BATCH_MESSAGE, batch, **late))
        site.note("queue beyond the last", send(broker, topic, e=2))
        put_topic(broker, "oracle-any", 2)
        any_queue = send(broker, "oracle-any", e=-1)
        any_queue.fields.pop("queueOffset", None)
        any_queue.fields["queueId"] = str(any_queue.fields.get("queueId") in ("0", "1"))
        site.note("any queue", any_queue)
        wait_messages(broker, topic, 5)
        site.note("what is stored", pull(broker, topic, maxMsgNums=5), messages)


def limits(site: Site) -> None:
    topic = "oracle-limits"
    with site.connection() as broker:
        put_topic(broker, topic, 2)
        put_topic(broker, "oracle-read-only", perm=4)
        site.note("no such topic, made by it", send(broker, "oracle-made"))
        site.note("no such topic, nothing like it", send(broker, "oracle-unmade", c="oracle-no"))
        site.note("read only", send(broker, "oracle-read-only"))
        site.note("no group", send(broker, topic, a=""))
        site.note("no topic", send(broker, ""))
        for name, bad in {
            "a blank": "a b",
            "a dot": "a.b",
            "other letters": "größe",
            "127 characters": "s" * 127,
            "128 characters": "s" * 128,
            "delays": "SCHEDULE_TOPIC_XXXX",
            "half messages": "RMQ_SYS_TRANS_HALF_TOPIC",
            "ended halves": "RMQ_SYS_TRANS_OP_HALF_TOPIC",
            "made topics": "TBW102",
            "offsets": "OFFSET_MOVED_EVENT",
            "self test": "SELF_TEST_TOPIC",
            "dead letters": "%DLQ%oracle",
        }.items():
            site.note(f"topic: {name}", send(broker, bad))
        site.note("largest body", send(broker, topic, b"x" * (4 << 20)))
        site.note("too large a body", send(broker, topic, b"x" * ((4 << 20) + 1)))
        site.note("most properties", send(broker, topic, properties={"p": "x" * 32_000}))
        site.note("too many properties", send(broker, topic, properties={"p": "x" * 33_000}))
        site.note("without a queue", send(broker, topic, e=None))
        site.note("queue is no number", send(broker, topic, e="x"))
        site.note("without a topic", send(broker, topic, b=None))
        for name in "100", "0", "-1", "x":
            site.note(f"delay level {name}", send(broker, topic, properties={"DELAY": name}, e=1))
        for name, pair in {
            "for ever": {"TIMER_DELAY_SEC": str(400 * 86_400)},
            "no number": {"TIMER_DELAY_SEC": "x"},
        }.items():
            site.note(f"timer: {name}", send(broker, topic, properties=pair))


def delays(site: Site) -> None:
    topic = "oracle-delay"
    with site.connection() as broker:
        put_topic(broker, topic, 4)
        now_ms = int(time.time() * 1_000)
        for queue, (name, pair) in enumerate(
            {
                "level 1": {"DELAY": "1"},
                "after ms": {"TIMER_DELAY_MS": "1000"},
                "after s": {"TIMER_DELAY_SEC": "1"},
                "at a time": {"TIMER_DELIVER_MS": str(now_ms + 1_000)},
            }.items()
        ):
            own = pair | {"UNIQ_KEY": KEY_ID, "TAGS": "a"}
            answer = send(broker, topic, properties=own, e=queue)
            answer.fields.pop("queueOffset", None)  # that of another topic, in a real one
            site.note(name, answer)
        before = pull(broker, topic)
        site.note("nothing yet", before, messages)
        for queue, name in enumerate(("level 1", "after ms", "after s", "at a time")):
            answer = wait_messages(broker, topic, 1, queueId=queue)
            site.note(f"{name}: delivered", answer, messages)


def recalls(site: Site) -> None:
    topic = "oracle-recall"
    with site.connection() as broker:
        put_topic(broker, topic)

        def recall(name: str, **fields: Any) -> None:
            own = {"producerGroup": "oracle-p", "topic": topic, **fields}
            site.note(name, broker.ask(Code.RECALL_MESSAGE, **own))

        late = {"TIMER_DELAY_SEC": "60", "UNIQ_KEY": KEY_ID}
        handle = send(broker, topic, properties=late).fields["recallHandle"]
        recall("of another topic", recallHandle=handle, topic="oracle-recall-2")
        recall("a message", recallHandle=handle)
        recall("again", recallHandle=handle)
        recall("no handle", recallHandle="x")
        recall("without a handle")


# ---- Pulls -------------------------------------------------------------------------------


def pulls(site: Site) -> None:
    topic = "oracle-pull"
    with site.connection() as broker:
        put_topic(broker, topic, 2)
        put_topic(broker, "oracle-write-only", perm=2)
        for number in range(6):
            pair = {"TAGS": "ab"[number % 2], "n": str(number), "UNIQ_KEY": KEY_ID}
            send(broker, topic, b"%d" % number, pair)
        wait_messages(broker, topic, 6)
        site.note("all", pull(broker, topic), messages)
        site.note("two", pull(broker, topic, 1, maxMsgNums=2), messages)
        site.note("none asked", pull(broker, topic, maxMsgNums=0), messages)
        site.note("-1 asked", pull(broker, topic, maxMsgNums=-1), messages)
        site.note("tag a", pull(broker, topic, subscription="a"), messages)
        site.note("tags a and b", pull(broker, topic, subscription="a || b"), messages)
        site.note("tag c", pull(broker, topic, subscription="c"))
        sql: dict[str, Any] = {"expressionType": "SQL92"}
        found = pull(broker, topic, subscription="n > 1 AND n <= 3 AND TAGS = 'a'", **sql)
        site.note("SQL", found, messages)
        site.note("SQL, wrong", pull(broker, topic, subscription="n >", **sql))
        other = pull(broker, topic, expressionType="XPATH")
        site.note("another language", other)
        site.note("at the end", pull(broker, topic, 6))
        site.note("beyond the end", pull(broker, topic, 7))
        site.note("far beyond the end", pull(broker, topic, 1_000))
        site.note("before the beginning", pull(broker, topic, -1), messages)
        site.note("empty queue", pull(broker, topic, queueId=1))
        site.note("empty queue, beyond", pull(broker, topic, 5, queueId=1))
        site.note("no such queue", pull(broker, topic, queueId=2))
        site.note("queue -1", pull(broker, topic, queueId=-1))
        site.note("no such topic", pull(broker, "oracle-nowhere"))
        site.note("write only", pull(broker, "oracle-write-only"))
        site.note("without a subscription", pull(broker, topic, sysFlag=0, subscription=None))
        site.note("without a group", pull(broker, topic, consumerGroup=None))
        site.note("a group with a blank", pull(broker, topic, consumerGroup="a b"))
        lite = broker.ask(Code.LITE_PULL_MESSAGE, **fields_of_pull(topic))
        site.note("lite", lite, messages)
        waits = broker.post(
            Code.PULL_MESSAGE, **fields_of_pull(topic, 6, sysFlag=6, suspendTimeoutMillis=15_000)
        )
        send(broker, topic, b"6")
        site.note("waits for one", broker.wait(waits), messages)
        none = pull(broker, topic, 7, sysFlag=6, suspendTimeoutMillis=100)
        site.note("waits in vain", none)
        commits = {"sysFlag": 5, "commitOffset": 3}
        site.note("commits", pull(broker, topic, 6, **commits), messages)


# ---- Offsets -----------------------------------------------------------------------------


def offsets(site: Site) -> None:
    topic, group = "oracle-offset", "oracle-offsets"
    with site.connection() as broker:
        put_topic(broker, topic, 2)
        for number in range(4):
            send(broker, topic, b"%d" % number)
            time.sleep(0.005)  # a store time of its own
        stored = records_of(wait_messages(broker, topic, 4).body)
        queue = {"topic": topic, "queueId": 0}
        of_group = {**queue, "consumerGroup": group}
        site.note("none", broker.ask(Code.QUERY_CONSUMER_OFFSET, **of_group))
        nowhere = of_group | {"topic": "oracle-nowhere"}
        site.note("none, no such topic", broker.ask(Code.QUERY_CONSUMER_OFFSET, **nowhere))
        no_zero = of_group | {"setZeroIfNotFound": False}
        site.note("none, no zero", broker.ask(Code.QUERY_CONSUMER_OFFSET, **no_zero))
        unknown = broker.ask(Code.UPDATE_CONSUMER_OFFSET, **of_group, commitOffset=2)
        site.note("commit, no such group", unknown)
        put_group(broker, group)
        site.note("commit", broker.ask(Code.UPDATE_CONSUMER_OFFSET, **of_group, commitOffset=2))
        site.note("committed", broker.ask(Code.QUERY_CONSUMER_OFFSET, **of_group))
        site.note(
            "commit less", broker.ask(Code.UPDATE_CONSUMER_OFFSET, **of_group, commitOffset=1)
        )
        site.note("committed less", broker.ask(Code.QUERY_CONSUMER_OFFSET, **of_group))
        beyond = broker.ask(Code.UPDATE_CONSUMER_OFFSET, **of_group, commitOffset=100)
        site.note("commit beyond", beyond)
        site.note("committed beyond", broker.ask(Code.QUERY_CONSUMER_OFFSET, **of_group))
        lost = broker.ask(Code.UPDATE_CONSUMER_OFFSET, **nowhere, commitOffset=1)
        site.note("commit, no such topic", lost)
        bad = of_group | {"queueId": 9}
        lost = broker.ask(Code.UPDATE_CONSUMER_OFFSET, **bad, commitOffset=1)
        site.note("commit, no such queue", lost)
        lost = broker.ask(Code.UPDATE_CONSUMER_OFFSET, **of_group, commitOffset=-5)
        site.note("commit -5", lost)
        site.note("commit without an offset", broker.ask(Code.UPDATE_CONSUMER_OFFSET, **of_group))
        for code in Code.GET_MAX_OFFSET, Code.GET_MIN_OFFSET:
            site.note(code.name, broker.ask(code, **queue))
            site.note(f"{code.name}, no such topic", broker.ask(code, topic="nowhere", queueId=0))
            site.note(f"{code.name}, no such queue", broker.ask(code, topic=topic, queueId=9))
        by_time = Code.SEARCH_OFFSET_BY_TIMESTAMP
        times = [one["storeTimestamp"] for one in stored]
        for name, when in {
            "before all": times[0] - 1_000,
            "0": 0,
            "of the first": times[0],
            "before the third": times[2] - 1,
            "of the third": times[2],
            "behind the third": times[2] + 1,
            "of the last": times[3],
            "behind all": times[3] + 60_000,
        }.items():
            for boundary in None, "LOWER", "UPPER":
                more = {} if boundary is None else {"boundaryType": boundary}
                answer = broker.ask(by_time, **queue, timestamp=when, **more)
                site.note(f"by time: {name}{f', {boundary}' if boundary else ''}", answer)
        site.note("by time: empty queue", broker.ask(by_time, topic=topic, queueId=1, timestamp=5))
        nothing = broker.ask(by_time, topic="oracle-nowhere", queueId=0, timestamp=5)
        site.note("by time: no such topic", nothing)


# ---- Members -----------------------------------------------------------------------------


def members(site: Site) -> None:
    topic, group = "oracle-members", "oracle-group"
    with site.connection(client_id="127.0.0.1@one") as one:
        put_topic(one, topic, 2)
        of_group = {"consumerGroup": group}
        site.note("list, unknown group", one.ask(Code.GET_CONSUMER_LIST_BY_GROUP, **of_group))
        unknown = one.ask(Code.GET_CONSUMER_CONNECTION_LIST, **of_group)
        site.note("connections, unknown group", unknown)
        site.note("heartbeat", heartbeat(one, group, topic, expression="a"))
        site.note("list", one.ask(Code.GET_CONSUMER_LIST_BY_GROUP, **of_group), whole)
        with site.connection(client_id="127.0.0.1@two") as two:
            heartbeat(two, group, topic, expression="a")
            changed = one.wait_pushed(Code.NOTIFY_CONSUMER_IDS_CHANGED)
            site.note("another comes", changed)
            found = json_of(one.ask(Code.GET_CONSUMER_LIST_BY_GROUP, **of_group).body)
            site.note_value("two", sorted(found["consumerIdList"]))
            one.pushed.clear()
            two.ask(35, clientID=two.client_id, producerGroup=f"{group}-p")
            site.note("leaves", two.ask(35, clientID=two.client_id, consumerGroup=group))
            site.note("another left", one.wait_pushed(Code.NOTIFY_CONSUMER_IDS_CHANGED))
        site.note("connections", one.ask(Code.GET_CONSUMER_CONNECTION_LIST, **of_group), whole)
        producers = one.ask(Code.GET_PRODUCER_CONNECTION_LIST, producerGroup=f"{group}-p")
        site.note("producers", producers, whole)
        nobody = one.ask(Code.GET_PRODUCER_CONNECTION_LIST, producerGroup="oracle-nobody")
        site.note("no producers", nobody)

        def own(answer: RemotingCommand) -> Any:
            found = json_of(answer.body)["data"][f"{group}-p"]
            return [sorted(one) for one in found]

        site.note("all producers", one.ask(Code.GET_ALL_PRODUCER_INFO), own)
        site.note("topics", one.ask(Code.QUERY_TOPICS_BY_CONSUMER, group=group), whole)
        site.note(
            "no topics", one.ask(Code.QUERY_TOPICS_BY_CONSUMER, group="oracle-unknown"), whole
        )
        asked = Code.QUERY_SUBSCRIPTION_BY_CONSUMER
        site.note("subscription", one.ask(asked, group=group, topic=topic), whole)
        site.note("no subscription", one.ask(asked, group="oracle-no", topic=topic), whole)
        check = {
            "clientId": one.client_id,
            "group": group,
            "subscriptionData": {
                "topic": topic,
                "subString": "a > 1",
                "expressionType": "SQL92",
                "tagsSet": [],
                "codeSet": [],
                "subVersion": 1,
                "classFilterMode": False,
            },
        }
        site.note("check an expression", one.ask(Code.CHECK_CLIENT_CONFIG, check))
        check["subscriptionData"]["subString"] = "a >"  # type: ignore[index]
        site.note("check a wrong one", one.ask(Code.CHECK_CLIENT_CONFIG, check))
        wrong = heartbeat(one, "oracle-sql", topic, expression="a >", expressionType="SQL92")
        site.note("heartbeat with a wrong one", wrong)
        site.note("heartbeat of nobody", one.ask(Code.HEART_BEAT, b""))
        site.note("heartbeat that is none", one.ask(Code.HEART_BEAT, b"{"))
        site.note("a bad name of a group", heartbeat(one, "a b", topic))


def locks(site: Site) -> None:
    topic, group = "oracle-locks", "oracle-locked"
    with site.connection(client_id="127.0.0.1@locks-one") as one:
        put_topic(one, topic, 2)
        queues = [
            {"topic": topic, "brokerName": site.broker_name, "queueId": number}
            for number in range(2)
        ]
        body = {"consumerGroup": group, "clientId": one.client_id, "mqSet": queues}

        def locked(answer: RemotingCommand) -> Any:
            found = whole(answer)
            found["lockOKMQSet"].sort(key=lambda one: one["queueId"])
            return found

        heartbeat(one, group, topic, expression="a")
        site.note("lock", one.ask(Code.LOCK_BATCH_MQ, body), locked)
        with site.connection(client_id="127.0.0.1@locks-two") as two:
            heartbeat(two, group, topic, expression="a")
            other = body | {"clientId": two.client_id}
            site.note("lock, held by another", two.ask(Code.LOCK_BATCH_MQ, other), locked)
            site.note("unlock", one.ask(Code.UNLOCK_BATCH_MQ, body | {"mqSet": queues[:1]}))
            site.note("lock one", two.ask(Code.LOCK_BATCH_MQ, other), locked)
        info: dict[str, Any] = {"consumerGroup": group, "clientId": "127.0.0.1@none"}
        site.note("running, not there", one.ask(Code.GET_CONSUMER_RUNNING_INFO, **info))
        own_info = info | {"clientId": one.client_id, "jstackEnable": False}
        with site.connection() as asks:
            number = asks.post(Code.GET_CONSUMER_RUNNING_INFO, **own_info)
            question = one.wait_pushed(Code.GET_CONSUMER_RUNNING_INFO)
            site.note("running, asked", question)
            running: dict[str, Any] = {
                "properties": {"PROP_CONSUME_TYPE": "CONSUME_PASSIVELY"},
                "mqTable": {},
                "subscriptionSet": [],
                "statusTable": {},
                "jstack": None,
                "mqPopTable": {},
            }
            one.reply(question, body=json.dumps(running).encode())
            site.note("running", asks.wait(number), shape)


# ---- Retries -----------------------------------------------------------------------------


def retries(site: Site) -> None:
    topic, group = "oracle-retry", "oracle-retries"
    with site.connection(client_id="127.0.0.1@retry") as broker:
        put_topic(broker, topic)
        heartbeat(broker, group, topic)
        own = {"UNIQ_KEY": KEY_ID, "TAGS": "a", "KEYS": "k", "own": "1"}
        send(broker, topic, b"bad", own)
        (stored,) = records_of(wait_messages(broker, topic, 1, consumerGroup=group).body)
        fields = {
            "group": group,
            "offset": stored["commitLogOffset"],
            "delayLevel": 1,
            "originMsgId": KEY_ID,
            "originTopic": topic,
            "unitMode": False,
            "maxReconsumeTimes": 3,
        }
        back = Code.CONSUMER_SEND_MSG_BACK
        site.note("send back", broker.ask(back, **fields))
        retry = f"%RETRY%{group}"
        answer = wait_messages(broker, retry, 1, consumerGroup=group)
        site.note("the first retry", answer, messages)
        (again,) = records_of(answer.body)
        broker.ask(back, **fields | {"offset": again["commitLogOffset"]})
        answer = wait_messages(broker, retry, 2, consumerGroup=group)
        site.note("the second retry", answer, messages)
        last = records_of(answer.body)[1]
        dead = fields | {"offset": last["commitLogOffset"], "maxReconsumeTimes": 2}
        site.note("send back too often", broker.ask(back, **dead))
        send(broker, topic, b"hopeless", own)
        hopeless = records_of(wait_messages(broker, topic, 2, consumerGroup=group).body)[1]
        refuse = fields | {"delayLevel": -1, "offset": hopeless["commitLogOffset"]}
        site.note("give up", broker.ask(back, **refuse))
        dlq = f"%DLQ%{group}"
        until(
            lambda: (
                broker.ask(Code.GET_MAX_OFFSET, topic=dlq, queueId=0).fields.get("offset") == "2"
            )
        )
        put_topic(broker, dlq)  # dead letters cannot be read at first
        answer = wait_messages(broker, dlq, 2, consumerGroup=group)
        site.note("dead letters", answer, messages)
        site.note("no such offset", broker.ask(back, **fields | {"offset": 1 << 40}))
        site.note("no such group", broker.ask(back, **fields | {"group": "oracle-never"}))
        no_group = dict(fields)
        del no_group["group"]
        site.note("no group", broker.ask(back, **no_group))
        no_max = dict(fields)
        del no_max["maxReconsumeTimes"]
        site.note("no limit", broker.ask(back, **no_max))
        route_of = {"topic": retry}
        with site.connection(site.namesrv) as namesrv:
            found = namesrv.ask(Code.GET_ROUTEINFO_BY_TOPIC, **route_of)
            site.note("route of the retries", found, whole)


def ordered_dead_letters(site: Site) -> None:
    """A consumer in order gives up by a plain send to its retry topic."""
    topic, group = "oracle-given-up", "oracle-gives-up"
    with site.connection(client_id="127.0.0.1@gives-up") as broker:
        put_topic(broker, topic)
        heartbeat(broker, group, topic)
        own = {"UNIQ_KEY": KEY_ID.replace("AA", "AB"), "TAGS": "a"}
        send(broker, topic, b"poison", own)
        wait_messages(broker, topic, 1, consumerGroup=group)
        retry = f"%RETRY%{group}"
        more = own | {
            "RETRY_TOPIC": topic,
            "RECONSUME_TIME": "3",
            "MAX_RECONSUME_TIMES": "2",
            "DELAY": "5",
        }
        until(
            lambda: (
                broker.ask(
                    Code.QUERY_MESSAGE,
                    topic=topic,
                    key=own["UNIQ_KEY"],
                    maxNum=1,
                    beginTimestamp=0,
                    endTimestamp=1 << 60,
                    _UNIQUE_KEY_QUERY=True,
                ).code
                == 0
            )
        )
        answer = send(broker, retry, b"poison", more, a="CLIENT_INNER_PRODUCER", j=3, l=2)
        site.note("give up", answer)
        dlq = f"%DLQ%{group}"
        until(
            lambda: (
                broker.ask(Code.GET_MAX_OFFSET, topic=dlq, queueId=0).fields.get("offset") == "1"
            )
        )
        put_topic(broker, dlq)
        site.note("dead letter", wait_messages(broker, dlq, 1, consumerGroup=group), messages)


# ---- Transactions ------------------------------------------------------------------------


def transactions(site: Site) -> None:
    topic, group = "oracle-bank", "oracle-pays"
    with site.connection(client_id="127.0.0.1@pays") as broker:
        put_topic(broker, topic)
        send(broker, "oracle-before")  # no half message is the first of the log
        broker.ask(
            Code.HEART_BEAT,
            {
                "clientID": broker.client_id,
                "producerDataSet": [{"groupName": group}],
                "consumerDataSet": [],
            },
        )

        def half(name: str, number: int) -> tuple[RemotingCommand, dict[str, Any]]:
            unique = f"{KEY_ID[:-2]}{number:02X}"
            own = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": unique, "TAGS": "a", "own": "1"}
            own["CHECK_IMMUNITY_TIME_IN_SECONDS"] = "1"
            answer = send(broker, topic, name.encode(), own, f=4, a=group)
            offset = int(answer.fields["msgId"][16:], 16)
            ends = {
                "producerGroup": group,
                "transactionId": unique,
                "msgId": unique,
                "tranStateTableOffset": answer.fields["queueOffset"],
                "commitLogOffset": offset,
                "fromTransactionCheck": False,
            }
            return answer, ends

        end = Code.END_TRANSACTION
        answer, ends = half("commit", 1)
        answer.fields.pop("queueOffset")
        answer.fields["queueId"] = answer.fields["queueId"]
        site.note("half", answer)
        site.note("commit", broker.ask(end, **ends, commitOrRollback=8))
        found = wait_messages(broker, topic, 1)
        site.note("committed", found, messages)
        answer, ends = half("rollback", 2)
        site.note("roll back", broker.ask(end, **ends, commitOrRollback=12))
        answer, ends = half("unknown", 3)
        broker.post(end, b"", ONEWAY, **ends, commitOrRollback=0)
        asked = broker.wait_pushed(Code.CHECK_TRANSACTION_STATE)
        while asked.fields["msgId"] != ends["msgId"]:  # the real one may ask about the others, too
            asked = broker.wait_pushed(Code.CHECK_TRANSACTION_STATE)
        site.note("asked", asked, messages)
        checked = {
            "producerGroup": group,
            "fromTransactionCheck": True,
            "commitOrRollback": 8,
            **{name: asked.fields[name] for name in ("tranStateTableOffset", "commitLogOffset")},
            **{name: asked.fields[name] for name in ("msgId", "transactionId")},
        }
        site.note("answered", broker.ask(end, **checked))
        both = wait_messages(broker, topic, 2)
        site.note("both", both, lambda answer: messages(answer)[1])
        wrong = ends | {"commitLogOffset": 1 << 40, "commitOrRollback": 8}
        site.note("no such half message", broker.ask(end, **wrong))
        _, ends = half("other", 4)
        stranger = ends | {"producerGroup": "oracle-stranger", "commitOrRollback": 8}
        site.note("of another group", broker.ask(end, **stranger))
        broker.ask(end, **ends, commitOrRollback=12)


# ---- Queries -----------------------------------------------------------------------------


def queries(site: Site) -> None:
    topic = "oracle-query"
    with site.connection() as broker:
        put_topic(broker, topic)
        unique = KEY_ID[:-2] + "EE"
        for number in range(3):
            own = {"KEYS": f"same k{number}", "UNIQ_KEY": f"{unique[:-1]}{number:X}", "TAGS": "a"}
            send(broker, topic, b"%d" % number, own)
        stored = records_of(wait_messages(broker, topic, 3).body)
        fields = {"topic": topic, "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 1 << 60}
        query = Code.QUERY_MESSAGE
        until(lambda: len(records_of(broker.ask(query, **fields, key="same").body)) == 3)

        def sorted_messages(answer: RemotingCommand) -> Any:
            return sorted(messages(answer), key=lambda one: one["queueOffset"])

        def offsets_in_order(answer: RemotingCommand) -> Any:
            return [one["queueOffset"] for one in records_of(answer.body)]

        site.note("by a key", broker.ask(query, **fields, key="k1"), sorted_messages)
        site.note("by a key of three", broker.ask(query, **fields, key="same"), offsets_in_order)
        two = broker.ask(query, **fields | {"maxNum": 2}, key="same")
        site.note("two of three", two, lambda answer: len(records_of(answer.body)))
        site.note("by no key", broker.ask(query, **fields, key="nothing"))
        early = fields | {"endTimestamp": 1_000}
        site.note("by a key, too early", broker.ask(query, **early, key="same"))
        site.note("no such topic", broker.ask(query, **fields | {"topic": "oracle-no"}, key="k1"))
        by_id = {**fields, "_UNIQUE_KEY_QUERY": True}
        found = broker.ask(query, **by_id, key=unique[:-1] + "1")
        site.note("by the client's id", found, sorted_messages)
        site.note("by no id", broker.ask(query, **by_id, key=KEY_ID[:-2] + "0F"))
        site.note("without a key", broker.ask(query, **fields))
        view = Code.VIEW_MESSAGE_BY_ID
        place = stored[1]["commitLogOffset"]
        site.note("by a place", broker.ask(view, offset=place), messages)
        site.note("by no place", broker.ask(view, offset=1 << 40))
        site.note("by a place between", broker.ask(view, offset=place + 1))
        site.note("without a place", broker.ask(view))


# ---- Replies -----------------------------------------------------------------------------


def replies(site: Site) -> None:
    with site.connection(client_id="127.0.0.1@asks") as asks, site.connection() as replier:
        asks.ask(
            Code.HEART_BEAT,
            {
                "clientID": asks.client_id,
                "producerDataSet": [{"groupName": "oracle-asks"}],
                "consumerDataSet": [],
            },
        )
        put_topic(asks, "oracle-asked")
        asking = {
            "CORRELATION_ID": "c-1",
            "REPLY_TO_CLIENT": asks.client_id,
            "TTL": "3000",
            "UNIQ_KEY": KEY_ID,
        }
        site.note("request", send(asks, "oracle-asked", b"how much?", asking, a="oracle-asks"))
        site.note("asked", wait_messages(replier, "oracle-asked", 1), messages)
        topic = f"{site.cluster}_REPLY_TOPIC"
        own = {
            "CORRELATION_ID": "c-1",
            "REPLY_TO_CLIENT": asks.client_id,
            "MSG_TYPE": "reply",
            "TTL": "3000",
            "UNIQ_KEY": KEY_ID,
            "own": "1",
        }
        code = Code.SEND_REPLY_MESSAGE_V2
        number = replier.post(code, b"42", **fields_of_send(topic, own, a="oracle-replies"))
        pushed = asks.wait_pushed(Code.PUSH_REPLY_MESSAGE_TO_CLIENT)
        if "properties" in pushed.fields:
            pairs = pushed.fields["properties"].split("\x02")
            found = sorted(one.replace("\x01", "=") for one in pairs if one)
            pushed.fields["properties"] = re.sub("1[0-9]{12}", "<time>", " ".join(found))
        site.note("reply, at who asked", pushed, lambda one: one.body.decode())
        asks.reply(pushed)
        site.note("reply", replier.wait(number))
        gone = own | {"REPLY_TO_CLIENT": "127.0.0.1@nobody"}
        answer = replier.ask(code, b"42", **fields_of_send(topic, gone))
        site.note("reply to nobody", answer)
        bare = replier.ask(code, b"42", **fields_of_send(topic, {}))
        site.note("reply without a client", bare)


# ---- Administration ----------------------------------------------------------------------


def groups(site: Site) -> None:
    with site.connection() as broker:
        site.note("make", put_group(broker, "oracle-sub"))
        site.note("make: a bad name", put_group(broker, "a b"))
        site.note("make: no name", put_group(broker, ""))
        site.note("make: nothing", broker.ask(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, b""))
        settings = broker.ask(Code.GET_SUBSCRIPTIONGROUP_CONFIG, group="oracle-sub")
        site.note("settings", settings, whole)
        no = broker.ask(Code.GET_SUBSCRIPTIONGROUP_CONFIG, group="oracle-none")
        no_body = {"body": bool(no.body)}
        site.note("no settings", no, lambda answer: no_body)

        def one(answer: RemotingCommand) -> Any:
            found = json_of(answer.body)
            return {name: type(found[name]).__name__ for name in sorted(found)} | {
                "subscriptionGroupTable": dict.fromkeys(
                    sorted(found["subscriptionGroupTable"]["oracle-sub"]), True
                )
            }

        site.note("all settings", broker.ask(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG), one)
        put_group(broker, "oracle-off", consumeEnable=False)
        put_topic(broker, "oracle-grouped", 2)
        for number in range(3):
            send(broker, "oracle-grouped", b"%d" % number)
        wait_messages(broker, "oracle-grouped", 3)
        off = pull(broker, "oracle-grouped", consumerGroup="oracle-off")
        site.note("consume, not allowed", off)
        commit = {"consumerGroup": "oracle-sub", "topic": "oracle-grouped", "queueId": 0}
        broker.ask(Code.UPDATE_CONSUMER_OFFSET, **commit, commitOffset=1)
        stats = Code.GET_CONSUME_STATS
        found = broker.ask(stats, consumerGroup="oracle-sub", topic="oracle-grouped")
        site.note("progress", found, whole)
        nothing = broker.ask(stats, consumerGroup="oracle-none")
        site.note("progress of nothing", nothing, whole)
        no_topic = broker.ask(stats, consumerGroup="oracle-sub", topic="oracle-none")
        site.note("progress, no such topic", no_topic, whole)
        spans = Code.QUERY_CONSUME_TIME_SPAN
        found = broker.ask(spans, group="oracle-sub", topic="oracle-grouped")

        def spans_in_order(answer: RemotingCommand) -> Any:
            found = whole(answer)["consumeTimeSpanSet"]
            for one in found:
                one["delayTime"] = "<ms>"
            return sorted(found, key=lambda one: one["messageQueue"]["queueId"])

        site.note("times", found, spans_in_order)
        site.note("times of no topic", broker.ask(spans, group="oracle-sub", topic="oracle-none"))
        of_broker = broker.ask(Code.GET_BROKER_CONSUME_STATS, isOrder=False)
        site.note("progress of all", of_broker, names)
        reset = Code.INVOKE_BROKER_TO_RESET_OFFSET
        where = {"group": "oracle-sub", "topic": "oracle-grouped", "isForce": True}
        site.note("reset to 0", broker.ask(reset, **where, timestamp=0), whole)
        site.note("to the end", broker.ask(reset, **where, timestamp=-1), whole)
        by_offset = where | {"queueId": 0, "offset": 2, "timestamp": -1}
        site.note("to an offset", broker.ask(reset, **by_offset), whole)
        site.note("committed then", broker.ask(Code.QUERY_CONSUMER_OFFSET, **commit))
        bad = where | {"topic": "oracle-none"}
        site.note("reset, no such topic", broker.ask(reset, **bad, timestamp=0))
        bad = where | {"group": "oracle-none"}
        site.note("reset, no such group", broker.ask(reset, **bad, timestamp=0), shape)
        clone = {"srcGroup": "oracle-sub", "destGroup": "oracle-off", "topic": "oracle-grouped"}
        site.note("clone", broker.ask(Code.CLONE_GROUP_OFFSET, **clone))
        cloned = commit | {"consumerGroup": "oracle-off"}
        site.note("cloned", broker.ask(Code.QUERY_CONSUMER_OFFSET, **cloned))
        no_source = clone | {"srcGroup": "oracle-nobody"}
        site.note("clone of nothing", broker.ask(Code.CLONE_GROUP_OFFSET, **no_source))
        delete = Code.DELETE_SUBSCRIPTIONGROUP
        site.note("delete", broker.ask(delete, groupName="oracle-sub", cleanOffset=True))
        site.note("delete again", broker.ask(delete, groupName="oracle-sub", cleanOffset=True))


TOOLS_READ = {
    *("autoCreateSubscriptionGroup", "autoCreateTopicEnable", "brokerClusterName", "brokerId"),
    *("brokerName", "brokerRole", "fileReservedTime", "filterServerNums", "flushDiskType"),
    *("maxMessageSize", "messageDelayLevel", "msgTraceTopicName", "slaveReadEnable", "traceOn"),
    *("traceTopicEnable", "useTLS", "listenPort", "namesrvAddr", "brokerIP1", "deleteWhen"),
    *("brokerPermission", "defaultTopicQueueNums", "transactionCheckMax", "transactionTimeOut"),
}
"""Settings of a broker that tools look for."""


def broker_itself(site: Site) -> None:
    with site.connection() as broker:

        def settings(answer: RemotingCommand) -> Any:
            lines = answer.body.decode().splitlines()
            found = {line.partition("=")[0] for line in lines}
            return dict.fromkeys(sorted(found & TOOLS_READ), True)

        def table(answer: RemotingCommand) -> Any:
            found = json_of(answer.body)["table"]
            return dict.fromkeys(sorted(name for name in found if "/" not in name), True)

        site.note("state", broker.ask(Code.GET_BROKER_RUNTIME_INFO), table)
        site.note("settings", broker.ask(Code.GET_BROKER_CONFIG), settings)
        site.note("change nothing", broker.ask(Code.UPDATE_BROKER_CONFIG, b""))
        unknown = broker.ask(Code.UPDATE_BROKER_CONFIG, b"oracleNothing=1\n")
        site.note("change what is no setting", unknown)
        stats = Code.VIEW_BROKER_STATS_DATA
        no = broker.ask(stats, statsName="TOPIC_PUT_NUMS", statsKey="oracle-no")
        site.note("no statistics", no, lambda answer: bool(answer.body))
        bad = broker.ask(stats, statsName="NOTHING", statsKey="oracle-no")
        site.note("no such statistics", bad)
        for code in (
            Code.CLEAN_EXPIRED_CONSUMEQUEUE,
            Code.CLEAN_UNUSED_TOPIC,
            Code.DELETE_EXPIRED_COMMITLOG,
        ):
            site.note(code.name, broker.ask(code))
        hand = {"consumerGroup": "oracle-no", "clientId": "x", "msgId": "x", "brokerName": "x"}
        site.note("hand to nobody", broker.ask(Code.CONSUME_MESSAGE_DIRECTLY, **hand))


# ---- All codes ---------------------------------------------------------------------------

ALL_CODES = [
    *(10, 11, 12, 14, 15, 17, 18, 21, 25, 26, 28, 29, 30, 31, 32, 33, 34, 36, 37, 38, 41, 42, 43),
    *(45, 46, 50, 51, 52, 53, 54, 60, 61, *range(100, 107), *range(200, 209), 215, 216, 217, 219),
    *(222, 223, 224, 225, 300, 301, *range(303, 309), *range(310, 326), 327, 328, 343, 345),
    *(351, 352, 353, 354, 361, 400, 401, 402, 513, 901, 906, 907, 1_007, 1_008, 1_009, 1_010),
    *(2_001, 2_002, 2_003, 2_004, *range(3_001, 3_011), *range(200_050, 200_057), 200_151, 9_999),
]


def all_codes(site: Site) -> None:
    """Each code without a field and without a body: is it known to name server or broker?"""
    with site.connection(site.namesrv) as namesrv, site.connection() as broker:
        unknown = RemotingStatus.REQUEST_CODE_NOT_SUPPORTED
        ports = namesrv, broker
        known = {
            str(code): any(port.ask(code).code != unknown for port in ports) for code in ALL_CODES
        }
        site.note_value("known to one of both", known)


ALONE = [routes, pairs, draining]
"""Scenes of the name server, which one another would see."""
TOGETHER = [
    *(
        topics,
        sends,
        limits,
        delays,
        recalls,
        pulls,
        offsets,
        members,
        locks,
        retries,
        ordered_dead_letters,
    ),
    *(transactions, queries, replies, groups, broker_itself, all_codes),
]
"""Scenes that wait most of their time."""


def play(namesrv: str, wanted: list[str] | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Plays scenes; answers as they are compared, and their remarks.

    Args:
        namesrv: Address of the name server.
        wanted: Names of scenes; all by default.
    """

    def one(scene: Callable[[Site], None]) -> Site:
        site = Site(namesrv, scene.__name__)
        try:
            scene(site)
        except Exception as error:
            where = extract_tb(error.__traceback__)[1].lineno
            site.note_value("failed", f"line {where}: {error}")
        return site

    alone, together = (
        [scene for scene in scenes if not wanted or scene.__name__ in wanted]
        for scenes in (ALONE, TOGETHER)
    )
    sites = [one(scene) for scene in alone]
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        sites += pool.map(one, together)
    answers: dict[str, Any] = {}
    said: dict[str, str] = {}
    for site in sites:
        answers |= site.answers
        said |= site.said
    return answers, said

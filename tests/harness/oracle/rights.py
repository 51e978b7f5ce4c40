"""Requests of users with and without rights, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.oracle.scenes import (
    Site,
    fields_of_pull,
    heartbeat,
    put_group,
    put_topic,
    send,
)
from harness.oracle.wire import Connection, Keys
from harness.patience import until
from mqmesh.protocol.remoting.codes import RemotingCode as Code
from mqmesh.protocol.remoting.codes import RemotingStatus

ADMIN = Keys("admin", "secret of admin")
"""May do everything."""
SHOP = Keys("shop", "secret of shop")
"""May send to and consume topics ``shop-…``, with groups ``shop-…``."""
STRANGERS = {
    "wrong secret": Keys("shop", "another secret"),
    "unknown user": Keys("nobody", "secret of shop"),
    "no user": None,
}
CREATE_USER, CREATE_ACL = 3001, 3006
"""Codes of a real RocketMQ."""


def make_shop(broker_address: str) -> None:
    """Makes the user with few rights, at a real RocketMQ."""
    broker = Connection(broker_address, keys=ADMIN)
    user = {"username": SHOP.access, "password": SHOP.secret, "userType": "Normal"}
    entries = [
        {"resource": resource, "actions": actions, "sourceIps": [], "decision": "Allow"}
        for resource, actions in (("Topic:shop-*", ["Pub", "Sub"]), ("Group:shop-*", ["Sub"]))
    ]
    policies = {"policies": [{"policyType": "Custom", "entries": entries}]}
    for code, body, fields in (
        (CREATE_USER, user, {"username": SHOP.access}),
        (CREATE_ACL, policies, {"subject": f"User:{SHOP.access}"}),
    ):
        answer = broker.ask(code, body, **fields)
        assert answer.code == RemotingStatus.SUCCESS, answer.remark
    broker.close()


def play_rights(namesrv: str) -> dict[str, Any]:
    """Asks as each user; codes of the answers.

    Args:
        namesrv: Address of the name server.
    """
    site = Site(namesrv, "rights", ADMIN)
    found: dict[str, Any] = {}
    with site.connection() as broker:
        for owner in "shop", "other":
            for answer in put_topic(broker, f"{owner}-topic"), put_group(broker, f"{owner}-group"):
                assert answer.code == RemotingStatus.SUCCESS, answer.remark
        until(lambda: send(broker, "other-topic").code == RemotingStatus.SUCCESS)
    for name, keys in {"admin": ADMIN, "shop": SHOP}.items():
        for what, ask in _requests(site).items():
            found[f"{name}: {what}"] = _codes(site, keys, ask)
    for name, stranger in STRANGERS.items():
        for what in "send", "pull", "members", "all topics":
            found[f"{name}: {what}"] = _codes(site, stranger, _requests(site)[what])
    for name, caller in {"admin": ADMIN, "shop": SHOP, **STRANGERS}.items():
        route = of_topic(Code.GET_ROUTEINFO_BY_TOPIC)
        found[f"{name}: route"] = _codes(site, caller, route, site.namesrv)
    return found


Ask = Callable[[Connection, str], Any]


def of_topic(code: int, **more: Any) -> Ask:
    """Return a request about a topic."""
    return lambda broker, owner: broker.ask(code, topic=f"{owner}-topic", **more)


def _codes(site: Site, keys: Keys | None, ask: Ask, address: str = "") -> dict[str, int]:
    """Return the codes of a request about what is the shop's, and about what is another's."""
    found = {}
    for owner in "shop", "other":
        connection = Connection(address or site.broker_address, f"rights-{owner}", keys)
        found[owner] = ask(connection, owner).code
        connection.close()
    return found


def _requests(site: Site) -> dict[str, Ask]:
    """Return requests about a topic and a group, by name."""

    def of_group(code: int, **more: Any) -> Ask:
        return lambda broker, owner: broker.ask(code, consumerGroup=f"{owner}-group", **more)

    def pull(broker: Connection, topic: str, group: str) -> Any:
        fields = fields_of_pull(f"{topic}-topic", consumerGroup=f"{group}-group")
        return broker.ask(Code.PULL_MESSAGE, **fields)

    queues = [{"topic": "shop-topic", "brokerName": site.broker_name, "queueId": 0}]

    def joins(broker: Connection, owner: str) -> Any:
        return heartbeat(broker, f"{owner}-group", "shop-topic")

    def members(broker: Connection, owner: str) -> Any:
        joins(broker, owner)
        return broker.ask(Code.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=f"{owner}-group")

    def lock(broker: Connection, owner: str) -> Any:
        joins(broker, owner)
        body = {"consumerGroup": f"{owner}-group", "clientId": broker.client_id, "mqSet": queues}
        return broker.ask(Code.LOCK_BATCH_MQ, body)

    return {
        "heartbeat": joins,
        "send": lambda broker, owner: send(broker, f"{owner}-topic", a="shop-p"),
        "send with another's group": lambda broker, owner: send(
            broker, "shop-topic", a=f"{owner}-p"
        ),
        "pull": lambda broker, owner: pull(broker, owner, "shop"),
        "pull with another's group": lambda broker, owner: pull(broker, "shop", owner),
        "members": members,
        "heartbeat for another's topic": lambda broker, owner: heartbeat(
            broker, "shop-group", f"{owner}-topic"
        ),
        "leave": lambda broker, owner: broker.ask(
            Code.UNREGISTER_CLIENT, clientID=broker.client_id, consumerGroup=f"{owner}-group"
        ),
        # A question for an offset is not answered without the right: old clients take any error
        # for "never consumed", and skip the backlog.
        "commit": of_group(
            Code.UPDATE_CONSUMER_OFFSET, topic="shop-topic", queueId=0, commitOffset=0
        ),
        "lock": lock,
        "end of a queue": of_topic(Code.GET_MAX_OFFSET, queueId=0),
        "by key": of_topic(Code.QUERY_MESSAGE, key="k", maxNum=1, beginTimestamp=0, endTimestamp=0),
        "make a topic": lambda broker, owner: put_topic(broker, f"{owner}-topic"),
        "make a group": lambda broker, owner: put_group(broker, f"{owner}-group"),
        "statistics of a topic": of_topic(Code.GET_TOPIC_STATS_INFO),
        "progress of a group": of_group(Code.GET_CONSUME_STATS),
        "reset": lambda broker, owner: broker.ask(
            Code.INVOKE_BROKER_TO_RESET_OFFSET,
            topic="shop-topic",
            group=f"{owner}-group",
            timestamp=0,
            isForce=True,
        ),
        "settings of the broker": lambda broker, owner: broker.ask(Code.GET_BROKER_CONFIG),
        "change the broker": lambda broker, owner: broker.ask(
            Code.UPDATE_BROKER_CONFIG, b"transactionCheckMax=15\n"
        ),
        "all topics": lambda broker, owner: broker.ask(Code.GET_ALL_TOPIC_CONFIG),
        "delete a topic": lambda broker, owner: broker.ask(
            Code.DELETE_TOPIC_IN_BROKER, topic=f"{owner}-gone"
        ),
    }

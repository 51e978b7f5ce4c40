from __future__ import annotations

import msgspec
import pytest

from mqmesh.errors import NotMaster
from mqmesh.message import MessageQueue
from mqmesh.protocol.route import BrokerAddress, BrokerData, Perm, QueueData, TopicRoute
from mqmesh.sdk.client.route_cache import RouteCache, why_not_writable

READ, WRITE, BOTH = Perm.READ.value, Perm.WRITE.value, Perm.READ_WRITE.value


def broker(name: str, *broker_ids: int, port: int = 1) -> BrokerData:
    return BrokerData("c", name, {one: BrokerAddress(f"h:{port + one}") for one in broker_ids})


def queues(*pairs: tuple[str, int]) -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue("t", name, number) for name, number in pairs)


def cache_of(*data: QueueData, brokers: list[BrokerData], order: bool = False) -> RouteCache:
    cache = RouteCache()
    assert cache.update(TopicRoute("t", list(data), brokers, order=order))
    return cache


def test_queues_come_by_broker_name_and_number() -> None:
    cache = cache_of(
        QueueData("b", 2, 1, BOTH),
        QueueData("a", 1, 2, BOTH),
        brokers=[broker("b", 0), broker("a", 0)],
    )
    assert cache.publish_queues("t") == queues(("a", 0), ("a", 1), ("b", 0))
    assert cache.subscribe_queues("t") == queues(("a", 0), ("b", 0), ("b", 1))
    assert sorted(cache.brokers_of("t")) == ["a", "b"]
    assert cache.publish_queues("unknown") == ()
    assert cache.subscribe_queues("unknown") == ()
    assert cache.brokers_of("unknown") == []
    assert cache.route("unknown") is None


def test_permissions_decide() -> None:
    cache = cache_of(
        QueueData("a", 1, 1, WRITE),
        QueueData("b", 1, 1, READ),
        QueueData("c", 1, 1, 0),
        brokers=[broker("a", 0), broker("b", 0), broker("c", 0)],
    )
    assert cache.publish_queues("t") == queues(("a", 0))
    assert cache.subscribe_queues("t") == queues(("b", 0))


def test_without_a_master_nothing_is_written_but_slaves_are_read() -> None:
    cache = cache_of(QueueData("a", 1, 1, BOTH), brokers=[broker("a", 1)])
    assert cache.publish_queues("t") == ()
    assert cache.subscribe_queues("t") == queues(("a", 0))
    assert cache.address("a") is None
    assert cache.address("a", 1) is not None


def test_an_ordered_topic_keeps_the_queues_of_a_broker_that_is_away() -> None:
    data = [QueueData("a", 1, 1, BOTH), QueueData("b", 1, 1, BOTH)]
    cache = cache_of(*data, brokers=[broker("a", 0)], order=True)
    assert cache.publish_queues("t") == cache.subscribe_queues("t") == queues(("a", 0), ("b", 0))
    cache = cache_of(*data, brokers=[broker("a", 0)])
    assert cache.publish_queues("t") == cache.subscribe_queues("t") == queues(("a", 0))


def test_an_update_says_whether_anything_changed() -> None:
    cache = RouteCache()
    route = TopicRoute("t", [QueueData("a", 1, 1, BOTH)], [broker("a", 0)])
    assert cache.update(route)
    assert not cache.update(TopicRoute("t", [QueueData("a", 1, 1, BOTH)], [broker("a", 0)]))
    assert cache.update(TopicRoute("t", [QueueData("a", 2, 2, BOTH)], [broker("a", 0)]))
    assert cache.update(TopicRoute("t", [QueueData("a", 2, 2, BOTH)], [broker("a", 0, port=9)]))
    assert cache.address("a") == BrokerAddress("h:9")


def test_addresses_are_kept_when_a_broker_leaves_a_route() -> None:
    cache = cache_of(QueueData("a", 1, 1, BOTH), brokers=[broker("a", 0)])
    assert cache.is_used("a")
    cache.update(TopicRoute("t", [QueueData("b", 1, 1, BOTH)], [broker("b", 0)]))
    assert cache.address("a") is not None
    assert not cache.is_used("a")
    assert cache.is_used("b")


def test_a_topic_can_be_forgotten() -> None:
    cache = cache_of(QueueData("a", 1, 1, BOTH), brokers=[broker("a", 0)])
    cache.forget("t")
    cache.forget("t")
    assert cache.route("t") is None
    assert cache.publish_queues("t") == cache.subscribe_queues("t") == ()


def test_the_topics_of_a_broker_are_known() -> None:
    cache = cache_of(QueueData("a", 1, 1, BOTH), brokers=[broker("a", 0)])
    cache.update(TopicRoute("u", [QueueData("a", 1, 1, BOTH)], [broker("a", 0), broker("b", 0)]))
    assert sorted(cache.topics_of("a")) == ["t", "u"]
    assert cache.topics_of("b") == ["u"]
    cache.update(TopicRoute("u", [QueueData("a", 1, 1, BOTH)], [broker("a", 0)]))
    assert cache.topics_of("b") == []
    cache.forget("t")
    assert cache.topics_of("a") == ["u"]


def test_a_route_of_an_earlier_epoch_does_not_lead_back_to_the_old_master() -> None:
    def told(epoch: int, port: int) -> TopicRoute:
        data = BrokerData("c", "a", {0: BrokerAddress(f"h:{port}")}, epoch)
        return TopicRoute("t", [QueueData("a", 4, 4, 6)], [data])

    cache = RouteCache()
    assert cache.update(told(1, 1))
    assert cache.update(told(2, 2))
    assert not cache.update(told(1, 1)), "of a name server that has not heard of the new one"
    assert cache.address("a") == BrokerAddress("h:2")
    assert cache.update(told(3, 1))
    assert cache.address("a") == BrokerAddress("h:1")


def test_who_is_no_master_says_who_is() -> None:
    cache = cache_of(QueueData("a", 1, 1, BOTH), brokers=[broker("a", 0, 1)])
    assert cache.follow(NotMaster("no", epoch=3, master="h:2"), "a")
    assert cache.address("a") == BrokerAddress("h:2")
    assert cache.epoch("a") == 3
    assert not cache.follow(NotMaster("no", epoch=3, master="h:1"), "a"), "no news"
    assert not cache.follow(NotMaster("no", epoch=2, master="h:1"), "a")
    assert not cache.follow(NotMaster("no", epoch=9), "a"), "he does not know"
    assert not cache.follow(NotMaster("no", epoch=9, master="h:1"), "b"), "nobody knows the group"
    assert cache.route("t").brokers[0].addresses[0] == BrokerAddress("h:2")
    assert not cache.update(TopicRoute("t", [QueueData("a", 1, 1, BOTH)], [broker("a", 0, 1)])), (
        "a name server's is of an earlier epoch"
    )


def test_a_master_that_no_name_server_knew_can_be_sent_to() -> None:
    cache = cache_of(QueueData("a", 1, 1, BOTH), brokers=[broker("a", 1)])
    assert cache.publish_queues("t") == ()
    assert cache.follow(NotMaster("no", epoch=1, master="else:7"), "a")
    assert cache.publish_queues("t") == queues(("a", 0))
    assert cache.address("a") == BrokerAddress("else:7")


def test_a_master_whose_key_no_name_server_told_is_not_followed() -> None:
    one = broker("a", 1)
    known = {1: BrokerAddress("h:1", server_key="k1"), 2: BrokerAddress("h:2", server_key="k2")}
    one = msgspec.structs.replace(one, addresses=known)
    cache = cache_of(QueueData("a", 1, 1, BOTH), brokers=[one])
    assert not cache.follow(NotMaster("no", epoch=1, master="else:7"), "a")
    assert cache.follow(NotMaster("no", epoch=1, master="h:2"), "a")
    assert cache.address("a") == BrokerAddress("h:2", server_key="k2")


@pytest.mark.parametrize(
    ("ids", "elects", "found"),
    [((0, 2, 1), False, 0), ((2, 1), False, 1), ((2, 1), True, None), ((), False, None)],
)
def test_without_a_master_the_lowest_follower_stands_in_unless_one_is_elected(ids, elects, found):
    addresses = {one: BrokerAddress(f"h:{one}") for one in ids}
    routes = RouteCache()
    data = BrokerData("c", "a", addresses, is_elected=elects)
    routes.update(TopicRoute("t", [QueueData("a", 1, 1, 6)], [data]))
    wanted = None if found is None else BrokerAddress(f"h:{found}")
    assert routes.address("a", stand_in=True) == wanted
    assert routes.address("a") == (wanted if found == 0 else None)


def test_why_nobody_may_write_is_said_only_while_that_does_not_pass() -> None:
    here = [broker("a", 0), broker("b", 0)]

    def why(*data: QueueData, brokers: list[BrokerData] = here) -> str:
        return why_not_writable(TopicRoute("t", list(data), brokers))

    assert why(QueueData("a", 1, 1, READ), QueueData("b", 1, 1, 0)) == (
        "topic 't' may not be written to, its permission is r; `mqmesh topic update t --perm rw` "
        "allows it, or `mqmesh broker undrain` if a, b was drained"
    )
    assert why(QueueData("a", 1, 1, READ), brokers=[broker("a", 1)]) == "", "a master may come"
    assert why(QueueData("a", 1, 1, READ), QueueData("b", 1, 1, BOTH)) == ""
    assert why(QueueData("a", 1, 0, BOTH)) == ""

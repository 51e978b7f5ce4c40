"""Who reads which queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import InvalidArgument
from mqmesh.message import MessageQueue
from mqmesh.sdk.consumer.rebalance import (
    Average,
    AverageByCircle,
    ByConfig,
    ConsistentHash,
    MachineRoom,
    allocate_strategy,
)

SHARING = [Average(), AverageByCircle(), ConsistentHash(), MachineRoom()]


def queues(count: int, broker: str = "broker-a") -> list[MessageQueue]:
    return [MessageQueue("t", broker, number) for number in range(count)]


def members(count: int, instance: str = "DEFAULT") -> list[str]:
    return sorted(f"host:{number}@{instance}#abc" for number in range(count))


def divided(strategy, all_queues, client_ids):
    return [strategy.allocate("g", one, all_queues, client_ids) for one in client_ids]


@pytest.mark.parametrize(
    ("queue_count", "member_count", "expected"),
    [
        (5, 2, [3, 2]),
        (5, 3, [2, 2, 1]),
        (6, 3, [2, 2, 2]),
        (10, 20, [1] * 10 + [0] * 10),
        (20, 6, [4, 4, 3, 3, 3, 3]),
        (8, 3, [3, 3, 2]),
    ],
)
def test_average_gives_the_documented_counts(queue_count, member_count, expected):
    parts = divided(Average(), queues(queue_count), members(member_count))
    assert [len(part) for part in parts] == expected


def test_average_gives_neighbouring_queues():
    parts = divided(Average(), queues(5), members(2))
    assert [[q.queue_id for q in part] for part in parts] == [[0, 1, 2], [3, 4]]


def reallocated(all_queues, client_ids, owners):
    return {one: Average().reallocate(one, all_queues, client_ids, owners) for one in client_ids}


def owners_of(parts):
    return {queue: member for member, part in parts.items() for queue in part}


@given(st.integers(0, 40), st.integers(1, 12), st.data())
def test_average_moves_as_few_queues_as_can_be(queue_count, member_count, data):
    all_queues, client_ids = queues(queue_count), members(member_count)
    somebody = st.sampled_from([*client_ids, "gone", ""])
    owners = {queue: data.draw(somebody) for queue in all_queues}
    parts = reallocated(all_queues, client_ids, owners)
    assert sorted(owners_of(parts)) == all_queues
    sizes = {len(part) for part in parts.values()}
    assert max(sizes) - min(sizes) <= 1
    had = {one: [q for q in all_queues if owners[q] == one] for one in client_ids}
    each, more = divmod(queue_count, member_count)
    # Who has more than its share gives up the rest, and nobody anything else.
    most_kept = sum(min(len(part), each) for part in had.values())
    most_kept += min(more, sum(len(part) > each for part in had.values()))
    assert sum(len(set(parts[one]) & set(had[one])) for one in client_ids) == most_kept
    assert reallocated(all_queues, client_ids, owners_of(parts)) == parts


@given(st.integers(0, 40), st.integers(2, 12), st.data())
def test_a_leaver_moves_only_its_own_queues_and_a_newcomer_its_share(
    queue_count, member_count, data
):
    all_queues, client_ids = queues(queue_count), members(member_count)
    before = owners_of(reallocated(all_queues, client_ids, {}))
    leaver = data.draw(st.sampled_from(client_ids))
    left = [one for one in client_ids if one != leaver]
    after = owners_of(reallocated(all_queues, left, before))
    moved = {queue for queue in all_queues if before[queue] != after[queue]}
    assert moved == {queue for queue in all_queues if before[queue] == leaver}
    joined = owners_of(reallocated(all_queues, client_ids, after))
    moved = [queue for queue in all_queues if after[queue] != joined[queue]]
    assert len(moved) <= -(-queue_count // member_count)


class Unread(list):
    """A list that is not to be read from its beginning to its end."""

    def __iter__(self):
        raise AssertionError("a look at each member")


def test_average_looks_at_the_owners_of_queues_and_not_at_each_member():
    client_ids = Unread(members(1_000))
    owners = {queue: client_ids[-1 - number] for number, queue in enumerate(queues(4))}
    assert Average().allocate("g", client_ids[2], queues(4), client_ids) == queues(4)[2:3]
    assert Average().reallocate(client_ids[-1], queues(4), client_ids, owners) == queues(1)
    assert Average().reallocate(client_ids[2], queues(4), client_ids, owners) == []
    with pytest.raises(ValueError, match="no member"):
        Average().reallocate("nobody", queues(4), client_ids, owners)


def test_average_by_circle_deals_like_cards():
    parts = divided(AverageByCircle(), queues(5), members(2))
    assert [[q.queue_id for q in part] for part in parts] == [[0, 2, 4], [1, 3]]


@given(st.sampled_from(SHARING), st.integers(0, 60), st.integers(1, 25))
def test_every_queue_gets_exactly_one_owner(strategy, queue_count, member_count):
    parts = divided(strategy, queues(queue_count), members(member_count))
    assert sorted(queue for part in parts for queue in part) == queues(queue_count)
    assert all(part == sorted(part) for part in parts)


@given(st.sampled_from(SHARING[:2]), st.integers(0, 60), st.integers(1, 25))
def test_averages_differ_by_one_at_most(strategy, queue_count, member_count):
    sizes = [len(part) for part in divided(strategy, queues(queue_count), members(member_count))]
    assert max(sizes) - min(sizes) <= 1


def test_consistent_hash_moves_queues_only_to_the_new_member():
    strategy, all_queues = ConsistentHash(), queues(200)
    before = dict(zip(members(5), divided(strategy, all_queues, members(5)), strict=True))
    after = dict(zip(members(6), divided(strategy, all_queues, members(6)), strict=True))
    for member, part in before.items():
        assert set(after[member]) <= set(part)
    (new,) = set(after) - set(before)
    assert 0 < len(after[new]) < 70


def test_consistent_hash_is_the_same_in_every_process():
    part = ConsistentHash().allocate("g", members(3)[0], queues(16), members(3))
    assert [queue.queue_id for queue in part] == [1, 5, 8, 9, 10, 12]


@pytest.mark.parametrize("virtual_nodes", [0, 10_001])
def test_consistent_hash_needs_a_sensible_number_of_places(virtual_nodes):
    with pytest.raises(InvalidArgument, match="virtual_nodes"):
        ConsistentHash(virtual_nodes)


def test_members_read_the_brokers_of_their_own_machine_room():
    east, west = members(2, "east@1"), members(1, "west")
    all_queues = sorted(queues(4, "east@broker-a") + queues(4, "west@broker-b"))
    client_ids = sorted(east + west)
    strategy = MachineRoom()
    for member in east:
        part = strategy.allocate("g", member, all_queues, client_ids)
        assert [queue.broker_name for queue in part] == ["east@broker-a"] * 2
    assert strategy.allocate("g", west[0], all_queues, client_ids) == queues(4, "west@broker-b")


def test_a_machine_room_without_members_is_shared_by_all():
    client_ids = members(2, "east")
    all_queues = sorted(queues(2, "east@broker-a") + queues(4, "north@broker-c"))
    parts = divided(MachineRoom(), all_queues, client_ids)
    assert [len(part) for part in parts] == [3, 3]


def test_machine_rooms_may_be_told_by_functions():
    strategy = MachineRoom(lambda broker: broker[-1], lambda client: client[5])
    all_queues = sorted(queues(2, "b-0") + queues(2, "b-1"))
    parts = divided(strategy, all_queues, members(2))
    assert [{queue.broker_name for queue in part} for part in parts] == [{"b-0"}, {"b-1"}]


def test_by_config_takes_what_it_was_told_and_there_is():
    strategy = ByConfig([*queues(4)[1:3], MessageQueue("t", "gone", 0)])
    assert strategy.allocate("g", members(2)[1], queues(4), members(2)) == queues(4)[1:3]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("average", Average),
        ("average_by_circle", AverageByCircle),
        ("consistent_hash", ConsistentHash),
        ("machine_room", MachineRoom),
    ],
)
def test_a_strategy_may_be_named(name, kind):
    assert isinstance(allocate_strategy(name), kind)


def test_a_strategy_may_be_given():
    strategy = ByConfig([])
    assert allocate_strategy(strategy) is strategy


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgument, match="'fair' is none of average, average_by_circle"):
        allocate_strategy("fair")

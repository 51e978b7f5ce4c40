"""Which stretches a stream reads: shares, cuts, retention, and what is said of it."""

from __future__ import annotations

import json
import random

import pytest

from mqmesh.errors import EndpointUnreachable, OffsetIllegal, TopicNotFound
from mqmesh.message import MessageQueue
from mqmesh.sdk.connector.queue_reader import QueueEdges, Stretch
from mqmesh.spark.live.options import Place, from_json, read_options, to_json
from mqmesh.spark.live.planning import capped, latest_places, on_loss, queues_of, split, stretch_of

A, B, C = (MessageQueue("orders", broker, 0) for broker in ("a", "b", "c"))


class Cluster:
    """Stands in for ``QueueReader``: edges of queues, and cuts as (epoch, offset)."""

    def __init__(self, edges, cuts=(), away=()) -> None:
        self._edges = edges
        self._cuts = cuts
        self._away = away
        self.patience_ms = 60_000
        self.patience = {}

    def edges(self, queue):
        self.patience[queue] = self.patience_ms
        if queue in self._away:
            raise EndpointUnreachable(f"{queue} is away")
        return self._edges[queue]

    def cut(self, queue, offset, epoch):
        lost = min((at for later, at in self._cuts if later > epoch), default=None)
        return lost if lost is not None and lost < offset else None


def plan(cluster, start, end):
    losses = []
    found = stretch_of(cluster, A, start, end, losses.append)
    return (None if found is None else (found.start, found.end)), losses


def test_a_stretch_without_trouble_is_read_as_it_was_planned():
    cluster = Cluster({A: QueueEdges(0, 100, 3)})
    assert plan(cluster, Place(10, 3), Place(60, 3)) == ((10, 60), [])
    assert plan(cluster, Place(10, 1), Place(60, 2)) == ((10, 60), [])
    assert plan(cluster, Place(60, 3), Place(60, 3)) == (None, [])
    # Who began at the end, and begins again later with an older plan, has nothing to read.
    assert plan(cluster, Place(70, 3), Place(60, 3)) == (None, [])


def test_after_a_cut_no_message_is_read_twice_and_none_is_passed_over():
    # Up to epoch 1 the queue had 100 messages; from 40 on they were lost, and others came.
    cluster = Cluster({A: QueueEdges(0, 70, 2)}, cuts=[(2, 40)])
    planned, losses = plan(cluster, Place(20, 1), Place(90, 1))
    assert planned == (20, 40)
    assert len(losses) == 1
    # The next batch begins where the checkpoint says, which is behind the cut.
    planned, losses = plan(cluster, Place(90, 1), Place(70, 2))
    assert planned == (40, 70)
    assert "40 to 89" in losses[0]
    assert plan(cluster, Place(70, 2), Place(70, 2)) == (None, [])
    # One that had not come to the cut lost nothing that it had seen.
    assert plan(cluster, Place(30, 1), Place(70, 2)) == ((30, 70), [])
    with pytest.raises(OffsetIllegal, match=r"power cut.*failOnDataLoss"):
        stretch_of(cluster, A, Place(90, 1), Place(70, 2), on_loss(True))


def test_random_cuts_give_each_surviving_message_once():
    for seed in range(300):
        chance = random.Random(seed)
        queue, cuts, epoch, number = [], [], 1, 0
        place, seen, losses = Place(0, 1), [], []
        for _ in range(12):
            step = chance.random()
            if step < 0.5:
                for _ in range(chance.randint(1, 9)):
                    queue.append(number)
                    number += 1
            elif step < 0.7:
                epoch += 1
                at = chance.randint(0, len(queue))
                cuts.append((epoch, at))
                del queue[at:]
            latest = Place(len(queue), epoch)
            if chance.random() < 0.3:
                # A cut between the plan of a batch and its reading.
                epoch += 1
                at = chance.randint(0, len(queue))
                cuts.append((epoch, at))
                del queue[at:]
            cluster = Cluster({A: QueueEdges(0, len(queue), epoch)}, cuts)
            found = stretch_of(cluster, A, place, latest, losses.append)
            if found is not None:
                seen += queue[found.start : found.end]
            place = latest
        cluster = Cluster({A: QueueEdges(0, len(queue), epoch)}, cuts)
        found = stretch_of(cluster, A, place, Place(len(queue), epoch), losses.append)
        if found is not None:
            seen += queue[found.start : found.end]
        assert len(seen) == len(set(seen)), seed
        assert set(queue) <= set(seen), seed


def test_what_retention_removed_is_told():
    cluster = Cluster({A: QueueEdges(50, 100, 1)})
    planned, losses = plan(cluster, Place(10, 1), Place(80, 1))
    assert planned == (50, 80)
    assert "10 to 49 are removed by retention" in losses[0]
    assert plan(cluster, Place(10, 1), Place(20, 1))[0] is None
    planned, losses = plan(cluster, Place(150, 0), Place(160, 0))
    assert planned == (50, 160)
    assert "made anew" in losses[0]


def test_a_limit_is_shared_by_what_waits():
    start = {A: Place(10, 1), B: Place(0, 1)}
    latest = {A: Place(110, 1), B: Place(300, 1), C: Place(0, 1)}
    for most in (1, 2, 3, 39, 40, 399):
        ends = capped(start, latest, most)
        assert sum(ends[q].offset - start.get(q, Place(0)).offset for q in ends) == most
        assert all(ends[q].offset <= latest[q].offset for q in ends)
    assert capped(start, latest, 40)[B] == Place(30, 1)
    assert capped(start, latest, 400) == capped(start, latest, 0) == latest
    # What a broker lost is no share: the plan says so.
    assert capped({A: Place(50, 1)}, {A: Place(20, 2), B: Place(9, 1)}, 5)[A] == Place(20, 2)


def test_queues_are_divided_for_more_tasks():
    whole = [Stretch(A, 0, 90, 1), Stretch(B, 5, 15, 1)]
    assert split(whole, 0) == split(whole, 2) == whole
    parts = split(whole, 10)
    assert len(parts) == 10
    assert [(one.queue, one.start, one.end) for one in parts][-2:] == [(A, 80, 90), (B, 5, 15)]
    assert split([], 5) == []
    assert len(split([Stretch(A, 0, 3)], 10)) == 3


def test_a_broker_that_is_away_does_not_hold_up_the_others():
    known = {A: Place(5, 1), B: Place(7, 1)}
    cluster = Cluster({A: QueueEdges(0, 9, 2), B: QueueEdges(0, 8, 1)}, away=[B])
    places, _ = latest_places(cluster, [A, B], known)
    assert places == {A: Place(9, 2), B: Place(7, 1)}
    assert cluster.patience == {A: 0, B: 0}
    assert cluster.patience_ms == 60_000
    cluster = Cluster({A: QueueEdges(0, 9, 2)}, away=[B])
    with pytest.raises(EndpointUnreachable):
        latest_places(cluster, [A, B], {A: Place(5, 1)})
    # Whoever is not in the route any more stays where it was.
    assert latest_places(cluster, [A], known)[0][B] == Place(7, 1)


def test_a_topic_that_name_servers_have_forgotten_is_passed_over():
    def forgotten(topic):
        raise TopicNotFound(f"no topic {topic!r}")

    cluster = Cluster({})
    cluster.readable_queues = forgotten
    options = read_options({"namesrv": "127.0.0.1:1", "subscribe": "orders"}, stream=True)
    assert queues_of(cluster, options, {A: Place(5, 1)}) == []
    assert latest_places(cluster, [], {A: Place(5, 1)})[0] == {A: Place(5, 1)}
    with pytest.raises(TopicNotFound, match="create it"):
        queues_of(cluster, options)


def test_places_come_back_from_json_in_one_order():
    places = {C: Place(3, 2), A: Place(1, 2), B: Place(2)}
    text = json.dumps(to_json(places))
    assert text == json.dumps(to_json(dict(reversed(places.items()))))
    assert from_json(json.loads(text), "test") == places


@pytest.mark.parametrize("namespace", [None, "shop"])
def test_a_reader_is_in_the_namespace_of_its_option(namespace, monkeypatch):
    monkeypatch.setenv("MQMESH_NAMESPACE", "of-the-machine")
    asked = {"namesrv": "127.0.0.1:9876", "subscribe": "orders"}
    if namespace:
        asked["namespace"] = namespace
    client = read_options(asked, stream=False).client()
    try:
        assert client.namespace == (namespace or "of-the-machine")
    finally:
        client.close()

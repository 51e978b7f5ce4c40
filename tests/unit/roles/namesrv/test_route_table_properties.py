"""Whatever happens to brokers, the route table agrees with a plain model of it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mqmesh.errors import NoPermission, TopicNotFound
from mqmesh.protocol.route import (
    BrokerAddress,
    DataVersion,
    RegisterBrokerRequest,
    TopicConfig,
    UnregisterBrokerRequest,
)
from mqmesh.roles.namesrv.effects import Announce
from mqmesh.roles.namesrv.route_table import RouteTable

NAMES = st.sampled_from(["broker-a", "broker-b"])
IDS = st.sampled_from([0, 1])
INSTANCES = st.sampled_from([1, 2])
PEERS = st.sampled_from([b"p1", b"p2", b"p3"])
TOPICS = st.dictionaries(st.sampled_from(["t", "u", "v"]), st.integers(1, 3), max_size=3)
EXPIRE_MS = 100


class Life(RuleBasedStateMachine):
    """The model: what each member said last, and by which connection."""

    @initialize()
    def begin(self):
        self.table = RouteTable(
            broker_expire_ms=EXPIRE_MS, max_brokers=10, max_topic_entries=10_000
        )
        self.now_ms = 0
        self.counter = 0
        self.members: dict[tuple[str, int], dict] = {}
        self.seen: dict[str, object] = {}

    def learn(self, effects):
        """Do what a client does: ask again for what a hint concerns, and for nothing else."""
        for effect in effects:
            if isinstance(effect, Announce):
                for topic in effect.topics:
                    self.seen[topic] = self.route(topic)

    def route(self, topic):
        try:
            return self.table.route(topic, "")
        except TopicNotFound:
            return None

    @rule(name=NAMES, broker_id=IDS, instance=INSTANCES, peer=PEERS, topics=TOPICS)
    def register(self, name, broker_id, instance, peer, topics):
        self.counter += 1
        key = (name, broker_id)
        request = RegisterBrokerRequest(
            "C",
            name,
            broker_id,
            BrokerAddress(f"{name}:{broker_id + 1}"),
            DataVersion(1, self.counter),
            [TopicConfig(topic, count, count) for topic, count in topics.items()],
            6,
            instance,
        )
        known = self.members.get(key)
        try:
            _, effects = self.table.on_register(request, peer, self.now_ms)
        except NoPermission:
            assert known is not None
            assert known["instance"] != instance
            assert known["peer"] != peer
            return
        assert known is None or known["instance"] == instance or known["peer"] == peer
        self.members[key] = {
            "instance": instance,
            "peer": peer,
            "seen_ms": self.now_ms,
            "topics": topics,
            "version": request.data_version,
        }
        self.learn(effects)

    @rule(name=NAMES, broker_id=IDS, topics=TOPICS, is_known=st.booleans())
    def change(self, name, broker_id, topics, is_known):
        known = self.members.get((name, broker_id))
        if known is None:
            return
        self.counter += 1
        since = known["version"] if is_known else DataVersion(1, -7)
        before = known["topics"]
        request = RegisterBrokerRequest(
            "C",
            name,
            broker_id,
            BrokerAddress(f"{name}:{broker_id + 1}"),
            DataVersion(1, self.counter),
            None,
            6,
            known["instance"],
            since=since,
            changed=[TopicConfig(topic, count, count) for topic, count in topics.items()],
            deleted=[topic for topic in before if topic not in topics],
        )
        answer, effects = self.table.on_register(request, known["peer"], self.now_ms)
        known["seen_ms"] = self.now_ms
        assert answer.need_topics is (since != known["version"])
        known["version"] = DataVersion(-1, -1) if answer.need_topics else request.data_version
        if not answer.need_topics:
            known["topics"] = topics
        self.learn(effects)

    @rule(name=NAMES, broker_id=IDS, instance=INSTANCES)
    def unregister(self, name, broker_id, instance):
        effects = self.table.on_unregister(UnregisterBrokerRequest("C", name, broker_id, instance))
        known = self.members.get((name, broker_id))
        if known is not None and known["instance"] == instance:
            del self.members[name, broker_id]
        else:
            assert effects == []
        self.learn(effects)

    @rule(peer=PEERS)
    def disconnect(self, peer):
        self.learn(self.table.on_disconnect(peer))
        self.members = {k: one for k, one in self.members.items() if one["peer"] != peer}

    @rule(duration_ms=st.integers(0, 60))
    def wait(self, duration_ms):
        self.now_ms += duration_ms
        self.learn(self.table.tick(self.now_ms))
        self.members = {
            k: one for k, one in self.members.items() if self.now_ms - one["seen_ms"] < EXPIRE_MS
        }

    @invariant()
    def agrees(self):
        groups: dict[str, dict[int, dict]] = {}
        for (name, broker_id), member in self.members.items():
            groups.setdefault(name, {})[broker_id] = member
        assert {one.broker_name: sorted(one.addresses) for one in self.table.brokers()} == {
            name: sorted(members) for name, members in groups.items()
        }
        expected: dict[str, dict[str, int]] = {}
        for name, members in groups.items():
            for topic, count in members[min(members)]["topics"].items():
                expected.setdefault(topic, {})[name] = count
        assert self.table.topics() == sorted(expected)
        for topic, counts in expected.items():
            route = self.table.route(topic, "")
            assert {data.broker_name: data.read_queue_nums for data in route.queues} == counts
            assert [one.broker_name for one in route.brokers] == sorted(counts)

    @invariant()
    def who_follows_the_hints_misses_nothing(self):
        for topic in ("t", "u", "v"):
            assert self.seen.get(topic) == self.route(topic)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)

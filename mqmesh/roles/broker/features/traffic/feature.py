"""Messages stored and handed out: of late, today and yesterday, by topic and group."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from mqmesh.metrics import Labelled, gauge, text
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls
from mqmesh.roles.broker.stats import DAY_MS, Before, Periods, Totals
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable

_PUT: Final = "put_messages"
_GOT: Final = "get_messages"


class TrafficFeature(Feature):
    """Traffic of a broker over time, stored and handed out; and the broker's identity.

    Args:
        core: The core of the broker.
        topics: Topics, which count what they stored.
        by_group: Messages handed out to each group.
    """

    works_at_followers = True

    def __init__(self, core: Core, topics: TopicTable, by_group: GroupPulls) -> None:
        self._core = core
        self._clock = core.clock
        self._stats = core.stats
        self._topics = topics
        self._handed_out = by_group.handed_out
        self._periods = Periods(core.began_ms)

    def sample(self) -> None:
        """Note the totals of now."""
        self._stats.sample(self._clock.monotonic_ms())
        self._periods.sample(
            self._clock.monotonic_ms(),
            self._clock.wall_ms() // DAY_MS,
            self._totals,
            self._other_totals,
        )

    def _totals(self) -> Totals:
        total = self._stats.total
        return {_PUT: total.put_messages, _GOT: total.get_messages}

    def _other_totals(self) -> Iterator[tuple[Before, int]]:
        yield from ((topic.before, topic.put_messages) for topic in self._used_topics())
        yield from ((one.before, one.messages) for _, _, one in self._handed_out())

    def _used_topics(self) -> Iterator[Topic]:
        return (topic for topic in self._topics if topic.put_messages)

    def _per_s(self, before: Before, total: int) -> float:
        return self._periods.per_s(before, total, self._clock.monotonic_ms())

    def _by_topic(self, value: Callable[[Before, int], int | float]) -> Labelled[Topic]:
        return Labelled(
            self._used_topics(),
            lambda topic: (topic.config.topic,),
            lambda topic: value(topic.before, topic.put_messages),
        )

    def _by_group(self, value: Callable[[Before, int], int | float]) -> Labelled[Any]:
        return Labelled(
            self._handed_out(),
            lambda one: one[:2],
            lambda one: value(one[2].before, one[2].messages),
        )

    def _total_today(self, name: str) -> int:
        return self._periods.today(name, getattr(self._stats.total, name))

    def _rate_of_day(self, name: str) -> float:
        total = getattr(self._stats.total, name)
        return self._periods.per_s_of_day(name, total, self._clock.monotonic_ms())

    metrics = (
        text(
            "cluster_name",
            "cluster of the broker",
            lambda feature: feature._core.config.cluster_name,
        ),
        text("broker_name", "broker group", lambda feature: feature._core.config.broker_name),
        gauge("broker_id", "0 for the master", lambda feature: feature._core.config.broker_id),
        text(
            "instance_id",
            "another one with every start",
            lambda feature: str(feature._core.instance_id),
        ),
        gauge(
            "put_messages_today",
            "messages stored since midnight (UTC)",
            lambda feature: feature._total_today(_PUT),
            unit="messages",
        ),
        gauge(
            "put_messages_yesterday",
            "messages stored the day before",
            lambda feature: feature._periods.yesterday(_PUT),
            unit="messages",
        ),
        gauge(
            "get_messages_today",
            "messages handed out since midnight (UTC)",
            lambda feature: feature._total_today(_GOT),
            unit="messages",
        ),
        gauge(
            "get_messages_yesterday",
            "messages handed out the day before",
            lambda feature: feature._periods.yesterday(_GOT),
            unit="messages",
        ),
        gauge(
            "put_messages_day_per_s",
            "messages stored a second, in the last 24 hours",
            lambda feature: feature._rate_of_day(_PUT),
            unit="messages",
        ),
        gauge(
            "get_messages_day_per_s",
            "messages handed out a second, in the last 24 hours",
            lambda feature: feature._rate_of_day(_GOT),
            unit="messages",
        ),
        gauge(
            "topic_put_messages_per_s",
            "messages stored a second, in the last minute or two",
            lambda feature: feature._by_topic(feature._per_s),
            unit="messages",
            labels=("topic",),
        ),
        gauge(
            "topic_put_messages_today",
            "messages stored since midnight (UTC)",
            lambda feature: feature._by_topic(_grown_today),
            unit="messages",
            labels=("topic",),
        ),
        gauge(
            "group_get_messages_per_s",
            "messages handed out a second, in the last minute or two",
            lambda feature: feature._by_group(feature._per_s),
            unit="messages",
            labels=("topic", "consumer_group"),
        ),
        gauge(
            "group_get_messages_today",
            "messages handed out since midnight (UTC)",
            lambda feature: feature._by_group(_grown_today),
            unit="messages",
            labels=("topic", "consumer_group"),
        ),
    )


def _grown_today(before: Before, total: int) -> int:
    return total - before.midnight

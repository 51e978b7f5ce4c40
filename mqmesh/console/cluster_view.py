"""State of a cluster in a few readings, computed once a look for all who look on. Pure."""

from collections.abc import Iterable
from typing import Final

import msgspec

from mqmesh.message import is_system_topic
from mqmesh.roles.exporter.alarm_board import RaisedAlarm
from mqmesh.roles.exporter.alarm_rules import GROUP, LAG, MEMBERS, PROCESS, UP, Severity
from mqmesh.roles.exporter.families import Families
from mqmesh.roles.exporter.names import DELIVERIES, FAILURES
from mqmesh.roles.exporter.rates import Rates
from mqmesh.roles.supervisor.run_file import RoleEntry

MESSAGES_IN: Final = "rocketmq_messages_in_total"
MESSAGES_OUT: Final = "rocketmq_messages_out_total"
DISK_USED: Final = "mqmesh_store_disk_used_ratio"
LAG_MS: Final = "rocketmq_consumer_lag_latency_milliseconds"
QUOTA_MESSAGES: Final = "mqmesh_quota_messages_total"
QUOTA_BYTES: Final = "mqmesh_quota_bytes_total"
QUOTA_REFUSALS: Final = "mqmesh_quota_refusals_total"
REFUSALS: Final = "mqmesh_refusals_total"

TOP: Final = 10
"""Topics and groups on the first page."""
RESTART_MS: Final = 300_000
"""A process that was started again so long ago is marked."""
STILL_MS: Final = 10_000
"""A group's oldest message that is the same for so long is shown."""
MOVED_MS: Final = 500
"""Difference of store times that clocks and looks do not explain."""
MAX_ALARMS: Final = 25
"""Alarms on the first page."""
PENDING_MS: Final = 6_000
"""A condition that lasts for so long is shown, though its alarm waits for longer."""


class ProcessView(msgspec.Struct, frozen=True):
    """One process.

    Attributes:
        role: ``broker``, ``namesrv``, …
        name: Name of the instance, or its address.
        is_up: It answered at the last look.
        restarted_ms: When `mqmesh up` started it again, since it had died, ms since 1970; 0 where
            it never did so within the last five minutes, or that is not known here.
    """

    role: str
    name: str
    is_up: bool
    restarted_ms: int = 0


class AlarmView(msgspec.Struct, frozen=True):
    """One alarm.

    Attributes:
        alarm: Name of the rule, as docs/alarms.md has it.
        severity: ``warning`` or ``critical``.
        summary: A sentence.
        since_ms: Time since when its condition holds, ms since 1970.
        is_pending: The condition holds, though not yet for as long as the rule demands.
        labels: Labels of its subject: ``consumer_group``, ``node_id``, …
    """

    alarm: str
    severity: Severity
    summary: str
    since_ms: int
    is_pending: bool
    labels: dict[str, str]


class TopicRate(msgspec.Struct, frozen=True):
    """Rates of a topic, messages a second of the last 10 to 20 s.

    Attributes:
        topic: Name.
        in_per_s: Messages stored.
        out_per_s: Messages handed out, to all groups.
    """

    topic: str
    in_per_s: float
    out_per_s: float


class GroupLag(msgspec.Struct, frozen=True):
    """Backlog of a consumer group.

    Attributes:
        group: Name.
        lag: Messages that are not done.
        lag_ms: Waiting time of the oldest of them.
        members: Connected consumers.
        failing: Share of deliveries in the last ten minutes whose listener failed, 0 to 1; members
            report it each half minute.
        retrying: Messages of the backlog that failed and are tried again; brokers know it at once.
    """

    group: str
    lag: int
    lag_ms: int
    members: int
    failing: float
    retrying: int = 0


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster at one look.

    Attributes:
        at_ms: Wall clock; 0 before the first look.
        took_ms: Duration of the look.
        problem: Why nothing is known, or the readings are old; "" if all is well.
        processes: All of them; those that do not answer first.
        in_per_s: Messages stored a second, of all topics but those of the system.
        out_per_s: Messages handed out a second.
        backlog: Messages that groups have not done.
        disk_used: Share of the fullest broker's disk that is used, 0 to 1.
        disk_node: Name of that broker.
        alarms: Alarms, critical ones first, then the oldest; 25 at most.
        more_alarms: Number of further ones.
        topics: Number of topics with traffic since their brokers' start.
        groups: Number of consumer groups.
        top_topics: The ten with most traffic.
        lagging_groups: The ten with the largest backlog.
    """

    at_ms: int = 0
    took_ms: int = 0
    problem: str = "the console has not looked at the cluster yet"
    processes: list[ProcessView] = []
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    backlog: int = 0
    disk_used: float = 0.0
    disk_node: str = ""
    alarms: list[AlarmView] = []
    more_alarms: int = 0
    topics: int = 0
    groups: int = 0
    top_topics: list[TopicRate] = []
    lagging_groups: list[GroupLag] = []

    @property
    def down(self) -> int:
        """Number of processes that do not answer."""
        return sum(not one.is_up for one in self.processes)

    @property
    def restarted(self) -> list[str]:
        """Names of processes that died and were started again within the last five minutes."""
        return [one.name for one in self.processes if one.restarted_ms]


class ClusterReadings(msgspec.Struct, frozen=True):
    """Readings of one look by topic and group.

    Attributes:
        in_per_s: Messages stored a second, by topic.
        out_per_s: Messages handed out a second, by topic.
        groups: Backlogs.
        disks: Used share of the disk, by broker.
        used: Rates that users with quotas have, a second at the broker where it is most, by
            exporter's name of the total, user and direction (``in`` or ``out``).
        held_up: Requests of such users that had to wait since their brokers' start, by user.
        refusals: Requests that were refused since the start, by node and response code.
    """

    in_per_s: dict[str, float]
    out_per_s: dict[str, float]
    groups: list[GroupLag]
    disks: dict[str, float]
    used: dict[tuple[str, ...], float] = {}
    held_up: dict[str, float] = {}
    refusals: dict[tuple[str, ...], float] = {}


def cluster_readings(families: Families, rates: Rates, now_ms: int) -> ClusterReadings:
    """Return the readings of a look.

    Args:
        families: All metrics.
        rates: Rates of totals, which one round is ended of.
        now_ms: Monotonic clock.
    """
    by_topic: list[dict[str, float]] = []
    for name in (MESSAGES_IN, MESSAGES_OUT):
        found: dict[str, float] = {}
        # A master that comes back begins its totals anew, so each has a rate of its own.
        for labels, total in families.sums(name, (*PROCESS, "topic")).items():
            topic = labels[-1]
            if not is_system_topic(topic):
                rate = rates.rate((name, labels), total, now_ms)
                found[topic] = found.get(topic, 0.0) + rate
        by_topic.append(found)
    used: dict[tuple[str, ...], float] = {}
    for name in (QUOTA_MESSAGES, QUOTA_BYTES):
        for labels, total in families.sums(name, (*PROCESS, "user", "direction")).items():
            key = (name, *labels[len(PROCESS) :])
            used[key] = max(used.get(key, 0.0), rates.rate((name, labels), total, now_ms))
    rates.end_round()
    disks = {node: used for (node,), used in families.sums(DISK_USED, ("node_id",)).items()}
    in_per_s, out_per_s = by_topic
    return ClusterReadings(
        in_per_s,
        out_per_s,
        list(_groups(families)),
        disks,
        used,
        {user: total for (user,), total in families.sums(QUOTA_REFUSALS, ("user",)).items()},
        families.sums(REFUSALS, ("node_id", "response_code")),
    )


def _groups(families: Families) -> Iterable[GroupLag]:
    members = families.sums(MEMBERS, GROUP)
    oldest: dict[str, float] = {}
    for labels, waits_ms in families.sums(LAG_MS, ("node_id", *GROUP, "topic")).items():
        oldest[labels[1]] = max(waits_ms, oldest.get(labels[1], 0.0))
    failures, deliveries = families.sums(FAILURES, GROUP), families.sums(DELIVERIES, GROUP)
    retrying = families.sums(LAG, GROUP, is_retry="true")
    for key, lag in families.sums(LAG, GROUP).items():
        failing = failures.get(key, 0.0) / max(deliveries.get(key, 0.0), 1.0)
        (group,) = key
        yield GroupLag(
            group,
            int(lag),
            int(oldest.get(group, 0)),
            int(members.get(key, 0)),
            min(failing, 1.0),
            int(retrying.get(key, 0)),
        )


class Standstills:
    """Groups with members whose oldest message does not move: a queue of theirs is stuck, perhaps.

    A group may get on in other queues meanwhile, so that it is no ``group-stuck``.
    """

    def __init__(self) -> None:
        # By broker, group and topic: store time of the oldest message, and since when it is.
        self._oldest: dict[tuple[str, ...], tuple[float, int]] = {}

    def look(self, families: Families, at_ms: int) -> list[AlarmView]:
        """Notes the oldest message of each group; returns those that have not moved for long."""
        members = families.sums(MEMBERS, GROUP)
        by = ("node_id", *GROUP, "topic")
        seen, found = {}, []
        for key, waits_ms in families.sums(LAG_MS, by, is_retry="false").items():
            _, group, topic = key
            if not waits_ms or not members.get((group,)):
                continue
            oldest_ms, since_ms = self._oldest.get(key, (0.0, at_ms))
            if abs(at_ms - waits_ms - oldest_ms) > MOVED_MS:
                oldest_ms, since_ms = at_ms - waits_ms, at_ms
            seen[key] = oldest_ms, since_ms
            if at_ms - since_ms >= STILL_MS:
                sentence = f"the oldest message of {group} in {topic} does not move"
                labels = {"consumer_group": group, "topic": topic}
                found.append(AlarmView("oldest-waits", "warning", sentence, since_ms, True, labels))
        self._oldest = seen
        return found


def cluster_view(
    families: Families,
    readings: ClusterReadings,
    raised: Iterable[RaisedAlarm],
    at_ms: int,
    took_ms: int,
    entries: Iterable[RoleEntry] = (),
    stills: Iterable[AlarmView] = (),
) -> ClusterView:
    """Return the view of a look.

    Args:
        families: All metrics.
        readings: Readings that ``cluster_readings`` made of them.
        raised: Alarms, those that are not due yet, too.
        at_ms: Wall clock.
        took_ms: Duration of the look.
        entries: Processes of the cluster's run file, where it is on this machine.
        stills: Alarms of ``Standstills``.
    """
    restarts = _restarts(entries, at_ms)
    ups = families.sums(UP, PROCESS).items()
    processes = [
        ProcessView(role, name, bool(up), restarts.get(name, 0)) for (role, name), up in sorted(ups)
    ]
    names = readings.in_per_s.keys() | readings.out_per_s.keys()
    topics = [
        TopicRate(name, readings.in_per_s.get(name, 0.0), readings.out_per_s.get(name, 0.0))
        for name in sorted(names)
    ]
    disk_node = max(readings.disks, key=readings.disks.__getitem__, default="")
    alarms = sorted([*_alarms(raised, at_ms), *stills], key=_urgency)
    answers = any(one.is_up and one.role == "namesrv" for one in processes)
    return ClusterView(
        at_ms=at_ms,
        took_ms=took_ms,
        problem="" if answers else "no name server answers",
        processes=sorted(processes, key=lambda one: one.is_up),
        in_per_s=sum(readings.in_per_s.values()),
        out_per_s=sum(readings.out_per_s.values()),
        backlog=sum(one.lag for one in readings.groups),
        disk_used=readings.disks.get(disk_node, 0.0),
        disk_node=disk_node,
        alarms=alarms[:MAX_ALARMS],
        more_alarms=max(len(alarms) - MAX_ALARMS, 0),
        topics=len(topics),
        groups=len(readings.groups),
        top_topics=sorted(topics, key=lambda one: -(one.in_per_s + one.out_per_s))[:TOP],
        lagging_groups=sorted(
            (one for one in readings.groups if one.lag or one.failing), key=lambda one: -one.lag
        )[:TOP],
    )


def _restarts(entries: Iterable[RoleEntry], now_ms: int) -> dict[str, int]:
    """Return when processes were started again lately, by name and by address."""
    found = {}
    for one in entries:
        if one.restarts and now_ms - one.started_ms < RESTART_MS:
            found[one.name] = found[one.endpoint.removeprefix("tcp://")] = one.started_ms
    return found


def _alarms(raised: Iterable[RaisedAlarm], now_ms: int) -> Iterable[AlarmView]:
    for one in raised:
        alarm = one.alarm
        if one.reported_ms or now_ms - alarm.since_ms >= PENDING_MS:
            yield AlarmView(
                alarm.alarm,
                alarm.severity,
                alarm.summary,
                alarm.since_ms,
                not one.reported_ms,
                alarm.labels,
            )


def _urgency(alarm: AlarmView) -> tuple[bool, bool, int]:
    return alarm.is_pending, alarm.severity != "critical", alarm.since_ms

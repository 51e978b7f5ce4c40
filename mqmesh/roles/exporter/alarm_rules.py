"""Rules of alarms: conditions on the metrics of a cluster. Pure.

The same conditions stand in ``boards/mqmesh.rules.yml`` for those who have Prometheus.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from mqmesh.roles.exporter.families import Families
from mqmesh.roles.exporter.names import COMMITTED, DELIVERIES, FAILURES
from mqmesh.units import MIB

Severity = Literal["warning", "critical"]
Labels = tuple[str, ...]

NODE: Final = ("node_id",)
PROCESS: Final = ("node_type", "node_id")
GROUP: Final = ("consumer_group",)
GROUP_AND_TOPIC: Final = (*GROUP, "topic")
LONGEST_WINDOW_MS: Final = 3_600_000
MOST_SERIES: Final = 100_000
"""Totals that are remembered; further ones are not watched for growth."""

LEAST_FAILURES: Final = 5
"""Fewer failures in ten minutes are one message that is tried again and again."""

LAG: Final = "rocketmq_consumer_lag_messages"
MEMBERS: Final = "rocketmq_consumer_connections"
PAUSED: Final = "mqmesh_group_paused"
UP: Final = "mqmesh_up"


class History(msgspec.Struct):
    """Past totals, for the growth of counters; a file can hold them.

    Attributes:
        totals: By exported and labels, joined by a tab: pairs of wall-clock ms and total, oldest
            first. One is older than the window, or the first of all.
        answered_ms: When a process answered last, wall clock, by the values of ``PROCESS``, joined
            by a tab.
    """

    totals: dict[str, list[tuple[int, float]]] = {}
    answered_ms: dict[str, int] = {}

    def growth(
        self, name: str, sums: Mapping[Labels, float], now_ms: int, window_ms: int
    ) -> dict[Labels, float | None]:
        """Return how much totals grew, and note what they are.

        Args:
            name: Name of the exported metric.
            sums: The totals of each process, whose labels are the first.
            now_ms: Wall clock.
            window_ms: Since so long ago.

        Returns:
            Growth by labels; None where nothing is known of so long ago. A total that is smaller
            than before began anew with its process; one that a process did not report before was 0.
        """
        found: dict[Labels, float | None] = {}
        for labels, total in sums.items():
            key = "\t".join((name, *labels))
            seen = self.totals.get(key)
            if seen is None:
                if len(self.totals) >= MOST_SERIES:
                    continue
                seen = self.totals[key] = []
                before_ms = self.answered_ms.get("\t".join(labels[: len(PROCESS)]))
                if before_ms is not None:
                    seen.append((before_ms, 0.0))
            if not seen or seen[-1][0] < now_ms:
                seen.append((now_ms, total))
            while len(seen) > 1 and seen[1][0] <= now_ms - window_ms:
                del seen[0]
            found[labels] = _grown(seen, now_ms - window_ms)
        return found

    def end_look(self, families: Families, now_ms: int) -> None:
        """Notes answering processes, and forgets what was not seen for longer than any window."""
        old_ms = now_ms - LONGEST_WINDOW_MS
        self.totals = {key: seen for key, seen in self.totals.items() if seen[-1][0] > old_ms}
        ups = families.sums(UP, PROCESS).items()
        answered = {"\t".join(process): now_ms for process, is_up in ups if is_up}
        kept = {process: at for process, at in self.answered_ms.items() if at > old_ms}
        self.answered_ms = kept | answered


class ClusterObservation(msgspec.Struct, frozen=True):
    """Metrics that rules look at.

    Attributes:
        families: Metrics of now.
        history: Of before.
        now_ms: Wall clock.
    """

    families: Families
    history: History
    now_ms: int

    def grown(
        self, name: str, by: Labels, window_ms: int, **where: str
    ) -> dict[Labels, float | None]:
        """Return how much the sums of a counter grew within so long; see ``History.growth``."""
        # Counters of different labels are different totals, and so are those of two processes: one
        # that does not answer any more takes nothing back.
        selector = (
            "".join(f"{{{label}={value}}}" for label, value in where.items()) + f"[{window_ms}]"
        )
        sums = self.families.sums(name, (*PROCESS, *by), **where)
        found: dict[Labels, float | None] = {}
        for labels, grown in self.history.growth(
            name + selector, sums, self.now_ms, window_ms
        ).items():
            key = labels[len(PROCESS) :]
            before = found.get(key)
            found[key] = grown if before is None else before + (grown or 0.0)
        return found


Find = Callable[[ClusterObservation, float], Iterator[tuple[Labels, float]]]


class AlarmRule(msgspec.Struct, frozen=True):
    """A condition.

    Attributes:
        alarm: Name of the alarm.
        severity: Severity of the alarm.
        threshold: Default limit, in the unit that ``summary`` names.
        for_s: Time in s that the condition must hold.
        by: Labels of the subject of the alarm.
        find: Finder of values beyond a threshold: the labels ``by``, and the value.
        summary: A sentence, to be formatted with the labels, ``value`` and ``threshold``.
        advice: Advice to the administrator.
    """

    alarm: str
    severity: Severity
    threshold: float
    for_s: int
    by: Labels
    find: Find
    summary: str
    advice: str

    def sentence(self, labels: Labels, value: float, threshold: float) -> str:
        """Return the alarm as a sentence."""
        selector = dict(zip(self.by, labels, strict=True))
        return self.summary.format(value=value, threshold=threshold, **selector)


def over(name: str, by: Labels = NODE, **where: str) -> Find:
    """Finds sums of a gauge above the threshold."""

    def find(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
        for labels, value in look.families.sums(name, by, **where).items():
            if value > threshold:
                yield labels, value

    return find


def is_zero(name: str, by: Labels = NODE) -> Find:
    """Finds gauges that are 0, where 1 is well."""

    def find(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
        for labels, value in look.families.sums(name, by).items():
            if value == 0:
                yield labels, value

    return find


def grew(name: str, by: Labels, window_s: int, **where: str) -> Find:
    """Finds counters that grew by more than the threshold within so long."""

    def find(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
        for labels, value in look.grown(name, by, window_s * 1_000, **where).items():
            if value is not None and value > threshold:
                yield labels, value

    return find


def any_of(*finds: Find) -> Find:
    """Finds what one of several finds."""

    def find(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
        found: dict[Labels, float] = {}
        for one in finds:
            found |= dict(one(look, threshold))
        yield from found.items()

    return find


def _behind(by: Labels) -> Find:
    def find(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
        # Many messages that came a moment ago are no backlog.
        name = "rocketmq_consumer_lag_latency_milliseconds"
        late = {labels for labels, ms in look.families.sums(name, by).items() if ms > 60_000}
        for labels, lag in look.families.sums(LAG, by).items():
            if lag > threshold and labels in late:
                yield labels, lag

    return find


def _waiting(look: ClusterObservation, threshold: float, by: Labels = GROUP) -> dict[Labels, float]:
    # Messages that wait for a retry wait on purpose.
    lags = look.families.sums(LAG, by, is_retry="false")
    return {labels: lag for labels, lag in lags.items() if lag > threshold}


def _stuck(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
    members = look.families.sums(MEMBERS, GROUP)
    # Since the last look: how long that has to last the rule says. An offset that went back moved.
    done = look.grown(COMMITTED, GROUP, 1, is_retry="false")
    paused = look.families.sums(PAUSED, GROUP)
    for labels, lag in _waiting(look, threshold).items():
        if members.get(labels) and done.get(labels) == 0 and not paused.get(labels):
            yield labels, lag


def _nobody(by: Labels) -> Find:
    def find(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
        members = look.families.sums(MEMBERS, GROUP)
        for labels, lag in _waiting(look, threshold, by).items():
            if not members.get(labels[: len(GROUP)]):
                yield labels, lag

    return find


def _failing(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
    # Every member reports to each broker that it uses, so that sums may count it several times.
    per_broker = look.families.sums(FAILURES, (*NODE, *GROUP))
    deliveries = look.families.sums(DELIVERIES, (*NODE, *GROUP))
    found: dict[Labels, float] = {}
    for labels, failures in per_broker.items():
        share = failures / max(deliveries.get(labels, 0.0), 1.0)
        if failures >= LEAST_FAILURES and share > threshold:
            group = labels[len(NODE) :]
            found[group] = max(share, found.get(group, 0.0))
    yield from found.items()


def _undelivered(look: ClusterObservation, threshold: float) -> Iterator[tuple[Labels, float]]:
    off = look.families.sums("mqmesh_schedule_service_info", NODE, value="off")
    for labels, waiting in look.families.sums("rocketmq_timing_messages", NODE).items():
        if waiting > threshold and labels in off:
            yield labels, waiting


RULES: Final = (
    AlarmRule(
        "process-down",
        "critical",
        0,
        10,
        PROCESS,
        is_zero(UP, PROCESS),
        "{node_type} {node_id} does not answer",
        "look at the log file of the process; `mqmesh status`",
    ),
    AlarmRule(
        "disk-filling",
        "warning",
        0.85,
        300,
        NODE,
        over("mqmesh_store_disk_used_ratio"),
        "the disk of {node_id} is {value:.0%} full, more than {threshold:.0%}",
        "free room, or shorten `storage.file_reserved_time`",
    ),
    AlarmRule(
        "disk-full",
        "critical",
        0,
        0,
        NODE,
        over("mqmesh_store_disk_full"),
        "{node_id} refuses messages, its disk is full",
        "free room; writing goes on without a restart",
    ),
    AlarmRule(
        "carry-heavy",
        "warning",
        0.25,
        300,
        NODE,
        over("mqmesh_table_log_ratio"),
        "tables of {node_id} keep {value:.0%} of its log, more than {threshold:.0%}, and are "
        "written again and again",
        "keep the log for longer (`storage.file_reserved_time`), or give the tables a broker group "
        "of their own",
    ),
    AlarmRule(
        "table-damaged",
        "critical",
        0,
        0,
        NODE,
        over("mqmesh_table_unreadable_values"),
        "{value:.0f} values of tables of {node_id} cannot be read from its log, which is kept for "
        "them and grows",
        "write or delete the keys that the log file of the broker names, or make a sound replica "
        "the master",
    ),
    AlarmRule(
        "store-not-writable",
        "critical",
        0,
        60,
        NODE,
        is_zero("mqmesh_store_writable"),
        "{node_id} takes no messages",
        "the log file of the broker says why",
    ),
    AlarmRule(
        "messages-lost-unread",
        "critical",
        0,
        0,
        NODE,
        grew("mqmesh_forced_lost_messages_total", NODE, 3_600),
        "{node_id} removed {value:.0f} messages that a group had not read, to make room",
        "more disk, or faster consumers",
    ),
    AlarmRule(
        "group-behind",
        "warning",
        10_000,
        300,
        GROUP,
        _behind(GROUP),
        "{consumer_group} lacks {value:.0f} messages, more than {threshold:.0f}",
        "`mqmesh group progress GROUP` shows the queue and the member",
    ),
    AlarmRule(
        "group-stuck",
        "critical",
        0,
        300,
        GROUP,
        _stuck,
        "{consumer_group} has members and gets nowhere: {value:.0f} messages wait",
        "a member hangs in its listener: `mqmesh group progress GROUP` shows which",
    ),
    AlarmRule(
        "group-failing",
        "critical",
        0.5,
        300,
        GROUP,
        _failing,
        "listeners of {consumer_group} fail at {value:.0%} of their messages, more than "
        "{threshold:.0%}",
        "the listener's log has the tracebacks; `mqmesh group running GROUP` shows each member",
    ),
    AlarmRule(
        "group-paused",
        "warning",
        0,
        14_400,
        GROUP,
        over(PAUSED, GROUP),
        "{consumer_group} has been paused for four hours",
        "`mqmesh group show GROUP` shows until when, `mqmesh group resume GROUP` ends it",
    ),
    AlarmRule(
        "group-without-members",
        "warning",
        0,
        600,
        GROUP,
        _nobody(GROUP),
        "{value:.0f} messages wait for {consumer_group}, and nobody is there",
        "start a consumer, or delete the group",
    ),
    AlarmRule(
        "mixed-subscriptions",
        "warning",
        0,
        60,
        GROUP,
        over("mqmesh_group_differing_members", GROUP),
        "members of {consumer_group} subscribe differently from the others: messages are missed",
        "`mqmesh group connections GROUP` shows who differs, and how",
    ),
    AlarmRule(
        "dead-letters",
        "warning",
        0,
        0,
        GROUP,
        grew("rocketmq_send_to_dlq_messages_total", GROUP, 600),
        "{value:.0f} messages of {consumer_group} became dead letters within 10 minutes",
        "`mqmesh dlq` lists and sends them again",
    ),
    AlarmRule(
        "message-held",
        "warning",
        3_600,
        0,
        NODE,
        over("mqmesh_delivery_oldest_lease_seconds"),
        "a member has held messages of {node_id} for {value:.0f} s, more than {threshold:.0f}, and "
        "does not settle them",
        "`mqmesh group leases GROUP` shows who; `mqmesh group release GROUP --member ID` lets "
        "others have them",
    ),
    AlarmRule(
        "leases-expiring",
        "warning",
        1_000,
        0,
        NODE,
        grew("mqmesh_delivery_expired_total", NODE, 600),
        "leases of {value:.0f} messages at {node_id} ended within 10 minutes before they were "
        "settled, more than {threshold:.0f}",
        "work takes longer than `invisible_ms`, or members are killed: `mqmesh group leases GROUP`",
    ),
    AlarmRule(
        "key-blocks-queue",
        "warning",
        0,
        60,
        NODE,
        over("mqmesh_delivery_blocked_queues"),
        "{value:.0f} queues at {node_id} stand still for a minute: too many messages wait for one "
        "sharding key",
        "the broker's log names the key; `mqmesh group leases GROUP` shows who has its messages",
    ),
    AlarmRule(
        "half-messages-waiting",
        "warning",
        300,
        0,
        NODE,
        over("mqmesh_half_messages_oldest_seconds"),
        "a transaction at {node_id} waits for its decision for {value:.0f} s, more than "
        "{threshold:.0f}",
        "no producer of the group is connected, or it knows no outcome yet: `mqmesh tx list`",
    ),
    AlarmRule(
        "half-messages-parked",
        "warning",
        0,
        0,
        NODE,
        over("mqmesh_half_messages_parked"),
        "nobody decides {value:.0f} transactions at {node_id}",
        "its producers were asked in vain: `mqmesh tx list --parked`",
    ),
    AlarmRule(
        "delays-late",
        "critical",
        5_000,
        60,
        NODE,
        over("rocketmq_timer_dequeue_latency"),
        "delayed messages of {node_id} are {value:.0f} ms late, more than {threshold:.0f}",
        "the schedule service, or its broker, is too slow or full",
    ),
    AlarmRule(
        "no-schedule-service",
        "critical",
        0,
        60,
        NODE,
        _undelivered,
        "{value:.0f} delayed messages wait at {node_id}, and no schedule service is there",
        "start the schedule service of that broker: what is due waits for it",
    ),
    AlarmRule(
        "busy",
        "warning",
        60,
        60,
        NODE,
        any_of(
            grew("mqmesh_refusals_total", NODE, 60, response_code="system_busy"),
            grew("mqmesh_refusals_total", NODE, 60, response_code="disk_full"),
        ),
        "{node_id} refused {value:.0f} requests within a minute, more than {threshold:.0f}",
        "the line of the refusal in the log names the limit",
    ),
    AlarmRule(
        "no-permission",
        "warning",
        10,
        0,
        NODE,
        any_of(
            grew("mqmesh_refusals_total", NODE, 60, response_code="no_permission"),
            grew("mqmesh_refused_connections_total", NODE, 60),
        ),
        "{node_id} refused {value:.0f} requests without permission, or connections without a good "
        "key, within a minute",
        "the audit log says who asked for what",
    ),
    AlarmRule(
        "index-behind",
        "warning",
        60,
        300,
        NODE,
        over("mqmesh_index_lag_seconds"),
        "look-ups by key at {node_id} lack the last {value:.0f} s, more than {threshold:.0f}",
        "look-ups by key lack the newest messages; the broker's log says what holds the index up",
    ),
    AlarmRule(
        "archive-behind",
        "warning",
        3_600,
        60,
        NODE,
        over("mqmesh_snapshots_waiting_oldest_seconds"),
        "an archive has not taken in a snapshot of {node_id} for {value:.0f} s, more than "
        "{threshold:.0f}",
        "`mqmesh archive run` is slow, failing or stopped; beyond `snapshot.waiting_bytes` the "
        "oldest snapshots go",
    ),
    AlarmRule(
        "replica-behind",
        "critical",
        64 * MIB,
        60,
        ("node_id", "replica"),
        over("mqmesh_ha_replica_lag_bytes", ("node_id", "replica")),
        "replica {replica} of {node_id} lacks {value:.0f} bytes, more than {threshold:.0f}",
        "a disk or a network of the replica is too slow: `mqmesh ha status`",
    ),
    AlarmRule(
        "replica-silent",
        "critical",
        10,
        60,
        ("node_id", "replica"),
        over("mqmesh_ha_replica_silent_seconds", ("node_id", "replica")),
        "replica {replica} of {node_id} says nothing for {value:.0f} s",
        "the replica hangs or is gone: `mqmesh ha status`; `mqmesh ha remove` takes it out "
        "for good",
    ),
    AlarmRule(
        "unsafe-answers",
        "critical",
        0,
        0,
        ("node_id", "send_status"),
        grew("mqmesh_unsafe_answers_total", ("node_id", "send_status"), 300),
        "{node_id} answers {send_status}: messages are on too few disks or replicas",
        "replicas are missing, or a disk is slow: `mqmesh ha status`",
    ),
    AlarmRule(
        "no-failover",
        "critical",
        0,
        30,
        NODE,
        any_of(over("mqmesh_ha_failsafe"), is_zero("mqmesh_ha_coordinator_up")),
        "{node_id} has no session at the coordinator: nobody takes over if a master dies",
        "look at the coordinator, and the way to it",
    ),
    AlarmRule(
        "bug-survived",
        "warning",
        0,
        0,
        PROCESS,
        grew("mqmesh_callback_failures_total", PROCESS, 3_600),
        "{node_type} {node_id} survived a bug; its log has the traceback",
        "report the traceback of the log file",
    ),
)

TOPIC_RULES: Final = tuple(
    msgspec.structs.replace(
        rule, by=GROUP_AND_TOPIC, find=find(GROUP_AND_TOPIC), summary="in {topic} " + rule.summary
    )
    for rule in RULES
    for alarm, find in (("group-behind", _behind), ("group-without-members", _nobody))
    if rule.alarm == alarm
)
"""The same alarms, of one topic: for those who name one."""


def _grown(seen: list[tuple[int, float]], since_ms: int) -> float | None:
    if seen[0][0] > since_ms and len(seen) == 1:
        return None
    start = max((at for at, one in enumerate(seen) if one[0] <= since_ms), default=0)
    grown = 0.0
    for (_, before), (_, after) in zip(seen[start:], seen[start + 1 :], strict=False):
        grown += after - before if after >= before else after
    return grown

"""Alarms that are on: when each began, and when it is to be reported. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from mqmesh.roles.exporter.alarm_rules import (
    RULES,
    TOPIC_RULES,
    AlarmRule,
    ClusterObservation,
    History,
    Severity,
)
from mqmesh.roles.exporter.families import Families
from mqmesh.roles.exporter.monitor_config import RuleChange
from mqmesh.roles.exporter.names import Node

Status = Literal["firing", "resolved"]
MOST_ALARMS: Final = 10_000
"""Most alarms that are on at a time; further ones are left out."""


class Alarm(msgspec.Struct, frozen=True):
    """Alarm: something that is wrong.

    Attributes:
        alarm: Name of the rule.
        severity: Severity of the alarm.
        labels: Labels of its subject.
        value: Value that was found.
        threshold: Limit that it is beyond.
        summary: A sentence.
        since_ms: Since when it is so, ms since 1970.
        status: ``resolved`` when it is over.
    """

    alarm: str
    severity: Severity
    labels: dict[str, str]
    value: float
    threshold: float
    summary: str
    since_ms: int
    status: Status = "firing"


class RaisedAlarm(msgspec.Struct):
    """An alarm that is so, though perhaps not for long enough.

    Attributes:
        alarm: As it was found last.
        reported_ms: Time of its last report, ms since 1970; 0 for never.
    """

    alarm: Alarm
    reported_ms: int = 0


class AlarmState(msgspec.Struct):
    """State of a monitor; a file can hold it.

    Attributes:
        history: Totals of before.
        known: Alarms by rule and labels, joined by a tab.
        brokers: By endpoint, and when name servers knew them last, wall clock: they drop one
            that is gone at once.
    """

    history: History = msgspec.field(default_factory=History)
    known: dict[str, RaisedAlarm] = {}
    brokers: dict[str, tuple[Node, int]] = {}


class AlarmBoard:
    """Judge of a cluster's metrics, look by look.

    Args:
        changes: Differences of rules from their defaults.
        repeat_s: An alarm that lasts is reported again after so long; 0 for never.
        state: State of before.
    """

    def __init__(
        self, changes: Sequence[RuleChange] = (), repeat_s: int = 0, state: AlarmState | None = None
    ) -> None:
        self.state = state or AlarmState()
        self._repeat_ms = repeat_s * 1_000
        self._plans = [(rule, _plans(rule, changes)) for rule in (*RULES, *TOPIC_RULES)]

    def judge(self, families: Families, now_ms: int, *, at_once: bool = False) -> list[Alarm]:
        """Looks at metrics.

        Args:
            families: Metrics of the whole cluster.
            now_ms: Wall clock.
            at_once: Do not wait until something was so for long enough.

        Returns:
            Alarms to report: those that began, are over, or last for long.
        """
        look = ClusterObservation(families, self.state.history, now_ms)
        seen = dict(self._find(look))
        due: list[Alarm] = []
        for key, (alarm, for_ms) in seen.items():
            known = self.state.known.get(key)
            if known is None:
                if len(self.state.known) >= MOST_ALARMS:
                    continue
                known = self.state.known[key] = RaisedAlarm(alarm)
            known.alarm = msgspec.structs.replace(alarm, since_ms=known.alarm.since_ms)
            is_due = at_once or now_ms - known.alarm.since_ms >= for_ms
            is_again = bool(self._repeat_ms) and now_ms - known.reported_ms >= self._repeat_ms
            if is_due and (not known.reported_ms or is_again):
                known.reported_ms = now_ms
                due.append(known.alarm)
        for key in self.state.known.keys() - seen.keys():
            over = self.state.known.pop(key)
            if over.reported_ms:
                due.append(msgspec.structs.replace(over.alarm, status="resolved"))
        self.state.history.end_look(families, now_ms)
        return due

    def firing(self) -> list[Alarm]:
        """Return the alarms that are on and were reported."""
        return [known.alarm for known in self.state.known.values() if known.reported_ms]

    def _find(self, look: ClusterObservation) -> Iterator[tuple[str, tuple[Alarm, int]]]:
        for rule, plan in self._plans:
            # Once for each threshold that some group has.
            for threshold in dict.fromkeys(one.threshold for one in plan.values() if one.enabled):
                for labels, value in rule.find(look, threshold):
                    due = dict(zip(rule.by, labels, strict=True))
                    one = _plan_of(plan, due.get("consumer_group", ""), due.get("topic", ""))
                    if not one.enabled or one.threshold != threshold:
                        continue
                    summary = rule.sentence(labels, value, threshold)
                    since_ms = look.now_ms
                    found = (rule.alarm, rule.severity, due, value, threshold, summary, since_ms)
                    yield "\t".join((rule.alarm, *labels)), (Alarm(*found), one.for_ms)


class _Plan(msgspec.Struct, frozen=True):
    threshold: float
    for_ms: int
    enabled: bool


_Plans = dict[tuple[str, str], _Plan]
"""Plans by consumer group and topic; "" for all that have nothing of their own."""


def _plans(rule: AlarmRule, changes: Sequence[RuleChange]) -> _Plans:
    """Return the plans of a rule; one of topics is judged only where a topic is named."""
    is_of_topics = rule in TOPIC_RULES
    plans = {("", ""): _Plan(rule.threshold, rule.for_s * 1_000, enabled=not is_of_topics)}
    # Those of a group begin with what holds for all, wherever it stands.
    for one in sorted(changes, key=lambda one: bool(one.group)):
        if one.alarm == rule.alarm and bool(one.topic) == is_of_topics:
            base = _plan_of(plans, one.group, one.topic)
            plans[one.group, one.topic] = _Plan(
                base.threshold if one.threshold is None else one.threshold,
                base.for_ms if one.for_s is None else one.for_s * 1_000,
                one.enabled,
            )
    return plans


def _plan_of(plans: _Plans, group: str, topic: str) -> _Plan:
    return plans.get((group, topic)) or plans.get(("", topic)) or plans["", ""]

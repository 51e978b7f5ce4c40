"""Settings of a monitor. The defaults stand here only, those of alarms in ``alarm_rules.py``."""

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.roles.exporter.alarm_rules import RULES, TOPIC_RULES
from mqmesh.security.keys import Key

_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Name = Annotated[str, msgspec.Meta(max_length=255)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=86_400)]
# Bounds leave out nan, which no value would ever exceed.
_Threshold = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class RuleChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Difference of an alarm from its default.

    Attributes:
        alarm: Name of the alarm.
        group: Only of this consumer group; "" for all.
        topic: Of what waits in this topic, beside the alarm of all topics; "" for that one.
        threshold: In place of the default, 0 to 1e18; in the unit of the rule.
        for_s: In place of the default, 0 to 86,400 s.
        enabled: False for no alarm.
    """

    alarm: str
    group: _Name = ""
    topic: _Name = ""
    threshold: _Threshold | None = None
    for_s: _Seconds | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        """Checks the name.

        Raises:
            ConfigError: No alarm has this name, or it is of no group or topic.
        """
        rule = next((rule for rule in RULES if rule.alarm == self.alarm), None)
        if rule is None:
            names = ", ".join(rule.alarm for rule in RULES)
            raise ConfigError(f"rule.alarm {self.alarm!r} is none of {names}")
        if self.group and "consumer_group" not in rule.by:
            raise ConfigError(f"rule.group: alarm {self.alarm!r} is of no consumer group")
        of_topics = [rule.alarm for rule in TOPIC_RULES]
        if self.topic and self.alarm not in of_topics:
            raise ConfigError(
                f"rule.topic: alarm {self.alarm!r} is of no topic; {' and '.join(of_topics)} are"
            )


class NotifyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Receivers of alarms.

    Attributes:
        log: Write a line for each alarm that begins or ends.
        command: A program and its arguments, started with the alarms as JSON on its standard
            input; none if it is empty. No shell takes part.
        webhook_url: URL to which the same JSON is posted, ``http://`` or ``https://``; "" for none.
            It has the form of Alertmanager's webhook.
        timeout_s: Time for the command and the webhook, 1 to 60 s.
        repeat_s: An alarm that lasts is reported again after so long, 0 for never.
    """

    log: bool = True
    command: Annotated[list[str], msgspec.Meta(max_length=64)] = []
    webhook_url: Annotated[str, msgspec.Meta(max_length=2_048)] = ""
    timeout_s: Annotated[int, msgspec.Meta(ge=1, le=60)] = 5
    repeat_s: _Seconds = 14_400

    def __post_init__(self) -> None:
        """Checks the URL.

        Raises:
            ConfigError: The URL cannot be posted to.
        """
        url = urlsplit(self.webhook_url)
        if self.webhook_url and (url.scheme not in ("http", "https") or not url.hostname):
            raise ConfigError(
                f"notify.webhook_url {self.webhook_url!r} must be http://host/… or https://host/…"
            )


class MonitorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a monitor.

    Attributes:
        enable: Let `mqmesh up` run a monitor.
        namesrv_addr: Name servers, ``host:port`` each; they know the brokers.
        other_addr: Other processes to watch, ``host:port`` each: coordinators, schedule services,
            filter servers.
        data_dir: Data folder of a cluster that `mqmesh up` runs on this machine, whose other
            processes are watched, too. "" for none.
        credentials: File with keys of a user of role ``view``, where security is on; "" for what
            MQMESH_CREDENTIALS names.
        server_keys: Public keys of processes of ``other_addr``, by address, where they have not
            the key of the name servers.
        interval_s: Interval of the looks, 1 to 3,600 s.
        timeout_ms: Time for each answer of a process, 100 to 60,000 ms.
        max_groups: Consumer groups of each broker that are watched, 0 to 100,000.
        state_file: File for the state of the monitor, so that a restart forgets no alarm, and
            ``--once`` knows which values have grown. "" for none.
        rule: Alarms that differ from their defaults; one of a group goes before one of all.
        notify: Receivers of alarms.
    """

    enable: bool = False
    namesrv_addr: Annotated[list[_Address], msgspec.Meta(min_length=1, max_length=64)] = (
        msgspec.field(default_factory=lambda: ["127.0.0.1:9876"])
    )
    other_addr: Annotated[list[_Address], msgspec.Meta(max_length=1_024)] = []
    data_dir: str = ""
    credentials: str = ""
    server_keys: dict[_Address, Key] = {}
    interval_s: Annotated[int, msgspec.Meta(ge=1, le=3_600)] = 30
    timeout_ms: Annotated[int, msgspec.Meta(ge=100, le=60_000)] = 2_000
    max_groups: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 10_000
    state_file: str = ""
    rule: Annotated[list[RuleChange], msgspec.Meta(max_length=1_024)] = []
    notify: NotifyConfig = NotifyConfig()

"""Notifications of alarms: in the log, to a program, to a web service."""

import logging
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.error import URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec

from mqmesh.roles.exporter.alarm_board import Alarm
from mqmesh.roles.exporter.alarm_rules import RULES
from mqmesh.roles.exporter.monitor_config import NotifyConfig

NO_END: Final = "0001-01-01T00:00:00Z"
"""End of an alarm that lasts, as Alertmanager writes it."""
MAX_ALARMS: Final = 1_000
"""Most alarms of one look, in one document."""
ANSWER_BYTES: Final = 4_096

_log = logging.getLogger(__name__)
_ADVICE: Final = {rule.alarm: rule.advice for rule in RULES}


class _NoRedirects(HTTPRedirectHandler):
    """Handler that follows no redirect: a web service may not send the alarms elsewhere."""

    def redirect_request(self, *arguments: Any) -> None:
        """Follows no redirect."""


def notify(config: NotifyConfig, alarms: Sequence[Alarm], now_ms: int) -> None:
    """Notifies of alarms that began or ended; the log names a receiver that cannot be reached.

    Args:
        config: Receivers.
        alarms: Alarms.
        now_ms: Wall clock.
    """
    if not alarms:
        return
    if config.log:
        for one in alarms:
            _write_log(one)
    document = msgspec.json.encode(document_of(alarms, now_ms))
    if config.command:
        _start(config, document)
    if config.webhook_url:
        _post(config, document)


def document_of(alarms: Sequence[Alarm], now_ms: int) -> dict[str, Any]:
    """Alarms in the form of Alertmanager's webhook, version 4."""
    sent = alarms[:MAX_ALARMS]
    is_over = all(one.status == "resolved" for one in sent)
    return {
        "version": "4",
        "receiver": "mqmesh",
        "status": "resolved" if is_over else "firing",
        "truncatedAlerts": len(alarms) - len(sent),
        "alerts": [
            {
                "status": one.status,
                "labels": {"alertname": one.alarm, "severity": one.severity, **one.labels},
                "annotations": {"summary": one.summary, "description": _ADVICE[one.alarm]},
                "startsAt": _moment(one.since_ms),
                "endsAt": _moment(now_ms) if one.status == "resolved" else NO_END,
            }
            for one in sent
        ],
    }


def _write_log(alarm: Alarm) -> None:
    if alarm.status == "resolved":
        _log.info("%s is over: %s", alarm.alarm, alarm.summary)
    else:
        level = logging.ERROR if alarm.severity == "critical" else logging.WARNING
        _log.log(level, "%s (%s): %s", alarm.alarm, alarm.severity, alarm.summary)


def _start(config: NotifyConfig, document: bytes) -> None:
    try:
        done = subprocess.run(
            config.command,
            input=document,
            stdout=subprocess.DEVNULL,
            timeout=config.timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.error("notify.command %s: %s", config.command[0], error)
        return
    if done.returncode:
        _log.error("notify.command %s ended with code %d", config.command[0], done.returncode)


def _post(config: NotifyConfig, document: bytes) -> None:
    request = Request(
        config.webhook_url,
        document,
        {"Content-Type": "application/json", "User-Agent": "mqmesh"},
        method="POST",
    )
    try:
        with build_opener(_NoRedirects).open(request, timeout=config.timeout_s) as answer:
            answer.read(ANSWER_BYTES)
    except (URLError, OSError, ValueError) as error:
        _log.error("notify.webhook_url %s: %s", request.host, error)


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

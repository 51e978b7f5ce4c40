"""A real Prometheus, from the distribution's package, that scrapes one target."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from harness.commands import free_ports
from harness.debian_package import debian_program
from harness.patience import until

PACKAGE = "prometheus"


def promtool(*arguments: str, text: bytes = b"") -> str:
    """Runs promtool; returns all that it says, with its exit code in front."""
    done = subprocess.run(
        [debian_program(PACKAGE, "promtool"), *arguments],
        input=text,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return f"{done.returncode}\n{(done.stdout + done.stderr).decode()}"


class Prometheus:
    """One Prometheus; it is up once this returns.

    Args:
        folder: For its files.
        target: ``host:port`` of what it scrapes twice a second.
        rules: File of its rules.
        labels: Labels that it adds to each series.
    """

    def __init__(self, folder: Path, target: str, rules: Path, labels: dict[str, str]) -> None:
        program = debian_program(PACKAGE, "prometheus")
        (port,) = free_ports(1)
        self._root = f"http://127.0.0.1:{port}"
        scrape = {
            "job_name": "mqmesh",
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "static_configs": [{"targets": [target], "labels": labels}],
        }
        config = {
            "global": {"evaluation_interval": "200ms"},
            "rule_files": [str(rules)],
            "scrape_configs": [scrape],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        until(self._is_up)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def query(self, expression: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """Returns the series that an expression gives.

        Args:
            expression: PromQL expression.
            at_s: Time of the query, seconds since 1970; None for now.
        """
        when = {} if at_s is None else {"time": str(at_s)}
        found: list[dict[str, Any]] = self._ask("query", query=expression, **when)["result"]
        return found

    def scraped_s(self) -> float:
        """Returns the time of the last scrape, seconds since 1970; 0 for never."""
        found = self.query("timestamp(up == 1)")
        return float(found[0]["value"][1]) if found else 0.0

    def gaps(self, expression: str, since_s: float, until_s: float) -> set[float]:
        """Returns the times at which an expression gave nothing though a scrape had just succeeded.

        Args:
            expression: PromQL expression.
            since_s: Start of the span, seconds since 1970; looked at each second.
            until_s: End of the span.
        """
        return self._told("up == 1", since_s, until_s) - self._told(expression, since_s, until_s)

    def rules(self) -> dict[str, str]:
        """Returns how the last evaluation of each alarm went, by name: ``ok``, or what is wrong."""
        (group,) = self._ask("rules")["groups"]
        return {one["name"]: one.get("lastError") or one["health"] for one in group["rules"]}

    def firing(self) -> set[str]:
        """Returns the names of the alarms that fire, or wait for their time to."""
        return {one["labels"]["alertname"] for one in self._ask("alerts")["alerts"]}

    def targets(self) -> list[dict[str, Any]]:
        """Returns the active targets, as Prometheus reports them."""
        active: list[dict[str, Any]] = self._ask("targets")["activeTargets"]
        return active

    def _told(self, expression: str, since_s: float, until_s: float) -> set[float]:
        span = {"start": str(since_s), "end": str(until_s), "step": "1"}
        series = self._ask("query_range", query=expression, **span)["result"]
        return {at_s for one in series for at_s, _ in one["values"]}

    def _ask(self, what: str, **arguments: str) -> dict[str, Any]:
        with urlopen(f"{self._root}/api/v1/{what}?{urlencode(arguments)}") as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data

    def _is_up(self) -> bool:
        with suppress(URLError, ConnectionError), urlopen(f"{self._root}/-/ready") as answer:
            return bool(answer.status == 200)
        return False

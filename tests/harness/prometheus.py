"""A real Prometheus, from the distribution's package, that scrapes one target."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from harness.debian_package import debian_program
from harness.etcd_processes import free_ports
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
        target: ``host:port`` of what it scrapes five times a second.
        rules: File of its rules.
        labels: What it adds to each series.
    """

    def __init__(self, folder: Path, target: str, rules: Path, labels: dict[str, str]) -> None:
        program = debian_program(PACKAGE, "prometheus")
        (port,) = free_ports(1)
        self._root = f"http://127.0.0.1:{port}"
        scrape = {
            "job_name": "mqmesh",
            "scrape_interval": "200ms",
            "scrape_timeout": "200ms",
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

    def query(self, expression: str) -> list[dict[str, object]]:
        """The series that an expression gives now."""
        with urlopen(f"{self._root}/api/v1/query?{urlencode({'query': expression})}") as answer:
            found: list[dict[str, object]] = json.load(answer)["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Names of the alarms that fire, or wait for their time to."""
        with urlopen(f"{self._root}/api/v1/alerts") as answer:
            return {one["labels"]["alertname"] for one in json.load(answer)["data"]["alerts"]}

    def targets(self) -> list[dict[str, object]]:
        """What it says of its targets."""
        with urlopen(f"{self._root}/api/v1/targets") as answer:
            active: list[dict[str, object]] = json.load(answer)["data"]["activeTargets"]
        return active

    def _is_up(self) -> bool:
        with suppress(URLError, ConnectionError), urlopen(f"{self._root}/-/ready") as answer:
            return bool(answer.status == 200)
        return False

"""A real broker of RocketMQ 5.3.3, and what pages for Prometheus have in common."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from base64 import b64decode
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from harness.debian_package import leave_out
from harness.java import java_command

VERSION = "5.3.3"
DOWNLOAD_S = 240
TRAFFIC_S = 150
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>mqmesh</groupId><artifactId>rocketmq</artifactId><version>1</version>
  <dependencies>%s</dependencies>
</project>
"""
DEPENDENCY = """
    <dependency>
      <groupId>org.apache.rocketmq</groupId><artifactId>%s</artifactId><version>%s</version>
    </dependency>
"""


def families(page: str) -> dict[str, set[str]]:
    """Returns metrics by RocketMQ's names, with the names of their labels; see the golden file."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(rocketmq_\w+)\{(.*)\} \S+", page, re.MULTILINE):
        names = set(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', labels)) - {"le"}
        plain = re.sub(r"_(bucket|sum|count)\Z", "", name)
        found.setdefault(plain, set()).add(" ".join(sorted(names)))
    return found


def golden_families(root: Path) -> dict[str, set[str]]:
    """Reads the golden file: label sets by metric family."""
    text = (root / "tests" / "data" / f"rocketmq-{VERSION}-labels.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: {labels} for name, _, labels in (line.partition(" ") for line in lines)}


@dataclass(frozen=True)
class Traffic:
    """Metrics page and traces of a real broker, and of its clients.

    Attributes:
        page: The broker's page for Prometheus.
        sent: Message id and offset message id of each sent message, by name.
        traces: Keys, and body, of each message of the trace topic.
    """

    page: str
    sent: dict[str, tuple[str, str]]
    traces: list[tuple[list[str], bytes]]


def traffic_of_a_real_broker(folder: Path, metrics: list[str], events: list[str]) -> Traffic:
    """Runs a broker under some traffic; in a network of its own, where only loopback is.

    Args:
        folder: For its files.
        metrics: Metrics that the page must have before it is taken.
        events: Events that the trace topic must have; see ``RocketMQTraffic.java``.
    """
    options = ("-Xms64m", "-Xmx512m", "-XX:MaxDirectMemorySize=256m", f"-Duser.home={folder}")
    java = [
        *java_command("RocketMQTraffic", rocketmq_jars(), *options),
        *(str(folder), *metrics, "--", *events),
    ]
    alone = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"']
    done = subprocess.run(
        [*alone, "sh", *java],
        env=os.environ | {"ROCKETMQ_HOME": str(folder), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=TRAFFIC_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    sent = [line.split("\t") for line in (folder / "sent.tsv").read_text().splitlines()]
    traces = [line.split("\t") for line in (folder / "traces.tsv").read_text().splitlines()]
    return Traffic(
        done.stdout,
        {name: (message_id, offset_id) for name, message_id, offset_id in sent},
        [(b64decode(keys).decode().split(), b64decode(body)) for keys, body in traces],
    )


def rocketmq_jars(
    version: str = VERSION, artifacts: tuple[str, ...] = ("rocketmq-broker", "rocketmq-namesrv")
) -> Path:
    """Returns the folder of all jars that artifacts need, from Maven Central the first time."""
    for program in "java", "javac", "mvn", "unshare":
        if shutil.which(program) is None:
            leave_out(f"{program} is not installed")
    name = f"mqmesh-{artifacts[0]}-{version}-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    jars = folder / "jars"
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not jars.exists():
            needed = "".join(DEPENDENCY % (one, version) for one in artifacts)
            (folder / "pom.xml").write_text(POM % needed)
            unpacked = folder / "unpacked"
            shutil.rmtree(unpacked, ignore_errors=True)
            done = subprocess.run(
                [
                    "mvn",
                    "-q",
                    "-B",
                    "dependency:copy-dependencies",
                    f"-DoutputDirectory={unpacked}",
                ],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_S,
                check=False,
            )
            if done.returncode:
                leave_out(f"Maven gave no jars of RocketMQ: {done.stdout[-500:]}")
            unpacked.rename(jars)
    return jars

"""Results of the Java client of RocketMQ, by ``OracleClient.java``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from harness.java import java_command
from harness.oracle.tools import printed
from harness.oracle.wire import plain
from harness.rocketmq import rocketmq_jars

JAVA_S = 120


def client_answers(namesrv: str, folder: Path, *scenes: str) -> dict[str, Any]:
    """Runs the program to its end.

    Args:
        namesrv: Address of the name server.
        folder: For its files.
        scenes: Only these; all by default.
    """
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "logback_tools.xml").write_text("<configuration/>")
    options = ("-Xmx400m", "-Drocketmq.client.logUseSlf4j=true")
    homes = (f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}")
    command = java_command("OracleClient", rocketmq_jars(), *options, *homes)
    done = subprocess.run(
        [*command, namesrv, *scenes],
        capture_output=True,
        text=True,
        timeout=JAVA_S,
        check=False,
        cwd=folder,
    )
    (folder / "client.log").write_text(done.stderr)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = {}
    for line in done.stdout.splitlines():
        name, mark, text = line.partition("\t")
        if mark and text.startswith("{"):
            found[name] = _seen(name, json.loads(text))
    return dict(sorted(found.items()))


def _seen(name: str, values: dict[str, Any]) -> Any:
    if not name.startswith("mqadmin: "):
        return plain(values)
    lines = values["lines"]
    if "topicList" in name:  # those of all scenes
        lines = [one for one in lines if "oj-admin" in one]
    return printed("\n".join(lines), {})

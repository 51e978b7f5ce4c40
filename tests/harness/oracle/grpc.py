"""Results of the Java client of RocketMQ 5 by gRPC, by ``GrpcClient.java``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.java import java_command
from harness.oracle.scenes import Site, put_group, put_topic
from harness.rocketmq import rocketmq_jars
from mqmesh.protocol.remoting.codes import RemotingStatus

CLIENT_S = 120


def client_jars() -> Path:
    """Return the folder of the client's jars."""
    return rocketmq_jars("5.0.8", ("rocketmq-client-java",))


def grpc_answers(namesrv: str, grpc: str, folder: Path) -> dict[str, Any]:
    """Makes topics and groups, and runs the program to its end.

    Args:
        namesrv: Address of the name server.
        grpc: Address of the proxy.
        folder: For its files.
    """
    with Site(namesrv, "grpc").connection() as broker:
        made = [put_topic(broker, f"j-{topic}", 2) for topic in ("plain", "keyed", "bank")]
        made += [put_group(broker, f"j-{group}") for group in ("push", "audit", "simple")]
        made.append(put_group(broker, "j-fifo", consumeMessageOrderly=True))
        assert all(one.code == RemotingStatus.SUCCESS for one in made)
    done = subprocess.run(
        [*java_command("GrpcClient", client_jars(), f"-Duser.home={folder}"), grpc, "j"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return seen(line.split("\t") for line in done.stdout.splitlines())


def seen(said: Iterable[list[str]]) -> dict[str, Any]:
    """Return lines as they are compared: without ids, those of a message group in order.

    Each once: RocketMQ may ask twice about a transaction, and then delivers it twice.
    """
    found: dict[str, Any] = {}
    for kind, *fields in said:
        if kind == "got":
            group, *fields = fields[:-1]
            found.setdefault(f"{group} {fields[-1]}".strip(), []).append(" | ".join(fields))
        elif kind not in ("sent", "recalled"):
            found.setdefault(kind, []).append(" | ".join(fields))
    return {
        key: list(dict.fromkeys(one)) if "fifo" in key else sorted(set(one))
        for key, one in sorted(found.items())
    }

"""Speeds of RocketMQ's Java clients at the gateway and at a real RocketMQ, in turn.

The same programs at both, of messages of 200 bytes: by remoting sends one after the other, with 256
in flight, in batches of 256, and a push consumer; by gRPC sends with 64 in flight. Client, gateway
and broker share the machine's cores. The goals are those of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness.commands import free_ports
from harness.java import java_command
from harness.oracle.grpc import client_jars
from harness.oracle.scenes import Site, put_topic
from harness.oracle.server import mqmesh_gateway, real_rocketmq
from harness.rocketmq import rocketmq_jars
from mqmesh.protocol.remoting.codes import RemotingStatus

TOPIC = "speed"
QUEUES = 8
COMPILED = "-XX:TieredStopAtLevel=4"
"""All that the compiler of the virtual machine can do; tests do without, for it wants time."""
CLIENT_S = 300
ROCKETMQ, MQMESH = "RocketMQ 5.3.3", "mqmesh"


@dataclass(frozen=True)
class Goal:
    """Bounds of one measured value: ``least`` or ``most``, and the share of RocketMQ's."""

    least: int = 0
    most: int = 0
    share: float = 0.0

    def is_met(self, value: float, real: float) -> bool:
        """Return True if a value is within the bounds; ``real`` is RocketMQ's."""
        return value >= max(self.least, self.share * real) and value <= (self.most or value)

    def __str__(self) -> str:
        """Return the bounds as text."""
        return ", ".join(
            text
            for bound, text in (
                (self.least, f">= {self.least:,}"),
                (self.most, f"<= {self.most:,}"),
                (self.share, f">= {self.share:g} x"),
            )
            if bound
        )


GOALS = {
    "sync_send_p50_us": Goal(most=1_500),
    "async_sends_per_s": Goal(least=12_000, share=0.5),
    "batched_per_s": Goal(least=150_000, share=0.5),
    "consumed_per_s": Goal(least=60_000, share=0.5),
    "grpc_sends_per_s": Goal(share=1.0),
}


@contextmanager
def side(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Runs one side; yields its addresses by remoting and by gRPC."""
    (port,) = free_ports(1)
    if name == MQMESH:
        with mqmesh_gateway(folder, {}, grpc_port=port) as (namesrv, _):
            yield namesrv, f"127.0.0.1:{port}"
    else:
        with real_rocketmq(folder, COMPILED, grpc_port=port) as namesrv:
            yield namesrv, f"127.0.0.1:{port}"


def measure(name: str, for_ms: int) -> dict[str, int]:
    """Return what was measured of one side, by name.

    Args:
        name: ``ROCKETMQ`` or ``MQMESH``.
        for_ms: Milliseconds of each measurement.
    """
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="speeds-") as text,
        side(name, Path(text)) as (namesrv, grpc),
    ):
        with Site(namesrv, TOPIC).connection() as broker:
            assert put_topic(broker, TOPIC, QUEUES).code == RemotingStatus.SUCCESS
        home = f"-Duser.home={text}"
        often = "-Drocketmq.client.rebalance.waitInterval=1000"
        quiet = "-Drocketmq.client.logUseSlf4j=true"
        for program, jars, address in (
            ("SpeedClient", rocketmq_jars(), namesrv),
            ("GrpcSpeed", client_jars(), grpc),
        ):
            done = subprocess.run(
                [
                    *java_command(program, jars, COMPILED, home, often, quiet),
                    *(address, TOPIC, str(for_ms)),
                ],
                capture_output=True,
                text=True,
                timeout=CLIENT_S,
                check=False,
            )
            assert done.returncode == 0, (name, done.stderr[-3_000:])
            for line in done.stdout.splitlines():
                what, mark, value = line.partition("\t")
                if mark and what in GOALS:
                    found[what] = int(value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/oracle-speeds", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each side, in turn (3)")
    parser.add_argument("--ms", type=int, default=3_000, help="of each measurement (3000)")
    parser.add_argument("--mqmesh", action="store_true", help="only mqmesh")
    options = parser.parse_args()
    sides = [MQMESH] if options.mqmesh else [ROCKETMQ, MQMESH]
    runs: dict[str, list[dict[str, int]]] = {name: [] for name in sides}
    for _ in range(options.runs):
        for name in sides:
            runs[name].append(measure(name, options.ms))
            print(name, runs[name][-1], flush=True)
    failed = False
    print(f"{'median of ' + str(options.runs):20}{MQMESH:>12}{'RocketMQ':>12}{'ratio':>8}  goal")
    for what, goal in GOALS.items():
        own, real = (
            median([run[what] for run in runs[name]]) if name in runs else 0
            for name in (MQMESH, ROCKETMQ)
        )
        ratio = f"{own / real:.2f}" if real else "-"
        is_met = goal.is_met(own, real)
        failed = failed or not is_met
        print(f"{what:20}{own:12,.0f}{real:12,.0f}{ratio:>8}  {goal}{'' if is_met else '  MISSED'}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

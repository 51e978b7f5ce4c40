"""A real name server and broker of RocketMQ, on this machine alone."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from harness.commands import free_ports
from harness.java import java_command
from harness.oracle.rights import ADMIN, make_shop
from harness.oracle.wire import Connection, Keys, json_of
from harness.patience import until
from harness.rocketmq import rocketmq_jars
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.testing.processes import ProcessCluster, RoleProcess

STOP_S = 20
CONNECTIONS = 12
"""So many are hardly all at one of two workers."""
CHECKS_SOON = {"transaction_timeout_ms": "1000", "transaction_check_interval_ms": "1000"}
"""Settings of brokers, as the real one has them."""


@contextmanager
def real_rocketmq(
    folder: Path, *java: str, has_users: bool = False, grpc_port: int = 0
) -> Iterator[str]:
    """Runs them; yields the address of the name server.

    Args:
        folder: For their files.
        java: Further options of the virtual machine.
        has_users: With the two users of ``rights``; else everybody may do everything.
        grpc_port: Of a proxy in the broker's process; 0 for none.
    """
    namesrv, broker = _free_ports()
    options = ("-XX:MaxDirectMemorySize=256m", f"-Duser.home={folder}", *java)
    more = ADMIN if has_users else (str(grpc_port),) if grpc_port else ()
    jars = rocketmq_jars(artifacts=("rocketmq-proxy", "rocketmq-namesrv"))
    process = subprocess.Popen(
        [
            *java_command("OracleServer", jars, "-Xms64m", "-Xmx700m", *options),
            *(str(folder), str(namesrv), str(broker), *more),
        ],
        env=os.environ | dict.fromkeys(("ROCKETMQ_HOME", "RMQ_PROXY_HOME", "HOME"), str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(folder / "server.log").open("wb"),
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line == "READY\n":
                break
        else:
            raise AssertionError(f"RocketMQ did not start: {folder / 'server.log'}")
        if has_users:
            make_shop(f"127.0.0.1:{broker}")
        yield f"127.0.0.1:{namesrv}"
    finally:
        process.kill()
        process.wait(STOP_S)
        process.stdout.close()


@contextmanager
def mqmesh_gateway(
    folder: Path, settings: Mapping[str, str], *, grpc_port: int = 0
) -> Iterator[tuple[str, str]]:
    """Runs a cluster of mqmesh with a gateway.

    Args:
        folder: For their files.
        settings: Of the broker.
        grpc_port: Of the gateway for clients by gRPC; 0 for none.

    Yields:
        The addresses that are a name server's: for RocketMQ's clients, and for mqmesh's.
    """
    with ProcessCluster(folder, broker_settings=settings) as cluster:
        cluster.start_schedule()
        namesrv, broker = free_ports(2)
        gateway = RoleProcess(
            "gateway",
            {
                "namesrv_addr": f'["{cluster.namesrv_addr}"]',
                "store_path_root_dir": str(folder / "gateway"),
                "namesrv_port": str(namesrv),
                "broker_port_base": str(broker),
                "vip_ports": "false",
                "grpc_port": str(grpc_port),
            },
            folder / "gateway.log",
        )
        wait_for_broker(f"127.0.0.1:{namesrv}")
        try:
            yield f"127.0.0.1:{namesrv}", cluster.namesrv_addr
        finally:
            gateway.stop()


def wait_for_broker(namesrv: str, keys: Keys | None = None) -> None:
    """Waits until each worker of a gateway has found the broker: any of them may be asked.

    Args:
        namesrv: Address of its name server.
        keys: Of a user, where requests must be signed.
    """

    def found() -> bool:
        with closing(Connection(namesrv, keys=keys)) as connection:
            answer = connection.ask(RemotingCode.GET_BROKER_CLUSTER_INFO)
        return bool(json_of(answer.body)["brokerAddrTable"])

    until(lambda: all(found() for _ in range(CONNECTIONS)))


def _free_ports() -> tuple[int, int]:
    """Returns ports for a name server and a broker, which uses some beside its own."""
    while True:
        with ExitStack() as opened:
            first = opened.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            base = first.getsockname()[1]
            try:
                for number in range(1, 5):
                    other = opened.enter_context(socket.socket())
                    other.bind(("127.0.0.1", base + number))
            except OSError:
                continue
            return base, base + 3

"""The unchanged Java client of RocketMQ 5 by gRPC, beside mqmesh's own clients."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import free_ports
from harness.debian_package import leave_out
from harness.rocketmq import rocketmq_jars

from mqmesh import ConsumeFromWhere, Message, Producer, PullConsumer
from mqmesh.errors import ConfigError
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.spark.jvm.java import find_java
from mqmesh.testing.processes import ProcessCluster, RoleProcess

pytestmark = pytest.mark.timeout(300)

JAVA_S = 200
VERSION = "5.0.8"
FIRST = ConsumeFromWhere.FIRST_OFFSET


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture(scope="module")
def gateway(cluster, tmp_path_factory) -> Iterator[str]:
    """Where clients find the gateway."""
    folder = tmp_path_factory.mktemp("gateway")
    quoted = ", ".join(f'"{one.endpoint}"' for one in cluster.namesrvs)
    namesrv, brokers, grpc = free_ports(3)
    process = RoleProcess(
        "gateway",
        {
            "namesrv_addr": f"[{quoted}]",
            "store_path_root_dir": str(folder / "data"),
            "namesrv_port": str(namesrv),
            "broker_port_base": str(brokers),
            "vip_ports": "false",
            "grpc_port": str(grpc),
        },
        folder / "gateway.log",
    )
    yield f"127.0.0.1:{grpc}"
    assert process.stop() == 0
    assert "Traceback" not in (folder / "gateway.log").read_text()


def run_java(folder: Path, *arguments: str) -> list[list[str]]:
    """Runs the client to its end; what happened."""
    try:
        java = find_java().home / "bin" / "java"
    except ConfigError as error:
        leave_out(str(error))
    jars = rocketmq_jars(VERSION, ("rocketmq-client-java",))
    program = Path(__file__).parents[1] / "harness" / "GrpcClient.java"
    done = subprocess.run(
        [
            str(java),
            *("-Xshare:auto", "-XX:TieredStopAtLevel=1", f"-Duser.home={folder}"),
            *("-Dfile.encoding=UTF-8", "-cp", f"{jars}/*", str(program), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=JAVA_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return [line.split("\t") for line in done.stdout.splitlines()]


def test_java_sends_and_consumes_by_all_kinds_of_calls(cluster, gateway, tmp_path):
    with AdminClient(cluster.namesrv_addr) as admin:
        for topic in "plain", "keyed", "bank":
            admin.create_topic(f"j-{topic}", queues=2)
    with GroupAdmin(cluster.namesrv_addr) as admin:
        own = GroupConfig("j-push", delivery="message", retry_delays="1s", retry_max_times=3)
        admin.create_group(own)
        admin.create_group(GroupConfig("j-fifo", delivery="fifo"))
    with Producer("python", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send(Message("j-plain", b"python", tag="old", properties={"price": "1"}))
    said = run_java(tmp_path, gateway, "all", "j")
    assert said[-1] == ["done"], said
    got = {
        group: [one[2:] for one in said if one[:2] == ["got", f"j-{group}"]]
        for group in ("push", "fifo", "audit", "simple")
    }
    attempts = [(one[0], one[1]) for one in got["push"]]
    assert sorted(attempts) == [
        *[("bad", "1"), ("bad", "2"), ("later", "1"), ("one", "1"), ("x" * 20, "1")],
    ]
    (first,) = [one for one in got["push"] if one[0] == "one"]
    (sent,) = [one[1] for one in said if one[0] == "sent"]
    assert first[2:] == ["new", "k1 k2", "größe", "", sent]
    for group in "g0", "g1", "g2":
        bodies = [int(one[0]) for one in got["fifo"] if one[5] == group]
        own = [number for number in range(20) if f"g{number % 3}" == group]
        assert bodies == sorted([*own, *([5] if 5 in own else [])])
    assert sorted(one[0] for one in got["audit"]) == ["commit", "unknown"]
    assert ["checked", "unknown", "j-bank"] in said
    assert sorted((one[0], one[1]) for one in got["simple"]) == [
        *[("one", "1"), ("one", "2"), ("other", "1")],
    ]
    with PullConsumer("audit", namesrv_addr=cluster.namesrv_addr, consume_from_where=FIRST) as one:
        one.subscribe("j-plain")
        read = {}
        while len(read) < 6:
            read |= {message.body: message for message in one.poll(1_000)}
        assert b"recalled" not in read
        message = read[b"one"]
        assert (message.tag, message.property("to")) == ("new", "größe")
        assert set(message.keys) == {"k1", "k2", sent}

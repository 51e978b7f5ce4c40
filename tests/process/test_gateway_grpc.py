"""Unchanged clients of RocketMQ 5 by gRPC, and an application of Spring Boot, beside mqmesh's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.commands import free_ports
from harness.java import java_command
from harness.oracle.grpc import client_jars, seen
from harness.oracle.meant import unlike_rocketmq
from harness.oracle.server import CHECKS_SOON, wait_for_broker
from harness.rocketmq import rocketmq_jars

from mqmesh import ConsumeFromWhere, Message, Producer, PullConsumer, StoredMessage
from mqmesh.protocol.client_rpc import HandedResult
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.members import MemberClient
from mqmesh.testing.processes import ProcessCluster, RoleProcess

pytestmark = pytest.mark.timeout(300)

JAVA_S = 60
FIRST = ConsumeFromWhere.FIRST_OFFSET


class Gateway(NamedTuple):
    """Addresses of a gateway.

    Attributes:
        namesrv: Where clients by remoting find it.
        grpc: Where clients by gRPC do.
    """

    namesrv: str
    grpc: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with ProcessCluster(folder, broker_settings=CHECKS_SOON) as cluster:
        cluster.start_schedule()
        yield cluster


@pytest.fixture(scope="module")
def gateway(cluster, tmp_path_factory) -> Iterator[Gateway]:
    """A gateway with two workers."""
    folder = tmp_path_factory.mktemp("gateway")
    quoted = ", ".join(f'"{one.endpoint}"' for one in cluster.namesrvs)
    namesrv, brokers, grpc = free_ports(3)
    settings = {
        "namesrv_addr": f"[{quoted}]",
        "store_path_root_dir": str(folder / "data"),
        "namesrv_port": str(namesrv),
        "broker_port_base": str(brokers),
        "vip_ports": "false",
        "grpc_port": str(grpc),
        "workers": "2",
    }
    processes = [
        RoleProcess("gateway", {**settings, "worker": number}, folder / "gateway.log")
        for number in "12"
    ]
    found = Gateway(f"127.0.0.1:{namesrv}", f"127.0.0.1:{grpc}")
    wait_for_broker(found.namesrv)
    yield found
    assert [one.stop() for one in processes] == [0, 0]
    assert "Traceback" not in (folder / "gateway.log").read_text()


@contextmanager
def java(folder: Path, jars: Path, program: str, *arguments: str) -> Iterator[list[list[str]]]:
    """A program that has said that it is done, and runs; yields what happened."""
    options = (f"-Duser.home={folder}", "-Drocketmq.client.rebalance.waitInterval=1000")
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [*java_command(program, jars, *options), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        said: list[list[str]] = []
        try:
            for line in process.stdout:
                said.append(line.rstrip("\n").split("\t"))
                if said[-1] == ["done"]:
                    break
            else:
                raise AssertionError(f"{said}\n{(folder / 'errors').read_text()[-2_000:]}")
            yield said
            process.communicate(timeout=JAVA_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    assert process.returncode == 0


def sees_what_was_sent(namesrv_addr: str) -> StoredMessage:
    """Reads all messages of a topic; the one named "one"."""
    with PullConsumer("audit", namesrv_addr=namesrv_addr, consume_from_where=FIRST) as one:
        one.subscribe("j-plain")
        read: dict[bytes, StoredMessage] = {}
        while len(read) < 6:
            read |= {message.body: message for message in one.poll(1_000)}
    assert b"recalled" not in read
    return read[b"one"]


def is_asked_and_consumes_at_once(namesrv_addr: str, message: StoredMessage) -> None:
    """A consumer shows its stacks, and consumes a message that is handed to it."""
    with MemberClient(namesrv_addr) as members:
        (member,) = members.connections("j-push")
        info = members.running_info("j-push", member.client_id, with_stacks=True)
        assert "RocketmqMessageConsumption" in info.stacks
        handed = members.hand_to(message.message_id, "j-push", member.client_id)
        assert handed.result == HandedResult.SUCCESS


def test_java_sends_and_consumes_by_all_kinds_of_calls(cluster, gateway, tmp_path, project_root):
    with AdminClient(cluster.namesrv_addr) as admin:
        for topic in "plain", "keyed", "bank":
            admin.create_topic(f"j-{topic}", queues=2)
    with GroupAdmin(cluster.namesrv_addr) as admin:
        own = GroupConfig("j-push", delivery="message", retry_delays="1s", retry_max_times=3)
        admin.create_group(own)
        admin.create_group(GroupConfig("j-fifo", delivery="fifo"))
    with Producer("python", namesrv_addr=cluster.namesrv_addr) as producer:
        producer.send(Message("j-plain", b"python", tag="old", properties={"price": "1"}))
    with java(tmp_path, client_jars(), "GrpcClient", gateway.grpc, "j") as said:
        message = sees_what_was_sent(cluster.namesrv_addr)
        is_asked_and_consumes_at_once(cluster.namesrv_addr, message)
    assert not unlike_rocketmq(project_root, "grpc", seen(said))
    (sent,) = [one[1] for one in said if one[0] == "sent"]
    got = [one[1:] for one in said if one[0] == "got"]
    assert len(got) == 31, "each once, but for the three that failed or were not acknowledged"
    assert {one[-1] for one in got if one[1] == "one"} == {sent}
    assert (message.tag, message.property("to")) == ("new", "größe")
    assert set(message.keys) == {"k1", "k2", sent}


def test_an_application_of_spring_boot_sends_and_listens(cluster, gateway, tmp_path):
    with AdminClient(cluster.namesrv_addr) as admin:
        for topic in "plain", "keyed", "bank", "asked":
            admin.create_topic(f"s-{topic}", queues=2)
    jars = rocketmq_jars("2.3.5", ("rocketmq-spring-boot-starter",))
    with java(tmp_path, jars, "SpringShop", gateway.namesrv) as said:
        pass
    got = {
        listener: [one[2:] for one in said if one[:2] == ["got", listener]]
        for listener in ("plain", "keyed", "bank")
    }
    assert sorted(got["plain"]) == [
        ["bad", "0", "new", "null"],
        ["bad", "1", "new", "null"],
        ["first", "0", "new", "null"],
        ["level", "0", "late", "null"],
        ["one", "0", "new", "größe"],
        ["second", "0", "new", "null"],
        ["time", "0", "late", "null"],
    ]
    for parity in 0, 1:
        bodies = [int(one[0]) for one in got["keyed"] if int(one[0]) % 2 == parity]
        assert bodies == list(range(parity, 12, 2))
    assert sorted(got["bank"]) == [["COMMIT", "7"], ["UNKNOWN", "7"]]
    assert [one for one in said if one[0] == "checked"] == [
        ["checked", '{"name":"UNKNOWN","price":7}']
    ]
    assert ["reply", "how much? 42"] in said

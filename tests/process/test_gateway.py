"""Unchanged clients of RocketMQ, old and new, by the gateway: they and mqmesh's share topics."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness.certificates import make_certificate
from harness.commands import CommandProcess, free_ports, free_ports_of_replicas
from harness.java import java_command
from harness.keys import credentials, user
from harness.oracle.client import client_answers
from harness.oracle.meant import unlike_rocketmq
from harness.oracle.rights import ADMIN, SHOP, play_rights
from harness.oracle.scenes import play
from harness.oracle.server import CHECKS_SOON, wait_for_broker
from harness.oracle.tools import MqAdmin, mqadmin, tool_answers
from harness.oracle.wire import Keys
from harness.patience import until
from harness.rocketmq import rocketmq_jars
from harness.secured import put_users, secured_folder

from mqmesh import (
    ConsumeFromWhere,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    SendResult,
)
from mqmesh.errors import BrokerNotAvailable
from mqmesh.roles.gateway.users import GatewayUser, write_users
from mqmesh.roles.supervisor.run_file import RoleEntry, read_record
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.dead_letters import DeadLetterClient
from mqmesh.security.access_list import Action, Rule, UserRole
from mqmesh.security.keys import load_credentials, save_credentials
from mqmesh.testing.processes import ProcessCluster, RoleProcess

pytestmark = pytest.mark.timeout(300)

JAVA_S = 200
QUIETLY = "-Drocketmq.client.logUseSlf4j=true"
OFTEN = "-Drocketmq.client.rebalance.waitInterval=1000"
"""Members look at their group each second, not each 20 s, which clients of 5 also wait at first."""
FIRST = ConsumeFromWhere.FIRST_OFFSET
SENT = {
    *("sync", "x" * 5_000, "batch 1", "batch 2", "late", "oneway"),
    *(f"async {number}" for number in range(20)),
}


class Java:
    """Programs of one version of RocketMQ's client."""

    def __init__(self, version: str, namesrv: str, jars: Path, *more: str) -> None:
        self.version = version.replace(".", "-")  # no dot may stand in the name of a group
        self.stored: list[str] = []
        options = (QUIETLY, *more, *((OFTEN,) if version[0] == "5" else ()))
        self._command = [*java_command("GatewayClient", jars, *options), namesrv]

    def run(self, job: str, topic: str) -> list[list[str]]:
        """Does a job to its end; what happened."""
        done = subprocess.run(
            [*self._command, job, topic],
            capture_output=True,
            text=True,
            timeout=JAVA_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        return lines_of(done.stdout)

    @contextmanager
    def consuming(self, topic: str, group: str, mode: str = "concurrently") -> Iterator[list]:
        """A consumer; yields what it got, which grows."""
        process = subprocess.Popen(
            [*self._command, "consume", topic, group, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        found: list[list[str]] = []
        output = process.stdout

        def read() -> None:
            for line in output:
                found.extend(fields[1:] for fields in lines_of(line) if fields[0] == "got")
                self.stored += [fields[1] for fields in lines_of(line) if fields[0] == "stored"]

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield found
        finally:
            process.stdin.close()
            try:
                process.wait(JAVA_S)
            finally:
                process.kill()
                reader.join()
                output.close()
        assert process.returncode == 0


def lines_of(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with ProcessCluster(folder, broker_settings=CHECKS_SOON) as cluster:
        cluster.start_schedule()
        yield cluster


def gateway_settings(cluster: ProcessCluster, folder: Path) -> dict[str, str]:
    """Settings of a gateway of a cluster, at ports that are free now."""
    quoted = ", ".join(f'"{one.endpoint}"' for one in cluster.namesrvs)
    namesrv, brokers = free_ports(2)
    return {
        "namesrv_addr": f"[{quoted}]",
        "store_path_root_dir": str(folder / "gateway"),
        "namesrv_port": str(namesrv),
        "broker_port_base": str(brokers),
        "vip_ports": "false",
        "grpc_port": "0",
    }


@pytest.fixture(scope="module", params=["4.9.8", "5.3.3"])
def version(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def gateway(cluster, version, tmp_path_factory) -> Iterator[str]:
    """Where clients find the name server; those of 5.x are served by two workers."""
    folder = tmp_path_factory.mktemp("gateway")
    workers = 2 if version[0] == "5" else 1
    settings = {**gateway_settings(cluster, folder), "workers": str(workers)}
    processes = [
        RoleProcess("gateway", {**settings, "worker": str(number)}, folder / f"{number}.log")
        for number in range(1, workers + 1)
    ]
    address = f"127.0.0.1:{settings['namesrv_port']}"
    wait_for_broker(address)
    yield address
    assert [one.stop() for one in processes] == [0] * workers


@pytest.fixture(scope="module")
def jars(version) -> Path:
    """Where the classes of a version are."""
    artifacts = {"4.9.8": ("rocketmq-tools",)}.get(version)
    return rocketmq_jars(version, artifacts) if artifacts else rocketmq_jars()


@pytest.fixture(scope="module")
def java(version, jars, gateway) -> Java:
    return Java(version, gateway, jars)


class Secured:
    """A cluster with security on, and a gateway with the users of ``rights``, by TLS, too.

    Attributes:
        namesrv: Where clients find the gateway.
        cluster: The cluster.
        credentials: File of the administrator.
        users_file: File of the gateway's users.
    """

    def __init__(self, folder: Path) -> None:
        keys = secured_folder(folder)
        namesrv = load_credentials(keys / "namesrv.toml")
        own, shop = credentials("gateway", namesrv), credentials("shop", namesrv)
        for one in own, shop:
            save_credentials(keys / f"{one.user}.toml", one)
        rule = Rule([Action.PUB, Action.SUB], topics=["shop-*"], groups=["shop-*"])
        put_users(keys, [user(own, UserRole.VIEW), user(shop, allow=[rule])])
        self.users_file = folder / "users.toml"
        self.users_file.touch(0o600)
        self.put_secret("secret of java")
        self.credentials = str(keys / "client.toml")
        self.cluster = ProcessCluster(folder, keys=keys)
        settings = {
            **gateway_settings(self.cluster, folder),
            "users_file": str(self.users_file),
            **make_certificate(folder),
            **self.cluster.security("gateway"),
        }
        self.namesrv = f"127.0.0.1:{settings['namesrv_port']}"
        self._gateway = RoleProcess("gateway", settings, folder / "gateway.log")
        wait_for_broker(self.namesrv, ADMIN)

    def put_secret(self, secret: str) -> None:
        """Another user ``java``, with the same rights, has this secret key from now on."""
        folder = self.users_file.with_name("security")
        users = {
            ADMIN: "client.toml",
            SHOP: "shop.toml",
            Keys("java", secret): "shop.toml",
        }
        rows = [
            GatewayUser(
                access_key=one.access, secret_key=one.secret, credentials=str(folder / path)
            )
            for one, path in users.items()
        ]
        self.users_file.write_text(write_users(rows))

    def close(self) -> None:
        """Ends all processes."""
        self._gateway.stop()
        self.cluster.close()


@pytest.fixture(scope="module")
def secured(tmp_path_factory) -> Iterator[Secured]:
    secured = Secured(tmp_path_factory.mktemp("s"))
    yield secured
    secured.close()


@pytest.mark.parametrize("version", ["4.9.8"], indirect=True)  # by one worker
def test_single_requests_are_answered_as_rocketmq_does(gateway, project_root):
    answers, _ = play(gateway)
    assert not unlike_rocketmq(project_root, "requests", answers)


@pytest.mark.parametrize("version", ["5.3.3"], indirect=True)
def test_the_java_client_sees_what_it_sees_at_rocketmq(gateway, project_root, tmp_path):
    assert not unlike_rocketmq(project_root, "client", client_answers(gateway, tmp_path))


def test_users_may_do_what_they_may_at_rocketmq(secured, project_root):
    assert not unlike_rocketmq(project_root, "rights", play_rights(secured.namesrv))


def test_what_java_sends_both_consume(cluster, java):
    topic = f"sent-{java.version}"
    address = cluster.namesrv_addr
    with AdminClient(address) as admin:
        admin.create_topic(topic, queues=2)
    with Producer("python", namesrv_addr=address) as producer:
        own = Message(topic, b"python", tag="own", keys=["p1", "p2"], properties={"to": "FR"})
        producer.send(own)
    said = java.run("send", topic)
    kinds = [fields[0] for fields in said]
    assert kinds.count("sent") == 24
    assert kinds.count("refused") == 1
    assert ["found", "1"] in said, "by a key"
    (recalled,) = [fields[1] for fields in said if fields[0] == "recalled"]
    assert recalled == ("by 5.x only" if java.version[0] == "4" else "true")
    assert "failed" not in kinds, said
    assert {fields[1] for fields in said if fields[0] == "sent"} == {"SEND_OK"}
    with java.consuming(topic, f"g-{java.version}") as got:
        until(lambda: {one[0] for one in got} == {*SENT, "python"} and len(got) >= len(SENT) + 2)
    by_body = {one[0]: one for one in got}
    assert by_body["sync"][1:6] == ["new", "k1 k2", "größe", "5", "0"]
    assert by_body["python"][1:4] == ["own", "p1 p2", "FR"]
    retried = [one for one in got if one[0] == "oneway"]
    assert [(one[5], one[6]) for one in retried] == [("0", topic), ("1", topic)]
    with PullConsumer("audit", namesrv_addr=address, consume_from_where=FIRST) as consumer:
        consumer.subscribe(topic)
        read = {}
        while len(read) < len(SENT) + 1:
            read |= {one.body.decode(): one for one in consumer.poll(1_000)}
    assert read.keys() == {*SENT, "python"}
    one = read["sync"]
    assert (one.tag, one.property("to"), one.flag) == ("new", "größe", 5)
    assert set(one.keys) >= {"k1", "k2"}


def test_java_and_python_share_the_queues_of_a_group(cluster, java):
    topic, group = f"shared-{java.version}", f"shared-{java.version}"
    address = cluster.namesrv_addr
    mine: list[str] = []
    with AdminClient(address) as admin:
        admin.create_topic(topic, queues=4)
    consumer = PushConsumer(group, namesrv_addr=address, consume_from_where=FIRST)
    consumer.subscribe(
        topic, listener=lambda messages: mine.extend(one.body.decode() for one in messages)
    )
    with (
        consumer,
        java.consuming(topic, group) as theirs,
        Producer("python", namesrv_addr=address) as producer,
    ):
        count = 0

        def both_have_queues() -> bool:
            nonlocal count
            for _ in range(8):
                producer.send(Message(topic, b"%d" % count))
                count += 1
            return bool(theirs) and bool(mine)

        until(both_have_queues, 120)  # clients of 5.x take up to 20 s
        until(lambda: len({*mine, *(one[0] for one in theirs)}) == count)
        settled_mine, settled_theirs, settled = len(mine), len(theirs), count
        for _ in range(100):
            producer.send(Message(topic, b"%d" % count))
            count += 1
        until(lambda: len({*mine, *(one[0] for one in theirs)}) == count)
        late = mine[settled_mine:] + [one[0] for one in theirs[settled_theirs:]]
    assert sorted(late, key=int) == [str(number) for number in range(settled, count)]
    assert len(mine) > settled_mine
    assert len(theirs) > settled_theirs


@pytest.mark.parametrize("version", ["4.9.8"], indirect=True)  # 5.3.3: see above
def test_an_orderly_consumer_of_java_keeps_the_order(cluster, java):
    topic, group = f"orderly-{java.version}", f"orderly-{java.version}"
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(topic, queues=2)
    with Producer("python", namesrv_addr=cluster.namesrv_addr) as producer:
        for number in range(40):
            tag = {7: "bad", 11: "poison"}.get(number, "good")
            producer.send(Message(topic, b"%d" % number, tag=tag, sharding_key=str(number % 5)))
    with (
        java.consuming(topic, group, "orderly") as got,
        DeadLetterClient(cluster.namesrv_addr) as dead,
    ):
        until(lambda: len(got) == 43)
        until(lambda: [one.queue_offset for one in dead.scan(group)] == [0])
    for queue in "0", "1":
        bodies = [int(one[0]) for one in got if one[7] == queue]
        assert bodies == sorted(bodies)
    assert [[one[0] for one in got].count(name) for name in ("7", "11", "12")] == [2, 3, 1]


@pytest.mark.parametrize("version", ["4.9.8"], indirect=True)
def test_transactions_of_java_end_as_it_says(cluster, java):
    topic = f"bank-{java.version}"
    with AdminClient(cluster.namesrv_addr) as admin:
        admin.create_topic(topic, queues=1)
    said = java.run("transact", topic)
    (asked,) = [one for one in said if one[0] == "asked"]
    assert asked[1:3] == ["UNKNOW", topic]
    assert asked[3] in [one[1] for one in said if one[0] == "sent"]
    with PullConsumer("audit", namesrv_addr=cluster.namesrv_addr, consume_from_where=FIRST) as one:
        one.subscribe(topic)
        bodies: set[bytes] = set()
        while len(bodies) < 2:
            bodies |= {message.body for message in one.poll(1_000)}
        assert bodies == {b"COMMIT_MESSAGE", b"UNKNOW"}
        assert not one.poll(100)


def change_what_is_shared(admin: MqAdmin, broker: str, place: str) -> None:
    """Settings, key/value pairs and permissions."""
    admin.well("updateBrokerConfig", "-b", place, "-k", "transactionCheckMax", "-v", "14")
    assert "transactionCheckMax" in admin.well("getBrokerConfig", "-b", place)
    refused = admin("updateBrokerConfig", "-b", place, "-k", "nothing", "-v", "1")
    assert "is no setting" in refused
    admin.well("updateKvConfig", "-s", "shop", "-k", "a", "-v", "1")
    admin.well("deleteKvConfig", "-s", "shop", "-k", "a")
    assert " OK, " in admin.well("wipeWritePerm", "-b", broker)
    assert " OK, " in admin.well("addWritePerm", "-b", broker)
    admin.well("getNamesrvConfig")
    admin.well("cleanExpiredCQ", "-b", place)
    admin.well("cleanUnusedTopic", "-b", place)


def look_at_the_rest(admin: MqAdmin, topic: str, group: str, place: str) -> None:
    """Routes, progress of all groups and statistics."""
    assert place in admin.well("topicRoute", "-t", topic)
    assert admin.well("topicClusterList", "-t", topic).split() == ["DefaultCluster"]
    assert group in admin.well("consumerProgress")
    admin.well("brokerConsumeStats", "-b", place)
    assert group in admin.well("statsAll", "-t", topic)


def look_at_messages(admin: MqAdmin, topic: str, broker: str, sent: SendResult) -> None:
    """Messages and queues."""
    queue = str(sent.message_queue.queue_id)
    assert "hello" in admin.well("printMsg", "-t", topic, "-d", "true")
    assert sent.message_id in admin.well("queryMsgByKey", "-t", topic, "-k", "key1")
    assert "key1" in admin.well("queryMsgByUniqueKey", "-t", topic, "-i", sent.message_id)
    place = ("-b", broker, "-i", queue, "-o", "0", "-c", "1")
    assert "hello" in admin.well("consumeMessage", "-t", topic, *place)
    assert "max: 1, min: 0" in admin.well("queryCq", "-t", topic, "-q", queue, "-i", "0")


@pytest.fixture
def admin(gateway, tmp_path) -> Iterator[MqAdmin]:
    """Commands of mqadmin 4.9.8; those of 5.3.3 are run by ``OracleClient.java``."""
    with mqadmin(gateway, tmp_path) as admin:
        yield admin


@pytest.mark.parametrize("version", ["4.9.8"], indirect=True)
def test_mqadmin_prints_what_it_prints_at_rocketmq(admin, project_root, tmp_path):
    assert not unlike_rocketmq(project_root, "tools", tool_answers(admin, tmp_path))


@pytest.mark.parametrize("version", ["4.9.8"], indirect=True)
def test_mqadmin_does_its_jobs(cluster, admin):
    topic, group, address = "admin", "admin-group", cluster.namesrv_addr
    got: list[bytes] = []
    consumer = PushConsumer(group, namesrv_addr=address, consume_from_where=FIRST)
    consumer.subscribe(topic, listener=lambda messages: got.extend(one.body for one in messages))
    said = admin.well("updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", "2", "-w", "2")
    assert "success" in said
    said = admin.well("updateSubGroup", "-c", "DefaultCluster", "-g", group, "-r", "3")
    assert "success" in said
    brokers = admin.well("clusterList")
    (line,) = [line for line in brokers.splitlines() if line.startswith("DefaultCluster")]
    broker, place = line.split()[1], line.split()[3]
    assert admin.well("topicList").split().count(topic) == 1
    with consumer, Producer("admin-p", namesrv_addr=address) as producer:
        sent = producer.send(Message(topic, b"hello", tag="a", keys=["key1"]))
        until(lambda: got == [b"hello"])
        rows = admin.well("topicStatus", "-t", topic).splitlines()[1:]
        ends = [row.split()[3] for row in rows if row.startswith(broker)]
        assert sorted(ends) == ["0", "1"]
        members = admin.well("consumerConnection", "-g", group)
        assert topic in members
        assert "PYTHON" in members
        until(lambda: "Diff Total: 0" in admin.well("consumerProgress", "-g", group))
        assert "@" in admin.well("consumerStatus", "-g", group, "-s")
        assert "PYTHON" in admin.well("producerConnection", "-g", "admin-p", "-t", topic)
        state = admin.well("brokerStatus", "-b", place)
        assert "getTransferedTps" in state
        assert "mqmesh" in state
        queue = str(sent.message_queue.queue_id)
        found = admin.well("queryMsgByOffset", "-t", topic, "-b", broker, "-i", queue, "-o", "0")
        assert "CONSUMED" in found
        (offset_id,) = [line.split()[1] for line in found.splitlines() if "OffsetID" in line]
        assert "key1" in admin.well("queryMsgById", "-i", offset_id)
        look_at_messages(admin, topic, broker, sent)
        look_at_the_rest(admin, topic, group, place)
        assert "SEND_OK" in admin.well("sendMessage", "-t", topic, "-p", "by mqadmin")
        until(lambda: b"by mqadmin" in got)
        said = admin.well("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
        assert broker in said
        until(lambda: got.count(b"hello") == 2)
    change_what_is_shared(admin, broker, place)
    other = ("-d", f"{group}-2", "-o", "true")
    admin.well("cloneGroupOffset", "-s", group, "-t", topic, *other)
    admin.well("deleteSubGroup", "-c", "DefaultCluster", "-g", group)
    assert "success" in admin.well("deleteTopic", "-c", "DefaultCluster", "-t", topic)
    assert topic not in admin.well("topicList").split()


def test_requests_have_replies_of_java_and_of_python(cluster, java):
    topic, address = f"asked-{java.version}", cluster.namesrv_addr
    with AdminClient(address) as admin:
        admin.create_topic(topic, queues=1)
    with java.consuming(topic, f"replies-{java.version}", "replying") as got:
        with Producer("python-asks", namesrv_addr=address) as producer:
            reply = producer.request(Message(topic, b"how much?"), timeout_ms=60_000)
            assert (reply.body, reply.property("from")) == (b"42", "java")
        assert ["reply", "42", "java"] in java.run("request", topic)
        assert [one[0] for one in got] == ["how much?"] * 2
    with Producer("python-replies", namesrv_addr=address) as producer:

        def answer(messages):
            for one in messages:
                producer.reply(one, b"43", properties={"from": "python"})

        consumer = PushConsumer(
            f"replies-{java.version}", namesrv_addr=address, consume_from_where=FIRST
        )
        consumer.subscribe(topic, listener=answer)
        with consumer:
            assert ["reply", "43", "python"] in java.run("request", topic)


def test_java_acts_with_the_rights_of_its_user_and_without_none(secured, version, jars):
    topic, keys = f"shop-{version.replace('.', '-')}", secured.credentials
    address = secured.cluster.namesrv_addr
    with AdminClient(address, credentials=keys) as admin:
        admin.create_topic(topic, queues=1)
        admin.create_topic(f"other-{topic}", queues=1)
    secured.put_secret("first secret")
    tries = [
        f"{topic},java,first secret",
        f"other-{topic},java,first secret",
        f"{topic},java,wrong secret",
        f"{topic},nobody,first secret",
        topic,
    ]
    java = Java(version, secured.namesrv, jars)

    def outcomes() -> list[list[str]]:
        said = java.run("try", ";".join(tries))
        return [one for one in said if one[0] in ("sent", "refused")]

    sent, other, *wrong = until(lambda: (found := outcomes())[0][0] == "sent" and found)
    assert sent[:2] == ["sent", "SEND_OK"]
    assert "CODE: 16" in other[1]
    assert "PUB" in other[1]
    assert len(wrong) == 3
    assert all("No route info" in one[1] for one in wrong), wrong
    signed = ("-Daccess.key=java", "-Dsecret.key=first secret", "-Dtls.enable=true")
    encrypted = Java(version, secured.namesrv, jars, *signed)
    with encrypted.consuming(topic, f"shop-g-{encrypted.version}") as got:
        until(lambda: [one[0] for one in got] == ["tried"])
    with DeadLetterClient(address, credentials=keys) as dead:
        assert not list(dead.scan(f"shop-g-{encrypted.version}"))


class ElectedUp:
    """`mqmesh up` with three replicas and a gateway, whose processes are started again.

    Attributes:
        namesrv: Name servers.
        gateway: Where clients of RocketMQ find the name server.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        namesrv, coordinator, broker = free_ports_of_replicas()
        gateway, of_brokers = free_ports(2)
        settings = {
            "namesrv": f"[{{listen_port={namesrv}}}]",
            "coordinator.listen_port": coordinator,
            "broker.0.listen_port": broker,
            "gateway.namesrv_port": gateway,
            "gateway.broker_port_base": of_brokers,
            "gateway.vip_ports": "false",
            "gateway.grpc_port": 0,
        }
        said = (("--set", f"{key}={value}") for key, value in settings.items())
        asked = ("up", "--data-dir", str(folder), "--replicas", "3", "--gateway")
        self.process = CommandProcess(*asked, *(one for pair in said for one in pair))
        self.process.expect("cluster is ready", 60)
        self.namesrv, self.gateway = f"127.0.0.1:{namesrv}", f"127.0.0.1:{gateway}"

    def replicas(self) -> tuple[str, str]:
        """Names of the master's process, and of another replica's."""
        with AdminClient(self.namesrv) as admin:
            (group,) = admin.cluster().brokers
        master = f"tcp://{group.addresses[0].tcp}"
        names = {one.endpoint: one.name for one in self._roles() if one.role == "broker"}
        return names.pop(master), next(iter(names.values()))

    def kill(self, name: str) -> None:
        """Kills a process, which is there again at the end."""
        (before,) = [one for one in self._roles() if one.name == name]
        os.kill(before.pid, signal.SIGKILL)

        def is_again() -> bool:
            (now,) = [one for one in self._roles() if one.name == name]
            return now.pid != before.pid and now.state == "running"

        until(is_again, 60)

    def _roles(self) -> list[RoleEntry]:
        record = read_record(self._folder)
        assert record is not None
        return record.roles


def makes_topic(namesrv: str, topic: str) -> bool:
    """Makes a topic; False while too few replicas are in sync."""
    with AdminClient(namesrv) as admin:
        try:
            return bool(admin.create_topic(topic, queues=8, exist_ok=True))
        except BrokerNotAvailable:
            return False


@pytest.mark.parametrize("version", ["5.3.3"], indirect=True)
def test_nothing_acknowledged_is_lost_when_gateway_broker_and_master_are_killed(
    version, jars, tmp_path_factory
):
    """Two members in Java and two in Python share eight queues."""
    up = ElectedUp(tmp_path_factory.mktemp("k") / "d")
    address = up.namesrv
    java = Java(version, up.gateway, jars)
    mine: list[tuple[str, str]] = []

    def member(name: str) -> PushConsumer:
        consumer = PushConsumer("shared-g", namesrv_addr=address, consume_from_where=FIRST)
        consumer.subscribe(
            "shared",
            listener=lambda messages: mine.extend((one.body.decode(), name) for one in messages),
        )
        return consumer

    with ExitStack() as stack:
        stack.callback(up.process.close)
        until(lambda: makes_topic(address, "shared"))
        producer = stack.enter_context(Producer("python", namesrv_addr=address))
        for name in "python 1", "python 2":
            stack.enter_context(member(name))
        theirs = stack.enter_context(java.consuming("shared", "shared-g", "streaming"))
        sent: list[str] = []

        def got() -> list[tuple[str, str]]:
            """Body and member of all deliveries."""
            return [*mine, *((one[0], one[8]) for one in theirs)]

        def goes_on() -> None:
            count = len(java.stored)
            until(lambda: len(java.stored) >= count + 20, 120)

        def send(count: int) -> None:
            for _ in range(count):
                body = f"python {len(sent)}"
                producer.send(Message("shared", body.encode()), timeout_ms=30_000)
                sent.append(body)

        def each_has_two_queues() -> bool:
            """The next ten messages of each queue come once, and to each member those of two."""
            send(80)
            late = set(sent[-80:])
            until(lambda: late <= {body for body, _ in got()})
            members = Counter(member for body, member in got() if body in late)
            return sorted(members.values()) == [20] * 4

        until(each_has_two_queues, 120)
        goes_on()
        master, follower = up.replicas()
        for name in "gateway", follower, master:
            up.kill(name)
            send(50)
            goes_on()
        until(lambda: {*java.stored, *sent} <= {body for body, _ in got()}, 120)
        until(each_has_two_queues, 120)

"""Starts and stops the servers of the comparison, each in a fresh folder, with its defaults.

Kafka comes as jars from Maven Central (``mvn`` and Java 17 or later are needed), Redis and
beanstalkd from the distribution, NATS from there or by Go, mqmesh from the running environment.
A missing server is left out of the table, with a line that says how to install it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from orders import QUEUES, topic_names

from mqmesh.errors import MQMeshError
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.ha_admin import HaAdmin

KAFKA_VERSION = "4.0.0"
START_TIMEOUT_S = 60.0
REPLICAS = 3
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mqmesh-peers"

_POM = f"""<project><modelVersion>4.0.0</modelVersion><groupId>peers</groupId>
<artifactId>peers</artifactId><version>1</version><dependencies><dependency>
<groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{KAFKA_VERSION}</version></dependency></dependencies></project>"""


class Missing(Exception):
    """A system cannot be had on this machine."""


Running = tuple[str, list[int]]
"""The address for clients, and the sessions (process ids of leaders) of the servers."""


@contextmanager
def mqmesh(folder: Path, topics: int) -> Iterator[Running]:
    """A name server and a broker."""
    with ExitStack() as stack:
        namesrv, address = _role(stack, folder, "namesrv", "listen_port=0")
        store = f"store_path_root_dir={folder / 'store'}"
        broker, _ = _role(
            stack, folder, "broker", f'namesrv_addr=["{address}"]', "listen_port=0", store
        )
        _make_topics(address, topics)
        yield address, [namesrv, broker]


@contextmanager
def mqmesh_replicas(folder: Path, topics: int) -> Iterator[Running]:
    """Three replicas that elect their master and all acknowledge each message."""
    with ExitStack() as stack:
        namesrv, address = _role(stack, folder, "namesrv", "listen_port=0")
        coordinator, where = _role(
            stack, folder, "coordinator", "listen_port=0", f"data_dir={folder / 'coordinator'}"
        )
        settings = [
            f'namesrv_addr=["{address}"]',
            "listen_port=0",
            "ha.mode=auto",
            "ha.ack_replicas=all",
            f"ha.total_replicas={REPLICAS}",
            f"ha.coordinator=embedded://{where}",
        ]
        brokers = []
        for number in range(1, REPLICAS + 1):
            store = f"store_path_root_dir={folder / f'store-{number}'}"
            broker, _ = _role(stack, folder, "broker", *settings, f"broker_id={number}", store)
            brokers.append(broker)

        def in_sync() -> bool:
            try:
                with HaAdmin(address) as admin:
                    leaders = [one.status for one in admin.ha_status() if one.broker_id == 0]
            except MQMeshError:
                return False
            return any(one is not None and len(one.in_sync) == REPLICAS for one in leaders)

        _until(in_sync, "three replicas")
        _make_topics(address, topics)
        yield address, [namesrv, coordinator, *brokers]


def _role(stack: ExitStack, folder: Path, role: str, *settings: str) -> tuple[int, str]:
    """Starts a process of mqmesh; returns its id, and the address that it listens on."""
    command = [sys.executable, "-m", "mqmesh.cli", role]
    for setting in settings:
        command += ["--set", setting]
    process, line = stack.enter_context(_server(command, folder, "READY role="))
    return process.pid, line.split("endpoint=tcp://")[1].split()[0]


def _make_topics(address: str, topics: int) -> None:
    def made() -> bool:
        try:
            with AdminClient(address) as admin:
                admin.create_topics(topic_names(topics), queues=QUEUES, exist_ok=True)
        except MQMeshError:
            return False
        return True

    _until(made, "topics of mqmesh")


@contextmanager
def redis(folder: Path, topics: int) -> Iterator[Running]:
    """A Redis that appends to its file and syncs it every second."""
    program = _program("redis-server", "Debian: apt install redis-server")
    path = folder / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(path), "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    with _server(command, folder, "eady to accept connections") as (process, _):
        yield str(path), [process.pid]


@contextmanager
def beanstalkd(folder: Path, topics: int) -> Iterator[Running]:
    """A beanstalkd that writes its log and syncs it every second."""
    program = _program("beanstalkd", "Debian: apt install beanstalkd")
    path = folder / "beanstalkd.sock"
    command = [program, "-l", f"unix:{path}", "-b", str(folder), "-f", "1000"]
    with _server(command, folder, None) as (process, _):
        _until(path.exists, "beanstalkd")
        yield str(path), [process.pid]


@contextmanager
def nats(folder: Path, topics: int) -> Iterator[Running]:
    """A NATS server with JetStream on files, which it syncs every two minutes."""
    how = "go install github.com/nats-io/nats-server/v2@latest; Debian: apt install nats-server"
    program = _program("nats-server", how)
    port = _free_port()
    command = [program, "-js", "-sd", str(folder), "-a", "127.0.0.1", "-p", str(port)]
    with _server(command, folder, "Server is ready") as (process, _):
        yield f"nats://127.0.0.1:{port}", [process.pid]


@contextmanager
def kafka(folder: Path, topics: int) -> Iterator[Running]:
    """One Kafka node that is broker and controller."""
    classpath = f"{_kafka_jars()}/*"
    port, controller = _free_port(), _free_port()
    settings = folder / "server.properties"
    settings.write_text(
        f"""process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
log.dirs={folder / "kafka"}
num.partitions={QUEUES}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
"""
    )
    java = ["java", "-Xmx1g", "-Xms1g", "-cp", classpath]
    form = [*java, "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAA"]
    subprocess.run([*form, "-c", str(settings)], check=True, capture_output=True)
    command = [*java, "kafka.Kafka", str(settings)]
    with _server(command, folder, None) as (process, _):
        _until(lambda: _listens(port), "kafka")
        _make_kafka_topics(f"127.0.0.1:{port}", topics)
        yield f"127.0.0.1:{port}", [process.pid]


def _make_kafka_topics(address: str, topics: int) -> None:
    from confluent_kafka import admin

    client = admin.AdminClient({"bootstrap.servers": address})
    made = client.create_topics([admin.NewTopic(one, QUEUES, 1) for one in topic_names(topics)])
    for one in made.values():
        one.result(START_TIMEOUT_S)


SERVERS: dict[str, Callable[[Path, int], AbstractContextManager[Running]]] = {
    "mqmesh": mqmesh,
    "redis": redis,
    "kafka": kafka,
    "nats": nats,
    "beanstalkd": beanstalkd,
}


def _program(name: str, how: str) -> str:
    go = Path(os.environ.get("GOPATH", Path.home() / "go")) / "bin"
    program = shutil.which(name) or shutil.which(name, path=str(go))
    if program is None:
        raise Missing(f"{name} is not installed ({how})")
    return program


def _kafka_jars() -> Path:
    if shutil.which("java") is None or shutil.which("mvn") is None:
        raise Missing("Kafka needs java and mvn (Debian: apt install default-jre-headless maven)")
    jars = CACHE / f"kafka-{KAFKA_VERSION}"
    if not (jars / "complete").exists():
        jars.mkdir(parents=True, exist_ok=True)
        (jars / "pom.xml").write_text(_POM)
        print(f"fetching Kafka {KAFKA_VERSION} from Maven Central into {jars}", file=sys.stderr)
        copy = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        if subprocess.run(copy, cwd=jars, stdout=subprocess.DEVNULL).returncode != 0:
            raise Missing("Maven could not fetch Kafka")
        (jars / "complete").touch()
    return jars


@contextmanager
def _server(
    command: list[str], folder: Path, ready: str | None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    log = folder / f"{Path(command[0]).name}-{time.monotonic_ns()}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    try:
        line = ""
        if ready is not None:

            def said() -> bool:
                nonlocal line
                found = [one for one in log.read_text().splitlines() if ready in one]
                line = found[0] if found else ""
                return bool(found) or process.poll() is not None

            _until(said, command[0])
            if not line:
                raise RuntimeError(f"{command[0]} ended:\n{log.read_text()[-2000:]}")
        yield process, line
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what} did not start within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0

"""Starts and stops the servers of the comparison, each in a fresh folder, with its defaults.

Kafka comes as jars from Maven Central (``mvn`` and Java 17 or later are needed), Redis from the
distribution (``redis-server``), mqmesh from the running environment. What is missing is left
out of the table, with a line that says so.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orders import QUEUES, TOPIC

KAFKA_VERSION = "4.0.0"
START_TIMEOUT_S = 60.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mqmesh-peers"

_POM = f"""<project><modelVersion>4.0.0</modelVersion><groupId>peers</groupId>
<artifactId>peers</artifactId><version>1</version><dependencies><dependency>
<groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{KAFKA_VERSION}</version></dependency></dependencies></project>"""


class Missing(Exception):
    """A system cannot be had on this machine."""


@contextmanager
def mqmesh(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """A name server and a broker.

    Yields:
        The address for clients, and the process ids of the servers.
    """
    cli = [sys.executable, "-m", "mqmesh.cli"]
    ready = "READY role="
    with _server([*cli, "namesrv", "--set", "listen_port=0"], folder, ready) as (namesrv, line):
        address = line.split("endpoint=tcp://")[1].split()[0]
        settings = [f'namesrv_addr=["{address}"]', "listen_port=0"]
        settings += [f"store_path_root_dir={folder / 'store'}"]
        command = [*cli, "broker"]
        for setting in settings:
            command += ["--set", setting]
        with _server(command, folder, ready) as (broker, _):
            make = [*cli, "--namesrv", address, "topic", "create", TOPIC, "-q", str(QUEUES)]
            _until(lambda: subprocess.run(make, capture_output=True).returncode == 0, "mqmesh")
            yield address, [namesrv.pid, broker.pid]


@contextmanager
def redis(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """A Redis that appends to its file and syncs it every second."""
    program = shutil.which("redis-server")
    if program is None:
        raise Missing("redis-server is not installed (Debian: apt install redis-server)")
    path = folder / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(path), "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    with _server(command, folder, "eady to accept connections") as (process, _):
        yield str(path), [process.pid]


@contextmanager
def kafka(folder: Path) -> Iterator[tuple[str, list[int]]]:
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
        yield f"127.0.0.1:{port}", [process.pid]


SERVERS: dict[str, Callable[[Path], object]] = {"mqmesh": mqmesh, "redis": redis, "kafka": kafka}


def _kafka_jars() -> Path:
    if shutil.which("java") is None or shutil.which("mvn") is None:
        raise Missing("Kafka needs java and mvn")
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

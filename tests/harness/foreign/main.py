"""RocketMQ's clients for Python, Node.js and Go, and mqmesh's, send to each other by a gateway."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.commands import free_ports
from harness.oracle.server import CHECKS_SOON, mqmesh_gateway
from harness.patience import until
from mqmesh import (
    LocalTransactionState,
    Message,
    Producer,
    SimpleConsumer,
    StoredMessage,
    TransactionListener,
    TransactionProducer,
)
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin

PYTHON = "rocketmq-python-client==5.1.2"
NODEJS = "rocketmq-client-nodejs@1.0.8"
GOLANG = "github.com/apache/rocketmq-client-go/v2@v2.1.3-0.20251226070945-2173d070fd1b"
HERE = Path(__file__).parent
CONSUMERS = {
    "python": ("simple", "push"),
    "nodejs": ("simple", "push"),
    "golang": ("concurrent", "push"),
}
"""Roles of each client's consumers; "push" keeps the order of message groups."""
NAMES = (*CONSUMERS, "mqmesh")
TOPICS = ("plain", "keyed", "bank")
MESSAGES = [
    ("plain", "normal", 0, ""),
    ("plain", "again", 0, ""),
    ("plain", "recalled", 5, ""),
    ("plain", "delayed", 6, ""),
    *(("keyed", f"{group}{number}", 0, group) for number in range(3) for group in "ab"),
    ("bank", "committed", 0, ""),
    ("bank", "rolled back", 0, ""),
    ("bank", "checked", 0, ""),
]
"""Topic, body, delay in seconds, and message group; what comes of it stands in the body."""

GROUPS = {body: group for _, body, _, group in MESSAGES}
BODIES = [*(GROUPS.keys() - {"recalled", "rolled back"}), "again"]
"""Messages that each consumer gets of each sender: "again" twice, for it fails once."""

PATIENCE_S = 120.0


def install(folder: Path) -> None:
    """Gets the clients from PyPI, npm and the Go module proxy."""
    shutil.copy(HERE / "by_golang.go", folder)
    for command in (
        [sys.executable, "-m", "venv", "venv"],
        ["venv/bin/pip", "install", "--quiet", "--disable-pip-version-check", PYTHON],
        ["npm", "install", "--silent", "--no-audit", "--no-fund", NODEJS],
        ["go", "mod", "init", "foreign"],
        ["go", "get", GOLANG],
        ["go", "build", "-o", "golang", "by_golang.go"],
    ):
        subprocess.run(command, cwd=folder, check=True)


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Runs a cluster with a gateway, topics and groups.

    Yields:
        Addresses: of mqmesh's name server, and the gateway's by remoting and by gRPC.
    """
    (port,) = free_ports(1)
    with mqmesh_gateway(folder, CHECKS_SOON, grpc_port=port) as (remoting, namesrv_addr):
        with AdminClient(namesrv_addr) as admin:
            for topic in TOPICS:
                admin.create_topic(topic, queues=2)
        with GroupAdmin(namesrv_addr) as groups:
            for name in ("python", "nodejs"):
                own = GroupConfig(f"{name}-push", delivery="fifo", retry_delays="1s")
                groups.create_group(own)
            groups.create_group(GroupConfig("golang-concurrent", retry_delays="1s"))
        yield namesrv_addr, remoting, f"127.0.0.1:{port}"


@contextmanager
def client(folder: Path, name: str, role: str, address: str) -> Iterator[Path]:
    """Runs a program of a client; yields the file of what it says."""
    program = {
        "python": [str(folder / "venv/bin/python"), "-P", str(HERE / "by_python.py")],
        "nodejs": ["node", str(HERE / "by_nodejs.js")],
        "golang": [str(folder / "golang")],
    }[name]
    said = folder / f"{name}-{role}"
    home = {"HOME": str(folder), "PYTHONUTF8": "1"}  # their logs go there
    with said.open("w") as out:
        process = subprocess.Popen(
            [*program, role, address, json.dumps(MESSAGES)],
            cwd=folder,
            env=os.environ | home,
            stdin=subprocess.PIPE,
            stdout=out,
        )
    try:
        yield said
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{said.name} ended with {process.returncode}")


def wait_error(said: Path, word: str, count: int) -> str:
    """Waits until a client has said something so often; why it has not, "" if it has."""
    try:
        until(lambda: said.read_text().count(word) >= count, PATIENCE_S)
    except AssertionError as error:
        return str(error)
    return ""


@contextmanager
def sent(namesrv_addr: str) -> Iterator[None]:
    """Sends all by mqmesh's client, which is there for the check-back until this ends."""
    with (
        Producer("mqmesh", namesrv_addr=namesrv_addr) as producer,
        TransactionProducer("mqmesh-bank", Listener(), namesrv_addr=namesrv_addr) as bank,
    ):
        for topic, body, delay_s, group in MESSAGES:
            due = int(time.time() + delay_s) * 1_000
            message = Message(
                topic,
                f"mqmesh:{body}".encode(),
                tag="new",
                keys=["k1"],
                properties={"to": "größe", "due": str(due)},
                sharding_key=group or None,
                deliver_at_ms=due if delay_s else 0,
            )
            if topic == "bank":
                bank.send_message_in_transaction(message)
            elif (sent := producer.send(message)) and body == "recalled":
                producer.cancel_delayed(sent)
        yield


class Listener(TransactionListener):
    """Ends of transactions, by the body; one is left to the check-back."""

    def execute_local_transaction(self, message: Message, arg: object) -> LocalTransactionState:
        return {
            b"mqmesh:committed": LocalTransactionState.COMMIT,
            b"mqmesh:rolled back": LocalTransactionState.ROLLBACK,
        }.get(message.body, LocalTransactionState.UNKNOWN)

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        assert message.body == b"mqmesh:checked"
        return LocalTransactionState.COMMIT


def receive(namesrv_addr: str, said: Path) -> None:
    """Receives all by mqmesh's client, and writes it as the others do."""
    deadline, left = time.monotonic() + PATIENCE_S, len(BODIES) * len(NAMES)
    with (
        SimpleConsumer("mqmesh-simple", namesrv_addr=namesrv_addr) as consumer,
        said.open("w") as out,
    ):
        for topic in TOPICS:
            consumer.subscribe(topic)
        while left > 0 and time.monotonic() < deadline:
            for one in consumer.receive(wait_ms=1_000):
                shown = one.tag, one.property("to"), one.property("due"), one.sharding_key or ""
                body, left = one.body.decode(), left - 1
                print("got", int(time.time() * 1_000), body, *shown, sep="\t", file=out)
                if one.delivery_attempt > 1 or not body.endswith(":again"):
                    consumer.ack(one)
                else:
                    consumer.nack(one, delay_ms=1_000)


def delivery_error(said: Path, sender: str) -> str:
    """Compares what a consumer got of a sender with what it should have; "" if that is equal."""
    lines = [line.split("\t")[1:] for line in said.read_text().splitlines()]
    got = [one for one in lines if one[1].startswith(f"{sender}:")]
    bodies = [one[1].partition(":")[2] for one in got]
    if sorted(bodies) != sorted(BODIES):
        return f"got {bodies}"
    for body, (when, _, tag, to, due, group) in zip(bodies, got, strict=True):
        if (tag, to, group) != ("new", "größe", GROUPS[body]) or int(when) < int(due):
            return f"got {body}: {(when, tag, to, due, group)}"
    for group in "ab" if said.name.endswith("-push") else "":
        order = [body for body in bodies if GROUPS[body] == group]
        if order != sorted(order):
            return f"got {order}"
    return ""


def left_over_error(groups: GroupAdmin, group: str) -> str:
    """Waits until a group has nothing left; why it has, "" if it has not, nor dead letters."""
    try:
        until(lambda: groups.progress(group).lag == 0)
    except AssertionError as error:
        return str(error)
    dead = groups.progress(group).dead
    return f"{dead} dead letters" if dead else ""


def run(folder: Path) -> Iterator[tuple[str, str]]:
    """Runs all clients; yields each case, and what was wrong."""
    with cluster(folder) as (namesrv_addr, remoting, grpc), ExitStack() as stack:
        addresses = {"golang": remoting}
        for name in CONSUMERS:
            address = addresses.get(name, grpc)
            said = stack.enter_context(client(folder, name, "send", address))
            yield f"{name} sends", wait_error(said, "sent", 1)
        stack.enter_context(sent(namesrv_addr))
        consumers = [
            stack.enter_context(client(folder, name, role, addresses.get(name, grpc)))
            for name, roles in CONSUMERS.items()
            for role in roles
        ]
        receive(namesrv_addr, folder / "mqmesh-simple")
        for said in consumers:
            wait_error(said, "got", len(NAMES) * len(BODIES))
        with GroupAdmin(namesrv_addr) as groups:
            for said in (*consumers, folder / "mqmesh-simple"):
                for sender in NAMES:
                    yield f"{said.name} consumes from {sender}", delivery_error(said, sender)
                yield f"{said.name} has acknowledged all", left_over_error(groups, said.name)


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory(prefix="foreign-") as name:
        begun = time.monotonic()
        install(Path(name))
        seconds = time.monotonic() - begun
        print(f"{PYTHON}, {NODEJS}, {GOLANG}: installed in {seconds:.0f} s", flush=True)
        for case, wrong in run(Path(name)):
            print(f"FAILED  {case}: {wrong}" if wrong else f"ok      {case}", flush=True)
            failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""The example of order payment: killed at every step, and consistent at the end."""

from __future__ import annotations

import os
import selectors
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqmesh.sdk.admin.transaction_admin import TransactionAdmin
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 40.0
SETTINGS = {
    # Long enough that nobody is asked about what still runs, here.
    "transaction_timeout_ms": "300",
    "transaction_check_interval_ms": "300",
    "transaction_check_max": "1000",
}


class Desk:
    """The program, with what it said so far."""

    def __init__(self, root: Path, shop: str, namesrv: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(root / "examples" / "order_payment.py"),
                *arguments,
                "--database",
                shop,
                "--namesrv",
                namesrv,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.said: list[str] = []
        assert self._process.stdout is not None
        self._rest = b""

    def wait_for(self, word: str, count: int = 1) -> str:
        """Reads until a line that begins so was said so often; returns it."""
        deadline = time.monotonic() + PATIENCE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                found = [line for line in self.said if line.split()[0] == word]
                if len(found) >= count:
                    return found[count - 1]
                assert selector.select(max(deadline - time.monotonic(), 0)), self.said
                some = os.read(self._process.stdout.fileno(), 65_536)
                assert some, f"it ended: {self.said}"
                *lines, self._rest = (self._rest + some).split(b"\n")
                self.said += [line.decode() for line in lines if line.strip()]

    def go_on(self) -> None:
        """Lets it go on from where it pauses."""
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Ends it as a crash would."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


@pytest.fixture
def shop(short_tmp_path: Path) -> str:
    """The shop's database."""
    return str(short_tmp_path / "shop.sqlite")


@pytest.fixture
def cluster(short_tmp_path: Path) -> Iterator[ProcessCluster]:
    """A name server and a broker that asks soon."""
    with ProcessCluster(short_tmp_path, broker_settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def start(project_root: Path, shop: str, cluster: ProcessCluster) -> Iterator[Callable[..., Desk]]:
    """Start the program; all of them are ended with the test."""
    desks: list[Desk] = []

    def start(*arguments: str) -> Desk:
        desks.append(Desk(project_root, shop, cluster.namesrv_addr, *arguments))
        return desks[-1]

    yield start
    for desk in desks:
        desk.close()


def wait_decided(cluster: ProcessCluster) -> None:
    """Wait until no half message waits any more."""
    deadline = time.monotonic() + PATIENCE_S
    with TransactionAdmin(cluster.namesrv_addr) as admin:
        while admin.half_messages().pending_count:
            assert time.monotonic() < deadline, admin.half_messages()
            threading.Event().wait(0.05)


def states(shop: str) -> dict[str, str]:
    """What became of each order."""
    connection = sqlite3.connect(shop)
    try:
        return dict(connection.execute("SELECT order_id, state FROM payments"))
    finally:
        connection.close()


def ship_and_audit(start: Callable[..., Desk]) -> str:
    """Ship everything; the audit's line."""
    shipping = start("ship", "--idle", "1.5")
    assert shipping._process.wait(PATIENCE_S) == 0
    audit = start("audit")
    assert audit._process.wait(PATIENCE_S) == 0, audit._process.stdout.read()
    line = audit._process.stdout.read().decode()
    assert "0 paid and not shipped, 0 shipped and not paid, 0 shipped twice" in line
    return line


@pytest.mark.timeout(240)
def test_killed_at_every_step_the_shop_is_consistent_at_the_end(start, cluster, shop):
    fates = {}
    for step in ("half-stored", "paid", "ended"):
        desk = start("pay", "--orders", "3", "--pause-at", step)
        fates[step] = desk.wait_for(step).split()[1]
        desk.kill()
    # The decision is under way, and the one who sent it dies before it arrives.
    desk = start("pay", "--orders", "1", "--pause-at", "paid")
    fates["sent"] = desk.wait_for("paid").split()[1]
    broker = cluster.brokers["broker-a"]
    broker.suspend()
    desk.go_on()
    desk.wait_for("committing")
    desk.kill()
    broker.resume()
    # The broker dies while it holds half messages, and comes back.
    desk = start("pay", "--orders", "1", "--pause-at", "paid")
    fates["broker"] = desk.wait_for("paid").split()[1]
    desk.kill()
    broker.kill()
    cluster.start_broker()
    # Whoever is there next answers for all of them.
    other = start("pay", "--orders", "8", "--serve")
    other.wait_for("ended", 8)
    wait_decided(cluster)
    found = states(shop)
    assert {step: found[order_id] for step, order_id in fates.items()} == {
        "half-stored": "given up",
        "paid": "paid",
        "ended": "paid",
        "sent": "paid",
        "broker": "paid",
    }
    line = ship_and_audit(start)
    assert line.startswith(f"{sum(state == 'paid' for state in found.values())} paid")


@pytest.mark.timeout(120)
def test_the_whole_example_runs(start, cluster):
    desk = start("all", "--orders", "14", "--idle", "1.5")
    assert desk._process.wait(PATIENCE_S) == 0
    assert b"12 paid, 12 shipped" in desk._process.stdout.read()

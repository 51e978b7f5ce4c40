"""The payment example as processes that die: orders, their bills, and balances of customers."""

import json
import random
import runpy
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from harness.checker import Report, Verdict
from harness.topic_reader import read_topic
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.tables.key_value import KeyValue
from mqmesh.testing.processes import ProcessCluster

EXAMPLES: Final = Path(__file__).parents[2] / "examples" / "payments"
QUEUES: Final = 3
CUSTOMERS: Final = tuple("abcdefgh")
PROGRAMS: Final = ("relay", "billing", "billing", "balances", "balances")
BROKER_SHARE: Final = 0.25
"""Share of the rounds in which the broker dies."""
ROUND_S: Final = (0.1, 1.0)
PAUSE_S: Final = 0.002
PATIENCE_S: Final = 120.0


class PaymentScene:
    """A shop that takes orders, and the programs of the example.

    Args:
        cluster: Cluster with a broker.
        url: Database, empty.
        folder: For what programs print.
        chance: Source of all choices.
        restart_broker: Kills the broker and starts it again.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        url: str,
        folder: Path,
        chance: random.Random,
        restart_broker: Callable[[], None],
    ) -> None:
        self._namesrv = cluster.namesrv_addr
        self._url, self._log = url, folder / "programs.log"
        self._chance, self._restart_broker = chance, restart_broker
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._orders: dict[str, Any] = runpy.run_path(str(EXAMPLES / "orders.py"))
        self._balances: dict[str, Any] = runpy.run_path(str(EXAMPLES / "balances.py"))
        self._orders["create"](url)
        self._database: Any = self._orders["connect"](url)
        if url.startswith("sqlite"):
            self._database.execute("PRAGMA synchronous = OFF")  # no power is cut here
        with AdminClient(self._namesrv) as admin:
            for topic in (self._orders["TOPIC"], self._balances["BILLS"]):
                admin.create_topic(topic, queues=QUEUES)

    def run(self, rounds: int) -> Report:
        """Kill a program or the broker in each round, let the rest come, and judge the sums."""
        table = KeyValue(self._balances["TABLE"], self._namesrv, create=True)
        with closing(self._database), table:
            try:
                for name in PROGRAMS:
                    self._start(name)
                for _ in range(rounds):
                    self._round()
                self._wait(table)
            finally:
                for _, process in self._running:
                    process.kill()
                    process.wait()
            return self._judge(table)

    def _start(self, name: str) -> None:
        command = [sys.executable, "-P", str(EXAMPLES / f"{name}.py")]
        if name == "relay":
            command = [sys.executable, "-m", "mqmesh.cli", "sql", "relay", "--url", self._url]
            command += ["--lease", "1"]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*command, "--namesrv", self._namesrv], stdout=log, stderr=log
            )
        self._running.append((name, process))

    def _round(self) -> None:
        until = time.monotonic() + self._chance.uniform(*ROUND_S)
        while time.monotonic() < until:
            cents = self._chance.randrange(1, 10_000)
            self._orders["take"](self._database, self._chance.choice(CUSTOMERS), cents)
            time.sleep(PAUSE_S)
        if self._chance.random() < BROKER_SHARE:
            self._restart_broker()
        else:
            _, process = self._chance.choice(self._running)
            process.kill()
            process.wait()
        self._start_ended()

    def _start_ended(self) -> None:
        """Start programs again that were killed, or that ended since there was no broker."""
        for name, process in list(self._running):
            if process.poll() is not None:
                self._running.remove((name, process))
                self._start(name)

    def _wait(self, table: KeyValue) -> None:
        """Wait until the balances are those of the orders, or do not come any more."""
        wanted = self._orders["sums"](self._database)
        deadline = time.monotonic() + PATIENCE_S
        while self._balances["sums"](table) != wanted and time.monotonic() < deadline:
            self._start_ended()
            time.sleep(0.2)

    def _judge(self, table: KeyValue) -> Report:
        rows = self._database.execute("SELECT id, customer, cents FROM orders").fetchall()
        wanted = {(one, customer, int(cents)) for one, customer, cents in rows}
        bills: Counter[tuple[str, str, int]] = Counter()
        for message in read_topic(self._namesrv, self._balances["BILLS"]):
            bill = json.loads(message.body)
            bills[bill["order_id"], bill["customer"], bill["cents"]] += 1
        missing = [f"order {one} has no bill" for one in wanted - bills.keys()]
        others = [f"bill {one} has no order" for one in bills.keys() - wanted]
        twice = [f"order {one} has {times} bills" for one, times in bills.items() if times > 1]
        orders, balances = self._orders["sums"](self._database), self._balances["sums"](table)
        unequal = [] if orders == balances else [f"orders {orders}, balances {balances}"]
        return Report(
            [Verdict("C1", missing + others + unequal), Verdict("C5", twice)],
            {"acked": len(wanted), "stored": bills.total()},
        )

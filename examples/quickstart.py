"""The main job: every flight of 2013 through a cluster, and every total checked.

Run it with ``./scripts/quickstart``. It starts a cluster of its own in a folder of its own,
two consumer groups (``dashboard`` with three members, ``audit`` with one) and a producer, each
in its own process, shows how far they are, and compares what arrived with the file.

Exit code 0 when every total is right, 1 when one is not, 130 after Ctrl-C.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from flights import TOPIC, rows, to_message
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mqmesh import (
    ConsumeFromWhere,
    MQMeshError,
    Producer,
    PushConsumer,
    SendFuture,
    StoredMessage,
)
from mqmesh.errors import ConfigError
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient

QUEUES = 8
GROUPS = {"dashboard": 3, "audit": 1}
REPORT_S = 0.2
START_TIMEOUT_S = 20.0
JOB_TIMEOUT_S = 300.0
BAR_WIDTH = 40


# ---- The processes ---------------------------------------------------------------------


def report(**facts: Any) -> None:
    """Reports to the parent process, as a line of JSON on standard output."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def produce(namesrv: str) -> None:
    """Sends all flights without waiting for each, and reports how many were stored."""
    messages = [to_message(row) for row in rows()]
    futures: list[SendFuture] = []
    stored = 0
    with Producer("flights-producer", namesrv_addr=namesrv) as producer:
        began = next_report = time.monotonic()
        for message in messages:
            futures.append(producer.send_async(message))
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + REPORT_S
                while stored < len(futures) and futures[stored].done():
                    stored += 1
                report(count=stored)
        refused: list[str] = []
        carriers: Counter[str] = Counter()
        for message, future in zip(messages, futures, strict=True):
            try:
                future.result()
                carriers[message.tag or ""] += 1
            except MQMeshError as error:
                refused.append(str(error))
        seconds = time.monotonic() - began
    report(count=carriers.total(), carriers=carriers, seconds=seconds, refused=refused[:3])


def consume(namesrv: str, group: str) -> None:
    """Counts flights by carrier until standard input is closed, and reports."""
    lock = threading.Lock()
    carriers: Counter[str] = Counter()
    times: list[float] = []

    def count(messages: list[StoredMessage]) -> None:
        tags = Counter([message.tag or "" for message in messages])
        with lock:
            carriers.update(tags)
            times[1:] = [time.time()]
            if len(times) == 1:
                times.append(times[0])

    consumer = PushConsumer(
        group,
        namesrv_addr=namesrv,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        consume_message_batch_max_size=256,
    )
    consumer.subscribe(TOPIC, "*", listener=count)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with consumer:
        while not ended.wait(REPORT_S):
            with lock:
                report(
                    count=carriers.total(),
                    carriers=carriers,
                    queues=len(consumer.assignment()),
                    first=times[0] if times else 0,
                    last=times[-1] if times else 0,
                )


# ---- The parent ------------------------------------------------------------------------


class Child:
    """A process of this script, and the last thing that it reported."""

    def __init__(self, *argv: str) -> None:
        self.facts: dict[str, Any] = {"count": 0}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes to the parent, which stops the others
        )
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._news.put(json.loads(line))
        self._news.put(None)

    def look(self) -> dict[str, Any]:
        """The latest facts.

        Raises:
            RuntimeError: The process ended although it should not have, or badly.
        """
        while not self._news.empty():
            facts = self._news.get()
            if facts is None:
                if self.process.wait() or "seconds" not in self.facts:
                    raise RuntimeError(f"a process ended with code {self.process.returncode}")
            else:
                self.facts = facts
        return self.facts

    def stop(self) -> None:
        """Ends the process, kindly first."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A running cluster with its data in a folder; gives the name servers' addresses."""
    ports = free_ports(3)
    keys = ("namesrv.0", "namesrv.1", "broker.0")
    argv = [sys.executable, "-m", "mqmesh.cli", "up", "--data-dir", str(folder)]
    for key, port in zip(keys, ports, strict=True):
        argv += ["--set", f"{key}.listen_port={port}"]
    with (folder / "up.log").open("w+b") as log:
        process = subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            namesrv = ";".join(f"127.0.0.1:{port}" for port in ports[:2])
            wait_for_broker(process, namesrv, Path(log.name))
            yield namesrv
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_broker(process: "subprocess.Popen[bytes]", namesrv: str, log: Path) -> None:
    """Waits until the cluster's broker is registered, and makes the topic."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with AdminClient(namesrv) as admin:
        while True:
            try:
                admin.create_topic(TopicConfig(TOPIC, QUEUES, QUEUES))
            except Exception as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the cluster did not start: {error}\n{log.read_text()}"
                    ) from error
                time.sleep(0.1)
            else:
                return


def run_job(console: Console, namesrv: str) -> Counter[str] | None:
    """Runs the producer and the groups; flights by carrier, None where a total is wrong."""
    with ExitStack() as stack:
        members = {
            group: [Child("--consume", group, "--namesrv", namesrv) for _ in range(count)]
            for group, count in GROUPS.items()
        }
        for group in members.values():
            for member in group:
                stack.callback(member.stop)
        wait_for_queues(members)
        expected = Counter(row["carrier"] for row in rows())
        producer = Child("--produce", "--namesrv", namesrv)
        stack.callback(producer.stop)
        follow(console, producer, members, expected.total())
    return expected if show(console, expected, producer.facts, members) else None


def wait_for_queues(members: dict[str, list[Child]]) -> None:
    """Waits until the members of each group have shared the queues."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for group, children in members.items():
        while True:
            shares = [child.look().get("queues", 0) for child in children]
            if sum(shares) == QUEUES and all(shares):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"group {group} did not share {QUEUES} queues: {shares}")
            time.sleep(0.05)


def follow(console: Console, producer: Child, members: dict[str, list[Child]], total: int) -> None:
    """Shows how far everybody is until all have everything, or nothing moves any more."""
    columns = (
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = {"producer": progress.add_task("producer", total=total)}
        for group, children in members.items():
            label = f"{group} ({len(children)} member{'s' * (len(children) > 1)})"
            bars[group] = progress.add_task(label, total=total)
        deadline = time.monotonic() + JOB_TIMEOUT_S
        moved, before = time.monotonic(), -1
        while True:
            counts = {"producer": producer.look()["count"]}
            for group, children in members.items():
                counts[group] = sum(child.look()["count"] for child in children)
            for name, count in counts.items():
                progress.update(bars[name], completed=count)
            if "seconds" in producer.facts and all(count >= total for count in counts.values()):
                return
            now = time.monotonic()
            if sum(counts.values()) != before:
                moved, before = now, sum(counts.values())
            # Messages that are missing after so long are not on their way; the table shows them.
            if now > deadline or now - moved > START_TIMEOUT_S:
                return
            time.sleep(0.05)


def show(
    console: Console,
    expected: Counter[str],
    produced: dict[str, Any],
    members: dict[str, list[Child]],
) -> bool:
    """Prints the table; True when every total is right."""
    groups: dict[str, Counter[str]] = {}
    rates: dict[str, float] = {}
    for name, children in members.items():
        groups[name] = Counter()
        for child in children:
            groups[name].update(child.facts.get("carriers", {}))
        firsts = [child.facts["first"] for child in children if child.facts.get("first")]
        lasts = [child.facts["last"] for child in children if child.facts.get("last")]
        seconds = max(lasts, default=0) - min(firsts, default=0)
        rates[name] = groups[name].total() / seconds if seconds > 0 else 0
    stored = Counter(produced.get("carriers", {}))
    columns = [expected, stored, *groups.values()]

    table = Table(title="flights per carrier, New York 2013")
    for heading in ("carrier", "in the file", "stored", *groups, ""):
        table.add_column(heading, justify="left" if heading == "carrier" else "right")
    well = True
    for carrier in sorted(set().union(*columns)):
        counts = [column[carrier] for column in columns]
        right = len(set(counts)) == 1
        well = well and right
        mark = "[green]ok[/]" if right else "[red]wrong[/]"
        table.add_row(carrier, *[f"{count:,}" for count in counts], mark)
    table.add_section()
    table.add_row("all", *[f"{column.total():,}" for column in columns], "")
    send_rate = stored.total() / produced["seconds"] if produced.get("seconds") else 0
    shown = ["", f"{send_rate:,.0f}", *[f"{rate:,.0f}" for rate in rates.values()]]
    table.add_row("a second", *shown, "")
    console.print(table)
    for refusal in produced.get("refused", []):
        console.print(f"[red]refused:[/] {refusal}")
    console.print(
        f"[green]all {expected.total():,} flights arrived, in both groups[/]"
        if well
        else "[red]the totals differ from the file[/]"
    )
    return well


# ---- The archive -----------------------------------------------------------------------


def archive_flights(console: Console, namesrv: str, folder: Path, live: Counter[str]) -> bool:
    """Snapshot, archive, SQL: True when its totals are the live ones, or there is no Spark here."""
    try:
        from mqmesh.spark.ingest import ingest
        from mqmesh.spark.maintenance import query
        from mqmesh.spark.session import session

        spark = session(is_quiet=True)
    except (ImportError, ConfigError) as error:
        console.print(f"left out: the archive by Spark, for want of something it needs ({error})")
        return True
    console.print("taking a snapshot, and archiving all flights with Spark …")
    try:
        with AdminClient(namesrv) as admin:
            for broker in admin.cluster().brokers:
                path = admin.create_snapshot(broker.broker_name).path
                ingest(spark, path, str(folder / "archive"))
        found = query(
            spark,
            str(folder / "archive"),
            f"select tag, count(*) from messages where topic = '{TOPIC}' group by tag",
        )
        totals = {row[0]: row[1] for row in found.collect()}
    finally:
        spark.stop()
    table = Table(title="flights per carrier, live and from the archive by SQL")
    for heading in ("carrier", "live", "archive"):
        table.add_column(heading, justify="left" if heading == "carrier" else "right")
    table.add_column("")
    for carrier, count in live.most_common():
        found = totals.get(carrier, 0)
        width = round(found / max(live.values()) * BAR_WIDTH)
        table.add_row(carrier, f"{count:,}", f"{found:,}", "█" * width)
    console.print(table)
    well = totals == live
    console.print(
        f"[green]the archive has all {sum(totals.values()):,} flights, by SQL[/]"
        if well
        else "[red]the archive's totals differ from the file[/]"
    )
    return well


def main(argv: Sequence[str]) -> int:
    """Parses the command line and does what it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namesrv", default="", help=argparse.SUPPRESS)
    parser.add_argument("--no-archive", action="store_true", help="End before the archive.")
    parser.add_argument("--produce", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--consume", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.produce:
        produce(options.namesrv)
        return 0
    if options.consume:
        consume(options.namesrv, options.consume)
        return 0
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="mqmesh-quickstart-"))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        console.print("starting two name servers and a broker, reading the flights …")
        with cluster(folder) as namesrv:
            live = run_job(console, namesrv)
            well = live is not None
            if live is not None and not options.no_archive:
                well = archive_flights(console, namesrv, folder, live)
            if well and find_spec("starlette") is not None:
                console.print("in a browser: mqmesh up --console, then http://127.0.0.1:8082/")
            return 0 if well else 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    except RuntimeError as error:
        console.print(f"[red]error:[/] {error}")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Looks at a running cluster from outside, for the checker's C8, C10 and C12."""

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from harness.history import Degradation, Delivery, Lookup, Place, Resources, Return
from mqmesh.errors import BrokerNotAvailable
from mqmesh.metrics import Readings
from mqmesh.sdk.admin.queries import QueryClient, QueryResult
from mqmesh.units import KIB, MIB

CUT_LINE: Final = "a torn tail of"
"""Text in a broker's log line when it cuts the end of its log off."""
DAMAGE_LINE: Final = "are damaged and passed over"
"""Text in the log line when it sets damaged bytes aside."""

GROWTH: Final = Resources("growth", 64 * MIB, 48, 6, 0)
"""Growth that a broker may keep after a load: caches, files that stay open, threads of its
pools. Disk is judged against what was stored."""
INDEX_PATIENCE_S: Final = 30.0
POLL_S: Final = 0.05
DISK_SLACK_BYTES: Final = 64 * MIB
"""Room allocated ahead: the segment in use, the next one, and files of consume queues."""


def resources_of(name: str, pid: int, folder: Path | None = None) -> Resources:
    """Measures the resources of a process.

    Args:
        name: For reports.
        pid: Id of the process.
        folder: Folder of its files on disk, if disk space counts.
    """
    process = Path("/proc") / str(pid)
    status = (process / "status").read_text(encoding="ascii", errors="replace")
    rss = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    threads = re.search(r"^Threads:\s+(\d+)$", status, re.MULTILINE)
    return Resources(
        name,
        int(rss[1]) * KIB if rss else 0,
        len(list((process / "fd").iterdir())),
        int(threads[1]) if threads else 0,
        disk_bytes(folder) if folder is not None else 0,
    )


def disk_bytes(folder: Path) -> int:
    """Returns the disk space of the files below a folder, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # gone meanwhile, so it takes nothing
    return total


def came_back(before: Resources, after: Resources, stored_bytes: int) -> Return:
    """Returns the bound that a broker must come back to after a load.

    Args:
        before: Resources while nothing was stored yet.
        after: Resources when all clients are gone.
        stored_bytes: Size of all messages that are in the log.
    """
    growth = Resources(
        "growth",
        GROWTH.rss_bytes,
        GROWTH.descriptors,
        GROWTH.threads,
        # A message has an entry in a consume queue and the index, and a share of a header.
        4 * stored_bytes + DISK_SLACK_BYTES,
    )
    return Return(before, after, growth)


def look_up(
    query: QueryClient, topic: str, stored: Sequence[Delivery], chance: random.Random, count: int
) -> list[Lookup]:
    """Asks for messages that are there, and for some that are not.

    Args:
        query: Client for the queries.
        topic: Their topic.
        stored: The whole log.
        chance: Chooses.
        count: Messages to ask for, by id and by one of their keys.
    """
    chosen = chance.sample(list(stored), min(count, len(stored)))
    ids = {one.message_id for one in chosen} | {f"{chance.getrandbits(128):032X}"}
    keys = {key for one in chosen for key in one.keys[:1]} | {"a key that nobody has"}
    limit = 1_024
    found = []
    for one in sorted(ids):
        by_id = partial(query.by_id, one, max_count=limit)
        found.append(Lookup("id", one, _places(topic, by_id), limit))
    for one in sorted(keys):
        by_key = partial(query.by_key, topic, one, max_count=limit)
        found.append(Lookup("key", one, _places(topic, by_key), limit))
    return found


def recovery_degradations(metrics: Readings, log: str) -> list[Degradation]:
    """Returns what a broker cut off or set aside at its start, and whether it reported so.

    Args:
        metrics: Present metrics of the broker.
        log: Log of the broker.
    """
    return [
        Degradation("truncation of a torn tail", int(cut > 0), None, log.count(CUT_LINE), cut)
        for cut in [int(metrics.number("store_cut_bytes"))]
    ] + [
        Degradation("quarantine", damaged, None, log.count(DAMAGE_LINE), damaged)
        for damaged in [int(metrics.number("store_damaged"))]
    ]


def refusal_degradation(
    code: str, happened: int, error_codes: int, metrics: Readings, log: str
) -> Degradation:
    """Returns a broker's refusals with a response code, and whether it reported them.

    Args:
        code: Name of the response code.
        happened: Number of refusals, by the client's count.
        error_codes: Number of these that were answered with that code.
        metrics: The broker's metrics now.
        log: Log of the broker.
    """
    lines = len(re.findall(rf"refused with {code}: ", log))
    counted = int(metrics.number("refusals_total", code.lower()))
    return Degradation(f"refusal with {code}", happened, error_codes, lines, counted)


def _places(topic: str, ask: Callable[[], QueryResult]) -> tuple[Place, ...]:
    """Returns the places of messages that a complete answer names."""
    deadline = time.monotonic() + INDEX_PATIENCE_S
    pause = threading.Event()
    while True:
        try:
            result = ask()
        except BrokerNotAvailable:
            if time.monotonic() > deadline:
                raise
            result = QueryResult([], notes={"": "no index process"})
        if not result.notes or time.monotonic() > deadline:
            return tuple(
                (f"{one.broker_name}/{one.queue_id}", one.queue_offset)
                for one in result.messages
                if one.info.topic == topic
            )
        pause.wait(POLL_S)

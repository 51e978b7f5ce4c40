"""Measures snapshots and the archive: ``scripts/bench --archive``.

All is done by processes and commands as users start them, in a fresh folder. Steps are reported on
standard error; the table is that of README.md beside this file.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from broker_side import measure
from commands import Failed, mqmesh, program
from dump_content import dumped
from figures import (
    QUICK,
    Content,
    Figure,
    Layers,
    Sizes,
    content_figure,
    core_figure,
    find_figure,
    ingest_figures,
    local_figures,
    once_figure,
    size_figure,
    sizes,
    sql_figure,
    table,
    want_of_room,
)
from orders import BODY_BYTES, TOPIC, key_of

from mqmesh.storage.tools.snapshot import load_manifest
from mqmesh.units import GIB


def main() -> None:
    """Measures, and prints the table."""
    options = _options()
    size = sizes(QUICK if options.quick else options.scale)
    want = want_of_room(size, shutil.disk_usage(options.dir or tempfile.gettempdir()).free)
    if want:
        raise SystemExit(f"error: {want}")
    with tempfile.TemporaryDirectory(dir=options.dir, ignore_cleanup_errors=True) as data:
        try:
            figures = _measure(Path(data), size)
        except Failed as error:
            raise SystemExit(f"error: {error}") from error
    if options.json:
        print(json.dumps([one._asdict() for one in figures]))
    else:
        print(f"{_machine()}\n\n{table(figures)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench --archive", description=__doc__)
    parser.add_argument("--scale", type=_positive, default=1.0, help="factor for all sizes")
    parser.add_argument(
        "--quick", action="store_true", help="does all of it work? Measures nothing"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", default=None, help="where data goes")
    return parser.parse_args()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 100")
    return value


def _measure(folder: Path, size: Sizes) -> list[Figure]:
    figures = []
    for one in _figures(folder, size):
        # Whoever stops a long run has seen what was measured until then.
        _say(f"{one.goal}, {one.what}: {one.value}")
        figures.append(one)
    return sorted(figures, key=lambda one: one.goal)


def _figures(folder: Path, size: Sizes) -> Iterator[Figure]:
    stored = measure(folder, size, _say)
    yield from stored.figures
    shutil.rmtree(folder / "broker-a")
    yield _content(folder, stored.some, size)
    archive = folder / "archive"
    _say("taking all messages into an archive")
    used, _ = mqmesh(folder, "archive", "ingest", stored.all, "--to", archive)
    yield from ingest_figures(used, size.orders)
    local = folder / "archive-local"
    _say("taking them into another one without Java")
    used, _ = mqmesh(folder, "archive", "ingest", stored.all, "--to", local, "--engine", "local")
    shutil.rmtree(local)
    yield from local_figures(used, size.orders)
    yield from look_ups(folder, archive, size)
    yield _sizes_of(stored.all, archive, size.orders)
    yield taken_once(folder, stored.some, stored.all, archive, size.orders)
    _say("loading the core")
    modules, failures = program(folder, "core_modules.py", JAVA_HOME="", PATH="")
    yield core_figure(modules, failures)


def _content(folder: Path, snapshot: Path, size: Sizes) -> Figure:
    _say(f"reading a snapshot of {size.compared:,} messages by Spark, and its dump")
    count, hashed, start_s, query_s = program(folder, "spark_content.py", snapshot)
    _say(f"Spark was there after {start_s:.1f} s, and had read it {query_s:.1f} s later")
    restored = folder / "restored"
    mqmesh(folder, "snapshot", "restore", snapshot, restored)
    by_dump = dumped(restored)
    shutil.rmtree(restored)
    return content_figure(Content(count, hashed, query_s), by_dump, size.compared)


def taken_once(folder: Path, some: Path, whole: Path, archive: Path, count: int) -> Figure:
    """Takes snapshots in that are there already, and counts."""
    _say("taking the same in again")
    mqmesh(folder, "archive", "ingest", whole, some, whole, "--to", archive)
    _say("counting")
    _, text = mqmesh(folder, "archive", "verify", archive, "--json")
    report = json.loads(text)
    return once_figure(report["rows"], report["sound"], count)


def look_ups(folder: Path, archive: Path, size: Sizes) -> list[Figure]:
    """Looks messages up by key and by id, and counts by SQL."""
    _say("looking messages up")
    keys = [key_of(size.orders * (2 * one + 1) // (2 * size.looks)) for one in range(size.looks)]
    by_key = [
        mqmesh(folder, "archive", "find", archive, "--topic", TOPIC, "--key", key, "--json")
        for key in keys
    ]
    rows = [json.loads(text) for _, text in by_key]
    by_id = [
        mqmesh(folder, "archive", "find", archive, "--id", row["message_id"], "--json")
        for row in rows
    ]
    hits = sum(key in row["keys"] for row, key in zip(rows, keys, strict=True))
    same = sum(json.loads(text) == row for (_, text), row in zip(by_id, rows, strict=True))
    _say("counting by SQL")
    _, text = mqmesh(folder, "archive", "status", archive, "--json")
    one = max(json.loads(text)["days"], key=lambda one: one["rows"])
    query = f"select count(*) as n from messages where topic = '{TOPIC}' and dt = '{one['dt']}'"
    used, text = mqmesh(folder, "archive", "sql", archive, query, "--json")
    return [
        find_figure("key", [used for used, _ in by_key], hits, size.orders),
        find_figure("id", [used for used, _ in by_id], same, size.orders),
        sql_figure(used, json.loads(text)["n"], one["rows"]),
    ]


def _sizes_of(snapshot: Path, archive: Path, count: int) -> Figure:
    def bytes_of(table: str) -> int:
        return sum(one.stat().st_size for one in (archive / table).rglob("*") if one.is_file())

    log = load_manifest(snapshot).log_bytes
    layers = Layers(count * BODY_BYTES, log, bytes_of("messages"), bytes_of("keys"))
    return size_figure(layers, count)


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{os.cpu_count()} cores, {memory / GIB:.0f} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}"
    )


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""The goals, what came out, and the table. Pure: nothing is started or read here."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from mqmesh.units import GIB, MIB

BATCH: Final = 500
"""Messages in a batch of the producers."""
QUICK: Final = 0.004
"""The scale at which everything is tried and nothing is measured."""
HASH_DIGITS: Final = 15
"""Hexadecimal digits of each message's MD5 that go into a hash of all: 60 bits."""

SNAPSHOT_S: Final = 3.0
P99_FACTOR: Final = 2.0
HELD_UP_MS: Final = 5.0
INGEST_RATE: Final = 80_000
LOCAL_RATE: Final = 60_000
LOCAL_BYTES: Final = 1 * GIB
JAVA_BYTES: Final = 2 * GIB
WORKER_BYTES: Final = 200 * MIB
FIND_S: Final = 1.0
SQL_S: Final = 10.0
ARCHIVE_SHARE: Final = 0.45


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
        orders: Messages of 200 bytes that are archived; a multiple of ``BATCH``.
        compared: Of these, the first so many are compared with a dump of the store.
        store_bytes: Log of the broker when it is snapshotted under load.
        segment_bytes: Of the broker's log.
        snapshots: How often it is snapshotted under load.
        quiet_s: How long sends are measured before each of them.
        looks: Messages that are looked up by key, and as many by id.
    """

    orders: int
    compared: int
    store_bytes: int
    segment_bytes: int
    snapshots: int
    quiet_s: float
    looks: int

    @property
    def disk_bytes(self) -> int:
        """Room that a run takes at most, roughly: log and index, snapshots' own, archive."""
        return self.store_bytes * 3 // 2 + 4 * self.segment_bytes + self.orders * 1_100


def want_of_room(size: Sizes, free_bytes: int) -> str:
    """Return a sentence if the disk has too little room; empty if it has enough."""
    if free_bytes >= size.disk_bytes:
        return ""
    return (
        f"this needs about {size.disk_bytes / GIB:.1f} GiB of disk, there are "
        f"{free_bytes / GIB:.1f} (--dir DIRECTORY, or a smaller --scale)"
    )


def sizes(scale: float) -> Sizes:
    """Return the sizes of a measurement at a scale; the goals are for 1.

    Args:
        scale: Above 0.
    """
    orders = max(round(10_000_000 * scale / BATCH), 2) * BATCH
    # About ten segments, as a broker has with its defaults at scale 1.
    segment = 1 << math.floor(math.log2(GIB * min(max(scale, 1 / 64), 1)))
    is_full = scale >= 0.05
    return Sizes(
        orders=orders,
        compared=max(orders // 10 // BATCH, 1) * BATCH,
        store_bytes=int(10 * GIB * scale),
        segment_bytes=segment,
        snapshots=3 if is_full else 1,
        quiet_s=3.0 if is_full else 0.5,
        looks=5 if is_full else 1,
    )


class Figure(NamedTuple):
    """A row of the table.

    Attributes:
        goal: Its name, F1 to F7.
        what: Name of the measured quantity.
        value: Measured value, with its unit.
        wanted: Goal, with its unit.
        met: Whether the value meets the goal.
    """

    goal: str
    what: str
    value: str
    wanted: str
    met: bool


def table(figures: Sequence[Figure]) -> str:
    """The figures in Markdown."""
    lines = ["| | what | value | goal | met |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(one[:4])} | {'yes' if one.met else 'no'} |" for one in figures]
    return "\n".join(lines)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of all do not exceed.

    Args:
        values: At least one, in any order.
        percent: 0 to 100.
    """
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


class Hold(NamedTuple):
    """The event loop could not look at the clock for a while.

    Attributes:
        at_s: When it could again, monotonic clock.
        total_ms: For how long.
        queued_ms: For how long of it its thread was ready to run and had no processor.
    """

    at_s: float
    total_ms: float
    queued_ms: float

    @property
    def own_ms(self) -> float:
        """For how long the broker itself was the reason."""
        return max(self.total_ms - self.queued_ms, 0.0)


def read_holds(text: str) -> list[Hold]:
    """The lines that ``watched_broker.py`` wrote; the last one may not be whole yet."""
    lines = text.splitlines(keepends=True)
    return [Hold(*map(float, line.split())) for line in lines if line.endswith("\n")]


class UnderLoad(NamedTuple):
    """One snapshot while producers send.

    Attributes:
        began_s: When it was asked for, monotonic clock.
        ended_s: When it was there.
        took_s: How long the broker says that it took.
        log_bytes: Log that it has.
        own_bytes: Disk that only its files take, none shared with the store's.
        live_index_bytes: Of these the copy of the index that was being written.
        sends_before_ms: How long single sends took before it.
        sends_ms: And while it was made.
    """

    began_s: float
    ended_s: float
    took_s: float
    log_bytes: int
    own_bytes: int
    live_index_bytes: int
    sends_before_ms: list[float]
    sends_ms: list[float]


def snapshot_figures(
    taken: Sequence[UnderLoad], holds: Sequence[Hold], *, segment_bytes: int, quiet_s: float
) -> list[Figure]:
    """F1: the worst of the snapshots, and all their sends together."""
    took_s = max(one.took_s for one in taken)
    before = percentile([ms for one in taken for ms in one.sends_before_ms], 99)
    sends = [ms for one in taken for ms in one.sends_ms]
    during = percentile(sends, 99)
    meanwhile = [h for h in holds if any(t.began_s <= h.at_s <= t.ended_s for t in taken)]
    earlier = [h for h in holds if any(0 < t.began_s - h.at_s <= quiet_s for t in taken)]
    own = max((h.own_ms for h in meanwhile), default=0.0)
    usual = max((h.own_ms for h in earlier), default=0.0)
    total = max((h.total_ms for h in meanwhile), default=0.0)
    worst = max(taken, key=lambda one: one.own_bytes)
    room = segment_bytes + worst.live_index_bytes
    size = f"{max(one.log_bytes for one in taken) / GIB:.2f} GiB of log"
    return [
        Figure(
            "F1",
            f"snapshot of {size} under load",
            " and ".join(f"{one.took_s:.2f}" for one in taken) + " s",
            f"≤ {SNAPSHOT_S:.0f} s",
            took_s <= SNAPSHOT_S,
        ),
        Figure(
            "F1",
            "p99 of single sends meanwhile, and before",
            f"{during:.1f} ms, {before:.1f} ms ({during / before:.2f} ×); {len(sends):,} sends, "
            f"the longest {max(sends):.0f} ms",
            f"≤ {P99_FACTOR:.0f} ×",
            during <= P99_FACTOR * before,
        ),
        Figure(
            "F1",
            "the broker's loop held up, at most",
            f"{own:.1f} ms by the broker ({total:.1f} ms with waits for a processor); "
            f"{usual:.1f} ms before",
            f"≤ {HELD_UP_MS:.0f} ms",
            own <= HELD_UP_MS,
        ),
        Figure(
            "F1",
            "disk that is the snapshot's alone",
            f"{worst.own_bytes / MIB:,.0f} MiB",
            f"≤ {room / MIB:,.0f} MiB, a segment and the live index",
            worst.own_bytes <= room,
        ),
    ]


class Content(NamedTuple):
    """Content of a store.

    Attributes:
        count: Messages.
        hashed: Of places and bodies, in no order.
        seconds: How long that took.
    """

    count: int
    hashed: int
    seconds: float


def content_figure(by_spark: Content, by_dump: Content, sent: int) -> Figure:
    """F2: Spark and the offline tool read the same."""
    same = (by_spark.count, by_spark.hashed) == (by_dump.count, by_dump.hashed)
    return Figure(
        "F2",
        "count, and hash over place and body, by Spark and by `mqmesh store dump`",
        f"{by_spark.count:,} and {by_dump.count:,}, {'same' if same else 'other'} hash; "
        f"{by_spark.seconds:.0f} s and {by_dump.seconds:.0f} s",
        f"{sent:,}, same",
        same and by_spark.count == sent,
    )


class Used(NamedTuple):
    """Resources that a command and all its processes used.

    Attributes:
        seconds: From its start to its end.
        cpu_s: Of processors.
        java_bytes: Most memory that was resident in Java.
        worker_bytes: Most of one of Spark's Python workers.
        own_bytes: Most of the command itself.
    """

    seconds: float
    cpu_s: float
    java_bytes: int = 0
    worker_bytes: int = 0
    own_bytes: int = 0


def ingest_figures(used: Used, count: int) -> list[Figure]:
    """F3: the rate and the memory of an ingest by Spark."""
    return [
        _rate_figure("Spark", used, count, INGEST_RATE),
        Figure(
            "F3",
            "its memory at most: Java, a worker",
            f"{used.java_bytes / GIB:.2f} GiB, {used.worker_bytes / MIB:,.0f} MiB",
            f"≤ {JAVA_BYTES / GIB:.0f} GiB, ≤ {WORKER_BYTES / MIB:.0f} MiB",
            0 < used.java_bytes <= JAVA_BYTES and 0 < used.worker_bytes <= WORKER_BYTES,
        ),
    ]


def local_figures(used: Used, count: int) -> list[Figure]:
    """F3: the rate and the memory of an ingest by ``--engine local``."""
    return [
        _rate_figure("`--engine local`", used, count, LOCAL_RATE),
        Figure(
            "F3",
            "its memory at most",
            f"{used.own_bytes / MIB:,.0f} MiB",
            f"≤ {LOCAL_BYTES / MIB:.0f} MiB",
            0 < used.own_bytes <= LOCAL_BYTES,
        ),
    ]


def _rate_figure(by: str, used: Used, count: int, goal: int) -> Figure:
    rate = count / used.seconds
    return Figure(
        "F3",
        f"ingest of {count:,} messages by {by}, from the command's start to its end",
        f"{rate:,.0f}/s ({used.seconds:.0f} s; {used.cpu_s * 1e6 / count:.1f} µs of processor "
        "a message)",
        f"≥ {goal:,}/s",
        rate >= goal,
    )


def once_figure(rows: int, sound: bool, count: int) -> Figure:
    """F4, as far as no kill is needed for it."""
    return Figure(
        "F4",
        "the same snapshot 3 ×, and an earlier one behind it; with kills: "
        "`tests/spark/test_kills.py`, `test_flights_killed.py`",
        f"{rows:,} rows, {'each once' if sound else 'not each once'}",
        f"{count:,}, each once",
        sound and rows == count,
    )


def find_figure(by: str, taken: Sequence[Used], hits: int, count: int) -> Figure:
    """F5: look-ups by key or id; ``hits`` found the one message that they should."""
    middle = percentile([one.seconds for one in taken], 50)
    cpu_s = percentile([one.cpu_s for one in taken], 50)
    wrong = "" if hits == len(taken) else f"; {len(taken) - hits} found something else"
    return Figure(
        "F5",
        f"`archive find` by {by} in {count:,} messages",
        f"{middle:.2f} s ({cpu_s:.2f} s of processor){wrong}",
        f"≤ {FIND_S:.1f} s",
        middle <= FIND_S and not wrong,
    )


def sql_figure(used: Used, found: int, count: int) -> Figure:
    """F5: a count by SQL."""
    return Figure(
        "F5",
        "`archive sql`, count of a topic and day, with the start of Java",
        f"{used.seconds:.1f} s" + ("" if found == count else f"; {found:,} of {count:,}"),
        f"≤ {SQL_S:.0f} s",
        used.seconds <= SQL_S and found == count,
    )


class Layers(NamedTuple):
    """Bytes of the same messages in each layer.

    Attributes:
        bodies: Of the bodies alone.
        log: In the broker's log, which is not compressed.
        messages: In the archive's table of messages.
        keys: In its table of keys.
    """

    bodies: int
    log: int
    messages: int
    keys: int


def size_figure(layers: Layers, count: int) -> Figure:
    """F6: the archive beside what it was before it was compressed."""
    share = (layers.messages + layers.keys) / layers.log
    each = ", ".join(
        f"{name} {size / count:.0f}"
        for name, size in zip(("body", "log", "messages", "keys"), layers, strict=True)
    )
    return Figure(
        "F6",
        f"archive beside the uncompressed log; bytes a message: {each}",
        f"{share:.2f} × ({(layers.messages + layers.keys) / layers.bodies:.2f} × of the bodies)",
        f"≤ {ARCHIVE_SHARE} ×",
        share <= ARCHIVE_SHARE,
    )


def core_figure(modules: int, failures: Sequence[str]) -> Figure:
    """F7: the core without what only the archive needs."""
    return Figure(
        "F7",
        "modules of mqmesh but `mqmesh.spark` that load where pyspark, pyarrow and Java are not",
        f"{modules - len(failures)} of {modules}" + "".join(f"; {one}" for one in failures[:3]),
        "all",
        not failures,
    )

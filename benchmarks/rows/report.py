"""From samples to lines and a table. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from rows.rows import Row
from rows.sides import Sample


class Line(msgspec.Struct, kw_only=True, omit_defaults=False):
    """A row of the result; one line of JSON.

    Attributes:
        row: Its name.
        value: Median of mqmesh's runs.
        unit: Of value and limit.
        limit: Median of the limit's runs, None where there is none.
        ratio: value / limit.
        goal: Goal of the row, for people; empty for none.
        met: Whether it was reached; None without a goal.
        cpu_s_per_million: Medians of mqmesh's CPU seconds a million messages, by process.
        limit_cpu_s_per_million: The same of the limit's.
        extra: Medians of further figures of mqmesh's.
        limit_extra: The same of the limit's.
        values: Every run of mqmesh.
        limits: Every run of the limit.
    """

    row: str
    value: float
    unit: str
    limit: float | None
    ratio: float | None
    goal: str
    met: bool | None
    cpu_s_per_million: dict[str, float]
    limit_cpu_s_per_million: dict[str, float]
    extra: dict[str, float]
    limit_extra: dict[str, float]
    values: list[float]
    limits: list[float]


def summarize(row: Row, products: Sequence[Sample], limits: Sequence[Sample]) -> Line:
    """The medians of a row's runs.

    Args:
        row: The measured row.
        products: Runs of mqmesh, at least one.
        limits: Runs of the limit; empty when the row has none.
    """
    value = statistics.median(sample.value for sample in products)
    limit = statistics.median(sample.value for sample in limits) if limits else None
    ratio = value / limit if limit else None
    extra = _medians([sample.extra for sample in products])
    goal, met = _judge(row, value, ratio, extra)
    return Line(
        row=row.name,
        value=_rounded(value),
        unit=row.unit,
        limit=None if limit is None else _rounded(limit),
        ratio=None if ratio is None else round(ratio, 3),
        goal=goal,
        met=met,
        cpu_s_per_million=_medians([sample.cpu_s_per_million for sample in products]),
        limit_cpu_s_per_million=_medians([sample.cpu_s_per_million for sample in limits]),
        extra=extra,
        limit_extra=_medians([sample.extra for sample in limits]),
        values=[_rounded(sample.value) for sample in products],
        limits=[_rounded(sample.value) for sample in limits],
    )


def encode_line(line: Line) -> str:
    """One line of JSON."""
    return msgspec.json.encode(line).decode()


def format_table(lines: Sequence[Line]) -> str:
    """A table for people; columns as wide as they must be."""
    head = ["row", "value", "limit", "unit", "ratio", "goal", "", "CPU s/M msg b+p+c", "broker MiB"]
    body = [
        [
            line.row,
            f"{line.value:,.0f}",
            "-" if line.limit is None else f"{line.limit:,.0f}",
            line.unit,
            "-" if line.ratio is None else f"{line.ratio:.2f}",
            line.goal,
            {True: "ok", False: "MISSED", None: ""}[line.met],
            _cpu(line.cpu_s_per_million),
            _memory(line.extra),
        ]
        for line in lines
    ]
    widths = [max(len(cells[i]) for cells in [head, *body]) for i in range(len(head))]
    right = {1, 2, 4}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in [head, *body]
    )


def _judge(
    row: Row, value: float, ratio: float | None, extra: Mapping[str, float]
) -> tuple[str, bool | None]:
    limits: list[tuple[str, float, float | None, float | None]] = [
        (f"{name} ", extra.get(name, math.nan), row.least_extra.get(name), row.most_extra.get(name))
        for name in {**row.least_extra, **row.most_extra}
    ]
    if ratio is not None:
        limits.insert(0, ("ratio ", ratio, row.least_ratio, row.most_ratio))
    limits.insert(0, ("", value, row.least, row.most))
    goals, met = [], []
    for name, figure, least, most in limits:
        if least is not None:
            goals.append(f"{name}>= {least:,g}")
            met.append(figure >= least)
        if most is not None:
            goals.append(f"{name}<= {most:,g}")
            met.append(figure <= most)
    return ", ".join(goals), all(met) if met else None


def _medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {
        name: round(statistics.median(s[name] for s in samples if name in s), 3) for name in names
    }


def _rounded(value: float) -> float:
    return round(value, 1) if value < 10_000 else float(round(value))


def _cpu(cpu: Mapping[str, float]) -> str:
    parts = [cpu.get(name) for name in ("broker", "producer", "consumer")]
    return " + ".join("-" if part is None else f"{part:.2f}" for part in parts)


def _memory(extra: Mapping[str, float]) -> str:
    if "broker_rss_peak_mib" not in extra:
        return ""
    return f"{extra['broker_rss_idle_mib']:.0f} -> {extra['broker_rss_peak_mib']:.0f}"

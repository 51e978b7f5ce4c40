"""The pages below ``docs/reference``: metrics, alarms, errors and settings.

They are kept in the repository, since operators look them up on GitHub. ``scripts/reference``
writes them.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_origin

import msgspec

import mqmesh
from mqmesh import errors
from mqmesh.cli.processes.layout import ClusterConfig
from mqmesh.console.config import ConsoleConfig
from mqmesh.metrics import FOLDED, Measured, Metric, MetricKind
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.roles.broker.config import CHANGEABLE, BrokerConfig
from mqmesh.roles.coordinator.config import CoordinatorConfig
from mqmesh.roles.exporter.alarm_rules import RULES
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.families import ExportedMetric
from mqmesh.roles.exporter.monitor_config import MonitorConfig, RuleChange
from mqmesh.roles.exporter.names import NODE_LABELS, exported_as_own
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.namesrv.config import CHANGEABLE as CHANGEABLE_OF_NAMESRV
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.consumer_options import (
    ConsumerOptions,
    PullConsumerOptions,
    PushConsumerOptions,
)
from mqmesh.sdk.producer.producer_options import ProducerOptions, TransactionOptions
from mqmesh.sdk.tracing.tracing_options import TracingOptions
from mqmesh.security.config import SecurityConfig
from reference_pages.described import (
    amount,
    bounds,
    code,
    fields_of,
    marks,
    members_of,
    paragraphs,
    sections,
    table,
)
from rows.rows import ROWS, Row

FOLDER: Final = Path(__file__).parents[2] / "docs" / "reference"
_DOCS: Final = "../"
_MADE: Final = "<!-- Made by scripts/reference of the descriptions in the code: change those. -->"
_METRICS: Final = (
    "Each process and client counts for itself. *Prometheus* is the name that the exporter gives a "
    f"metric, with the labels {', '.join(map(code, NODE_LABELS))} beside its own. How to read "
    "them, queries and boards: [metrics](../metrics.md)."
)
_ALARMS: Final = (
    "`mqmesh monitor` knows an alarm by the first name, the rules for Prometheus by the second. In "
    "a sentence, … stands for the value that was found. How to get them: "
    "[alarms without Prometheus](../alarms.md), [metrics](../metrics.md)."
)
_ERRORS: Final = (
    "All are in `mqmesh.errors`. After a *retriable* one the same call may succeed later; those of "
    "a broker have its response code in `code`, and in `retry_after_ms` how long to wait."
)
_CONFIGURATION: Final = (
    "Settings of a role stand in a TOML file, and are overridden by `--set key=value`. A dotted "
    "name is a key of a table: `storage.backend` is `backend` below `[storage]`. *live* marks "
    "settings that change while the process runs (`mqmesh broker set`, `mqmesh namesrv set`)."
)
_BENCHMARKS: Final = (
    "Each is measured beside its limit: a bare ZeroMQ program that moves the same bytes, or what "
    "stands behind *against*. A ratio is value / limit, so that for times less is better. How they "
    "are measured, and results: [benchmarks](../benchmarks.md)."
)
_REPORTERS: Final = (
    ("Every process", ("mqmesh.roles.shell", "mqmesh.roles.dispatch", "mqmesh.security.")),
    ("Broker", ("mqmesh.roles.broker.",)),
    ("Name server", ("mqmesh.roles.namesrv.",)),
    ("Schedule service", ("mqmesh.roles.schedule.",)),
    ("Filter server", ("mqmesh.roles.filtersrv.",)),
    ("Gateway", ("mqmesh.roles.gateway.",)),
    ("Index process", ("mqmesh.roles.indexer.",)),
    ("Coordinator", ("mqmesh.roles.coordinator.",)),
    ("Supervisor", ("mqmesh.roles.supervisor.",)),
    ("Producer", ("mqmesh.sdk.producer.",)),
    ("Consumer", ("mqmesh.sdk.consumer.",)),
    ("Producer and consumer", ("mqmesh.sdk.hooks", "mqmesh.sdk.tracing.")),
)
"""Processes and clients, and the modules that have their metrics."""
_ROLES: Final = (
    ("Broker", "broker.toml", BrokerConfig, CHANGEABLE),
    ("Name server", "namesrv.toml", NamesrvConfig, CHANGEABLE_OF_NAMESRV),
    ("Schedule service", "schedule.toml", ScheduleConfig, ()),
    ("Filter server", "filtersrv.toml", FiltersrvConfig, ()),
    ("Coordinator", "coordinator.toml", CoordinatorConfig, ()),
    ("Gateway", "gateway.toml", GatewayConfig, ()),
    ("Exporter", "exporter.toml", ExporterConfig, ()),
    ("Monitor", "monitor.toml", MonitorConfig, ()),
    ("Web console", "", ConsoleConfig, ()),
)
_CLIENTS: Final = (
    ("Every client", ClientOptions),
    ("Tracing, of producers and consumers", TracingOptions),
    ("Producer", ProducerOptions),
    ("Transaction producer, beside those of a producer", TransactionOptions),
    ("Consumer", ConsumerOptions),
    ("Push consumer", PushConsumerOptions),
    ("Pull consumer", PullConsumerOptions),
)
_UNITS: Final = {
    "file_reserved_time": "h",
    "mapped_file_size_commit_log": "bytes",
    "map_size": "bytes",
    "max_message_size": "bytes",
    "ha_slave_fallbehind_max": "bytes",
    "compress_msg_body_over_how_much": "bytes",
    "pull_threshold_size_for_queue": "MiB",
    "_ratio": "%",
    "_bytes_per_s": "bytes/s",
    "_byte_in_second": "bytes/s",
    "_per_minute": "1/min",
    "_bytes": "bytes",
    "_ms": "ms",
    "_mills": "ms",
    "_us": "µs",
    "_s": "s",
}
"""Units by the ends of names; RocketMQ's names have none."""


def metrics_page() -> str:
    """Return the page of all metrics, by the process that has them."""
    lines = [
        "# Metrics",
        "",
        _MADE,
        "",
        _METRICS,
    ]
    for title, folders in _REPORTERS:
        lines += ["", f"## {title}", ""]
        found = _metrics_of(folders)
        is_client = folders[0].startswith("mqmesh.sdk.")
        if title == "Every process":
            lines += ["Of every role that others connect to.", ""]
            help = "sets of labels that were added up as `(other)`"
            found.append(Metric(FOLDED, MetricKind.GAUGE, "", help))
        lines += table(
            ("metric", "kind", "unit", "labels", "Prometheus", "meaning"),
            (
                (
                    code(one.name),
                    one.kind.value,
                    one.unit,
                    ", ".join(map(code, one.labels)),
                    code(one.rocketmq_name or ("" if is_client else exported_as_own(one)[0].name)),
                    one.help,
                )
                for one in sorted(found, key=lambda one: one.name)
            ),
        )
    lines += [
        "",
        "## Exporter",
        "",
        "Made by the exporter of what brokers answer about groups.",
        "",
    ]
    lines += table(
        ("Prometheus", "kind", "labels", "meaning"),
        (
            (code(one.name), one.kind.value, ", ".join(map(code, _own_labels(one))), one.help)
            for one in _exported()
        ),
    )
    return "\n".join(lines) + "\n"


def alarms_page() -> str:
    """Return the page of all alarms."""
    lines = [
        "# Alarms",
        "",
        _MADE,
        "",
        _ALARMS,
        "",
    ]
    lines += table(
        ("alarm", "Prometheus", "severity", "threshold", "for", "when", "what to do"),
        (
            (
                code(one.alarm),
                code("Mqmesh" + one.alarm.title().replace("-", "")),
                one.severity,
                f"{one.threshold:,g}",
                f"{one.for_s} s" if one.for_s else "at once",
                one.sentence(
                    tuple(_Blank(f"*{name}*") for name in one.by), _Blank("…"), one.threshold
                ),
                one.advice,
            )
            for one in RULES
        ),
    )
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Return the page of all response codes and exceptions."""
    lines = [
        "# Errors",
        "",
        _MADE,
        "",
        "## Exceptions",
        "",
        _ERRORS,
        "",
    ]
    codes: dict[type[BaseException], list[ResponseCode]] = {}
    for one in ResponseCode:
        if one is not ResponseCode.SUCCESS:
            codes.setdefault(type(error_of(one, "")), []).append(one)
    lines += table(
        ("exception", "is a", "raised", "retriable", "response codes"),
        (
            (
                code(kind.__name__),
                ", ".join(code(one.__name__) for one in kind.__bases__),
                _meaning(kind),
                "yes" if kind.retriable else "",
                ", ".join(code(one.name) for one in codes.get(kind, ())),
            )
            for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, errors.MQMeshError)
        ),
    )
    lines += [
        "",
        "## Response codes",
        "",
        "As they are on the wire ([protocol](../protocol.md)).",
        "",
    ]
    texts = members_of(ResponseCode)
    lines += table(
        ("code", "name", "meaning", "try again"),
        ((str(one.value), code(one.name), *_split(texts[one.name])) for one in ResponseCode),
    )
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """Return the page of all settings of roles and options of clients."""
    lines = [
        "# Configuration",
        "",
        _MADE,
        "",
        _CONFIGURATION,
        "",
        "## Cluster file",
        "",
        "`conf/cluster.toml`, for `mqmesh up`. Its tables have the settings of a role.",
        "",
        *_settings(ClusterConfig, inner=False),
    ]
    for title, file, kind, live in _ROLES:
        where = f"`conf/{file}`." if file else "Installed with `mqmesh[console]`."
        lines += ["", f"## {title}", "", where, "", *_settings(kind, live)]
    lines += ["", "### Rules of a monitor", "", "Each a `[[rule]]`.", "", *_settings(RuleChange)]
    lines += ["", "## Security", "", "`[security]` of every role.", "", *_settings(SecurityConfig)]
    lines += ["", "## Options of clients", "", "Keyword arguments of their classes."]
    for title, options in _CLIENTS:
        lines += ["", f"### {title}", "", *_settings(options)]
    return "\n".join(lines) + "\n"


def benchmarks_page() -> str:
    """Return the page of all rows of ``scripts/bench``."""
    lines = ["# Rows of the benchmark", "", _MADE, "", _BENCHMARKS, ""]
    lines += table(
        ("row", "measures", "unit", "goal", ""),
        (
            (code(row.name), row.what, row.unit, _goal(row), "by name only" if row.optional else "")
            for row in ROWS.values()
        ),
    )
    return "\n".join(lines) + "\n"


PAGES: Final[dict[str, Callable[[], str]]] = {
    "metrics.md": metrics_page,
    "alarms.md": alarms_page,
    "errors.md": errors_page,
    "configuration.md": configuration_page,
    "benchmarks.md": benchmarks_page,
}


def stale() -> list[str]:
    """Return the names of pages that are not what the code says."""
    return [name for name, make in PAGES.items() if _kept(FOLDER / name) != make()]


def write() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")


def _kept(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _metrics_of(folders: tuple[str, ...]) -> list[Metric]:
    """Return the metrics of all tuples that modules below folders have, or import to report."""
    found: dict[str, Metric] = {}
    for info in pkgutil.walk_packages(mqmesh.__path__, "mqmesh."):
        if info.name.startswith(folders):
            module = importlib.import_module(info.name)
            for value in _values(module):
                rows = value if isinstance(value, tuple) else (value,)
                found |= {one.metric.name: one.metric for one in rows if isinstance(one, Measured)}
    return list(found.values())


def _values(module: Any) -> Iterator[Any]:
    for value in vars(module).values():
        yield value
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from vars(value).values()


def _exported() -> list[ExportedMetric]:
    """Return the metrics that the exporter makes itself."""
    found: dict[str, ExportedMetric] = {}
    for name in ("collector", "names"):
        module = importlib.import_module(f"mqmesh.roles.exporter.{name}")
        waiting = list(vars(module).values())
        while waiting:
            value = waiting.pop(0)
            if isinstance(value, tuple):
                waiting += value
            elif isinstance(value, ExportedMetric):
                found[value.name] = value
    return list(found.values())


def _own_labels(one: ExportedMetric) -> list[str]:
    return [label for label in one.labels if label not in (*NODE_LABELS, "otel_scope_name")]


def _goal(row: Row) -> str:
    found = [f"ratio ≥ {row.least_ratio}"] if row.least_ratio is not None else []
    found += [f"ratio ≤ {row.most_ratio}"] if row.most_ratio is not None else []
    found += [f"≥ {row.least:,g}"] if row.least is not None else []
    found += [f"≤ {row.most:,g}"] if row.most is not None else []
    found += [f"`{name}` ≥ {least:g}" for name, least in row.least_extra.items()]
    found += [f"`{name}` ≤ {most:g}" for name, most in row.most_extra.items()]
    return ", ".join(found)


class _Blank(str):
    """A name in the place of a value, whatever the format of the value is."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return str(self)


def _meaning(kind: type[BaseException]) -> str:
    first = paragraphs(sections(kind.__doc__ or "")[""])[0]
    return marks(first.removeprefix("Raised "), _DOCS)


def _split(text: str) -> tuple[str, str]:
    meaning, _, again = marks(" ".join(text.split()), _DOCS).partition(" Try again: ")
    return meaning, again.rstrip(".")


def _settings(
    kind: type[msgspec.Struct], live: tuple[str, ...] = (), *, inner: bool = True
) -> list[str]:
    """Return the table of a struct's settings.

    Args:
        kind: The struct.
        live: Those that change while the process runs.
        inner: List the settings of structs inside it, too.
    """
    heads = ["setting", "type", "default", "may be", "unit", "meaning"]
    rows = list(_rows(kind, "", inner=inner))
    if live:
        heads.insert(5, "live")
        for row in rows:
            row.insert(5, "yes" if row[0].strip("`") in live else "")
    return table(heads, rows)


def _rows(kind: type[msgspec.Struct], prefix: str, *, inner: bool) -> Iterator[list[str]]:
    meanings = fields_of(kind)
    inherited = kind.__base__.__struct_fields__ if kind.__name__.endswith("Options") else ()
    for field in (one for one in msgspec.structs.fields(kind) if one.name not in inherited):
        name = prefix + field.encode_name
        type_, meta = _plain(field.type)
        is_table = isinstance(type_, type) and issubclass(type_, msgspec.Struct)
        if inner and is_table and type_ is not SecurityConfig:
            yield from _rows(type_, f"{name}.", inner=inner)
            continue
        unit = next((unit for end, unit in _UNITS.items() if f"{end}_" in f"{name}_"), "")
        default = _default(field, unit)
        meaning = marks(meanings[field.name], _DOCS)
        yield [code(name), _word(type_), default, bounds(meta, unit), unit, meaning]


def _plain(kind: Any) -> tuple[Any, Any]:
    """Return a type without None and bounds, and the type with its bounds."""
    if type(None) in get_args(kind):
        kind = next(one for one in get_args(kind) if one is not type(None))
    return (get_args(kind)[0] if hasattr(kind, "__metadata__") else kind), kind


def _word(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (list, tuple):
        inner = _plain(get_args(kind)[0])[0]
        return "tables" if issubclass(inner, msgspec.Struct) else f"list of {_word(inner)}"
    names = {int: "integer", bool: "boolean", float: "number", str: "text", dict: "table"}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "table"
    return names.get(origin or kind, "text")


def _default(field: msgspec.structs.FieldInfo, unit: str) -> str:
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or isinstance(value, msgspec.Struct):
        return ""
    text = code(msgspec.json.encode(value, enc_hook=str).decode())
    if unit.startswith("bytes") and value >= 1 << 10:
        return f"{text} ({amount(value, unit)})"
    return text

"""docs/protocol.md says what the code does: codes, headers, limits, and its worked example."""

from __future__ import annotations

import enum
import importlib
import pkgutil
import re
import types
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest

import mqmesh.protocol
from mqmesh import host, metrics
from mqmesh.protocol import command, messaging, pulling, retries, route
from mqmesh.protocol.codes import RequestCode, ResponseCode
from mqmesh.protocol.commands import COMMANDS
from mqmesh.protocol.coordination import ChangeStatus
from mqmesh.protocol.membership import ConsumeFromWhere, MessageModel
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.pulling import ExpressionType, PullStatus
from mqmesh.protocol.retries import ResendStatus
from mqmesh.protocol.route import Perm
from mqmesh.transport import requests
from mqmesh.transport.interface import ServerLimits
from mqmesh.transport.zmq import sockets

HEADERS = {
    value.__name__: value
    for info in pkgutil.iter_modules(mqmesh.protocol.__path__)
    for value in vars(importlib.import_module(f"mqmesh.protocol.{info.name}")).values()
    if isinstance(value, type)
    and issubclass(value, msgspec.Struct)
    and value.__module__ == f"mqmesh.protocol.{info.name}"
    and value.__struct_config__.array_like
} | {
    kind.__name__: kind
    for kind in (
        host.ProcessMark,
        metrics.MetricReading,
        metrics.Metric,
        metrics.MetricSample,
        metrics.Distribution,
    )
}


@pytest.fixture(scope="module")
def text(project_root) -> str:
    return (project_root / "docs" / "protocol.md").read_text(encoding="utf-8")


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of the first table below each heading, without its head."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").strip().strip("`")
            done = False
        elif line.startswith("|") and not done:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found.setdefault(heading, []).append([cell.strip("`| ") for cell in cells])
        elif found.get(heading):
            done = True
    return {heading: rows[2:] for heading, rows in found.items()}


def type_name(kind: Any, meta: msgspec.Meta | None = None) -> str:
    """A field's type and bounds, as the document writes them."""
    if get_origin(kind) is Annotated:
        inner, *metas = get_args(kind)
        return type_name(inner, metas[-1])
    if get_origin(kind) in (Union, types.UnionType):
        kinds = sorted(get_args(kind), key=lambda one: one is type(None))
        return " or ".join("nil" if one is type(None) else type_name(one) for one in kinds)
    most = f" ≤ {meta.max_length:,}" if meta and meta.max_length is not None else ""
    if get_origin(kind) is tuple:
        inner, rest = get_args(kind)
        assert rest is Ellipsis
        return f"[{type_name(inner)}]{most}"
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return type_name(str, meta)
    if get_origin(kind) is list:
        return f"[{type_name(get_args(kind)[0])}]{most}"
    if get_origin(kind) is dict:
        key, value = map(type_name, get_args(kind))
        return f"{{{key}: {value}}}{most}"
    if kind is int:
        low = meta.ge if meta else None
        high = meta.le if meta else None
        # msgpack knows none beyond 64 bits, and msgspec no bound beyond 63.
        most = "2^64-1" if high is None else number(high)
        return "int" if low is None and high is None else f"int {number(low)}…{most}"
    if kind is str:
        least = f"{meta.min_length} ≤ " if meta and meta.min_length is not None else ""
        return f"{least}text{most}"
    if kind is bytes:
        return f"bytes{most}"
    if kind in (bool, float):
        return str(kind.__name__)
    assert issubclass(kind, msgspec.Struct), kind
    return kind.__name__


def number(value: Any) -> str:
    powers = {
        2**63 - 1: "2^63-1",
        2**62: "2^62",
        2**32 - 1: "2^32-1",
        2**31 - 1: "2^31-1",
        2**31: "2^31",
    }
    return powers.get(value, f"{value:,}")


def default_name(field: msgspec.structs.FieldInfo) -> str:
    """A field's default, as the document writes it."""
    if field.required:
        return "—"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "nil"
    return f"{value:,}" if type(value) is int else msgspec.json.encode(value).decode()


def rows_of(kind: type[msgspec.Struct]) -> list[list[str]]:
    """What a header's table must say: position, field, type, default."""
    return [
        [str(position), field.name, type_name(field.type), default_name(field)]
        for position, field in enumerate(msgspec.structs.fields(kind))
    ]


def flat(rows: list[list[str]], *columns: int) -> list[tuple[str, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


@pytest.mark.parametrize("name", sorted(HEADERS))
def test_every_header_is_described_field_by_field(text, name):
    described = [row[:4] for row in tables(text).get(name, [])]
    assert described == rows_of(HEADERS[name])
    for row in tables(text).get(name, []):
        assert row[4], f"{name}.{row[1]} has no meaning"


def test_every_request_code_is_listed_and_described(text):
    listed = tables(text)["Request codes"]
    assert flat(listed, 0, 1) == [(str(code.value), code.name) for code in sorted(RequestCode)]
    for code in RequestCode:
        assert re.search(rf"^### {code.name} \({code.value}\)$", text, re.MULTILINE), code


def test_the_table_of_commands_is_that_of_the_code(text):
    listed = {row[1]: row[2:6] for row in tables(text)["Request codes"]}
    for code, spec in COMMANDS.items():
        servers = ", ".join(sorted(map(str, spec.servers)))
        places = [", ".join(paths) or "—" for paths in (spec.topics, spec.groups)]
        assert listed[code.name] == [servers, str(spec.right), *places], code.name


def section_of(text: str, code: RequestCode) -> str:
    section = re.split(rf"^### {code.name} .*$", text, flags=re.MULTILINE)[1]
    return re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]


def test_every_command_names_the_types_of_its_headers(text):
    for code, spec in COMMANDS.items():
        section = section_of(text, code)
        asked, answered = re.search(
            r"\*\*Header:\*\*(.*?)\*\*Answer:\*\*(.*?)\*\*Errors:", section, re.DOTALL
        ).groups()
        for kind, told in ((spec.request, asked), (spec.reply, answered)):
            if kind is not None and "as QUERY_MESSAGE" not in told:
                assert f"`{kind.__name__}`" in told, f"{code.name}: {told}"
        if spec.reply is None:
            assert not re.search(r"`[A-Z]\w+[a-z]`", answered), code.name
        if "oneway" in answered:
            assert spec.oneway, code.name


def test_every_command_says_who_serves_it_what_it_answers_and_which_errors(text):
    for code in RequestCode:
        section = section_of(text, code)
        for word in ("**Served by:**", "**Header:**", "**Answer:**", "**Errors:**"):
            assert word in section, f"{code.name} lacks {word}"


def test_every_response_code_is_listed(text):
    listed = tables(text)["Response codes"]
    assert flat(listed, 0, 1) == [(str(code.value), code.name) for code in sorted(ResponseCode)]


@pytest.mark.parametrize("kind", [SendStatus, PullStatus, Perm, ResendStatus, ChangeStatus])
def test_every_number_on_the_wire_is_listed(text, kind):
    listed = tables(text)[kind.__name__]
    assert flat(listed, 0, 1) == [(str(int(one)), one.name) for one in kind.__members__.values()]


@pytest.mark.parametrize("kind", [MessageModel, ConsumeFromWhere, ExpressionType])
def test_every_word_on_the_wire_is_listed(text, kind):
    for one in kind:
        assert f"`{one.value}`" in text


def test_the_frame_layout_is_that_of_the_code(text):
    rows = re.findall(r"^(\d+|16) +(\d|…) +(u\d+|…) ", command.__doc__ or "", re.MULTILINE)
    assert [tuple(row[:3]) for row in tables(text)["Frame"]][:5] == rows[:5]


def test_the_limits_are_those_of_the_code(text):
    listed = {row[0]: row[1] for row in tables(text)["Limits"]}
    limits = ServerLimits()
    expected = {
        "frame": command.MAX_FRAME_BYTES,
        "header": command.MAX_HEADER_BYTES,
        "remark": command.MAX_REMARK_CHARACTERS,
        "batches in a SEND_MESSAGE": messaging.MAX_BATCHES_PER_REQUEST,
        "`max_bytes` of a PULL_MESSAGE": pulling.MAX_PULL_BYTES,
        "`suspend_timeout_ms` of a PULL_MESSAGE": pulling.MAX_SUSPEND_MS,
        "offsets in a request": pulling.MAX_OFFSETS_PER_REQUEST,
        "entries of a CONSUMER_SEND_MSG_BACK": retries.MAX_SEND_BACK_ENTRIES,
        "dead letters in a RESEND_DEAD_LETTERS": retries.MAX_RESENT_LETTERS,
        "queues of a topic": route.MAX_QUEUES_PER_TOPIC,
        "topics of a broker": route.MAX_TOPICS_PER_BROKER,
        "requests of one client": requests.MAX_REQUESTS_WAITING,
        "frames queued in ZeroMQ": f"{sockets.HIGH_WATER_MARK}"
        f"{sockets.SERVER_RECEIVE_HIGH_WATER_MARK}",
        "connections of a server": limits.max_connections,
        "answers that wait for one client": limits.max_pending_bytes,
        "bytes that wait for all clients, or of them": limits.max_total_pending_bytes,
        "handshake": sockets.HANDSHAKE_TIMEOUT_MS,
        "heartbeat interval": sockets.HEARTBEAT_INTERVAL_MS,
        "heartbeat timeout": sockets.HEARTBEAT_TIMEOUT_MS,
    }
    clean = {name.strip("`"): re.sub(r"[^\d]", "", value) for name, value in listed.items()}
    for name, value in expected.items():
        assert clean[name.strip("`")] == str(value), name


def test_the_worked_example_is_what_the_code_sends(text):
    request, response = re.findall(r"^```hex\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    asked = command.encode_frame(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        7,
        header=command.encode_header(route.GetRouteRequest("flights")),
    )
    answered = command.encode_frame(
        ResponseCode.TOPIC_NOT_EXIST,
        7,
        header=command.encode_header(command.ErrorHeader("no")),
        flags=command.RESPONSE,
    )
    for example, frame in ((request, asked), (response, answered)):
        data = "".join(line.partition("#")[0] for line in example.splitlines())
        assert bytes.fromhex(data) == frame

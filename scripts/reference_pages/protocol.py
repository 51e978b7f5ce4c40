"""The reference of the protocol: commands, structs and words on the wire.

Made of the table of commands, of the docstrings of requests and answers, and of the constants that
bound them. It is no file of the repository: ``scripts/site`` makes it.
"""

import enum
import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import msgspec

import mqmesh.protocol
from mqmesh import host, metrics
from mqmesh.protocol import (
    admin,
    command,
    commands,
    membership,
    messaging,
    pulling,
    queries,
    retries,
    route,
)
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.commands import COMMANDS, CommandSpec, RequestCode
from mqmesh.transport import requests
from mqmesh.transport.interface import ServerLimits
from mqmesh.transport.zmq import sockets
from reference_pages.described import (
    code,
    default_name,
    entries,
    fields_of,
    marks,
    members_of,
    paragraphs,
    sections,
    table,
    type_name,
)

PAGE: Final = "protocol-reference.md"
TITLE: Final = "Reference of the protocol"
SERVER: Final = ServerLimits()
LIMITS: Final = (
    ("frame, bytes", command.MAX_FRAME_BYTES, "ZeroMQ closes the connection"),
    ("header, bytes", command.MAX_HEADER_BYTES, "MESSAGE_ILLEGAL"),
    ("remark, characters", command.MAX_REMARK_CHARACTERS, "cut"),
    ("further frames of an answer", command.MAX_FURTHER_FRAMES, "none is sent"),
    ("batches of a SEND_MESSAGE", messaging.MAX_BATCHES_PER_REQUEST, "MESSAGE_ILLEGAL"),
    ("`max_bytes` of a PULL_MESSAGE", pulling.MAX_PULL_BYTES, "MESSAGE_ILLEGAL"),
    ("`suspend_timeout_ms` of a PULL_MESSAGE", pulling.MAX_SUSPEND_MS, "MESSAGE_ILLEGAL"),
    ("offsets of a request", pulling.MAX_OFFSETS_PER_REQUEST, "MESSAGE_ILLEGAL"),
    ("messages of an answer to a query", queries.MAX_QUERY_MESSAGES, "MESSAGE_ILLEGAL"),
    ("entries of a CONSUMER_SEND_MSG_BACK", retries.MAX_SEND_BACK_ENTRIES, "MESSAGE_ILLEGAL"),
    ("dead letters of a RESEND_DEAD_LETTERS", retries.MAX_RESENT_LETTERS, "MESSAGE_ILLEGAL"),
    ("topics of a GET_ROUTES_OF_TOPICS", route.MAX_TOPICS_PER_REQUEST, "MESSAGE_ILLEGAL"),
    ("topics of a CREATE_TOPICS", admin.MAX_TOPICS_PER_CREATION, "MESSAGE_ILLEGAL"),
    (
        "subscriptions of a consumer",
        membership.MAX_SUBSCRIPTIONS,
        "`InvalidArgument` at `subscribe`; MESSAGE_ILLEGAL",
    ),
    ("queues of a topic", route.MAX_QUEUES_PER_TOPIC, "MESSAGE_ILLEGAL"),
    (
        "topics of a broker",
        route.MAX_TOPICS_PER_BROKER,
        "SYSTEM_BUSY; for those that users make from `max_topics` on",
    ),
    (
        "connections of a server (`max_connections`)",
        SERVER.max_connections,
        "SYSTEM_BUSY, then the connection is ended; fewer where the limit of open files is lower",
    ),
    (
        "bytes that wait for one client (`max_pending_bytes`)",
        SERVER.max_pending_bytes,
        "SYSTEM_BUSY, and pulls get fewer messages; at twice as much the connection is ended",
    ),
    (
        "bytes that wait for all clients, or of them (`max_total_pending_bytes`)",
        SERVER.max_total_pending_bytes,
        "connections that have the most are ended",
    ),
    ("open requests of one client", requests.MAX_REQUESTS_WAITING, "refused by the SDK itself"),
    (
        "frames queued in ZeroMQ, each way and connection",
        sockets.HIGH_WATER_MARK,
        "the sender's own queue grows",
    ),
    (
        "frames of a connection that a server has not read",
        sockets.SERVER_RECEIVE_HIGH_WATER_MARK,
        "the sender's own queue grows",
    ),
    ("handshake, ms", sockets.HANDSHAKE_TIMEOUT_MS, "ZeroMQ closes the connection"),
    ("heartbeat interval, ms", sockets.HEARTBEAT_INTERVAL_MS, ""),
    ("heartbeat timeout, ms", sockets.HEARTBEAT_TIMEOUT_MS, "the connection is given up"),
)
_HEAD: Final = f"""# {TITLE}

Made of the code: the table of commands in `mqmesh/protocol/commands.py`, and the docstrings of the
structs in `mqmesh/protocol/`. Without this page, `python -m pydoc mqmesh.protocol.pulling` shows
those of a module. Frames, and the rules for clients, are in [protocol.md](protocol.md).

Every command may also be answered with MESSAGE_ILLEGAL (malformed header), NO_PERMISSION (no
right), REQUEST_CODE_NOT_SUPPORTED (the role does not serve it), SYSTEM_BUSY (connections, or unread
answers), SERVICE_NOT_AVAILABLE (a broker that is not ready) and SYSTEM_ERROR. The lists below name
what is special to a command; what the codes
mean, and when to try again: [errors](reference/errors.md).
"""


def modules() -> list[ModuleType]:
    """Return the modules of the protocol, and those whose structs it carries."""
    names = (info.name for info in pkgutil.iter_modules(mqmesh.protocol.__path__))
    own = [importlib.import_module(f"mqmesh.protocol.{name}") for name in names]
    return [*own, host, metrics]


def structs_of(module: ModuleType) -> list[type[msgspec.Struct]]:
    """Return the structs of a module that are put on the wire, in its order."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
        and (value.__struct_config__.array_like or value is queries.FoundMessage)
    ]


def words_of(module: ModuleType) -> list[type[enum.Enum]]:
    """Return the enumerations of a module whose values are put on the wire."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, enum.Enum)
        and value.__module__ == module.__name__
        and value not in (RequestCode, ResponseCode, commands.ServedBy, commands.Right)
    ]


def description(spec: CommandSpec) -> str:
    """Return the docstring of a command: below its code, or of its request."""
    text = members_of(RequestCode).get(spec.code.name, "")
    if not text and spec.request is not None:
        text = (spec.request.__doc__ or "").removeprefix(f"{spec.code.name}: ")
    return text


def page() -> str:
    """Return the page, as Markdown."""
    lines = [_HEAD, "## Commands", ""]
    heads = ("code", "name", "served by", "right", "topics", "groups", "summary")
    lines += table(heads, map(_row, sorted(COMMANDS.values(), key=lambda spec: spec.code)))
    lines += ["", "## Rights", ""]
    lines += _members(commands.Right)
    lines += ["", "## Limits", "", "Each also bounds what a hostile peer can make a server hold."]
    lines += ["", *table(("limit", "value", "beyond it"), ((a, f"{b:,}", c) for a, b, c in LIMITS))]
    for module in modules():
        lines += _module(module)
    return "\n".join(lines) + "\n"


def _module(module: ModuleType) -> Iterator[str]:
    """Yield the commands of a module, each with its structs, and what else it has."""
    own = [spec for spec in COMMANDS.values() if _subject(spec) == module.__name__]
    structs, words = structs_of(module), words_of(module)
    if not (own or structs or words):
        return
    yield f"\n## {module.__name__.removeprefix('mqmesh.').removeprefix('protocol.')}\n"
    yield from paragraphs(marks(module.__doc__ or ""))[:1]
    for spec in own:
        yield from _command(spec)
        for kind in (spec.request, spec.reply):
            if kind in structs:
                structs.remove(kind)
                yield from _struct(kind, "" if kind is spec.request else _intro(kind))
    for kind in structs:
        yield from _struct(kind, _intro(kind))
    for one in words:
        yield f"\n### {one.__name__}\n\n{marks(paragraphs(one.__doc__ or '')[0])}\n"
        yield from _members(one)


def _struct(kind: type[msgspec.Struct], intro: str) -> Iterator[str]:
    yield f"\n#### {kind.__name__}\n"
    if intro:
        yield f"{intro}\n"
    yield from _fields(kind)


def _intro(kind: type[msgspec.Struct]) -> str:
    return marks(paragraphs(sections(kind.__doc__ or "")[""])[0])


def _subject(spec: CommandSpec) -> str:
    kind = spec.request or spec.reply
    if spec.code is RequestCode.SEND_MESSAGE:
        return messaging.__name__
    return admin.__name__ if kind is None else kind.__module__


def _command(spec: CommandSpec) -> Iterator[str]:
    parts = sections(description(spec))
    yield f"\n### {spec.code.name} ({spec.code.value})\n"
    first, *rest = paragraphs(marks(parts[""]))
    yield _capital(first)
    for text in rest:
        yield f"\n{text}"
    answer = "none, it is oneway" if spec.oneway else _link(spec.reply) or "an empty header"
    yield ""
    yield f"* **Served by:** {', '.join(sorted(spec.servers))}. **Right:** {spec.right}."
    header = "fixed" if spec.fixed else _link(spec.request) or "none"
    yield f"* **Header:** {header}. **Answer:** {'fixed' if spec.fixed else answer}."
    for name, text in entries(parts.get("Errors", "")).items():
        yield f"* {name}: {marks(text)}"


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    fields = msgspec.structs.fields(kind)
    if not fields:
        yield "No fields: an empty array, or no bytes at all."
        return
    meanings = fields_of(kind)
    is_map = not kind.__struct_config__.array_like
    if is_map:
        yield "Not an array but a map, with these names.\n"
    yield from table(
        ("#", "field", "type", "default", "meaning"),
        (
            (
                "" if is_map else str(position),
                code(field.name),
                _linked(type_name(field.type)),
                default_name(field),
                marks(meanings[field.name]),
            )
            for position, field in enumerate(fields)
        ),
    )


def _members(kind: type[enum.Enum]) -> list[str]:
    texts = members_of(kind)
    return table(
        ("value", "name", "meaning"),
        (
            (f"`{one.value}`", code(name), marks(" ".join(texts[name].split())))
            for name, one in kind.__members__.items()
        ),
    )


def _row(spec: CommandSpec) -> tuple[str, ...]:
    places = (", ".join(paths) or "—" for paths in (spec.topics, spec.groups))
    first = paragraphs(marks(sections(description(spec))[""]))[0]
    summary = re.split(r"(?<=[^.]{3})[.;](?= |$)", first)[0]
    anchor = f"{spec.code.name.lower()}-{spec.code.value}"
    name = f"[{spec.code.name}](#{anchor})"
    servers = ", ".join(sorted(spec.servers))
    return (str(spec.code.value), name, servers, str(spec.right), *places, _capital(summary))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _link(kind: type[msgspec.Struct] | None) -> str:
    return "" if kind is None else f"[{kind.__name__}](#{kind.__name__.lower()})"


def _linked(text: str) -> str:
    """Return a type with links to the structs that it names."""
    known = {kind.__name__ for module in modules() for kind in structs_of(module)}
    return re.sub(
        r"\b[A-Z]\w+",
        lambda found: f"[{found[0]}](#{found[0].lower()})" if found[0] in known else found[0],
        text,
    )

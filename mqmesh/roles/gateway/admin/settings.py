"""Settings of brokers and name servers by RocketMQ's names, as Java's properties. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final

from mqmesh.errors import InvalidArgument, RemoteProtocolError
from mqmesh.message import TRACE_TOPIC
from mqmesh.protocol.admin import MAX_CHANGES, ConfigEntry

UNITS: Final = "ms"
"""End of the names of mqmesh's times, which RocketMQ's have not."""
_FIXED: Final = {
    "brokerRole": "ASYNC_MASTER",
    "filterServerNums": "0",
    "msgTraceTopicName": TRACE_TOPIC,
    "traceOn": "true",
    "traceTopicEnable": "true",
    "useTLS": "false",
}
"""Settings that RocketMQ's tools look for, and that mqmesh has not."""
_OTHER_NAMES: Final = {
    "cluster_name": "brokerClusterName",
    "auto_create_subscription_group": "autoCreateSubscriptionGroup",
}


def encode_properties(values: Mapping[str, str]) -> bytes:
    """Return settings as Java reads them: a line each, ``name=value``."""
    lines = []
    for name, value in values.items():
        text = value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{name}={text}\n")
    return "".join(lines).encode()


def parse_properties(body: bytes) -> dict[str, str]:
    """Read settings as Java writes them.

    Raises:
        RemoteProtocolError: They are no text.
        InvalidArgument: A line has no name, or there are more than 64.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"settings that are no text: {error}") from error
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, mark, value = line.partition("=")
        if not name.strip() or not mark:
            raise InvalidArgument(f"{line!r:.100} is no setting; write name=value")
        found[name.strip()] = value.strip()
    if len(found) > MAX_CHANGES:
        raise InvalidArgument(f"{len(found)} settings at once; {MAX_CHANGES} are the limit")
    return found


def rocketmq_settings(values: Mapping[str, str]) -> dict[str, str]:
    """Return a broker's settings under RocketMQ's names.

    Args:
        values: By mqmesh's keys; those of tables have dots. Those of tables that RocketMQ has no
            settings of keep their names.
    """
    found = dict(_FIXED)
    return found | {_camel(key): value for key, value in values.items()}


def mqmesh_settings(wanted: Mapping[str, str], entries: Iterable[ConfigEntry]) -> dict[str, str]:
    """Return changes by mqmesh's keys.

    Args:
        wanted: New values, by RocketMQ's names or mqmesh's keys.
        entries: Settings of the broker.

    Raises:
        InvalidArgument: A setting is unknown here.
    """
    keys: dict[str, str] = {}
    for one in entries:
        plain = _plain(_camel(one.key))
        keys |= {plain.removesuffix(UNITS): one.key, plain: one.key, one.key: one.key}
    found: dict[str, str] = {}
    for name, value in wanted.items():
        key = keys.get(name) or keys.get(_plain(name))
        if key is None:
            raise InvalidArgument(
                f"{name!r:.100} is no setting of mqmesh's brokers; `mqmesh broker config` lists "
                "them, and which can be changed while a broker runs"
            )
        found[key] = value
    return found


def _camel(key: str) -> str:
    table, _, name = key.rpartition(".")
    first, *others = name.split("_")
    if table not in ("", "storage", "ha") or (table and not others):
        return key
    return _OTHER_NAMES.get(name) or first + "".join(word.capitalize() for word in others)


def _plain(name: str) -> str:
    return name.lower()

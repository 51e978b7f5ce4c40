"""Namespaces: topics and groups of several tenants in one cluster.

Brokers have a name with its namespace in front, ``shop%orders``, as RocketMQ does; topics of a
group keep their prefix before it, ``%RETRY%shop%billing``. A client that has a namespace adds it to
the names that it sends and takes it off those that it gets.
"""

import re
from functools import lru_cache
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import DLQ_PREFIX, RESERVED_TOPICS, RETRY_PREFIX, TRACE_TOPIC

SEPARATOR: Final = "%"
MAX_NAMESPACE_LENGTH: Final = 64
"""In characters. Names keep their limits, with the namespace: 127 of a topic, 255 of a group."""

_NAMESPACE = re.compile(rf"(?!\.\.?\Z)[|a-zA-Z0-9_.-]{{1,{MAX_NAMESPACE_LENGTH}}}\Z")
_SHARED: Final = RESERVED_TOPICS - {TRACE_TOPIC}
"""Topics of the cluster, which have no namespace; of the trace each namespace has its own."""


def check_namespace(namespace: str) -> str:
    """Return the namespace if its name is legal.

    Raises:
        InvalidArgument: Empty, longer than 64, ``.``, ``..``, or a character outside
            ``[|a-zA-Z0-9_.-]``; a ``%`` ends the namespace of a name.
    """
    if not isinstance(namespace, str) or _NAMESPACE.match(namespace) is None:
        raise InvalidArgument(
            f"namespace {namespace!r:.100} is not 1 to {MAX_NAMESPACE_LENGTH} characters of "
            "[|a-zA-Z0-9_.-], nor may it be . or .."
        )
    return namespace


def prefix_of(namespace: str) -> str:
    """Return the text in front of the names of a namespace; "" for none."""
    return namespace and namespace + SEPARATOR


def add_namespace(namespace: str, name: str) -> str:
    """Return the name that brokers have for a topic or group of a namespace.

    Args:
        namespace: Namespace; "" for none.
        name: Name within it. Empty ones, and topics of the cluster, stay as they are.
    """
    if not namespace or not name or name in _SHARED:
        return name
    prefix, name = _divided(name)
    return prefix + prefix_of(namespace) + name


def drop_namespace(namespace: str, name: str) -> str | None:
    """Return the name that a client in a namespace has for a topic or group.

    Args:
        namespace: Namespace; "" for none.
        name: Name at brokers.

    Returns:
        None for a name that is not in the namespace.
    """
    if not namespace or not name:
        return name
    prefix, name = _divided(name)
    start = prefix_of(namespace)
    return prefix + name[len(start) :] if name.startswith(start) else None


@lru_cache(maxsize=1024)
def shown_name(namespace: str, name: str) -> str:
    """Return a name as a client in a namespace shows it: another's stays as it is."""
    shown = drop_namespace(namespace, name)
    return name if shown is None else shown


def is_within(namespace: str, name: str) -> bool:
    """Return True if a topic or group, by its name at brokers, is in a namespace, or "" is one."""
    return _divided(name)[1].startswith(prefix_of(namespace))


def namespace_of(name: str) -> str:
    """Return the namespace of a topic or group, by its name at brokers; "" for none."""
    namespace, separator, _ = _divided(name)[1].partition(SEPARATOR)
    return namespace if separator else ""


def is_trace_topic(name: str) -> bool:
    """Return True for the topic of the message trace, by its name at brokers, of any namespace."""
    return shown_name(namespace_of(name), name) == TRACE_TOPIC


def _divided(name: str) -> tuple[str, str]:
    """Return the prefix of a topic that belongs to a group, or "", and the rest."""
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name

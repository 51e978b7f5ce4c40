"""Names of topics and groups in headers, found by the types of their fields.

Every field that holds one has a type of this module. So clients with a namespace add it to names
and take it off (``sdk/client/namespaced.py``), and servers keep users within theirs
(``security/guard.py``), for each command.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import inspect

NameKind = Literal["topic", "group", "dead letters"]
"""Kind of a name; the last one is a topic, or one of the words ``keep`` and ``drop``."""

TopicName = Annotated[str, msgspec.Meta(max_length=512, extra={"names": "topic"})]
GroupName = Annotated[str, msgspec.Meta(max_length=512, extra={"names": "group"})]
"""A consumer group or a producer group."""
DeadLetterName = Annotated[str, msgspec.Meta(max_length=512, extra={"names": "dead letters"})]

Rename = Callable[[NameKind, str], str | None]
"""Function that returns another name for one, or None for one that is not to be shown."""
_Change = Callable[[Any, Rename], Any]


class _NotShownError(Exception):
    """A value that has a name that is not to be shown."""


def renamed(header: msgspec.Struct, rename: Rename) -> Any:
    """Return a header with other names.

    Elements of lists, and keys, with names that ``rename`` does not show are left out; a name that
    stands alone stays as it is then.
    """
    changed = {}
    for name, change in _fields_of(type(header)).items():
        with suppress(_NotShownError):
            changed[name] = change(getattr(header, name), rename)
    return msgspec.structs.replace(header, **changed) if changed else header


def names_in(header: msgspec.Struct) -> list[tuple[NameKind, str]]:
    """Return all names of a header, but for those left empty."""
    found = []

    def note(kind: NameKind, name: str) -> str:
        if name:
            found.append((kind, name))
        return name

    for name, change in _fields_of(type(header)).items():
        change(getattr(header, name), note)
    return found


def has_names(kind: type[msgspec.Struct]) -> bool:
    """Return True for a type of headers that may have names."""
    return bool(_fields_of(kind))


@lru_cache(maxsize=1024)
def _fields_of(kind: type[msgspec.Struct]) -> dict[str, _Change]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return dict(_changes(found))


def _changes(kind: inspect.StructType) -> Iterator[tuple[str, _Change]]:
    for field in kind.fields:
        change = _change_of(field.type)
        if change is not None:
            yield field.name, change


def _change_of(kind: inspect.Type) -> _Change | None:
    """Return the function that changes the names in a value of a type; None if it has none."""
    match kind:
        case inspect.Metadata(extra={"names": named}):
            return _change_of_name(named)
        case inspect.Metadata(type=inner):
            return _change_of(inner)
        case inspect.StructType():
            return _change_of_struct(dict(_changes(kind)))
        case inspect.ListType(item_type=item):
            return _change_of_list(_change_of(item))
        case inspect.DictType(key_type=key):
            return _change_of_keys(_change_of(key))
        case inspect.UnionType(types=types):
            changes = [change for one in types if (change := _change_of(one)) is not None]
            return _change_of_optional(changes[0]) if changes else None
    return None


def _change_of_name(kind: NameKind) -> _Change:
    def change(name: str, rename: Rename) -> str:
        new = rename(kind, name)
        if new is None:
            raise _NotShownError
        return new

    return change


def _change_of_struct(fields: dict[str, _Change]) -> _Change | None:
    def change(value: msgspec.Struct, rename: Rename) -> msgspec.Struct:
        changed = {name: one(getattr(value, name), rename) for name, one in fields.items()}
        return msgspec.structs.replace(value, **changed)

    return change if fields else None


def _change_of_list(item: _Change | None) -> _Change | None:
    if item is None:
        return None

    def change(values: list[Any], rename: Rename) -> list[Any]:
        shown = []
        for one in values:
            with suppress(_NotShownError):
                shown.append(item(one, rename))
        return shown

    return change


def _change_of_keys(key: _Change | None) -> _Change | None:
    if key is None:
        return None

    def change(values: dict[str, Any], rename: Rename) -> dict[str, Any]:
        shown = {}
        for name, value in values.items():
            with suppress(_NotShownError):
                shown[key(name, rename)] = value
        return shown

    return change


def _change_of_optional(inner: _Change) -> _Change:
    return lambda value, rename: value if value is None else inner(value, rename)

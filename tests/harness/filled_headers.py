"""Headers of requests that say something in every field, whatever the command is. Pure."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Final

import msgspec

NAMED: Final = "named"


def filled(kind: Any, names: Mapping[str, str] | None = None) -> Any:
    """Makes a value of a header's type with a value in every field.

    Args:
        kind: The type.
        names: Names of topics and groups, by the kinds of ``protocol.names``; other texts, and
            kinds that are left out, get ``named``.
    """
    return _filled(kind, names or {})


def _filled(kind: Any, names: Mapping[str, str]) -> Any:
    found = msgspec.inspect.type_info(kind)
    text = NAMED
    if isinstance(found, msgspec.inspect.Metadata):
        text = names.get((found.extra or {}).get("names", ""), NAMED)
        found = found.type
    if isinstance(found, msgspec.inspect.UnionType):
        found = next(one for one in found.types if not isinstance(one, msgspec.inspect.NoneType))
    match found:
        case msgspec.inspect.StructType(cls):
            hints = typing.get_type_hints(cls, include_extras=True)
            return cls(**{name: _filled(hints[name], names) for name in cls.__struct_fields__})
        case msgspec.inspect.ListType():
            return [_filled(typing.get_args(_bare(kind))[0], names)]
        case msgspec.inspect.DictType():
            return {
                _filled(key, names): _filled(value, names)
                for key, value in [typing.get_args(_bare(kind))]
            }
        case msgspec.inspect.StrType():
            return text
        case msgspec.inspect.BytesType():
            return bytes(found.min_length or 0)
        case msgspec.inspect.BoolType():
            return False
        case msgspec.inspect.IntType():
            return max(found.ge or 0, 1)
        case msgspec.inspect.FloatType():
            return 1.0
    return next(iter(found.cls)) if isinstance(found, msgspec.inspect.EnumType) else None


def _bare(kind: Any) -> Any:
    """Returns a type without its bounds, and without None."""
    if typing.get_origin(kind) is typing.Annotated:
        return _bare(typing.get_args(kind)[0])
    options = [one for one in typing.get_args(kind) if one is not type(None)]
    is_whole = typing.get_origin(kind) in (list, dict) or not options
    return kind if is_whole else _bare(options[0])

"""Reads a configuration: a TOML file, then ``--set key=value``, into a role's own struct.

Defaults, bounds and meanings stand in the structs; this module only brings text into
them. Every error is reported in one line: its place, the key, the value, the allowed
values, and for an unknown key the nearest known one.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from mqmesh.errors import ConfigError
from mqmesh.message import check_group
from mqmesh.units import MIB

MAX_FILE_BYTES: Final = 1 * MIB
MAX_KEY_PARTS: Final = 16
"""Most parts of a dotted key: the parser's work grows with their square, and with table keys."""
OVERRIDE_SOURCE: Final = "--set"

_T = TypeVar("_T", bound=msgspec.Struct)
_Step = str | int
_PLACE = re.compile(r" - at `\$(.*)`\Z")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_SIMILARITY: Final = 0.5
# Matches comments, strings and keys, so that dots in comments and strings are not taken for dots
# of keys. An unterminated string extends to the end of the text. Possessive quantifiers prevent
# backtracking, so that the work grows linearly with the text.
_PART: Final = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)"""
_TOKEN: Final = re.compile(
    r"\#[^\n]*+"
    r"|\"\"\"(?:[^\"\\]|\\.|\"{1,2}(?!\"))*+\"{0,5}"
    r"|'''(?:[^']|'{1,2}(?!'))*+'{0,5}"
    rf"|(?P<key>{_PART}(?:[ \t]*+\.[ \t]*+{_PART})*+)",
    re.DOTALL,
)
_KEY_PART: Final = re.compile(_PART)


def load_config(
    kind: type[_T],
    path: Path | None = None,
    table: str | None = None,
    overrides: Sequence[str] = (),
    *,
    prepare: Callable[[dict[str, Any]], None] | None = None,
    fill: Callable[[dict[str, Any]], None] | None = None,
) -> _T:
    """Loads a configuration.

    Args:
        kind: Struct to fill; its defaults hold for fields that are not set.
        path: TOML file, None for defaults alone.
        table: Dotted name of the table in the file, None for the whole file.
        overrides: ``key=value`` each, with a dotted key; a later one wins. The value is TOML;
            a value that is not valid TOML, and any value of a text field, is taken literally.
        prepare: Adds fields that rules of the struct need. It gets the data as they were given,
            of any type.
        fill: Adds fields that follow from other settings. It gets data that fits the struct, with
            only those fields that were set.

    Raises:
        ConfigError: One line that says what to correct.
    """
    data = {} if path is None else _select(read_toml(path), table, path)
    return _build(kind, data, "defaults" if path is None else str(path), overrides, prepare, fill)


def parse_config(
    kind: type[_T],
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    *,
    prepare: Callable[[dict[str, Any]], None] | None = None,
    fill: Callable[[dict[str, Any]], None] | None = None,
) -> _T:
    """Loads a configuration from the text of a TOML file.

    Args:
        kind: Struct to fill.
        text: TOML.
        source: Name of the text in errors.
        overrides, prepare, fill: As for ``load_config``.

    Raises:
        ConfigError: One line that says what to correct.
    """
    return _build(kind, _parse(text, source), source, overrides, prepare, fill)


def convert_values(kind: type[_T], values: dict[str, Any], source: str) -> _T:
    """Makes settings of values by name, as a program gives them.

    Args:
        kind: Struct to fill.
        values: Fields by name.
        source: Name of the values in errors.

    Raises:
        ConfigError: One line that names the wrong value and the allowed ones.
    """
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return _convert(kind, info, values, source, set())


def override_config(config: _T, values: Mapping[str, str], source: str) -> _T:
    """Settings with other values.

    Args:
        config: Settings.
        values: Dotted keys of the struct, and values as ``--set key=value`` has them.
        source: Name of the values in errors.

    Raises:
        ConfigError: One line that names the wrong value and the allowed ones.
    """
    info = inspect.type_info(type(config))
    assert isinstance(info, inspect.StructType)
    data = msgspec.to_builtins(config)
    for key, text in values.items():
        _apply(data, info, f"{key}={text}")
    return _convert(type(config), info, data, source, set())


def text_override(key: str, value: str) -> str:
    """Make an override, as ``load_config`` takes it, that gives a text field exactly this value.

    Args:
        key: Dotted name of the field.
        value: New value, such as a path; quotes and ``=`` in it are taken literally.
    """
    return f"{key}={_toml_value(value)}"


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        ConfigError: It cannot be read, is no TOML, or has over ``MAX_FILE_BYTES``.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"configuration file {path}: {reason}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"configuration file {path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path}: not UTF-8 at byte {error.start}") from error
    return _parse(text, str(path))


def dump_toml(config: msgspec.Struct) -> str:
    """Dump a configuration as TOML, defaults included; ``load_config`` reads it back.

    Fields that are None are left out, because TOML has no null value.
    """
    values = msgspec.to_builtins(config)
    assert isinstance(values, dict)
    return "\n".join(_toml_lines(values, "")) + "\n"


def check_utf8(what: str, text: str) -> None:
    """Checks that files of settings, which are UTF-8, can hold a text.

    Args:
        what: Description of the text for the error.
        text: A text such as a path, as the system gave it.

    Raises:
        ConfigError: It has bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: not UTF-8, so no file of settings can hold it") from None


def check_names(config: msgspec.Struct, *fields: str) -> None:
    """Checks names of processes, broker groups and clusters.

    Args:
        config: Settings.
        fields: Which of them are such names.

    Raises:
        ConfigError: Names the field and the error in it.
    """
    for field in fields:
        try:
            check_group(getattr(config, field))
        except ConfigError as error:
            raise ConfigError(f"{field} is no legal name: {error}") from None


def key_names(kind: type[msgspec.Struct]) -> list[str]:
    """Return every key of a struct, tables inside it by dotted names, in the struct's order."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return list(_key_names(info, ""))


def _key_names(info: inspect.StructType, prefix: str) -> Iterator[str]:
    for field in info.fields:
        inner = _struct_of(field.type)
        if inner is None:
            yield prefix + field.encode_name
        else:
            yield from _key_names(inner, f"{prefix}{field.encode_name}.")


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        # Editors of Windows put a byte order mark in front.
        return _load_toml(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not TOML: {error}") from error


def _load_toml(text: str) -> dict[str, Any]:
    """Parse TOML in a time that grows with its length only.

    Raises:
        ValueError: It is none, a number has over 4,300 digits, or a key over ``MAX_KEY_PARTS``.
        RecursionError: Arrays or tables stand in one another too deeply.
    """
    for token in _TOKEN.finditer(text):
        key = token["key"]
        if key is not None and len(key) > 2 * MAX_KEY_PARTS:
            count = sum(1 for _ in _KEY_PART.finditer(key))
            if count > MAX_KEY_PARTS:
                line = text.count("\n", 0, token.start()) + 1
                raise ValueError(
                    f"the key {key[:40]}… in line {line} has {count:,} parts; at most "
                    f"{MAX_KEY_PARTS} are allowed"
                )
    import tomllib  # only here: clients, which read none, start sooner

    return tomllib.loads(text)


def _select(data: dict[str, Any], table: str | None, path: Path) -> dict[str, Any]:
    if table is None:
        return data
    found: Any = data
    for step in table.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        tables = ", ".join(name for name, value in data.items() if isinstance(value, dict))
        raise ConfigError(f"{path}: no table [{table}]; the file has {tables or 'no tables'}")
    return found


def _build(
    kind: type[_T],
    data: dict[str, Any],
    source: str,
    overrides: Sequence[str],
    prepare: Callable[[dict[str, Any]], None] | None = None,
    fill: Callable[[dict[str, Any]], None] | None = None,
) -> _T:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    overridden = {_apply(data, info, override) for override in overrides}
    if prepare is not None:
        prepare(data)
    config = _convert(kind, info, data, source, overridden)
    if fill is None:
        return config
    fill(data)
    return _convert(kind, info, data, source, overridden)


def _apply(data: dict[str, Any], info: inspect.StructType, override: str) -> tuple[_Step, ...]:
    """Puts one override into the data; returns where."""
    key, equals, text = override.partition("=")
    steps = [step.strip() for step in key.split(".")]
    if not equals or not all(steps):
        raise ConfigError(f"{OVERRIDE_SOURCE} {override!r}: must have the form key=value")
    if len(steps) > MAX_KEY_PARTS:
        raise ConfigError(
            f"{OVERRIDE_SOURCE} {override[:40]!r}…: the key has {len(steps):,} parts; at most "
            f"{MAX_KEY_PARTS} are allowed"
        )
    check_utf8(f"{OVERRIDE_SOURCE} {override!r}", text)
    place: list[_Step] = []
    spot: Any = data
    kind: inspect.Type | None = info
    for last, step in ((index == len(steps) - 1, step) for index, step in enumerate(steps)):
        index = _index(spot, step, override)
        kind = _type_below(kind, index)
        place.append(index)
        if last:
            spot[index] = _override_value(text, kind)
        elif isinstance(spot, list):
            spot = spot[int(index)]
        else:
            spot = spot.setdefault(index, {})
    return tuple(place)


def _index(spot: Any, step: str, override: str) -> Any:
    if isinstance(spot, dict):
        return step
    if isinstance(spot, list):
        if step.isdecimal() and len(step) < 6 and int(step) < len(spot):
            return int(step)
        raise ConfigError(
            f"{OVERRIDE_SOURCE} {override!r}: {step!r} must be a number below {len(spot)}"
        )
    raise ConfigError(f"{OVERRIDE_SOURCE} {override!r}: there is no table that could hold {step!r}")


def _override_value(text: str, kind: inspect.Type | None) -> Any:
    try:
        parsed = _load_toml(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break in the text must not smuggle in a second key.
    if set(parsed) != {"value"}:
        return text
    value = parsed["value"]
    wants_text = kind is not None and all(
        isinstance(one, inspect.StrType | inspect.EnumType | inspect.NoneType)
        for one in _alternatives(kind)
    )
    return text if wants_text and not isinstance(value, str) else value


def _convert(
    kind: type[_T],
    info: inspect.StructType,
    data: dict[str, Any],
    source: str,
    overridden: set[tuple[_Step, ...]],
) -> _T:
    def source_of(place: Sequence[_Step]) -> str:
        by_option = any(tuple(place[: len(one)]) == one for one in overridden)
        return OVERRIDE_SOURCE if by_option else source

    for unknown, known in _unknown_keys(info, data, ()):
        raise ConfigError(f"{source_of(unknown)}: {_unknown_message(unknown, known)}")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        place = _place_of(str(error))
        raise ConfigError(
            f"{source_of(place)}: {_explain(str(error), place, info, data)}"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _unknown_keys(
    kind: inspect.Type, data: Any, place: tuple[_Step, ...]
) -> Iterator[tuple[tuple[_Step, ...], list[str]]]:
    """Yield the places of keys that the struct does not have, with the ones it has."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            below = _type_below(kind, index)
            if below is not None:
                yield from _unknown_keys(below, item, (*place, index))
        return
    struct = _struct_of(kind)
    if struct is None or not isinstance(data, dict):
        return
    types = {field.encode_name: field.type for field in struct.fields}
    for key, value in data.items():
        if key in types:
            yield from _unknown_keys(types[key], value, (*place, key))
        else:
            yield (*place, key), list(types)


def _unknown_message(place: Sequence[_Step], known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=_SIMILARITY)
    prefix = _dotted(place[:-1])
    prefix = prefix + "." if prefix else ""
    advice = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(known)}"
    return f"unknown key {_dotted(place)}; {advice}"


def _place_of(message: str) -> list[_Step]:
    match = _PLACE.search(message)
    if match is None:
        return []
    return [name or int(number) for name, number in _STEP.findall(match[1].partition("[...]")[0])]


def _explain(message: str, place: list[_Step], info: inspect.StructType, data: Any) -> str:
    reason = _PLACE.sub("", message)
    kind: inspect.Type | None = info
    value = data
    for step in place:
        kind = _type_below(kind, step)
        value = value[step]
    missing = re.match(r"Object missing required field `(.+)`", reason)
    if missing:
        return f"{_dotted([*place, missing[1]])} is missing"
    if not place:
        return reason
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "…"
    inside = "[...]" in message  # a value of a dict; the error does not name its key
    expected = reason.startswith(("Expected", "Invalid enum")) and kind is not None and not inside
    if expected and _struct_of(kind) is None:
        reason = "must be " + " or ".join(map(_describe, _alternatives(kind)))
    elif expected:
        reason = "must be a table"
    return f"{_dotted(place)} = {shown}: {reason}"


def _dotted(place: Sequence[_Step]) -> str:
    return ".".join(map(str, place))


def _alternatives(kind: inspect.Type | None) -> Sequence[inspect.Type]:
    if kind is None:
        return ()
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _struct_of(kind: inspect.Type | None) -> inspect.StructType | None:
    return next((one for one in _alternatives(kind) if isinstance(one, inspect.StructType)), None)


def _type_below(kind: inspect.Type | None, step: _Step) -> inspect.Type | None:
    """Return the type that a struct, list or dict has at a key or index; None if unknown."""
    for one in _alternatives(kind):
        if isinstance(one, inspect.StructType):
            return next((field.type for field in one.fields if field.encode_name == step), None)
        if isinstance(one, inspect.ListType | inspect.VarTupleType | inspect.SetType):
            return one.item_type
        if isinstance(one, inspect.DictType):
            return one.value_type
    return None


def _describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            word = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return word + _bounds(kind.ge, kind.gt, kind.le, kind.lt)
        case inspect.StrType():
            text = "text" + _bounds(kind.min_length, None, kind.max_length, None)
            text += " characters" if kind.min_length or kind.max_length else ""
            return text + (f" of the form {kind.pattern}" if kind.pattern else "")
        case inspect.EnumType():
            return _one_of(member.value for member in kind.cls)
        case inspect.LiteralType():
            return _one_of(kind.values)
        case inspect.ListType():
            items = " or ".join(map(_describe, _alternatives(kind.item_type)))
            return f"a list{_bounds(kind.min_length, None, kind.max_length, None)} of {items}"
        case inspect.NoneType():
            return "left out"
        case _:
            return "a table"


def _one_of(values: Iterable[Any]) -> str:
    return "one of " + ", ".join(str(value) or "'' (nothing)" for value in values)


def _bounds(ge: float | None, gt: float | None, le: float | None, lt: float | None) -> str:
    low = f"{ge:,}" if ge is not None else f"more than {gt:,}" if gt is not None else ""
    high = f"{le:,}" if le is not None else f"less than {lt:,}" if lt is not None else ""
    if low and high:
        return f" of {low} to {high}"
    if low:
        return f" from {low}"
    return f" up to {high}" if high else ""


def _toml_lines(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield plain values first: lines below a table's header belong to that table."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lists = {key: value for key, value in values.items() if _is_list_of_tables(value)}
    for key, value in values.items():
        if key not in tables and key not in lists and value is not None:
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in tables.items():
        yield f"\n[{prefix}{_toml_key(key)}]"
        yield from _toml_lines(value, f"{prefix}{_toml_key(key)}.")
    for key, items in lists.items():
        for item in items:
            yield f"\n[[{prefix}{_toml_key(key)}]]"
            yield from _toml_lines(item, f"{prefix}{_toml_key(key)}.")


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # JSON's text, numbers and truth values are TOML's, save for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

"""JSON Schema, as far as schemas of bodies by msgspec and pydantic need it. Pure."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from mqmesh.errors import InvalidArgument

MAX_DEPTH: Final = 64

_TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and float(value).is_integer(),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_ANNOTATIONS: Final = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
        *("default", "examples", "format", "deprecated", "readOnly", "writeOnly"),
        "discriminator",
    )
)
_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_SCHEMA: Final = ("items", "additionalProperties", "not")
_BOUNDS: Final[dict[str, tuple[str, Callable[[Any, Any], bool]]]] = {
    "minimum": ("number", lambda value, bound: value >= bound),
    "maximum": ("number", lambda value, bound: value <= bound),
    "exclusiveMinimum": ("number", lambda value, bound: value > bound),
    "exclusiveMaximum": ("number", lambda value, bound: value < bound),
    "minLength": ("string", lambda value, bound: len(value) >= bound),
    "maxLength": ("string", lambda value, bound: len(value) <= bound),
    "minItems": ("array", lambda value, bound: len(value) >= bound),
    "maxItems": ("array", lambda value, bound: len(value) <= bound),
    "minProperties": ("object", lambda value, bound: len(value) >= bound),
    "maxProperties": ("object", lambda value, bound: len(value) <= bound),
}
_OTHERS: Final = ("type", "enum", "const", "properties", "required", "pattern", "$ref")
_KNOWN: Final = frozenset((*_BOUNDS, *_OF_SCHEMAS, *_OF_SCHEMA, *_OTHERS))


def schema_of(text: str) -> "JsonSchema":
    """Read a schema.

    Args:
        text: JSON.

    Raises:
        InvalidArgument: It is no JSON, no schema, or has a keyword that is not understood here.
    """
    try:
        return JsonSchema(msgspec.json.decode(text))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"the schema is no JSON: {error}") from error


class JsonSchema:
    """A schema, understood.

    Args:
        document: Decoded JSON.

    Raises:
        InvalidArgument: It is no schema, or has a keyword that is not understood here.
    """

    def __init__(self, document: Any) -> None:
        self._root = document
        self._check(document, "the schema", 0)
        for place in ("$defs", "definitions"):
            if isinstance(document, dict):
                for name, part in document.get(place, {}).items():
                    self._check(part, f"{place}/{name}", 0)

    def trouble(self, value: Any) -> str:
        """Return the error in a value, with its place; "" if the value fits."""
        return next(self._troubles(self._root, value, "$", 0), "")

    def _check(self, schema: Any, where: str, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise InvalidArgument(
                f"{where}: must be an object, true or false, at most {MAX_DEPTH} deep"
            )
        unknown = sorted(schema.keys() - _KNOWN - _ANNOTATIONS)
        if unknown:
            raise InvalidArgument(f"{where}: the keyword {unknown[0]!r} is not understood")
        for name in _types_of(schema):
            if name not in _TYPES:
                raise InvalidArgument(f"{where}: there is no type {name!r}")
        if "$ref" in schema:
            self._find(schema["$ref"], where)
        if "pattern" in schema:
            try:
                re.compile(schema["pattern"])
            except (re.error, TypeError) as error:
                raise InvalidArgument(f"{where}: pattern {schema['pattern']!r}: {error}") from error
        for key in _BOUNDS.keys() & schema.keys():
            if not _is_number(schema[key]):
                raise InvalidArgument(f"{where}: {key} must be a number")
        for key in ("required", "enum"):
            if not isinstance(schema.get(key, []), list):
                raise InvalidArgument(f"{where}: {key} must be an array")
        for key, part in _parts_of(schema, where):
            self._check(part, f"{where}/{key}", depth + 1)

    def _find(self, reference: Any, where: str) -> Any:
        found = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise InvalidArgument(f"{where}: $ref {reference!r} is not within the schema")
        for name in reference.removeprefix("#").strip("/").split("/"):
            if name:
                found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise InvalidArgument(f"{where}: $ref {reference!r} leads nowhere")
        return found

    def _troubles(self, schema: Any, value: Any, at: str, depth: int) -> Iterator[str]:
        if isinstance(schema, bool):
            if not schema:
                yield f"{at} must not be there"
            return
        if depth > MAX_DEPTH:
            yield f"{at} is more than {MAX_DEPTH} deep"
            return
        types = _types_of(schema)
        if types and not any(_TYPES[name](value) for name in types):
            yield f"{at} is {_name_of(value)}, not {' or '.join(types)}"
            return
        if "$ref" in schema:
            yield from self._troubles(self._find(schema["$ref"], at), value, at, depth + 1)
        if "const" in schema and not _same(value, schema["const"]):
            yield f"{at} is not {schema['const']!r}"
        if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
            yield f"{at} is none of {schema['enum']!r}"
        for key, (kind, holds) in _BOUNDS.items():
            if key in schema and _TYPES[kind](value) and not holds(value, schema[key]):
                yield f"{at} does not keep {key} {schema[key]}"
        pattern = schema.get("pattern")
        if pattern is not None and isinstance(value, str) and not re.search(pattern, value):
            yield f"{at} does not match {pattern!r}"
        yield from self._of_parts(schema, value, at, depth + 1)
        yield from self._of_choices(schema, value, at, depth + 1)

    def _of_parts(self, schema: dict[str, Any], value: Any, at: str, depth: int) -> Iterator[str]:
        if isinstance(value, dict):
            for name in schema.get("required", []):
                if name not in value:
                    yield f"{at} lacks {name!r}"
            known = schema.get("properties", {})
            for name, part in value.items():
                own = known.get(name, schema.get("additionalProperties", True))
                yield from self._troubles(own, part, f"{at}.{name}", depth)
        elif isinstance(value, list):
            first = schema.get("prefixItems", [])
            for index, part in enumerate(value):
                own = first[index] if index < len(first) else schema.get("items", True)
                yield from self._troubles(own, part, f"{at}[{index}]", depth)

    def _of_choices(self, schema: dict[str, Any], value: Any, at: str, depth: int) -> Iterator[str]:
        for part in schema.get("allOf", []):
            yield from self._troubles(part, value, at, depth)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                fits = sum(not any(self._troubles(part, value, at, depth)) for part in schema[key])
                if not fits or (key == "oneOf" and fits > 1):
                    yield f"{at} fits {fits} of the {len(schema[key])} schemas of {key}"
        if "not" in schema and not any(self._troubles(schema["not"], value, at, depth)):
            yield f"{at} fits what it must not"


def _parts_of(schema: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas within a schema, and where they stand."""
    for key in _OF_SCHEMA:
        if key in schema:
            yield key, schema[key]
    for key, kind in (("properties", dict), *((one, list) for one in _OF_SCHEMAS)):
        parts = schema.get(key, kind())
        if not isinstance(parts, kind):
            raise InvalidArgument(f"{where}: {key} must be an {_name_of(kind())}")
        for name, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
            yield f"{key}/{name}", part


def _types_of(schema: dict[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _same(value: Any, other: Any) -> bool:
    return bool(value == other and isinstance(value, bool) is isinstance(other, bool))


def _name_of(value: Any) -> str:
    return next((name for name, fits in _TYPES.items() if fits(value)), type(value).__name__)

"""Arguments of pages and actions: structs, read from paths, query strings and forms. Pure."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from mqmesh.errors import InvalidArgument

_S = TypeVar("_S", bound=msgspec.Struct)


class FormField(msgspec.Struct, frozen=True, kw_only=True):
    """One field of the form of an action.

    Its label is the ``title`` of the argument's ``msgspec.Meta``, its help the ``description``;
    ``extra_json_schema={"format": "long"}`` gives it many lines.

    Attributes:
        name: Name of the argument.
        label: Label for people.
        help: Description with unit and bounds; "" for none.
        kind: ``text``, ``long`` (many lines), ``number``, ``check`` or ``choice``.
        value: As the form begins.
        choices: Of a ``choice``.
        least, most: Of a number.
        required: It must not be empty.
    """

    name: str
    label: str
    help: str = ""
    kind: str = "text"
    value: Any = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    required: bool = False


class Choices(msgspec.Struct, frozen=True):
    """Initial value of a text that is chosen among some.

    Attributes:
        value: Chosen at first.
        choices: All of them.
    """

    value: str
    choices: tuple[str, ...]


def read_arguments(kind: type[_S], values: Mapping[str, str]) -> _S:
    """Read arguments from texts; empty texts and those of unknown fields are left out.

    Raises:
        InvalidArgument: One is missing, of a wrong type or out of bounds.
    """
    known = {one.encode_name: one for one in _fields(kind)}
    found: dict[str, Any] = {}
    for name, text in values.items():
        if name not in known:
            continue
        is_text = isinstance(_bare(known[name].type), inspect.StrType)
        if text == "" and not (is_text and known[name].required):
            continue
        found[name] = text == "on" or text if _is_check(known[name].type) else text
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(_plain(str(error), kind)) from error


def form_fields(
    kind: type[msgspec.Struct], given: Mapping[str, Any], fixed: Mapping[str, str]
) -> list[FormField]:
    """Return the fields of a form.

    Args:
        kind: Struct of the arguments.
        given: Values to begin with, by name; the struct's defaults for others.
        fixed: Arguments of the path, for which the form has no fields.
    """
    return [
        _field(one, given.get(one.encode_name))
        for one in _fields(kind)
        if one.encode_name not in fixed
    ]


def filled(initial: Mapping[str, Any], sent: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a form that begins with some, after others were sent."""
    found = dict(initial)
    for name, value in sent.items():
        known = found.get(name)
        found[name] = Choices(value, known.choices) if isinstance(known, Choices) else value
    return found


def describe_arguments(kind: type[msgspec.Struct]) -> list[str]:
    """Return each argument as ``name: type = default``, for the page of the API."""
    found = []
    for one in _fields(kind):
        bare = _bare(one.type)
        name = type(bare).__name__.removesuffix("Type").lower()
        if isinstance(bare, inspect.LiteralType | inspect.EnumType):
            name = " | ".join(_choices(bare))
        text = f"{one.encode_name}: {name}"
        is_given = one.default is not msgspec.NODEFAULT
        found.append(f"{text} = {one.default!r}" if is_given else text)
    return found


def checks_of(kind: type[msgspec.Struct]) -> set[str]:
    """Return the names of arguments that are boxes: a form leaves out those not ticked."""
    return {one.encode_name for one in _fields(kind) if _is_check(one.type)}


def _fields(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _bare(kind: inspect.Type) -> inspect.Type:
    if isinstance(kind, inspect.Metadata):
        return _bare(kind.type)
    if isinstance(kind, inspect.UnionType):
        return _bare(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
    return kind


def _is_check(kind: inspect.Type) -> bool:
    return isinstance(_bare(kind), inspect.BoolType)


def _field(field: inspect.Field, given: Any) -> FormField:
    schema: dict[str, Any] = {}
    if isinstance(field.type, inspect.Metadata):
        schema = field.type.extra_json_schema or {}
    bare = _bare(field.type)
    value: Any = given
    if value is None and field.default is not msgspec.NODEFAULT:
        value = field.default
    kind, least, most = "text", None, None
    choices: tuple[str, ...] = ()
    if isinstance(value, Choices):
        value, choices = value.value, value.choices
    if choices:
        kind = "choice"
    elif isinstance(bare, inspect.BoolType):
        kind = "check"
    elif isinstance(bare, inspect.IntType | inspect.FloatType):
        kind, least, most = "number", bare.ge, bare.le
    elif isinstance(bare, inspect.LiteralType | inspect.EnumType):
        kind, choices = "choice", _choices(bare)
    elif schema.get("format") == "long":
        kind = "long"
    return FormField(
        name=field.encode_name,
        label=schema.get("title", field.encode_name.replace("_", " ").capitalize()),
        help=schema.get("description", ""),
        kind=kind,
        value="" if value is None else getattr(value, "value", value),
        choices=choices,
        least=least,
        most=most,
        required=field.required and kind != "check",
    )


def _choices(kind: inspect.LiteralType | inspect.EnumType) -> tuple[str, ...]:
    if isinstance(kind, inspect.LiteralType):
        return tuple(map(str, kind.values))
    return tuple(str(one.value) for one in kind.cls)


def _plain(error: str, kind: type[msgspec.Struct]) -> str:
    """Return msgspec's sentence with the field in front: ``queues: Expected `int` >= 1``."""
    text, _, place = error.partition(" - at `$.")
    if place:
        return f"{place.rstrip('`')}: {text[0].lower()}{text[1:]}"
    return text.replace("Object missing required field", "missing argument")

"""The reference of the site has every public class, with every option that users may set."""

from __future__ import annotations

import importlib
import inspect
import re
from enum import Enum
from pathlib import Path

import msgspec
import pytest

import mqmesh
from mqmesh import errors, faststream

API = Path(__file__).parents[2] / "docs" / "api"
PUBLIC = [name for name in mqmesh.__all__ if not name.startswith("_")]


def referenced():
    """The objects that the pages of docs/api name."""
    names = re.findall(
        r"^::: (\S+)$", "\n".join(path.read_text() for path in API.glob("*.md")), re.MULTILINE
    )
    return {name: resolve(name) for name in names}


def resolve(name):
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except (ImportError, AttributeError):
        return importlib.import_module(name)


def section(documented, title):
    """The names that a section of a docstring in Google's form explains."""
    text = inspect.cleandoc(documented.__doc__ or "")
    match = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    entries = (
        re.findall(r"^    (\*{0,2}\w+(?:, \w+)*)(?: \(.*\))?:", match[1], re.MULTILINE)
        if match
        else []
    )
    return {name for entry in entries for name in entry.strip("*").split(", ")}


def owner(kind, field):
    """The class that declares a field."""
    return next(one for one in kind.__mro__ if field in inspect.get_annotations(one))


NOT_MADE_BY_USERS = {"ConsumeContext", "SendContext", "TransactionContext"}
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(mqmesh, name))]


def test_every_public_name_is_in_the_reference():
    known = set(referenced().values())
    known |= (
        {one for one in vars(errors).values() if inspect.isclass(one)} if errors in known else set()
    )
    wanted = [name for name in PUBLIC if not name.endswith("Keywords")]  # the options' names again
    assert [name for name in wanted if getattr(mqmesh, name) not in known] == []
    assert [name for name in faststream.__all__ if getattr(faststream, name) not in known] == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_a_public_struct_is_explained_in_the_reference(name):
    kind = getattr(mqmesh, name)
    if not issubclass(kind, msgspec.Struct):
        return
    known = set(referenced().values())
    for field in (one for one in kind.__struct_fields__ if not one.startswith("_")):
        declared = owner(kind, field)
        assert field in section(declared, "Attributes"), f"{declared.__name__}.{field}"
        assert declared in known, f"{declared.__module__}.{declared.__name__} has {field}"


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_of_a_public_class_is_explained(name):
    kind = getattr(mqmesh, name)
    if name in NOT_MADE_BY_USERS or issubclass(kind, msgspec.Struct | BaseException | Enum):
        return
    if "__init__" not in kind.__dict__:
        return  # "arguments as for AdminClient"
    wanted = set(list(inspect.signature(kind.__init__).parameters)[1:])
    assert wanted - section(kind, "Args") == set()

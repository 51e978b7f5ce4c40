"""Arguments from texts, and forms from arguments."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Literal

import msgspec
import pytest

from mqmesh.console.forms import (
    Choices,
    checks_of,
    describe_arguments,
    filled,
    form_fields,
    read_arguments,
)
from mqmesh.console.page import TableArguments, table_page
from mqmesh.errors import InvalidArgument


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=5, title="Name")]
    count: Annotated[int, msgspec.Meta(ge=1, le=9, description="How many.")] = 4
    on: bool = False
    kind: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    text: Annotated[str, msgspec.Meta(extra_json_schema={"format": "long"})] = ""
    limit: int | None = None


def test_arguments_are_read_from_texts():
    found = read_arguments(
        Arguments, {"name": "x", "count": "7", "on": "on", "kind": "b", "other": "?", "limit": ""}
    )
    assert found == Arguments(name="x", count=7, on=True, kind="b")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "missing argument `name`"),
        ({"name": ""}, "name: expected `str` of length >= 1"),
        ({"name": "x", "count": "0"}, "count: expected `int` >= 1"),
        ({"name": "x", "count": "many"}, "count: expected `int`"),
        ({"name": "x", "kind": "c"}, "kind: invalid enum value 'c'"),
    ],
)
def test_a_wrong_argument_is_named(values, sentence):
    with pytest.raises(InvalidArgument, match=re.escape(sentence)):
        read_arguments(Arguments, values)


def test_a_form_has_what_the_path_does_not_say():
    fields = {one.name: one for one in form_fields(Arguments, {"count": 6}, {"name": "x"})}
    assert list(fields) == ["count", "on", "kind", "colour", "text", "limit"]
    count = fields["count"]
    assert (count.kind, count.value, count.least, count.most) == ("number", 6, 1, 9)
    assert (count.label, count.help) == ("Count", "How many.")
    assert fields["on"].kind == "check"
    assert fields["kind"].choices == ("a", "b")
    assert (fields["colour"].choices, fields["colour"].value) == (("red", "blue"), "red")
    assert fields["text"].kind == "long"
    assert fields["limit"].value == ""
    (name, *_) = form_fields(Arguments, {}, {})
    assert (name.label, name.required) == ("Name", True)


def test_what_was_sent_is_chosen_again():
    values = filled({"name": Choices("a", ("a", "b")), "count": 3}, {"name": "b"})
    (name, count, *_) = form_fields(Arguments, values, {})
    assert (name.kind, name.value, name.choices, count.value) == ("choice", "b", ("a", "b"), 3)


def test_boxes_and_descriptions():
    assert checks_of(Arguments) == {"on"}
    assert describe_arguments(Arguments)[:4] == [
        "name: str",
        "count: int = 4",
        "on: bool = False",
        "kind: a | b = 'a'",
    ]


class Row(msgspec.Struct, frozen=True):
    name: str
    lag: int | None


ROWS = [Row(f"row-{number:03}", number % 7 or None) for number in range(120)]


def test_a_table_comes_in_pages_of_fifty():
    page = table_page(ROWS, TableArguments(page=3), sort="-name")
    assert (page.total, page.page, page.pages, len(page.rows)) == (120, 3, 3, 20)
    assert page.rows[-1].name == "row-000"
    assert table_page(ROWS, TableArguments(page=99)).page == 3
    assert table_page([], TableArguments()).pages == 1


def test_a_table_is_searched_and_sorted_and_unknown_numbers_come_first():
    found = table_page(ROWS, TableArguments(search="ROW-00", sort="lag"), ("name",))
    assert found.total == 10
    assert [one.lag for one in found.rows][:3] == [None, None, 1]
    assert [one.lag for one in table_page(ROWS, TableArguments(sort="no field")).rows][:2] == [
        None,
        1,
    ]

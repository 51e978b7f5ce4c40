"""JSON Schema, as far as `mqmesh topic check` needs it."""

from __future__ import annotations

import enum
import json
from typing import Annotated

import msgspec
import pydantic
import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.sdk.admin.json_schema import schema_of
from mqmesh.sdk.admin.searches import SearchResult
from mqmesh.sdk.admin.views.topics import checked_topic_view


class Kind(enum.Enum):
    NEW = "new"
    PAID = "paid"


class Item(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, pattern="^[a-z]+$")]
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


class Order(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    kind: Kind
    items: Annotated[list[Item], msgspec.Meta(max_length=3)]
    note: str | None = None


class Model(pydantic.BaseModel):
    id: int
    prices: dict[str, float]
    pair: tuple[int, str]


ORDER = json.dumps(msgspec.json.schema(Order))
GOOD = {"id": "1", "kind": "new", "items": [{"name": "pen", "count": 2}, {"name": "ink"}]}


def test_what_fits_a_schema_of_msgspec_or_pydantic_has_no_trouble():
    assert schema_of(ORDER).trouble(GOOD) == ""
    model = schema_of(json.dumps(Model.model_json_schema()))
    assert model.trouble({"id": 1, "prices": {"a": 1.5}, "pair": [1, "a"]}) == ""
    assert model.trouble({"id": 1, "prices": {"a": "x"}, "pair": [1, "a"]}) == (
        "$.prices.a is string, not number"
    )
    assert model.trouble({"id": 1, "prices": {}, "pair": [1]}) == "$.pair does not keep minItems 2"


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"id": 7}, "$.id is integer, not string"),
        ({"kind": "old"}, "$.kind is none of ['new', 'paid']"),
        ({"more": 1}, "$.more must not be there"),
        ({"items": [{"name": ""}]}, "$.items[0].name does not keep minLength 1"),
        ({"items": [{"name": "Pen"}]}, "$.items[0].name does not match '^[a-z]+$'"),
        ({"items": [{"name": "pen", "count": 0}]}, "$.items[0].count does not keep minimum 1"),
        ({"items": [{"count": 1}]}, "$.items[0] lacks 'name'"),
        ({"items": [GOOD["items"][1]] * 4}, "$.items does not keep maxItems 3"),
        ({"note": 5}, "$.note fits 0 of the 2 schemas of anyOf"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change, trouble):
    assert schema_of(ORDER).trouble(GOOD | change) == trouble


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        (True, 1, True),
        (False, 1, False),
        ({"const": 1}, True, False),
        ({"type": "integer"}, True, False),
        ({"type": "integer"}, 2.0, True),
        ({"type": ["null", "number"]}, None, True),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, 3, False),
        ({"oneOf": [{"minimum": 4}, {"maximum": 3}]}, 3, True),
        ({"allOf": [{"minimum": 1}, {"maximum": 5}]}, 9, False),
        ({"not": {"type": "string"}}, "x", False),
        ({"$ref": "#"}, {"a": 1}, False),  # it says nothing but itself
    ],
)
def test_keywords_by_themselves(schema, value, fits):
    assert (schema_of(json.dumps(schema)).trouble(value) == "") is fits


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no JSON"),
        ("[]", "must be an object"),
        ('{"type": "text"}', "there is no type 'text'"),
        ('{"if": {}}', "the keyword 'if' is not understood"),
        ('{"$ref": "#/$defs/Nobody"}', "leads nowhere"),
        ('{"$ref": "http://x/y"}', "is not within the schema"),
        ('{"pattern": "("}', "pattern '('"),
        ('{"minimum": "1"}', "minimum must be a number"),
        ('{"properties": []}', "properties must be an object"),
        ('{"anyOf": {}}', "anyOf must be an array"),
        ('{"properties": {"a": {"items": {"type": "x"}}}}', "properties/a/items: there is no"),
        ('{"not":' * 100 + "{}" + "}" * 100, "at most 64 deep"),
    ],
)
def test_what_is_no_schema_is_refused(text, why):
    with pytest.raises(InvalidArgument) as raised:
        schema_of(text)
    assert why in str(raised.value)


def test_messages_are_tried_in_the_form_that_they_name():
    info = BatchInfo("t", 3, "broker-a", 0, 1, 1, 1, 1_000, "h", "127.0.0.1:1", 1, 1, 0)

    def message(at, body, **properties):
        return StoredMessage("t", body, properties=properties, queue_offset=at, batch=info)

    found = SearchResult(
        [
            message(0, b'{"id": 1}'),
            message(1, msgspec.msgpack.encode({"id": 1}), CONTENT_TYPE="application/msgpack"),
            message(2, b'{"id": "x"}'),
            message(3, b"\xff"),
            message(4, b"{}", CONTENT_TYPE="text/plain"),
        ],
        5,
        5,
    )
    rules = schema_of('{"type": "object", "properties": {"id": {"type": "integer"}}}')
    view = checked_topic_view("t", found, rules)
    assert view.looked == 5
    assert [(one.queue_id, one.queue_offset, one.reason[:30]) for one in view.misfits] == [
        (3, 2, "$.id is string, not integer"),
        (3, 3, "the body is no application/jso"),
        (3, 4, "the body is text/plain, neithe"),
    ]

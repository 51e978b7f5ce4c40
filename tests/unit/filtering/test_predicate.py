"""SQL92 expressions at work, against a slow evaluator that shares no code with them."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.batch.payload import encode_payload
from mqmesh.errors import CorruptBatch, InvalidArgument
from mqmesh.filtering.predicate import MAX_REMEMBERED, Predicate
from mqmesh.message import Message


def select(expression, messages):
    payload = encode_payload(messages).data
    return list(Predicate(expression).select(payload, 0, len(messages), len(messages)))


def matches(expression, tag=None, **properties):
    message = Message("t", b"body", tag, properties=properties or None)
    return bool(select(expression, [message])[0])


@pytest.mark.parametrize(
    ("expression", "properties", "expected"),
    [
        ("a > 5", {"a": "6"}, True),
        ("a > 5", {"a": "5"}, False),
        ("a > 5", {"a": "10"}, True),  # as texts, '10' < '5'
        ("a > 5", {"a": "5.5"}, True),
        ("a > 5", {"a": "6e1"}, True),
        ("a > 5", {"a": "-6"}, False),
        ("a > 5", {"a": "six"}, False),
        ("NOT a > 5", {"a": "six"}, False),
        ("a > 5 OR b = 'x'", {"a": "six", "b": "x"}, True),
        ("a = 60", {"a": "60.0"}, True),
        ("a = 60", {"a": "060"}, True),
        ("a = '60'", {"a": "60.0"}, False),
        ("a <> 60", {"a": "61"}, True),
        ("a <> 60", {"a": "sixty"}, False),
        ("a = 9007199254740993", {"a": "9007199254740992"}, False),
        ("a = 'x'", {"a": "x"}, True),
        ("a = 'x'", {"a": "X"}, False),
        ("a <> 'x'", {"a": "y"}, True),
        ("a <> 'x'", {}, False),
        ("a = ''", {"a": ""}, True),
        ("a = b", {"a": "x", "b": "x"}, True),
        ("a = b", {"a": "1", "b": "1.0"}, False),
        ("a <= b", {"a": "1", "b": "1.0"}, True),
        ("a < b", {"a": "9", "b": "10"}, True),
        ("a < b", {"a": "a", "b": "b"}, False),
        ("5 < a", {"a": "6"}, True),
        ("5 >= a", {"a": "6"}, False),
        ("a BETWEEN 1 AND 3", {"a": "1"}, True),
        ("a BETWEEN 1 AND 3", {"a": "3.0"}, True),
        ("a BETWEEN 1 AND 3", {"a": "3.1"}, False),
        ("a NOT BETWEEN 1 AND 3", {"a": "4"}, True),
        ("a NOT BETWEEN 1 AND 3", {}, False),
        ("a IN ('x', 'y')", {"a": "y"}, True),
        ("a NOT IN ('x', 'y')", {"a": "z"}, True),
        ("a NOT IN ('x', 'y')", {}, False),
        ("a IN (1, 'x')", {"a": "1.0"}, True),
        ("a NOT IN (1, 'x')", {"a": "y"}, False),  # whether 'y' is 1 cannot be known
        ("a IS NULL", {}, True),
        ("a IS NULL", {"a": ""}, False),
        ("a IS NOT NULL", {"a": ""}, True),
        ("a = TRUE", {"a": "true"}, True),
        ("a = TRUE", {"a": "True"}, True),
        ("a <> TRUE", {"a": "false"}, True),
        ("a = FALSE", {"a": "no"}, False),
        ("TRUE", {}, True),
        ("FALSE", {}, False),
        ("NOT FALSE", {}, True),
        ("a > 5 OR TRUE", {}, True),
        ("a > 5 AND FALSE", {}, False),
        ("NOT (a > 5 AND FALSE)", {}, True),
        ("NOT (a > 5 OR FALSE)", {}, False),
        ("\"a\" = 'x'", {"a": "x"}, True),
        ("A = 'x'", {"a": "x"}, False),
    ],
)
def test_what_an_expression_means(expression, properties, expected):
    assert matches(expression, **properties) is expected


@pytest.mark.parametrize(
    ("expression", "tag", "expected"),
    [
        ("TAGS = 'A'", "A", True),
        ("TAGS = 'A'", None, False),
        ("TAGS <> 'A'", None, False),
        ("TAGS IS NULL", None, True),
        ("TAGS IN ('A', 'B') AND a IS NULL", "B", True),
        ("tags = 'A'", "A", False),
    ],
)
def test_tags_stand_for_the_tag(expression, tag, expected):
    assert matches(expression, tag) is expected
    # A property of that name does not pass for it.
    assert matches(expression, tag, TAGS="A" if tag != "A" else "B") is expected


def test_a_part_of_the_messages_can_be_asked_for():
    messages = [Message("t", b"x", properties={"a": str(number)}) for number in range(10)]
    payload = encode_payload(messages).data
    assert list(Predicate("a > 5").select(payload, 4, 8, 10)) == [0, 0, 1, 1]


def test_what_is_remembered_is_bounded():
    predicate = Predicate("a > 5 AND b > 5 AND c <> d")
    leaves = predicate._leaves
    assert len(leaves) == predicate.leaf_count == 3
    for start in range(0, 3 * MAX_REMEMBERED, 1_000):
        messages = [
            Message("t", b"x", properties=dict.fromkeys("abc", f"{n}") | {"d": "x" * 100})
            for n in range(start, start + 1_000)
        ]
        found = predicate.select(encode_payload(messages).data, 0, 1_000, 1_000)
        assert sum(found) == sum(n > 5 for n in range(start, start + 1_000))
        assert sum(map(len, leaves)) <= MAX_REMEMBERED
    assert not leaves[2]  # long values are not remembered


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x92",
        b"\x91\x90",
        msgspec.msgpack.encode([["t", b"x", None, [], {"a": 5}]]),
        msgspec.msgpack.encode([["t", b"x", None, [], 7]]),
        msgspec.msgpack.encode([["t", b"x", 5, [], {}]]),
        msgspec.msgpack.encode([5]),
        msgspec.msgpack.encode({"a": "x"}),
    ],
)
def test_nonsense_is_a_corrupt_batch(payload):
    with pytest.raises(CorruptBatch):
        Predicate("a > 5 AND TAGS = 'x'").select(payload, 0, 1, 1)


def test_names_like_those_of_python_are_only_names():
    for name in ("__class__", "__init__", "p0", "self", "properties", "tag", "a-b", "日本"):
        messages = [Message("t", b"body", properties={name: value}) for value in "xy"]
        assert select(f"\"{name}\" = 'x'", messages) == [1, 0]


# ---- Against a slow evaluator --------------------------------------------------------------

UNKNOWN = "unknown"


def slow(tree, message):
    """An independent reading of the same logic, over the tree that the text was made of."""
    kind = tree[0]
    if kind == "and":
        found = [slow(one, message) for one in tree[1]]
        return False if False in found else UNKNOWN if UNKNOWN in found else True
    if kind == "or":
        found = [slow(one, message) for one in tree[1]]
        return True if True in found else UNKNOWN if UNKNOWN in found else False
    if kind == "not":
        return {True: False, False: True, UNKNOWN: UNKNOWN}[slow(tree[1], message)]
    if kind == "constant":
        return tree[1]
    if kind == "null":
        return value_of(tree[1], message) is None
    if kind == "in":
        return slow(("or", [("compare", "=", tree[1], one) for one in tree[2]]), message)
    if kind == "between":
        both = [("compare", ">=", tree[1], tree[2]), ("compare", "<=", tree[1], tree[3])]
        return slow(("and", both), message)
    return slow_compare(*tree[1:], message)


def value_of(name, message):
    return message.tag if name == "TAGS" else (message.properties or {}).get(name)


def number_of(text):
    if text is None or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII):
        return None
    return float(text)


def slow_compare(sign, name, other, message):
    value = value_of(name, message)
    kind, what = other
    if kind == "property":
        what = value_of(what, message)
        if sign not in ("=", "<>"):
            value, what = number_of(value), number_of(what)
    elif kind == "number":
        value = number_of(value)
    elif kind == "truth":
        value = {"true": True, "false": False}.get(value.lower()) if value is not None else None
    if value is None or what is None:
        return UNKNOWN
    return {
        "=": value == what,
        "<>": value != what,
        "<": sign == "<" and value < what,
        "<=": sign == "<=" and value <= what,
        ">": sign == ">" and value > what,
        ">=": sign == ">=" and value >= what,
    }[sign]


NAMES = st.sampled_from(["a", "b", "order-id", "TAGS"])
TEXTS = st.sampled_from(["", "1", "1.0", "2", "-3", "x", "true", "FALSE", "it's", "10", "9e0"])
NUMBERS = st.sampled_from([0, 1, 2, -3, 9.0, 10, 1.5])
LITERALS = st.one_of(
    st.tuples(st.just("number"), NUMBERS),
    st.tuples(st.just("text"), TEXTS),
    st.tuples(st.just("truth"), st.booleans()),
)
NUMERIC = st.one_of(st.tuples(st.just("number"), NUMBERS), st.tuples(st.just("property"), NAMES))
EQUAL = st.tuples(
    st.just("compare"),
    st.sampled_from(["=", "<>"]),
    NAMES,
    st.one_of(LITERALS, st.tuples(st.just("property"), NAMES)),
)
ORDER = st.tuples(st.just("compare"), st.sampled_from(["<", "<=", ">", ">="]), NAMES, NUMERIC)
TERMS = st.one_of(
    EQUAL,
    ORDER,
    st.tuples(st.just("null"), NAMES),
    st.tuples(st.just("in"), NAMES, st.lists(LITERALS, min_size=1, max_size=3)),
    st.tuples(st.just("between"), NAMES, NUMERIC, NUMERIC),
    st.tuples(st.just("constant"), st.booleans()),
)
TREES = st.recursive(
    TERMS,
    lambda trees: st.one_of(
        st.tuples(st.just("and"), st.lists(trees, min_size=2, max_size=4)),
        st.tuples(st.just("or"), st.lists(trees, min_size=2, max_size=4)),
        st.tuples(st.just("not"), trees),
    ),
    max_leaves=12,
)
MESSAGES = st.builds(
    lambda tag, properties: Message("t", b"body", tag or None, properties=properties),
    st.none() | TEXTS,
    st.none() | st.dictionaries(st.sampled_from(["a", "b", "order-id", "TAGS", "c"]), TEXTS),
)


def written(tree):
    """The expression of a tree."""
    kind = tree[0]
    if kind in ("and", "or"):
        return "(" + f" {kind} ".join(map(written, tree[1])) + ")"
    if kind == "not":
        return f"NOT {written(tree[1])}"
    if kind == "constant":
        return str(tree[1])
    if kind == "null":
        return f"{name_of(tree[1])} IS NULL"
    if kind == "in":
        return f"{name_of(tree[1])} IN ({', '.join(map(literal, tree[2]))})"
    if kind == "between":
        return f"{name_of(tree[1])} BETWEEN {literal(tree[2])} AND {literal(tree[3])}"
    return f"{name_of(tree[2])} {tree[1]} {literal(tree[3])}"


def name_of(name):
    return f'"{name}"' if "-" in name else name


def literal(other):
    kind, what = other
    if kind == "property":
        return name_of(what)
    return "'" + what.replace("'", "''") + "'" if kind == "text" else str(what)


def is_empty_between(tree):
    if tree[0] in ("and", "or"):
        return any(map(is_empty_between, tree[1]))
    if tree[0] == "not":
        return is_empty_between(tree[1])
    return tree[0] == "between" and tree[2][0] == tree[3][0] == "number" and tree[2][1] > tree[3][1]


@settings(max_examples=200)
@given(TREES, st.lists(MESSAGES, min_size=1, max_size=20))
def test_rows_of_messages_are_judged_as_by_a_slow_evaluator(tree, messages):
    expression = written(tree)
    if is_empty_between(tree):
        with pytest.raises(InvalidArgument, match="is empty"):
            Predicate(expression)
        return
    expected = [int(slow(tree, message) is True) for message in messages]
    predicate = Predicate(expression)
    payload = encode_payload(messages).data
    assert list(predicate.select(payload, 0, len(messages), len(messages))) == expected
    # What is remembered of the first time is not told otherwise the second time.
    assert list(predicate.select(payload, 0, len(messages), len(messages))) == expected
    if predicate.tags is not None:
        chosen = [m for m, fits in zip(messages, expected, strict=True) if fits]
        assert {message.tag for message in chosen} <= predicate.tags

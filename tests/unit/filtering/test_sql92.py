"""SQL92 expressions: what is understood, and where it is said to be wrong."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import InvalidArgument
from mqmesh.filtering.sql92 import (
    MAX_EXPRESSION_LENGTH,
    MAX_NESTING,
    MAX_TERMS,
    And,
    Comparison,
    Constant,
    IsNull,
    Member,
    Not,
    Or,
    Property,
    parse_number,
    parse_sql,
    required_tags,
)

A, B = Property("a"), Property("b")
A1, B1 = Comparison("=", A, 1), Comparison("=", B, 1)


@pytest.mark.parametrize("sign", ["=", "<>", ">", ">=", "<", "<="])
def test_a_property_is_compared_with_a_number(sign):
    expected = Comparison(sign, A, 5)
    for text in (f"a {sign} 5", f"a{sign}5", f"\t a\n{sign}\r 5 "):
        assert parse_sql(text) == expected
    assert parse_sql(f"5 {sign} a") == Comparison(sign, 5, A)
    assert parse_sql(f"a {sign} b") == Comparison(sign, A, B)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("+5", 5),
        ("007", 7),
        ("3.1415", 3.1415),
        (".5", 0.5),
        ("5.", 5.0),
        ("6e1", 60.0),
        ("6E-1", 0.6),
        ("9007199254740993", 9007199254740993),
        ("'abc'", "abc"),
        ("''", ""),
        ("'it''s'", "it's"),
        ("''''", "'"),
        ("'a AND b'", "a AND b"),
        ("'日本 ||'", "日本 ||"),
        ("'5'", "5"),
        ("TRUE", True),
        ("false", False),
    ],
)
def test_literals(text, value):
    found = parse_sql(f"a = {text}")
    assert found == Comparison("=", A, value)
    assert type(found.right) is type(value)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("a BETWEEN 1 AND 5", And((Comparison(">=", A, 1), Comparison("<=", A, 5)))),
        ("a NOT BETWEEN 1 AND 5", Not(And((Comparison(">=", A, 1), Comparison("<=", A, 5))))),
        ("3 between a and b", And((Comparison(">=", 3, A), Comparison("<=", 3, B)))),
        ("a between -1 and b", And((Comparison(">=", A, -1), Comparison("<=", A, B)))),
        ("a IN ('x')", Member(A, ("x",))),
        ("a in ('x', 'y',1 , TRUE)", Member(A, ("x", "y", 1, True))),
        ("a NOT IN ('x')", Not(Member(A, ("x",)))),
        ("a IS NULL", IsNull(A)),
        ("a is not null", Not(IsNull(A))),
        ("TRUE", Constant(True)),
        ("false", Constant(False)),
        ("NOT TRUE", Not(Constant(True))),
    ],
)
def test_other_terms(text, node):
    assert parse_sql(text) == node


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("a = 1 AND b = 1", And((A1, B1))),
        ("a = 1 AND b = 1 AND a = 1", And((A1, B1, A1))),
        ("a = 1 OR b = 1 OR a = 1", Or((A1, B1, A1))),
        ("a = 1 OR b = 1 AND a = 1", Or((A1, And((B1, A1))))),
        ("a = 1 AND b = 1 OR a = 1", Or((And((A1, B1)), A1))),
        ("(a = 1 OR b = 1) AND a = 1", And((Or((A1, B1)), A1))),
        ("NOT a = 1 AND b = 1", And((Not(A1), B1))),
        ("NOT (a = 1 AND b = 1)", Not(And((A1, B1)))),
        ("NOT NOT a = 1", Not(Not(A1))),
        ("((a = 1))", A1),
        ("a between 0 and 5 and b = 1", And((parse_sql("a between 0 and 5"), B1))),
    ],
)
def test_not_binds_closest_then_and_then_or(text, node):
    assert parse_sql(text) == node


@pytest.mark.parametrize(
    "name", ["a", "A1", "_x", "$x", "TAGS", "index", "notx", "nullable", "ins"]
)
def test_names_of_properties(name):
    assert parse_sql(f"{name} = 1") == Comparison("=", Property(name), 1)


@pytest.mark.parametrize("name", ["order-id", "NULL", "a b", "日本", "'", "a.b", "AND"])
def test_any_name_can_stand_in_double_quotes(name):
    assert parse_sql(f'"{name}" = 1') == Comparison("=", Property(name), 1)


REFUSED = [
    ("", 1, "the end"),
    ("   ", 4, "the end"),
    ("a", 2, "the end"),
    ("a >", 4, "the end"),
    ("a > > 5", 5, "'>'"),
    ("a == 5", 4, "'='"),
    ("a != 5", 3, "'!' means nothing"),
    ("a = b = c", 7, "'='"),
    ("a = 'abc", 5, "without its end"),
    ("a = 'abc''", 5, "without its end"),
    ('"a = 1', 1, "means nothing"),
    ('"" = 1', 1, "means nothing"),
    ("a = NULL", 5, "'NULL'"),
    ("NULL IS NULL", 1, "'NULL'"),
    ("a IS 5", 6, "'5'"),
    ("a IS NOT 5", 10, "'5'"),
    ("a IN ()", 7, "')'"),
    ("a IN ('x',)", 11, "')'"),
    ("a IN ('x'", 10, "the end"),
    ("a IN 'x'", 6, "'x'"),
    ("a IN (b)", 7, "'b'"),
    ("5 IN (5)", 3, "'IN'"),
    ("a BETWEEN 1", 12, "the end"),
    ("a BETWEEN 1 OR 5", 13, "'OR'"),
    ("a BETWEEN 5 AND 1", 11, "is empty"),
    ("a BETWEEN 'a' AND 'b'", 11, "only numbers"),
    ("a > 'x'", 5, "only numbers"),
    ("TRUE < a", 1, "only numbers"),
    ("1 = 2", 1, "without a property"),
    ("'x' = 'y' AND a = 1", 1, "without a property"),
    ("1 BETWEEN 0 AND 2", 1, "without a property"),
    ("(a = 1", 7, "the end"),
    ("a = 1)", 6, "')'"),
    ("()", 2, "')'"),
    ("a = 1 AND", 10, "the end"),
    ("AND a = 1", 1, "'AND'"),
    ("a = 1 b = 2", 7, "'b'"),
    ("NOT", 4, "the end"),
    ("a NOT = 1", 7, "'='"),
    ("a = 1; DROP TABLE x", 6, "means nothing"),
    ("a LIKE 'x%'", 3, "'LIKE'"),
    ("a + 1 > 5", 3, "means nothing"),
    ("f(a) = 1", 2, "'('"),
    ("a = 1 -- b", 7, "means nothing"),
    ("a = 1e999", 5, "too large"),
    ("a = " + "1" * 65, 5, "64 characters"),
    ("a = 1\x00", 6, "means nothing"),
    ("a\u00a0= 1", 2, "means nothing"),
    ("a = '\ud800'", 6, "no text"),
    ('"a\n" = 1', 1, "control character"),
    ('"a\\" = 1', 1, "control character or"),
    ("__import__('os')", 11, "'('"),
]


@pytest.mark.parametrize(("text", "character", "reason"), REFUSED)
def test_the_place_of_an_error_is_told(text, character, reason):
    with pytest.raises(InvalidArgument) as caught:
        parse_sql(text)
    assert f"character {character}: " in str(caught.value)
    assert reason in str(caught.value).partition(f"character {character}: ")[2]


def test_length_terms_and_nesting_are_bounded():
    parse_sql("a = 1".ljust(MAX_EXPRESSION_LENGTH))
    with pytest.raises(InvalidArgument, match="4097 characters is over 4096"):
        parse_sql("a = 1".ljust(MAX_EXPRESSION_LENGTH + 1))
    parse_sql("NOT " * MAX_NESTING + "a = 1")
    with pytest.raises(InvalidArgument, match="nested deeper than 32"):
        parse_sql("NOT " * (MAX_NESTING + 1) + "a = 1")
    parse_sql(" OR ".join(["a=1"] * (MAX_TERMS - 1)))
    with pytest.raises(InvalidArgument, match="more than 256 terms"):
        parse_sql(" OR ".join(["a=1"] * MAX_TERMS))
    parse_sql(f"a IN ({','.join(map(str, range(MAX_TERMS)))})")
    with pytest.raises(InvalidArgument, match="more than 256 terms"):
        parse_sql(f"a IN ({','.join(map(str, range(MAX_TERMS + 1)))})")


HOSTILE = [
    "(" * 4_096,
    "(" * 2_000 + "a=1" + ")" * 2_000,
    "NOT " * 1_024,
    "a=1 AND " * 512,
    "'" * 4_095,
    "'" + "''" * 2_000,
    '"' * 4_096,
    "9" * 4_096,
    "1." * 2_048,
    "a" * 4_096,
    "a IN (" + "'x'," * 1_000,
    "=" * 4_096,
    "a BETWEEN 1 AND " * 256,
    "\x00" * 4_096,
    "😀" * 1_024,
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_expressions_cost_little(text):
    parse_sql("a = 1")  # the parser is made when it is first used
    began = time.process_time()
    with contextlib.suppress(InvalidArgument):
        parse_sql(text)
    assert time.process_time() - began < 1


def test_many_brackets_are_no_nesting():
    assert parse_sql("(" * 2_000 + "a=1" + ")" * 2_000) == A1


WORDS = st.sampled_from(
    [
        "a",
        "b",
        "TAGS",
        "AND",
        "OR",
        "NOT",
        "IN",
        "IS",
        "NULL",
        "BETWEEN",
        "TRUE",
        "(",
        ")",
        ",",
        "=",
        "<>",
        "<",
        ">=",
        "5",
        "-1.5",
        "'x'",
        "'y'''",
        '"q-1"',
        ";",
        "'",
    ]
)


@given(st.lists(WORDS, max_size=20).map(" ".join) | st.text(max_size=60))
def test_no_text_raises_anything_but_a_refusal(text):
    with contextlib.suppress(InvalidArgument):
        parse_sql(text)


@pytest.mark.parametrize("text", ["1_000", " 5", "5 ", "0x10", "nan", "inf", "-inf", "", "1e", "٥"])
def test_what_is_no_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("TAGS = 'A'", {"A"}),
        ("'A' = TAGS", {"A"}),
        ("TAGS IN ('A', 'B')", {"A", "B"}),
        ("TAGS = 'A' AND a > 5", {"A"}),
        ("TAGS IN ('A', 'B') AND TAGS IN ('B', 'C')", {"B"}),
        ("TAGS = 'A' AND TAGS = 'B'", set()),
        ("TAGS = 'A' OR TAGS = 'B' AND a = 1", {"A", "B"}),
        ("TAGS = 'A' OR a = 1", None),
        ("a = 'A'", None),
        ("TAGS <> 'A'", None),
        ("NOT TAGS = 'A'", None),
        ("TAGS IN ('A', 1)", None),
        ("TAGS = 1", None),
        ("TAGS = a", None),
        ("TAGS IS NULL", None),
        ("TRUE", None),
    ],
)
def test_tags_that_an_expression_needs(text, tags):
    assert required_tags(parse_sql(text)) == tags

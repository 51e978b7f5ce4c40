"""SQL92 expressions over a message's properties and its tag: text to a tree.

The language, keywords in any case::

    expression  = expression OR expression | expression AND expression
                | NOT expression | ( expression ) | TRUE | FALSE
                | operand (= | <>) operand
                | operand (> | >= | < | <=) operand
                | operand [NOT] BETWEEN operand AND operand
                | property [NOT] IN ( literal, … )
                | property IS [NOT] NULL
    operand     = property | literal
    property    = letter, _ or $, then letters, digits, _ and $  |  "any text"
    literal     = number | 'text, with '' for a quote' | TRUE | FALSE

``TAGS`` is the message's tag, every other property one of the message's. NOT
binds closest, then AND, then OR. ``mqmesh.filtering.predicate`` defines the
meaning of the operators.

An expression comes from strangers, so its length, its terms and its nesting are
bounded, and nothing here recurses before the nesting was checked: the parser
(lark's LALR) keeps a stack of its own.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import msgspec

from mqmesh.errors import InvalidArgument

MAX_EXPRESSION_LENGTH: Final = 4_096
"""Characters."""
MAX_TERMS: Final = 256
"""Comparisons, literals of IN, and logical words with their terms."""
MAX_NESTING: Final = 32
"""NOT, AND and OR within one another; a row of ANDs is one."""
MAX_NUMBER_LENGTH: Final = 64
"""Characters of a number, in an expression or in a property."""
TAGS: Final = "TAGS"
"""The property that stands for the message's tag."""

Number: TypeAlias = int | float


class Property(msgspec.Struct, frozen=True):
    """A property of the message, by name."""

    name: str


Literal: TypeAlias = bool | int | float | str
Operand: TypeAlias = Property | Literal


class Constant(msgspec.Struct, frozen=True):
    """TRUE or FALSE in the place of a comparison."""

    value: bool


class IsNull(msgspec.Struct, frozen=True):
    """The message does not have the property."""

    operand: Property


class Comparison(msgspec.Struct, frozen=True):
    """Two operands and one of ``= <> > >= < <=``; at least one operand is a property."""

    operator: str
    left: Operand
    right: Operand


class Member(msgspec.Struct, frozen=True):
    """A property is one of some literals."""

    operand: Property
    literals: tuple[Literal, ...]


class Not(msgspec.Struct, frozen=True):
    """The contrary."""

    node: "Node"


class And(msgspec.Struct, frozen=True):
    """All of at least two."""

    nodes: tuple["Node", ...]


class Or(msgspec.Struct, frozen=True):
    """One of at least two."""

    nodes: tuple["Node", ...]


Node: TypeAlias = Constant | IsNull | Comparison | Member | Not | And | Or

_GRAMMAR: Final = r"""
start: either
?either: all (_OR all)*
?all: one (_AND one)*
?one: NOT one -> negation | plain
?plain: "(" either ")" | truth | comparison | between | member | null
truth: TRUE | FALSE
comparison: operand OPERATOR operand
between: (property | literal) [NOT] _BETWEEN operand _AND operand
member: property [NOT] _IN "(" literal ("," literal)* ")"
null: property _IS [NOT] _NULL
?operand: property | literal
property: NAME | QUOTED_NAME
?literal: number | text | boolean
number: NUMBER
text: TEXT
boolean: TRUE | FALSE
_OR: "OR"i
_AND: "AND"i
NOT: "NOT"i
_BETWEEN: "BETWEEN"i
_IN: "IN"i
_IS: "IS"i
_NULL: "NULL"i
TRUE: "TRUE"i
FALSE: "FALSE"i
OPERATOR: "=" | "<>" | ">=" | "<=" | ">" | "<"
NUMBER: /[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?/i
TEXT: /'([^']|'')*'(?!')/
QUOTED_NAME: /"[^"]+"/
NAME: /[a-z_$][a-z0-9_$]*/i
%ignore /[ \t\r\n]+/
"""

# How the parser's terminals are called in a refusal.
_WORDS: Final = {
    "_OR": "OR",
    "_AND": "AND",
    "_BETWEEN": "BETWEEN",
    "_IN": "IN",
    "_IS": "IS",
    "_NULL": "NULL",
    "OPERATOR": "a comparison",
    "NUMBER": "a number",
    "TEXT": "a text in single quotes",
    "NAME": "a property",
    "LPAR": "'('",
    "RPAR": "')'",
    "COMMA": "','",
    "$END": "the end",
}
_UNNAMED: Final = {"QUOTED_NAME"}

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]+)?\Z")
_FORBIDDEN_IN_NAMES = re.compile(r"[\x00-\x1f\\]")
_ORDERINGS: Final = frozenset({">", ">=", "<", "<="})


def parse_number(text: str) -> Number | None:
    """Parses a number as expressions and properties write it.

    Args:
        text: ASCII digits, with a sign, a point and an exponent if need be, and nothing
            around it; up to 64 characters.

    Returns:
        An int if it has neither point nor exponent; None if it is no number, or a number beyond
        the range of a float.
    """
    if len(text) > MAX_NUMBER_LENGTH or (match := _NUMBER.match(text)) is None:
        return None
    if match.lastindex is None:
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else None


def parse_sql(expression: str) -> Node:
    """Parses an expression.

    Args:
        expression: 1 to 4,096 characters.

    Raises:
        InvalidArgument: Describes the error and its character, counted from 1.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise InvalidArgument(
            f"SQL92 expression of {len(expression)} characters is over {MAX_EXPRESSION_LENGTH}"
        )
    try:
        expression.encode()
    except UnicodeEncodeError as error:
        _refuse(expression, error.start, f"no text ({error.reason})")
    try:
        node: Node = _parser()(expression)
        return node
    except _Refusal as refusal:
        _refuse(expression, refusal.position, refusal.reason)


def required_tags(node: Node) -> frozenset[str] | None:
    """Tags that a message must have one of for an expression to be true.

    Returns:
        The tags, perhaps none at all; None if the expression does not say.
    """
    match node:
        case Comparison("=", Property(name), str(tag)) | Comparison("=", str(tag), Property(name)):
            return frozenset([tag]) if name == TAGS else None
        case Member(Property(name), literals):
            tags = frozenset(tag for tag in literals if isinstance(tag, str))
            return tags if name == TAGS and len(tags) == len(set(literals)) else None
        case And(nodes):
            known = [tags for tags in map(required_tags, nodes) if tags is not None]
            return frozenset.intersection(*known) if known else None
        case Or(nodes):
            parts = [required_tags(one) for one in nodes]
            known = [tags for tags in parts if tags is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
        case _:
            return None


# ---- From the parser's words to nodes ------------------------------------------------------


class _Refusal(Exception):
    """An expression is wrong at a character, counted from 0."""

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason


class _Part(NamedTuple):
    """A part of an expression that was understood."""

    value: Any
    """A node or an operand."""
    position: int
    """Start of the part, from 0."""
    terms: int = 1
    depth: int = 0


class _Builder:
    """Called by the parser with the parts of each rule, from the inside out."""

    def start(self, parts: list[_Part]) -> Node:
        node: Node = parts[0].value
        return node

    def either(self, parts: list[_Part]) -> _Part:
        return _join(Or(tuple(part.value for part in parts)), parts)

    def all(self, parts: list[_Part]) -> _Part:
        return _join(And(tuple(part.value for part in parts)), parts)

    def negation(self, parts: list[Any]) -> _Part:
        return _join(Not(parts[1].value), parts[1:], parts[0].start_pos)

    def truth(self, parts: list[Any]) -> _Part:
        return _Part(Constant(parts[0].upper() == "TRUE"), parts[0].start_pos)

    def comparison(self, parts: list[Any]) -> _Part:
        left, operator, right = parts
        _check_property(left, right)
        if operator in _ORDERINGS:
            _check_orderable(left, right)
        return _Part(Comparison(str(operator), left.value, right.value), left.position)

    def between(self, parts: list[Any]) -> _Part:
        operand, negation, low, high = parts
        _check_property(operand, low, high)
        _check_orderable(operand, low, high)
        if not isinstance(low.value, Property) and not isinstance(high.value, Property):
            if low.value > high.value:
                raise _Refusal(low.position, f"BETWEEN {low.value} AND {high.value} is empty")
        # SQL92 defines it so.
        node = And(
            (
                Comparison(">=", operand.value, low.value),
                Comparison("<=", operand.value, high.value),
            )
        )
        return _Part(Not(node) if negation else node, operand.position, 2, 1)

    def member(self, parts: list[Any]) -> _Part:
        operand, negation, *literals = parts
        node = Member(operand.value, tuple(literal.value for literal in literals))
        part = _Part(Not(node) if negation else node, operand.position, len(literals))
        _check_terms(part)
        return part

    def null(self, parts: list[Any]) -> _Part:
        operand, negation = parts
        node = IsNull(operand.value)
        return _Part(Not(node) if negation else node, operand.position)

    def property(self, parts: list[Any]) -> _Part:
        token = parts[0]
        name = str(token)
        if name.startswith('"'):
            name = name[1:-1]
            if _FORBIDDEN_IN_NAMES.search(name):
                raise _Refusal(
                    token.start_pos, "a property's name with a control character or '\\'"
                )
        return _Part(Property(name), token.start_pos)

    def number(self, parts: list[Any]) -> _Part:
        token = parts[0]
        number = parse_number(token)
        if number is None:
            raise _Refusal(
                token.start_pos,
                f"a number is over {MAX_NUMBER_LENGTH} characters long, or too large",
            )
        return _Part(number, token.start_pos)

    def text(self, parts: list[Any]) -> _Part:
        return _Part(parts[0][1:-1].replace("''", "'"), parts[0].start_pos)

    def boolean(self, parts: list[Any]) -> _Part:
        return _Part(parts[0].upper() == "TRUE", parts[0].start_pos)


def _join(node: Node, parts: Sequence[_Part], position: int | None = None) -> _Part:
    joined = _Part(
        node,
        parts[0].position if position is None else position,
        sum(part.terms for part in parts) + 1,
        max(part.depth for part in parts) + 1,
    )
    _check_terms(joined)
    if joined.depth > MAX_NESTING:
        raise _Refusal(joined.position, f"nested deeper than {MAX_NESTING}")
    return joined


def _check_terms(part: _Part) -> None:
    if part.terms > MAX_TERMS:
        raise _Refusal(part.position, f"more than {MAX_TERMS} terms")


def _check_property(*operands: _Part) -> None:
    if not any(isinstance(operand.value, Property) for operand in operands):
        raise _Refusal(operands[0].position, "a comparison without a property")


def _check_orderable(*operands: _Part) -> None:
    for operand in operands:
        if isinstance(operand.value, (bool, str)):
            raise _Refusal(
                operand.position, "only numbers have an order; texts are compared by = and <>"
            )


# ---- The parser ----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _parser() -> Callable[[str], Any]:
    # Here, for most processes never need it: 50 ms and 10 MiB.
    from lark import Lark, UnexpectedCharacters, UnexpectedToken

    # The basic lexer, for a keyword is one everywhere: a property called NULL needs quotes.
    lark = Lark(
        _GRAMMAR, parser="lalr", lexer="basic", transformer=_Builder(), maybe_placeholders=True
    )

    def parse(expression: str) -> Any:
        try:
            return lark.parse(expression)
        except UnexpectedCharacters as error:
            position = error.pos_in_stream or 0
            if expression[position] == "'":
                raise _Refusal(position, "a text without its end") from None
            raise _Refusal(position, f"{expression[position]!r} means nothing here") from None
        except UnexpectedToken as error:
            if error.token.type == "$END":
                raise _Refusal(
                    len(expression), _unexpected("", error.accepts or error.expected)
                ) from None
            raise _Refusal(
                error.token.start_pos, _unexpected(error.token, error.accepts or error.expected)
            ) from None

    return parse


def _unexpected(found: str, expected: set[str]) -> str:
    names = {_WORDS.get(name, name) for name in expected - _UNNAMED}
    shown = repr(str(found[:32])) if found else "the end"
    return f"{shown} where one of these could stand: {', '.join(sorted(names, key=str.casefold))}"


def _refuse(expression: str, position: int, reason: str) -> NoReturn:
    shown = expression if len(expression) <= 64 else expression[:64] + "…"
    raise InvalidArgument(f"SQL92 expression {shown!r}, character {position + 1}: {reason}")

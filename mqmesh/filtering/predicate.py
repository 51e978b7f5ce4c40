"""Evaluation of SQL92 expressions: finds the messages of a payload that match one.

The logic has three values. A property that the message does not have is NULL,
and a comparison with NULL is UNKNOWN; so is one whose values cannot be compared:
a text that is no number with a number, or a text that is neither true nor false
with TRUE or FALSE. NOT UNKNOWN is UNKNOWN, UNKNOWN AND FALSE is FALSE, UNKNOWN
OR TRUE is TRUE. A message matches when the expression is TRUE. Properties are
texts; the other operand of a comparison says how they are read:

- with a number: as a number, so ``delay = 60`` holds for ``60``, ``60.0`` and ``6e1``;
- with a text, or with another property by ``=`` and ``<>``: as they are;
- with another property by ``<`` and its kin: both as numbers;
- with TRUE or FALSE: ``true`` and ``false``, in any case.

A broker looks at millions of messages a second, so nothing here interprets an
expression message by message. All that an expression says of one property (or
pair of them) is one *leaf*. Of a payload only the properties that the expression
names are decoded, a leaf's verdicts are looked up by value in C, as a row of
bytes, and the rows are joined by AND, OR and NOT of whole numbers. The
expression's definition, ``evaluate``, only runs for values not met before.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from mqmesh.batch.payload import Buffer, slice_payload
from mqmesh.errors import CorruptBatch
from mqmesh.filtering.sql92 import (
    TAGS,
    And,
    Comparison,
    Constant,
    IsNull,
    Literal,
    Member,
    Node,
    Not,
    Operand,
    Or,
    Property,
    parse_number,
    parse_sql,
    required_tags,
)
from mqmesh.message import Message

MAX_REMEMBERED: Final = 2_048
"""Verdicts on values that a predicate remembers, over all its leaves."""
MAX_REMEMBERED_LENGTH: Final = 64
"""Characters of a value whose verdict is remembered."""

Truth: TypeAlias = bool | None
"""None is UNKNOWN."""
Lookup: TypeAlias = Callable[[str], str | None]
"""A message's property by its name."""

_UNKNOWN_BYTE, _TRUE_BYTE, _FALSE_BYTE = 0, 1, 2


# ---- What an expression means --------------------------------------------------------------


def evaluate(node: Node, lookup: Lookup) -> Truth:
    """Evaluates an expression for a message; None if its truth cannot be known."""
    match node:
        case Constant(value):
            return value
        case IsNull(operand):
            return lookup(operand.name) is None
        case Comparison(sign, left, right):
            return _compare(sign, left, right, lookup)
        case Member(operand, literals):
            return _any(_compare("=", operand, literal, lookup) for literal in literals)
        case Not(inner):
            truth = evaluate(inner, lookup)
            return None if truth is None else not truth
        case And(nodes):
            truth = _any(_contrary(evaluate(one, lookup)) for one in nodes)
            return _contrary(truth)
        case Or(nodes):
            return _any(evaluate(one, lookup) for one in nodes)


def fits_sql(expression: str, message: Message) -> bool:
    """Returns True when an expression is TRUE for a message.

    Raises:
        InvalidArgument: The expression is wrong, see ``parse_sql``.
    """

    def lookup(name: str) -> str | None:
        return message.tag if name == TAGS else message.property(name)

    return evaluate(parse_sql(expression), lookup) is True


def _contrary(truth: Truth) -> Truth:
    return None if truth is None else not truth


def _any(truths: Iterable[Truth]) -> Truth:
    answer: Truth = False
    for truth in truths:
        if truth:
            return True
        if truth is None:
            answer = None
    return answer


def _compare(sign: str, left: Operand, right: Operand, lookup: Lookup) -> Truth:
    if not isinstance(left, Property):
        left, right, sign = right, left, _MIRRORED[sign]
    assert isinstance(left, Property), "the parser refuses comparisons without a property"
    value: Literal | None = lookup(left.name)
    other: Literal | None
    if isinstance(right, Property):
        other = lookup(right.name)
        if sign not in _EQUALITIES:
            value, other = _as_number(value), _as_number(other)
    else:
        other = right
        if isinstance(other, bool):
            value = None if value is None else _TRUTHS.get(str(value)[:8].lower())
        elif not isinstance(other, str):
            value = _as_number(value)
    if value is None or other is None:
        return None
    truth: bool = _OPERATIONS[sign](value, other)
    return truth


def _as_number(value: Literal | None) -> Literal | None:
    return parse_number(value) if isinstance(value, str) else None


_EQUALITIES: Final = frozenset({"=", "<>"})
_MIRRORED: Final = {"=": "=", "<>": "<>", "<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OPERATIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TRUTHS: Final = {"true": True, "false": False}


# ---- Many messages at once -----------------------------------------------------------------


class _Columns(NamedTuple):
    """Properties of a row of messages, as a predicate uses them."""

    values: dict[str, list[str | None]]
    """Values by property, one a message, None for messages without it."""
    ones: int
    """A 1 in the byte of every message."""


class _Verdicts(NamedTuple):
    """Verdicts on a row of messages: a byte each, 0 or 1, in whole numbers."""

    true: int
    false: int


_Plan: TypeAlias = Callable[[_Columns], _Verdicts]


class _Leaf(dict[Any, int]):
    """Verdicts by value, or by tuple of values; evaluated at the first lookup."""

    def __init__(self, node: Node, names: tuple[str, ...]) -> None:
        super().__init__()
        self._node = node
        self._names = names
        self.most = 16

    def __missing__(self, key: Any) -> int:
        values = key if len(self._names) > 1 else (key,)
        truth = evaluate(self._node, dict(zip(self._names, values, strict=True)).get)
        verdict = _UNKNOWN_BYTE if truth is None else _TRUE_BYTE if truth else _FALSE_BYTE
        if sum(len(value) for value in values if value is not None) <= MAX_REMEMBERED_LENGTH:
            if len(self) >= self.most:
                self.clear()
            self[key] = verdict
        return verdict

    def judge(self, columns: _Columns) -> _Verdicts:
        """Judges a row of messages."""
        rows = [columns.values[name] for name in self._names]
        keys: Iterable[Any] = rows[0] if len(rows) == 1 else zip(*rows, strict=True)
        bits = int.from_bytes(bytes(map(self.__getitem__, keys)), "little")
        return _Verdicts(bits & columns.ones, bits >> 1 & columns.ones)


class Predicate:
    """An expression, ready for many messages. Used by one thread at a time.

    Args:
        expression: SQL92.

    Attributes:
        expression: Expression as given.
        tags: Tags one of which every matching message has; None if there is no such bound.
        leaf_count: Number of evaluations a message.

    Raises:
        InvalidArgument: Describes the error and its character, counted from 1.
    """

    def __init__(self, expression: str) -> None:
        node = parse_sql(expression)
        self.expression = expression
        self.tags = required_tags(node)
        self._names = sorted(_names_of(node))
        properties = [name for name in self._names if name != TAGS]
        self._decoder, self._no_properties = _row_decoder(properties, TAGS in self._names)
        self._getters = [
            (name, operator.attrgetter(f"p{at}")) for at, name in enumerate(properties)
        ]
        self._leaves: list[_Leaf] = []
        self._plan = _make_plan(node, self._leaves)
        self.leaf_count = len(self._leaves)
        for leaf in self._leaves:
            leaf.most = MAX_REMEMBERED // self.leaf_count

    def select(self, payload: Buffer, start: int, stop: int, count: int) -> bytes:
        """Selects the matching messages of a payload.

        Args:
            payload: An opened payload: the array of messages.
            start: First message looked at.
            stop: Behind the last one.
            count: Messages in the payload.

        Returns:
            A byte for each message from ``start`` to ``stop``: 1 if it matches, else 0.

        Raises:
            CorruptBatch: The payload is no array of messages.
        """
        if stop - start < count:
            payload = slice_payload(payload, start, stop)
        try:
            rows = self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptBatch(f"messages cannot be decoded: {error}") from error
        values: dict[str, list[str | None]] = {}
        if self._getters:
            empty = self._no_properties
            properties = [row.properties or empty for row in rows]
            for name, getter in self._getters:
                values[name] = list(map(getter, properties))
        if TAGS in self._names:
            values[TAGS] = [row.tag for row in rows]
        columns = _Columns(values, int.from_bytes(b"\x01" * len(rows), "little"))
        return self._plan(columns).true.to_bytes(len(rows), "little")


def _row_decoder(properties: list[str], with_tag: bool) -> tuple[Any, Any]:
    """Makes a decoder of the fields that an expression names; it passes over all others.

    Returns:
        The decoder, and the value for a message without properties.
    """
    fields = [
        (f"p{at}", str | None, msgspec.field(default=None, name=name))
        for at, name in enumerate(properties)
    ]
    wanted = msgspec.defstruct("Wanted", fields, gc=False)
    raw = msgspec.Raw
    row = msgspec.defstruct(
        "Row",
        [
            ("topic", raw),
            ("body", raw),
            ("tag", str | None if with_tag else raw, None),
            ("keys", raw, None),
            ("properties", wanted | None if properties else raw, None),
        ],
        array_like=True,
        gc=False,
    )
    return msgspec.msgpack.Decoder(list[row]), wanted()  # type: ignore[valid-type]


def _names_of(node: Node) -> frozenset[str]:
    match node:
        case Constant():
            return frozenset()
        case IsNull(operand) | Member(operand):
            return frozenset([operand.name])
        case Comparison(_, left, right):
            return frozenset(one.name for one in (left, right) if isinstance(one, Property))
        case Not(inner):
            return _names_of(inner)
        case And(nodes) | Or(nodes):
            return frozenset().union(*map(_names_of, nodes))


def _make_plan(node: Node, leaves: list[_Leaf]) -> _Plan:
    """Makes the plan that judges rows of messages; adds the leaves that are needed for it."""
    names = _names_of(node)
    if not names:
        return _constant(evaluate(node, lambda name: None))
    if len(names) == 1 or isinstance(node, (Comparison, IsNull, Member)):
        leaf = _Leaf(node, tuple(sorted(names)))
        leaves.append(leaf)
        return leaf.judge
    if isinstance(node, Not):
        return _contrary_of(_make_plan(node.node, leaves))
    assert isinstance(node, (And, Or))
    plans = [_make_plan(part, leaves) for part in _gathered(node)]
    return _all_of(plans) if isinstance(node, And) else _any_of(plans)


def _gathered(node: And | Or) -> list[Node]:
    """Returns the parts of a node; those about one property alone are put together, as one leaf."""
    kind = type(node)
    by_name: dict[frozenset[str], list[Node]] = {}
    others: list[Node] = []
    for part in node.nodes:
        names = _names_of(part)
        if len(names) > 1:
            others.append(part)
        else:
            by_name.setdefault(names, []).append(part)
    gathered = [some[0] if len(some) == 1 else kind(tuple(some)) for some in by_name.values()]
    return [*gathered, *others]


def _constant(truth: Truth) -> _Plan:
    if truth:
        return lambda columns: _Verdicts(columns.ones, 0)
    return lambda columns: _Verdicts(0, columns.ones)


def _contrary_of(plan: _Plan) -> _Plan:
    def judge(columns: _Columns) -> _Verdicts:
        verdicts = plan(columns)
        return _Verdicts(verdicts.false, verdicts.true)

    return judge


def _all_of(plans: list[_Plan]) -> _Plan:
    def judge(columns: _Columns) -> _Verdicts:
        true, false = columns.ones, 0
        for plan in plans:
            verdicts = plan(columns)
            true &= verdicts.true
            false |= verdicts.false
        return _Verdicts(true, false)

    return judge


def _any_of(plans: list[_Plan]) -> _Plan:
    def judge(columns: _Columns) -> _Verdicts:
        true, false = 0, columns.ones
        for plan in plans:
            verdicts = plan(columns)
            true |= verdicts.true
            false &= verdicts.false
        return _Verdicts(true, false)

    return judge

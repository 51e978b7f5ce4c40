"""Selectors: the messages of a topic that a consumer wants."""

from collections.abc import Collection
from typing import Self

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.filtering.python_filter import PythonFilter
from mqmesh.filtering.sql92 import parse_sql
from mqmesh.filtering.tags import ALL, parse_tags
from mqmesh.protocol.membership import MAX_SUBSCRIPTIONS
from mqmesh.protocol.pulling import ExpressionType


class MessageSelector(msgspec.Struct, frozen=True, kw_only=True):
    """An expression and its language; messages that it leaves out do not cross the network.

    Make one with ``by_tag``, ``by_sql`` or ``by_python``::

        consumer.subscribe("flights", MessageSelector.by_sql("dep_delay > 60"))

    Attributes:
        expression: As the user wrote it.
        expression_type: ``TAG``, ``SQL92`` or ``PYTHON``.
        python: The filter, for ``PYTHON``; the expression is its id then.
    """

    expression: str = ALL
    expression_type: str = ExpressionType.TAG.value
    python: PythonFilter | None = None

    @classmethod
    def by_tag(cls, expression: str) -> Self:
        """Select messages with one of the tags joined by ``||``; ``*`` for all messages."""
        return cls(expression=expression, expression_type=ExpressionType.TAG.value)

    @classmethod
    def by_sql(cls, expression: str) -> Self:
        """Select messages for which an SQL92 expression over properties and ``TAGS`` is true."""
        return cls(expression=expression, expression_type=ExpressionType.SQL92.value)

    @classmethod
    def by_python(cls, source: str | PythonFilter) -> Self:
        """Select messages for which ``match(message)`` returns True; see ``PythonFilter``."""
        wanted = PythonFilter(source) if isinstance(source, str) else source
        return cls(
            expression=wanted.filter_id,
            expression_type=ExpressionType.PYTHON.value,
            python=wanted,
        )

    def check(self) -> None:
        """Makes sure that the expression makes sense.

        Raises:
            InvalidArgument: Describes the error and its character, counted from 1.
        """
        if self.expression_type == ExpressionType.TAG:
            parse_tags(self.expression)
        elif self.expression_type == ExpressionType.SQL92:
            parse_sql(self.expression)
        elif self.expression_type == ExpressionType.PYTHON:
            if self.python is None or self.python.filter_id != self.expression:
                raise InvalidArgument("a filter in Python is made by MessageSelector.by_python")
        else:
            raise InvalidArgument(
                f"expression type {self.expression_type!r} is none of {', '.join(ExpressionType)}"
            )

    def wanted_tags(self) -> frozenset[str] | None:
        """Tags to look at again, for a broker compares their hashes; None for other languages."""
        if self.expression_type == ExpressionType.TAG:
            return parse_tags(self.expression)
        return None

    @property
    def selects_all(self) -> bool:
        """True when no message is left out."""
        return self.expression_type == ExpressionType.TAG and self.expression.strip() == ALL


Wanted = str | MessageSelector | PythonFilter
"""Filter that users may give: a tag expression, a selector, or a filter in Python."""


def check_not_subscribed(topic: str, subscribed: Collection[str]) -> None:
    """Check that a consumer does not take part in a topic yet, and may take part in one more.

    Args:
        topic: Topic to subscribe to.
        subscribed: Topics that it takes part in.

    Raises:
        InvalidArgument: It does: messages that are held for the former subscription would be lost
            to it without a word. Or it has ``MAX_SUBSCRIPTIONS`` topics, with the retry topic.
    """
    if topic in subscribed:
        raise InvalidArgument(
            f"topic {topic!r} is subscribed already by this consumer; unsubscribe it first to "
            "change its expression or listener"
        )
    most = MAX_SUBSCRIPTIONS - 1  # the group's retry topic is one, too
    if len(subscribed) >= most:
        raise InvalidArgument(
            f"this consumer subscribes to {most} topics, which is the limit; subscribe to "
            f"{topic[:255]!r} by a consumer of another group"
        )


def as_selector(expression: Wanted) -> MessageSelector:
    """Return a checked selector of a user's argument.

    Raises:
        InvalidArgument: As ``MessageSelector.check``, or it is none of them.
    """
    if isinstance(expression, PythonFilter):
        return MessageSelector.by_python(expression)
    selector = MessageSelector.by_tag(expression) if isinstance(expression, str) else expression
    if not isinstance(selector, MessageSelector):
        raise InvalidArgument(
            "an expression is a str, a MessageSelector or a PythonFilter, not "
            f"{type(expression).__name__}"
        )
    selector.check()
    return selector

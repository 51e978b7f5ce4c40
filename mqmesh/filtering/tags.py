"""Tag expressions: ``TagA || TagB``, or ``*`` for every message.

The broker matches hashes, which may collide, so consumers compare the tags
themselves again. White space around a tag does not count.
"""

from functools import lru_cache
from typing import Final

from mqmesh.errors import InvalidArgument
from mqmesh.message import MAX_TAG_LENGTH, tag_hash

ALL: Final = "*"
"""The expression that every message fits, tag or none."""
SEPARATOR: Final = "||"
MAX_EXPRESSION_LENGTH: Final = 16_384

_MAX_CACHED_LENGTH: Final = 4_096


def parse_tags(expression: str) -> frozenset[str] | None:
    """Returns the tags that an expression names.

    Args:
        expression: ``*``, or tags joined by ``||``; up to 16,384 characters.

    Returns:
        The tags; None when every message fits.

    Raises:
        InvalidArgument: Describes the error and its character, counted from 1.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise InvalidArgument(
            f"tag expression of {len(expression)} characters is over {MAX_EXPRESSION_LENGTH}"
        )
    if expression.strip() == ALL:
        return None
    tags = set()
    position = 0
    for part in expression.split(SEPARATOR):
        tag = part.strip()
        start = position + len(part) - len(part.lstrip()) + 1
        _check(expression, tag, start)
        tags.add(tag)
        position += len(part) + len(SEPARATOR)
    return frozenset(tags)


def expression_hashes(expression: str) -> frozenset[int] | None:
    """Returns the hashes of the tags that an expression names, as consume queues carry them.

    Returns:
        Of each tag ``message.tag_hash``; None when every message fits.

    Raises:
        InvalidArgument: The expression is wrong, see ``parse_tags``.
    """
    if expression == ALL:
        return None
    # Long ones are not remembered: strangers may send as many of them as they like.
    if len(expression) <= _MAX_CACHED_LENGTH:
        return _cached_hashes(expression)
    return _hashes(expression)


def _hashes(expression: str) -> frozenset[int] | None:
    tags = parse_tags(expression)
    return None if tags is None else frozenset(map(tag_hash, tags))


_cached_hashes = lru_cache(maxsize=256)(_hashes)


def _check(expression: str, tag: str, start: int) -> None:
    shown = expression if len(expression) <= 64 else expression[:64] + "…"
    where = f"tag expression {shown!r}, character {start}"
    if not tag:
        raise InvalidArgument(f"{where}: a tag is missing")
    if tag == ALL:
        raise InvalidArgument(f"{where}: '*' stands alone, not beside tags")
    if tag[0] == "|" or tag[-1] == "|":
        raise InvalidArgument(f"{where}: tags are joined by exactly two '|'")
    if len(tag) > MAX_TAG_LENGTH:
        raise InvalidArgument(f"{where}: a tag of {len(tag)} characters is over {MAX_TAG_LENGTH}")
    try:
        tag.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{where}: no text ({error.reason})") from None

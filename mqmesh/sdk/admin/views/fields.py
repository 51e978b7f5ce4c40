"""Makes views of structs that have the same fields."""

from typing import Any, TypeVar

import msgspec

_V = TypeVar("_V", bound=msgspec.Struct)


def view_of(kind: type[_V], source: object, **others: Any) -> _V:
    """Makes a view whose fields are attributes of another object.

    Args:
        kind: Kind of the view.
        source: Object that has the attributes, properties among them.
        others: Fields by name that it has not, or that the view shows differently.

    Raises:
        AttributeError: A field is neither an attribute of the object nor among the others.
    """
    taken = {name: getattr(source, name) for name in kind.__struct_fields__ if name not in others}
    return kind(**taken, **others)


def views_of(kind: type[_V], sources: list[Any]) -> list[_V]:
    """Makes a view of each object, as ``view_of`` does."""
    return [view_of(kind, one) for one in sources]

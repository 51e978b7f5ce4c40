"""Constructors with the parameters of the blocking classes' ones."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

_P = ParamSpec("_P")


def signed_as(
    blocking: Callable[Concatenate[Any, _P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _P], None]]:
    """Give a constructor the signature of another, for type checkers, editors and ``help``."""

    def sign(own: Callable[..., None]) -> Callable[Concatenate[Any, _P], None]:
        return functools.update_wrapper(own, blocking, ("__annotations__",), ())

    return sign

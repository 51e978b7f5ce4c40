"""Syntax trees of sources; each is made, and walked, once."""

import ast
import functools
from typing import cast


def parsed(source: str) -> ast.Module:
    """Returns the tree of a Python source; no caller changes it.

    Raises:
        SyntaxError: The text is no Python.
    """
    return cast(ast.Module, walked(source)[0])


@functools.cache
def walked(source: str) -> tuple[ast.AST, ...]:
    """Returns all nodes of the tree of a Python source, in the order of ``ast.walk``.

    Raises:
        SyntaxError: The text is no Python.
    """
    return tuple(ast.walk(ast.parse(source)))

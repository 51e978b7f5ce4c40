"""Runs a role without the statements that count, so that it can be seen what these cost.

Run as ``python -m rows.uncounted ROLE …`` with the arguments of ``python -m mqmesh.cli``. Nothing
else is another than in the role that users start. Its figures are 0, its decisions the same.
"""

import ast
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any, Final

from mqmesh.roles.broker.stats import Counters

PLACES: Final = (
    "mqmesh.roles.dispatch",
    "mqmesh.roles.broker.features.sending.feature",
    "mqmesh.roles.broker.writing.writes",
    "mqmesh.roles.broker.features.pulling.feature",
    "mqmesh.transport.zmq.serving",
)
"""Modules on the way of sends and pulls that count."""

_TOTALS: Final = frozenset({*Counters.__struct_fields__, "requests", "failures", "spent_ns"})
_TIMES: Final = frozenset({"began_ns", "spent_ns", "took_ns"})
_CALLS: Final = ("observe(", "._observe_later[", ".by_group.note(")


class Stripper(ast.NodeTransformer):
    """Leaves out statements that count.

    Attributes:
        left_out: How many it has found.
    """

    def __init__(self) -> None:
        self.left_out = 0

    def generic_visit(self, node: ast.AST) -> Any:
        """See ``ast.NodeTransformer``."""
        if isinstance(node, ast.stmt) and _counts(node):
            self.left_out += 1
            return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)


def _counts(node: ast.stmt) -> bool:
    match node:
        case ast.AugAssign(target=ast.Attribute(attr=name)):
            return name in _TOTALS
        case ast.Assign(targets=[ast.Name(id=name), *_]):
            return name in _TIMES
        case ast.If(test=ast.Compare(left=ast.Name(id="spent_ns"))):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            text = f"{ast.unparse(function)}("
            return any(call in text for call in _CALLS)
    return False


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        stripper = Stripper()
        path = self.get_filename(fullname)
        tree = stripper.visit(ast.parse(self.get_data(path)))
        assert stripper.left_out, f"{fullname} counts nothing"
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in PLACES else None
        if spec is not None:
            assert spec.origin is not None
            spec.loader = _Loader(fullname, spec.origin)
        return spec


if __name__ == "__main__":
    assert not sys.modules.keys() & set(PLACES), "imported before"
    sys.meta_path.insert(0, _Finder())
    sys.exit(import_module("mqmesh.cli.entry").main())

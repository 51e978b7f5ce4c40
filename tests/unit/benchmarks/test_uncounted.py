"""A broker that counts nothing is the real one without the statements that count."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from rows.uncounted import PLACES, Stripper


@pytest.mark.parametrize("place", PLACES)
def test_every_module_that_counts_loses_something_and_is_a_module_still(place):
    source = Path(importlib.util.find_spec(place).origin).read_text()
    stripper = Stripper()
    tree = ast.fix_missing_locations(stripper.visit(ast.parse(source)))
    assert stripper.left_out
    compile(tree, place, "exec")


def test_statements_that_count_are_left_out_and_no_others():
    source = """
def serve(self, request, topic, size):
    began_ns = now_ns()
    self.requests += 1
    topic.put_bytes += size
    self.position += size
    topic.sizes.observe(size, 1)
    self.by_group.note(request.group, size)
    self.log.note(size)
    return size
"""
    left = ast.unparse(ast.fix_missing_locations(Stripper().visit(ast.parse(source))))
    lines = [line.strip() for line in left.splitlines() if line.strip() not in ("", "pass")]
    assert lines[1:] == ["self.position += size", "self.log.note(size)", "return size"]

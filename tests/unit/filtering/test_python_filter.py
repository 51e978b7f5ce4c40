"""What a consumer may give for a filter in Python."""

from __future__ import annotations

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.filtering.python_filter import (
    ID_LENGTH,
    MAX_SOURCE_BYTES,
    PythonFilter,
    check_filter_id,
    filter_id,
)
from mqmesh.protocol.pulling import ExpressionType
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector, as_selector

SOURCE = "def match(m): return True"


def test_the_id_is_made_of_the_source_alone():
    first, second = PythonFilter(SOURCE), PythonFilter(SOURCE)
    assert first == second
    assert hash(first) == hash(second)
    assert first != PythonFilter(SOURCE + " ")
    assert first != SOURCE
    assert first.filter_id == filter_id(SOURCE.encode())
    assert repr(first) == f"PythonFilter({first.filter_id})"
    # On the wire for ever.
    assert first.filter_id == "31e31f95f09074f0c6aed29602823bd7"


@pytest.mark.parametrize(
    "source", ["", "#" * (MAX_SOURCE_BYTES + 1), "é" * MAX_SOURCE_BYTES, "\udc00", b"x", None, 3]
)
def test_what_is_no_source_is_refused(source):
    with pytest.raises(InvalidArgument):
        PythonFilter(source)


@pytest.mark.parametrize("text", ["", "x" * ID_LENGTH, "A" * ID_LENGTH, "0" * 31, "0" * 33])
def test_what_is_no_id_is_refused(text):
    with pytest.raises(InvalidArgument, match="no filter id"):
        check_filter_id(text)


def test_a_filter_is_a_selector_too():
    wanted = PythonFilter(SOURCE)
    selector = as_selector(wanted)
    assert selector == MessageSelector.by_python(SOURCE) == MessageSelector.by_python(wanted)
    assert (selector.expression, selector.expression_type) == (
        wanted.filter_id,
        ExpressionType.PYTHON,
    )
    assert selector.wanted_tags() is None
    assert not selector.selects_all


def test_an_id_alone_is_no_selector():
    bare = MessageSelector(expression="0" * 32, expression_type=ExpressionType.PYTHON.value)
    with pytest.raises(InvalidArgument, match="by_python"):
        as_selector(bare)
    with pytest.raises(InvalidArgument, match="PythonFilter"):
        as_selector(3)

"""What users import."""

from __future__ import annotations

import inspect

import mqmesh


def test_every_name_can_be_imported_and_says_what_it_is() -> None:
    assert sorted(dir(mqmesh)) == sorted(mqmesh.__all__)
    for name in mqmesh.__all__:
        found = getattr(mqmesh, name)
        assert name == "__version__" or inspect.getdoc(found), name

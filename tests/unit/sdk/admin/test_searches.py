"""How a search divides what it may look at."""

from __future__ import annotations

import pytest

from mqmesh.sdk.admin.searches import shares


@pytest.mark.parametrize(
    ("sizes", "most", "taken"),
    [
        ([], 10, []),
        ([3, 4], 10, [3, 4]),
        ([100, 100], 10, [5, 5]),
        ([2, 100, 100], 10, [2, 4, 4]),
        ([100, 0, 100], 7, [3, 0, 4]),
        ([5, 5, 5], 2, [0, 1, 1]),
    ],
)
def test_parts_share_evenly_and_none_more_than_it_has(sizes, most, taken):
    assert shares(sizes, most) == taken

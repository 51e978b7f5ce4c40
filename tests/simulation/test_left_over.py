"""C10 of simulated clusters: what is begun for somebody ends."""

from __future__ import annotations

from unittest import mock

import pytest
from harness.simulation.run import run_seed

from mqmesh.roles.broker.features.delays.schedule_link import ScheduleLink


class NeverLess:
    """A counter that forgets that something has ended."""

    def __get__(self, desk, kind):
        return vars(desk).get("counted", 0)

    def __set__(self, desk, value):
        vars(desk)["counted"] = max(value, vars(desk).get("counted", 0))


@pytest.mark.timeout(120)
def test_a_delivery_that_never_ends_is_found():
    with mock.patch.object(ScheduleLink, "storing", NeverLess(), create=True):
        violations = run_seed(3).violations
    assert any(one.startswith("C10: ") and "not safe while nothing" in one for one in violations)

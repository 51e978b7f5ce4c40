"""The one suite, run on the embedded coordinator over the simulated transport."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.coordinator_sites import SimulatedSite

from mqmesh.testing.coordinator_contract import CoordinatorContract


class TestEmbeddedCoordinator(CoordinatorContract):
    """The file is a real one."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Iterator[SimulatedSite]:
        """Without any records."""
        site = SimulatedSite(tmp_path)
        yield site
        site.close()

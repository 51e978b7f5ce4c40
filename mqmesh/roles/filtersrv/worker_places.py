"""How many workers may run at once, so that their memory together stays within a budget. Pure."""

import logging
from typing import Final, Protocol

from mqmesh.errors import SystemBusy
from mqmesh.figures import Measured, gauge
from mqmesh.roles.filtersrv.config import FiltersrvConfig

FREE_MS: Final = 1_000
"""A worker that had nothing to do for so long gives its place to a filter that has none."""
RETRY_MS: Final = 1_000

_log = logging.getLogger(__name__)


class Tenant(Protocol):
    """What runs in a place; ``FilterRunner`` is one."""

    @property
    def name(self) -> str:
        """For logs and errors."""

    @property
    def free_ms(self) -> int:
        """For how long its worker has had nothing to do; 0 while it has."""

    def rest(self) -> None:
        """Ends its worker, until there is something to do again."""


class WorkerPlaces:
    """The places of a filter server's workers.

    Args:
        config: Settings.
    """

    def __init__(self, config: FiltersrvConfig) -> None:
        self._config = config
        self._tenants: dict[Tenant, None] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def take(self, tenant: Tenant) -> None:
        """A filter is to get a worker.

        Raises:
            SystemBusy: All places are taken by filters that have something to do.
        """
        if len(self._tenants) >= self._config.most_workers:
            self._make_room(tenant)
        self._tenants[tenant] = None

    def give_back(self, tenant: Tenant) -> None:
        """Its worker is gone."""
        self._tenants.pop(tenant, None)

    def _make_room(self, tenant: Tenant) -> None:
        config = self._config
        freest = max(self._tenants, key=lambda one: one.free_ms)
        if freest.free_ms < FREE_MS:
            raise SystemBusy(
                f"no room for a process of {tenant.name}: {len(self._tenants)} run, of "
                f"worker_memory_bytes = {config.worker_memory_bytes} each, and all together may "
                f"have {config.max_total_worker_memory_bytes} (max_total_worker_memory_bytes)",
                retry_after_ms=RETRY_MS,
            )
        _log.info("%s makes room for %s", freest.name, tenant.name)
        freest.rest()


WORKER_FIGURES: Final[tuple[Measured[WorkerPlaces], ...]] = (
    gauge("filter_processes", "processes of filters that run", len),
)

"""Places for workers: so many that their memory together stays within a budget. Pure.

A place that is wanted while all are taken comes from, in this order:

1. the worker that had nothing to do for longest, from ``FREE_MS``;
2. a user that has two places more than the one that wants it, so that all get equal shares;
3. the worker that has had a place for longest, from ``TURN_MS``, of the users with no fewer places.
"""

import logging
from collections import Counter
from typing import Final, Protocol

from mqmesh.clock import Clock
from mqmesh.errors import SystemBusy
from mqmesh.metrics import Measured, gauge
from mqmesh.roles.filtersrv.config import FiltersrvConfig

FREE_MS: Final = 1_000
"""A worker that had nothing to do for so long gives its place to a filter that has none."""
TURN_MS: Final = 10_000
"""A busy worker keeps its place for so long at least, unless its user has more than a share."""
RETRY_MS: Final = 1_000

_log = logging.getLogger(__name__)


class Tenant(Protocol):
    """Worker's owner in a place; ``FilterRunner`` is one."""

    @property
    def name(self) -> str:
        """Name for logs and errors."""

    @property
    def free_ms(self) -> int:
        """Time for which its worker has had nothing to do, ms; 0 while it has."""

    @property
    def user(self) -> str:
        """User that it belongs to; each user has a share of the places."""

    def rest(self) -> None:
        """Ends its worker, until there is something to do again."""

    def give_way(self) -> None:
        """Ends its worker, though it has something to do: its consumers ask again."""


class WorkerPlaces:
    """The places of a filter server's workers.

    Args:
        config: Settings.
        clock: Monotonic time.
    """

    def __init__(self, config: FiltersrvConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        # With the time since when each has its place, the oldest first.
        self._tenants: dict[Tenant, int] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def take(self, tenant: Tenant) -> None:
        """Takes a place for a filter's worker.

        Raises:
            SystemBusy: All places are taken by filters that have something to do, and whose
                users have no more than their share.
        """
        if len(self._tenants) >= self._config.most_workers:
            self._make_room(tenant)
        self._tenants[tenant] = self._clock.monotonic_ms()

    def give_back(self, tenant: Tenant) -> None:
        """Frees the place of a worker that is gone."""
        self._tenants.pop(tenant, None)

    def _make_room(self, tenant: Tenant) -> None:
        config = self._config
        freest = max(self._tenants, key=lambda one: one.free_ms)
        if freest.free_ms >= FREE_MS:
            _log.info("%s makes room for %s", freest.name, tenant.name)
            freest.rest()
            return
        busy = self._who_gives_way(tenant.user)
        if busy is None:
            raise SystemBusy(
                f"no room for a process of {tenant.name}: {len(self._tenants)} run, of "
                f"worker_memory_bytes = {config.worker_memory_bytes} each, and all together may "
                f"have {config.max_total_worker_memory_bytes} (max_total_worker_memory_bytes)",
                retry_after_ms=RETRY_MS,
            )
        _log.info("%s has to make room for %s", busy.name, tenant.name)
        busy.give_way()

    def _who_gives_way(self, user: str) -> Tenant | None:
        counts = Counter(one.user for one in self._tenants)
        own = counts[user]
        richest, most = counts.most_common(1)[0]
        if most >= own + 2:
            return next(one for one in self._tenants if one.user == richest)
        before_ms = self._clock.monotonic_ms() - TURN_MS
        return next(
            (
                one
                for one, since_ms in self._tenants.items()
                if since_ms <= before_ms and counts[one.user] >= own
            ),
            None,
        )


WORKER_METRICS: Final[tuple[Measured[WorkerPlaces], ...]] = (
    gauge("filter_processes", "processes of filters that run", len),
)

"""The filters of a filter server, and how many there may be. Pure."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mqmesh.errors import FilterUnknown, InvalidArgument, MessageIllegal, SystemBusy
from mqmesh.filtering.python_filter import MAX_SOURCE_BYTES, check_filter_id, filter_id
from mqmesh.metrics import Measured, counter, gauge
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.filtersrv.filter_runner import BUSY_RETRY_MS, FilterRunner, FilterState, OnLoaded

MakeRunner = Callable[[str, str, str, str], FilterRunner]
"""Makes a runner for a user, a group, a filter id and a source."""

EVICT_IDLE_MS: Final = 10_000
"""Time after which an idle filter gives its place up, when all are taken."""
RETRY_AFTER_MS: Final = 1_000
SHARE: Final = 2
"""Divisor of the bytes that others leave: a user's messages may take such a part of them."""

_log = logging.getLogger(__name__)


class FilterStatus(msgspec.Struct, frozen=True):
    """Status of all filters at one moment.

    Attributes:
        filters: Number of filters, by state.
        pulls: Pulls under way.
        pending_bytes: Messages that wait for filters.
        matched: Messages so far that matched.
        passed_over: Messages so far that did not.
        deaths: Processes of filters that died.
    """

    filters: Mapping[FilterState, int] = {}
    pulls: int = 0
    pending_bytes: int = 0
    matched: int = 0
    passed_over: int = 0
    deaths: int = 0


class FilterTable:
    """Filters by consumer group and id; no group sees another's.

    Args:
        config: Settings.
        make_runner: Makes a runner.
    """

    def __init__(self, config: FiltersrvConfig, make_runner: MakeRunner) -> None:
        self._config = config
        self._make_runner = make_runner
        self._runners: dict[tuple[str, str], FilterRunner] = {}
        self._gone = FilterStatus()

    def __len__(self) -> int:
        return len(self._runners)

    def status(self) -> FilterStatus:
        """Return the status at this moment."""
        runners = self._runners.values()
        gone = self._gone
        return FilterStatus(
            Counter(one.state for one in runners),
            sum(one.pulls for one in runners),
            sum(one.pending_bytes for one in runners),
            gone.matched + sum(one.matched for one in runners),
            gone.passed_over + sum(one.passed_over for one in runners),
            gone.deaths + sum(one.deaths for one in runners),
        )

    def upload(
        self, user: str, group: str, wanted_id: str, data: bytes, on_loaded: OnLoaded
    ) -> None:
        """Uploads a filter for a consumer; one that is there already is loaded if need be.

        Args:
            user: User that uploads it.
            group: Consumer group, checked.
            wanted_id: Id of the filter at the consumer.
            data: Source, UTF-8.
            on_loaded: Called with the outcome.

        Raises:
            MessageIllegal: Too long, no text, or not what its id says.
            SystemBusy: The server has too many filters.
            FilterFailed: The filter is resting after a failure.
        """
        source = _check_source(wanted_id, data)
        runner = self._runners.get((group, wanted_id))
        if runner is not None and runner.state is FilterState.REFUSED:
            # Uploading it again is the way to try again.
            self._drop(runner)
            runner = None
        if runner is None:
            self._make_room(user, group)
            runner = self._make_runner(user, group, wanted_id, source)
            self._runners[group, wanted_id] = runner
        runner.load(on_loaded)

    def get(self, group: str, wanted_id: str) -> FilterRunner:
        """Return a filter.

        Raises:
            FilterUnknown: The group has not uploaded it.
        """
        runner = self._runners.get((group, wanted_id))
        if runner is None:
            raise FilterUnknown(f"group {group!r} has not uploaded filter {wanted_id[:64]!r} here")
        return runner

    def check_room(self, user: str, size_bytes: int) -> None:
        """Refuses messages while too many wait for filters.

        Of a user no more may wait than half of what the others leave, so that there is always
        some room for a user of whom nothing waits.

        Args:
            user: User of their filter.
            size_bytes: Size of the messages, in bytes.

        Raises:
            SystemBusy: No capacity is left for so many bytes.
        """
        total = own = 0
        for runner in self._runners.values():
            total += runner.pending_bytes
            if runner.user == user:
                own += runner.pending_bytes
        most = self._config.max_total_pending_bytes
        share = (most - (total - own)) // SHARE
        if (total and total + size_bytes > most) or (own and own + size_bytes > share):
            raise SystemBusy(
                f"{total} bytes wait for filters, {own} of them for those of {user} "
                f"(max_total_pending_bytes = {most})",
                retry_after_ms=BUSY_RETRY_MS,
            )

    def tick(self) -> None:
        """Forgets unused filters."""
        for runner in list(self._runners.values()):
            if runner.idle_ms() >= self._config.filter_idle_ms:
                _log.info("%s is not used any more", runner.name)
                self._drop(runner)

    def close(self) -> None:
        """Ends all of them."""
        for runner in list(self._runners.values()):
            self._drop(runner)

    def _make_room(self, user: str, group: str) -> None:
        own = [runner for key, runner in self._runners.items() if key[0] == group]
        if len(own) >= self._config.max_filters_per_group:
            self._evict(own, f"group {group!r} has {len(own)} filters (max_filters_per_group)")
        elif len(self._runners) >= self._config.max_filters:
            counts = Counter(runner.user for runner in self._runners.values())
            richest, most = counts.most_common(1)[0]
            if most >= counts[user] + 2:
                # All users have equal shares; its consumers upload it again once there is room.
                theirs = [one for one in self._runners.values() if one.user == richest]
                self._drop(max(theirs, key=FilterRunner.idle_ms))
                return
            everybody = list(self._runners.values())
            self._evict(everybody, f"{len(everybody)} filters are here (max_filters)")

    def _evict(self, runners: list[FilterRunner], reason: str) -> None:
        oldest = max(runners, key=FilterRunner.idle_ms)
        if oldest.idle_ms() < EVICT_IDLE_MS and oldest.state is not FilterState.REFUSED:
            raise SystemBusy(f"{reason}, no more may be", retry_after_ms=RETRY_AFTER_MS)
        self._drop(oldest)

    def _drop(self, runner: FilterRunner) -> None:
        del self._runners[runner.group, runner.filter_id]
        gone = self._gone
        self._gone = FilterStatus(
            matched=gone.matched + runner.matched,
            passed_over=gone.passed_over + runner.passed_over,
            deaths=gone.deaths + runner.deaths,
        )
        runner.close()


def _check_source(wanted_id: str, data: bytes) -> str:
    try:
        check_filter_id(wanted_id)
    except InvalidArgument as error:
        raise MessageIllegal(str(error)) from None
    if not 0 < len(data) <= MAX_SOURCE_BYTES:
        raise MessageIllegal(f"a filter of {len(data)} bytes; 1 to {MAX_SOURCE_BYTES} are allowed")
    if filter_id(data) != wanted_id:
        raise MessageIllegal("the source of the filter is not the one that its id was made of")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise MessageIllegal(f"the source of the filter is no UTF-8: {error.reason}") from None


FILTER_METRICS: Final[tuple[Measured[FilterStatus], ...]] = (
    gauge(
        "filters",
        "filters by state; a stopped one has no process until there is something to do",
        lambda one: {(state.value,): one.filters.get(state, 0) for state in FilterState},
        labels=("state",),
    ),
    gauge("filter_pulls", "pulls under way", lambda one: one.pulls),
    gauge("filter_pending_bytes", "messages that wait for filters", lambda one: one.pending_bytes),
    counter(
        "filter_matches_total", "messages that matched", lambda one: one.matched, unit="messages"
    ),
    counter(
        "filter_misses_total",
        "messages that did not match",
        lambda one: one.passed_over,
        unit="messages",
    ),
    counter(
        "filter_process_deaths_total", "processes of filters that died", lambda one: one.deaths
    ),
)

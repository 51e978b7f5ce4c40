"""Sampler: looks at a cluster again and again in a thread of its own, once for all who look on."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.console.cluster_view import (
    ClusterReadings,
    ClusterView,
    Standstills,
    cluster_readings,
    cluster_view,
)
from mqmesh.console.config import ClusterSource
from mqmesh.console.series import SeriesBook, SeriesKey
from mqmesh.errors import MQMeshError
from mqmesh.roles.exporter.alarm_board import AlarmBoard
from mqmesh.roles.exporter.collector import Collector
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.monitor_config import RuleChange
from mqmesh.roles.exporter.rates import Rates
from mqmesh.roles.exporter.run_files import processes_beside
from mqmesh.roles.supervisor.run_file import read_record

IDLE_S: Final = 15.0
"""Time from one look to the next while no page is open."""
WATCHED_S: Final = 20.0
"""Time after its last request in which a page counts as open."""
SHARE: Final = 0.25
"""Largest share of the time that looks take: a large cluster is looked at less often."""
TIMEOUT_MS: Final = 1_000
AT_ONCE: Final = 8

_log = logging.getLogger(__name__)


class ClusterSampler:
    """Sampler of one cluster.

    Args:
        source: The cluster.
        rules: Alarms that differ from their defaults.
        refresh_ms: Time from one look to the next while a page is open, ms.
        clock: Source of time.
        collector: Asks the cluster; of the source by default.

    Attributes:
        view: The last look.
        readings: Its readings by topic and group; None before the first look.
        series: Histories for charts.

    Raises:
        ConfigError: The file of credentials cannot be used.
    """

    def __init__(
        self,
        source: ClusterSource,
        rules: list[RuleChange],
        refresh_ms: int,
        clock: Clock,
        collector: Collector | None = None,
    ) -> None:
        self.view = ClusterView()
        self.readings: ClusterReadings | None = None
        self.series = SeriesBook()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="look")
        self._collector = collector or Collector(
            ExporterConfig(
                namesrv_addr=source.namesrv_addr,
                credentials=source.credentials,
                server_keys=source.server_keys,
                timeout_ms=TIMEOUT_MS,
                rocketmq4_names=False,
            ),
            clock,
            lambda: processes_beside(source.data_dir),
            self._pool.map,
        )
        self._data_dir = source.data_dir
        self._board = AlarmBoard(rules)
        self._rates = Rates()
        self._stills = Standstills()
        self._refresh_s = refresh_ms / 1_000
        self._clock = clock
        self._watched_ms = -int(WATCHED_S * 1_000)
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, once the look that is under way has ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown()
        self._collector.close()

    def watch(self) -> None:
        """Notes a request of a page; the first one after a while causes a fresh look soon."""
        was_idle = not self._is_watched()
        self._watched_ms = self._clock.monotonic_ms()
        if was_idle:
            with self._wake:
                self._wake.notify()

    def look(self) -> None:
        """Looks once, and keeps the readings."""
        began_ms = self._clock.monotonic_ms()
        families = self._collector.collect()
        at_ms, now_ms = self._clock.wall_ms(), self._clock.monotonic_ms()
        self._board.judge(families, at_ms)
        readings = cluster_readings(families, self._rates, now_ms)
        raised = self._board.state.known.values()
        self.readings = readings
        record = read_record(Path(self._data_dir)) if self._data_dir else None
        entries = () if record is None else record.roles
        stills = self._stills.look(families, at_ms)
        took_ms = now_ms - began_ms
        self.view = cluster_view(families, readings, raised, at_ms, took_ms, entries, stills)
        if not self.view.problem:
            self.series.note(at_ms, series_values(self.view, readings))

    def _is_watched(self) -> bool:
        return self._clock.monotonic_ms() - self._watched_ms < WATCHED_S * 1_000

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except MQMeshError as error:
                self.view = msgspec.structs.replace(self.view, problem=str(error))
            except Exception:
                _log.exception("a look failed; the next one follows")
                self.view = msgspec.structs.replace(self.view, problem="the console's look failed")
            # To wait for one that is silent is no work.
            worked_ms = self.view.took_ms - (TIMEOUT_MS if self.view.down else 0)
            pause_s = max(self._refresh_s, worked_ms / 1_000 / SHARE)
            with self._wake:
                if not self._stopping:
                    self._wake.wait(pause_s if self._is_watched() else max(pause_s, IDLE_S))
                if self._stopping:
                    return


def series_values(view: ClusterView, readings: ClusterReadings) -> dict[SeriesKey, float]:
    """Return the value of each series that is not 0; names are the exporter's, counters are rates.

    Those of the whole cluster are always there.
    """
    values: dict[SeriesKey, float] = {
        ("rocketmq_messages_in_total",): view.in_per_s,
        ("rocketmq_messages_out_total",): view.out_per_s,
        ("rocketmq_consumer_lag_messages",): view.backlog,
    }
    for node, used in readings.disks.items():
        values["mqmesh_store_disk_used_ratio", node] = used
    for group in readings.groups:
        if group.lag:
            values["rocketmq_consumer_lag_messages", group.group] = group.lag
    for name, rates in (("in", readings.in_per_s), ("out", readings.out_per_s)):
        for topic, rate in rates.items():
            if rate:
                values[f"rocketmq_messages_{name}_total", topic] = rate
    return values

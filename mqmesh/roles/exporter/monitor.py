"""The monitor: looks at a cluster now and then, and reports alarms."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import ConfigError
from mqmesh.private_files import open_private
from mqmesh.roles.exporter.alarm_board import Alarm, AlarmBoard, AlarmState
from mqmesh.roles.exporter.alarm_notes import notify
from mqmesh.roles.exporter.collector import Collector
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.monitor_config import MonitorConfig
from mqmesh.roles.exporter.run_files import processes_beside
from mqmesh.roles.supervisor.run_file import RoleEntry

AT_ONCE: Final = 8
"""Number of processes that are queried at the same time."""
MOST_STATE_BYTES: Final = 256 * 1024 * 1024

_log = logging.getLogger(__name__)


class Monitor:
    """One monitor; used by one thread at a time.

    Args:
        config: Settings.
        clock: Source of time.
        collector: Asks the cluster; of the settings by default.

    Raises:
        ConfigError: The state file is none, or the file of credentials cannot be used.
    """

    def __init__(
        self, config: MonitorConfig, clock: Clock, collector: Collector | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._path = Path(config.state_file) if config.state_file else None
        self._board = AlarmBoard(config.rule, config.notify.repeat_s, _read_state(self._path))
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask")
        exporter_config = ExporterConfig(
            namesrv_addr=config.namesrv_addr,
            other_addr=config.other_addr,
            credentials=config.credentials,
            server_keys=config.server_keys,
            timeout_ms=config.timeout_ms,
            max_groups=config.max_groups,
            rocketmq4_names=False,
        )

        def others() -> list[RoleEntry]:
            return processes_beside(config.data_dir)

        known = self._board.state.brokers
        self._collector = collector or Collector(
            exporter_config, clock, others, self._pool.map, known=known
        )

    def look(self, *, at_once: bool = False) -> list[Alarm]:
        """Looks once, and reports what has changed.

        Args:
            at_once: Do not wait until something was so for long enough.

        Returns:
            Alarms that are on.
        """
        families = self._collector.collect()
        now_ms = self._clock.wall_ms()
        notify(self._config.notify, self._board.judge(families, now_ms, at_once=at_once), now_ms)
        self._save()
        return self._board.firing()

    def close(self) -> None:
        """Closes all connections; idempotent."""
        self._pool.shutdown()
        self._collector.close()

    def _save(self) -> None:
        if self._path is not None:
            try:
                new = self._path.with_name(self._path.name + ".new")
                with open(new, "wb", opener=open_private) as file:
                    file.write(msgspec.json.encode(self._board.state))
                new.replace(self._path)
            except OSError as error:
                _log.error("state_file %s: %s", self._path, error.strerror or error)


class MonitorRole:
    """A monitor as a process of its own.

    Args:
        monitor: Looks.
        config: Settings of the monitor.
    """

    def __init__(self, monitor: Monitor, config: MonitorConfig) -> None:
        self._monitor = monitor
        self._interval_s = config.interval_s
        self._watched = ",".join(config.namesrv_addr)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> str:
        """Begins to look.

        Returns:
            Addresses of the watched name servers, with commas; the monitor has no endpoint.
        """
        self._thread.start()
        return self._watched

    def stop(self) -> None:
        """Ends, once the look that is under way has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._monitor.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._monitor.look()
            except Exception:
                _log.exception("a look failed; the next one is in %d s", self._interval_s)
            self._stopping.wait(self._interval_s)


def _read_state(path: Path | None) -> AlarmState:
    try:
        if path is None or not path.exists():
            return AlarmState()
        if path.stat().st_size > MOST_STATE_BYTES:
            raise ConfigError(f"state_file {path} has more than {MOST_STATE_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=AlarmState)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"state_file {path} is none of a monitor: {error}") from error
    except OSError as error:
        raise ConfigError(f"state_file {path}: {error.strerror or error}") from error

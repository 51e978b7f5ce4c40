"""A real cluster in threads of this process, started in milliseconds."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mqmesh.config import load_config
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.namesrv.server import NameServer
from mqmesh.roles.process import Role
from mqmesh.roles.schedule.config import ScheduleConfig
from mqmesh.roles.schedule.server import ScheduleServer
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.transport.zmq.transport import ZmqTransport
from mqmesh.units import MIB

START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 10.0
ASK_AGAIN_S: Final = 0.002
BROKER: Final = "broker-a"

MakeRole = Callable[[ZmqTransport], Role]

_log = logging.getLogger(__name__)


class RoleThread:
    """A role with an event loop and a thread of its own; it serves once this returns.

    Args:
        name: Name of the thread.
        make: Makes the role.

    Attributes:
        endpoint: Address where it listens, ``host:port``.

    Raises:
        RuntimeError: The role did not start; the cause says why.
    """

    def __init__(self, name: str, make: MakeRole) -> None:
        self.endpoint = ""
        self._make = make
        self._transport = ZmqTransport()
        self._loop = self._transport.loop
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"mqmesh-{name}", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S) or self._failure is not None:
            raise RuntimeError(f"{name} did not start") from self._failure

    def stop(self) -> None:
        """Stops the role as SIGTERM would, and waits; further calls do nothing."""
        if self._thread.is_alive():
            self._loop.stop()
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                _log.error("%s did not stop within %s s", self._thread.name, STOP_TIMEOUT_S)

    def _run(self) -> None:
        role = self._make(self._transport)
        try:
            self.endpoint = role.start().removeprefix("tcp://")
            self._ready.set()
            self._loop.run()
        except BaseException as error:
            _log.exception("%s failed", self._thread.name)
            self._failure = error
        finally:
            try:
                role.stop()
            finally:
                self._loop.close()
                self._transport.close(linger_ms=0)
                self._ready.set()


class ThreadCluster:
    """A name server, a broker and its schedule service in this process, on free ports.

    The roles are those that ``mqmesh up`` runs, with sockets and files; only the processes are
    missing, and with them kill -9, and the index of keys and ids.

    Args:
        folder: Folder of the store; a short path, since it also holds a Unix socket.
        broker_settings: Settings of the broker, as after ``--set``.

    Attributes:
        namesrv_addr: Addresses of the name servers, for clients.
    """

    def __init__(self, folder: Path, broker_settings: Mapping[str, str] | None = None) -> None:
        self._namesrv = RoleThread("namesrv", _make_namesrv)
        self.namesrv_addr = self._namesrv.endpoint
        self._settings = {
            "broker_name": BROKER,
            "namesrv_addr": f'["{self.namesrv_addr}"]',
            "store_path_root_dir": str(folder / BROKER),
            "index.enable": "false",
            **small_broker_settings(),
            **(broker_settings or {}),
        }
        self._port = "0"
        self._broker: RoleThread | None = None
        self._schedule: RoleThread | None = None
        try:
            self.start_broker()
            self._schedule = start_schedule(folder, self.namesrv_addr)
        except BaseException:
            self.close()
            raise

    def start_broker(self) -> None:
        """Starts the broker, again with its old address and data; nothing if it serves.

        Raises:
            RuntimeError: The broker did not start, or the name server does not know it in time.
        """
        if self._broker is None:
            self._broker = RoleThread("broker", self._make_broker)
            self._port = self._broker.endpoint.rpartition(":")[2]
            self._wait_known()

    def stop_broker(self) -> None:
        """Stops the broker as SIGTERM would."""
        if self._broker is not None:
            self._broker.stop()
            self._broker = None

    def close(self) -> None:
        """Stops everything."""
        if self._schedule is not None:
            self._schedule.stop()
        self.stop_broker()
        self._namesrv.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait_known(self) -> None:
        # A broker serves before the name server knows it, and until then no client finds it.
        deadline = time.monotonic() + START_TIMEOUT_S
        with AdminClient(self.namesrv_addr) as admin:
            while all(one.broker_name != BROKER for one in admin.cluster().brokers):
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"{self.namesrv_addr} hears nothing of {BROKER}")
                time.sleep(ASK_AGAIN_S)

    def _make_broker(self, transport: ZmqTransport) -> Role:
        settings = {"listen_port": self._port, **self._settings}
        overrides = [f"{key}={value}" for key, value in settings.items()]
        config = load_config(BrokerConfig, None, None, overrides)
        return BrokerServer(config, transport)


def start_schedule(folder: Path, namesrv_addr: str) -> RoleThread:
    """Starts the schedule service of the broker, without which no failed message comes again.

    Args:
        folder: Folder of its timetable; a short path.
        namesrv_addr: Name servers, separated by semicolons.
    """
    config = ScheduleConfig(
        broker_name=BROKER,
        namesrv_addr=namesrv_addr.split(";"),
        store_path_root_dir=str(folder / f"schedule-{BROKER}"),
        retry_ms=50,
    )
    return RoleThread("schedule", lambda transport: ScheduleServer(config, transport))


def small_broker_settings() -> dict[str, str]:
    """Returns settings of a broker for tests: little disk, without regard to its free space."""
    return {
        "storage.mapped_file_size_commit_log": str(32 * MIB),
        "storage.disk_max_used_space_ratio": "100",
        "storage.disk_space_clean_forcibly_ratio": "100",
        "storage.disk_space_warning_level_ratio": "100",
    }


def _make_namesrv(transport: ZmqTransport) -> Role:
    return NameServer(NamesrvConfig(listen_port=0), transport)

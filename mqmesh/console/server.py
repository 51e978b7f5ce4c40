"""The console's process: uvicorn in the main thread, a sampler for each cluster beside it."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import uvicorn

from mqmesh.certificates import tls_context
from mqmesh.clock import Clock
from mqmesh.config import load_config
from mqmesh.console.app import Console
from mqmesh.console.clients import Clients
from mqmesh.console.config import ConsoleConfig
from mqmesh.console.sampler import ClusterSampler
from mqmesh.console.tails import Tails
from mqmesh.console.users import WatchedUsers
from mqmesh.console.watched_cluster import WatchedCluster
from mqmesh.errors import ConfigError
from mqmesh.hosts import bindable
from mqmesh.protocol.admin import RoleInfo
from mqmesh.roles.exporter.monitor_config import MonitorConfig
from mqmesh.version import VERSION

BACKLOG: Final = 128
MAX_REQUESTS: Final = 256
"""Requests at a time; further ones are refused with 503."""
STOP_S: Final = 2
"""Time that requests have to end when the console stops."""
CLEAN_S: Final = 60
"""From one look for idle clients to the next."""
SILENT_MS: Final = 40_000
"""A look that is older says nothing about name servers; it is two idle pauses and a time-out."""


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``mqmesh.roles.process``."""
        yield


class ConsoleLoop:
    """Loop of the console's process: asyncio's, with the methods ``mqmesh.roles.process`` needs.

    Attributes:
        inner: Loop of asyncio.
        serve: Coroutine function that ``run`` runs; it ends soon after ``on_stop``.
        on_stop: Called in the loop when the process is to end.
    """

    def __init__(self) -> None:
        self.inner = asyncio.new_event_loop()
        self.serve: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.on_stop: Callable[[], None] = self.inner.stop

    def run(self) -> None:
        """Implement ``ProcessLoop.run``."""
        assert self.serve is not None
        self.inner.run_until_complete(self.serve())

    def stop(self) -> None:
        """Implement ``ProcessLoop.stop``."""
        self.inner.call_soon_threadsafe(self.on_stop)

    def add(self, source: int, handler: Callable[[], None]) -> None:
        """Implement ``HealthLoop.add``."""
        self.inner.add_reader(source, handler)

    def remove(self, source: int) -> None:
        """Implement ``HealthLoop.remove``."""
        self.inner.remove_reader(source)

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> object:
        """Implement ``HealthLoop.call_later``."""
        return self.inner.call_later(delay_ms / 1_000, callback)

    def close(self) -> None:
        """Closes it, when nothing runs in it any more."""
        self.inner.close()


class ConsoleServer:
    """The console as a role.

    Args:
        config: Settings.
        clock: Source of time.
        loop: Loop of the process.

    Raises:
        ConfigError: Users, credentials, the monitor's settings or files of TLS cannot be used.
    """

    def __init__(self, config: ConsoleConfig, clock: Clock, loop: ConsoleLoop) -> None:
        self._config = config
        self._clock = clock
        self._started_ms = clock.monotonic_ms()
        users = WatchedUsers(Path(config.users_file), clock) if config.users_file else None
        tls = (
            tls_context(config.tls_cert_file, config.tls_key_file) if config.tls_cert_file else None
        )
        rules = []
        if config.monitor_file:
            rules = load_config(MonitorConfig, Path(config.monitor_file)).rule
        self._clusters: dict[str, WatchedCluster] = {}
        self._clients: list[Clients] = []
        for source in config.sources():
            clients = Clients(source.namesrv_addr, clock)
            self._clients.append(clients)
            sampler = ClusterSampler(source, rules, config.refresh_ms, clock)
            tails = Tails(source.namesrv_addr, clock, shows_bodies=config.allow_body_view)
            self._clusters[source.name] = WatchedCluster(source, sampler, clients, tails, clock)
        console = Console(
            config,
            clock,
            users,
            self._clusters,
            is_secure=tls is not None,
            health=self._health,
        )
        settings = uvicorn.Config(
            console.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_REQUESTS,
            timeout_graceful_shutdown=STOP_S,
        )
        settings.load()
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        settings.ssl = tls
        self._uvicorn = _Uvicorn(settings)
        loop.serve, loop.on_stop = self._serve, self._end
        self._loop = loop
        self._socket: socket.socket | None = None

    def start(self) -> str:
        """Listens, and begins to look at the clusters.

        Returns:
            Where the first page is.

        Raises:
            ConfigError: It cannot listen there: the port is taken, or the address is of another
                machine.
        """
        host, port = bindable(self._config.listen_host).strip("[]"), self._config.listen_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            setting = (
                "listen_port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "listen_host"
            )
            raise ConfigError(
                f"cannot listen at {bindable(host)}:{port}: {error.strerror or error}; "
                f"set {setting} to another"
            ) from error
        for cluster in self._clusters.values():
            cluster.sampler.start()
        return self._config.address(self._socket.getsockname()[1])

    def stop(self) -> None:
        """Closes everything, also after a ``start`` that failed."""
        for cluster in self._clusters.values():
            cluster.sampler.stop()
        for cluster in self._clusters.values():
            self._loop.inner.run_until_complete(cluster.tails.close())
        for clients in self._clients:
            self._loop.inner.run_until_complete(clients.close_idle(0))
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _serve(self) -> None:
        assert self._socket is not None
        cleaning = asyncio.ensure_future(self._clean())
        try:
            await self._uvicorn.serve([self._socket])
        finally:
            cleaning.cancel()

    def _end(self) -> None:
        self._uvicorn.should_exit = True

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(CLEAN_S)
            for clients in self._clients:
                await clients.close_idle()

    def _health(self) -> tuple[bool, bytes]:
        """Return whether name servers answered lately, and the information about this process."""
        view = self._clusters[""].sampler.view
        answers = not view.problem and self._clock.wall_ms() - view.at_ms < SILENT_MS
        uptime_ms = self._clock.monotonic_ms() - self._started_ms
        info = RoleInfo("console", self._config.name, VERSION, os.getpid(), "running", uptime_ms)
        fields = msgspec.structs.asdict(info) | {"namesrv_answers": answers}
        return answers, msgspec.json.encode(fields)

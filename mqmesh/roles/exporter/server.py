"""The exporter's process: a page for Prometheus by HTTP, made at each request."""

import errno
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import msgspec

from mqmesh.certificates import tls_context
from mqmesh.clock import Clock
from mqmesh.errors import ConfigError, MQMeshError
from mqmesh.hosts import bindable
from mqmesh.protocol.admin import RoleInfo
from mqmesh.roles.exporter.collector import Collector
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.page import CONTENT_TYPE, Page
from mqmesh.roles.exporter.run_files import processes_beside
from mqmesh.roles.supervisor.run_file import RoleEntry
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.options import WHOLE_CLUSTER, client_transport
from mqmesh.version import VERSION

AT_ONCE: Final = 8
"""Number of processes that are queried at the same time."""
MOST_CONNECTIONS: Final = 16
"""Most connections at a time; more are closed at once."""
CONNECTION_S: Final = 10
"""Time after which a silent connection is closed."""
LATELY_MS: Final = 5_000
"""A name server that answered so long ago counts as one that answers."""
HEALTH_WAIT_MS: Final = 500
"""Time that a question for health waits for name servers: `mqmesh status` waits for a second."""

_log = logging.getLogger(__name__)


class ExporterServer:
    """One exporter.

    Args:
        config: Settings.
        clock: Source of time.
        collector: Asks the cluster; of the settings by default.
        ask_names: Raises MQMeshError if no name server answers; of the settings by default.

    Raises:
        ConfigError: The file of credentials, or one of TLS, cannot be used.
    """

    def __init__(
        self,
        config: ExporterConfig,
        clock: Clock,
        collector: Collector | None = None,
        ask_names: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._tls = (
            tls_context(config.tls_cert_file, config.tls_key_file) if config.tls_cert_file else None
        )
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask")

        def others() -> list[RoleEntry]:
            return processes_beside(config.data_dir)

        self._collector = collector or Collector(config, clock, others, self._pool.map)
        self._page = Page(self._collector, clock, config.min_interval_ms)
        self._admin: AdminClient | None = None
        wait_ms = min(config.timeout_ms, HEALTH_WAIT_MS)
        self._names = NamesrvHealth(ask_names or self._ask_names, clock, wait_ms)
        self._started_ms = clock.monotonic_ms()
        self._http: _HttpServer | None = None

    def start(self) -> str:
        """Listens; the first request shows whether there is a cluster.

        Returns:
            Where the page is.

        Raises:
            ConfigError: It cannot listen there: the port is taken, or the address is of another
                machine.
        """
        host, port = bindable(self._config.listen_host).strip("[]"), self._config.listen_port
        answering = partial(_Answering, self._page, self._health)
        try:
            http = self._http = _HttpServer((host, port), answering, self._tls)
        except OSError as error:
            setting = "listen_port" if error.errno == errno.EADDRINUSE else "listen_host"
            if error.errno == errno.EACCES:
                setting = "listen_port"  # below 1,024
            raise ConfigError(
                f"cannot listen at {bindable(host)}:{port}: {error.strerror or error}; "
                f"set {setting} to another"
            ) from error
        threading.Thread(target=http.serve_forever, name="http", daemon=True).start()
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{bindable(self._config.listen_host)}:{http.server_address[1]}/metrics"

    def stop(self) -> None:
        """Closes everything; also what a failed ``start`` left open."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
        self._pool.shutdown()
        self._names.close()
        self._collector.close()
        if self._admin is not None:
            self._admin.close()

    def _ask_names(self) -> None:
        if self._admin is None:
            config = self._config
            self._admin = AdminClient(
                config.namesrv_addr,
                timeout_ms=config.timeout_ms,
                transport=client_transport(None, config.credentials),
                namespace=WHOLE_CLUSTER,
            )
        self._admin.cluster()

    def _health(self) -> tuple[HTTPStatus, bytes]:
        """Return 503 without a name server: there are no metrics then, but the process itself
        runs."""
        answers = self._names.answers()
        uptime_ms = self._clock.monotonic_ms() - self._started_ms
        info = RoleInfo("exporter", self._config.name, VERSION, os.getpid(), "running", uptime_ms)
        fields = msgspec.structs.asdict(info) | {"namesrv_answers": answers}
        status = HTTPStatus.OK if answers else HTTPStatus.SERVICE_UNAVAILABLE
        return status, msgspec.json.encode(fields)


class NamesrvHealth:
    """Health check of the name servers: one must answer; threads may ask at the same time.

    Args:
        ask: Asks them; raises MQMeshError if none answers. Called by one thread at a time.
        clock: Source of time.
        wait_ms: Longest wait of a caller for an answer; the query itself goes on.
    """

    def __init__(self, ask: Callable[[], None], clock: Clock, wait_ms: int) -> None:
        self._ask = ask
        self._clock = clock
        self._wait_s = wait_ms / 1_000
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="health")
        self._asking: Future[None] | None = None
        self._answered_ms: int | None = None

    def close(self) -> None:
        """Ends, once the question that is under way has ended."""
        self._pool.shutdown()

    def answers(self) -> bool:
        """True if one has answered within ``LATELY_MS``, or does so now."""
        if self._is_fresh():
            return True
        with self._lock:
            if self._asking is None or self._asking.done():
                self._asking = self._pool.submit(self._look)
            asking = self._asking
        wait([asking], self._wait_s)
        if asking.done():
            asking.result()  # a bug in there is one here
        return self._is_fresh()

    def _is_fresh(self) -> bool:
        answered_ms = self._answered_ms
        return answered_ms is not None and self._clock.monotonic_ms() - answered_ms <= LATELY_MS

    def _look(self) -> None:
        try:
            self._ask()
        except MQMeshError as error:
            _log.debug("no name server answers: %s", error)
        else:
            self._answered_ms = self._clock.monotonic_ms()


class _HttpServer(ThreadingHTTPServer):
    """HTTP server that answers each connection in a thread, ``MOST_CONNECTIONS`` at most."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: Any, tls: ssl.SSLContext | None) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._tls = tls
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Implement ``ThreadingMixIn``; a connection beyond the limit is closed."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Implement ``ThreadingMixIn``; the handshake is made here, where it delays no request."""
        try:
            if self._tls is not None:
                request.settimeout(CONNECTION_S)
                request = self._tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError as error:
            # The socket is closed already. A client without TLS, or not ours, is normal.
            _log.debug("no TLS with %s: %s", client_address, error)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error: a peer that is gone is none of our business; all else is a bug."""
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError | TimeoutError | ssl.SSLError):
            _log.debug("%s is gone: %s", client_address, error)
        else:
            _log.exception("a request from %s failed", client_address)


class _Answering(BaseHTTPRequestHandler):
    """GET and HEAD of /metrics and /healthz; nothing else."""

    timeout = CONNECTION_S
    server_version = f"mqmesh/{VERSION}"
    sys_version = ""

    def __init__(
        self, page: Page, health: Callable[[], tuple[HTTPStatus, bytes]], *arguments: Any
    ) -> None:
        self._page = page
        self._health = health
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answers a request."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(HTTPStatus.OK, CONTENT_TYPE, self._page.text())
        elif path == "/healthz":
            status, body = self._health()
            self._answer(status, "application/json", body)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        """Answers like GET, without the body."""
        self.do_GET()

    def do_POST(self) -> None:
        """Refuses: nothing can be changed here."""
        text = f"{self.command} is not possible here: GET /metrics or /healthz.\n"
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", text.encode())

    do_CONNECT = do_DELETE = do_OPTIONS = do_PATCH = do_PUT = do_TRACE = do_POST

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs at debug level: requests are routine."""
        _log.debug(format, *arguments)

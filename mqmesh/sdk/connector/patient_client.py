"""Requests to one broker, repeated while it is away: for work that would rather wait than fail."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from mqmesh.errors import MQMeshError, NoRoute, RequestTimeout, TopicNotFound
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command
from mqmesh.sdk.admin.admin import masters_of
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, NamesrvAddr
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.security.keys import Credentials
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Transport

PATIENCE_MS: Final = 60_000
RETRY_MS: Final = 50
RETRY_MAX_MS: Final = 1_000

_T = TypeVar("_T")


class PatientClient(QueryClient):
    """Client for one request at a time, in the caller's thread; it waits for a broker that is away.

    Args:
        namesrv_addr: As of ``AdminClient``.
        timeout_ms: For each try, 1 to 3,600,000 ms.
        patience_ms: For all tries of a request together, from 0, which is one try.
        transport: The world; ZeroMQ by default.
        credentials, namespace: As of ``AdminClient``.
    """

    def __init__(
        self,
        namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV,
        *,
        timeout_ms: int = 3_000,
        patience_ms: int = PATIENCE_MS,
        transport: Transport | None = None,
        credentials: str | Credentials = "",
        namespace: str | None = None,
    ) -> None:
        super().__init__(
            namesrv_addr,
            timeout_ms=timeout_ms,
            transport=transport,
            credentials=credentials,
            namespace=namespace,
        )
        self.patience_ms = patience_ms
        self._endpoints: dict[str, str] = {}

    def ask(
        self, broker_name: str, code: int, header: bytes, parts: Sequence[bytes | memoryview] = ()
    ) -> Command:
        """Return the answer of a broker group's master; the request must be safe to repeat.

        Raises:
            RequestTimeout: It was away for longer than ``patience_ms``.
            BrokerError: It refused.
        """

        work = partial(self.ask_once, broker_name, code, header, parts)
        return self.patiently(work, f"broker {broker_name}")

    def ask_once(
        self,
        broker_name: str,
        code: int,
        header: bytes,
        parts: Sequence[bytes | memoryview] = (),
        timeout_ms: int | None = None,
    ) -> Command:
        """Return the answer of a broker group's master to one try."""
        try:
            return self._request(self._endpoint(broker_name), code, header, timeout_ms, parts)
        except MQMeshError:
            self._endpoints.pop(broker_name, None)  # it may come back elsewhere
            raise

    def patiently(self, work: Callable[[], _T], what: str) -> _T:
        """Does something again while it fails in a way that may pass.

        Args:
            work: Does it once.
            what: For the error.

        Raises:
            RequestTimeout: It failed for longer than ``patience_ms``.
            MQMeshError: It failed in a way that does not pass, or there was one try.
        """
        clock = self._transport.clock
        give_up_ms = clock.monotonic_ms() + self.patience_ms
        delay_ms = RETRY_MS
        while True:
            try:
                return work()
            except MQMeshError as error:
                left_ms = give_up_ms - clock.monotonic_ms()
                if not error.retriable or not self.patience_ms:
                    raise
                if left_ms <= 0:
                    raise RequestTimeout(
                        f"{what} could not be used for {self.patience_ms} ms: {error}"
                    ) from error
                wanted_ms = max(delay_ms, getattr(error, "retry_after_ms", 0))
                self._transport.pause(min(wanted_ms, left_ms) / 1_000)
                delay_ms = min(delay_ms * 2, RETRY_MAX_MS)

    def readable_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return queues of a topic that may be read, sorted.

        Raises:
            TopicNotFound: The topic does not exist.
            RequestTimeout: No name server answered in time.
        """
        return self._routes(topic).subscribe_queues(topic)

    def writable_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the topic's queues for writing, sorted; errors as of ``readable_queues``."""
        return self._routes(topic).publish_queues(topic)

    def wait_writable_queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return queues as ``writable_queues``; wait for a topic that is not known, too.

        Name servers forget a topic while all of its brokers are away.

        Raises:
            RequestTimeout: The topic is unknown for longer than ``patience_ms``.
        """

        def look() -> tuple[MessageQueue, ...]:
            try:
                return self.writable_queues(topic)
            except TopicNotFound as error:
                raise NoRoute(str(error)) from error

        return self.patiently(look, f"topic {topic!r}")

    def _routes(self, topic: str) -> RouteCache:
        cache = RouteCache()
        cache.update(self.patiently(partial(self.route, topic), "the name server"))
        return cache

    def _endpoint(self, broker_name: str) -> str:
        found = self._endpoints.get(broker_name)
        if found is None:
            for name, address in masters_of(self.cluster().brokers).items():
                self._endpoints[name] = endpoint_of(address.tcp)
            found = self._endpoints.get(broker_name)
        if found is None:
            raise NoRoute(f"no master is known of broker group {broker_name!r}")
        return found

"""The way of pulls through filter servers: finds them, uploads the filter, and pulls.

A pull loop uses it as its network. Every error comes back as the outcome of the pull,
which the loop repeats; so a filter server may come, go and move at any time.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from mqmesh.errors import (
    BrokerError,
    ClientClosed,
    EndpointUnreachable,
    FilterFailed,
    FilterUnknown,
    MQMeshError,
    NoPermission,
    TransportError,
)
from mqmesh.filtering.python_filter import PythonFilter
from mqmesh.host import host_id
from mqmesh.message import MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.filters import (
    FilterServerInfo,
    GetFilterServerRequest,
    UploadFilterRequest,
)
from mqmesh.protocol.route import BrokerAddress
from mqmesh.sdk.client.broker_connections import choose_endpoint
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.fetching.pull_loop import PullNetwork
from mqmesh.transport.endpoints import learn_keys
from mqmesh.transport.interface import Connection, Flag, OnDone

FIND_TIMEOUT_MS: Final = 3_000
CONNECT_MS: Final = 1_000
"""Longest time to connect; a server that takes longer has gone, the broker knows its successor."""
UPLOAD_TIMEOUT_MS: Final = 15_000
"""A filter server starts a process and loads the filter before it answers."""

OnReady = Callable[[MQMeshError | None], None]
Connect = Callable[[BrokerAddress, Callable[[bool], None]], Connection]

_log = logging.getLogger(__name__)


class _Way:
    """The network of one queue's pulls."""

    def __init__(self, link: "FilterLink", queue: MessageQueue) -> None:
        self._link = link
        self._queue = queue

    def request(
        self, broker_name: str, code: int, on_done: OnDone, *, header: bytes, timeout_ms: int
    ) -> None:
        self._link.request(self._queue, code, on_done, header=header, timeout_ms=timeout_ms)

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> None:
        self._link.network.call_later(delay_ms, callback)


class FilterLink:
    """Link of one filter of one subscription to the filter servers of all its brokers.

    For the client loop, but for ``decided`` and ``errors``, which any thread may read.

    Args:
        group: Consumer group.
        wanted: The filter.
        network: The client's engine, for requests to brokers.
        connect: Connects to a filter server; called with the address and the listener for breaks.
        decided: Set once it is known whether the filter works.

    Attributes:
        decided: As above.
        errors: Why it does not at present, by queue.
        network: As above.
    """

    def __init__(
        self,
        group: str,
        wanted: PythonFilter,
        network: PullNetwork,
        connect: Connect,
        decided: Flag,
    ) -> None:
        self.decided = decided
        self.errors: dict[MessageQueue, BrokerError] = {}
        self.network = network
        self._group = group
        self._wanted = wanted
        self._connect = connect
        self._clients: dict[str, Connection] = {}
        self._waiting: dict[str, list[OnReady]] = {}
        self._logged: type[BrokerError] | None = None
        self._closed = False

    def way(self, queue: MessageQueue) -> _Way:
        """Return the network for the pulls of a queue."""
        return _Way(self, queue)

    def request(
        self, queue: MessageQueue, code: int, on_done: OnDone, *, header: bytes, timeout_ms: int
    ) -> None:
        """Asks the filter server of a queue's broker; the outcome goes to ``on_done``."""
        broker_name = queue.broker_name

        def answered(client: Connection, outcome: Command | MQMeshError) -> None:
            if isinstance(outcome, FilterUnknown | TransportError):
                # It was restarted, moved, or forgot us; the pull is made again.
                self._forget(broker_name, client)
            self._note(queue, outcome if isinstance(outcome, MQMeshError) else None)
            on_done(outcome)

        def ready(error: MQMeshError | None) -> None:
            client = self._clients.get(broker_name)
            if error is None and client is None:
                error = EndpointUnreachable(f"the filter server of {broker_name} is gone again")
            if error is None and client is not None:
                try:
                    client.request(
                        code, partial(answered, client), header=header, timeout_ms=timeout_ms
                    )
                    return
                except MQMeshError as failure:
                    error = failure
            assert error is not None
            self._note(queue, error)
            on_done(error)

        self._reach(broker_name, ready)

    def close(self) -> None:
        """Closes all connections; pulls under way end with an error."""
        self._closed = True
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    # ---- Getting there -----------------------------------------------------------------

    def _reach(self, broker_name: str, on_ready: OnReady) -> None:
        if self._closed:
            closed = ClientClosed("the subscription was given up")
            self.network.call_later(0, lambda: on_ready(closed))
            return
        if broker_name in self._clients and broker_name not in self._waiting:
            on_ready(None)
            return
        waiting = self._waiting.setdefault(broker_name, [])
        waiting.append(on_ready)
        if len(waiting) > 1:
            return
        self.network.request(
            broker_name,
            RequestCode.GET_FILTER_SERVER,
            partial(self._found, broker_name),
            header=encode_header(GetFilterServerRequest(self._group)),
            timeout_ms=FIND_TIMEOUT_MS,
        )

    def _found(self, broker_name: str, outcome: Command | MQMeshError) -> None:
        try:
            if isinstance(outcome, MQMeshError):
                raise outcome
            if self._closed:
                raise ClientClosed("the subscription was given up")
            info = decode_header(FilterServerInfo, outcome.header)
            client = self._connect(info.address, partial(self._connection, broker_name))
            old = self._clients.pop(broker_name, None)
            self._clients[broker_name] = client
            if old is not None:
                old.close()
            client.request(
                RequestCode.REGISTER_MESSAGE_FILTER_CLASS,
                partial(self._uploaded, broker_name, client),
                self._wanted.source.encode(),
                header=encode_header(UploadFilterRequest(self._group, self._wanted.filter_id)),
                timeout_ms=UPLOAD_TIMEOUT_MS,
            )
        except MQMeshError as error:
            self._report(broker_name, error)
        else:
            self.network.call_later(CONNECT_MS, partial(self._check, broker_name, client))

    def _check(self, broker_name: str, client: Connection) -> None:
        if not client.connected:
            self._forget(broker_name, client)

    def _uploaded(
        self, broker_name: str, client: Connection, outcome: Command | MQMeshError
    ) -> None:
        if isinstance(outcome, MQMeshError):
            self._forget(broker_name, client)
            self._report(broker_name, outcome)
        else:
            self.decided.set()
            self._report(broker_name, None)

    def _report(self, broker_name: str, error: MQMeshError | None) -> None:
        for on_ready in self._waiting.pop(broker_name, []):
            on_ready(error)

    def _connection(self, broker_name: str, up: bool) -> None:
        client = self._clients.get(broker_name)
        if not up and client is not None:
            self._forget(broker_name, client)

    def _forget(self, broker_name: str, client: Connection) -> None:
        if self._clients.get(broker_name) is client:
            del self._clients[broker_name]
        client.close()

    def _note(self, queue: MessageQueue, error: MQMeshError | None) -> None:
        if error is None:
            self.errors.pop(queue, None)
            if not self.errors:
                self._logged = None
        elif isinstance(error, FilterFailed | NoPermission):
            self.errors[queue] = error
            if self._logged is not type(error):
                self._logged = type(error)
                name = f"{queue.topic}:{queue.broker_name}:{queue.queue_id}"
                _log.error("group %s: %s waits for its filter: %s", self._group, name, error)
        else:
            return  # an error that passes by itself need not be reported to the user
        self.decided.set()


class FilterLinks:
    """The filters of one consumer, by topic; those that are in Python.

    For the client loop, but for ``errors`` and ``check``.

    Args:
        group: Consumer group.
        client: Its engine.
    """

    def __init__(self, group: str, client: ClientEngine) -> None:
        self._group = group
        self._client = client
        self._links: dict[str, FilterLink] = {}

    def choose(self, topic: str, wanted: PythonFilter | None) -> None:
        """Choose another filter for a topic, or None in Python."""
        old = self._links.pop(topic, None)
        if old is not None:
            old.close()
        if wanted is not None:
            self._links[topic] = FilterLink(
                self._group,
                wanted,
                self._client,
                self._connect,
                self._client.transport.flag(),
            )

    def way(self, queue: MessageQueue) -> PullNetwork:
        """Return the network for the pulls of a queue."""
        link = self._links.get(queue.topic)
        return self._client if link is None else link.way(queue)

    def uses(self, queue: MessageQueue) -> bool:
        """Return whether a queue is pulled from filter servers."""
        return queue.topic in self._links

    def errors(self, assigned: Iterable[MessageQueue]) -> dict[str, MQMeshError]:
        """Return why filters do not work at present, by topic; from any thread.

        Args:
            assigned: The queues that the consumer has.
        """
        found: dict[str, MQMeshError] = {}
        for queue in assigned:
            link = self._links.get(queue.topic)
            error = None if link is None else link.errors.get(queue)
            if error is not None:
                found.setdefault(queue.topic, error)
        return found

    def check(self, assigned: Iterable[MessageQueue], timeout_s: float) -> None:
        """Waits until it is known whether filters work; from other threads.

        Args:
            assigned: The queues that the consumer has.
            timeout_s: Longest wait.

        Raises:
            NoPermission: Filters in Python are not allowed.
            FilterFailed: A filter cannot be loaded.
        """
        queues = list(assigned)
        clock = self._client.loop.clock
        deadline_ms = clock.monotonic_ms() + int(timeout_s * 1_000)
        for topic in {queue.topic for queue in queues}:
            link = self._links.get(topic)
            if link is not None:
                link.decided.wait(max(deadline_ms - clock.monotonic_ms(), 0) / 1_000)
        for error in self.errors(queues).values():
            if isinstance(error, NoPermission) or not getattr(error, "retry_after_ms", 0):
                raise error

    def close(self) -> None:
        """Closes all connections."""
        for topic in list(self._links):
            self.choose(topic, None)

    def _connect(self, address: BrokerAddress, on_connection: Callable[[bool], None]) -> Connection:
        client = self._client
        learn_keys(client.transport.ring, [address])
        own_host = host_id() if client.options.use_ipc else None
        endpoint = choose_endpoint(address, own_host)
        try:
            return client.transport.connect(endpoint, on_connection=on_connection)
        except Exception as error:
            raise EndpointUnreachable(f"cannot connect to {endpoint}: {error}") from error

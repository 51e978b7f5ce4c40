"""Requests to the masters of broker groups, which follow a master that moved."""

import logging
from collections.abc import Callable
from typing import Final

from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError, NotMaster
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.sdk.client.broker_connections import BrokerConnections
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.transport.interface import Loop, OnDone

NO_MASTER_MS: Final = 200
"""While a group has no master requests are repeated so often."""

_log = logging.getLogger(__name__)


class MasterRequests:
    """Requests of one client to masters; in the client loop.

    Args:
        loop: The client loop.
        routes: Masters that are known.
        brokers: The connections to them.
        closed: Returns True when no request is sent any more.
    """

    def __init__(
        self,
        loop: Loop,
        routes: RouteCache,
        brokers: BrokerConnections,
        closed: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._routes = routes
        self._brokers = brokers
        self._closed = closed

    def request(
        self,
        broker_name: str,
        code: int,
        on_done: OnDone,
        *parts: bytes | memoryview,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Sends a request to a broker group's master.

        A replica that is not the master refuses it. The request is then repeated: at once if the
        refusal names a newer master, else after a pause, until there is one or the time is over.
        Sends and commits are not repeated, because their sender must know that they may be stored.
        Every outcome, bad or good, goes to ``on_done``, never before this returns. When the client
        is closed, there may be none.
        """
        clock, epoch = self._loop.clock, self._routes.epoch(broker_name)
        until_ms = clock.monotonic_ms() + timeout_ms
        follows = code not in (RequestCode.SEND_MESSAGE, RequestCode.COMMIT_PROCESSED)

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, ClientClosed) and not self._closed():
                answer = self._moved(broker_name)
            if not (isinstance(answer, NotMaster) and follows and not self._closed()):
                on_done(answer)
                return
            self._routes.follow(answer, broker_name)
            delay_ms = 0 if self._routes.epoch(broker_name) > epoch else NO_MASTER_MS
            left_ms = until_ms - clock.monotonic_ms() - delay_ms
            if left_ms <= 0:
                on_done(answer)
                return
            self._loop.call_later(
                delay_ms,
                lambda: self.request(
                    broker_name, code, on_done, *parts, header=header, timeout_ms=left_ms
                ),
            )

        failure: MQMeshError
        try:
            client = self._brokers.connection(broker_name)
            client.request(code, done, *parts, header=header, timeout_ms=timeout_ms)
            return
        except MQMeshError as error:
            failure = error
        except Exception as error:
            # The caller counts on an outcome.
            _log.exception("a request to broker %s failed", broker_name)
            failure = EndpointUnreachable(f"a request to broker {broker_name} failed: {error}")
        self._loop.call_later(0, lambda: on_done(failure))

    def _moved(self, broker_name: str) -> MQMeshError:
        what = f"broker {broker_name} has moved; whether the request was carried out is unknown"
        # Where masters are replaced this is no failure: the new master gets the request.
        return NotMaster(what) if self._routes.epoch(broker_name) else EndpointUnreachable(what)

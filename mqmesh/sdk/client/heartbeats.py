"""Heartbeats, by which brokers know that a client lives, and their answers."""

import logging
from collections.abc import Callable
from typing import Final

from mqmesh.errors import MQMeshError, NotMaster, RemoteProtocolError
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import HeartbeatRequest, HeartbeatResponse
from mqmesh.sdk.client.backoff import Backoff
from mqmesh.sdk.client.broker_connections import BrokerConnections
from mqmesh.transport.interface import Connection, Loop

HEARTBEAT_RETRY_MS: Final = 300
FOLLOW_MOST_MS: Final = 100
"""Longest delay before a client follows a group that names one master after the other."""

_log = logging.getLogger(__name__)


class Heartbeats:
    """The heartbeats of one client; in the client loop.

    Args:
        loop: The client loop.
        brokers: Brokers that get them.
        timeout_ms: For an answer.
        make: Makes the heartbeat that brokers get.
        on_answer: Called with a broker's answer, or why it refused.
        closed: True when none is sent any more.
    """

    def __init__(
        self,
        loop: Loop,
        brokers: BrokerConnections,
        *,
        timeout_ms: int,
        make: Callable[[], HeartbeatRequest],
        on_answer: Callable[[str, HeartbeatResponse | MQMeshError], None] | None,
        closed: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._brokers = brokers
        self._timeout_ms = timeout_ms
        self._make = make
        self._on_answer = on_answer
        self._closed = closed
        self._planned = False
        self._warnings: dict[str, list[str]] = {}
        self._followed: dict[str, Backoff] = {}

    def send_all(self) -> None:
        """Sends one to every connected broker, unless the client is closed."""
        if self._closed():
            return  # the answer to a last commit may ask for one while connections are closed
        for name, connection in self._brokers.connected():
            self.send(name, connection)

    def send_all_soon(self) -> None:
        """Sends one to every connected broker in the next turn; many calls make one."""
        if not self._planned:
            self._planned = True
            self._loop.call_later(0, self._send_planned)

    def _send_planned(self) -> None:
        self._planned = False
        self.send_all()

    def send(self, broker_name: str, connection: Connection) -> None:
        """Sends one to a broker, again until it is accepted."""

        def done(answer: Command | MQMeshError) -> None:
            if self._closed():
                return
            if not isinstance(answer, MQMeshError):
                self._take(broker_name, connection, answer)
            elif isinstance(answer, NotMaster):
                follow(answer)
            elif answer.retriable:
                # Until it is accepted, a broker that just came back does not know us.
                _log.info("heartbeat to broker %s: %s", broker_name, answer)
                self._loop.call_later(HEARTBEAT_RETRY_MS, again)
            else:
                self.warn_once(broker_name, [f"the heartbeat was refused: {answer}"])
                if self._on_answer is not None:
                    self._on_answer(broker_name, answer)

        def follow(refusal: NotMaster) -> None:
            if broker_name not in self._followed:
                self._followed[broker_name] = Backoff(self._loop.clock.monotonic_ms, FOLLOW_MOST_MS)
            # Later, where two replicas send the client back and forth.
            self._loop.call_later(
                self._followed[broker_name].next_delay_ms(), lambda: follow_now(refusal)
            )

        def follow_now(refusal: NotMaster) -> None:
            if not self._closed() and not self._brokers.follow(refusal, broker_name):
                self._loop.call_later(HEARTBEAT_RETRY_MS, again)
            # Else the one that it names gets a heartbeat with its connection.

        def again() -> None:
            current = self._brokers.is_current(broker_name, connection)
            if current and connection.connected and not self._closed():
                self.send(broker_name, connection)

        connection.request(
            RequestCode.HEART_BEAT,
            done,
            header=encode_header(self._make()),
            timeout_ms=self._timeout_ms,
        )

    def warn_once(self, broker_name: str, warnings: list[str]) -> None:
        """Logs warnings of a broker.

        Args:
            broker_name: Broker.
            warnings: All that holds now. Every heartbeat to every broker brings them.
        """
        answered = {text for texts in self._warnings.values() for text in texts}
        self._warnings[broker_name] = warnings
        for text in warnings:
            if text not in answered:
                _log.warning("broker %s: %s", broker_name, text)

    def _take(self, broker_name: str, connection: Connection, answer: Command) -> None:
        try:
            answered = decode_header(HeartbeatResponse, answer.header)
        except RemoteProtocolError as error:
            _log.warning("heartbeat to broker %s: %s", broker_name, error)
            return
        self.warn_once(broker_name, answered.warnings)
        if self._on_answer is not None and self._brokers.is_current(broker_name, connection):
            self._on_answer(broker_name, answered)

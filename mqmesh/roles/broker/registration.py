"""Registrations with name servers: when, with which one, and with how much.

Pure: callers report connections, answers, changes and the time, and get the registrations
to send. A heartbeat carries the version of the topic table only. A change
carries the topics that changed since the version that the name server has; the table
itself goes to a name server that has another version.
"""

import enum
from typing import Final

import msgspec

from mqmesh.protocol.route import DataVersion, RegisterBrokerResponse

RETRY_MS: Final = 1_000
"""After a registration failed though the connection stands."""


class Registration(msgspec.Struct, frozen=True):
    """Effect: register with a name server.

    Attributes:
        server: Index of the name server.
        with_topics: Send the whole topic table along.
        since: Version that the name server has, where the table changed since: send the changes.
    """

    server: int
    with_topics: bool
    since: DataVersion | None = None


class ServerState(enum.Enum):
    """State of one name server."""

    DISCONNECTED = "DISCONNECTED"
    IDLE = "IDLE"
    REGISTERING = "REGISTERING"
    """A registration is on its way; its answer or failure will come."""


class _Server(msgspec.Struct):
    state: ServerState = ServerState.DISCONNECTED
    known_version: DataVersion | None = None
    sent_version: DataVersion | None = None
    needs_topics: bool = False
    due_ms: int = 0
    rest_until_ms: int = 0


class RegistrationPlan:
    """The registrations of one broker.

    Args:
        servers: Number of name servers.
        interval_ms: Heartbeat.
    """

    def __init__(self, servers: int, interval_ms: int) -> None:
        self._interval_ms = interval_ms
        self._servers = [_Server() for _ in range(servers)]

    @property
    def registered_count(self) -> int:
        """Name servers that are connected and know this broker's topic table."""
        return sum(
            one.state is not ServerState.DISCONNECTED and one.known_version is not None
            for one in self._servers
        )

    def on_connection(self, server: int, connected: bool, now_ms: int) -> None:
        """A connection was made, or broke. The server behind a new one may be a new one."""
        one = self._servers[server]
        one.state = ServerState.IDLE if connected else ServerState.DISCONNECTED
        one.known_version = None
        one.needs_topics = False
        one.due_ms = one.rest_until_ms = now_ms

    def on_answer(self, server: int, answer: RegisterBrokerResponse, now_ms: int) -> None:
        """A name server answered."""
        one = self._servers[server]
        if one.state is not ServerState.REGISTERING:
            return  # of a connection that broke meanwhile
        one.state = ServerState.IDLE
        one.known_version = None if answer.need_topics else one.sent_version
        if not answer.need_topics:
            one.due_ms = now_ms + self._interval_ms
        else:
            # Asked again for what it just got, it has a fault; that must not become a storm.
            one.due_ms = one.rest_until_ms = now_ms + (RETRY_MS if one.needs_topics else 0)
        one.needs_topics = answer.need_topics

    def on_failure(self, server: int, now_ms: int) -> None:
        """A registration was refused or not answered."""
        one = self._servers[server]
        if one.state is ServerState.REGISTERING:
            one.state = ServerState.IDLE
            one.due_ms = one.rest_until_ms = now_ms + RETRY_MS

    def tick(self, version: DataVersion, now_ms: int) -> list[Registration]:
        """Return the registrations to send now.

        Args:
            version: Of the topic table now.
            now_ms: Monotonic clock.
        """
        found = []
        for index, one in enumerate(self._servers):
            if one.state is not ServerState.IDLE or now_ms < one.rest_until_ms:
                continue
            since = one.known_version if one.known_version != version else None
            if since is None and now_ms < one.due_ms:
                continue
            # One at a time: what changes until its answer comes travels with the next one.
            one.state = ServerState.REGISTERING
            one.sent_version = version
            found.append(Registration(index, one.needs_topics, since))
        return found

"""Backends of the users of RocketMQ's clients: made when a user comes, stopped when it is gone."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

from mqmesh.errors import ConfigError, NoPermission
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.backend import GatewayBackend
from mqmesh.roles.gateway.grpc.authorization import find_caller
from mqmesh.roles.gateway.session import Handler, RemotingSession
from mqmesh.roles.gateway.users import GatewayUser, find_user

IDLE_MS: Final = 60_000
"""A user without a connection for so long has no connections to brokers any more."""

_log = logging.getLogger(__name__)


class UserSession(Protocol):
    """A connection that speaks for a user.

    Attributes:
        access_key: The user; "" for an anonymous one, None before the first request.
    """

    access_key: str | None


class UserBackends:
    """Backends of users.

    Args:
        users: Users by access key.
        make: Makes and starts the backend of a user; raises ``ConfigError`` where its keys cannot
            be used.
        anonymous: Backend of unsigned requests; None to refuse these.
        now_ms: Monotonic clock.

    Attributes:
        sent_before, given_before: Messages of backends that were stopped.
    """

    def __init__(
        self,
        users: Mapping[str, GatewayUser],
        make: Callable[[GatewayUser], GatewayBackend],
        anonymous: GatewayBackend | None,
        now_ms: Callable[[], int],
    ) -> None:
        self._users = users
        self._make = make
        self._anonymous = anonymous
        self._now_ms = now_ms
        self._backends: dict[str, GatewayBackend] = {}
        self._used_ms: dict[str, int] = {}
        self.sent_before = self.given_before = 0

    def all(self) -> Iterable[tuple[str, GatewayBackend]]:
        """Return the backends of users that are there, with their access keys."""
        return self._backends.items()

    def admit(self, session: RemotingSession, request: RemotingCommand) -> Mapping[int, Handler]:
        """Return the handlers that a request may have.

        Raises:
            NoPermission: As of ``backend_of``.
        """
        return self.backend_of(session, find_user(request, self._users)).handlers

    def admit_call(self, session: UserSession, headers: Mapping[str, str]) -> GatewayBackend:
        """Return the backend of a call by gRPC.

        Raises:
            NoPermission: As of ``backend_of``.
        """
        return self.backend_of(session, find_caller(headers, self._users))

    def backend_of(self, session: UserSession, user: GatewayUser | None) -> GatewayBackend:
        """Return the backend of a request.

        Args:
            session: Its connection.
            user: User that it is signed by; None if it is not.

        Raises:
            NoPermission: It is not signed, or by an unknown user, or by another user than
                the connection's first request; or the user's keys cannot be used.
        """
        access_key = "" if user is None else user.access_key
        if session.access_key is None:
            session.access_key = access_key
        elif session.access_key != access_key:
            raise NoPermission(
                f"the connection speaks for {session.access_key or 'nobody'!r}, and not for "
                f"{access_key or 'nobody'!r}"
            )
        if user is not None:
            return self._backend(user)
        if self._anonymous is None:
            raise NoPermission(
                "the request is not signed; give the client an AccessKey and a SecretKey of "
                "the gateway's users_file"
            )
        return self._anonymous

    def of(self, session: UserSession) -> GatewayBackend | None:
        """Return the backend of a connection."""
        if session.access_key:
            return self._backends.get(session.access_key)
        return self._anonymous

    def put(self, users: Mapping[str, GatewayUser]) -> set[str]:
        """Put other users in force.

        Returns:
            Access keys of users that are gone or changed; their connections are to be ended.
        """
        changed = {key for key, one in self._users.items() if users.get(key) != one}
        self._users = users
        for access_key in changed:
            self._stop(access_key)
        return changed

    def tidy(self, sessions: Iterable[UserSession]) -> None:
        """Stop the backends of users that have had no connection for long."""
        now_ms = self._now_ms()
        self._used_ms |= {one.access_key: now_ms for one in sessions if one.access_key}
        for access_key in list(self._backends):
            if now_ms - self._used_ms.setdefault(access_key, now_ms) > IDLE_MS:
                self._stop(access_key)

    def stop(self) -> None:
        """Stop the backends of all users."""
        for access_key in list(self._backends):
            self._stop(access_key)

    def _backend(self, user: GatewayUser) -> GatewayBackend:
        backend = self._backends.get(user.access_key)
        if backend is None:
            try:
                backend = self._make(user)
            except ConfigError as error:
                _log.error("user %s has no keys: %s", user.access_key, error)
                raise NoPermission(
                    f"the keys of user {user.access_key!r} cannot be used; see the gateway's log"
                ) from error
            self._backends[user.access_key] = backend
            self._used_ms[user.access_key] = self._now_ms()
        return backend

    def _stop(self, access_key: str) -> None:
        backend = self._backends.pop(access_key, None)
        self._used_ms.pop(access_key, None)
        if backend is not None:
            backend.stop()
            self.sent_before += backend.sends.messages
            self.given_before += backend.given_messages

"""Keys of CURVE, and the errors of a client's failed handshakes."""

import errno
from typing import Final

import zmq

from mqmesh.errors import AuthenticationFailed, ConfigError, TransportError
from mqmesh.security.keys import Credentials, KeyRing
from mqmesh.transport.requests import no_connection

FAILURES_OF_WRONG_KEY: Final = 3
"""Failures in a row while the server was there: a server that just ends fails one, too."""

_HUNG_UP: Final = frozenset({errno.EPIPE, errno.ECONNRESET})
"""Errors of a handshake when the server ends the connection; a server that hangs causes another
error."""
ADVICE: Final = "pass credentials (MQMESH_CREDENTIALS)"
HUNG_UP: Final = f"it ends each handshake; where security is on, {ADVICE}"
"""Reason for a client without keys that gets no connection: a server that requires CURVE may close
the connection before it has announced that."""
_MISMATCH: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


class HandshakeWatch:
    """Finds out, from the events of one connection, that it will never be made, and why.

    Args:
        endpoint: Endpoint of the server.
        ring: Keys; None if the client has none.

    Attributes:
        anew: The server may have another key; the code that connects anew resets it.
    """

    def __init__(self, endpoint: str, ring: KeyRing | None) -> None:
        self._endpoint = endpoint
        self._ring = ring
        self._failures = 0
        self._is_there = False
        self._key = "" if ring is None else ring.server_key(endpoint)
        self._tried = {self._key: None}
        self.anew = False

    def take(self, event: int, value: int) -> AuthenticationFailed | None:
        """Take an event of the connection's monitor.

        Returns:
            Reason why there will be no connection; None if there is, or may be one.
        """
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures = 0
        elif event == zmq.EVENT_CONNECTED:
            self._is_there = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
            if not self._is_there:
                self._failures = 0  # no server has listened since the last try
            self._is_there = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return self._refused()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
            problem = f"wants CURVE; {ADVICE}" if self._ring is None else "speaks no CURVE"
            return AuthenticationFailed(f"{self._endpoint} {problem}")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failures = self._failures + 1 if value in _HUNG_UP else 0
            if self._ring is None:
                return None  # it may be a server that stops: `no_connection` names the reason
            if self._failures >= FAILURES_OF_WRONG_KEY:
                keys = " or ".join(self._tried)
                return AuthenticationFailed(
                    f"{self._endpoint} does not have the server key {keys}, or speaks no CURVE"
                )
            if self._failures and self._ring.try_another(self._endpoint, self._key):
                self._key = self._ring.server_key(self._endpoint)
                self._tried[self._key] = None
                self._is_there, self.anew = False, True
        return None

    def no_connection(self) -> TransportError:
        """Returns the error for a client that waited for a connection in vain."""
        reason = HUNG_UP if self._failures and self._ring is None else ""
        return no_connection(self._endpoint, reason)

    def has_new_key(self) -> bool:
        """Return True if the key ring has meanwhile got another key of the server."""
        return self._ring is not None and self._ring.server_key(self._endpoint) not in self._tried

    def _refused(self) -> AuthenticationFailed:
        if self._ring is None:
            return AuthenticationFailed(
                f"{self._endpoint} does not accept this process; is it of the server's user?"
            )
        own = self._ring.own
        return AuthenticationFailed(
            f"{self._endpoint} does not accept the key {own.public_key}; is user {own.user!r} in "
            "its access list and enabled?"
        )


def new_key_pair() -> tuple[str, str]:
    """Make a public key and its secret half, 40 characters of Z85 each."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def check_pair(credentials: Credentials) -> Credentials:
    """Returns credentials whose keys belong together.

    Raises:
        ConfigError: The keys do not belong together.
    """
    if zmq.curve_public(credentials.secret_key.encode()).decode() != credentials.public_key:
        raise ConfigError(
            f"the secret key of {credentials.user!r} is not that of public_key "
            f"{credentials.public_key}"
        )
    return credentials

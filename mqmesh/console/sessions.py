"""Sessions of browsers, kept in memory, and limits of logins. Pure but for chance."""

import hmac
import secrets
from collections import deque
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.console.users import ConsoleUser

LONGEST_MS: Final = 12 * 3_600_000
IDLE_MS: Final = 3_600_000
MAX_SESSIONS: Final = 1_000
"""Sessions at a time; the one that was idle longest makes room."""
FAILURES_PER_MINUTE: Final = 5
"""Wrong passwords a minute of a user and address."""
REQUESTS_PER_SECOND: Final = 100
MAX_REMEMBERED: Final = 10_000
"""Users and addresses whose failures are remembered."""


class Session(msgspec.Struct):
    """A browser's session.

    Attributes:
        user: Console user.
        csrf: Token that each change must bring.
        began_ms: Monotonic clock.
        used_ms: Of the last request, the same.
        recent: Times of the requests of the last second.
    """

    user: ConsoleUser
    csrf: str
    began_ms: int
    used_ms: int
    recent: deque[int]

    def is_csrf(self, token: str) -> bool:
        """Return True for the session's own token."""
        return hmac.compare_digest(self.csrf.encode(), token.encode("utf-8", "replace"))

    def admits(self, now_ms: int) -> bool:
        """Return False for a request beyond the limit of 100 a second."""
        while self.recent and self.recent[0] <= now_ms - 1_000:
            self.recent.popleft()
        if len(self.recent) >= REQUESTS_PER_SECOND:
            return False
        self.recent.append(now_ms)
        return True


def new_session(user: ConsoleUser, now_ms: int) -> Session:
    """Make a session; a program's has no cookie, and is not kept by ``Sessions``."""
    return Session(user, secrets.token_urlsafe(32), now_ms, now_ms, deque())


class Sessions:
    """All sessions, by the cookie's value.

    Args:
        clock: Source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}

    def begin(self, user: ConsoleUser) -> tuple[str, Session]:
        """Begins a session; returns its cookie, 256 random bits, and the session."""
        now_ms = self._clock.monotonic_ms()
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = secrets.token_urlsafe(32)
        session = new_session(user, now_ms)
        self._sessions[cookie] = session
        return cookie, session

    def find(self, cookie: str) -> Session | None:
        """Return the session of a cookie, and count it as used; None if it ended."""
        session = self._sessions.pop(cookie, None)
        now_ms = self._clock.monotonic_ms()
        if session is None or now_ms - session.began_ms > LONGEST_MS:
            return None
        if now_ms - session.used_ms > IDLE_MS:
            return None
        session.used_ms = now_ms
        self._sessions[cookie] = session  # last: used last
        return session

    def end(self, cookie: str) -> None:
        """Ends a session, if there is one."""
        self._sessions.pop(cookie, None)


class LoginLimit:
    """Limit of wrong passwords by user and address.

    Args:
        clock: Source of time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[tuple[str, str], list[int]] = {}

    def admits(self, user: str, address: str) -> bool:
        """Return False after five failures within a minute."""
        return len(self._recent((user, address))) < FAILURES_PER_MINUTE

    def note_failure(self, user: str, address: str) -> None:
        """Counts a wrong password."""
        key = (user, address)
        recent = self._recent(key)
        self._failures.pop(key, None)
        if len(self._failures) >= MAX_REMEMBERED:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = [*recent, self._clock.monotonic_ms()]

    def _recent(self, key: tuple[str, str]) -> list[int]:
        oldest_ms = self._clock.monotonic_ms() - 60_000
        return [at for at in self._failures.get(key, ()) if at > oldest_ms]

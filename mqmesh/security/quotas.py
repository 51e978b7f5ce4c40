"""Quotas: how much users may send, read and connect at one server. Pure.

Token buckets hold them: a request is taken while anything is left, whatever its size, and the
next one waits. So a large batch is never refused for ever.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from mqmesh.errors import SystemBusy
from mqmesh.metrics import LabelValues, Measured, counter
from mqmesh.security.access_list import User
from mqmesh.token_bucket import TokenBucket

MAX_WAIT_MS: Final = 60_000
"""Longest wait that a client is asked for; when it asks again, it gets the rest."""

Rates = tuple[int | None, int | None]
"""Messages, and bytes, a second; None for as many as one likes."""


class Flow:
    """Flow of one user's messages to this server, or from it.

    Args:
        user: Name.
        word: Direction, for errors: ``send`` or ``read``; its settings begin with it.
        rates: Its limits.

    Attributes:
        rates: As given.
        messages: Messages that went this way since the user has these rates.
        size: Their bytes.
        refused: Requests that had to wait.
    """

    def __init__(self, user: str, word: str, rates: Rates) -> None:
        self._user, self._word, self.rates = user, word, rates
        self._messages, self._bytes = (
            None if rate is None else TokenBucket(rate) for rate in rates
        )
        self.messages = 0
        self.size = 0
        self.refused = 0

    def check(self, now_ms: int) -> None:
        """Refuses the next request while what went before is over the quota.

        Args:
            now_ms: Monotonic clock.

        Raises:
            SystemBusy: With the time to wait.
        """
        for bucket, unit in ((self._messages, "messages"), (self._bytes, "bytes")):
            wait_ms = 0 if bucket is None else bucket.wait_ms(now_ms)
            if bucket is not None and wait_ms:
                self.refused += 1
                raise SystemBusy(
                    f"user {self._user!r} may {self._word} {bucket.rate} {unit} a second at this "
                    f"broker (quota.{self._word}_{unit}_per_s in the access list); wait {wait_ms} "
                    "ms",
                    retry_after_ms=min(wait_ms, MAX_WAIT_MS),
                )

    def note(self, messages: int, size: int) -> None:
        """Counts messages that went this way; ``check`` was called before."""
        self.messages += messages
        self.size += size
        if self._messages is not None:
            self._messages.take(messages)
        if self._bytes is not None:
            self._bytes.take(size)


class Quotas:
    """Usage of this server by all users with quotas.

    Attributes:
        sending: By user, those alone whose quota says how much they may send.
        reading: The same of reading.
        connections: By user, how many connections it may have.
        refused_connections: Connections that were one too many, by user.
    """

    def __init__(self) -> None:
        self.sending: dict[str, Flow] = {}
        self.reading: dict[str, Flow] = {}
        self.connections: dict[str, int] = {}
        self.refused_connections: dict[str, int] = {}

    def put(self, users: Iterable[User]) -> None:
        """Puts other quotas in force; a user whose rates are as before goes on with what it used.

        Args:
            users: Of the access list.
        """
        limited = [(user.name, user.quota) for user in users if user.quota is not None]
        self.connections = {
            name: quota.connections for name, quota in limited if quota.connections is not None
        }
        self.refused_connections = {
            name: self.refused_connections.get(name, 0) for name in self.connections
        }
        self.sending = _flows(
            "send",
            {name: (one.send_messages_per_s, one.send_bytes_per_s) for name, one in limited},
            self.sending,
        )
        self.reading = _flows(
            "read",
            {name: (one.read_messages_per_s, one.read_bytes_per_s) for name, one in limited},
            self.reading,
        )

    def check_connection(self, name: str, others: int) -> None:
        """Refuses a connection that is one too many.

        Args:
            name: User.
            others: Its connections that are there already.

        Raises:
            SystemBusy: The user may have no more.
        """
        most = self.connections.get(name)
        if most is not None and others >= most:
            self.refused_connections[name] += 1
            raise SystemBusy(
                f"user {name!r} may have {most} connections to this server (quota.connections in "
                "the access list)"
            )


def _flows(word: str, wanted: Mapping[str, Rates], before: Mapping[str, Flow]) -> dict[str, Flow]:
    return {
        name: known
        if (known := before.get(name)) is not None and known.rates == rates
        else Flow(name, word, rates)
        for name, rates in wanted.items()
        if rates != (None, None)
    }


def _of_flows(quotas: Quotas, name: str) -> dict[LabelValues, int]:
    return {
        (user, direction): getattr(flow, name)
        for direction, flows in (("in", quotas.sending), ("out", quotas.reading))
        for user, flow in flows.items()
    }


METRICS: Final[tuple[Measured[Quotas], ...]] = (
    counter(
        "quota_messages_total",
        "messages of users with a quota",
        lambda quotas: _of_flows(quotas, "messages"),
        unit="messages",
        labels=("user", "direction"),
    ),
    counter(
        "quota_bytes_total",
        "bytes of users with a quota",
        lambda quotas: _of_flows(quotas, "size"),
        labels=("user", "direction"),
    ),
    counter(
        "quota_refusals_total",
        "requests of users that were over their quota",
        lambda quotas: _of_flows(quotas, "refused"),
        labels=("user", "direction"),
    ),
    counter(
        "quota_connection_refusals_total",
        "first requests of connections that were over their user's quota",
        lambda quotas: {(user,): count for user, count in quotas.refused_connections.items()},
        labels=("user",),
    ),
)
"""Metrics of a server's users that have quotas."""

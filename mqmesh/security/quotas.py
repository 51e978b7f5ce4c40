"""Quotas: limits of what users send, read and connect at one server. Pure.

Token buckets enforce them: a request of any size is served while its bucket is not empty, and the
next one waits. So a large batch is never refused for ever.
"""

from collections.abc import Mapping
from typing import Final

from mqmesh.errors import SystemBusy
from mqmesh.metrics import LabelValues, Measured, counter
from mqmesh.security.access_list import AccessList, NamespaceQuota
from mqmesh.token_bucket import TokenBucket

MAX_WAIT_MS: Final = 60_000
"""Longest wait in one answer; a client that tries again after it gets the rest of the wait."""

Rates = tuple[int | None, int | None]
"""Messages, and bytes, a second; None for as many as one likes."""
Usage = Mapping[str, int]
"""Numbers of things of a namespace, by the setting of ``NamespaceQuota`` that limits them."""


class Flow:
    """Flow of messages to this server, or from it, of one user or of all users of a namespace.

    Args:
        whose: Subject for errors: ``user 'shop'``.
        word: Direction, for errors: ``send`` or ``read``; its settings begin with it.
        rates: Its limits.

    Attributes:
        rates: As given.
        messages: Messages that went this way since the user has these rates.
        size: Their bytes.
        refused: Requests that had to wait.
    """

    def __init__(self, whose: str, verb: str, rates: Rates) -> None:
        self._whose, self._verb, self.rates = whose, verb, rates
        self._messages, self._bytes = (
            None if rate is None else TokenBucket(rate) for rate in rates
        )
        self.messages = 0
        self.size = 0
        self.refused = 0

    def check(self, now_ms: int) -> None:
        """Refuses the next request while earlier ones are over the quota.

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
                    f"{self._whose} may {self._verb} {bucket.rate} {unit} a second at this "
                    f"broker (quota.{self._verb}_{unit}_per_s in the access list); wait {wait_ms} "
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
    """Usage of this server by all users and namespaces with quotas.

    Attributes:
        sending: By user, those alone whose quota says how much they may send.
        reading: The same of reading.
        namespaces: Limits of namespaces, by name.
        sending_of_namespaces: Flows of those that limit how much is sent, by namespace.
        send_limits: By user, all flows that count what it sends.
        refused_of_namespaces: Number of refusals because of namespaces' quotas, by namespace and
            quota.
        connections: By user, how many connections it may have.
        refused_connections: Connections that were one too many, by user.
    """

    def __init__(self) -> None:
        self.sending: dict[str, Flow] = {}
        self.reading: dict[str, Flow] = {}
        self.namespaces: dict[str, NamespaceQuota] = {}
        self.sending_of_namespaces: dict[str, Flow] = {}
        self.send_limits: dict[str, tuple[Flow, ...]] = {}
        self.refused_of_namespaces: dict[LabelValues, int] = {}
        self.connections: dict[str, int] = {}
        self.refused_connections: dict[str, int] = {}

    def put(self, access_list: AccessList) -> None:
        """Puts other quotas in force; a user with the same rates as before keeps its usage.

        Args:
            access_list: The list with them.
        """
        users = access_list.user
        limited = [(user.name, user.quota) for user in users if user.quota is not None]
        self.connections = {
            name: quota.connections for name, quota in limited if quota.connections is not None
        }
        self.refused_connections = {
            name: self.refused_connections.get(name, 0) for name in self.connections
        }
        self.sending = _flows(
            "user {!r}",
            "send",
            {name: (one.send_messages_per_s, one.send_bytes_per_s) for name, one in limited},
            self.sending,
        )
        self.reading = _flows(
            "user {!r}",
            "read",
            {name: (one.read_messages_per_s, one.read_bytes_per_s) for name, one in limited},
            self.reading,
        )
        self.namespaces = {one.name: one.quota for one in access_list.namespace}
        self.sending_of_namespaces = _flows(
            "all users of namespace {!r} together",
            "send",
            {name: (None, one.send_bytes_per_s) for name, one in self.namespaces.items()},
            self.sending_of_namespaces,
        )
        self.send_limits = {}
        for user in users:
            flows = (
                self.sending.get(user.name),
                self.sending_of_namespaces.get(user.namespace),
            )
            limits = tuple(one for one in flows if one is not None)
            if limits:
                self.send_limits[user.name] = limits

    def check_namespace(self, name: str, used: Usage, more: Usage) -> None:
        """Refuses to make something in a namespace that has as much as its quota allows.

        Args:
            name: Namespace; one without a quota may have any number.
            used: Number of things that it has at this broker, by the setting that limits them.
            more: Number that it would have beside them.

        Raises:
            SystemBusy: It would be too many; the sentence names the setting.
        """
        quota = self.namespaces.get(name)
        if quota is None:
            return
        for what, count in more.items():
            most = getattr(quota, what)
            if most is not None and count > 0 and used.get(what, 0) + count > most:
                key = (name, what)
                self.refused_of_namespaces[key] = self.refused_of_namespaces.get(key, 0) + 1
                raise SystemBusy(over_quota(name, what, used.get(what, 0), most, count))

    def note_stored(self, namespace: str, messages: int, size: int) -> None:
        """Counts messages that a broker stored for a namespace without a send of a client.

        Args:
            namespace: Namespace; one without a quota of sends counts nothing.
            messages: Number of messages.
            size: Bytes of their batches.
        """
        flow = self.sending_of_namespaces.get(namespace)
        if flow is not None:
            flow.note(messages, size)

    def refusals_of_namespaces(self) -> dict[LabelValues, int]:
        """Return the number of refusals, by namespace and quota."""
        found: dict[LabelValues, int] = {**self.refused_of_namespaces}
        for name, flow in self.sending_of_namespaces.items():
            found[name, "send_bytes_per_s"] = flow.refused
        return found

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


def over_quota(namespace: str, what: str, used: int, most: int, more: int = 1) -> str:
    """Return the sentence of an error about a quota of a namespace."""
    return (
        f"namespace {namespace!r} has {used} of {most} {what} at this broker ({what} in "
        f"[namespace.quota] of the access list), so {more} more is too much"
    )


def _flows(
    whose: str, verb: str, wanted: Mapping[str, Rates], before: Mapping[str, Flow]
) -> dict[str, Flow]:
    return {
        name: known
        if (known := before.get(name)) is not None and known.rates == rates
        else Flow(whose.format(name), verb, rates)
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
    counter(
        "namespace_bytes_total",
        "bytes sent by the users of namespaces with a quota, and sent back, resent and replayed",
        lambda quotas: {(name,): flow.size for name, flow in quotas.sending_of_namespaces.items()},
        labels=("namespace",),
    ),
    counter(
        "namespace_refusals_total",
        "what was refused because a namespace was beyond its quota",
        lambda quotas: quotas.refusals_of_namespaces(),
        labels=("namespace", "quota"),
    ),
)
"""Metrics of a server's users and namespaces that have quotas."""

"""Requests to etcd's JSON gateway and its answers: the part of ``/v3`` that mqmesh uses.

Bytes are base64 there, and numbers are strings in answers. Zero and empty values are left out.
"""

from typing import Any, Final, Protocol

import msgspec

GRANT: Final = "/v3/lease/grant"
KEEP_ALIVE: Final = "/v3/lease/keepalive"
REVOKE: Final = "/v3/lease/revoke"
RANGE: Final = "/v3/kv/range"
TXN: Final = "/v3/kv/txn"
WATCH: Final = "/v3/watch"

UNKNOWN: Final = 2
NOT_FOUND: Final = 5
REFUSALS: Final = frozenset({3, NOT_FOUND, 7, 8, 9, 12, 16})
"""Codes that prove that nothing was done, and that another member would refuse, too:
arguments, permission, space, preconditions, unknown calls and credentials among them."""


class Header(msgspec.Struct, frozen=True):
    """Header of an answer: the state of the answering member.

    Attributes:
        cluster_id: Id of etcd's cluster.
        revision: Revision of the whole store.
        raft_term: Raft term of the member.
    """

    cluster_id: int = 0
    revision: int = 0
    raft_term: int = 0


class HasHeader(Protocol):
    """Any answer to one request."""

    @property
    def header(self) -> Header:
        """Header of the answer."""


class EtcdAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of which only the header counts."""

    header: Header = Header()


class EtcdKeyValue(msgspec.Struct, frozen=True):
    """A key.

    Attributes:
        key: Whole key.
        value: Value of the key.
        mod_revision: Revision of its last put.
        lease: Lease whose end removes the key; 0 for none.
    """

    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class RangeAnswer(EtcdAnswer, frozen=True):
    """Answer to a range request.

    Attributes:
        kvs: Keys and values, ordered by key.
    """

    kvs: list[EtcdKeyValue] = []


class TxnPart(msgspec.Struct, frozen=True):
    """Result of one operation of a transaction."""

    response_range: RangeAnswer | None = None


class TxnAnswer(EtcdAnswer, frozen=True):
    """Answer to a transaction.

    Attributes:
        succeeded: All comparisons held.
        responses: Results of the operations that were carried out.
    """

    succeeded: bool = False
    responses: list[TxnPart] = []

    def found(self, number: int) -> EtcdKeyValue | None:
        """Return the key that an operation read; None when there is none."""
        part = self.responses[number].response_range if number < len(self.responses) else None
        return part.kvs[0] if part is not None and part.kvs else None


class GrantAnswer(EtcdAnswer, frozen=True):
    """A lease.

    Attributes:
        ID: Id of the lease.
        TTL: Time to live, s; etcd takes no less than one and a half of its election timeouts.
    """

    ID: int
    TTL: int


class KeepAliveResult(EtcdAnswer, frozen=True):
    """A lease that was renewed.

    Attributes:
        TTL: Time to live, s; 0 when there is no such lease.
    """

    TTL: int = 0


class KeepAliveAnswer(msgspec.Struct, frozen=True):
    """The one answer to a stream of one renewal."""

    result: KeepAliveResult = KeepAliveResult()

    @property
    def header(self) -> Header:
        """Header of ``result``."""
        return self.result.header


class KeyEvent(msgspec.Struct, frozen=True):
    """A key that changed.

    Attributes:
        kv: New state of the key; for a removed one only its key counts.
        type: ``PUT`` or ``DELETE``.
    """

    kv: EtcdKeyValue
    type: str = "PUT"


class WatchResult(EtcdAnswer, frozen=True):
    """Message of a watch.

    Attributes:
        canceled: The watch has ended.
        cancel_reason: Reason why it ended.
        compact_revision: Oldest revision left, if the lack of older ones is the reason.
        events: Events in their order.
    """

    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    events: list[KeyEvent] = []


class StreamError(msgspec.Struct, frozen=True):
    """Reason why a stream ended."""

    message: str = ""


class WatchAnswer(msgspec.Struct, frozen=True):
    """One line of a stream of watches."""

    result: WatchResult | None = None
    error: StreamError | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """A request that failed.

    Attributes:
        code: Code of gRPC.
        message: Text for people.
    """

    code: int = UNKNOWN
    message: str = ""


def range_of(key: bytes, end: bytes | None = None) -> dict[str, Any]:
    """Reads a key, or all up to another one; linearizable."""
    return {"key": key} if end is None else {"key": key, "range_end": end}


def has_revision(key: bytes, revision: int) -> dict[str, Any]:
    """Holds if a key was put last at this revision; 0: if there is none."""
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def has_lease(key: bytes, lease: int) -> dict[str, Any]:
    """Holds if a key is there and ends with this lease."""
    return {"key": key, "target": "LEASE", "result": "EQUAL", "lease": lease}


def put(key: bytes, value: bytes, lease: int = 0) -> dict[str, Any]:
    """Puts a key, as an operation of a transaction."""
    return {"request_put": {"key": key, "value": value, "lease": lease}}


def get(key: bytes) -> dict[str, Any]:
    """Reads a key, as an operation of a transaction."""
    return {"request_range": range_of(key)}


def txn(
    compare: list[dict[str, Any]], success: list[dict[str, Any]], failure: list[dict[str, Any]]
) -> dict[str, Any]:
    """Executes ``success`` when all comparisons hold, else ``failure``."""
    return {"compare": compare, "success": success, "failure": failure}


def watch_of(prefix: bytes, end: bytes, revision: int) -> dict[str, Any]:
    """Watches the keys between two keys, from a revision on."""
    created = {"key": prefix, "range_end": end, "start_revision": revision, "fragment": True}
    return {"create_request": created}

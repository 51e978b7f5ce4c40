"""Sessions and records in etcd: their requests, and the meaning of the answers.

Each call gets a deadline, by the monotonic clock, and runs in the helper thread.
"""

import logging
from typing import Any, Protocol, TypeVar

from mqmesh.clock import Clock
from mqmesh.coordination.etcd.gateway import EtcdRefusal
from mqmesh.coordination.etcd.groups import settings_of, state_of
from mqmesh.coordination.etcd.keys import range_end, replica_and_lease, session_id
from mqmesh.coordination.etcd.messages import (
    GRANT,
    KEEP_ALIVE,
    NOT_FOUND,
    RANGE,
    REVOKE,
    TXN,
    EtcdAnswer,
    EtcdKeyValue,
    GrantAnswer,
    HasHeader,
    KeepAliveAnswer,
    RangeAnswer,
    TxnAnswer,
    get,
    has_lease,
    has_revision,
    put,
    range_of,
    txn,
)
from mqmesh.coordination.interface import (
    Conflict,
    CoordinatorUnavailable,
    SessionId,
    SessionLost,
)

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", bound=HasHeader)


class Ask(Protocol):
    """Function with the contract of ``mqmesh.coordination.etcd.gateway.Gateway.ask``."""

    def __call__(
        self,
        path: str,
        request: dict[str, Any],
        kind: type[_Answer],
        deadline_ms: int,
        *,
        changes: bool = False,
    ) -> _Answer:
        """Sends a request to one member after the other until one answers."""


class EtcdRecords:
    """Records and sessions of a cluster in etcd.

    Args:
        ask: Sends a request to etcd, and waits for the answer.
        clock: Clock of this machine.
    """

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock

    def begin(
        self, ttl_ms: int, key: bytes, replica_id: int, value: bytes, deadline_ms: int
    ) -> SessionId:
        """Makes a lease, and puts a presence with it in place of another session's.

        Raises:
            CoordinatorUnavailable: Etcd cannot be reached, or refuses.
        """
        ttl_s = -(-ttl_ms // 1_000)
        granted = self._ask_or_fail(GRANT, {"TTL": ttl_s}, GrantAnswer, deadline_ms)
        if ttl_s != granted.TTL:
            _log.warning(
                "etcd lets sessions end after %d s, not %d: see its --election-timeout",
                granted.TTL,
                ttl_s,
            )
        self._ask_or_fail(TXN, txn([], [put(key, value, granted.ID)], []), TxnAnswer, deadline_ms)
        return session_id(replica_id, granted.ID)

    def keep(self, session: SessionId, key: bytes, value: bytes, deadline_ms: int) -> int:
        """Renews a lease, and puts the presence anew if it is still this session's.

        Returns:
            Deadline of the session, boot clock.

        Raises:
            SessionLost: The session has ended.
            CoordinatorUnavailable: Etcd cannot be reached, or refuses.
        """
        _, lease = replica_and_lease(session)
        sent_ms = self._clock.boot_ms()
        kept = self._ask_or_fail(KEEP_ALIVE, {"ID": lease}, KeepAliveAnswer, deadline_ms)
        if kept.result.TTL:
            request = txn([has_lease(key, lease)], [put(key, value, lease)], [])
            try:
                if self._ask(TXN, request, TxnAnswer, deadline_ms).succeeded:
                    return sent_ms + kept.result.TTL * 1_000
            except EtcdRefusal as refusal:
                if refusal.code != NOT_FOUND:
                    raise CoordinatorUnavailable(str(refusal)) from refusal
        raise _lost(session)

    def end(self, session: SessionId, deadline_ms: int) -> None:
        """Ends a lease, and the presence with it.

        Raises:
            CoordinatorUnavailable: Etcd cannot be reached, or refuses.
        """
        _, lease = replica_and_lease(session)
        try:
            self._ask(REVOKE, {"ID": lease}, EtcdAnswer, deadline_ms)
        except EtcdRefusal as refusal:
            if refusal.code != NOT_FOUND:
                raise CoordinatorUnavailable(str(refusal)) from refusal

    def read(self, key: bytes, deadline_ms: int) -> EtcdKeyValue | None:
        """Reads a key, with all changes that were answered before.

        Raises:
            CoordinatorUnavailable: Etcd cannot be reached, or refuses.
        """
        found = self._ask_or_fail(RANGE, range_of(key), RangeAnswer, deadline_ms).kvs
        return found[0] if found else None

    def read_all(self, prefix: bytes, deadline_ms: int) -> list[EtcdKeyValue]:
        """Reads all keys with a prefix; see ``read``."""
        request = range_of(prefix, range_end(prefix))
        return self._ask_or_fail(RANGE, request, RangeAnswer, deadline_ms).kvs

    def change(
        self,
        key: bytes,
        session_key: bytes,
        version: int,
        value: bytes,
        session: SessionId,
        deadline_ms: int,
    ) -> int:
        """Replaces a group's record, if it has this version and the session lives.

        Returns:
            The new version.

        Raises:
            SessionLost, Conflict: The change was not made.
            CoordinatorUnavailable, OutcomeUnknown: See ``Gateway.ask``.
        """
        _, lease = replica_and_lease(session)
        compare = [has_revision(key, version), has_lease(session_key, lease)]
        request = txn(compare, [put(key, value)], [get(key), get(session_key)])
        answer = self._ask_or_fail(TXN, request, TxnAnswer, deadline_ms, changes=True)
        if answer.succeeded:
            return answer.header.revision
        holder = answer.found(1)
        if holder is None or holder.lease != lease:
            raise _lost(session)
        record = state_of(answer.found(0))
        raise Conflict(f"the group has version {record.version} by now, not {version}", record)

    def put_settings(self, key: bytes, version: int, value: bytes, deadline_ms: int) -> int:
        """Replaces the settings, if they have this version; see ``change``."""
        request = txn([has_revision(key, version)], [put(key, value)], [get(key)])
        answer = self._ask_or_fail(TXN, request, TxnAnswer, deadline_ms, changes=True)
        if answer.succeeded:
            return answer.header.revision
        record = settings_of(answer.found(0))
        raise Conflict(f"the settings have version {record.version} by now, not {version}", record)

    def _ask_or_fail(
        self,
        path: str,
        request: dict[str, Any],
        kind: type[_Answer],
        deadline_ms: int,
        *,
        changes: bool = False,
    ) -> _Answer:
        try:
            return self._ask(path, request, kind, deadline_ms, changes=changes)
        except EtcdRefusal as refusal:
            raise CoordinatorUnavailable(str(refusal)) from refusal


def _lost(session: SessionId) -> SessionLost:
    return SessionLost(f"session {session} has ended")

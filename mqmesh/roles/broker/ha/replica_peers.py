"""Connections to the other replicas of a group, kept open: an election has no time to make them."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from mqmesh.coordination.interface import LiveReplica
from mqmesh.errors import BrokerNotAvailable, ConfigError, MQMeshError
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode

OnDone = Callable[[Command | MQMeshError], None]

_log = logging.getLogger(__name__)


class PeerConnection(Protocol):
    """Connection to a replica; ``Transport.connect`` makes one."""

    def request(self, code: int, on_done: OnDone, *, header: bytes, timeout_ms: int) -> None:
        """Sends a request."""

    def close(self) -> None:
        """Closes it."""


class ReplicaPeers:
    """The other replicas, by id.

    Args:
        connect: Makes a connection to ``host:port``, to who proves a public key; raises
            ``ConfigError`` if that is no address, or nobody's key of the group.
    """

    def __init__(self, connect: Callable[[str, str], PeerConnection]) -> None:
        self._connect = connect
        self._connections: dict[int, tuple[tuple[str, str], PeerConnection]] = {}

    def meet(self, members: Sequence[LiveReplica], own_id: int) -> None:
        """Connects to those that are there; who is gone may come back to its address.

        Args:
            members: All that are there.
            own_id: Of this replica.
        """
        for one in members:
            replica_id, address = one.presence.replica_id, one.presence.replica_address
            place = address, one.presence.server_key
            known = self._connections.get(replica_id)
            if replica_id == own_id or not address or (known and known[0] == place):
                continue
            if known is not None:
                known[1].close()
                del self._connections[replica_id]
            try:
                connection = self._connect(*place)
            except ConfigError as error:
                # The replica announced an address or key that is invalid; it announces again soon.
                _log.warning("replica %d is not connected to: %s", replica_id, error)
                continue
            self._connections[replica_id] = place, connection

    def ask(
        self, replica_id: int, code: RequestCode, header: bytes, on_done: OnDone, timeout_ms: int
    ) -> None:
        """Sends a request to a replica; its outcome comes later, or at once if it is not known."""
        known = self._connections.get(replica_id)
        if known is None:
            on_done(BrokerNotAvailable(f"replica {replica_id} is not there"))
            return
        try:
            known[1].request(code, on_done, header=header, timeout_ms=timeout_ms)
        except MQMeshError as error:
            on_done(error)

    def close(self) -> None:
        """Closes all."""
        for _, connection in self._connections.values():
            connection.close()
        self._connections.clear()

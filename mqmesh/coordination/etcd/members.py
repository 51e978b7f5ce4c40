"""The members of an etcd cluster: their addresses, and the proof that one of them is behind."""

import threading
from typing import Final
from urllib.parse import urlsplit

from mqmesh.coordination.etcd.messages import Header
from mqmesh.errors import ConfigError, RemoteProtocolError

MOST_MEMBERS: Final = 16


class Members:
    """Members, and the highest raft term that any of them has shown; for all threads.

    A member that is cut off from the others, or was, answers with a term that the others have
    left: such an answer is rejected.

    Args:
        addresses: Addresses ``host:port``, in the order in which they are tried.

    Attributes:
        addresses: As given.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self._lock = threading.Lock()
        self._cluster_id = 0
        self._cluster_of = ""
        self._raft_term = 0

    def after(self, address: str) -> str:
        """Return the member to try when this one failed; the first again behind the last."""
        return self.addresses[(self.addresses.index(address) + 1) % len(self.addresses)]

    def check(self, address: str, header: Header) -> None:
        """Takes note of an answer.

        Raises:
            RemoteProtocolError: Its member is behind, or belongs to another cluster.
        """
        if not header.cluster_id:
            return
        with self._lock:
            if not self._cluster_id:
                self._cluster_id, self._cluster_of = header.cluster_id, address
            if header.cluster_id != self._cluster_id:
                raise RemoteProtocolError(
                    f"it is of the etcd cluster {header.cluster_id:x}, but {self._cluster_of} of "
                    f"{self._cluster_id:x}: the URL must name members of one cluster"
                )
            if header.raft_term < self._raft_term:
                raise RemoteProtocolError(
                    f"it is behind: its raft term is {header.raft_term}, and {self._raft_term} was "
                    "seen; if etcd was made anew, start this process again"
                )
            self._raft_term = header.raft_term


def addresses_of(text: str) -> tuple[str, ...]:
    """Takes ``host:port,host:port`` apart.

    Raises:
        ConfigError: A part is no address; the message names it.
    """
    addresses = tuple(dict.fromkeys(one.strip() for one in text.rstrip("/").split(",")))
    if len(addresses) > MOST_MEMBERS:
        raise ConfigError(f"etcd://{text}: {len(addresses)} members, {MOST_MEMBERS} at most")
    for address in addresses:
        host_and_port(address)
    return addresses


def host_and_port(address: str) -> tuple[str, int]:
    """Takes one address apart.

    Raises:
        ConfigError: The address is malformed.
    """
    try:
        parts = urlsplit(f"//{address}")
        host, port, whole = parts.hostname, parts.port, parts.netloc == address
    except ValueError:
        host, port, whole = None, None, False
    if not host or not port or not whole or "@" in address:
        raise ConfigError(
            f"{address!r} is no member of etcd: host:port, as in etcd://host1:2379,host2:2379"
        )
    return host, port

"""Keys of a cluster's records in etcd, and ids of sessions.

``/mqmesh/<cluster>/settings``, ``/mqmesh/<cluster>/<group>/state`` and, with the lease of the
session, ``/mqmesh/<cluster>/<group>/session/<replica>``.
"""

from typing import Final

from mqmesh.coordination.interface import MOST_REPLICAS, SessionId
from mqmesh.errors import InvalidArgument

MAX_NAME_CHARACTERS: Final = 255

_MAX_LEASE: Final = 2**63 - 1


class EtcdKeys:
    """Keys of one cluster.

    Args:
        cluster: Name of the cluster.

    Attributes:
        settings: Key of the cluster's settings.

    Raises:
        InvalidArgument: The name cannot be part of a key.
    """

    def __init__(self, cluster: str) -> None:
        self._root = f"/mqmesh/{_checked('cluster', cluster)}/"
        self.settings = f"{self._root}settings".encode()

    def group(self, group: str) -> bytes:
        """Return the prefix of all keys of a group; it ends with a slash.

        Raises:
            InvalidArgument: The name cannot be part of a key.
        """
        return f"{self._root}{_checked('broker group', group)}/".encode()

    def state(self, group: str) -> bytes:
        """Return the key of a group's record."""
        return self.group(group) + b"state"

    def session(self, group: str, replica_id: int) -> bytes:
        """Return the key of a replica's session."""
        return self.group(group) + b"session/%d" % replica_id

    def replica_of(self, group: str, key: bytes) -> int | None:
        """Return the replica id of a session's key; None for any other key."""
        begin = self.group(group) + b"session/"
        number = key.removeprefix(begin)
        if not key.startswith(begin) or not number.isdigit() or len(number) > 2:
            return None
        return int(number) if 1 <= int(number) <= MOST_REPLICAS else None


def range_end(prefix: bytes) -> bytes:
    """Return the first key behind all with this prefix; not for one that ends with ``0xff``."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def session_id(replica_id: int, lease: int) -> SessionId:
    """Return the id of a session: its replica, and its lease."""
    return SessionId(f"{replica_id}/{lease}")


def replica_and_lease(session: SessionId) -> tuple[int, int]:
    """Splits an id that ``session_id`` made.

    Raises:
        InvalidArgument: The id belongs to no session of etcd.
    """
    replica, slash, lease = session.partition("/")
    is_sound = slash and all(part.isascii() and part.isdigit() for part in (replica, lease))
    if not is_sound or len(session) > 30 or int(lease) > _MAX_LEASE:
        raise InvalidArgument(f"{session[:80]!r} is no session of etcd: those are replica/lease")
    return int(replica), int(lease)


def _checked(what: str, name: str) -> str:
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or "/" in name or not name.isprintable():
        raise InvalidArgument(
            f"the {what} {name[:80]!r} cannot be part of a key of etcd: 1 to {MAX_NAME_CHARACTERS} "
            "printable characters, none of them a slash"
        )
    return name

"""Limits of open descriptors: those of a role, and the part that connections may take."""

import logging
import resource
from typing import Final

from mqmesh.errors import ConfigError

RESERVED: Final = 256
"""Descriptors for log segments, documents, sockets, pipes, libraries, and for connections that are
accepted a moment before they are refused."""
LEAST_CONNECTIONS: Final = 16

_log = logging.getLogger(__name__)


def raise_limit(wanted: int) -> int:
    """Raises this process's soft limit of open files as far as the hard limit allows.

    Args:
        wanted: Descriptors.

    Returns:
        The soft limit now; it is never lowered.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    aim = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if aim > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (aim, hard))
        soft = aim
    return soft


def room_for_connections(wanted: int, own_files: int) -> int:
    """Makes room for connections beside a role's own files.

    Args:
        wanted: Connections (``max_connections``).
        own_files: Descriptors that the role keeps for its files.

    Returns:
        Number of connections that may be served: fewer than wanted if the system's hard limit of
        open files does not allow more, and a warning in the log says so.

    Raises:
        ConfigError: Fewer than ``LEAST_CONNECTIONS`` connections would be left.
    """
    reserved = own_files + RESERVED
    limit = raise_limit(wanted + reserved)
    room = min(wanted, limit - reserved)
    if room < min(wanted, LEAST_CONNECTIONS):
        raise ConfigError(
            f"the system allows {limit} open files, and {reserved} are needed for files alone; "
            "raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        )
    if room < wanted:
        _log.warning(
            "max_connections = %d needs %d open files, the system allows %d: %d connections are "
            "served; raise the hard limit (ulimit -Hn, LimitNOFILE=)",
            wanted,
            wanted + reserved,
            limit,
            room,
        )
    return room

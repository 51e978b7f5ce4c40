"""The index process of a replica: one for all roles that it has one after the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.host import socket_path
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.index.indexer_link import (
    IndexerClient,
    IndexerLink,
    LogExtent,
    indexer_arguments,
)
from mqmesh.roles.helper_process import HelperProcess
from mqmesh.security.keys import KeyRing

INDEX_SOCKET: Final = "index.sock"


def has_index(config: BrokerConfig) -> bool:
    """Return whether the replica has an index."""
    return config.index.enable and config.storage.backend == "commitlog"


def begin_index(
    config: BrokerConfig,
    connect: Callable[[str], IndexerClient],
    ring: KeyRing | None,
    clock: Clock,
    root: Path,
    look: Callable[[], LogExtent | None],
) -> IndexerLink | None:
    """The way to the process, which starts with the first tick.

    Args:
        config: Settings.
        connect: Makes a connection to an endpoint.
        ring: Keys of the broker; None where nothing is encrypted.
        clock: Source of time.
        root: Directory of everything that the broker keeps.
        look: How far the log goes that is to be indexed; None while that is not known.

    Returns:
        None if the replica has none.

    Raises:
        ConfigError: There is no place for its socket. Then there is no start: a broker without
            index would only be noticed by those who miss it.
    """
    if not has_index(config):
        return None
    endpoint = f"ipc://{socket_path(root, INDEX_SOCKET)}"
    if ring is not None:
        ring.keep_private(endpoint)
    return IndexerLink(
        start_process=lambda suspect: HelperProcess(
            indexer_arguments(config, root.absolute(), endpoint, suspect=suspect)
        ),
        connect=lambda: connect(endpoint),
        look=look,
        clock=clock,
        max_queries=config.index.max_queries,
        query_timeout_ms=config.index.query_timeout_ms,
    )

"""Coordination engines, by the scheme of their URL.

All engines except the embedded one are found by entry points of the group ``mqmesh.coordinator``,
named as their scheme, whose object is called like ``open_coordinator``: ``etcd`` here, others in
any package.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final

from mqmesh.coordination.embedded import EmbeddedCoordinator
from mqmesh.coordination.interface import Coordinator
from mqmesh.errors import ConfigError
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Transport

ENTRY_POINT_GROUP: Final = "mqmesh.coordinator"
TIMEOUT_MS: Final = 2_000

OpenCoordinator = Callable[..., Coordinator]
"""Opens a coordinator of one engine; called like ``open_coordinator``."""


def open_coordinator(
    url: str, transport: Transport, *, cluster: str, timeout_ms: int = TIMEOUT_MS
) -> Coordinator:
    """Opens a way to a coordination engine; it connects by itself, now or later.

    Args:
        url: ``embedded://host:port``, ``etcd://host:port,host:port,…``, or a URL of another entry
            point.
        transport: Transport whose loop calls back.
        cluster: Cluster of the groups and settings.
        timeout_ms: Time for each call, 100 to 60,000 ms.

    Raises:
        ConfigError: There is no such engine, or the engine rejects the URL.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        raise ConfigError(f"coordinator = {url!r} is no URL, as embedded://127.0.0.1:9870 is one")
    if not 100 <= timeout_ms <= 60_000:
        raise ConfigError(f"timeout_ms = {timeout_ms} is out of bounds: 100 to 60,000 ms")
    if scheme == "embedded":
        try:
            endpoint_of(rest)
        except ConfigError as error:
            raise ConfigError(f"coordinator = {url!r}: {error}") from error
        return EmbeddedCoordinator(transport, rest, cluster, timeout_ms=timeout_ms)
    points = entry_points(group=ENTRY_POINT_GROUP, name=scheme)
    if not points:
        others = sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})
        known = ", ".join(["embedded", *others])
        raise ConfigError(f"coordinator = {url!r}: {scheme!r} is unknown; there are: {known}")
    opener: OpenCoordinator = next(iter(points)).load()
    return opener(url, transport, cluster=cluster, timeout_ms=timeout_ms)

"""The filter servers that a broker knows; pure.

A filter server registers with its broker each second, and is forgotten when its
connection breaks or it falls silent. Without permission in the broker's settings none
is taken, and consumers get an error that says so.
"""

from typing import Final

import msgspec

from mqmesh.errors import BrokerNotAvailable, NoPermission, SystemBusy
from mqmesh.protocol.filters import FilterServerInfo, RegisterFilterServerRequest
from mqmesh.protocol.request import Peer
from mqmesh.protocol.route import check_address

MAX_SERVERS: Final = 16
EXPIRY_MS: Final = 10_000
RETRY_AFTER_MS: Final = 500


class _Known(msgspec.Struct):
    registration: RegisterFilterServerRequest
    seen_ms: int


class FilterServers:
    """Filter servers of a broker.

    Args:
        allowed: ``filter_server_enable`` of the broker's settings.
        broker_name: For errors.
    """

    def __init__(self, allowed: bool, broker_name: str) -> None:
        self._allowed = allowed
        self._broker_name = broker_name
        self._known: dict[Peer, _Known] = {}

    def on_register(self, peer: Peer, header: RegisterFilterServerRequest, now_ms: int) -> bool:
        """A filter server says that it is there.

        Returns:
            True if it is new.

        Raises:
            NoPermission: This broker has none.
            InvalidArgument: Its address is none that consumers can connect to.
            SystemBusy: It has too many.
        """
        self._check_allowed()
        check_address(header.address)
        self._forget_silent(now_ms)
        is_new = peer not in self._known
        if is_new and len(self._known) >= MAX_SERVERS:
            raise SystemBusy(f"{MAX_SERVERS} filter servers are registered already")
        self._known[peer] = _Known(header, now_ms)
        return is_new

    def on_disconnect(self, peer: Peer) -> None:
        """A connection broke."""
        self._known.pop(peer, None)

    def choose(self, group: str, now_ms: int) -> FilterServerInfo:
        """The filter server of a consumer group: the same for all its members.

        Raises:
            NoPermission: This broker has no filter servers.
            BrokerNotAvailable: None is there at the moment.
        """
        self._check_allowed()
        self._forget_silent(now_ms)
        found = sorted((one.registration for one in self._known.values()), key=lambda one: one.name)
        if not found:
            raise BrokerNotAvailable(
                f"no filter server is registered with broker {self._broker_name} at the moment",
                retry_after_ms=RETRY_AFTER_MS,
            )
        chosen = found[sum(group.encode()) % len(found)]
        return FilterServerInfo(chosen.name, chosen.address)

    @property
    def registrations(self) -> list[RegisterFilterServerRequest]:
        """Last registration of each filter server."""
        return [one.registration for one in self._known.values()]

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise NoPermission(
                f"broker {self._broker_name} does not allow filters in Python; an administrator "
                "allows them by filter_server.enable = true in the cluster file"
            )

    def _forget_silent(self, now_ms: int) -> None:
        silent = [p for p, one in self._known.items() if now_ms - one.seen_ms > EXPIRY_MS]
        for peer in silent:
            del self._known[peer]

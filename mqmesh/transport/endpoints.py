"""Addresses as users write them, and the endpoints that they name."""

from collections.abc import Iterable

from mqmesh.errors import ConfigError
from mqmesh.protocol.route import BrokerAddress
from mqmesh.security.keys import KeyRing


def endpoint_of(address: str) -> str:
    """The endpoint of an address as users write it.

    Args:
        address: ``host:port``, ``[IPv6]:port``, or any endpoint such as ``ipc://path``.

    Raises:
        ConfigError: It is neither.
    """
    if "://" in address:
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port == "*" or port.isdigit()):
        raise ConfigError(f"address {address!r} is not of the form host:port")
    return f"tcp://{address}"


def learn_keys(ring: KeyRing | None, addresses: Iterable[BrokerAddress]) -> None:
    """Has servers prove the keys that a name server, or a broker, told of them."""
    if ring is not None:
        for address in addresses:
            if address.server_key:
                ring.learn(endpoint_of(address.tcp), address.server_key)

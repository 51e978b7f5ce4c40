"""Addresses as users write them, and the endpoints that they name."""

from mqmesh.errors import ConfigError


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

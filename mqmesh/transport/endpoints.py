"""Addresses as users write them, and their endpoints."""

from collections.abc import Callable, Iterable

import msgspec

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.protocol.route import BrokerAddress, BrokerData, check_address
from mqmesh.security.keys import KeyRing


def endpoint_of(address: str) -> str:
    """Return the endpoint of an address as users write it.

    Args:
        address: ``host:port``, ``[IPv6]:port``, or any endpoint such as ``ipc://path``.

    Raises:
        ConfigError: The address has none of these forms.
    """
    if "://" in address:
        return address
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port == "*" or port.isdigit()):
        raise ConfigError(f"address {address!r} is not of the form host:port")
    return f"tcp://{address}"


def usable_brokers(
    brokers: Iterable[BrokerData], report: Callable[[str], None]
) -> list[BrokerData]:
    """Return broker groups without unusable addresses; a group without a usable one is left out.

    Name servers refuse such addresses; one that does not must not affect other brokers.

    Args:
        brokers: Broker groups from a name server.
        report: Called with a sentence for each address that is left out.
    """
    found = []
    for group in brokers:
        usable = {}
        for broker_id, address in group.addresses.items():
            try:
                check_address(address)
                usable[broker_id] = address
            except InvalidArgument as error:
                report(f"broker {group.broker_name[:255]!r} of a name server is left out: {error}")
        if len(usable) == len(group.addresses):
            found.append(group)
        elif usable:
            found.append(msgspec.structs.replace(group, addresses=usable))
    return found


def learn_keys(ring: KeyRing | None, addresses: Iterable[BrokerAddress]) -> None:
    """Require servers to prove the keys that a name server, or a broker, gave for them."""
    if ring is not None:
        for address in addresses:
            if address.server_key:
                ring.learn(endpoint_of(address.tcp), address.server_key)

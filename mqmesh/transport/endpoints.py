"""Addresses as users write them, and the endpoints that they name."""

import logging
from collections.abc import Iterable

import msgspec

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.protocol.route import BrokerAddress, BrokerData, check_address
from mqmesh.security.keys import KeyRing

_log = logging.getLogger(__name__)


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


def usable_brokers(brokers: Iterable[BrokerData]) -> list[BrokerData]:
    """Return broker groups without the addresses that nobody can connect to.

    Name servers refuse such addresses; one that lets them pass must not stop what concerns others.
    """
    found = []
    for group in brokers:
        usable = {key: one for key, one in group.addresses.items() if _is_usable(group, one)}
        whole = len(usable) == len(group.addresses)
        found.append(group if whole else msgspec.structs.replace(group, addresses=usable))
    return found


def _is_usable(group: BrokerData, address: BrokerAddress) -> bool:
    try:
        check_address(address)
    except InvalidArgument as error:
        _log.warning("broker %.255r of the name server is left out: %s", group.broker_name, error)
        return False
    return True


def learn_keys(ring: KeyRing | None, addresses: Iterable[BrokerAddress]) -> None:
    """Has servers prove the keys that a name server, or a broker, told of them."""
    if ring is not None:
        for address in addresses:
            if address.server_key:
                ring.learn(endpoint_of(address.tcp), address.server_key)

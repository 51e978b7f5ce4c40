"""Addresses to listen at, and addresses to advertise. One rule for all roles."""

import ipaddress
import re
from typing import Final

from mqmesh.errors import ConfigError

LOOPBACK_NAMES: Final = frozenset({"localhost", "ip6-localhost"})
WILDCARDS: Final = frozenset({"0.0.0.0", "::", "[::]", "*"})
MAX_HOST_LENGTH: Final = 255
MAX_PORT: Final = 65_535

_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def is_loopback(host: str) -> bool:
    """Return True when only this machine can reach a listener at this host."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Return whether a text is a host name of ASCII letters, or an address.

    Args:
        text: A name, an IPv4 address, or an IPv6 address in brackets; up to 255 characters.
    """
    if text.startswith("[") and text.endswith("]"):
        try:
            return ipaddress.ip_address(text[1:-1]).version == 6
        except ValueError:
            return False
    return len(text) <= MAX_HOST_LENGTH and _HOST.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Return whether a text is ``host:port``, with a port of 1 to 65,535."""
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= MAX_PORT
    return is_port and is_host(host)


def check_listen(
    role: str,
    listen_host: str,
    advertised_host: str,
    *,
    allow_insecure_bind: bool,
    advice: str = "turn security on (security.enable)",
) -> None:
    """Refuses an address that strangers can reach, and an advertised host that is not valid.

    Args:
        role: Name of the server in errors.
        listen_host: Address to listen at.
        advertised_host: Host that others get to connect to, "" for ``listen_host``.
        allow_insecure_bind: The administrator takes the risk, or security is on.
        advice: Setting that makes the server safe, for the error.

    Raises:
        ConfigError: Names the setting and a valid value.
    """
    if not allow_insecure_bind and not is_loopback(listen_host):
        raise ConfigError(
            f"listen_host = {listen_host!r} can be reached from other machines, and this {role} "
            f"neither encrypts nor asks who a client is; listen at 127.0.0.1, {advice}, or set "
            "allow_insecure_bind = true where everybody may do everything"
        )
    if advertised_host and not is_host(bindable(advertised_host)):
        raise ConfigError(
            f"advertised_host = {advertised_host!r} is no host that clients can connect to; write "
            f"a name of up to {MAX_HOST_LENGTH} letters, digits, '.', '-' and '_', or an IP address"
        )
    if listen_host in WILDCARDS and not advertised_host:
        raise ConfigError(
            f"listen_host = {listen_host!r} is no address that clients can connect to; set "
            "advertised_host to the one they shall use"
        )


def bindable(host: str) -> str:
    """Return the address behind a host that ZeroMQ can bind to; it resolves no names there."""
    if host in LOOPBACK_NAMES:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host and not host.startswith("[") else host

"""Settings that every client has."""

import os
import re
import secrets
import socket
from typing import Annotated, Any, Final, TypeVar

import msgspec

from mqmesh.config import convert_values
from mqmesh.errors import ConfigError, InvalidArgument

DEFAULT_NAMESRV: Final = "127.0.0.1:9876;127.0.0.1:9877"
"""Where ``mqmesh up`` puts its name servers."""

MAX_PORT: Final = 65_535

_ADDRESS = re.compile(r"[A-Za-z0-9_.-]+:([0-9]{1,5})")

_T = TypeVar("_T", bound=msgspec.Struct)

Ms = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a client finds brokers and keeps in touch with them.

    Attributes:
        namesrv_addr: ``host:port`` of each name server, separated by semicolons.
        instance_name: Part of the client id, for the administrator's eyes.
        poll_name_server_interval_ms: Routes are asked for again after this, as the safety
            net below the name servers' hints.
        missing_route_interval_ms: The same while a topic has no route.
        heartbeat_broker_interval_ms: Between heartbeats to brokers in use.
        namesrv_timeout_ms: For one answer of one name server, before the next one is asked.
        use_ipc: Prefer a broker's Unix socket when it runs on this machine.
    """

    namesrv_addr: str = DEFAULT_NAMESRV
    instance_name: str = "DEFAULT"
    poll_name_server_interval_ms: Ms = 30_000
    missing_route_interval_ms: Ms = 1_000
    heartbeat_broker_interval_ms: Ms = 30_000
    namesrv_timeout_ms: Ms = 1_000
    use_ipc: bool = True

    def namesrv_addresses(self) -> list[str]:
        """The addresses, one by one.

        Raises:
            InvalidArgument: There is none, or one is not of the form host:port.
        """
        if not isinstance(self.namesrv_addr, str):
            raise InvalidArgument(f"namesrv_addr must be a str, not {self.namesrv_addr!r}")
        found = [part.strip() for part in self.namesrv_addr.split(";") if part.strip()]
        if not found:
            raise InvalidArgument("namesrv_addr names no name server; give host:port;host:port")
        for address in found:
            form = _ADDRESS.fullmatch(address)
            if form is None or not 0 < int(form[1]) <= MAX_PORT:
                raise InvalidArgument(f"name server {address!r} is not of the form host:port")
        return found


def make_options(kind: type[_T], values: dict[str, Any], what: str) -> _T:
    """Makes options of keyword arguments.

    Args:
        kind: Which options.
        values: Fields by name.
        what: What to call them in an error.

    Raises:
        InvalidArgument: An unknown name, or a value out of bounds.
    """
    try:
        return convert_values(kind, values, what)
    except ConfigError as error:
        raise InvalidArgument(str(error)) from error


def new_client_id(options: ClientOptions) -> str:
    """An id that no other client has: host, process, instance name and chance."""
    return f"{born_host()}@{options.instance_name}#{secrets.token_hex(6)}"


def born_host() -> str:
    """This process as messages name it: ``host:pid``."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}"

"""Settings that every client has."""

import ipaddress
import os
import random
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from mqmesh.config import convert_values
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.namespaces import check_namespace
from mqmesh.protocol.pulling import Zone
from mqmesh.sdk.client.namespaced import in_namespace
from mqmesh.security.keys import Credentials, KeyRing, load_credentials
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.interface import Transport
from mqmesh.transport.zmq.transport import ZmqTransport

DEFAULT_NAMESRV: Final = "127.0.0.1:9876;127.0.0.1:9877"
"""Addresses of the name servers that ``mqmesh up`` starts."""

MAX_PORT: Final = 65_535

MAX_NAMESRVS: Final = 16

CREDENTIALS_VARIABLE: Final = "MQMESH_CREDENTIALS"
NAMESPACE_VARIABLE: Final = "MQMESH_NAMESPACE"
WHOLE_CLUSTER: Final = ""
"""Namespace of processes that serve the whole cluster, as the exporter and the console, regardless
of their environment: a namespace would hide topics and groups of others, and shorten names that
are to differ for people and in metrics."""

NamesrvAddr = str | Sequence[str]
"""Name servers: one text, separated by commas or semicolons, or a text for each."""

_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})")

_T = TypeVar("_T", bound=msgspec.Struct)

Ms = Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a client's connection: finding brokers and keeping in touch with them.

    Attributes:
        namesrv_addr: ``host:port`` of each name server, as a list or as a text, separated by
            commas or semicolons; an IPv6 address stands in brackets, ``[::1]:9876``.
        instance_name: Part of the client id, for administrators.
        poll_name_server_interval_ms: Routes are requested again after this, as the safety
            net below the name servers' hints.
        missing_route_interval_ms: The same while a topic has no route.
        heartbeat_broker_interval_ms: Between heartbeats to brokers in use.
        namesrv_timeout_ms: For one answer of one name server, before the next one is tried.
        use_ipc: Prefer a broker's Unix socket when it runs on this machine.
        zone: Location of the client, such as the name of a data centre. Its consumers read from
            replicas of the same ``ha.zone``, where there are any.
        credentials: Path of the file with the client's keys, for clusters with security on (see
            docs/security.md); or ``Credentials`` themselves. "" takes the file that the
            environment names by MQMESH_CREDENTIALS; without one nothing is encrypted.
        namespace: Namespace of all topics and groups that the client names (see
            docs/namespaces.md); "" for none. None takes that of the environment,
            MQMESH_NAMESPACE.
    """

    namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV
    instance_name: str = "DEFAULT"
    poll_name_server_interval_ms: Ms = 30_000
    missing_route_interval_ms: Ms = 1_000
    heartbeat_broker_interval_ms: Ms = 30_000
    namesrv_timeout_ms: Ms = 1_000
    use_ipc: bool = True
    zone: Zone = ""
    credentials: str | Credentials = ""
    namespace: str | None = None

    def namesrv_addresses(self) -> list[str]:
        """Return the addresses, one by one.

        Raises:
            InvalidArgument: There is none, or one is not of the form host:port.
        """
        return namesrv_addresses(self.namesrv_addr)


def namesrv_addresses(value: NamesrvAddr) -> list[str]:
    """Return the addresses that users mean, one by one.

    Raises:
        InvalidArgument: There is none, there are more than 16, or one is not of the form
            host:port.
    """
    if isinstance(value, str):
        texts = re.split("[,;]", value)
    elif isinstance(value, Sequence) and all(isinstance(one, str) for one in value):
        texts = list(value)
    else:
        raise InvalidArgument(f"namesrv_addr must be a str or a list of str, not {value!r:.100}")
    found = [text.strip() for text in texts if text.strip()]
    if not 0 < len(found) <= MAX_NAMESRVS:
        raise InvalidArgument(
            f"namesrv_addr names {len(found)} name servers; give 1 to {MAX_NAMESRVS}, as "
            "host:port,host:port"
        )
    for address in found:
        form = _ADDRESS.fullmatch(address)
        if form is None or not 0 < int(form[2]) <= MAX_PORT or not _is_ipv6(form[1]):
            raise InvalidArgument(
                f"name server {address!r} is not of the form host:port, nor [IPv6]:port"
            )
    return found


def _is_ipv6(host: str | None) -> bool:
    if host is None:
        return True  # there are no brackets
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def client_options(
    client: ClientOptions | None,
    namesrv_addr: NamesrvAddr | None,
    credentials: str | Credentials | None = None,
    namespace: str | None = None,
) -> ClientOptions:
    """Return the settings of a connection, with those that are given beside, or in the environment.

    Raises:
        ConfigError: The file of credentials cannot be used.
        InvalidArgument: The namespace is none.
    """
    if namespace is None and client is not None:
        namespace = client.namespace
    found = find_credentials(credentials or (client.credentials if client is not None else ""))
    if client is None and namesrv_addr is None and found is not None and found.namesrv_addr:
        namesrv_addr = found.namesrv_addr
    given = {
        "namesrv_addr": namesrv_addr,
        "credentials": found,
        "namespace": find_namespace(namespace) or namespace,
    }
    kept = {name: value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(client or ClientOptions(), **kept)


def find_credentials(given: str | Credentials) -> Credentials | None:
    """Return the keys given, else those that the environment names; None if neither does.

    Raises:
        ConfigError: The file cannot be used.
    """
    given = given or os.environ.get(CREDENTIALS_VARIABLE, "")
    if not given:
        return None
    return load_credentials(Path(given)) if isinstance(given, str) else given


def find_namespace(given: str | None) -> str:
    """Return the namespace given, else that of the environment; "" for none.

    Raises:
        InvalidArgument: It is none.
    """
    found = os.environ.get(NAMESPACE_VARIABLE, "") if given is None else given
    return found and check_namespace(found)


def client_transport(
    transport: Transport | None,
    credentials: str | Credentials = "",
    server_keys: Mapping[str, str] | None = None,
    namespace: str = "",
) -> Transport:
    """Return the transport that a client was given, else ZeroMQ and a loop of its own.

    Args:
        transport: Transport that was given.
        credentials: As of ``ClientOptions``; without a meaning where a transport was given.
        server_keys: Public keys of servers that name servers do not report, by address or endpoint.
        namespace: Namespace of all names that the client uses; "" for none.

    Raises:
        ConfigError: The file of credentials cannot be used.
    """
    if transport is not None:
        return in_namespace(transport, namespace)
    own = find_credentials(credentials)
    if own is None:
        return in_namespace(ZmqTransport(), namespace)
    ring = KeyRing(own, *own.namesrv_keys)
    for endpoint, key in (server_keys or {}).items():
        ring.learn(endpoint_of(endpoint), key)
    return in_namespace(ZmqTransport(ring), namespace)


def make_options(kind: type[_T], values: Mapping[str, Any], what: str) -> _T:
    """Makes options of keyword arguments.

    Args:
        kind: Class of the options.
        values: Fields by name.
        what: Name of them in errors.

    Raises:
        InvalidArgument: An unknown name, or a value out of bounds.
    """
    try:
        return convert_values(kind, dict(values), what)
    except ConfigError as error:
        raise InvalidArgument(str(error)) from error


def new_client_id(options: ClientOptions, chance: random.Random) -> str:
    """Return an id that no other client has: host, process, instance name and chance."""
    return f"{born_host()}@{options.instance_name}#{chance.randbytes(6).hex()}"


def born_host() -> str:
    """Return the name of this process in messages: ``host:pid``."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}"

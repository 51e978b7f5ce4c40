"""Settings of a web console. The defaults stand here only."""

from typing import Annotated, Final

import msgspec

from mqmesh.config import check_names
from mqmesh.errors import ConfigError
from mqmesh.hosts import WILDCARDS, bindable, check_listen, is_loopback
from mqmesh.security.keys import Key

MAX_CLUSTERS: Final = 16

_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Namesrvs = Annotated[list[_Address], msgspec.Meta(min_length=1, max_length=16)]


class ClusterSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A further cluster that the console shows.

    Attributes:
        name: Name of the cluster in the console: letters, digits, ``-``, ``_`` and ``.``.
        namesrv_addr, data_dir, credentials, server_keys: As of ``ConsoleConfig``.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+\Z")]
    namesrv_addr: _Namesrvs
    data_dir: str = ""
    credentials: str = ""
    server_keys: dict[_Address, Key] = {}


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a web console.

    Attributes:
        enable: Let `mqmesh up` run a console; `mqmesh up --console` does so, too.
        name: Name of the instance, shown in logs and to administrators.
        listen_host: Address to listen at for HTTP. The default serves this machine only.
        listen_port: TCP port, 0 to 65,535; 0 takes a free one, for tests.
        allow_insecure_bind: Listen beyond this machine without TLS or users. Everybody who
            reaches it may do what its credentials may.
        tls_cert_file: Certificate, PEM, followed by those that vouch for it. "" for http. Read at
            the start.
        tls_key_file: Its private key, PEM, without a passphrase.
        users_file: File of the console's users, which `mqmesh console add-user` writes; only its
            owner may read it. "" for a console without login.
        hosts: Further names by which browsers may call the console, such as that of a proxy; a
            request for another one is refused.
        base_path: Path below which a proxy shows the console, such as ``/mqmesh``; "" for none.
        trusted_proxies: Addresses of proxies whose ``X-Forwarded-For``, ``-Host`` and ``-Proto``
            are believed.

        namesrv_addr: Name servers, ``host:port`` each; they know the brokers.
        data_dir: Data folder of a cluster that `mqmesh up` runs on this machine: those of its
            processes are watched that name servers do not know. "" for none.
        credentials: File with keys of a user of role ``view``, where security is on; "" for what
            MQMESH_CREDENTIALS names. The console watches the cluster by it. Without
            ``users_file`` people act by it, too.
        server_keys: Public keys of processes that have not the key of the name servers, by
            address.
        cluster: Further clusters, up to 16, among which people choose.
        monitor_file: Settings of `mqmesh monitor`, whose thresholds hold here, too; "" for the
            defaults.
        read_only: Offer no action, and refuse each.
        allow_body_view: Show bodies of messages; without it sizes and properties only.
        archive: Directory of the archive that `mqmesh archive` fills, for look-ups; "" for none.
            It needs the extra ``archive``.
        max_query_messages: Messages that one search looks at, 1 to 100,000.
        refresh_ms: Time from one look to the next while a page is open, 500 to 60,000 ms.
    """

    enable: bool = False
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "console"
    listen_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    listen_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8_082
    allow_insecure_bind: bool = False
    tls_cert_file: str = ""
    tls_key_file: str = ""
    users_file: str = ""
    hosts: Annotated[list[_Address], msgspec.Meta(max_length=64)] = []
    base_path: Annotated[
        str, msgspec.Meta(max_length=255, pattern=r"^((/[A-Za-z0-9._-]+)+)?\Z")
    ] = ""
    trusted_proxies: Annotated[list[_Address], msgspec.Meta(max_length=64)] = []

    namesrv_addr: _Namesrvs = msgspec.field(default_factory=lambda: ["127.0.0.1:9876"])
    data_dir: str = ""
    credentials: str = ""
    server_keys: dict[_Address, Key] = {}
    cluster: Annotated[list[ClusterSource], msgspec.Meta(max_length=MAX_CLUSTERS)] = []
    monitor_file: str = ""
    read_only: bool = False
    allow_body_view: bool = True
    archive: str = ""
    max_query_messages: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1_000
    refresh_ms: Annotated[int, msgspec.Meta(ge=500, le=60_000)] = 2_000

    def __post_init__(self) -> None:
        """Checks the rules between fields.

        Raises:
            ConfigError: Names the field and the allowed values.
        """
        check_names(self, "name")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            there, missing = ("tls_cert_file", "tls_key_file")[:: 1 if self.tls_cert_file else -1]
            raise ConfigError(f"{there} needs {missing}, too")
        names = [one.name for one in self.cluster]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"cluster: two are named {twice!r}; give each its own name")
        is_safe = bool(self.tls_cert_file) and bool(self.users_file)
        check_listen(
            "console",
            self.listen_host,
            self.listen_host if is_loopback(self.listen_host) else self.name,
            allow_insecure_bind=self.allow_insecure_bind or is_safe,
            advice="set tls_cert_file, tls_key_file and users_file",
        )

    def address(self, port: int = 0) -> str:
        """Return the address of the first page.

        Args:
            port: Port that was taken, where ``listen_port`` is 0.
        """
        scheme = "https" if self.tls_cert_file else "http"
        host = bindable("127.0.0.1" if self.listen_host in WILDCARDS else self.listen_host)
        return f"{scheme}://{host}:{port or self.listen_port}{self.base_path}/"

    def sources(self) -> list[ClusterSource]:
        """Return all clusters, the console's own one first, with an empty name."""
        own = msgspec.structs.replace(
            ClusterSource(name="own", namesrv_addr=self.namesrv_addr),
            name="",
            data_dir=self.data_dir,
            credentials=self.credentials,
            server_keys=self.server_keys,
        )
        return [own, *self.cluster]

"""Settings of an exporter. The defaults stand here only."""

from typing import Annotated

import msgspec

from mqmesh.config import check_names
from mqmesh.errors import ConfigError
from mqmesh.hosts import check_listen
from mqmesh.security.keys import Key

_Address = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class ExporterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an exporter.

    Attributes:
        enable: Let `mqmesh up` run an exporter; `mqmesh up --metrics` does so, too.
        name: Name of the instance, shown in logs and to administrators.
        listen_host: Address to listen at for HTTP. The default serves this machine only.
        listen_port: TCP port, 0 to 65,535; 0 takes a free one, for tests.
        allow_insecure_bind: Listen beyond this machine. A client that reaches it reads all metrics,
            and nothing else.
        tls_cert_file: Certificate of the page, PEM, followed by those that vouch for it: the page
            is served by https then, beyond this machine, too. "" for http. Read at the start.
        tls_key_file: Private key of the certificate, PEM, without a passphrase.

        namesrv_addr: Name servers, ``host:port`` each; they know the brokers.
        other_addr: Other processes to ask for their metrics, ``host:port`` each: coordinators,
            schedule services, filter servers.
        data_dir: Data folder of a cluster that `mqmesh up` runs on this machine: those of its
            processes are queried that name servers do not know. "" for none.
        credentials: File with keys of a user of role ``view``, where security is on; "" for what
            MQMESH_CREDENTIALS names.
        server_keys: Public keys of processes of ``other_addr``, by address, where they have not
            the key of the name servers.
        timeout_ms: Time for each answer of a process, 100 to 60,000 ms; keep it below the
            ``scrape_timeout`` of Prometheus.
        min_interval_ms: Requests within so long get the same page, 0 to 600,000 ms.
        forget_ms: A broker that name servers know no more is reported as down for so long, 0 to
            86,400,000 ms; then it counts as taken away.
        max_groups: Consumer groups of each broker whose progress is reported, 0 to 100,000;
            ``mqmesh_exporter_groups_left_out`` says how many are not.
        topic_regex: Report these topics only, up to 255 characters: a glob in spite of its name,
            where ``*`` stands for any characters, all others for themselves. "" for all.
        group_regex: The same of consumer groups, and with each its retry topic and dead letters.
        rocketmq4_names: Report the names of RocketMQ 4's exporter, too: its boards show them.
    """

    enable: bool = False
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "exporter"
    listen_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    listen_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 5_557
    allow_insecure_bind: bool = False
    tls_cert_file: str = ""
    tls_key_file: str = ""

    namesrv_addr: Annotated[list[_Address], msgspec.Meta(min_length=1, max_length=64)] = (
        msgspec.field(default_factory=lambda: ["127.0.0.1:9876"])
    )
    other_addr: Annotated[list[_Address], msgspec.Meta(max_length=1_024)] = []
    data_dir: str = ""
    credentials: str = ""
    server_keys: dict[_Address, Key] = {}
    timeout_ms: Annotated[int, msgspec.Meta(ge=100, le=60_000)] = 2_000
    min_interval_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 1_000
    forget_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 600_000
    max_groups: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 10_000
    topic_regex: Annotated[str, msgspec.Meta(max_length=255)] = ""
    group_regex: Annotated[str, msgspec.Meta(max_length=255)] = ""
    rocketmq4_names: bool = True

    def __post_init__(self) -> None:
        """Checks what needs more than a bound.

        Raises:
            ConfigError: Names the field and what to write instead.
        """
        check_names(self, "name")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            there, missing = ("tls_cert_file", "tls_key_file")[:: 1 if self.tls_cert_file else -1]
            raise ConfigError(f"{there} needs {missing}, too")
        check_listen(
            "exporter",
            self.listen_host,
            self.listen_host,
            allow_insecure_bind=self.allow_insecure_bind or bool(self.tls_cert_file),
            advice="set tls_cert_file and tls_key_file",
        )

"""`mqmesh gateway`: RocketMQ's own clients speak to a cluster."""

import logging
import os
import subprocess
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import click
import msgspec

from mqmesh.errors import StorageError
from mqmesh.private_files import make_folder
from mqmesh.roles.gateway.config import SHARED_LOCK, GatewayConfig
from mqmesh.roles.process import ExitCode, Role
from mqmesh.storage.files.directory_lock import hold_file
from mqmesh.transport.zmq.transport import ZmqTransport

from ..lazy_group import LazyGroup
from ..options import namesrv_option
from .serve import ProcessOptions, open_transport, server_options

OPENSSL: Final = (
    "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 3650 "
    "-subj /CN=mqmesh"
)
OPENSSL_S: Final = 10
_log = logging.getLogger(__name__)


@click.group(
    cls=LazyGroup,
    places={"clients": ("admin.gateways", "clients")},
    invoke_without_command=True,
)
@namesrv_option
@server_options
@click.pass_context
def gateway(context: click.Context, process: ProcessOptions, namesrv: str) -> int:
    """Run a gateway: clients of RocketMQ send to this cluster, and consume from it.

    They take it for a name server and brokers of RocketMQ 4.9, or for a proxy of RocketMQ 5 by
    gRPC: give them its address in place of the one that they have. docs/gateway.md says what works
    and what differs.

    \b
    Examples:
      mqmesh gateway
      mqmesh gateway --namesrv 10.0.0.1:9876 --set namesrv_port=9999
      mqmesh gateway -c conf/gateway.toml
      mqmesh gateway clients
    """
    if context.invoked_subcommand is not None:
        return ExitCode.OK
    config = with_own_certificate(process.load(GatewayConfig, namesrv))

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.gateway.server import GatewayServer

        return GatewayServer(config, transport)

    security = partial(open_transport, config.security, config.namesrv_addr)
    return process.serve("gateway", config.instance, make, security)


def with_own_certificate(config: GatewayConfig) -> GatewayConfig:
    """Returns the settings with a certificate of the gateway's own, where they name none.

    Clients of RocketMQ 5 speak TLS by default, and take any certificate. It is
    made on the first start; without the command ``openssl`` there is none.

    Raises:
        OSError: The data folder cannot be made.
    """
    if config.tls_cert_file:
        return config
    folder = Path(config.store_path_root_dir)
    cert, key = folder / "own-cert.pem", folder / "own-key.pem"
    make_folder(folder)
    try:
        if not cert.exists():
            _make_certificate(folder, cert, key)
    except (OSError, StorageError, subprocess.SubprocessError) as error:
        _log.warning(
            "TLS is not served: no certificate could be made (%s); set tls_cert_file and "
            "tls_key_file",
            error,
        )
        return config
    return msgspec.structs.replace(config, tls_cert_file=str(cert), tls_key_file=str(key))


def _make_certificate(folder: Path, cert: Path, key: Path) -> None:
    with TemporaryDirectory(prefix="own-cert-", dir=folder) as made:
        new_cert, new_key = Path(made, cert.name), Path(made, key.name)
        subprocess.run(
            [*OPENSSL.split(), "-keyout", str(new_key), "-out", str(new_cert)],
            check=True,
            capture_output=True,
            timeout=OPENSSL_S,
        )
        with hold_file(folder / SHARED_LOCK):
            if not cert.exists():  # workers take the first one's
                os.replace(new_key, key)
                os.replace(new_cert, cert)

"""`mqmesh gateway`: RocketMQ's own clients speak to a cluster."""

import logging
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Final

import click
import msgspec

from mqmesh.private_files import make_folder
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.process import Role
from mqmesh.transport.zmq.transport import ZmqTransport

from ..options import namesrv_option
from .serve import ProcessOptions, open_transport, server_options

OPENSSL: Final = (
    "openssl req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 3650 "
    "-subj /CN=mqmesh"
)
OPENSSL_S: Final = 10
_log = logging.getLogger(__name__)


@click.command()
@namesrv_option
@server_options
def gateway(process: ProcessOptions, namesrv: str) -> int:
    """Run a gateway: clients of RocketMQ send to this cluster, and consume from it.

    They take it for a name server and brokers of RocketMQ 4.9, or for a proxy of RocketMQ 5 by
    gRPC: give them its address in place of the one that they have. docs/gateway.md says what works
    and what differs.

    \b
    Examples:
      mqmesh gateway
      mqmesh gateway --namesrv 10.0.0.1:9876 --set namesrv_port=9999
      mqmesh gateway -c conf/gateway.toml
    """
    config = with_own_certificate(process.load(GatewayConfig, namesrv))

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.gateway.server import GatewayServer

        return GatewayServer(config, transport)

    security = partial(open_transport, config.security, config.namesrv_addr)
    return process.serve("gateway", config.name, make, security)


def with_own_certificate(config: GatewayConfig) -> GatewayConfig:
    """Returns the settings with a certificate of the gateway's own, where they name none.

    Clients of RocketMQ 5 speak TLS unless they are told not to, and take any certificate. It is
    made on the first start; without the command ``openssl`` there is none.

    Raises:
        OSError: The data folder cannot be made.
    """
    if config.tls_cert_file:
        return config
    folder = Path(config.store_path_root_dir)
    cert, key = folder / "own-cert.pem", folder / "own-key.pem"
    if not cert.exists():
        make_folder(folder)
        part = folder / "own-cert.part"
        try:
            subprocess.run(
                [*OPENSSL.split(), "-keyout", str(key), "-out", str(part)],
                check=True,
                capture_output=True,
                timeout=OPENSSL_S,
            )
            os.replace(part, cert)
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning(
                "TLS is not served: no certificate could be made (%s); set tls_cert_file and "
                "tls_key_file",
                error,
            )
            return config
    return msgspec.structs.replace(config, tls_cert_file=str(cert), tls_key_file=str(key))

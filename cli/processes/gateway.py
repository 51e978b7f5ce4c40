"""`mqmesh gateway`: RocketMQ's own clients speak to a cluster."""

from functools import partial

import click

from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.process import Role
from mqmesh.transport.zmq.transport import ZmqTransport

from ..options import namesrv_option
from .serve import ProcessOptions, open_transport, server_options


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
    config = process.load(GatewayConfig, namesrv)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.gateway.server import GatewayServer

        return GatewayServer(config, transport)

    security = partial(open_transport, config.security, config.namesrv_addr)
    return process.serve("gateway", config.name, make, security)

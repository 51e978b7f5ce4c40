"""`mqmesh indexer`: the process that brokers start for their index. Not for people."""

import os
import stat

import click

from mqmesh.roles.indexer.config import IndexerConfig
from mqmesh.roles.process import Role
from mqmesh.transport.zmq.transport import ZmqTransport

from .serve import ProcessOptions, process_options


@click.command(hidden=True)
@process_options
def indexer(process: ProcessOptions) -> int:
    """Run the index process of a broker; brokers do that themselves."""
    config = process.load(IndexerConfig)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.indexer.server import IndexerServer

        return IndexerServer(config, transport)

    # Standard error is the broker's. Where that is a pipe, its reader must not hold us up.
    is_pipe = stat.S_ISFIFO(os.fstat(2).st_mode)
    os.nice(config.index.niceness)
    log_name = f"{config.broker_name}-index"
    return process.serve("indexer", config.broker_name, make, log_name=log_name, is_piped=is_pipe)

"""`mqmesh indexer`: the process that brokers start for their index. Not for people."""

import os
import stat
from pathlib import Path

import click

from mqmesh.config import load_config
from mqmesh.logs import configure_logging
from mqmesh.private_files import keep_private
from mqmesh.roles.indexer.config import IndexerConfig
from mqmesh.roles.process import Role
from mqmesh.transport.zmq.transport import ZmqTransport

from .serve import process_options, serve_role


@click.command(hidden=True)
@process_options
def indexer(
    config_path: Path | None,
    table: str | None,
    overrides: tuple[str, ...],
    log_level: str,
    log_file: Path | None,
    supervised: bool,
) -> int:
    """Run the index process of a broker; brokers do that themselves."""
    config = load_config(IndexerConfig, config_path, table, overrides)

    def make(transport: ZmqTransport) -> Role:
        from mqmesh.roles.indexer.server import IndexerServer

        return IndexerServer(config, transport)

    # Standard error is the broker's. Where that is a pipe, its reader must not hold us up.
    is_pipe = stat.S_ISFIFO(os.fstat(2).st_mode)
    name = f"{config.broker_name}-index"
    keep_private()
    configure_logging(name, log_level.upper(), log_file, supervised=is_pipe)
    os.nice(config.index.niceness)
    return serve_role("indexer", config.broker_name, make, supervised=supervised)

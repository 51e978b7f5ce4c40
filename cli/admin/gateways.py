"""`mqmesh gateway clients`: clients of RocketMQ at gateways that run."""

from pathlib import Path
from typing import Final

import click

from mqmesh.errors import InvalidArgument
from mqmesh.roles.exporter.run_files import gateways_beside
from mqmesh.roles.supervisor.run_file import read_record
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.views.clusters import gateway_client_views
from mqmesh.sdk.client.options import DEFAULT_NAMESRV

from ..credentials import use_credentials_of
from ..options import DEFAULT_DATA_DIR, json_option
from ..render import Column, duration, print_records, text_or_dash

_CLIENTS: Final = (
    Column("gateway", "GATEWAY", rank=7),
    Column("client_id", "CLIENT"),
    Column("user", "USER", text_or_dash, rank=2),
    Column("protocol", "PROTOCOL", rank=3),
    Column("address", "ADDRESS", text_or_dash, rank=1),
    Column("language", "LANGUAGE", rank=4),
    Column("version", "VERSION", rank=5),
    Column("silent_ms", "SILENT", duration),
    Column("producer_groups", "PRODUCES FOR"),
    Column("consumer_groups", "CONSUMES FOR"),
    Column("topics", "TOPICS", rank=6),
)


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=DEFAULT_DATA_DIR,
    show_default=True,
    help="Folder of the cluster of this machine whose gateways the command queries.",
)
@click.option(
    "--at",
    metavar="ENDPOINT",
    help="Query the gateway that is READY there, such as ipc:///var/lib/mqmesh/gateway/sock.",
)
@json_option
def clients(data_dir: Path, at: str | None) -> None:
    """List RocketMQ's clients at the gateways of this machine.

    \b
    Examples:
      mqmesh gateway clients
      mqmesh gateway clients --data-dir /var/lib/mqmesh --json
    """
    gateways = [("gateway", at)] if at else gateways_beside(str(data_dir))
    if not gateways:
        raise InvalidArgument(
            f"no gateway of a cluster on {data_dir} runs; name its data folder by --data-dir, or "
            "where it answers by --at"
        )
    record = read_record(data_dir)
    namesrv = DEFAULT_NAMESRV if record is None else record.namesrv
    use_credentials_of(data_dir, namesrv)
    with AdminClient(namesrv) as admin:
        views = [
            view
            for name, endpoint in gateways
            for view in gateway_client_views(name, admin.gateway_clients(endpoint))
        ]
    print_records(_CLIENTS, views)

"""Processes of a cluster that name servers do not know: its run file names them."""

from pathlib import Path
from typing import Final

from mqmesh.roles.supervisor.run_file import read_record

LISTED: Final = ("namesrv", "broker", "exporter")
"""Roles that need no run file to be found."""


def endpoints_beside(data_dir: str) -> dict[str, str]:
    """Endpoints of a cluster's processes by its run file, unless name servers know them.

    Args:
        data_dir: The cluster's data folder; "" for none.

    Returns:
        Endpoints, with the public keys that are proved there; "" where nothing is encrypted.
    """
    record = read_record(Path(data_dir)) if data_dir else None
    return {
        entry.endpoint: entry.server_key
        for entry in (() if record is None else record.roles)
        if entry.role not in LISTED and entry.endpoint
    }

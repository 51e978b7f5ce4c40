"""Processes of a cluster by its run file: name servers know brokers only, and drop a silent one."""

from pathlib import Path
from typing import Final

from mqmesh.roles.supervisor.run_file import RoleEntry, read_record

SKIPPED_ROLES: Final = ("namesrv", "exporter", "monitor", "console")
"""Roles that need no run file to be found, or that no client connects to."""


def processes_beside(data_dir: str) -> list[RoleEntry]:
    """Processes of a cluster that are to be there, as its run file says.

    Args:
        data_dir: The cluster's data folder; "" for none.
    """
    record = read_record(Path(data_dir)) if data_dir else None
    return [
        entry
        for entry in (() if record is None else record.roles)
        if entry.endpoint and entry.role not in SKIPPED_ROLES and entry.state != "stopped"
    ]


def gateways_beside(data_dir: str) -> list[tuple[str, str]]:
    """Return name and endpoint of the gateways of a cluster on this machine."""
    return [(one.name, one.endpoint) for one in processes_beside(data_dir) if one.role == "gateway"]

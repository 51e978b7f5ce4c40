"""Which keys commands have: those of MQMESH_CREDENTIALS, or of the cluster in this folder."""

import os
from pathlib import Path

from mqmesh.sdk.client.options import CREDENTIALS_VARIABLE, namesrv_addresses
from mqmesh.security.keys import load_credentials


def use_credentials(path: Path) -> None:
    """Commands have these keys from now on, and so have the processes that they start."""
    os.environ[CREDENTIALS_VARIABLE] = str(path.absolute())


def use_credentials_of(data_dir: Path, namesrv: str) -> None:
    """Takes the keys that `mqmesh up --secure` made, if they are for these name servers.

    What MQMESH_CREDENTIALS says stands above them.

    Args:
        data_dir: Folder of a cluster.
        namesrv: Name servers that are to be asked.

    Raises:
        ConfigError: The file is there and cannot be used.
    """
    path = data_dir / "security" / "client.toml"
    if os.environ.get(CREDENTIALS_VARIABLE) or not path.exists():
        return
    theirs = load_credentials(path).namesrv_addr
    if theirs and set(namesrv_addresses(theirs)) & set(namesrv_addresses(namesrv)):
        use_credentials(path)

"""Keys and namespace of commands: of a context, of the environment, or of the cluster here."""

import os
from pathlib import Path

from mqmesh.namespaces import check_namespace
from mqmesh.sdk.client.options import (
    CREDENTIALS_VARIABLE,
    NAMESPACE_VARIABLE,
    namesrv_addresses,
)
from mqmesh.security.keys import load_credentials

from .contexts import find_cluster


def use_credentials(path: Path) -> None:
    """Commands have these keys from now on, and so have the processes that they start."""
    os.environ[CREDENTIALS_VARIABLE] = str(path.absolute())


def choose_cluster(
    namesrv_option: str | None, context: str | None, data_dir: Path, namespace: str | None = None
) -> str:
    """Find the cluster of a command, and use its keys and the namespace from now on.

    A context that is named overrides MQMESH_CREDENTIALS and MQMESH_NAMESPACE, and these override
    the context in use.

    Args:
        namesrv_option: Value of ``--namesrv``.
        context: ``--context``.
        data_dir: Folder of a cluster of this machine.
        namespace: ``--namespace``.

    Returns:
        The name servers.

    Raises:
        ConfigError: There is no such context, or its keys cannot be used.
        InvalidArgument: The namespace is none.
    """
    namesrv, keys, own = find_cluster(namesrv_option, context)
    is_in_environment = context is None and bool(os.environ.get(NAMESPACE_VARIABLE))
    if namespace is None and own and not is_in_environment:
        namespace = own
    if namespace is not None:
        os.environ[NAMESPACE_VARIABLE] = namespace and check_namespace(namespace)
    if keys and (context is not None or not os.environ.get(CREDENTIALS_VARIABLE)):
        load_credentials(Path(keys))
        use_credentials(Path(keys))
    use_credentials_of(data_dir, namesrv)
    return namesrv


def use_credentials_of(data_dir: Path, namesrv: str) -> None:
    """Takes the keys that `mqmesh up --secure` made, if they are for these name servers.

    MQMESH_CREDENTIALS overrides them.

    Args:
        data_dir: Folder of a cluster.
        namesrv: Name servers of the command.

    Raises:
        ConfigError: The file is there and cannot be used.
    """
    path = data_dir / "security" / "client.toml"
    if os.environ.get(CREDENTIALS_VARIABLE) or not path.exists():
        return
    theirs = load_credentials(path).namesrv_addr
    if theirs and set(namesrv_addresses(theirs)) & set(namesrv_addresses(namesrv)):
        use_credentials(path)

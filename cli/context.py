"""`mqmesh context`: names for clusters."""

from pathlib import Path
from typing import Any, Final

import click

from mqmesh.errors import ConfigError
from mqmesh.namespaces import check_namespace
from mqmesh.sdk.client.options import namesrv_addresses
from mqmesh.security.keys import load_credentials

from .contexts import Contexts, contexts_file, load_contexts, save_contexts
from .options import json_option
from .render import Column, print_answer, print_records

_COLUMNS: Final = (
    Column("context", "CONTEXT"),
    Column("namesrv", "NAME SERVERS"),
    Column("in_use", "IN USE"),
    Column("namespace", "NAMESPACE", rank=1),
    Column("credentials", "KEYS", rank=1),
)


@click.group()
def context() -> None:
    """Names for clusters, and which one commands use.

    Commands ask the name servers of --namesrv, else of MQMESH_NAMESRV, else of --context, else
    of the context in use, else those that `mqmesh up` starts here. A context may name a file with
    keys and a namespace, too.

    \b
    Examples:
      mqmesh context add production --namesrv 10.0.0.1:9876,10.0.0.2:9876
      mqmesh context use production
      mqmesh context list
      mqmesh --context production topic list
      mqmesh context remove production
    """


@context.command()
@click.argument("name")
@click.option("--namesrv", metavar="HOST:PORT,…", help="Its name servers. [default: of the keys]")
@click.option(
    "--credentials",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File with your keys, for a cluster with security on.",
)
@click.option("--namespace", metavar="NAME", default="", help="Namespace of topics and groups.")
@click.option("--use", "in_use", is_flag=True, help="Use it from now on.")
@json_option
def add(
    name: str, namesrv: str | None, credentials: Path | None, namespace: str, in_use: bool
) -> None:
    """Add a context, or give one other name servers, keys and namespace.

    Only the path of the file with your keys is kept, not the keys. MQMESH_CREDENTIALS stands above
    the keys of the context in use, and --context above MQMESH_CREDENTIALS.

    \b
    Examples:
      mqmesh context add test --namesrv 127.0.0.1:9876
      mqmesh context add production --credentials ~/keys/billing.toml --use
      mqmesh context add shop --namesrv 10.0.0.1:9876 --namespace shop
    """
    if not 0 < len(name) <= 255:
        raise ConfigError("a context's name has 1 to 255 characters")
    if namesrv is None and credentials is not None:
        namesrv = load_credentials(credentials).namesrv_addr
    if not namesrv:
        raise ConfigError("say --namesrv, or --credentials FILE with a namesrv_addr in the file")
    contexts = load_contexts()
    contexts.contexts[name] = namesrv_addresses(namesrv)
    contexts.credentials.pop(name, None)
    if credentials is not None:
        load_credentials(credentials)
        contexts.credentials[name] = str(credentials.absolute())
    contexts.namespaces.pop(name, None)
    if namespace:
        contexts.namespaces[name] = check_namespace(namespace)
    if in_use:
        contexts.current = name
    save_contexts(contexts)
    one = _as_dict(name, contexts)
    keys = f", keys of {one['credentials']}" if one["credentials"] else ""
    of = f", namespace {namespace}" if namespace else ""
    used = ", in use" if one["in_use"] else ""
    print_answer(one, f"context {name}: {one['namesrv']}{of}{keys}{used}")


@context.command()
@click.argument("name")
@json_option
def use(name: str) -> None:
    """Let commands use a context.

    \b
    Examples:
      mqmesh context use production
    """
    contexts = load_contexts()
    namesrv = contexts.namesrv(name)
    contexts.current = name
    save_contexts(contexts)
    print_answer(_as_dict(name, contexts), f"commands ask {namesrv} from now on")


@context.command("list")
@json_option
def list_contexts() -> None:
    """List all contexts.

    \b
    Examples:
      mqmesh context list
    """
    contexts = load_contexts()
    rows = [_as_dict(name, contexts) for name in sorted(contexts.contexts)]
    print_records(_COLUMNS, rows)


@context.command()
@click.argument("name")
@json_option
def remove(name: str) -> None:
    """Remove a context. The cluster itself is not touched.

    \b
    Examples:
      mqmesh context remove production
    """
    contexts = load_contexts()
    contexts.namesrv(name)
    if contexts.current == name:
        contexts.current = ""
    removed = _as_dict(name, contexts)
    del contexts.contexts[name]
    contexts.credentials.pop(name, None)
    contexts.namespaces.pop(name, None)
    save_contexts(contexts)
    print_answer(removed, f"context {name} is removed from {contexts_file()}")


def _as_dict(name: str, contexts: Contexts) -> dict[str, Any]:
    return {
        "context": name,
        "namesrv": contexts.namesrv(name),
        "namespace": contexts.namespaces.get(name, ""),
        "credentials": contexts.credentials.get(name, ""),
        "in_use": name == contexts.current,
    }

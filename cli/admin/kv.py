"""`mqmesh kv …`: the key/value configuration of the name servers."""

import click

from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin, NamesrvChange

from ..notes import print_error, warn_of_silent
from ..options import cluster_options, confirm, yes_option
from ..render import print_answer, print_as_is, print_table


@click.group()
def kv() -> None:
    """Small texts that name servers keep for clients and brokers, by namespace and key.

    \b
    Examples:
      mqmesh kv put shop currency EUR
      mqmesh kv get shop currency
      mqmesh kv list
      mqmesh kv list shop
      mqmesh kv delete shop currency
    """


@kv.command()
@click.argument("namespace")
@click.argument("key")
@click.argument("value")
@cluster_options
def put(namespace: str, key: str, value: str, namesrv: str) -> None:
    """Set KEY of NAMESPACE to VALUE, at every name server.

    \b
    Examples:
      mqmesh kv put shop currency EUR
    """
    with NamesrvAdmin(namesrv) as admin:
        done = admin.put_kv(namespace, key, value)
    _print_change(done, f"{namespace}/{key} is set")


@kv.command()
@click.argument("namespace")
@click.argument("key")
@cluster_options
def get(namespace: str, key: str, namesrv: str) -> None:
    """Print the value of KEY of NAMESPACE.

    \b
    Examples:
      mqmesh kv get shop currency
    """
    with NamesrvAdmin(namesrv) as admin:
        value = admin.get_kv(namespace, key)
    if print_answer({"namespace": namespace, "key": key, "value": value}):
        print_as_is(value.encode())


@kv.command()
@click.argument("namespace")
@click.argument("key")
@yes_option
@cluster_options
def delete(namespace: str, key: str, yes: bool, namesrv: str) -> int:
    """Remove KEY of NAMESPACE from every name server. Exit code 1 if none of them has it.

    \b
    Examples:
      mqmesh kv delete shop currency
    """
    confirm(
        "this removes the key and its value from every name server",
        f"Remove {namespace}/{key} from every name server?",
        yes=yes,
    )
    with NamesrvAdmin(namesrv) as admin:
        if not admin.has_kv(namespace, key):
            print_error(f"there is no key {key!r} in namespace {namespace!r}")
            return ExitCode.FAILED
        done = admin.delete_kv(namespace, key)
    _print_change(done, f"{namespace}/{key} is removed")
    return ExitCode.OK


@kv.command("list")
@click.argument("namespace", default="")
@cluster_options
def list_kv(namespace: str, namesrv: str) -> None:
    """List all keys, or those of NAMESPACE.

    \b
    Examples:
      mqmesh kv list
      mqmesh kv list shop
    """
    with NamesrvAdmin(namesrv) as admin:
        names = [namespace] if namespace else admin.kv_namespaces()
        found = {name: admin.list_kv(name) for name in names}
    if print_answer(found):
        print_table(
            ("NAMESPACE", "KEY", "VALUE"),
            [(name, key, found[name][key]) for name in found for key in sorted(found[name])],
        )


def _print_change(done: NamesrvChange, what: str) -> None:
    print_answer(done, f"{what} at {', '.join(done.namesrvs)}")
    warn_of_silent(done.silent_namesrvs)

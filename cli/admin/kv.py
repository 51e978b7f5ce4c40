"""`mqmesh kv …`: the key/value configuration of the name servers."""

import click

from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin, NamesrvChange

from ..notes import print_error, print_warning
from ..options import confirm, json_option, namesrv_option, yes_option
from ..render import print_answer, print_as_is, print_if_json, print_table


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
@namesrv_option
@json_option
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
@namesrv_option
@json_option
def get(namespace: str, key: str, namesrv: str) -> None:
    """Print the value of KEY of NAMESPACE.

    \b
    Examples:
      mqmesh kv get shop currency
    """
    with NamesrvAdmin(namesrv) as admin:
        value = admin.get_kv(namespace, key)
    if not print_if_json({"namespace": namespace, "key": key, "value": value}):
        print_as_is(value.encode())


@kv.command()
@click.argument("namespace")
@click.argument("key")
@yes_option
@namesrv_option
@json_option
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
@namesrv_option
@json_option
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
    if not print_if_json(found):
        print_table(
            ("NAMESPACE", "KEY", "VALUE"),
            [(name, key, found[name][key]) for name in found for key in sorted(found[name])],
        )


def _print_change(done: NamesrvChange, what: str) -> None:
    print_answer(done, f"{what} at {', '.join(done.namesrvs)}")
    if done.silent_namesrvs:
        print_warning(
            f"no answer from name server {', '.join(done.silent_namesrvs)}; repeat it later"
        )

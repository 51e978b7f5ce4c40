"""`mqmesh cluster export`, `cluster import`: the setup of a cluster as one document."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click

from mqmesh.errors import ConfigError
from mqmesh.logs import escape_json
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.cluster_admin import ClusterAdmin
from mqmesh.sdk.admin.cluster_plan import ImportAction, ImportStep, read_setup, write_setup

from ..notes import answers_json, print_error, print_note
from ..options import cluster_options
from ..render import Column, Table, counted, print_answer, print_text

STDOUT: Final = "-"
_STEPS: Final = (
    Column("action", "STEP"),
    Column("thing", "WHAT"),
    Column("broker_name", "BROKER"),
    Column("name", "NAME"),
    Column("detail", "DETAIL", str),
)


@click.command("export")
@click.argument("file")
@click.option("--configs", is_flag=True, help="Also the settings of brokers that are no default.")
@cluster_options
def export_cluster(file: str, configs: bool, namesrv: str) -> None:
    """Write topics, groups, key/value configuration and drained brokers into FILE; - prints them.

    No messages, no offsets, no keys of users.

    \b
    Examples:
      mqmesh cluster export cluster.json
      mqmesh cluster export - --configs
    """
    with ClusterAdmin(namesrv) as admin:
        setup = admin.export(configs=configs)
    text = escape_json(write_setup(setup).decode())
    if file == STDOUT:
        print_text(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    counts = {
        "brokers": len(setup.brokers),
        "topics": sum(len(one.topics) for one in setup.brokers.values()),
        "groups": sum(len(one.groups) for one in setup.brokers.values()),
        "keys": sum(map(len, setup.kv.values())),
    }
    text = ", ".join(counted(count, what[:-1]) for what, count in counts.items())
    print_answer({"file": file, **counts}, f"{file} has {text}")


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--prune", is_flag=True, help="Delete what FILE does not have.")
@click.option("--force", is_flag=True, help="Do also what loses messages, in spite of conflicts.")
@cluster_options
def import_cluster(
    file: Path, dry_run: bool, yes: bool, prune: bool, force: bool, namesrv: str
) -> int:
    """Set a cluster up as FILE says; `mqmesh cluster export` writes such files.

    First comes a plan. With conflicts nothing is done, unless --force. Repeating it does nothing.

    \b
    Examples:
      mqmesh cluster import cluster.json --dry-run
      mqmesh cluster import cluster.json --yes
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    wanted = read_setup(data, str(file))
    with ClusterAdmin(namesrv) as admin:
        steps = admin.plan_import(wanted, prune=prune, force=force)
        counts = Counter(one.action for one in steps)
        conflicts = counts[ImportAction.CONFLICT]
        todo = sum(
            counts[one] for one in (ImportAction.CREATE, ImportAction.CHANGE, ImportAction.DELETE)
        )
        if not answers_json():
            _print_plan(steps, counts)
        blocked = bool(conflicts) and not force
        if not (dry_run or blocked or yes or not todo):
            click.confirm(f"Do these {todo} steps?", abort=True)
        done = 0 if dry_run or blocked else admin.carry_out(wanted, steps)
    counted = {one.value: counts[one] for one in ImportAction}
    planned = [one for one in steps if one.action is not ImportAction.LEAVE]
    print_answer(
        {"file": str(file), "counts": counted, "steps": planned, "done": done},
        *([] if dry_run or blocked else [f"{done} steps are done"]),
    )
    if blocked and not dry_run:
        print_error(f"{conflicts} conflicts, so nothing was done; --force does the rest")
    return ExitCode.FAILED if conflicts else ExitCode.OK


def _print_plan(steps: Iterable[ImportStep], counts: Counter[ImportAction]) -> None:
    planned = [one for one in steps if one.action is not ImportAction.LEAVE]
    if planned:
        Table(_STEPS, planned).print()
    print_note(
        ", ".join(
            f"{counts[one]} to {one}"
            if one is not ImportAction.CONFLICT
            else f"{counts[one]} conflicts"
            for one in ImportAction
        )
    )

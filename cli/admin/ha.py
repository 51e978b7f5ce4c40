"""`mqmesh ha …`: replicas of broker groups."""

import time
from typing import Final

import click

from mqmesh.errors import MQMeshError
from mqmesh.protocol.replication import ChangeVotersResponse
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.sdk.admin.log_comparison import LogComparison, LogDifference
from mqmesh.sdk.admin.views.replicas import (
    GroupChangeView,
    LogView,
    cluster_settings_view,
    log_comparison_view,
    log_views,
    parted_logs,
)
from mqmesh.storage.interface import RecoveryProgress
from mqmesh.units import MIB

from ..notes import answers_json, print_error, print_note
from ..options import cluster_options
from ..progress_bar import progress_bar
from ..render import print_answer, print_table, say
from .ha_status import is_well, print_settings, print_status

WATCH_S: Final = 1.0
MOST_DIFFERENCES: Final = 10
"""Differences after which a comparison ends."""


@click.group()
def ha() -> None:
    """Replicas: how far followers are, and which of them is the master.

    \b
    Examples:
      mqmesh ha status
      mqmesh ha switch broker-a --to 2
      mqmesh ha promote broker-a 1
      mqmesh ha elect broker-a 2 --unclean
      mqmesh ha init broker-a
      mqmesh ha add broker-a 4
      mqmesh ha remove broker-a 3
      mqmesh ha pause broker-a
      mqmesh ha epochs broker-a
      mqmesh ha verify broker-a
      mqmesh ha settings --set lease_ttl_ms=5000
    """


@ha.command()
@click.argument("broker", default="")
@click.option("-w", "--watch", is_flag=True, help="Look again each second, until Ctrl-C.")
@cluster_options
def status(broker: str, watch: bool, namesrv: str) -> int:
    """Show the replicas of all broker groups, or of BROKER.

    Exit code 1 when one does not answer, or follows no leader.

    \b
    Examples:
      mqmesh ha status
      mqmesh ha status broker-a --watch
    """
    with HaAdmin(namesrv) as admin:
        while watch:
            _look(admin, broker)
            time.sleep(WATCH_S)
        reports = admin.ha_status(broker)
    print_status(reports)
    return ExitCode.OK if all(map(is_well, reports)) else ExitCode.FAILED


def _look(admin: HaAdmin, broker: str) -> None:
    """Shows the present state; after an error the command goes on."""
    try:
        reports = admin.ha_status(broker)
    except MQMeshError as error:
        print_error(str(error))
        return
    if not answers_json():
        click.clear()
    print_status(reports)


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@cluster_options
def promote(broker: str, broker_id: int, epoch: int, yes: bool, namesrv: str) -> int:
    """Make the follower BROKER_ID the master of BROKER, whose master is gone.

    Messages that the follower did not get from its master are lost to the group: those of a few
    milliseconds, or none where sends waited for a follower (ha.ack_replicas). Before the old
    master starts again, let it follow (broker_id, ha.master_addr).

    \b
    Examples:
      mqmesh ha promote broker-a 2
    """
    with HaAdmin(namesrv) as admin:
        if not yes:
            click.confirm(f"Shall replica {broker_id} be the master of {broker}?", abort=True)
        answer = admin.promote(broker, broker_id, epoch=epoch)
    print_answer(
        GroupChangeView(broker_name=broker, epoch=answer.epoch, offset=answer.offset),
        f"replica {broker_id} is the master of {broker} from epoch {answer.epoch}",
    )
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@click.option(
    "--to",
    "broker_id",
    type=click.IntRange(1, 64),
    help="Replica that is to lead. [default: the one with most of the log]",
)
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@cluster_options
def switch(broker: str, broker_id: int | None, epoch: int, namesrv: str) -> int:
    """Have the master of BROKER hand the lead over to another replica that is in sync.

    Nothing is lost, and clients see a short pause. For groups that elect their master (ha.mode
    "auto"): before its machine is taken down, or after it came back.

    \b
    Examples:
      mqmesh ha switch broker-a --to 2
    """
    with HaAdmin(namesrv) as admin:
        answer = admin.switch_over(broker, broker_id or 0, epoch=epoch)
    print_answer(
        GroupChangeView(broker_name=broker, broker_id=answer.replica_id, epoch=answer.epoch),
        f"replica {answer.replica_id} leads {broker} from epoch {answer.epoch}",
    )
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--unclean", is_flag=True, required=True, help="What it lacks is lost: you know.")
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@cluster_options
def elect(
    broker: str,
    broker_id: int,
    unclean: bool,
    epoch: int,
    yes: bool,
    namesrv: str,
) -> int:
    """Have replica BROKER_ID lead BROKER, whose replicas in sync are gone for good.

    It may lack messages that were acknowledged, and consumers may have seen them: they are lost.
    Replicas that come back later are cut to what it has.

    \b
    Examples:
      mqmesh ha elect broker-a 2 --unclean
    """
    with HaAdmin(namesrv) as admin:
        if not yes:
            click.confirm(
                f"What replica {broker_id} of {broker} lacks is lost. Shall it lead?", abort=True
            )
        admin.elect_unclean(broker, broker_id, epoch=epoch)
    print_answer(
        GroupChangeView(broker_name=broker, broker_id=broker_id),
        f"replica {broker_id} stands; `mqmesh ha status {broker}` shows when it leads",
    )
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@click.option(
    "--replicas",
    metavar="ID,…",
    default="",
    help="Replicas of the group. [default: 1 to ha.total_replicas]",
)
@cluster_options
def init(broker: str, replicas: str, namesrv: str) -> int:
    """Make the record of BROKER anew that its coordinator has lost.

    All replicas of the group have to be there, and no others. The one with most of the log leads
    then. Where replicas were added or removed, name the present ones.

    \b
    Examples:
      mqmesh ha init broker-a --replicas 1,2,3
    """
    names = [one.strip() for one in replicas.split(",") if one.strip()]
    wrong = [one for one in names if not one.isdecimal()]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is no id", param_hint="--replicas")
    with HaAdmin(namesrv) as admin:
        admin.init_group(broker, [int(one) for one in names])
    print_answer(
        GroupChangeView(broker_name=broker),
        f"the record of {broker} is made; `mqmesh ha status {broker}` shows who leads",
    )
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@cluster_options
def add(broker: str, broker_id: int, epoch: int, namesrv: str) -> int:
    """Have replica BROKER_ID belong to BROKER, whose replicas elect their master.

    Start it before or after that, with the group's settings and ha.total_replicas as large as its
    id at least. It gets the log, and comes in sync. No harm if it belongs to the group already.

    \b
    Examples:
      mqmesh ha add broker-a 4
    """
    with HaAdmin(namesrv) as admin:
        answer = admin.add_replica(broker, broker_id, epoch=epoch)
    return _print_voters(broker, answer)


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@cluster_options
def remove(broker: str, broker_id: int, epoch: int, namesrv: str) -> int:
    """Have replica BROKER_ID belong to BROKER no more: it is not waited for, and gets nothing.

    Its files stay where they are. Of the master: first have it hand the lead over (mqmesh ha
    switch). No harm if it does not belong to the group.

    \b
    Examples:
      mqmesh ha remove broker-a 4
    """
    with HaAdmin(namesrv) as admin:
        answer = admin.remove_replica(broker, broker_id, epoch=epoch)
    return _print_voters(broker, answer)


@ha.command()
@click.argument("broker")
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@cluster_options
def pause(broker: str, epoch: int, namesrv: str) -> int:
    """Have no master elected in BROKER when its master is missed, until `mqmesh ha resume`.

    For work on machines and networks. `mqmesh ha switch` works all the same, and a master that is
    started again leads again. While it stays away, the group has no master until `ha resume`.

    \b
    Examples:
      mqmesh ha pause broker-a
    """
    return _pause(broker, epoch, namesrv, paused=True)


@ha.command()
@click.argument("broker")
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@cluster_options
def resume(broker: str, epoch: int, namesrv: str) -> int:
    """Have another replica of BROKER elected again when its master is missed.

    \b
    Examples:
      mqmesh ha resume broker-a
    """
    return _pause(broker, epoch, namesrv, paused=False)


@ha.command()
@click.argument("broker", default="")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Have it everywhere.")
@click.option("--unset", multiple=True, metavar="KEY", help="Each replica's own counts again.")
@click.option("--version", default=0, help="Fail unless the settings have this version.")
@cluster_options
def settings(
    broker: str,
    sets: tuple[str, ...],
    unset: tuple[str, ...],
    version: int,
    namesrv: str,
) -> int:
    """Show or change the settings of a cluster that override those of its replicas.

    These are failsafe, lease_ttl_ms, min_in_sync_replicas and replica_lag_max_ms. The coordinator
    keeps them, and replicas use them within seconds. BROKER is the group that gets the request and
    is shown.

    \b
    Examples:
      mqmesh ha settings broker-a
    """
    pairs = [one.partition("=") for one in sets]
    wrong = [name for name, found, _ in pairs if not found]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not KEY=VALUE", param_hint="--set")
    changes = {name: value for name, _, value in pairs} | dict.fromkeys(unset)
    with HaAdmin(namesrv) as admin:
        if changes:
            found = admin.change_cluster_settings(changes, broker, version=version)
        else:
            found = admin.cluster_settings(broker)
        reports = admin.ha_status(broker)
    print_settings(cluster_settings_view(found, reports), reports)
    if changes and not answers_json():
        print_note("replicas use what has changed within 5 s; until then they may differ")
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@click.option("--last", default=20, help="So many epochs, the newest ones.", show_default=True)
@cluster_options
def epochs(broker: str, last: int, namesrv: str) -> int:
    """Show which epoch begins where in the log of each replica of BROKER, and where logs part.

    In an epoch one master writes. Logs with another history than the first one are cut where they
    part when they follow it. Exit code 1 when one has.

    \b
    Examples:
      mqmesh ha epochs broker-a --last 5
    """
    with HaAdmin(namesrv) as admin:
        logs = log_views(admin.epochs(broker))
    if print_answer(logs):
        _print_epochs(logs, last)
    return ExitCode.FAILED if parted_logs(logs) else ExitCode.OK


def _print_epochs(logs: list[LogView], last: int) -> None:
    numbers = sorted({each.epoch for one in logs for each in one.epochs})[-last:]
    starts = [{each.epoch: each.start for each in one.epochs} for one in logs]
    rows = [(number, *(one.get(number, "-") for one in starts)) for number in numbers]
    ends_row = ("log end", *(one.log_end for one in logs))
    print_table(("EPOCH", *(f"REPLICA {one.broker_id}" for one in logs)), [*rows, ends_row])
    for one in parted_logs(logs):
        where = "nothing in common"
        if one.common_end is not None:
            where = f"one history up to {one.common_end}"
        say(f"replicas {logs[0].broker_id} and {one.broker_id} have {where}")


@ha.command()
@click.argument("broker")
@click.option(
    "--rate",
    default=64,
    type=click.IntRange(1, 10_000),
    help="MiB that each replica reads a second, at most.",
    show_default=True,
)
@cluster_options
def verify(broker: str, rate: int, namesrv: str) -> int:
    """Compare the logs of all replicas of BROKER, as far as they must be the same.

    Each reads its log from the disk, a MiB at a time, and answers checksums. Exit code 1 when there
    is a difference; it ends after ten of them.

    \b
    Examples:
      mqmesh ha verify broker-a --rate 32
    """
    differences: list[LogDifference] = []
    last: LogComparison | None = None
    with HaAdmin(namesrv) as admin, progress_bar() as on_progress:
        for last in admin.compare_logs(broker, bytes_per_s=rate * MIB):
            done, size = last.compared - last.start, last.end - last.start
            on_progress(RecoveryProgress("comparing", done, size))
            if last.difference is not None:
                differences.append(last.difference)
                if len(differences) >= MOST_DIFFERENCES:
                    break
    found = log_comparison_view(broker, last, differences)
    lines = []
    for one in found.differences:
        ids = ", ".join(map(str, one.broker_ids))
        why = "".join(f"; replica {number}: {text}" for number, text in one.problems.items())
        lines.append(f"at {one.start} to {one.end}: replicas {ids} differ{why}")
    if last is None:
        lines.append("the logs have nothing to compare yet")
    elif not lines:
        ids = ", ".join(map(str, found.broker_ids))
        lines.append(f"replicas {ids} have the same bytes from {found.start} to {found.compared}")
    print_answer(found, *lines)
    return ExitCode.FAILED if differences else ExitCode.OK


def _pause(broker: str, epoch: int, namesrv: str, *, paused: bool) -> int:
    with HaAdmin(namesrv) as admin:
        answer = admin.pause_failover(broker, paused=paused, epoch=epoch)
    print_answer(
        GroupChangeView(broker_name=broker, epoch=answer.epoch, paused=paused),
        f"nobody stands in {broker} until `mqmesh ha resume {broker}`"
        if paused
        else f"another replica of {broker} stands when its master is missed",
    )
    return ExitCode.OK


def _print_voters(broker: str, answer: ChangeVotersResponse) -> int:
    ids = ", ".join(map(str, answer.voters))
    which, belong = ("replica", "belongs") if len(answer.voters) == 1 else ("replicas", "belong")
    print_answer(
        GroupChangeView(broker_name=broker, epoch=answer.epoch, voters=answer.voters),
        f"{which} {ids} {belong} to {broker}; `mqmesh ha status {broker}` shows more",
    )
    return ExitCode.OK

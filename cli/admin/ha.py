"""`mqmesh ha …`: replicas of broker groups."""

import click
import msgspec

from mqmesh.protocol.replication import ChangeVotersResponse
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.ha_admin import HaAdmin, ReplicaReport

from ..options import json_option, namesrv_option
from ..render import print_json, print_table
from .broker import figures_as_json


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
    """


@ha.command()
@click.argument("broker", default="")
@namesrv_option
@json_option
def status(broker: str, namesrv: str, as_json: bool) -> int:
    """Show the replicas of all broker groups, or of BROKER.

    Exit code 1 when one does not answer, or follows nobody.
    """
    with HaAdmin(namesrv) as admin:
        reports = admin.ha_status(broker)
    if as_json:
        print_json([msgspec.to_builtins(_as_map(report)) for report in reports])
    else:
        print_table(
            ("BROKER", "ID", "ROLE", "EPOCH", "LOG END", "ON DISK", "LAG", "STATE", "ENDPOINT"),
            [_row(report, reports) for report in reports],
        )
    is_good = all(one.status is not None and one.status.connected for one in reports)
    return ExitCode.OK if is_good else ExitCode.FAILED


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@namesrv_option
@json_option
def promote(broker: str, broker_id: int, epoch: int, yes: bool, namesrv: str, as_json: bool) -> int:
    """Make the follower BROKER_ID the master of BROKER, whose master is gone.

    What the follower had not got from its master is lost to the group: a few milliseconds of
    messages, or nothing where sends waited for a follower (ha.ack_replicas). Before the old
    master starts again, let it follow (broker_id, ha.master_addr).
    """
    with HaAdmin(namesrv) as admin:
        if not yes:
            click.confirm(f"Shall replica {broker_id} be the master of {broker}?", abort=True)
        answer = admin.promote(broker, broker_id, epoch=epoch)
    if as_json:
        print_json({"broker_name": broker, "epoch": answer.epoch, "offset": answer.offset})
    else:
        click.echo(f"replica {broker_id} is the master of {broker} from epoch {answer.epoch}")
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
@namesrv_option
@json_option
def switch(broker: str, broker_id: int | None, epoch: int, namesrv: str, as_json: bool) -> int:
    """Have the master of BROKER hand the lead over to another replica that is in sync.

    Nothing is lost, and clients see a short pause. For groups that elect their master (ha.mode
    "auto"): before its machine is taken down, or after it came back.
    """
    with HaAdmin(namesrv) as admin:
        answer = admin.switch_over(broker, broker_id or 0, epoch=epoch)
    if as_json:
        told = {"broker_name": broker, "broker_id": answer.replica_id, "epoch": answer.epoch}
        print_json(told)
    else:
        click.echo(f"replica {answer.replica_id} leads {broker} from epoch {answer.epoch}")
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--unclean", is_flag=True, required=True, help="What it lacks is lost: you know.")
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@namesrv_option
@json_option
def elect(
    broker: str,
    broker_id: int,
    unclean: bool,
    epoch: int,
    yes: bool,
    namesrv: str,
    as_json: bool,
) -> int:
    """Have replica BROKER_ID lead BROKER, whose replicas in sync are gone for good.

    It may lack messages that were acknowledged, and consumers may have seen them: they are lost.
    Replicas that come back later are cut to what it has.
    """
    with HaAdmin(namesrv) as admin:
        if not yes:
            click.confirm(
                f"What replica {broker_id} of {broker} lacks is lost. Shall it lead?", abort=True
            )
        admin.elect_unclean(broker, broker_id, epoch=epoch)
    if as_json:
        print_json({"broker_name": broker, "broker_id": broker_id})
    else:
        click.echo(f"replica {broker_id} stands; `mqmesh ha status {broker}` shows when it leads")
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@namesrv_option
@json_option
def init(broker: str, namesrv: str, as_json: bool) -> int:
    """Make the record of BROKER anew that its coordinator has lost.

    All replicas of the group have to be there. The one with most of the log leads then.
    """
    with HaAdmin(namesrv) as admin:
        admin.init_group(broker)
    if as_json:
        print_json({"broker_name": broker})
    else:
        click.echo(f"the record of {broker} is made; `mqmesh ha status {broker}` shows who leads")
    return ExitCode.OK


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@namesrv_option
@json_option
def add(broker: str, broker_id: int, epoch: int, namesrv: str, as_json: bool) -> int:
    """Have replica BROKER_ID belong to BROKER, whose replicas elect their master.

    Start it before or after that, with the group's settings and ha.total_replicas as large as its
    id at least. It gets the log, and comes in sync. No harm if it belongs to the group already.
    """
    with HaAdmin(namesrv) as admin:
        answer = admin.add_replica(broker, broker_id, epoch=epoch)
    return _show_voters(broker, answer, as_json=as_json)


@ha.command()
@click.argument("broker")
@click.argument("broker_id", type=click.IntRange(1, 64))
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@namesrv_option
@json_option
def remove(broker: str, broker_id: int, epoch: int, namesrv: str, as_json: bool) -> int:
    """Have replica BROKER_ID belong to BROKER no more: it is not waited for, and gets nothing.

    Its files stay where they are. Of the master: first have it hand the lead over (mqmesh ha
    switch). No harm if it does not belong to the group.
    """
    with HaAdmin(namesrv) as admin:
        answer = admin.remove_replica(broker, broker_id, epoch=epoch)
    return _show_voters(broker, answer, as_json=as_json)


@ha.command()
@click.argument("broker")
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@namesrv_option
@json_option
def pause(broker: str, epoch: int, namesrv: str, as_json: bool) -> int:
    """Have nobody elected in BROKER when its master is missed, until `mqmesh ha resume`.

    For work on machines and networks. `mqmesh ha switch` works all the same, and a master that is
    started again leads again. One that stays away is missed until somebody resumes.
    """
    return _pause(broker, epoch, namesrv, paused=True, as_json=as_json)


@ha.command()
@click.argument("broker")
@click.option("--epoch", default=0, help="Fail unless this is the newest epoch.")
@namesrv_option
@json_option
def resume(broker: str, epoch: int, namesrv: str, as_json: bool) -> int:
    """Have another replica of BROKER elected again when its master is missed."""
    return _pause(broker, epoch, namesrv, paused=False, as_json=as_json)


def _pause(broker: str, epoch: int, namesrv: str, *, paused: bool, as_json: bool) -> int:
    with HaAdmin(namesrv) as admin:
        answer = admin.pause_failover(broker, paused=paused, epoch=epoch)
    if as_json:
        print_json({"broker_name": broker, "epoch": answer.epoch, "paused": paused})
    elif paused:
        click.echo(f"nobody stands in {broker} until `mqmesh ha resume {broker}`")
    else:
        click.echo(f"another replica of {broker} stands when its master is missed")
    return ExitCode.OK


def _show_voters(broker: str, answer: ChangeVotersResponse, *, as_json: bool) -> int:
    if as_json:
        told = {"broker_name": broker, "epoch": answer.epoch, "voters": answer.voters}
        print_json(told)
    else:
        ids = ", ".join(map(str, answer.voters))
        click.echo(f"replicas {ids} belong to {broker}; `mqmesh ha status {broker}` shows them")
    return ExitCode.OK


def _as_map(report: ReplicaReport) -> dict[str, object]:
    told: dict[str, object] = {
        "broker_name": report.broker_name,
        "broker_id": report.broker_id,
        "endpoint": report.endpoint,
        "problem": report.problem,
    }
    if report.status is not None:
        names = report.status.__struct_fields__
        told["status"] = {
            name: getattr(report.status, name) for name in names if name != "replicas"
        }
        told["followers"] = [
            {name: getattr(one, name) for name in one.__struct_fields__}
            for one in report.status.replicas
        ]
        told["figures"] = figures_as_json(report.figures)
    return told


def _row(report: ReplicaReport, reports: list[ReplicaReport]) -> tuple[str, ...]:
    status, which = report.status, (report.broker_name, str(report.broker_id))
    if status is None:
        return (*which, "?", "-", "-", "-", "-", report.problem, report.endpoint)
    masters = [
        one.status.log_end
        for one in reports
        if one.broker_name == report.broker_name and one.status and one.status.role == "MASTER"
    ]
    end = max(masters, default=status.leader_end)
    is_master = status.role.endswith("MASTER")
    state = f"{len(status.replicas)} followers" if is_master else "streaming"
    if status.in_sync:
        state += f", in sync: {' '.join(map(str, status.in_sync))}"
    return (
        *which,
        status.role,
        str(status.epoch),
        str(status.log_end),
        str(status.durable_end),
        "-" if is_master else str(max(end - status.log_end, 0)),
        state if status.connected else f"no word from {status.leader}",
        report.endpoint,
    )

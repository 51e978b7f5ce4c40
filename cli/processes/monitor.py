"""`mqmesh monitor`: alarms without Prometheus."""

from typing import Final

import click
import msgspec

from mqmesh.clock import SystemClock
from mqmesh.roles.exporter.alarm_board import Alarm
from mqmesh.roles.exporter.monitor import Monitor, MonitorRole
from mqmesh.roles.exporter.monitor_config import MonitorConfig
from mqmesh.roles.process import ExitCode

from ..options import cluster_options
from ..render import Column, print_answer, print_records, timestamp
from .serve import ProcessOptions, process_options

_ALARMS: Final = (
    Column("since_ms", "SINCE", timestamp, rank=2),
    Column("severity", "SEVERITY", rank=1),
    Column("alarm", "ALARM"),
    Column("summary", "WHAT IS WRONG"),
)


@click.command()
@click.option(
    "--once",
    is_flag=True,
    help="Look once; exit code 1 if there are alarms, 0 if not.",
)
@process_options
@cluster_options
def monitor(process: ProcessOptions, once: bool, namesrv: str) -> int:
    """Watch a cluster, and report alarms: in the log, to a program, to a web service.

    With --once it looks, prints the alarms, and ends: for cron. Conditions that must last before
    they are an alarm count at once then; growth is known from the second look on, with a
    state_file.

    \b
    Examples:
      mqmesh monitor --namesrv 10.0.0.1:9876
      mqmesh monitor -c conf/monitor.toml
      mqmesh monitor --once --set state_file=/var/lib/mqmesh/monitor.json
    """
    config = process.load(MonitorConfig, namesrv)
    if once:
        # The printed alarms suffice; the log would repeat them.
        notify = msgspec.structs.replace(config.notify, log=False)
        watching = Monitor(msgspec.structs.replace(config, notify=notify), SystemClock())
        try:
            alarms = watching.look(at_once=True)
        finally:
            watching.close()
        _print_alarms(alarms)
        return ExitCode.FAILED if alarms else ExitCode.OK
    return process.serve(
        "monitor",
        "monitor",
        lambda transport: MonitorRole(Monitor(config, transport.clock), config),
    )


def _print_alarms(alarms: list[Alarm]) -> None:
    if not alarms:
        print_answer(alarms, "no alarm")
    else:
        print_records(_ALARMS, alarms)

"""`mqmesh monitor`: alarms without Prometheus."""

import click
import msgspec

from mqmesh.clock import SystemClock
from mqmesh.roles.exporter.alarm_board import Alarm
from mqmesh.roles.exporter.monitor import Monitor, MonitorRole
from mqmesh.roles.exporter.monitor_config import MonitorConfig
from mqmesh.roles.process import ExitCode

from ..options import json_option, namesrv_option
from ..render import print_json, print_table, say, timestamp
from .serve import ProcessOptions, process_options

COLUMNS = ("SINCE", "SEVERITY", "ALARM", "WHAT IS WRONG")


@click.command()
@click.option(
    "--once",
    is_flag=True,
    help="ClusterObservation once; exit code 1 if there are alarms, 0 if not.",
)
@process_options
@namesrv_option
@json_option
def monitor(process: ProcessOptions, once: bool, namesrv: str, as_json: bool) -> int:
    """Watch a cluster, and tell of what is wrong: in the log, to a program, to a web service.

    With --once it looks, prints what is wrong, and ends: for cron. What must last before it is an
    alarm counts at once then; what grows is known from the second look on, with a state_file.

    \b
    Examples:
      mqmesh monitor --namesrv 10.0.0.1:9876
      mqmesh monitor -c conf/monitor.toml
      mqmesh monitor --once --set state_file=/var/lib/mqmesh/monitor.json
    """
    config = process.load(MonitorConfig, namesrv)
    if once:
        # What it prints says it all.
        notify = msgspec.structs.replace(config.notify, log=False)
        watching = Monitor(msgspec.structs.replace(config, notify=notify), SystemClock())
        try:
            alarms = watching.look(at_once=True)
        finally:
            watching.close()
        _show(alarms, as_json)
        return ExitCode.FAILED if alarms else ExitCode.OK
    return process.serve(
        "monitor",
        "monitor",
        lambda transport: MonitorRole(Monitor(config, transport.clock), config),
    )


def _show(alarms: list[Alarm], as_json: bool) -> None:
    if as_json:
        print_json(alarms)
    elif alarms:
        print_table(
            COLUMNS,
            [(timestamp(one.since_ms), one.severity, one.alarm, one.summary) for one in alarms],
        )
    else:
        say("no alarm")

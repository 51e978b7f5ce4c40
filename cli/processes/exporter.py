"""`mqmesh exporter boards`: dashboards for Grafana and rules for Prometheus, as files."""

from importlib import resources
from pathlib import Path
from typing import Final

import click

from mqmesh.roles.process import ExitCode

from ..options import json_option
from ..render import print_answer

ROOM: Final = "mqmesh.roles.exporter"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@json_option
def boards(folder: Path) -> int:
    """Write boards for Grafana and alert rules for Prometheus into FOLDER.

    Files of the same names are replaced.

    \b
    Examples:
      mqmesh exporter boards /etc/grafana/boards
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in sorted(resources.files(ROOM).joinpath("boards").iterdir(), key=lambda one: one.name):
        (folder / one.name).write_bytes(one.read_bytes())
        written.append(str(folder / one.name))
    print_answer({"written": written}, *written)
    return ExitCode.OK

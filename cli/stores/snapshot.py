"""`mqmesh snapshot`: hot backups of a broker, and stores made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from mqmesh.errors import ConfigError, MQMeshError
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.storage.interface import RecoveryProgress
from mqmesh.storage.tools.snapshot import Manifest, delete_snapshot, list_snapshots
from mqmesh.storage.tools.snapshot_making import OnStep, copy_snapshot, restore_snapshot
from mqmesh.storage.tools.snapshot_reading import Snapshot, verify_snapshot

from ..notes import answers_json, print_error, print_note
from ..options import cluster_options, confirm, json_option, yes_option
from ..progress_bar import progress_bar
from ..render import Column, Table, print_answer, print_json, say, timestamp

DEFAULT_ROOT: Final = Path("./mqmesh-data/snapshots")

_LISTED: Final = (
    *("broker_name", "store_id", "epoch", "start_offset", "end_offset", "created_ms"),
    *("disk_bytes", "archive"),
)
_SNAPSHOTS: Final = (
    Column("path", "SNAPSHOT", lambda path: Path(path).name),
    Column("broker_name", "BROKER"),
    Column("created_ms", "MADE", timestamp),
    Column("start_offset", "FROM", rank=2),
    Column("end_offset", "TO", rank=1),
    Column("disk_bytes", "BYTES"),
    Column("archive", "WAITS FOR", rank=3),
)

_path = click.argument("path", type=click.Path(path_type=Path))


@click.group()
def snapshot() -> None:
    """Back up a running broker, and start from a backup.

    A snapshot is a directory that holds the log up to one position, the index, topics, groups and
    offsets. On the file system of the store it is made of links, so it takes little time and room.

    \b
    Examples:
      mqmesh snapshot create broker-a
      mqmesh snapshot list
      mqmesh snapshot verify mqmesh-data/snapshots/broker-a.20260301T040000000Z.4711
      mqmesh snapshot restore mqmesh-data/snapshots/broker-a.20260301T040000000Z.4711 new/broker-a
    """


@snapshot.command()
@click.argument("broker")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Copy it into this directory, too; the broker must be on this machine.",
)
@cluster_options
def create(broker: str, output: Path | None, namesrv: str) -> int:
    """Have BROKER, a broker group's name, make a snapshot while it goes on.

    It lies on the broker's machine in snapshot.root_dir, and is printed once it is whole.

    \b
    Examples:
      mqmesh snapshot create broker-a
      mqmesh snapshot create broker-a -o /backup
    """
    with AdminClient(namesrv) as admin:
        info = admin.create_snapshot(broker)
    path = Path(info.path)
    if output is not None:
        if not path.is_dir():
            raise ConfigError(
                f"the snapshot is on the broker's machine, in {path}; --output works only there"
            )
        output.mkdir(parents=True, exist_ok=True)
        with _steps() as on_step:
            copy_snapshot(path, output / path.name, on_step=on_step)
        path = output / path.name
    print_answer(
        {
            "path": str(path),
            "broker_name": info.broker_name,
            "start_offset": info.start_offset,
            "end_offset": info.end_offset,
            "messages": info.messages,
            "disk_bytes": info.disk_bytes,
            "files": info.file_count,
            "took_ms": info.took_ms,
        },
        str(path),
        f"log {info.start_offset} to {info.end_offset}, {info.messages:,} messages, "
        f"{info.disk_bytes:,} bytes in {info.file_count} files, {info.took_ms / 1000:.2f} s",
    )
    return ExitCode.OK


@snapshot.command("list")
@click.argument("root", type=click.Path(path_type=Path), default=DEFAULT_ROOT)
@json_option
def list_command(root: Path) -> int:
    """Print the snapshots in ROOT, oldest first.

    \b
    Examples:
      mqmesh snapshot list
      mqmesh snapshot list /backup --json
    """
    code = ExitCode.OK
    found = [(path, manifest) for path, manifest in list_snapshots(root)]
    rows = [
        {"path": str(path)} | {name: getattr(manifest, name) for name in _LISTED}
        for path, manifest in found
        if isinstance(manifest, Manifest)
    ]
    for _, problem in found:
        if not isinstance(problem, Manifest):
            code = ExitCode.FAILED
            print_error(str(problem))
    if answers_json():
        for row in rows:
            print_json(row)
    else:
        Table(_SNAPSHOTS, rows).print()
    return code


@snapshot.command()
@_path
@json_option
def verify(path: Path) -> int:
    """Read all of a snapshot, and report damage.

    Nothing is changed. The exit code is 1 if something is damaged, 2 if it is no snapshot.

    \b
    Examples:
      mqmesh snapshot verify mqmesh-data/snapshots/broker-a.20260301T040000000Z.4711
    """
    opened = Snapshot(path)
    with _steps() as on_step:
        report = verify_snapshot(
            opened,
            lambda progress: on_step(progress.step, progress.done_bytes, progress.total_bytes),
        )
    if print_answer(report):
        manifest = opened.manifest
        say(
            f"{manifest.broker_name}: {report.batches:,} batches, {report.messages:,} messages, "
            f"log {manifest.start_offset} to {manifest.end_offset}"
        )
        for lost in report.damage:
            say(f"damaged: log {lost.start_offset} to {lost.end_offset}: {lost.reason}")
        for name in report.damaged_files:
            say(f"damaged: {name} fails its checksum")
        if report.further_damage:
            say(f"damaged: {report.further_damage:,} further ranges")
        if report.sound:
            say("sound")
    return ExitCode.OK if report.sound else ExitCode.FAILED


@snapshot.command()
@_path
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--damaged", is_flag=True, help="Also where the log is damaged; it is lost there.")
@json_option
def restore(path: Path, directory: Path, damaged: bool) -> int:
    """Make a store of a snapshot in DIRECTORY, which must be empty or missing.

    A broker whose store_path_root_dir it is goes on where the snapshot ends, with its topics,
    groups and offsets. It must have the old broker's name, which must not run any more. All of
    the snapshot is read and checked first; a damaged one is refused.

    \b
    Examples:
      mqmesh snapshot restore /backup/broker-a.20260301T040000000Z.4711 mqmesh-data/broker-a
    """
    with _steps() as on_step:
        manifest = restore_snapshot(path, directory, damaged=damaged, on_step=on_step)
    print_answer(
        {"directory": str(directory), "end_offset": manifest.end_offset},
        f"{directory} holds the store of {manifest.broker_name} up to {manifest.end_offset}",
    )
    return ExitCode.OK


@snapshot.command()
@click.argument("paths", type=click.Path(path_type=Path), nargs=-1, required=True)
@yes_option
@json_option
def delete(paths: tuple[Path, ...], yes: bool) -> int:
    """Remove snapshots.

    \b
    Examples:
      mqmesh snapshot delete mqmesh-data/snapshots/broker-a.20260301T040000000Z.4711
    """
    count = f"{len(paths)} snapshot{'' if len(paths) == 1 else 's'}"
    confirm(f"this removes {count} with all files", f"Remove {count} with all files?", yes=yes)
    deleted: list[str] = []
    try:
        for path in paths:
            delete_snapshot(path)
            deleted.append(str(path))
    except MQMeshError:
        if deleted:
            print_note(f"deleted already: {', '.join(deleted)}")
        raise
    print_answer({"deleted": deleted}, f"{len(deleted)} deleted")
    return ExitCode.OK


@contextmanager
def _steps() -> Iterator[OnStep]:
    with progress_bar() as on_progress:
        yield lambda step, done, total: on_progress(RecoveryProgress(step, done, total))

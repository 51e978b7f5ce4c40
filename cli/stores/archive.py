"""`mqmesh archive`: messages kept beyond their time in a broker, and questions about them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial, wraps
from pathlib import Path
from time import monotonic
from typing import Any, Final

import click
import msgspec
from click.core import ParameterSource

from mqmesh.clock import SystemClock
from mqmesh.errors import ConfigError, MQMeshError, StorageError
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.interrupt import Interrupt
from mqmesh.storage.tools.snapshot import delete_snapshot
from mqmesh.storage.tools.snapshot_keeping import waiting_snapshots
from mqmesh.user_times import TIME_HELP, parse_time

from ..notes import Options, answers_json, print_error, print_note, print_progress
from ..options import cluster_options, confirm, json_option, yes_option
from ..progress_bar import share_bar
from ..render import (
    Column,
    Table,
    counted,
    print_answer,
    print_as_is,
    print_json,
    print_table,
    say,
)
from ..streams import standard_output
from .archive_export import export
from .archive_parts import (
    SPAN_SECONDS,
    archive_module,
    errors_of_libraries,
    plain_row,
    span_seconds,
)

SHOWN_BODY: Final = 200
_SOURCES: Final = (
    Column("broker", "BROKER"),
    Column("store_id", "STORE", lambda store_id: f"{store_id:08x}"),
    Column("position", "POSITION"),
    Column("keys_position", "KEYS TO"),
    Column("ingests", "INGESTS", len),
    Column("gaps", "MISSING BYTES", lambda gaps: sum(one.gap_before for one in gaps)),
)
_DAYS: Final = (
    Column("dt", "DAY"),
    Column("rows", "MESSAGES"),
    Column("bytes", "BYTES"),
    Column("files", "FILES"),
)

_TOPICS: Final = (
    Column("topic", "TOPIC"),
    Column("messages", "MESSAGES"),
    Column("first_day", "FIRST DAY"),
    Column("last_day", "LAST DAY"),
)

_Start = Callable[..., AbstractContextManager[Any]]

_archive = click.argument("archive", metavar="ARCHIVE")
_verbose = click.option(
    "-v", "--verbose", is_flag=True, help="Show what Java, Ivy and Spark write, too."
)
_conf = click.option(
    "--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark. Repeatable."
)
_to = click.option("--to", "archive", required=True, metavar="ARCHIVE", help="The archive.")


def _spark_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds options of Spark; the command gets ``start``, whose session ends with its block."""

    @wraps(function)
    def command(
        *args: Any,
        master: str,
        cores: int,
        memory: str,
        jars: Path | None,
        conf: tuple[str, ...],
        verbose: bool,
        **rest: Any,
    ) -> Any:
        extra = dict(_setting(text) for text in conf)
        start = partial(
            _session,
            verbose=verbose,
            master=master,
            cores=cores,
            memory=memory,
            jars=jars,
            extra=extra,
        )
        return function(*args, start=start, **rest)

    for option in (
        _verbose,
        _conf,
        click.option("--jars", type=click.Path(path_type=Path), help="Delta Lake's jars."),
        click.option("--memory", default="1g", show_default=True, help="Java's heap."),
        click.option(
            "--cores",
            default=2,
            type=click.IntRange(1),
            show_default=True,
            help="Tasks of Spark that run at once on this machine.",
        ),
        click.option("--master", default="", help="A Spark cluster, e.g. spark://host:7077."),
    ):
        command = option(command)
    return command


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--conf {text!r}: write KEY=VALUE")
    return key, value


def _ingest_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds options of ingests, and those of Spark, whose ``start`` then starts the engine."""

    @_spark_options
    @wraps(function)
    def command(*args: Any, engine: str, start: _Start, **rest: Any) -> Any:
        if engine == "local":
            context = click.get_current_context()
            for name in ("master", "cores", "memory", "jars", "conf"):
                if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                    raise ConfigError(f"--{name} is for Spark, and --engine local does without it")
            start = nullcontext
        return function(*args, start=start, **rest)

    for option in (
        click.option(
            "--engine",
            type=click.Choice(["spark", "local"]),
            default="spark",
            show_default=True,
            help="What writes the tables: Spark, or this process alone, without Java.",
        ),
        click.option(
            "--on-damage",
            type=click.Choice(["fail", "skip"]),
            default="fail",
            show_default=True,
            help="What to do about damaged stretches of the log.",
        ),
        click.option("--allow-gap", is_flag=True, help="Go on where retention was quicker."),
    ):
        command = option(command)
    return command


class ArchiveGroup(click.Group):
    """Commands whose libraries fail in words of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        """Calls the command."""
        with errors_of_libraries():
            return super().invoke(ctx)


@click.group(cls=ArchiveGroup)
def archive() -> None:
    """Keep messages in Delta Lake tables, and ask them by SQL.

    \b
    Examples:
      mqmesh snapshot create broker-a
      mqmesh archive ingest mqmesh-data/snapshots/broker-a.* --to archive
      mqmesh archive status archive
      mqmesh archive find archive --topic orders --key 4711
      mqmesh archive sql archive "select topic, count(*) from messages group by topic"
    """


archive.add_command(export)


@archive.command()
@click.argument("snapshots", nargs=-1, required=True, type=click.Path(path_type=Path))
@_to
@click.option("--as", "name", default="", help="Name of the broker in the archive.")
@_ingest_options
@json_option
def ingest(
    snapshots: tuple[Path, ...],
    archive: str,
    name: str,
    allow_gap: bool,
    on_damage: str,
    start: _Start,
) -> int:
    """Take SNAPSHOTS into an archive. Repeat it as you like: nothing comes twice.

    \b
    Examples:
      mqmesh archive ingest mqmesh-data/snapshots/broker-a.20260301T040000000Z.4711 --to archive
      mqmesh archive ingest mqmesh-data/snapshots/broker-a.* --to archive --engine local
    """
    options = {"name": name, "allow_gap": allow_gap, "on_damage": on_damage}
    with start() as spark:
        for path in snapshots:
            _take_in(spark, path, archive, **options)
    return ExitCode.OK


def _take_in(spark: Any, path: Path, archive: str, **options: Any) -> None:
    """Takes in a snapshot; prints its progress and its result."""
    title = f"taking in {path.name}"
    with share_bar(title) as update:
        began = monotonic()

        def on_progress(progress: Any) -> None:
            text = title
            if progress.messages is not None:
                rate = progress.messages / max(monotonic() - began, 0.001)
                text = f"{title}: {progress.messages:,} messages, {rate:,.0f}/s"
            if update is not None:
                update(description=text, completed=progress.done, total=progress.total)

        work = archive_module("ingest", "archive" if spark is None else "spark")
        report = work.ingest(
            spark, str(path), archive, on_progress=on_progress if update else None, **options
        )
    size = report.to_offset - report.from_offset
    what = f"{size:,} bytes of log, now at {report.to_offset}" if size else "nothing new"
    gap = f"; {report.gap_before:,} bytes before are missing" if report.gap_before else ""
    print_answer(report, f"{report.snapshot}: {what}{gap}")


@archive.command()
@_archive
@click.option("--topics", "with_topics", is_flag=True, help="Count each topic; it reads a column.")
@json_option
def status(archive: str, with_topics: bool) -> int:
    """Print the position of an archive, the gaps in it, and its messages by day.

    \b
    Examples:
      mqmesh archive status archive
      mqmesh archive status archive --topics
    """
    tables = archive_module("tables")
    sources, days = tables.sources(archive), tables.days(archive)
    topics = tables.topics(archive) if with_topics else None
    if print_answer({"sources": sources, "days": days, "topics": topics}):
        Table(_SOURCES, sources).print()
        say()
        Table(_DAYS, days).print()
        if topics is not None:
            say()
            Table(_TOPICS, topics).print()
    return ExitCode.OK


@archive.command()
@_archive
@click.option("-t", "--topic", default="", help="Only of this topic.")
@click.option("-k", "--key", default="", help="Only with this key.")
@click.option("--id", "message_id", default="", help="Only with this message id.")
@click.option(
    "--from", "from_text", metavar="TIME", help=f"Stored at this time or later: {TIME_HELP}."
)
@click.option("--to", "to_text", metavar="TIME", help="Stored at this time or before, UTC.")
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Show so many messages at most.",
)
@click.option("--body", is_flag=True, help="Print bodies alone, as they are.")
@json_option
def find(
    archive: str,
    topic: str,
    key: str,
    message_id: str,
    from_text: str | None,
    to_text: str | None,
    most: int,
    body: bool,
) -> int:
    """Look messages up, without Java.

    \b
    Examples:
      mqmesh archive find archive --topic orders --key 4711
      mqmesh archive find archive --id 0C6A9F0E5D3B7A12000000000000002A --json
    """
    now_ms = SystemClock().wall_ms()
    found = archive_module("find").find(
        archive,
        topic=topic,
        key=key,
        message_id=message_id,
        from_ms=None if from_text is None else parse_time(from_text, now_ms, "--from"),
        to_ms=None if to_text is None else parse_time(to_text, now_ms, "--to"),
        most=most,
    )
    for row in found.rows:
        if body:
            print_as_is(row["body"])
        elif answers_json():
            print_json(plain_row(row), flush=False)
        else:
            text = row["body"][:SHOWN_BODY].decode("utf-8", "replace")
            place = f"{row['broker']}/{row['topic']}/{row['queue_id']}@{row['queue_offset']}"
            moment = row["store_timestamp"].strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
            say("  ".join([moment, place, row["message_id"], text]))
    standard_output().flush()
    _note_rest(len(found.rows), more=found.more)
    return ExitCode.OK if found.rows else ExitCode.FAILED


@archive.command()
@_archive
@click.argument("text", metavar="SELECT")
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1),
    default=1_000,
    show_default=True,
    help="Show so many rows at most.",
)
@click.option(
    "--values",
    multiple=True,
    metavar="TOPIC",
    help="Parse bodies of TOPIC (or of all that begin so, with * behind) as JSON into the column "
    "value, a VARIANT; null where one is no JSON. Repeatable.",
)
@_spark_options
@json_option
def sql(
    archive: str,
    text: str,
    most: int,
    values: tuple[str, ...],
    start: _Start,
) -> int:
    """Ask the views messages, keys and ingests. It writes nothing.

    \b
    Examples:
      mqmesh archive sql archive "select tag, count(*) from messages group by tag"
      mqmesh archive sql archive --values orders "select value from messages where topic = 'orders'"
    """
    with start(is_short=True) as spark:  # it says what is missing for Spark
        frame = archive_module("maintenance").query(spark, archive, text, values=values)
        found = frame.limit(most + 1).collect()
        rows = found[:most]
        if answers_json():
            for row in rows:
                print_json({k: _plain(v) for k, v in row.asDict().items()}, flush=False)
        else:
            print_table(frame.columns, [[_shown(value) for value in row] for row in rows])
        standard_output().flush()
        if len(found) > most:
            print_note(f"there are more rows than these {most:,}; --max shows further ones")
    return ExitCode.OK


@archive.command()
@_archive
@_spark_options
@json_option
def verify(archive: str, start: _Start) -> int:
    """Count all messages, and compare the table of keys with them.

    \b
    Examples:
      mqmesh archive verify archive
    """
    with start() as spark:
        report = archive_module("maintenance").verify(spark, archive)
    if print_answer(report):
        say(f"{report.rows:,} messages")
        for gap in report.gaps:
            say(f"missing: {gap}")
        if report.duplicates:
            say(f"damaged: {report.duplicates:,} messages are there twice")
        if report.keys_missing:
            say(f"damaged: {report.keys_missing:,} keys cannot be looked up")
        if report.keys_left:
            say(f"damaged: {report.keys_left:,} keys are of messages that are gone")
        if report.sound:
            say("sound")
    return ExitCode.OK if report.sound else ExitCode.FAILED


@archive.command()
@_archive
@click.option("--since", default="", metavar="DAY", help="Only days (UTC) from this one on.")
@json_option
def compact(archive: str, since: str) -> int:
    """Make large files of small ones, so that queries open fewer. Keys of past months are sorted.

    It needs no Java; the messages of the files that it replaces are counted and hashed, before and
    after.

    \b
    Examples:
      mqmesh archive compact archive --since 2026-03-01
    """
    today = datetime.now(UTC).date()
    done = archive_module("compaction").compact(archive, today, since=since)
    print_answer(done, f"{done['files_before']:,} files became {done['files_after']:,}")
    return ExitCode.OK


@archive.command()
@_archive
@click.option(
    "--older-than", default="", metavar="AGE", help="As 400d; whole days go. Else: archive.toml."
)
@click.option("-t", "--topic", default="", help="Only of this topic.")
@yes_option
@json_option
def expire(archive: str, older_than: str, topic: str, yes: bool) -> int:
    """Forget old messages. Their files go with `mqmesh archive vacuum`.

    Without --older-than it follows expire_days of archive.toml in ARCHIVE.

    \b
    Examples:
      mqmesh archive expire archive --older-than 400d
      mqmesh archive expire archive --yes
    """
    if topic and not older_than:
        raise ConfigError("--topic: say how old, --older-than AGE")
    days = span_seconds(older_than) // SPAN_SECONDS["d"] if older_than else 0
    if older_than and not days:
        raise ConfigError(f"--older-than {older_than!r}: whole days go, so write 1d or more")
    age = f"messages older than {days} days" if days else "the messages that archive.toml names"
    which = f"{age} of topic {topic}" if topic else age
    confirm(
        f"this deletes {which} from the archive", f"Delete {which} from archive {archive}?", yes=yes
    )
    today = datetime.now(UTC).date()
    work = archive_module("forgetting")
    if older_than:
        before = (today - timedelta(days=days)).isoformat()
        gone = work.expire(archive, before=before, topic=topic)
    else:
        gone = work.expire_by_settings(archive, today)
    print_answer({"messages": gone}, _gone(gone))
    return ExitCode.OK


@archive.command()
@_archive
@click.option("-t", "--topic", default="", help="Messages of this topic.")
@click.option("-k", "--key", default="", help="Messages with this key.")
@click.option("--id", "message_id", default="", help="Messages with this id.")
@click.option(
    "--where",
    default="",
    metavar="CONDITION",
    help="Messages that fulfil a condition of `mqmesh archive sql`; it starts Spark.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@yes_option
@_spark_options
@json_option
def forget(
    archive: str,
    topic: str,
    key: str,
    message_id: str,
    where: str,
    dry_run: bool,
    yes: bool,
    start: _Start,
) -> int:
    """Delete messages that fulfil all conditions, and their keys; first it shows how many.

    Brokers have them still, and so do old versions of the archive until `mqmesh archive vacuum`.

    \b
    Examples:
      mqmesh archive forget archive --topic orders --key customer-4711
      mqmesh archive forget archive --where "json(body, '$.customer') = '4711'" --dry-run
    """
    work = archive_module("forgetting")
    conditions = {"topic": topic, "key": key, "message_id": message_id, "where": where}
    with start() if where else nullcontext() as spark:
        choice = work.choose(archive, spark=spark, **conditions)
    count = choice.messages
    found = counted(count, "message")
    if not answers_json():
        Table(_TOPICS, choice.topics).print()
    if dry_run or not count:
        gone = 0
        summary = f"{found} would be deleted" if count else "no message was found"
    else:
        confirm(
            f"this deletes {found} from the archive",
            f"Delete {found} from archive {archive}?",
            yes=yes,
        )
        gone = work.forget(archive, choice)
        summary = _gone(gone)
    print_answer({"messages": gone, "dry_run": dry_run, "topics": choice.topics}, summary)
    if gone:
        print_note(
            "files of old versions have them still; `mqmesh archive vacuum ARCHIVE --older-than "
            "1h` removes those files, an hour from now at the earliest"
        )
    return ExitCode.OK


@archive.command()
@_archive
@click.option(
    "--older-than",
    default="7d",
    show_default=True,
    metavar="AGE",
    help="Only files unneeded for so long, 1h or more.",
)
@click.option("--dry-run", is_flag=True, help="Only show which files would be deleted.")
@json_option
def vacuum(archive: str, older_than: str, dry_run: bool) -> int:
    """Remove files that no version of the tables needs any more.

    Queries that began longer ago than AGE fail then. Files that were never committed stay for a
    day at least: they may be of a command that still runs.

    \b
    Examples:
      mqmesh archive vacuum archive --dry-run
    """
    hours = span_seconds(older_than) // SPAN_SECONDS["h"]
    if not hours:
        raise ConfigError(f"--older-than {older_than!r}: must be 1h or more")
    gone = archive_module("maintenance").vacuum(archive, hours=hours, dry_run=dry_run)
    names = gone if dry_run else ()
    print_answer(
        {"files": gone, "dry_run": dry_run},
        *names,
        f"{len(gone):,} files {'would go' if dry_run else 'are gone'}",
    )
    return ExitCode.OK


@archive.command()
@click.option(
    "--to",
    "directory",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory for the jars.",
)
@_conf
@_verbose
@json_option
def jars(directory: Path, conf: tuple[str, ...], verbose: bool) -> int:
    """Fetch Delta Lake's jars into a directory, for machines without a way out.

    Those that pyspark brings are left out. A mirror of Maven Central is a setting of Spark.

    \b
    Examples:
      mqmesh archive jars --to jars
      mqmesh archive jars --to jars --conf spark.jars.ivySettings=ivysettings.xml
    """
    work = archive_module("maintenance")
    extra = dict(_setting(text) for text in conf)
    with _session(verbose=verbose, cores=1, memory="512m", extra=extra) as spark:
        names = work.copy_jars(spark, directory)
    print_answer({"directory": str(directory), "jars": names}, f"{len(names)} jars in {directory}")
    return ExitCode.OK


@archive.command()
@_to
@click.option("--broker", "brokers", multiple=True, help="Only this broker group. Repeatable.")
@click.option("--every", default="", metavar="SPAN", help="Again and again, as 1h.")
@_ingest_options
@cluster_options
def run(
    archive: str,
    brokers: tuple[str, ...],
    every: str,
    allow_gap: bool,
    on_damage: str,
    start: _Start,
    namesrv: str,
) -> int:
    """Snapshot each broker of this machine, take it into the archive, delete it again.

    With --every it goes on until Ctrl-C; a failure is reported, and tried again the next time. The
    broker keeps such a snapshot until it is taken in, as far as there is room.

    \b
    Examples:
      mqmesh archive run --to archive
      mqmesh archive run --every 1h --to archive
      mqmesh archive run --every 10m --to archive --engine local
    """
    pause_s = span_seconds(every) if every else 0
    place = archive_module("tables").archive_place(archive)
    options = {"allow_gap": allow_gap, "on_damage": on_damage}
    with start() as spark, Interrupt() as interrupt:

        def take(admin: AdminClient, name: str) -> None:
            newest = _snapshot(admin, name, place)
            # Those of rounds that failed or were killed come first.
            for path, is_needed in waiting_snapshots(newest.parent, name, place):
                try:
                    if is_needed:
                        _take_in(spark, path, archive, **options)
                except StorageError:
                    if path.exists():
                        raise
                # The broker may have removed it: others cover it, or it took too much room.
                if path.exists():
                    delete_snapshot(path)

        while True:
            failed = _round(namesrv, brokers, take, go_on=bool(pause_s))
            if not pause_s or interrupt.wait(pause_s):
                return ExitCode.FAILED if failed else ExitCode.OK


def _round(
    namesrv: str,
    brokers: tuple[str, ...],
    take: Callable[[AdminClient, str], None],
    *,
    go_on: bool,
) -> int:
    """Does something for each broker; how often it failed, where that is no reason to end."""
    failed = 0
    try:
        with AdminClient(namesrv) as admin:
            for name in brokers or sorted(one.broker_name for one in admin.cluster().brokers):
                try:
                    take(admin, name)
                except (MQMeshError, OSError) as error:
                    if not go_on:
                        raise
                    failed += 1
                    print_error(f"{name}: {error}")
    except MQMeshError as error:
        if not go_on:
            raise
        failed += 1
        print_error(str(error))
    return failed


def _snapshot(admin: AdminClient, name: str, place: str) -> Path:
    path = Path(admin.create_snapshot(name, archive=place).path)
    if not path.is_dir():
        raise ConfigError(
            f"the snapshot of {name} is on its machine, in {path}; run this command there"
        )
    return path


@contextmanager
def _session(*, verbose: bool, **options: Any) -> Iterator[Any]:
    is_quiet = not (verbose or click.get_current_context().ensure_object(Options).debug)
    print_progress("starting Java and Spark")
    try:
        spark = archive_module("session").session(is_quiet=is_quiet, **options)
    except ConfigError as error:
        if "engine" in click.get_current_context().params:
            raise ConfigError(f"{error}; or use --engine local, without Spark and Java") from error
        raise
    try:
        # Spark can explain its errors only while it runs.
        with errors_of_libraries():
            yield spark
    finally:
        spark.stop()


def _gone(count: int) -> str:
    return f"{counted(count, 'message')} {'is' if count == 1 else 'are'} gone"


def _note_rest(count: int, *, more: bool) -> None:
    if not count:
        print_note("no message was found")
    elif more:
        print_note(f"there are more messages than these {count:,}; --max shows further ones")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    # A VARIANT of Spark's.
    return msgspec.to_builtins(
        value, builtin_types=(datetime,), enc_hook=lambda one: one.toPython()
    )


def _shown(value: Any) -> object:
    if isinstance(value, bytes | bytearray):
        return bytes(value[:SHOWN_BODY]).decode("utf-8", "replace")
    return value if isinstance(value, int) else str(value)

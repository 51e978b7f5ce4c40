"""`mqmesh sql …`: inbox and outbox in a database; see docs/exactly-once.md."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import click

from mqmesh.errors import ConfigError
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.client.run import run
from mqmesh.sql.inbox import CLEAN_ROWS, Inbox
from mqmesh.sql.relay import OutboxRelay
from mqmesh.sql.relay_table import MOST_COUNTED, RelayTable
from mqmesh.sql.schema import DIALECTS
from mqmesh.sql.schema import schema as statements_of
from mqmesh.sql.statements import TableNames, connect, database_errors
from mqmesh.units import MIB

from ..options import cluster_options, json_option
from ..render import duration, print_answer, print_fields, print_text

_DEFAULTS: Final = TableNames()

url_option: Final = click.option(
    "--url",
    required=True,
    envvar="MQMESH_SQL_URL",
    help="Database: sqlite:///PATH or postgresql://…  [also: MQMESH_SQL_URL]",
)
outbox_option: Final = click.option(
    "--outbox",
    default=_DEFAULTS.outbox,
    show_default=True,
    metavar="TABLE",
    help="Table of the messages to send.",
)
relay_option: Final = click.option(
    "--relay-table",
    default=_DEFAULTS.relay,
    show_default=True,
    metavar="TABLE",
    help="Table of the relay's progress.",
)
inbox_option: Final = click.option(
    "--inbox",
    default=_DEFAULTS.inbox,
    show_default=True,
    metavar="TABLE",
    help="Table of the ids of processed messages.",
)


@click.group()
def sql() -> None:
    """Inbox and outbox in a database: create the tables, run and watch the relay, clean up.

    \b
    Examples:
      mqmesh sql schema --dialect postgresql | psql shop
      mqmesh sql relay --url postgresql://shop@db/shop
      mqmesh sql status --url sqlite:///shop.sqlite --max-age 60
      mqmesh sql clean billing --url postgresql://shop@db/shop --keep-days 30
    """


@sql.command()
@click.option(
    "--dialect", type=click.Choice(DIALECTS), required=True, help="Database to write SQL for."
)
@outbox_option
@relay_option
@inbox_option
@json_option
def schema(dialect: str, outbox: str, relay_table: str, inbox: str) -> None:
    """Print the statements that create the tables where they are missing.

    \b
    Examples:
      mqmesh sql schema --dialect sqlite | sqlite3 shop.sqlite
      mqmesh sql schema --dialect postgresql --outbox shop.outbox --json
    """
    names = TableNames(outbox=outbox, relay=relay_table, inbox=inbox)
    statements = statements_of(dialect, names)
    if print_answer({"statements": statements}):
        print_text("".join(f"{one};\n" for one in statements))


@sql.command()
@url_option
@outbox_option
@relay_option
@click.option(
    "--lease",
    type=click.FloatRange(1, 600),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Another relay takes over after so long without a sign of life.",
)
@click.option(
    "--in-doubt",
    type=click.Choice(("stop", "send", "drop")),
    default="stop",
    show_default=True,
    help="For messages of which it can no longer be found out whether they are stored: stop their "
    "topic, send or drop them.",
)
@click.option(
    "--lost-broker",
    multiple=True,
    metavar="NAME",
    help="Broker group that will not come back: messages sent to it are in doubt. May be repeated.",
)
@click.option(
    "--max-message-size",
    type=click.IntRange(1, 16 * MIB),
    default=MAX_MESSAGE_BYTES_DEFAULT,
    show_default=True,
    metavar="BYTES",
    help="Largest body, as of the programs that add rows and of the brokers.",
)
@cluster_options
def relay(
    url: str,
    outbox: str,
    relay_table: str,
    lease: float,
    in_doubt: Any,
    lost_broker: tuple[str, ...],
    max_message_size: int,
    namesrv: str,
) -> None:
    """Send the messages of an outbox, until it is stopped. Several may run: one works.

    \b
    Examples:
      mqmesh sql relay --url postgresql://shop@db/shop
      mqmesh sql relay --url sqlite:///shop.sqlite --namesrv 10.0.0.1:9876 --lease 5
    """
    work = OutboxRelay(
        lambda: connect(url),
        namesrv,
        names=TableNames(outbox=outbox, relay=relay_table),
        lease_ms=round(lease * 1_000),
        in_doubt=in_doubt,
        lost_brokers=lost_broker,
        max_message_size=max_message_size,
    )
    with _database(url):
        run(work)
    print_answer({"sent": work.status.sent}, f"{work.status.sent:,} messages were sent")


@sql.command()
@url_option
@outbox_option
@relay_option
@click.option(
    "--max-waiting",
    type=click.IntRange(0, MOST_COUNTED - 1),
    help="Exit code 1 if more rows wait.",
)
@click.option(
    "--max-age",
    type=click.FloatRange(0, 31_536_000),
    metavar="SECONDS",
    help="Exit code 1 if the oldest row waits for longer.",
)
@json_option
def status(
    url: str, outbox: str, relay_table: str, max_waiting: int | None, max_age: float | None
) -> int:
    """Show how many rows wait, since when, and which relay works; exit code 1 for rows set aside.

    \b
    Examples:
      mqmesh sql status --url postgresql://shop@db/shop
      mqmesh sql status --url sqlite:///shop.sqlite --max-waiting 1000 --max-age 60 --json
    """
    with _database(url):
        table = RelayTable(lambda: connect(url), TableNames(outbox=outbox, relay=relay_table))
        with closing(table):
            table.check()
            with table.transaction():
                waiting, oldest, set_aside = table.backlog()
                holder = table.holder()
    now_ms = time.time_ns() // 1_000_000
    age_ms = 0 if oldest is None else max(now_ms - oldest, 0)
    found = {
        "waiting": waiting,
        "set_aside": set_aside,
        "is_whole_count": max(waiting, set_aside) < MOST_COUNTED,
        "oldest_age_ms": age_ms,
        "relay": holder.holder,
        "in_flight": holder.flight is not None,
    }
    if print_answer(found):
        print_fields(
            [
                ("waiting", f"{waiting:,}{'' if found['is_whole_count'] else ' or more'}"),
                ("set aside", f"{set_aside:,}"),
                ("oldest", duration(age_ms) if waiting else "-"),
                ("relay", holder.holder or "none"),
            ]
        )
    too_many = max_waiting is not None and waiting > max_waiting
    too_old = max_age is not None and age_ms > max_age * 1_000
    return ExitCode.FAILED if too_many or too_old or set_aside else ExitCode.OK


@sql.command()
@click.argument("group")
@url_option
@inbox_option
@click.option(
    "--keep-days",
    type=click.FloatRange(0.001, 36_500),
    default=30.0,
    show_default=True,
    help="Ids stay for so long; a message that comes again later is processed again.",
)
@json_option
def clean(group: str, url: str, inbox: str, keep_days: float) -> None:
    """Delete old ids of a group's inbox, in slices. Run it each day.

    \b
    Examples:
      mqmesh sql clean billing --url postgresql://shop@db/shop
      mqmesh sql clean billing --url sqlite:///shop.sqlite --keep-days 60 --json
    """
    box = Inbox(group, TableNames(inbox=inbox))
    deleted = 0
    with _database(url), closing(connect(url)) as connection:
        while True:
            some = box.clean(connection, keep_ms=round(keep_days * 86_400_000))
            connection.commit()
            deleted += some
            if some < CLEAN_ROWS:
                break
    print_answer({"deleted": deleted}, f"{deleted:,} ids were deleted")


@contextmanager
def _database(url: str) -> Iterator[None]:
    """Turn errors of the database into one line."""
    try:
        yield
    except database_errors() as error:
        kind, _, path = url.partition(":///")
        if kind == "sqlite":  # an address of PostgreSQL may have a password
            kind = f"sqlite database {path}"
            advice = (
                ""
                if Path(path).exists()
                else f"; create it: `mqmesh sql schema --dialect sqlite | sqlite3 {path}`"
            )
        else:
            kind, advice = f"{kind.partition(':')[0]} database", ""
        raise ConfigError(f"the {kind}: {' '.join(str(error).split())}{advice}") from error

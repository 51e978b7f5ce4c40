"""`mqmesh tx …`: half messages that wait for their decision."""

from typing import Final

import click

from mqmesh.protocol.transactions import MAX_LISTED, Decision, HalfState
from mqmesh.sdk.admin.transaction_admin import TransactionAdmin
from mqmesh.sdk.admin.views.messages import (
    HalfMessageView,
    HalfView,
    half_message_view,
    half_messages_view,
)

from ..notes import print_note
from ..options import cluster_options, confirm, yes_option
from ..render import (
    Column,
    Table,
    duration,
    print_answer,
    print_body,
    print_fields,
    timestamp,
)
from .query import body_lines

DEFAULT_COUNT: Final = 100


def next_check(half: HalfView | HalfMessageView) -> str:
    """Returns when a half message is checked next, in words."""
    if half.state == HalfState.PARKED.name:
        return "parked"
    if half.next_check_ms < 0:
        return "-"
    if not half.live_members and half.next_check_ms == 0:
        return "when a member comes"
    return f"in {duration(half.next_check_ms)}"


_HALVES: Final = (
    Column("message_id", "MESSAGE ID"),
    Column("group", "GROUP"),
    Column("live_members", "MEMBERS", rank=3),
    Column("topic", "TOPIC", rank=1),
    Column("", "QUEUE", value=lambda one: f"{one.broker_name}/{one.queue_id}", rank=2),
    Column("age_ms", "AGE", duration),
    Column("check_times", "CHECKS", rank=4),
    Column("", "NEXT CHECK", value=next_check),
)


@click.group()
def tx() -> None:
    """Half messages of transactions: list them, show them, decide about stuck ones.

    \b
    Examples:
      mqmesh tx list
      mqmesh tx list --parked --json
      mqmesh tx show 0123456789ABCDEF0000000000000001
      mqmesh tx commit 0123456789ABCDEF0000000000000001 --yes
    """


@tx.command("list")
@click.option("-g", "--group", default="", help="Only of this producer group.")
@click.option("-t", "--topic", default="", help="Only for this topic.")
@click.option("--parked", is_flag=True, help="Only those that were checked in vain.")
@click.option(
    "--older-than",
    type=click.IntRange(0, 10_000_000),
    default=0,
    metavar="SECONDS",
    help="Only those that have waited for so long.",
)
@click.option(
    "-n",
    "--count",
    type=click.IntRange(1, MAX_LISTED),
    default=DEFAULT_COUNT,
    show_default=True,
    help="Show so many messages at most.",
)
@cluster_options
def list_half_messages(
    group: str, topic: str, parked: bool, older_than: int, count: int, namesrv: str
) -> None:
    """List half messages that wait, oldest first.

    \b
    Examples:
      mqmesh tx list
      mqmesh tx list --group shop --older-than 60
      mqmesh tx list --parked --json
    """
    with TransactionAdmin(namesrv) as admin:
        found = admin.half_messages(
            group=group,
            topic=topic,
            min_age_ms=older_than * 1_000,
            parked=parked,
            max_count=count,
        )
    view = half_messages_view(found)
    if print_answer(view):
        Table(_HALVES, view.messages).print()
        print_note(f"{view.pending:,} half messages wait, {view.parked:,} are parked")


@tx.command()
@click.argument("message_id")
@cluster_options
def show(message_id: str, namesrv: str) -> None:
    """Show a half message that waits, with its contents.

    \b
    Examples:
      mqmesh tx show 0C6A9F0E5D3B7A12000000000000002A
    """
    with TransactionAdmin(namesrv) as admin:
        half = admin.half_message(message_id)
    found = half_message_view(half)
    if not print_answer(found):
        return
    rows = [
        ("message id", found.message_id),
        ("producer group", f"{found.group}, {found.live_members} members connected"),
        ("goes to", f"{found.topic}/{found.broker_name}/{found.queue_id}"),
        ("stored", f"{timestamp(found.store_timestamp)}, {duration(found.age_ms)} ago"),
        ("checks", f"{found.check_times}, next: {next_check(found)}"),
        ("tag", found.tag or ""),
        ("keys", ", ".join(found.keys)),
        *((f"property {name}", value) for name, value in found.properties.items()),
        ("born at", found.born_host),
    ]
    print_fields([row for row in rows if row[1] != ""])
    assert half.message is not None
    print_body(body_lines(half.message.body))


@tx.command()
@click.argument("message_id")
@yes_option
@cluster_options
def commit(message_id: str, yes: bool, namesrv: str) -> None:
    """Commit a half message whose local transaction is known to be done.

    \b
    Examples:
      mqmesh tx commit 0C6A9F0E5D3B7A12000000000000002A
      mqmesh tx commit 0C6A9F0E5D3B7A12000000000000002A --yes
    """
    _end(message_id, Decision.COMMIT, yes, namesrv)


@tx.command()
@click.argument("message_id")
@yes_option
@cluster_options
def rollback(message_id: str, yes: bool, namesrv: str) -> None:
    """Roll back a half message whose local transaction is known not to have happened.

    \b
    Examples:
      mqmesh tx rollback 0C6A9F0E5D3B7A12000000000000002A
    """
    _end(message_id, Decision.ROLLBACK, yes, namesrv)


def _end(message_id: str, decision: Decision, yes: bool, namesrv: str) -> None:
    verb = decision.name.lower()
    confirm(
        "this ends a transaction for good",
        f"End half message {message_id} by {verb} for good?",
        yes=yes,
    )
    with TransactionAdmin(namesrv) as admin:
        broker_name = admin.end_half_message(message_id, decision)
    done = "committed" if decision is Decision.COMMIT else "rolled back"
    print_answer(
        {"message_id": message_id, "broker_name": broker_name, "decision": verb},
        f"half message {message_id} was {done} at {broker_name}",
    )

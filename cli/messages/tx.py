"""`mqmesh tx …`: half messages that wait for their decision."""

from typing import Any, Final

import click

from mqmesh.protocol.transactions import MAX_LISTED, Decision, HalfState
from mqmesh.sdk.admin.transaction_admin import HalfMessage, TransactionAdmin

from ..notes import tell_note
from ..options import confirm, json_option, namesrv_option, yes_option
from ..render import duration, print_body, print_fields, print_json, print_table, say, timestamp
from .query import body_lines
from .shown_message import message_dict

DEFAULT_COUNT: Final = 100


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
@click.option("--parked", is_flag=True, help="Only what was asked about in vain.")
@click.option(
    "--older-than",
    type=click.IntRange(0, 10_000_000),
    default=0,
    metavar="SECONDS",
    help="Only what has waited for so long.",
)
@click.option(
    "-n", "--count", type=click.IntRange(1, MAX_LISTED), default=DEFAULT_COUNT, show_default=True
)
@namesrv_option
@json_option
def list_half_messages(
    group: str, topic: str, parked: bool, older_than: int, count: int, namesrv: str, as_json: bool
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
    if as_json:
        print_json(
            {
                "pending": found.pending_count,
                "parked": found.parked_count,
                "messages": [as_dict(one) for one in found.messages],
            }
        )
        return
    print_table(
        ("MESSAGE ID", "GROUP", "MEMBERS", "TOPIC", "QUEUE", "AGE", "CHECKS", "NEXT CHECK"),
        [
            (
                one.info.message_id,
                one.info.group,
                one.info.live_members,
                one.info.topic,
                f"{one.broker_name}/{one.info.queue_id}",
                duration(one.info.age_ms),
                one.info.check_times,
                next_check(one),
            )
            for one in found.messages
        ],
        optional=("CHECKS", "MEMBERS", "QUEUE", "TOPIC"),
    )
    tell_note(f"{found.pending_count:,} half messages wait, {found.parked_count:,} are parked")


@tx.command()
@click.argument("message_id")
@namesrv_option
@json_option
def show(message_id: str, namesrv: str, as_json: bool) -> None:
    """Show a half message that waits, with its contents.

    \b
    Examples:
      mqmesh tx show 0C6A9F0E5D3B7A12000000000000002A
    """
    with TransactionAdmin(namesrv) as admin:
        found = admin.half_message(message_id)
    message = found.message
    assert message is not None
    if as_json:
        print_json(message_dict(message) | as_dict(found))
        return
    info = found.info
    rows = [
        ("message id", info.message_id),
        ("producer group", f"{info.group}, {info.live_members} members connected"),
        ("goes to", f"{info.topic}/{found.broker_name}/{info.queue_id}"),
        ("stored", f"{timestamp(info.store_timestamp)}, {duration(info.age_ms)} ago"),
        ("checks", f"{info.check_times}, next: {next_check(found)}"),
        ("tag", message.tag or ""),
        ("keys", ", ".join(message.keys)),
        *((f"property {name}", value) for name, value in (message.properties or {}).items()),
        ("born at", message.born_host),
    ]
    print_fields([row for row in rows if row[1] != ""])
    print_body(body_lines(message.body))


@tx.command()
@click.argument("message_id")
@yes_option
@namesrv_option
@json_option
def commit(message_id: str, yes: bool, namesrv: str, as_json: bool) -> None:
    """Commit a half message whose local transaction is known to be done.

    \b
    Examples:
      mqmesh tx commit 0C6A9F0E5D3B7A12000000000000002A
      mqmesh tx commit 0C6A9F0E5D3B7A12000000000000002A --yes
    """
    _end(message_id, Decision.COMMIT, yes, namesrv, as_json)


@tx.command()
@click.argument("message_id")
@yes_option
@namesrv_option
@json_option
def rollback(message_id: str, yes: bool, namesrv: str, as_json: bool) -> None:
    """Roll back a half message whose local transaction is known not to have happened.

    \b
    Examples:
      mqmesh tx rollback 0C6A9F0E5D3B7A12000000000000002A
    """
    _end(message_id, Decision.ROLLBACK, yes, namesrv, as_json)


def _end(message_id: str, decision: Decision, yes: bool, namesrv: str, as_json: bool) -> None:
    word = decision.name.lower()
    confirm(
        "this ends a transaction for good",
        f"End half message {message_id} by {word} for good?",
        yes=yes,
        as_json=as_json,
    )
    with TransactionAdmin(namesrv) as admin:
        broker_name = admin.end_half_message(message_id, decision)
    if as_json:
        print_json({"message_id": message_id, "broker_name": broker_name, "decision": word})
    else:
        done = "committed" if decision is Decision.COMMIT else "rolled back"
        say(f"half message {message_id} was {done} at {broker_name}")


def as_dict(half: HalfMessage) -> dict[str, Any]:
    """Returns a half message as JSON shows it."""
    info = half.info
    return {
        "message_id": info.message_id,
        "state": HalfState(info.state).name,
        "group": info.group,
        "live_members": info.live_members,
        "topic": info.topic,
        "broker_name": half.broker_name,
        "queue_id": info.queue_id,
        "store_timestamp": info.store_timestamp,
        "age_ms": info.age_ms,
        "check_times": info.check_times,
        "next_check_ms": info.next_check_ms,
        "half_queue_offset": info.queue_offset,
    }


def next_check(half: HalfMessage) -> str:
    """Returns when a half message is checked next, in words."""
    if half.is_parked:
        return "parked"
    if half.info.next_check_ms < 0:
        return "-"
    if not half.info.live_members and half.info.next_check_ms == 0:
        return "when a member comes"
    return f"in {duration(half.info.next_check_ms)}"

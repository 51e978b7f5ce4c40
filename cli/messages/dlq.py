"""`mqmesh dlq`: dead letters, to be looked at, kept and given another chance."""

import contextlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import click

from mqmesh.clock import SystemClock
from mqmesh.errors import ConfigError
from mqmesh.logs import one_line
from mqmesh.message import parse_message_id
from mqmesh.protocol.retries import ResendStatus, ResendTarget
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.dead_letters import (
    DeadLetter,
    DeadLetterClient,
    DeadLetterFilter,
    OnProgress,
)
from mqmesh.sdk.admin.views.messages import (
    DeadLettersView,
    DeadLetterView,
    ResentView,
    UndecodableView,
    dead_letter_groups,
    dead_letter_view,
    resent_view,
)
from mqmesh.units import MAX_TIMESTAMP_MS
from mqmesh.user_times import TIME_HELP

from ..notes import print_error, print_note
from ..options import cluster_options, confirm, max_option, yes_option
from ..progress_bar import message_bar
from ..render import (
    Column,
    Table,
    duration,
    print_answer,
    print_body,
    print_fields,
    print_records,
    say,
    shortened,
    text_or_dash,
    timestamp,
)
from ..streams import json_line, standard_output
from .query import body_lines, fields_of, time_option

DEFAULT_SHOWN: Final = 32
REASON_WIDTH: Final = 60
BAR_WIDTH: Final = 40
_MODULE: Final = re.compile(r"\A(?:\w+\.)+(?=\w+: )")
"""Package of an exception's class; left out in a table, where the text matters more."""

_F = TypeVar("_F", bound=Callable[..., Any])


def short_reason(reason: str) -> str:
    """Returns the last failure of a dead letter, for a table."""
    return shortened(one_line(_MODULE.sub("", reason)), REASON_WIDTH)


def _of_message(field: str, shown: Callable[[Any], object]) -> Callable[[Any], object]:
    """Returns the cell of a field that batches that cannot be decoded do not have."""
    return lambda one: "-" if isinstance(one, UndecodableView) else shown(getattr(one, field))


def _name(one: DeadLetterView | UndecodableView) -> str:
    if isinstance(one, UndecodableView):
        return f"{one.message_count} messages at {one.broker_name}@{one.dlq_offset}"
    return one.message_id


def _keys(keys: list[str]) -> str:
    return shortened(one_line(", ".join(keys)), REASON_WIDTH)


def _ago(stored_ms: int, now_ms: int) -> str:
    return f"{duration(max(now_ms - stored_ms, 0))} ago" if stored_ms else "-"


def _ago_now(stored_ms: int) -> str:
    return _ago(stored_ms, SystemClock().wall_ms())


_GROUPS: Final = (
    Column("group", "GROUP"),
    Column("dead_letters", "DEAD LETTERS"),
    Column("oldest_timestamp", "OLDEST", _ago_now),
    Column("newest_timestamp", "NEWEST", _ago_now),
)
_LETTERS: Final = (
    Column("", "MESSAGE ID", value=_name),
    Column("", "TOPIC", value=_of_message("topic", str)),
    Column("", "TAG", value=_of_message("tag", text_or_dash), rank=2),
    Column("", "KEYS", value=_of_message("keys", _keys), rank=3),
    Column("", "GIVEN UP", value=_of_message("store_timestamp", timestamp)),
    Column("", "TRIES", value=_of_message("reconsume_times", str), rank=1),
    Column("resent_timestamp", "RESENT", timestamp, rank=4),
    Column("reason", "LAST FAILURE", short_reason),
)


@click.group()
def dlq() -> None:
    """Dead letters: messages that a group could not consume.

    \b
    Examples:
      mqmesh dlq list
      mqmesh dlq list billing --reason timeout --from 2h
      mqmesh dlq show billing 0C6A9F0E5D3B7A12000000000000002A
      mqmesh dlq export billing letters.jsonl
      mqmesh dlq resend billing --all --dry-run
      mqmesh dlq purge billing
    """


def filter_options(function: _F) -> _F:
    """Adds the options that choose dead letters."""
    for option in reversed(
        [
            click.option("-t", "--topic", help="Sent to this topic at first."),
            click.option("--tag", help="With this tag."),
            click.option("-k", "--key", help="With this key."),
            click.option("--reason", metavar="TEXT", help="With this text in the last failure."),
            click.option(
                "--from",
                "from_text",
                metavar="TIME",
                help=f"Given up at this time or later: {TIME_HELP}.",
            ),
            click.option("--to", "to_text", metavar="TIME", help="Given up then or before, UTC."),
        ]
    ):
        function = option(function)
    return function


@dlq.command("list")
@click.argument("group", required=False)
@filter_options
@click.option("--resent/--not-resent", default=None, help="Only those that were resent, or not.")
@max_option(DEFAULT_SHOWN, "Dead letters to show: the last ones.")
@cluster_options
def list_letters(group: str | None, most: int, namesrv: str, **chosen: Any) -> int:
    """The dead letters of GROUP, or all groups that have some; how many, and how old they are.

    \b
    Examples:
      mqmesh dlq list
      mqmesh dlq list billing
      mqmesh dlq list billing --topic orders --reason ValueError --not-resent --max 1000
    """
    with DeadLetterClient(namesrv) as client:
        if group is None:
            print_records(_GROUPS, dead_letter_groups(client.overview()))
            return ExitCode.OK
        last: deque[DeadLetter] = deque(maxlen=most)
        found, now_ms = DeadLettersView(), SystemClock().wall_ms()
        with _progress("reading") as on_progress:
            for letter in client.scan(group, _filter(**chosen), on_progress=on_progress):
                last.append(letter)
                found.add(letter, now_ms)
    found.dead_letters = [dead_letter_view(one) for one in last]
    if print_answer(found):
        Table(_LETTERS, found.dead_letters).print()
        _print_ages(found, now_ms)
        if len(last) < found.count:
            print_note(f"the last {len(last):,} of {found.count:,}; --max shows more")
    return ExitCode.OK


@dlq.command()
@click.argument("group")
@click.argument("message_id")
@cluster_options
def show(group: str, message_id: str, namesrv: str) -> int:
    """One dead letter of GROUP with all its fields and its body.

    \b
    Examples:
      mqmesh dlq show billing 0C6A9F0E5D3B7A12000000000000002A
    """
    with DeadLetterClient(namesrv) as client:
        found = list(client.scan(group, _filter(message_ids=(message_id,))))
    if print_answer([dead_letter_view(letter) for letter in found]):
        for letter in found:
            _print_letter(letter)
    if not found:
        print_error(f"group {group} has no dead letter {message_id}")
    return ExitCode.OK if found else ExitCode.FAILED


@dlq.command()
@click.argument("group")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@filter_options
@click.option("--resent/--not-resent", default=None, help="Only those that were resent, or not.")
@cluster_options
def export(group: str, file: Path, namesrv: str, **chosen: Any) -> int:
    """Write dead letters of GROUP to FILE (- for standard output), a line of JSON each.

    They stay where they are. A batch that cannot be decoded is written as it is stored, in
    base64.

    \b
    Examples:
      mqmesh dlq export billing letters.jsonl
      mqmesh dlq export billing - --reason timeout
    """
    count = 0
    with DeadLetterClient(namesrv) as client, _progress("exporting") as on_progress:
        # An error about the group is reported before there is a file.
        letters = client.scan(group, _filter(**chosen), on_progress=on_progress)
        with _written(file) as out:
            for letter in letters:
                out.write(json_line(dead_letter_view(letter)))
                count += letter.count
    if str(file) == "-":
        return ExitCode.OK
    print_answer(
        {"exported": count, "file": str(file)}, f"{count:,} dead letters written to {file}"
    )
    return ExitCode.OK


@dlq.command()
@click.argument("group")
@click.argument("message_ids", nargs=-1, metavar="[MESSAGE_ID]...")
@filter_options
@click.option("--all", "everything", is_flag=True, help="All dead letters of the group.")
@click.option(
    "--target",
    type=click.Choice(["retry", "topic"]),
    default="retry",
    show_default=True,
    help="retry: only this group gets them. topic: all groups of their topic do.",
)
@click.option("--force", is_flag=True, help="Also those that were resent before.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@cluster_options
def resend(
    group: str,
    message_ids: tuple[str, ...],
    everything: bool,
    target: str,
    force: bool,
    dry_run: bool,
    namesrv: str,
    **chosen: Any,
) -> int:
    """Give dead letters of GROUP another chance: some by id, some by filter, or all.

    Each is resent only once, even if the command is repeated, unless --force says otherwise. A
    command that failed in the middle can be repeated.

    \b
    Examples:
      mqmesh dlq resend billing 0C6A9F0E5D3B7A12000000000000002A
      mqmesh dlq resend billing --reason timeout --from 2h --dry-run
      mqmesh dlq resend billing --all --target topic
    """
    if not everything and not message_ids and not any(chosen.values()):
        raise click.UsageError("say which ones: ids, a filter, or --all")
    if everything and (message_ids or any(chosen.values())):
        raise click.UsageError("--all and a choice exclude each other")
    counts: Counter[ResendStatus] = Counter()
    problems: list[tuple[DeadLetter, str]] = []
    missing = {message_id.upper() for message_id in message_ids}
    wanted = _filter(message_ids=message_ids, **chosen)
    with DeadLetterClient(namesrv) as client, _progress("resending") as on_progress:
        letters = client.scan(group, wanted, on_progress=on_progress)
        where = ResendTarget(target.upper())
        for letter, result in client.resend(
            group, letters, target=where, force=force, dry_run=dry_run
        ):
            status = ResendStatus(result.status)
            counts[status] += 1
            if letter.message is not None:
                missing.discard(letter.message.message_id)
            if status is ResendStatus.REFUSED:
                problems.append((letter, result.remark))
    _print_resent(resent_view(counts, problems, dry_run=dry_run))
    for message_id in sorted(missing):
        print_error(f"group {group} has no such dead letter: {message_id}")
    return ExitCode.FAILED if missing or problems else ExitCode.OK


@dlq.command()
@click.argument("group")
@yes_option
@cluster_options
def purge(group: str, yes: bool, namesrv: str) -> None:
    """Delete all dead letters of GROUP, for good.

    \b
    Examples:
      mqmesh dlq export billing letters.jsonl
      mqmesh dlq purge billing --yes
    """
    confirm(
        "this deletes all dead letters of the group",
        f"Delete all dead letters of group {group}?",
        yes=yes,
    )
    with DeadLetterClient(namesrv) as client:
        count = client.purge(group)
    print_answer(
        {"group": group, "purged": count}, f"{count:,} dead letters of group {group} are deleted"
    )


@contextlib.contextmanager
def _written(file: Path) -> Iterator[IO[bytes]]:
    """Opens a file that appears when all is written; standard output for ``-``."""
    if str(file) == "-":
        yield standard_output().buffer
        standard_output().flush()
        return
    with click.open_file(str(file), "wb", atomic=True) as out:
        yield out


def _filter(
    *,
    message_ids: tuple[str, ...] = (),
    topic: str | None = None,
    tag: str | None = None,
    key: str | None = None,
    reason: str | None = None,
    from_text: str | None = None,
    to_text: str | None = None,
    resent: bool | None = None,
) -> DeadLetterFilter:
    now_ms = SystemClock().wall_ms()
    for message_id in message_ids:
        parse_message_id(message_id)
    from_ms = time_option("--from", from_text, now_ms, 0)
    to_ms = time_option("--to", to_text, now_ms, MAX_TIMESTAMP_MS)
    if from_ms > to_ms:
        raise ConfigError("--from is behind --to; no dead letter fits")
    return DeadLetterFilter(
        topic=topic,
        tag=tag,
        key=key,
        message_ids=frozenset(one.upper() for one in message_ids) or None,
        reason=reason,
        from_ms=from_ms,
        to_ms=to_ms,
        resent=resent,
    )


def _print_ages(found: DeadLettersView, now_ms: int) -> None:
    """Prints the ages of dead letters: a bar a step."""
    most = max(found.ages.values())
    if not most:
        return
    oldest, newest = (_ago(one, now_ms) for one in (found.oldest_timestamp, found.newest_timestamp))
    say(f"given up: the oldest {oldest}, the newest {newest}")
    for name, count in found.ages.items():
        bar = "#" * -(-count * BAR_WIDTH // most)
        say(f"  {name:<10} {count:>9,} {bar}".rstrip())


def _print_letter(letter: DeadLetter) -> None:
    assert letter.message is not None, "it was found by its id"
    print_fields([*fields_of(letter.message), ("resent", timestamp(letter.resent_ms))])
    print_body(body_lines(letter.message.body))


def _print_resent(found: ResentView) -> None:
    if not print_answer(found):
        return
    parts = [f"{found.resent:,} {'would be resent' if found.dry_run else 'resent'}"]
    if found.already_resent:
        parts.append(
            f"{found.already_resent:,} resent before and left alone (--force resends them)"
        )
    if found.gone:
        parts.append(f"{found.gone:,} gone meanwhile")
    if found.problems:
        parts.append(f"{len(found.problems):,} refused")
    say(", ".join(parts))
    for one in found.problems[:DEFAULT_SHOWN]:
        name = one.message_id or f"{one.broker_name}@{one.dlq_offset}"
        print_error(f"refused: {name}: {one.remark}")


@contextlib.contextmanager
def _progress(title: str) -> Iterator[OnProgress | None]:
    """Shows a bar on a terminal; none on other outputs."""
    with message_bar(title) as update:
        if update is None:
            yield None
        else:
            yield lambda done, total: update(completed=done, total=total)

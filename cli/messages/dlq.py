"""`mqmesh dlq`: dead letters, to be looked at, kept and given another chance."""

import base64
import contextlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
    GroupDeadLetters,
    OnProgress,
)
from mqmesh.units import MAX_TIMESTAMP_MS

from ..notes import tell_error, tell_note
from ..options import confirm, json_option, namesrv_option, yes_option
from ..render import (
    duration,
    print_body,
    print_fields,
    print_json,
    print_table,
    say,
    shortened,
    timestamp,
)
from ..streams import json_line, standard_output
from ..times import TIME_HELP
from .query import body_lines, fields_of, time_option
from .shown_message import message_dict

DEFAULT_SHOWN: Final = 32
REASON_WIDTH: Final = 60
BAR_WIDTH: Final = 40
_HOUR_MS: Final = 3_600_000
AGES: Final = (
    ("< 1 hour", _HOUR_MS),
    ("< 1 day", 24 * _HOUR_MS),
    ("< 7 days", 7 * 24 * _HOUR_MS),
    ("< 30 days", 30 * 24 * _HOUR_MS),
    ("older", MAX_TIMESTAMP_MS),
)
"""Steps of ages, and up to how many ms each goes."""

_MODULE: Final = re.compile(r"\A(?:\w+\.)+(?=\w+: )")
"""Package of an exception's class; left out in a table, where the text matters more."""

_F = TypeVar("_F", bound=Callable[..., Any])


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
@click.option(
    "-n",
    "--max",
    "most",
    type=click.IntRange(1, 1_000_000),
    default=DEFAULT_SHOWN,
    show_default=True,
    help="Dead letters to show: the last ones.",
)
@namesrv_option
@json_option
def list_letters(group: str | None, most: int, namesrv: str, as_json: bool, **chosen: Any) -> int:
    """The dead letters of GROUP, or all groups that have some; how many, and how old they are.

    \b
    Examples:
      mqmesh dlq list
      mqmesh dlq list billing
      mqmesh dlq list billing --topic orders --reason ValueError --not-resent --max 1000
    """
    with DeadLetterClient(namesrv) as client:
        if group is None:
            _show_groups(client.overview(), as_json)
            return ExitCode.OK
        last: deque[DeadLetter] = deque(maxlen=most)
        count, ages = 0, _Ages(SystemClock().wall_ms())
        with _progress("reading") as on_progress:
            for letter in client.scan(group, _filter(**chosen), on_progress=on_progress):
                last.append(letter)
                ages.add(letter)
                count += letter.count
    if as_json:
        shown = [as_dict(one) for one in last]
        print_json({"dead_letters": shown, "count": count, **ages.as_dict()})
        return ExitCode.OK
    print_table(
        ("MESSAGE ID", "TOPIC", "TAG", "KEYS", "GIVEN UP", "TRIES", "RESENT", "LAST FAILURE"),
        map(_row, last),
        optional=("RESENT", "KEYS", "TAG", "TRIES"),
    )
    ages.show()
    if len(last) < count:
        tell_note(f"the last {len(last):,} of {count:,}; --max shows more")
    return ExitCode.OK


@dlq.command()
@click.argument("group")
@click.argument("message_id")
@namesrv_option
@json_option
def show(group: str, message_id: str, namesrv: str, as_json: bool) -> int:
    """One dead letter of GROUP with all its fields and its body.

    \b
    Examples:
      mqmesh dlq show billing 0C6A9F0E5D3B7A12000000000000002A
    """
    with DeadLetterClient(namesrv) as client:
        found = list(client.scan(group, _filter(message_ids=(message_id,))))
    if as_json:
        print_json([as_dict(letter) for letter in found])
    else:
        for letter in found:
            _print_letter(letter)
    if not found:
        tell_error(f"group {group} has no dead letter {message_id}")
    return ExitCode.OK if found else ExitCode.FAILED


@dlq.command()
@click.argument("group")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@filter_options
@click.option("--resent/--not-resent", default=None, help="Only those that were resent, or not.")
@namesrv_option
@json_option
def export(group: str, file: Path, namesrv: str, as_json: bool, **chosen: Any) -> int:
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
                out.write(json_line(as_dict(letter)))
                count += letter.count
    if str(file) == "-":
        return ExitCode.OK
    if as_json:
        print_json({"exported": count, "file": str(file)})
    else:
        say(f"{count:,} dead letters written to {file}")
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
@namesrv_option
@json_option
def resend(
    group: str,
    message_ids: tuple[str, ...],
    everything: bool,
    target: str,
    force: bool,
    dry_run: bool,
    namesrv: str,
    as_json: bool,
    **chosen: Any,
) -> int:
    """Give dead letters of GROUP another chance: some by id, some by filter, or all.

    Each is resent once only, however often this is called, unless --force says so. What failed
    in the middle can be called again.

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
    _show_resent(counts, problems, dry_run=dry_run, as_json=as_json)
    for message_id in sorted(missing):
        tell_error(f"group {group} has no such dead letter: {message_id}")
    return ExitCode.FAILED if missing or problems else ExitCode.OK


@dlq.command()
@click.argument("group")
@yes_option
@namesrv_option
@json_option
def purge(group: str, yes: bool, namesrv: str, as_json: bool) -> None:
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
        as_json=as_json,
    )
    with DeadLetterClient(namesrv) as client:
        count = client.purge(group)
    if as_json:
        print_json({"group": group, "purged": count})
    else:
        say(f"{count:,} dead letters of group {group} are deleted")


@contextlib.contextmanager
def _written(file: Path) -> Iterator[IO[bytes]]:
    """Opens a file that appears when all is written; standard output for ``-``."""
    if str(file) == "-":
        yield standard_output().buffer
        standard_output().flush()
        return
    with click.open_file(str(file), "wb", atomic=True) as out:
        yield out


def short_reason(letter: DeadLetter) -> str:
    """Returns the last failure of a dead letter, for a table."""
    return shortened(one_line(_MODULE.sub("", letter.reason)), REASON_WIDTH)


def as_dict(letter: DeadLetter) -> dict[str, Any]:
    """Returns a dead letter as JSON; the names and their order are stable."""
    head = {
        "broker_name": letter.broker_name,
        "dlq_offset": letter.queue_offset,
        "reason": letter.reason,
        "resent_timestamp": letter.resent_ms,
    }
    if letter.message is None:
        return head | {
            "message_count": letter.count,
            "batch_base64": base64.b64encode(letter.undecodable).decode(),
        }
    return head | message_dict(letter.message)


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


def _show_groups(groups: dict[str, GroupDeadLetters], as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "group": group,
                    "dead_letters": one.count,
                    "oldest_timestamp": one.oldest_ms,
                    "newest_timestamp": one.newest_ms,
                }
                for group, one in sorted(groups.items())
            ]
        )
        return
    now_ms = SystemClock().wall_ms()
    print_table(
        ("GROUP", "DEAD LETTERS", "OLDEST", "NEWEST"),
        [
            (group, one.count, _age(one.oldest_ms, now_ms), _age(one.newest_ms, now_ms))
            for group, one in sorted(groups.items())
        ],
    )


def _age(stored_ms: int, now_ms: int) -> str:
    return f"{duration(max(now_ms - stored_ms, 0))} ago" if stored_ms else "-"


class _Ages:
    """Ages of dead letters."""

    def __init__(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self.counts = {name: 0 for name, _ in AGES}
        self.oldest_ms = self.newest_ms = 0

    def add(self, letter: DeadLetter) -> None:
        """Counts one, unless nobody knows its time."""
        if letter.message is None:
            return
        stored_ms = letter.message.store_timestamp
        age_ms = self._now_ms - stored_ms
        self.counts[next(name for name, most_ms in AGES if age_ms < most_ms)] += 1
        self.oldest_ms = min(self.oldest_ms or stored_ms, stored_ms)
        self.newest_ms = max(self.newest_ms, stored_ms)

    def as_dict(self) -> dict[str, Any]:
        """Returns the ages as JSON."""
        return {
            "oldest_timestamp": self.oldest_ms,
            "newest_timestamp": self.newest_ms,
            "ages": self.counts,
        }

    def show(self) -> None:
        """Prints the ages for people: a bar a step."""
        most = max(self.counts.values())
        if not most:
            return
        oldest, newest = (_age(one, self._now_ms) for one in (self.oldest_ms, self.newest_ms))
        say(f"given up: the oldest {oldest}, the newest {newest}")
        for name, count in self.counts.items():
            bar = "#" * -(-count * BAR_WIDTH // most)
            say(f"  {name:<10} {count:>9,} {bar}".rstrip())


def _row(letter: DeadLetter) -> tuple[object, ...]:
    message = letter.message
    resent = timestamp(letter.resent_ms)
    if message is None:
        name = f"{letter.count} messages at {letter.broker_name}@{letter.queue_offset}"
        return (name, "-", "-", "-", "-", "-", resent, letter.reason)
    return (
        message.message_id,
        message.topic,
        message.tag or "-",
        shortened(one_line(", ".join(message.keys)), REASON_WIDTH) or "-",
        timestamp(message.store_timestamp),
        str(message.reconsume_times),
        resent,
        short_reason(letter),
    )


def _print_letter(letter: DeadLetter) -> None:
    assert letter.message is not None, "it was found by its id"
    print_fields([*fields_of(letter.message), ("resent", timestamp(letter.resent_ms))])
    print_body(body_lines(letter.message.body))


def _show_resent(
    counts: Counter[ResendStatus],
    problems: list[tuple[DeadLetter, str]],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {"dry_run": dry_run}
            | {status.name.lower(): counts[status] for status in ResendStatus}
            | {
                "problems": [
                    {
                        "broker_name": letter.broker_name,
                        "dlq_offset": letter.queue_offset,
                        "message_id": letter.message.message_id if letter.message else None,
                        "remark": remark,
                    }
                    for letter, remark in problems
                ]
            }
        )
        return
    verb = "would be resent" if dry_run else "resent"
    parts = [f"{counts[ResendStatus.RESENT]:,} {verb}"]
    if counts[ResendStatus.ALREADY_RESENT]:
        count = counts[ResendStatus.ALREADY_RESENT]
        parts.append(f"{count:,} resent before and left alone (--force resends them)")
    if counts[ResendStatus.GONE]:
        parts.append(f"{counts[ResendStatus.GONE]:,} gone meanwhile")
    if problems:
        parts.append(f"{len(problems):,} refused")
    say(", ".join(parts))
    for letter, remark in problems[:DEFAULT_SHOWN]:
        place = f"{letter.broker_name}@{letter.queue_offset}"
        name = letter.message.message_id if letter.message else place
        tell_error(f"refused: {name}: {remark}")


@contextlib.contextmanager
def _progress(title: str) -> Iterator[OnProgress | None]:
    """Shows a bar on a terminal; none on other outputs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

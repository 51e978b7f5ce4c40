"""`mqmesh consume`: prints messages as they come."""

import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from mqmesh.clock import SystemClock
from mqmesh.errors import ConfigError, TopicNotFound
from mqmesh.filtering.tags import ALL
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.groups import LOOK_GROUP_PREFIX
from mqmesh.protocol.membership import ConsumeFromWhere, MessageModel
from mqmesh.protocol.route import MAX_QUEUES_PER_TOPIC
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.views.messages import message_view
from mqmesh.sdk.client.interrupt import Interrupt
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.units import MAX_TIMESTAMP_MS
from mqmesh.user_times import TIME_HELP, parse_time

from ..notes import answers_json, print_error, print_note
from ..options import SECONDS, cluster_options
from ..render import (
    Column,
    StyledLines,
    counted,
    print_as_is,
    print_json,
    print_records,
)
from ..streams import standard_output
from .shown_message import parts_of

POLL_MS: Final = 200
"""Time within which Ctrl-C is noticed."""
MESSAGES_A_POLL: Final = 1_000

Show = Callable[[StoredMessage], None]


@click.command()
@click.argument("topic")
@click.option(
    "-g",
    "--group",
    help="Consume as a member of this group, and commit. [default: look on, commit nothing]",
)
@click.option(
    "--from",
    "where",
    default="last",
    show_default=True,
    metavar="WHERE",
    help=f"Begin at: first, last, or a time: {TIME_HELP}. A group goes on where it has committed.",
)
@click.option("-t", "--tags", help="Only these tags: 'a || b'. [default: all]")
@click.option(
    "--sql",
    metavar="EXPRESSION",
    help="Only messages that an SQL92 expression over properties and TAGS is true for: "
    "\"price > 10 AND TAGS = 'new'\".",
)
@click.option(
    "--python",
    "python_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Only messages that match(message) of this file answers True for; the cluster must allow "
    "filters in Python.",
)
@click.option(
    "-q",
    "--queue",
    "queue_ids",
    type=click.IntRange(0, MAX_QUEUES_PER_TOPIC - 1),
    multiple=True,
    help="Only this queue of each broker; repeatable. Not with --group.",
)
@click.option(
    "-b", "--broker", default="", help="Only the queues of this broker group. Not with --group."
)
@click.option(
    "--count-by",
    type=click.Choice(["tag", "queue"]),
    help="Print no messages, but how many there were of each tag, or in each queue.",
)
@click.option(
    "--until",
    metavar="WHEN",
    help="End in front of what was stored at this time (UTC) or later, or, with `end`, behind "
    "what is there now. Not with --group.",
)
@click.option("-n", "--max", "most", type=click.IntRange(1), help="End after so many messages.")
@click.option(
    "--timeout",
    type=SECONDS,
    help="End when nothing has come for so many seconds; with --max, exit code 1 then.",
)
@click.option("--body", "only_body", is_flag=True, help="Print bodies only, as they are.")
@cluster_options
def consume(
    topic: str,
    group: str | None,
    where: str,
    tags: str | None,
    sql: str | None,
    python_file: Path | None,
    queue_ids: tuple[int, ...],
    broker: str,
    count_by: str | None,
    until: str | None,
    most: int | None,
    timeout: float | None,
    only_body: bool,
    namesrv: str,
) -> int:
    """Print the messages of TOPIC as they come, until Ctrl-C.

    With --json one object a line; a body that is no UTF-8 text is in body_base64.

    \b
    Examples:
      mqmesh consume orders
      mqmesh consume orders --from first --max 10
      mqmesh consume orders --from 10m --tags 'new || paid' --json
      mqmesh consume orders --sql "price > 10 AND country IN ('FR', 'DE')"
      mqmesh consume orders --from 2026-03-01T12:00Z --until 2026-03-01T13:00Z --queue 3
      mqmesh consume orders --from first --until end --json > orders.jsonl
      mqmesh consume orders --from first --until end --broker broker-a --queue 0 --count-by tag
      mqmesh consume orders --group audit --timeout 5
    """
    selector = _selector(tags, sql, python_file)
    if group is not None and (queue_ids or broker or until is not None):
        raise click.UsageError(
            "--queue, --broker and --until are for looking on; members of a group share its queues"
        )
    now_ms = SystemClock().wall_ms()
    options = _start_position(where, now_ms)
    end_ms = None if until is None else _until_ms(until, now_ms)
    if end_ms is not None and end_ms < options.get("consume_timestamp_ms", 0):
        raise ConfigError(f"--until {until} is before --from {where}")
    _look_for(topic, namesrv, waits=until is None)
    show = _show_body if only_body else _show_json if answers_json() else _pretty_printer()
    counts: Counter[str] = Counter()
    if count_by is not None:
        show = _counter(counts, count_by)
    with tempfile.TemporaryDirectory(prefix="mqmesh-") as folder, Interrupt() as interrupt:
        if group is None:
            # A group of its own gets every message, and is forgotten afterwards.
            group = f"{LOOK_GROUP_PREFIX}{secrets.token_hex(8)}"
            options.update(
                message_model=MessageModel.BROADCASTING, auto_commit=False, offsets_dir=folder
            )
        consumer = PullConsumer(group, namesrv_addr=namesrv, **options)
        consumer.subscribe(topic, selector)
        with consumer:
            queues = _choose(consumer, topic, queue_ids, broker)
            is_endless = until is None and most is None and timeout is None
            hint = "Ctrl-C ends" if is_endless else "Ctrl-C ends it sooner"
            print_note(f"consuming {topic} from {counted(len(queues), 'queue')}; {hint}")
            ends = None if end_ms is None else _ends(consumer, queues, end_ms)
            only = frozenset(queues) if queue_ids or broker else None
            reading = Reading(consumer, show, most, timeout, ends, only)
            count = reading.run(interrupt)
    if count_by is not None:
        _print_counts(counts, count_by)
    if most is not None and count < most and not interrupt:
        print_error(f"only {count:,} of {most:,} messages came")
        return ExitCode.FAILED
    return ExitCode.OK


def _selector(tags: str | None, sql: str | None, python_file: Path | None) -> MessageSelector:
    if sum(one is not None for one in (tags, sql, python_file)) > 1:
        raise click.UsageError(
            "--tags, --sql and --python exclude each other; SQL92 knows TAGS, Python message.tag"
        )
    if python_file is not None:
        selector = MessageSelector.by_python(_read_source(python_file))
    elif sql is not None:
        selector = MessageSelector.by_sql(sql)
    else:
        selector = MessageSelector.by_tag(ALL if tags is None else tags)
    selector.check()
    return selector


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no UTF-8 text: {error.reason}") from None


class Reading:
    """Prints messages of a consumer until there are enough.

    Args:
        consumer: Started.
        show: Prints a message.
        most: Messages; None for no limit.
        timeout: Seconds without one after which it ends; None to wait on.
        ends: Queue offset at which each queue ends; None for those that go on.
        queues: Only these; None for all, those to come too.
    """

    def __init__(
        self,
        consumer: PullConsumer,
        show: Show,
        most: int | None,
        timeout: float | None,
        ends: dict[MessageQueue, int] | None,
        queues: frozenset[MessageQueue] | None,
    ) -> None:
        self._consumer = consumer
        self._show = show
        self._most = most
        self._timeout = timeout
        self._ends = ends
        self._queues = queues
        self._count = 0

    def run(self, interrupt: Interrupt) -> int:
        """Prints until there is enough, or a signal comes; returns how many."""
        last = time.monotonic()
        while not interrupt and not self._is_enough():
            room = MESSAGES_A_POLL
            if self._most is not None:
                room = min(self._most - self._count, MESSAGES_A_POLL)
            messages = self._consumer.poll(POLL_MS, room)
            self._print(messages)
            now = time.monotonic()
            if messages:
                last = now
            elif self._timeout is not None and now - last >= self._timeout:
                break
        return self._count

    def _is_enough(self) -> bool:
        if self._most is not None and self._count >= self._most:
            return True
        ends, position = self._ends, self._consumer.position
        return ends is not None and all(position(queue) >= end for queue, end in ends.items())

    def _print(self, messages: list[StoredMessage]) -> None:
        for message in messages:
            if self._queues is not None and message.message_queue not in self._queues:
                continue  # it came before its queue was paused
            end = None if self._ends is None else self._ends.get(message.message_queue, 0)
            if end is None or message.queue_offset < end:
                self._show(message)
                self._count += 1
        standard_output().flush()


def _until_ms(until: str, now_ms: int) -> int:
    if until == "end":
        return MAX_TIMESTAMP_MS
    return parse_time(until, now_ms, "--until", "end, ")


def _choose(
    consumer: PullConsumer, topic: str, queue_ids: tuple[int, ...], broker: str
) -> list[MessageQueue]:
    """Chooses the wanted queues; the others are paused."""
    queues = consumer.assignment()
    brokers = sorted({queue.broker_name for queue in queues})
    if broker and broker not in brokers:
        raise ConfigError(
            f"topic {topic} has no queue on broker {broker!r}; it is on {', '.join(brokers) or '-'}"
        )
    of_broker = [queue for queue in queues if broker in ("", queue.broker_name)]
    missing = sorted(set(queue_ids) - {queue.queue_id for queue in of_broker})
    if missing:
        raise ConfigError(f"topic {topic} has no queue {missing[0]}")
    wanted = [queue for queue in of_broker if not queue_ids or queue.queue_id in queue_ids]
    if len(wanted) < len(queues):
        consumer.pause(*(queue for queue in queues if queue not in wanted))
    return wanted


def _counter(counts: Counter[str], count_by: str) -> Show:
    def show(message: StoredMessage) -> None:
        queue = f"{message.broker_name}:{message.queue_id}"
        counts[message.tag or "" if count_by == "tag" else queue] += 1

    return show


def _print_counts(counts: Counter[str], count_by: str) -> None:
    found = [{count_by: name, "messages": count} for name, count in sorted(counts.items())]
    print_records((Column(count_by, count_by.upper()), Column("messages", "MESSAGES")), found)


def _ends(
    consumer: PullConsumer, queues: list[MessageQueue], end_ms: int
) -> dict[MessageQueue, int]:
    return {queue: consumer.offset_of_time(queue, end_ms) for queue in queues}


def _look_for(topic: str, namesrv: str, *, waits: bool) -> None:
    with AdminClient(namesrv) as admin:
        try:
            admin.route(topic)
        except TopicNotFound:
            if not waits:
                raise  # a topic that is not there has no end to read up to
            print_note(f"no broker serves topic {topic} now; waiting for one")


def _start_position(where: str, now_ms: int) -> dict[str, Any]:
    if where in ("first", "last"):
        begin = ConsumeFromWhere.FIRST_OFFSET if where == "first" else ConsumeFromWhere.LAST_OFFSET
        return {"consume_from_where": begin}
    return {
        "consume_from_where": ConsumeFromWhere.TIMESTAMP,
        "consume_timestamp_ms": parse_time(where, now_ms, "--from", "first, last, "),
    }


def _show_json(message: StoredMessage) -> None:
    print_json(message_view(message), flush=False)


def _show_body(message: StoredMessage) -> None:
    print_as_is(message.body)


def _pretty_printer() -> Show:
    lines = StyledLines()
    return lambda message: lines.say(parts_of(message))

"""`mqmesh bench …`: how much a running cluster can do, and how quickly."""

import functools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from mqmesh.errors import ClientError, MQMeshError
from mqmesh.protocol.route import MAX_QUEUES_PER_TOPIC
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client.interrupt import Interrupt
from mqmesh.units import MIB

from ..main import INTERRUPTED
from ..messages.send import properties_of
from ..notes import print_error, print_note, print_warning
from ..options import RATE, SECONDS, json_option, namesrv_option
from ..progress_bar import bar_of
from ..render import print_answer, print_table, say
from .crew import Crew, OnProgress
from .result import (
    LATENCY_HEAD,
    RATE_HEAD,
    BenchResult,
    latency_rows,
    rate_rows,
    summarize,
)
from .words import MIN_STAMPED_BYTES, BenchTask, ClientReport, Work

COUNT: Final = 500_000
LATENCY_COUNT: Final = 5_000
LATENCY_RATE: Final = 500.0
MAX_CLIENTS: Final = 64
MAX_BODY_BYTES: Final = 4 * MIB
MAX_BATCH: Final = 10_000
QUEUES: Final = 8
TOPIC_PREFIX: Final = "mqmesh-bench-"

_F = TypeVar("_F", bound=Callable[..., Any])


def _decorated(function: _F, decorators: tuple[Callable[[Any], Any], ...]) -> _F:
    return functools.reduce(lambda done, one: one(done), reversed(decorators), function)


@click.group()
def bench() -> None:
    """Measure a running cluster: how much it takes and gives, and how quickly.

    Clients are processes of their own on this machine. Without TOPIC a topic is made, and
    deleted at the end. Ctrl-C ends a measurement early and shows its results until then.

    \b
    Examples:
      mqmesh bench produce
      mqmesh bench produce --clients 4 --size 1024 --duration 30
      mqmesh bench produce orders --count 100000 --rate 5000 --tag new --keys -p shop=Berlin
      mqmesh bench consume --clients 2
      mqmesh bench consume orders --json
      mqmesh bench latency --rate 1000 --duration 20
    """


def client_options(function: _F) -> _F:
    """Adds the options of all three commands."""
    decorators = (
        click.argument("topic", required=False),
        click.option(
            "-n", "--count", type=click.IntRange(1), help="End after so many messages, of all."
        ),
        click.option(
            "--duration",
            type=SECONDS,
            metavar="SECONDS",
            help="End after so long.",
        ),
        click.option(
            "--clients",
            type=click.IntRange(1, MAX_CLIENTS),
            default=1,
            show_default=True,
            help="Processes that do it.",
        ),
        click.option(
            "--queues",
            type=click.IntRange(1, MAX_QUEUES_PER_TOPIC),
            default=QUEUES,
            show_default=True,
            help="Of a topic that is made, on each broker.",
        ),
        namesrv_option,
        json_option,
    )
    return _decorated(function, decorators)


def message_options(function: _F) -> _F:
    """Adds the options of messages."""
    decorators = (
        click.option(
            "--size",
            type=click.IntRange(0, MAX_BODY_BYTES),
            default=128,
            show_default=True,
            help="Bytes of each body; random, so nothing compresses them.",
        ),
        click.option("-t", "--tag", help="Of each message."),
        click.option("--keys", "has_keys", is_flag=True, help="Each has a key of its own."),
        click.option(
            "-p",
            "--property",
            "pairs",
            multiple=True,
            metavar="NAME=VALUE",
            help="Of each. Repeatable.",
        ),
    )
    return _decorated(function, decorators)


batch_option = click.option(
    "--batch",
    "batch_messages",
    type=click.IntRange(1, MAX_BATCH),
    default=1,
    show_default=True,
    help="Messages that a call hands over; with 1 the producer makes batches by itself.",
)


@bench.command()
@client_options
@message_options
@batch_option
@click.option("--rate", type=RATE, help="Messages a second, of all.")
def produce(
    topic: str | None,
    count: int | None,
    duration: float | None,
    clients: int,
    queues: int,
    rate: float | None,
    namesrv: str,
    **message: Any,
) -> int:
    """Send messages as fast as they are acknowledged, or at a rate.

    By default 500,000 messages. Each is one `send_async`; every acknowledgement is waited for.

    \b
    Examples:
      mqmesh bench produce --clients 4 --size 1024 --duration 30
      mqmesh bench produce orders --count 100000 --rate 5000 --tag new --keys -p shop=Berlin
    """
    count = _count(count, duration, COUNT)
    with _bench(topic, namesrv, queues, clients) as (name, interrupt):
        tasks = _sends(Work.SEND, name, namesrv, clients, count, duration, rate, message)
        with _bar("sending", count, duration) as bar, Crew(tasks, interrupt) as crew:
            reports = crew.run(bar)
        result = summarize("produce", name, reports, is_interrupted=bool(interrupt))
        return _print_result(result)


@bench.command()
@client_options
@message_options
def consume(
    topic: str | None,
    count: int | None,
    duration: float | None,
    clients: int,
    queues: int,
    namesrv: str,
    **message: Any,
) -> int:
    """Read messages as fast as they come.

    Of TOPIC all that is stored, from the first on; with --count or --duration it waits for
    more. Nothing is committed, so no group of yours is disturbed. Without TOPIC messages are
    sent first (500,000, or --count), which is not measured. Clients divide the queues.

    \b
    Examples:
      mqmesh bench consume --clients 2
      mqmesh bench consume orders --json
    """
    with _bench(topic, namesrv, queues, clients) as (name, interrupt):
        if topic is None:
            enough = _fill(name, namesrv, clients, count or COUNT, message, interrupt)
        else:
            enough = count or (0 if duration else _stored(namesrv, topic))
        tasks = [
            BenchTask(
                work=Work.READ,
                namesrv=namesrv,
                topic=name,
                client=number,
                clients=clients,
                duration_s=duration or 0.0,
            )
            for number in range(clients)
        ]
        reports = [ClientReport()]
        if not interrupt:
            with _bar("reading", enough, duration) as bar, Crew(tasks, interrupt) as crew:
                reports = crew.run(bar, enough)
        result = summarize("consume", name, reports, is_interrupted=bool(interrupt))
        return _print_result(result)


@bench.command()
@client_options
@message_options
@click.option(
    "--rate",
    type=RATE,
    default=LATENCY_RATE,
    show_default=True,
    help="Messages a second, of all clients.",
)
def latency(
    topic: str | None,
    count: int | None,
    duration: float | None,
    clients: int,
    queues: int,
    rate: float,
    namesrv: str,
    **message: Any,
) -> int:
    """Time single messages: until they are acknowledged, and until a consumer has them.

    Each client sends one message after the other, and another one reads; by default 5,000
    messages. Percentiles are up to 2.2 percent too high.

    \b
    Examples:
      mqmesh bench latency --rate 1000 --duration 20
    """
    if message["size"] < MIN_STAMPED_BYTES:
        raise click.UsageError(
            f"--size {message['size']}: must be at least {MIN_STAMPED_BYTES}, for the time in it"
        )
    count = _count(count, duration, LATENCY_COUNT)
    with _bench(topic, namesrv, queues, clients) as (name, interrupt):
        senders = _sends(Work.SEND_EACH, name, namesrv, clients, count, duration, rate, message)
        readers = [
            BenchTask(
                work=Work.READ_STAMPED,
                namesrv=namesrv,
                topic=name,
                client=number,
                clients=clients,
                run=senders[0].run,
                body_bytes=message["size"],
            )
            for number in range(clients)
        ]
        with _bar("timing", count, duration) as bar, Crew([*senders, *readers], interrupt) as crew:
            reports = crew.run(bar)
        result = summarize(
            "latency",
            name,
            reports[: len(senders)],
            reports[len(senders) :],
            is_interrupted=bool(interrupt),
        )
        return _print_result(result)


def _count(count: int | None, duration: float | None, default: int) -> int:
    """Returns the most messages to send or read; 0 where the time decides."""
    return count or (0 if duration else default)


def _sends(
    work: Work,
    topic: str,
    namesrv: str,
    clients: int,
    count: int,
    duration: float | None,
    rate: float | None,
    message: dict[str, Any],
) -> list[BenchTask]:
    """Returns a task for each sender, with its share of count and rate."""
    clients = min(clients, count) if count else clients
    run = secrets.randbits(64)
    return [
        BenchTask(
            work=work,
            namesrv=namesrv,
            topic=topic,
            client=number,
            clients=clients,
            run=run,
            message_count=count // clients + (number < count % clients),
            duration_s=duration or 0.0,
            body_bytes=message["size"],
            rate=(rate or 0.0) / clients,
            batch_messages=message.get("batch_messages", 1),
            tag=message["tag"],
            has_keys=message["has_keys"],
            properties=properties_of(message["pairs"]) or {},
        )
        for number in range(clients)
    ]


def _fill(
    topic: str,
    namesrv: str,
    clients: int,
    count: int,
    message: dict[str, Any],
    interrupt: Interrupt,
) -> int:
    """Sends the messages to read; returns their number."""
    tasks = _sends(Work.SEND, topic, namesrv, clients, count, None, None, message)
    with _bar("filling", count, None) as bar, Crew(tasks, interrupt) as crew:
        reports = crew.run(bar)
    stored = sum(one.done for one in reports)
    if stored < count and not interrupt:
        error = next((one.error for one in reports if one.error), "")
        raise ClientError(f"only {stored:,} of {count:,} messages could be sent: {error}")
    return stored


def _stored(namesrv: str, topic: str) -> int:
    with AdminClient(namesrv) as admin:
        stats = admin.topic_stats(topic)
    count = sum(
        one.max_queue_offset - one.min_queue_offset
        for broker in stats.values()
        for one in broker.queues
    )
    if not count:
        raise ClientError(f"topic {topic} holds no messages; --count or --duration waits for some")
    return count


@contextmanager
def _bench(
    topic: str | None, namesrv: str, queues: int, clients: int
) -> Iterator[tuple[str, Interrupt]]:
    """Gives the topic: an existing one, or one that is made for this and deleted afterwards."""
    name = topic or f"{TOPIC_PREFIX}{secrets.token_hex(8)}"
    with Interrupt() as interrupt, AdminClient(namesrv) as admin:
        if topic is None:
            admin.create_topic(name, queues=max(queues, clients))
        else:
            admin.route(topic)
        try:
            yield name, interrupt
        finally:
            if topic is None:
                _delete(admin, name)


def _delete(admin: AdminClient, topic: str) -> None:
    try:
        silent = admin.delete_topic(topic).silent_namesrvs
    except MQMeshError as error:
        print_warning(
            f"topic {topic} could not be deleted ({error}); `mqmesh topic delete` does it"
        )
        return
    if silent:
        print_warning(f"name servers {', '.join(silent)} did not answer; they forget {topic} later")


@contextmanager
def _bar(what: str, count: int, duration: float | None) -> Iterator[OnProgress]:
    """Shows a bar of messages, or of seconds where the time decides."""
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with bar_of(*columns, total=count or duration) as update:

        def on_progress(done: int, seconds: float) -> None:
            if update is not None:
                rate = f", {done / seconds:,.0f} a second" if seconds >= 0.5 else ""
                update(completed=done if count else seconds, description=f"{done:,} messages{rate}")

        yield on_progress


def _print_result(result: BenchResult) -> int:
    if print_answer(result):
        print_table(RATE_HEAD, rate_rows(result))
        if result.latency_ms:
            say()
            print_table(LATENCY_HEAD, latency_rows(result))
    if result.is_interrupted:
        print_note("interrupted; this is what came of it until then")
        return INTERRUPTED
    if result.total.failed:
        print_error(f"sends that failed: {result.total.failed:,}, the first one so: {result.error}")
        return ExitCode.FAILED
    if result.missing:
        print_error(f"{result.missing:,} messages were acknowledged and did not come")
        return ExitCode.FAILED
    return ExitCode.OK

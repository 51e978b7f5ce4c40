"""`mqmesh send`: sends messages from the command line, a file or a pipe."""

import io
import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import click

from mqmesh.clock import SystemClock
from mqmesh.errors import ConfigError, MQMeshError, NoRoute, RequestTimeout, TransportError
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.route import MAX_PRIORITIES
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.views.sends import sent_view
from mqmesh.sdk.client.interrupt import Interrupt
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.producer_options import ProducerKeywords
from mqmesh.sdk.producer.queue_selector import QueueChoice
from mqmesh.sdk.producer.send_result import SendFuture, SendResult
from mqmesh.user_times import is_duration, parse_duration, parse_time

from ..main import INTERRUPTED
from ..notes import answers_json, print_error, print_note
from ..options import RATE, cluster_options
from ..progress_bar import OnUpdate, message_bar
from ..render import print_json, say

GROUP: Final = "mqmesh-cli"
MAX_UNANSWERED: Final = 20_000
"""Sends whose outcome is still to come; more wait."""
PROGRESS_INTERVAL_S: Final = 0.1
LONG_OVER_RATE_S: Final = 1.0
PAUSE_S: Final = 0.1
CLOSE_MS: Final = 500
"""All outcomes were waited for when it is closed, but for Ctrl-C, which must be quick."""
GRACE_S: Final = 0.3
"""Wait after Ctrl-C for outcomes that are still to come."""
GIVE_UP_S: Final = 30.0
"""Time of failed sends after which the rest is not tried any more, if brokers were there."""


@click.command()
@click.argument("topic")
@click.argument("body", required=False, type=click.UNPROCESSED)  # any bytes
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Send what is in a file.",
)
@click.option("--lines", is_flag=True, help="Every line of the input that is not empty is a body.")
@click.option("-t", "--tag", help="Tag, for cheap filtering.")
@click.option("-k", "--key", "keys", multiple=True, help="Key to find it by. Repeatable.")
@click.option(
    "-p", "--property", "pairs", multiple=True, metavar="NAME=VALUE", help="Property. Repeatable."
)
@click.option("--sharding-key", help="Equal ones go to the same queue, in order.")
@click.option(
    "--delay", metavar="DURATION", help="Deliver so long after now: 500ms, 30s, 10m, 2h, 1d."
)
@click.option(
    "--deliver-at",
    metavar="TIME",
    help="Deliver then: 2026-03-01T12:00 (UTC, or +01:00 behind it), or ms since 1970.",
)
@click.option(
    "--priority", type=click.IntRange(0, MAX_PRIORITIES - 1), help="Of a topic with priorities."
)
@click.option("--ttl", metavar="DURATION", help="Time to live: 30s, 10m, 2h, 1d.")
@click.option("-q", "--queue", "queue_id", type=click.IntRange(0), help="To this queue.")
@click.option("-b", "--broker", default="", help="To this broker group, to its queues in turn.")
@click.option("-n", "--count", type=click.IntRange(1), default=1, help="Send it so many times.")
@click.option("--rate", type=RATE, help="Messages a second, at most.")
@click.option("--group", default=GROUP, show_default=True, help="Producer group.")
@click.option(
    "--timeout", type=click.FloatRange(0.001, 600), default=3.0, show_default=True, help="Seconds."
)
@cluster_options
def send(
    topic: str,
    body: str | None,
    path: Path | None,
    lines: bool,
    tag: str | None,
    keys: tuple[str, ...],
    pairs: tuple[str, ...],
    sharding_key: str | None,
    delay: str | None,
    deliver_at: str | None,
    priority: int | None,
    ttl: str | None,
    queue_id: int | None,
    broker: str,
    count: int,
    rate: float | None,
    group: str,
    timeout: float,
    namesrv: str,
) -> int:
    """Send messages to TOPIC.

    The body is the argument, a file, or standard input, byte for byte. With --json one
    object a message is printed, in the order of sending.

    \b
    Examples:
      mqmesh send orders 'hello' --tag new --key 4711 -p shop=Berlin
      mqmesh send orders --file order.xml --sharding-key customer-7
      cat orders.jsonl | mqmesh send orders --lines
      mqmesh send orders 'are you there?' --delay 90s
      mqmesh send orders 'hello' --queue 3 --broker broker-a
      mqmesh send jobs 'now!' --priority 7
      mqmesh send load 'x' --count 100000 --rate 5000
    """
    properties = properties_of(pairs)
    if sharding_key is not None and (queue_id is not None or broker):
        raise click.UsageError("--sharding-key chooses the queue; leave out --queue and --broker")
    if priority is not None and (queue_id is not None or broker):
        raise click.UsageError("--priority chooses the queue; leave out --queue and --broker")
    clock = SystemClock()
    _due_ms(delay, deliver_at, clock.wall_ms())  # is wrong before anything is sent
    own: QueueChoice = {
        "priority": priority,
        "ttl_ms": None if ttl is None else parse_duration(ttl, "--ttl"),
    }
    total = None if lines else count
    sending = _Sending(total)
    options: ProducerKeywords = {
        "send_msg_timeout_ms": max(round(timeout * 1_000), 1),
        "close_timeout_ms": CLOSE_MS,
    }
    with _input(body, path) as stream:
        bodies: Iterable[bytes] = _lines(stream) if lines else [stream.read()]
        messages = (
            Message(
                topic,
                one,
                tag,
                keys,
                properties,
                sharding_key=sharding_key,
                deliver_at_ms=_due_ms(delay, deliver_at, clock.wall_ms()),
            )
            for one in bodies
            for _ in range(count)
        )
        if total == 1:
            with Producer(group, namesrv_addr=namesrv, **options) as producer:
                queues = _queues(producer, topic, queue_id, broker)
                sent = producer.send(next(messages), **_choice(own, queues))
                sending.settle(sent)
            return ExitCode.OK
        with Interrupt() as interrupt:
            with Producer(group, namesrv_addr=namesrv, **options) as producer, sending.progress():
                queues = _queues(producer, topic, queue_id, broker)
                _send_all(producer, messages, queues, own, rate, sending, interrupt)
            sending.summary()
    if sending.failed:
        return ExitCode.FAILED
    return INTERRUPTED if interrupt else ExitCode.OK


def _send_all(
    producer: Producer,
    messages: Iterator[Message],
    queues: Iterator[MessageQueue | None],
    own: QueueChoice,
    rate: float | None,
    sending: "_Sending",
    interrupt: Interrupt,
) -> None:
    waiting: deque[SendFuture] = deque()
    for message in _paced(messages, rate, interrupt):
        try:
            waiting.append(producer.send_async(message, **_choice(own, queues)))
        except MQMeshError as error:
            sending.fail(error)
            if isinstance(error, ConfigError):
                break  # the next one would be as wrong
        if sending.is_hopeless:
            print_error("gave up, further messages were not sent")
            break
        while waiting and waiting[0].done():
            sending.take(waiting.popleft())
        while len(waiting) >= MAX_UNANSWERED and not interrupt:
            if _wait_for(waiting[0]):
                sending.take(waiting.popleft())
    give_up = math.inf
    while waiting:
        if interrupt and give_up == math.inf:
            give_up = time.monotonic() + GRACE_S
        if time.monotonic() >= give_up or _wait_for(waiting[0]):
            sending.take(waiting.popleft())


def _choice(own: QueueChoice, queues: Iterator[MessageQueue | None]) -> QueueChoice:
    return {**own, "queue": next(queues)}


def _queues(
    producer: Producer, topic: str, queue_id: int | None, broker: str
) -> Iterator[MessageQueue | None]:
    """Yields the queues of the messages; None where the producer chooses."""
    if queue_id is None and not broker:
        return itertools.repeat(None)
    known = producer.fetch_publish_queues(topic)
    found = [
        queue
        for queue in known
        if queue_id in (None, queue.queue_id) and broker in ("", queue.broker_name)
    ]
    brokers = sorted({queue.broker_name for queue in known})
    if not found:
        wanted = "" if queue_id is None else f" {queue_id}"
        where = f" on broker {broker!r}" if broker else ""
        raise ConfigError(
            f"topic {topic} has no queue{wanted}{where} that may be sent to; it is on "
            f"{', '.join(brokers) or '-'}"
        )
    if queue_id is not None and len(found) > 1:
        raise ConfigError(f"queue {queue_id} is on {', '.join(brokers)}: say which by --broker")
    return itertools.cycle(found)


def _wait_for(future: SendFuture) -> bool:
    """Waits for an outcome, but not longer than Ctrl-C may wait for us."""
    try:
        future.result(PAUSE_S)
    except MQMeshError:
        return future.done()
    return True


class _Sending:
    """Counts outcomes and shows how it goes."""

    def __init__(self, total: int | None) -> None:
        self.failed = 0
        self.is_hopeless = False
        self._failing_since: float | None = None
        self._sent = 0
        self._total = total
        self._as_json = answers_json()
        self._began = time.monotonic()
        self._shown = 0.0
        self._update: OnUpdate | None = None

    @contextmanager
    def progress(self) -> Iterator[None]:
        with message_bar("sending", self._total) as self._update:
            yield

    def take(self, future: SendFuture) -> None:
        if not future.done():
            self.fail(
                RequestTimeout("interrupted; whether the last messages are stored is unknown")
            )
            return
        try:
            self.settle(future.result())
        except MQMeshError as error:
            self.fail(error)

    def settle(self, result: SendResult) -> None:
        self._sent += 1
        self._failing_since = None
        if self._as_json:
            print_json(sent_view(result))
        elif self._total == 1:
            queue = result.message_queue
            say(
                f"{result.status.name} {result.message_id} in queue {queue.queue_id} of "
                f"{queue.topic} on {queue.broker_name}, offset {result.queue_offset}"
            )
        elif result.status is not SendStatus.SEND_OK:
            print_note(f"{result.status.name} {result.message_id}")
        now = time.monotonic()
        if self._update is not None and now - self._shown >= PROGRESS_INTERVAL_S:
            self._shown = now
            self._update(completed=self._sent)

    def fail(self, error: MQMeshError) -> None:
        self.failed += 1
        if isinstance(error, NoRoute | TransportError):
            # No broker answers: with a timeout for each line, a long input would take for ever.
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            self.is_hopeless = self._sent == 0 or now - self._failing_since >= GIVE_UP_S
        if self._as_json:
            print_json({"error": str(error), "kind": type(error).__name__})
        if self.failed == 1:
            print_error(str(error))

    def summary(self) -> None:
        if self._total == 1 or self._as_json:
            return
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = f"{self._sent / seconds:,.0f} a second"
        failed = f", {self.failed:,} failed" if self.failed else ""
        say(f"{self._sent:,} messages sent in {seconds:.2f} s ({rate}){failed}")


def _paced(
    messages: Iterator[Message], rate: float | None, interrupt: Interrupt
) -> Iterator[Message]:
    """Yields the messages, not faster than the rate, until a signal comes."""
    began = time.monotonic()
    for number, message in enumerate(messages):
        if rate is not None:
            due = began + number / rate
            # A send that was held up for long is not made up for with a burst.
            if time.monotonic() - due > LONG_OVER_RATE_S:
                began += time.monotonic() - due
            interrupt.wait(due - time.monotonic())
        if interrupt:
            return
        yield message


@contextmanager
def _input(body: str | None, path: Path | None) -> Iterator[BinaryIO]:
    if body is not None and body != "-":
        if path is not None:
            raise ConfigError("a body and --file exclude each other")
        yield io.BytesIO(body.encode(errors="surrogateescape"))
    elif path is not None:
        with path.open("rb") as file:
            yield file
    elif sys.stdin.isatty():
        raise ConfigError("no body; give one, or --file, or pipe one in")
    else:
        yield sys.stdin.buffer


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    for line in stream:
        body = line.rstrip(b"\r\n")
        if body:
            yield body


def properties_of(pairs: tuple[str, ...]) -> dict[str, str] | None:
    """Properties as users write them; None for none.

    Raises:
        ConfigError: One has not the form NAME=VALUE.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--property {pair!r}: must have the form NAME=VALUE")
        found[name] = value
    return found or None


def _due_ms(delay: str | None, deliver_at: str | None, now_ms: int) -> int:
    """Returns the delivery time of the messages, 0 for at once."""
    if delay is not None and deliver_at is not None:
        raise click.UsageError("--delay and --deliver-at exclude each other")
    if deliver_at is not None:
        if is_duration(deliver_at):
            raise ConfigError(
                f"--deliver-at {deliver_at!r}: must be a point in time; --delay takes durations"
            )
        return parse_time(deliver_at, now_ms, "--deliver-at")
    return 0 if delay is None else now_ms + parse_duration(delay, "--delay")

"""Delayed messages that wait, by the time at which they are due."""

from typing import Final

import msgspec

from mqmesh.aio import DelayClient
from mqmesh.console.page import TableArguments, TablePage, Text, Visit, table_page
from mqmesh.console.queries.messages import MessageRow, message_row
from mqmesh.message import RETRY_PREFIX, check_topic
from mqmesh.sdk.admin.delays import DelayedMessage

_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
STEPS: Final = (
    ("now", 0),
    ("1 min", _MINUTE_MS),
    ("10 min", 10 * _MINUTE_MS),
    ("1 h", _HOUR_MS),
    ("6 h", 6 * _HOUR_MS),
    ("1 day", _DAY_MS),
    ("7 days", 7 * _DAY_MS),
    ("30 days", 30 * _DAY_MS),
)
"""Steps of the chart, each with its end in ms from now; messages due later form a last step."""


class DelayedArguments(TableArguments, frozen=True, kw_only=True):
    """Arguments of the page.

    Attributes:
        topic: Only messages that go to this physical topic; "" for all.
    """

    topic: Text = ""


class DelayedRow(msgspec.Struct, frozen=True):
    """A message that waits.

    Attributes:
        due_ms: When it is delivered, ms since 1970.
        topic: Topic that it goes to; of a retry, the one that it was sent to.
        retry_of: Group that failed to consume it; "" for a message that was sent with a delay.
        message: The message.
    """

    due_ms: int
    topic: str
    retry_of: str
    message: MessageRow


class DueStep(msgspec.Struct, frozen=True):
    """A bar of the chart.

    Attributes:
        label: Due within this time; ``later`` for the rest.
        count: Messages.
        height: Of the bar, 0 to 100; 3 at least if there is a message.
    """

    label: str
    count: int
    height: int


class DelayedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Delayed messages that wait.

    Attributes:
        steps: How many are due when.
        table: The messages, those due next first.
    """

    steps: list[DueStep]
    table: TablePage[DelayedRow]


async def delayed(visit: Visit, arguments: DelayedArguments) -> DelayedMessages:
    """Return one page of the messages that wait."""
    topic = check_topic(arguments.topic) if arguments.topic else ""
    most = visit.config.max_query_messages
    async with visit.client(DelayClient) as client:
        found = await client.waiting(topic, max_count=most)
    now_ms = visit.clock.wall_ms()
    cut = f"These are the {most:,} due next: name a topic." if len(found) == most else ""
    return DelayedMessages(
        steps=due_steps([one.due_ms - now_ms for one in found]),
        table=table_page([_row(visit, one) for one in found], arguments, cut=cut),
    )


def due_steps(left_ms: list[int]) -> list[DueStep]:
    """Return how many messages are due in each step.

    Args:
        left_ms: Time that is left for each, in ms.
    """
    counts = [0] * (len(STEPS) + 1)
    for left in left_ms:
        counts[sum(left > most_ms for _, most_ms in STEPS)] += 1
    most = max(counts)
    labels = [label for label, _ in STEPS] + ["later"]
    return [
        DueStep(label, count, max(100 * count // most, 3) if count else 0)
        for label, count in zip(labels, counts, strict=True)
    ]


def _row(visit: Visit, one: DelayedMessage) -> DelayedRow:
    group = ""
    if one.real_topic.startswith(RETRY_PREFIX):
        group = one.real_topic.removeprefix(RETRY_PREFIX)
    topic = one.message.topic if group else one.real_topic
    return DelayedRow(one.due_ms, topic, group, message_row(visit, one.message))

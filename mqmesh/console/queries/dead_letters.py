"""Dead letters: the groups that have some, and those of one group."""

from collections import Counter
from typing import Final, Literal

import msgspec

from mqmesh.aio import DeadLetterClient, SearchClient
from mqmesh.console.page import Name, PageNumber, TableArguments, TablePage, Text, Visit, table_page
from mqmesh.console.queries.messages import MessageRow, looked_at, message_row, times
from mqmesh.errors import TopicNotFound
from mqmesh.message import PROPERTY_LAST_FAILURE, check_topic, dlq_topic
from mqmesh.protocol.commands import Right
from mqmesh.sdk.admin.dead_letters import DeadLetter, DeadLetterFilter
from mqmesh.sdk.admin.views.messages import dead_letter_groups

MAX_REASONS: Final = 12
"""Reasons that a page shows with their counts."""
GROUPS_WITH_REASON: Final = 20
"""Groups whose last reason is read for one page."""
_RESENT = {"yes": True, "no": False, "either": None}


class DeadLetterGroup(msgspec.Struct, frozen=True):
    """A group with dead letters.

    Attributes:
        group: Consumer group.
        count: Its dead letters.
        oldest_ms: When the first of them was given up, ms since 1970.
        newest_ms: When the last one was.
        last_reason: Last failure of the newest; None where it was not read.
    """

    group: str
    count: int
    oldest_ms: int
    newest_ms: int
    last_reason: str | None = None


class LetterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of a group's dead letters.

    Attributes:
        group: Consumer group.
        topic: Sent to this topic at first.
        tag: With this tag.
        key: With this key.
        reason: With this text in the last failure.
        since: Given up at this time or later: an age such as 1h, or a moment.
        until: Given up at this time or before.
        resent: Only those that were resent, or only others.
    """

    group: Name
    topic: Text = ""
    tag: Text = ""
    key: Text = ""
    reason: Text = ""
    since: Text = ""
    until: Text = ""
    resent: Literal["either", "no", "yes"] = "either"


class LettersArguments(LetterChoice, frozen=True, kw_only=True):
    """Arguments of the page of a group's dead letters.

    Attributes:
        page: Number of the page, from 1.
    """

    page: PageNumber = 1


class LetterRow(msgspec.Struct, frozen=True):
    """A dead letter in a list.

    Attributes:
        place: ``BROKER@OFFSET`` in the queue of dead letters, by which it is chosen.
        message: The message; None for a batch that cannot be decoded.
        origin: Topic that it was sent to at first; "" of a batch.
        reason: Its last failure.
        resent_ms: When it was resent, ms since 1970; 0 for never.
        count: Messages.
    """

    place: str
    message: MessageRow | None
    origin: str
    reason: str
    resent_ms: int
    count: int


class GroupLetters(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters of a group.

    Attributes:
        count: All that there are.
        reasons: Frequent reasons among those that fit, and how many have each.
        table: Those that fit, newest first.
    """

    count: int
    reasons: list[tuple[str, int]]
    table: TablePage[LetterRow]


async def groups(visit: Visit, arguments: TableArguments) -> TablePage[DeadLetterGroup]:
    """Return one page of the groups with dead letters."""
    async with visit.client(DeadLetterClient) as client:
        found = dead_letter_groups(await client.overview())
    rows = (
        DeadLetterGroup(one.group, one.dead_letters, one.oldest_timestamp, one.newest_timestamp)
        for one in found
    )
    page = table_page(rows, arguments, ("group",), sort="-count")
    async with visit.client(SearchClient) as searcher:
        read = [await _with_reason(visit, searcher, one) for one in page.rows[:GROUPS_WITH_REASON]]
    return msgspec.structs.replace(page, rows=read + page.rows[GROUPS_WITH_REASON:])


async def _with_reason(visit: Visit, client: SearchClient, row: DeadLetterGroup) -> DeadLetterGroup:
    topic = dlq_topic(row.group)
    if not visit.rights.may(Right.SUB, topic):
        return row
    found = (await client.search(topic, max_looked=1)).messages
    reason = found[0].property(PROPERTY_LAST_FAILURE) or "" if found else ""
    return msgspec.structs.replace(row, last_reason=reason)


async def letters(visit: Visit, arguments: LettersArguments) -> GroupLetters:
    """Return one page of a group's dead letters."""
    rows, looked, total = await newest_letters(visit, arguments)
    counts: Counter[str] = Counter()
    for one in rows:
        counts[one.reason] += one.count
    table = table_page(
        rows, TableArguments(page=arguments.page), cut=looked_at(looked, total, "the time")
    )
    return GroupLetters(count=total, reasons=counts.most_common(MAX_REASONS), table=table)


async def newest_letters(visit: Visit, arguments: LetterChoice) -> tuple[list[LetterRow], int, int]:
    """Return dead letters that fit, newest first, how many were looked at, and how many there are.

    ``max_query_messages`` of the newest are looked at.
    """
    wanted = letter_filter(visit, arguments)
    async with visit.client(DeadLetterClient) as client:
        sizes = await _sizes(client, arguments.group)
        newest = max(visit.config.max_query_messages // max(len(sizes), 1), 1)
        rows = [
            _row(visit, one) async for one in client.scan(arguments.group, wanted, newest=newest)
        ]
    rows.sort(key=lambda one: one.message.store_timestamp if one.message else 0, reverse=True)
    return rows, sum(min(one, newest) for one in sizes), sum(sizes)


async def _sizes(client: DeadLetterClient, group: str) -> list[int]:
    """Return the number of a group's dead letters on each broker."""
    try:
        stats = await client.topic_stats(dlq_topic(group))
    except TopicNotFound:
        return []  # nothing was ever given up; the scan says if there is no such group
    return [
        one.max_queue_offset - one.min_queue_offset
        for of_broker in stats.values()
        for one in of_broker.queues
        if one.queue_id == 0
    ]


def letter_filter(visit: Visit, arguments: LetterChoice) -> DeadLetterFilter:
    """Return the filter that a user chose.

    Raises:
        ConfigError: A time or topic is none.
    """
    from_ms, to_ms = times(visit, arguments.since, arguments.until)
    return DeadLetterFilter(
        topic=check_topic(arguments.topic) if arguments.topic else None,
        tag=arguments.tag or None,
        key=arguments.key or None,
        reason=arguments.reason or None,
        from_ms=from_ms,
        to_ms=to_ms,
        resent=_RESENT[arguments.resent],
    )


def _row(visit: Visit, letter: DeadLetter) -> LetterRow:
    message = letter.message
    return LetterRow(
        f"{letter.broker_name}@{letter.queue_offset}",
        None if message is None else message_row(visit, message),
        "" if message is None else message.topic,
        letter.reason,
        letter.resent_ms,
        letter.count,
    )

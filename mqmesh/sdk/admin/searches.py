"""Search of a topic's messages by time, tag, properties and body."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import CorruptBatch, InvalidArgument
from mqmesh.filtering.sql92 import parse_sql
from mqmesh.filtering.tags import ALL, parse_tags
from mqmesh.message import StoredMessage, check_topic
from mqmesh.protocol.admin import QueueStats
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import (
    ExpressionType,
    OffsetResponse,
    PullRequest,
    PullResponse,
    PullStatus,
    SearchOffsetRequest,
)
from mqmesh.sdk.admin.admin import check_advance, masters_of
from mqmesh.sdk.admin.queries import GROUP, QueryClient
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.units import MAX_TIMESTAMP_MS, MIB

MAX_LOOKED: Final = 100_000
"""Most messages that one search looks at."""
READ_BYTES: Final = 1 * MIB
MAX_SEARCH_BYTES: Final = 8 * MIB
"""Messages that fit end a search when they have so many bytes."""


class MessageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of messages; all by default.

    Attributes:
        tags: With one of these tags: ``A || B``; ``*`` for all.
        sql: An SQL92 expression over properties and ``TAGS`` is true, in place of ``tags``.
        text: With this text in the body, as UTF-8.
        from_ms: Stored at this time or later, ms since 1970.
        to_ms: Stored at this time or before.
        broker_name: Only of this broker group; "" for all.
        queue_id: Only of this queue; -1 for all.
    """

    tags: str = ALL
    sql: str = ""
    text: str = ""
    from_ms: int = 0
    to_ms: int = MAX_TIMESTAMP_MS
    broker_name: str = ""
    queue_id: int = -1


class SearchResult(msgspec.Struct, frozen=True):
    """Result of a search.

    Attributes:
        messages: Newest first.
        looked: Number of messages that were looked at.
        total: Number of messages in the requested queues and time; the search ended early if fewer
            were looked at.
        unreadable: Batches that cannot be decoded.
    """

    messages: list[StoredMessage]
    looked: int
    total: int
    unreadable: int = 0


class Span(msgspec.Struct, frozen=True):
    """Part of a queue, by its offsets.

    Attributes:
        broker_name: Broker group of the queue.
        host: Address of its master, ``host:port``.
        queue_id: Message queue.
        start: Queue offset of the first message.
        end: Behind the last one.
    """

    broker_name: str
    host: str
    queue_id: int
    start: int
    end: int


class SearchClient(QueryClient):
    """Client that searches topics, a request at a time, in the caller's thread."""

    def search(
        self, topic: str, wanted: MessageFilter | None = None, *, max_looked: int = 1_000
    ) -> SearchResult:
        """Return messages of a topic that fit a filter, newest first.

        It reads queues, the newest messages of each, and ends early when it has looked at
        ``max_looked`` messages, or found 8 MiB.

        Args:
            topic: Physical topic.
            wanted: Filter.
            max_looked: Messages to look at, 1 to 100,000, which queues share evenly.

        Raises:
            InvalidArgument: An illegal topic, expression or number.
            TopicNotFound: The topic does not exist.
            TransportError, BrokerError: A broker does not answer, or refuses.
        """
        check_topic(topic)
        wanted = wanted or MessageFilter()
        if not 1 <= max_looked <= MAX_LOOKED:
            raise InvalidArgument(f"max_looked = {max_looked} must be 1 to {MAX_LOOKED:,}")
        fits = judge_of(wanted)
        spans = list(self._spans(topic, wanted))
        sizes = [one.end - one.start for one in spans]
        found: list[StoredMessage] = []
        looked = unreadable = size = 0
        for span, count in zip(spans, shares(sizes, max_looked), strict=True):
            place = span.end - count
            while place < span.end and size < MAX_SEARCH_BYTES:
                answer = self._pull(topic, span, place, wanted)
                facts = decode_header(PullResponse, answer.header)
                if facts.status == PullStatus.FOUND:
                    messages, damaged = decode_answer(answer, span, self.namespace)
                    fitting = [
                        one
                        for one in messages
                        if place <= one.queue_offset < span.end and fits(one)
                    ]
                    found += fitting
                    size += sum(len(one.body) for one in fitting)
                    unreadable += damaged
                if facts.next_queue_offset <= place:
                    break
                looked += min(facts.next_queue_offset, span.end) - place
                place = facts.next_queue_offset
        found.sort(key=lambda one: (one.store_timestamp, one.queue_offset), reverse=True)
        return SearchResult(found, looked, sum(sizes), unreadable)

    # ---- Helpers ---------------------------------------------------------------------

    def _spans(self, topic: str, wanted: MessageFilter) -> Iterator[Span]:
        """Yield the parts of a topic's queues that have messages of the time."""
        by_broker = self.topic_stats(topic)
        hosts = {name: one.tcp for name, one in masters_of(self.cluster().brokers).items()}
        for name, stats in sorted(by_broker.items()):
            if name not in hosts or wanted.broker_name not in ("", name):
                continue
            for queue in stats.queues:
                if wanted.queue_id in (-1, queue.queue_id):
                    start, end = self._bounds(topic, hosts[name], queue, wanted)
                    if start < end:
                        yield Span(name, hosts[name], queue.queue_id, start, end)

    def _bounds(
        self, topic: str, host: str, queue: QueueStats, wanted: MessageFilter
    ) -> tuple[int, int]:
        start, end = queue.min_queue_offset, queue.max_queue_offset
        if start == end or queue.last_update_timestamp < wanted.from_ms:
            return 0, 0

        def offset_at(at_ms: int) -> int:
            header = encode_header(SearchOffsetRequest(topic, queue.queue_id, at_ms))
            code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
            answer = self._request(endpoint_of(host), code, header)
            return decode_header(OffsetResponse, answer.header).queue_offset

        if queue.first_timestamp < wanted.from_ms:
            start = offset_at(wanted.from_ms)
        if wanted.to_ms < queue.last_update_timestamp:
            end = offset_at(wanted.to_ms + 1)
        return start, end

    def _pull(self, topic: str, span: Span, place: int, wanted: MessageFilter) -> Command:
        expression, kind = wanted.tags, ExpressionType.TAG
        if wanted.sql:
            expression, kind = wanted.sql, ExpressionType.SQL92
        request = PullRequest(
            GROUP,
            topic,
            span.queue_id,
            place,
            READ_BYTES,
            expression=expression,
            expression_type=kind.value,
        )
        endpoint = endpoint_of(span.host)
        answer = self._request(endpoint, RequestCode.PULL_MESSAGE, encode_header(request))
        facts = decode_header(PullResponse, answer.header)
        if facts.status == PullStatus.FOUND:
            check_advance(endpoint, place, facts.next_queue_offset)
        return answer


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """Return how much to take of each part, evenly, so that it is ``most`` at most in all."""
    taken = [0] * len(sizes)
    for done, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        taken[index] = min(sizes[index], most // (len(sizes) - done))
        most -= taken[index]
    return taken


def judge_of(wanted: MessageFilter) -> Callable[[StoredMessage], bool]:
    """Return a function that judges messages that a broker found, but not their SQL92 expression.

    Raises:
        InvalidArgument: The tags or the expression are none.
    """
    if wanted.sql:
        parse_sql(wanted.sql)
    # Brokers compare hashes of tags.
    tags = None if wanted.sql else parse_tags(wanted.tags)
    text = wanted.text.encode(errors="surrogatepass")

    def fits(message: StoredMessage) -> bool:
        return (
            wanted.from_ms <= message.store_timestamp <= wanted.to_ms
            and (tags is None or message.tag in tags)
            and text in bytes(message.body)
        )

    return fits


def decode_answer(answer: Command, span: Span, namespace: str) -> tuple[list[StoredMessage], int]:
    """Return the messages of an answer, and how many batches cannot be decoded."""
    messages: list[StoredMessage] = []
    damaged = 0
    for header, data in iter_batches(answer.body, check_stored):
        try:
            messages += decode_messages(
                data,
                header,
                broker_name=span.broker_name,
                store_host=span.host,
                namespace=namespace,
            )
        except CorruptBatch:
            damaged += 1
    return messages, damaged

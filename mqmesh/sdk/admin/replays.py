"""Replay: messages of a topic once more, for one group or into another topic."""

import heapq
from collections.abc import Callable, Iterable, Iterator

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.message import StoredMessage, check_consumer_group, check_topic
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import PullResponse, PullStatus
from mqmesh.protocol.replay import MAX_REPLAY_RUNS, ReplayRequest, ReplayResponse, ReplayRun
from mqmesh.sdk.admin.searches import MessageFilter, SearchClient, Span, decode_answer, judge_of
from mqmesh.transport.endpoints import endpoint_of

MIN_SPEED = 0.001
MAX_SPEED = 1_000_000.0
_TOGETHER_MS = 50
"""Messages that are due so close to one another are copied together."""


class ReplayResult(msgspec.Struct, frozen=True):
    """Result of a replay.

    Attributes:
        found: Messages that fit.
        copied: Of them, those that were copied; 0 for a dry run.
        first_ms: Store time of the first one, ms since 1970; 0 for none.
        last_ms: Of the last one.
        unreadable: Batches that cannot be decoded, and were left out.
    """

    found: int
    copied: int
    first_ms: int
    last_ms: int
    unreadable: int


class ReplayClient(SearchClient):
    """Client that replays topics, a request at a time, in the caller's thread."""

    def replay(
        self,
        topic: str,
        wanted: MessageFilter | None = None,
        *,
        key: str = "",
        group: str = "",
        into_topic: str = "",
        speed: float = 0.0,
        dry_run: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> ReplayResult:
        """Copies messages of a topic, where they are, for one group or into another topic.

        They keep their ids, keys and properties. Messages that come meanwhile are not copied. After
        an error the copies stay; a repeated call makes them again.

        Args:
            topic: Topic to read.
            wanted: Filter of messages; all by default.
            key: Only messages that have this key; empty for all.
            group: Group that gets them, as retries; empty for ``into_topic``.
            into_topic: Topic, on all brokers that have messages of ``topic``; empty for ``group``.
            speed: So many times as fast as they were stored once, 0.001 to 1,000,000; 1.0 keeps
                the gaps between them. 0 copies queue by queue, as fast as it goes.
            dry_run: Only count.
            on_progress: Called with the number of messages found so far.

        Raises:
            InvalidArgument: An illegal name, expression or number; no target, or two.
            TopicNotFound, GroupNotFound: A broker does not have it.
            NoPermission: The right to administer is missing, or the topic may not be written.
            TransportError, BrokerError: A broker does not answer, or refuses.
        """
        check_topic(topic)
        wanted = wanted or MessageFilter()
        if bool(group) == bool(into_topic) or into_topic == topic:
            raise InvalidArgument("messages are replayed into a group, or into another topic")
        check_consumer_group(group) if group else check_topic(into_topic)
        if speed and not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidArgument(f"speed = {speed} must be 0, or {MIN_SPEED} to {MAX_SPEED:,.0f}")
        work = _Work(wanted, judge_of(wanted), key)
        spans = list(self._spans(topic, wanted))
        parts = [self._matching(topic, span, work) for span in spans]
        copy = ReplayRequest(topic, 0, [ReplayRun(0)], group, into_topic)
        found = copied = first_ms = last_ms = 0
        for chunk in self._chunks(parts, speed if not dry_run else 0.0):
            for span, messages in chunk.items():
                found += len(messages)
                first_ms = min(first_ms or messages[0].store_timestamp, messages[0].store_timestamp)
                last_ms = max(last_ms, messages[-1].store_timestamp)
                if not dry_run:
                    copied += self._copy(copy, span, [one.queue_offset for one in messages])
            if on_progress is not None:
                on_progress(found)
        return ReplayResult(found, copied, first_ms, last_ms, work.unreadable)

    # ---- Helpers ---------------------------------------------------------------------

    def _matching(
        self, topic: str, span: Span, work: "_Work"
    ) -> Iterator[tuple[int, Span, StoredMessage]]:
        """Yield store time, span and message of matching messages, in order."""
        place = span.start
        while place < span.end:
            answer = self._pull(topic, span, place, work.wanted)
            facts = decode_header(PullResponse, answer.header)
            if facts.status == PullStatus.FOUND:
                messages, damaged = decode_answer(answer, span, self.namespace)
                work.unreadable += damaged
                for one in messages:
                    if place <= one.queue_offset < span.end and work.fits(one):
                        yield one.store_timestamp, span, one
            if facts.next_queue_offset <= place:
                return
            place = facts.next_queue_offset

    def _chunks(
        self, parts: Iterable[Iterator[tuple[int, Span, StoredMessage]]], speed: float
    ) -> Iterator[dict[Span, list[StoredMessage]]]:
        """Yield messages that are copied together, when they are due."""
        clock = self._transport.clock
        begun_ms = clock.monotonic_ms()
        first_ms: int | None = None
        due_ms = 0
        chunk: dict[Span, list[StoredMessage]] = {}
        count = 0
        merged = (
            heapq.merge(*parts, key=lambda one: one[0])
            if speed
            else (one for part in parts for one in part)
        )
        for stored_ms, span, message in merged:
            if first_ms is None:
                first_ms = stored_ms
            at_ms = int((stored_ms - first_ms) / speed) if speed else 0
            if chunk and (count >= MAX_REPLAY_RUNS or at_ms > due_ms + _TOGETHER_MS):
                yield chunk
                chunk, count = {}, 0
            if not chunk:
                due_ms = at_ms
                wait_ms = begun_ms + due_ms - clock.monotonic_ms()
                if speed and wait_ms > 0:
                    self._transport.pause(wait_ms / 1_000)
            chunk.setdefault(span, []).append(message)
            count += 1
        if chunk:
            yield chunk

    def _copy(self, copy: ReplayRequest, span: Span, offsets: list[int]) -> int:
        """Copies messages of a queue; returns how many."""
        endpoint, at = endpoint_of(span.host), 0
        while at < len(offsets):
            request = msgspec.structs.replace(
                copy, queue_id=span.queue_id, runs=runs_of(offsets[at:])
            )
            code = RequestCode.REPLAY_MESSAGES
            answer = self._request(endpoint, code, encode_header(request))
            at += max(decode_header(ReplayResponse, answer.header).copied, 1)
        return len(offsets)


class _Work(msgspec.Struct):
    """Filter of a replay, and the messages that it could not judge."""

    wanted: MessageFilter
    judge: Callable[[StoredMessage], bool]
    key: str
    unreadable: int = 0

    def fits(self, message: StoredMessage) -> bool:
        return (not self.key or self.key in message.keys) and self.judge(message)


def runs_of(offsets: list[int]) -> list[ReplayRun]:
    """Return ascending offsets as runs of those that stand behind one another."""
    runs: list[ReplayRun] = []
    for offset in offsets:
        if runs and runs[-1].first + runs[-1].count == offset:
            runs[-1] = ReplayRun(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(ReplayRun(offset))
    return runs

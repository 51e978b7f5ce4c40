"""Queries that an index process is working on. Pure: the caller passes the time."""

from collections import deque
from typing import Final

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.message import parse_message_id
from mqmesh.metrics import Measured, gauge
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.queries import (
    QueryMessageByIdRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    encode_found,
)
from mqmesh.protocol.request import Peer, PendingReply, Request
from mqmesh.storage.index.dispatcher import Dispatcher
from mqmesh.storage.index.message_index import MessageIndex
from mqmesh.storage.index.search import IdQuery, KeyQuery, Search
from mqmesh.units import MAX_TIMESTAMP_MS

CATCH_UP_MS: Final = 500
"""Longest wait of a query for the index to reach the visible end at its arrival."""
BUSY_RETRY_AFTER_MS: Final = 100


class PendingQuery(msgspec.Struct, eq=False):
    """A query and how far it is.

    Attributes:
        pending: Answer that its broker waits for.
        query: Query by key or by id.
        max_count: Messages to return.
        max_bytes: Bytes to return.
        wanted: Commit-log offset that the index shall have reached first.
        since_ms: Time of its arrival, monotonic clock.
        search: None until it was begun.
    """

    pending: PendingReply
    query: KeyQuery | IdQuery
    max_count: int
    max_bytes: int
    wanted: int
    since_ms: int
    search: Search | None = None


class PendingQueries:
    """Queries that wait or are being worked on.

    Args:
        most: Queries that may wait.
        timeout_ms: After so long a query is answered with what was found.

    Attributes:
        answered: Queries answered so far.
        mismatches: Mismatches that their searches counted.
    """

    def __init__(self, *, most: int, timeout_ms: int) -> None:
        self._most = most
        self._timeout_ms = timeout_ms
        self._waiting: deque[PendingQuery] = deque()
        self.answered = 0
        self.mismatches = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        request: Request,
        header: QueryMessageRequest | QueryMessageByIdRequest,
        wanted: int,
        now_ms: int,
    ) -> None:
        """Takes a query in.

        Args:
            request: Request to answer.
            header: Query by key or by id.
            wanted: Commit-log offset that the index shall have reached first.
            now_ms: Monotonic clock.

        Raises:
            SystemBusy: Too many wait.
            InvalidArgument: The query is illegal.
        """
        if len(self._waiting) >= self._most:
            raise SystemBusy(
                f"{self._most} queries are being answered, no more may (index.max_queries)",
                retry_after_ms=BUSY_RETRY_AFTER_MS,
            )
        query: KeyQuery | IdQuery
        if isinstance(header, QueryMessageRequest):
            end = min(header.end_timestamp, MAX_TIMESTAMP_MS)
            query = KeyQuery(header.topic, header.key, header.begin_timestamp, end)
        else:
            query = IdQuery(*parse_message_id(header.message_id))
        self._waiting.append(
            PendingQuery(request.later(), query, header.max_count, header.max_bytes, wanted, now_ms)
        )

    def step(
        self, index: MessageIndex, dispatcher: Dispatcher, now_ms: int
    ) -> tuple[PendingReply, Reply] | None:
        """Works a little on a query that is ready; those that take longer take turns.

        Args:
            index: The index.
            dispatcher: Follows the log.
            now_ms: Monotonic clock.

        Returns:
            Answer of the query when it is done, else None.
        """
        pending = self._ready(dispatcher, now_ms)
        if pending is None:
            return None
        if pending.search is None:
            pending.search = Search(
                index,
                dispatcher,
                pending.query,
                most_messages=pending.max_count,
                most_bytes=pending.max_bytes,
            )
        search = pending.search
        done = search.step()
        if not done and now_ms - pending.since_ms >= self._timeout_ms:
            search.more = done = True
        self._waiting.remove(pending)
        if not done:
            self._waiting.append(pending)
            return None
        self.answered += 1
        self.mismatches += search.mismatches
        header = QueryMessageResponse(len(search.messages), search.more, search.missing_bytes)
        return pending.pending, Reply(encode_header(header), (encode_found(search.messages),))

    def is_ready(self, dispatcher: Dispatcher, now_ms: int) -> bool:
        """True when a query need not wait for the index."""
        return self._ready(dispatcher, now_ms) is not None

    def _ready(self, dispatcher: Dispatcher, now_ms: int) -> PendingQuery | None:
        for one in self._waiting:
            if (
                one.search is not None
                or dispatcher.position >= one.wanted
                or now_ms - one.since_ms >= CATCH_UP_MS
            ):
                return one
        return None

    def drop_peer(self, peer: Peer) -> None:
        """Forgets the queries of a broker that is gone."""
        self._waiting = deque(one for one in self._waiting if one.pending.peer is not peer)


QUERY_METRICS: Final[tuple[Measured[PendingQueries], ...]] = (
    gauge("index_pending_queries", "queries that wait or are being worked on", len),
)

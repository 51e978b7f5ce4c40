"""The index process: its socket, its turns, and the files that it opens."""

import logging
import os
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.errors import BrokerNotAvailable, RemoteProtocolError
from mqmesh.protocol.command import Answer, Reply
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.queries import (
    AdvanceIndexRequest,
    IndexProgress,
    QueryMessageByIdRequest,
    QueryMessageRequest,
)
from mqmesh.protocol.request import Request
from mqmesh.protocol.snapshots import CopyIndexRequest, CopyIndexResponse
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.indexer.config import IndexerConfig
from mqmesh.roles.indexer.queries import QUERY_METRICS, PendingQueries
from mqmesh.roles.shell import RoleShell
from mqmesh.roles.store_metrics import INDEX_METRICS
from mqmesh.storage.commitlog.checkpoint import read_boot_id
from mqmesh.storage.index.dispatcher import Dispatcher, DispatcherStats
from mqmesh.storage.index.message_index import MessageIndex
from mqmesh.storage.log.store_key import read_store_key
from mqmesh.transport.interface import Timer, Transport

QUERY_SLICE_MS: Final = 20
"""Time for queries in one turn, while there is other work."""
ROOM_CHECK_MS: Final = 500
LOG_DIRECTORY: Final = "commitlog"
INDEX_DIRECTORY: Final = "index"

_log = logging.getLogger(__name__)


class IndexerServer:
    """Index process of one broker: follows its log and answers its queries.

    Args:
        config: Settings.
        transport: Transport of the process.
    """

    def __init__(self, config: IndexerConfig, transport: Transport) -> None:
        self._config = config
        self._loop = transport.loop
        self._clock = transport.clock
        self._root = Path(config.store_path_root_dir)
        self._shell = RoleShell(ServedBy.INDEXER, "indexer", config.broker_name, transport)
        self._index: MessageIndex | None = None
        self._dispatcher: Dispatcher | None = None
        self._store_id = -1
        self._queries = PendingQueries(
            most=config.index.max_queries, timeout_ms=config.index.query_timeout_ms
        )
        self._planned: Timer | None = None
        self._planned_ms = 0
        self._room_checked_ms: int | None = None
        self._has_room = True

    def start(self) -> str:
        """Opens the index and listens.

        Returns:
            The endpoint.

        Raises:
            StoreLocked: Another process has the index.
            StorageError: The index cannot be opened.
            OSError: The process cannot listen there.
        """
        config = self._config.index
        self._index = MessageIndex(
            self._root / INDEX_DIRECTORY,
            map_size=config.live_map_size,
            most_open=config.max_open_environments,
        )
        if self._config.suspect:
            self._index.suspect_all()
        handlers: dict[RequestCode, Handler] = {
            RequestCode.ADVANCE_INDEX: self._advance,
            RequestCode.COPY_INDEX: self._copy,
            RequestCode.QUERY_MESSAGE: self._query,
            RequestCode.QUERY_MESSAGE_BY_ID: self._query,
        }
        server = self._shell.open(handlers, self._queries.drop_peer)
        self._shell.expose(INDEX_METRICS, self._progress)
        self._shell.expose(QUERY_METRICS, lambda: self._queries)
        endpoint = server.bind(self._config.endpoint)
        self._shell.ready()
        return endpoint

    def stop(self) -> None:
        """Closes everything; also what a failed ``start`` left open."""
        if self._planned is not None:
            self._planned.cancel()
        self._shell.close()
        if self._dispatcher is not None:
            self._dispatcher.close()
            self._dispatcher = None
        if self._index is not None:
            self._index.close()
            self._index = None

    # ---- Requests --------------------------------------------------------------------

    def _advance(self, request: Request, header: AdvanceIndexRequest) -> Answer:
        now_ms = self._clock.monotonic_ms()
        if self._dispatcher is None:
            self._follow(header.store_id)
        elif header.store_id != self._store_id:
            # It ends with its broker, whose store is one. To follow another one would be to
            # throw the index away.
            raise RemoteProtocolError(
                f"this is the index of store {self._store_id}, not {header.store_id}"
            )
        assert self._dispatcher is not None
        self._dispatcher.advance(header.visible_offset, header.min_offset, now_ms)
        self._plan()
        return self._progress()

    def _progress(self) -> IndexProgress:
        stats = DispatcherStats() if self._dispatcher is None else self._dispatcher.stats()
        answered, mismatches = self._queries.answered, self._queries.mismatches
        return IndexProgress(
            queries=answered, mismatches=mismatches, **msgspec.structs.asdict(stats)
        )

    def _copy(self, request: Request, header: CopyIndexRequest) -> CopyIndexResponse:
        assert self._index is not None
        return CopyIndexResponse(len(self._index.copy_live(Path(header.directory))))

    def _follow(self, store_id: int) -> None:
        assert self._index is not None
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._dispatcher = Dispatcher(
            self._root / LOG_DIRECTORY,
            self._index,
            key=read_store_key(self._root),
            store_id=store_id,
            boot_id=read_boot_id(),
            step_bytes=self._config.index.step_bytes,
            room=self._room,
        )
        self._store_id = store_id

    def _query(
        self, request: Request, header: QueryMessageRequest | QueryMessageByIdRequest
    ) -> Reply | None:
        if self._dispatcher is None:
            raise BrokerNotAvailable("the index process is just starting")
        self._queries.add(request, header, self._dispatcher.visible, self._clock.monotonic_ms())
        self._answer_queries()
        self._plan()
        return None

    # ---- Work ------------------------------------------------------------------------

    def _plan(self, delay_ms: int = 0) -> None:
        # Also without delay it is a timer: sockets get their turn between two pieces of work.
        due_ms = self._clock.monotonic_ms() + delay_ms
        if self._planned is not None:
            if self._planned_ms <= due_ms:
                return
            self._planned.cancel()
        self._planned_ms = due_ms
        self._planned = self._loop.call_later(delay_ms, self._turn)

    def _turn(self) -> None:
        self._planned = None
        dispatcher = self._dispatcher
        if dispatcher is None:
            return
        self._answer_queries()
        delay_ms = dispatcher.step(self._clock.monotonic_ms())
        if len(self._queries):
            is_ready = self._queries.is_ready(dispatcher, self._clock.monotonic_ms())
            self._plan(0 if is_ready or delay_ms == 0 else QUERY_SLICE_MS)
        elif delay_ms is not None:
            self._plan(delay_ms)

    def _answer_queries(self) -> None:
        index, dispatcher = self._index, self._dispatcher
        assert index is not None
        assert dispatcher is not None
        began_ms = now_ms = self._clock.monotonic_ms()
        while now_ms - began_ms < QUERY_SLICE_MS and self._queries.is_ready(dispatcher, now_ms):
            done = self._queries.step(index, dispatcher, now_ms)
            if done is not None:
                pending, reply = done
                pending.done(reply)
            now_ms = self._clock.monotonic_ms()

    def _room(self) -> bool:
        now_ms = self._clock.monotonic_ms()
        if self._room_checked_ms is None or now_ms - self._room_checked_ms >= ROOM_CHECK_MS:
            self._room_checked_ms = now_ms
            room = os.statvfs(self._root)
            free_bytes = room.f_bavail * room.f_frsize
            self._has_room = free_bytes > self._config.disk_reserve_bytes
        return self._has_room

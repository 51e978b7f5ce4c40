"""Messages by key and by id: passed on to the index process, answered when it answers.

The index does not know of permissions, so messages of topics that do not permit reading are
left out of its answers here.
"""

import logging
from collections.abc import Callable, Mapping

import msgspec

from mqmesh.batch.delayed_batch import read_delayed_meta
from mqmesh.batch.half_batch import is_half, read_half_meta
from mqmesh.batch.record_batch import Attributes, read_header, read_meta
from mqmesh.errors import (
    CorruptRecord,
    MessageIllegal,
    MQMeshError,
    NoPermission,
    RemoteProtocolError,
    UnsupportedCommand,
)
from mqmesh.message import parse_message_id
from mqmesh.namespaces import is_within
from mqmesh.protocol.admin import QueueEntries, QueueEntriesRequest, QueueEntry
from mqmesh.protocol.command import Command, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import ViewMessageRequest
from mqmesh.protocol.queries import QueryMessageByIdRequest, QueryMessageRequest
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core, no_message_at, only_commitlog
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.queries.readable_answers import only_readable
from mqmesh.roles.broker.index.indexer_link import IndexerLink
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import InspectableStore
from mqmesh.units import CommitLogOffset

_log = logging.getLogger(__name__)


class QueriesFeature(Feature):
    """Messages by key and by id, and what stands at a place of the log or of a queue.

    Look-ups by key and id go to the index process, and are answered when it answers. The index
    does not know of permissions, so messages of topics that do not permit reading are left out of
    its answers here.
    """

    works_at_followers = True

    def __init__(self, core: Core, topics: TopicTable, index: IndexerLink | None) -> None:
        self._settings = core.settings
        self._store = core.store
        self._permit = core.dispatch.permit
        self._topics = topics
        self._index = index

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            **self.follower_commands(),
            RequestCode.QUERY_CONSUME_QUEUE: self.query_consume_queue,
        }

    def follower_commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.follower_commands``."""
        return {
            RequestCode.QUERY_MESSAGE: self.query_message,
            RequestCode.QUERY_MESSAGE_BY_ID: self.query_message_by_id,
            RequestCode.VIEW_MESSAGE: self.view_message,
        }

    def query_message(self, request: Request, query: QueryMessageRequest) -> None:
        """Messages with a key."""
        self._topics.require(query.topic)
        self._topics.check_readable(query.topic)
        self._pass_on(request, self._topics.may_read)

    def query_message_by_id(self, request: Request, header: QueryMessageByIdRequest) -> None:
        """Messages with an id."""
        parse_message_id(header.message_id)
        peer, code = request.peer, request.command.code

        def may_read(topic: str) -> bool:
            try:
                self._permit(peer, code, topic)
            except NoPermission:
                return False
            return self._topics.may_read(topic)

        self._pass_on(request, may_read)

    def _pass_on(self, request: Request, may_read: Callable[[str], bool]) -> None:
        if self._index is None:
            raise UnsupportedCommand(
                "this broker has no index of keys and message ids (index.enable, storage.backend)"
            )
        pending = request.later()

        def answer(outcome: Command | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                pending.fail(outcome)
            else:
                try:
                    header, body = only_readable(outcome.header, outcome.body, may_read)
                except RemoteProtocolError as error:
                    pending.fail(error)
                else:
                    pending.done(Reply(bytes(header), (body,)))

        self._index.query(request.command.code, bytes(request.command.header), answer)

    def view_message(self, request: Request, query: ViewMessageRequest) -> Reply:
        """The stored batch at a log offset.

        Raises:
            NoPermission: Its topic, or the one that its messages wait for, does not permit reading.
            OffsetIllegal: No batch begins there, or one of another namespace; a place inside a
                batch looks like damage.
        """
        offset = CommitLogOffset(query.commitlog_offset)
        try:
            batch = self._store.read_at(offset)
        except CorruptRecord as error:
            _log.info("a client asked for a batch that is none: %s", error)
            raise no_message_at(offset) from error
        topics = _topics_of(batch)
        if not is_within(request.peer.principal.namespace, topics[-1]):
            raise no_message_at(offset)
        for topic in topics:
            self._permit(request.peer, request.command.code, topic)
        self._topics.check_readable(*topics)
        return Reply(body=(batch,))

    def query_consume_queue(self, request: Request, query: QueueEntriesRequest) -> QueueEntries:
        """Entries of a queue, as they are.

        Raises:
            UnsupportedCommand: The store has no consume queues.
            TopicNotFound: There is no such topic.
            MessageIllegal: It has no such queue, nor had one that still holds messages.
        """
        store = self._store
        if not isinstance(store, InspectableStore):
            raise UnsupportedCommand(only_commitlog(self._settings.now, "consume queues"))
        topic = self._topics.require(query.topic)
        low, high = store.queue_bounds(query.topic, query.queue_id)
        if query.queue_id >= topic.queue_count and not high:
            # A topic that was made smaller keeps what its queues hold.
            raise MessageIllegal(
                f"queue {query.queue_id} of topic {query.topic!r} does not exist: "
                f"read_queue_nums = {topic.config.read_queue_nums}"
            )
        entries = store.inspector.entries(
            query.topic, query.queue_id, query.queue_offset, query.count
        )
        found = [QueueEntry(*msgspec.structs.astuple(one)) for one in entries]
        return QueueEntries(low, high, found)


def _topics_of(batch: bytes) -> list[str]:
    header = read_header(batch)
    topics = [read_meta(batch, header).topic]
    if header.attributes & Attributes.HAS_DELAY:
        topics.append(read_delayed_meta(batch, header).real_topic)
    if is_half(header):
        topics.append(read_half_meta(batch, header).real_topic)
    return topics

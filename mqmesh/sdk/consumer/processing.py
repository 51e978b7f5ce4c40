"""Blocks that process messages: outputs are stored, and the messages done, or neither happens."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final

from mqmesh.errors import (
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    SendInDoubt,
    StaleGeneration,
    StaleReceipt,
)
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.delivery import SettleAction
from mqmesh.protocol.processing import CommitProcessedRequest, ProcessedOffset
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.consumer_engine import ConsumerEngine
from mqmesh.sdk.consumer.outputs import Made, Outputs
from mqmesh.sdk.consumer.processed_commits import (
    PATIENCE_MS,
    Commit,
    OnCommitted,
    ProcessedCommits,
    not_there,
    places_of,
)
from mqmesh.sdk.consumer.push_sink import PushSink
from mqmesh.sdk.consumer.receiving.held_leases import HeldLease, bits_of
from mqmesh.sdk.consumer.receiving.receive_source import ReceiveSource
from mqmesh.sdk.consumer.receiving.receiver import Receiver

CALL_MS: Final = PATIENCE_MS + 10_000

CommitAll = Callable[[list[StoredMessage], Made, OnCommitted], None]
"""Function that commits messages and their outputs; in the client loop."""


class Processing:
    """Block that processes messages; made by ``processing`` of a consumer::

        with consumer.processing(messages) as out:
            out.send(Message("bills", body))

    When it ends, the messages are done and the outputs are stored, all of it or nothing. When it
    raises, the outputs are dropped, and the messages are redelivered.

    Args:
        client: Connections.
        messages: Messages to process.
        commit: Commits them.
        on_failed: Called in the block's thread with an error of the block, or of the commit after
            which nothing is stored.

    Attributes:
        outputs: Messages that the block sends.
    """

    def __init__(
        self,
        client: ClientEngine,
        messages: Sequence[StoredMessage],
        commit: CommitAll,
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.outputs = Outputs()
        self._client = client
        self._messages = list(messages)
        if not self._messages:
            raise InvalidArgument("there must be messages to process")
        self._commit = commit
        self._on_failed = on_failed

    def __enter__(self) -> Outputs:
        return self.outputs

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit, and wait for the outcome.

        Raises:
            StaleReceipt: Another member has one of the messages by now, or it is done already;
                nothing of the block is stored, as after all others but the next one.
            SendInDoubt: No broker has answered for 60 s, or until the leases of the messages ended.
            StaleGeneration: The same as ``StaleReceipt``, of a queue.
            NoRoute, NoPermission, TopicNotFound, InvalidArgument: An output cannot be stored.
            SystemBusy: The broker has taken nothing for so long, or too many commits of this
                consumer were under way.
            ClientClosed: The consumer was closed meanwhile: as ``SendInDoubt``.
        """
        if error is not None:
            self.outputs.end()
            if isinstance(error, Exception):
                self._on_failed(error)
            return
        try:
            self._client.call(self._begin, CALL_MS)
        except (ClientClosed, SendInDoubt):
            raise
        except MQMeshError as refusal:
            self._on_failed(refusal)
            raise

    def commit_later(self) -> "Future[None]":
        """Commit without waiting; the errors are as of the block's end."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def done(outcome: bool | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                future.set_exception(outcome)
            else:
                future.set_result(None)

        self._client.post(lambda: self._begin(done))
        return future

    def _begin(self, done: Callable[[bool | MQMeshError], None]) -> None:
        self._commit(
            self._messages,
            self.outputs.end(),
            lambda error: done(True if error is None else error),
        )


class LeasedCommits:
    """Commits of messages that are received under leases; in the client loop.

    Args:
        group: Consumer group.
        client: Connections.
        receiver: Leases of the member.
        commits: Commits of the member.
        on_begun: Called once a commit is on its way, with the source of its messages.
    """

    def __init__(
        self,
        group: str,
        client: ClientEngine,
        receiver: Receiver,
        commits: ProcessedCommits,
        on_begun: Callable[[ReceiveSource], object] = lambda source: None,
    ) -> None:
        self._group = group
        self._client = client
        self._receiver = receiver
        self._commits = commits
        self._on_begun = on_begun

    def commit(self, messages: list[StoredMessage], outputs: Made, on_done: OnCommitted) -> None:
        """Settle messages and store their outputs."""
        with self._receiver.turn:
            try:
                source, taken = self._take(messages)
            except MQMeshError as error:
                on_done(error)
                return

        def done(error: MQMeshError | None) -> None:
            if error is None:
                with self._receiver.turn:
                    for held, bits in taken:
                        held.bits &= ~bits
                        if not held.bits:
                            source.leases.pop(held.lease.lease, None)
            on_done(error)

        def until_ms() -> int:
            return min(held.until_ms for held, _ in taken)

        request = CommitProcessedRequest(
            self._group,
            source.topic,
            self._client.client_id,
            b"",
            settlements=[held.settlement(bits, SettleAction.ACK) for held, bits in taken],
        )
        self._commits.begin(Commit(source.broker_name, request, outputs, until_ms, done))
        with self._receiver.turn:
            self._on_begun(source)

    def _take(
        self, messages: list[StoredMessage]
    ) -> tuple[ReceiveSource, list[tuple[HeldLease, int]]]:
        """Return the leases of messages, which of theirs these are as bits, and the source."""
        by_lease: dict[tuple[str, int], list[int]] = {}
        offsets: list[int] = []
        last: BatchInfo | None = None
        for message in messages:
            if message.batch is not last:  # one for all messages of a batch
                last = info = message.info
                offsets = by_lease.setdefault((info.broker_name, info.fencing_token), [])
            offsets.append(message.queue_offset)
        sources: dict[ReceiveSource, None] = {}
        taken: list[tuple[HeldLease, int]] = []
        for key, offsets in by_lease.items():
            found = self._receiver.held(*key)
            source, held = found if found is not None else (None, None)
            bits = 0 if held is None else bits_of(offsets, held.lease.first)
            if source is None or held is None or bits & ~held.bits:
                raise StaleReceipt("the lease of a message ended, or it is settled already")
            sources[source] = None
            taken.append((held, bits))
        if len(sources) > 1:
            names = sorted(f"{one.topic} at {one.broker_name}" for one in sources)
            raise InvalidArgument(
                f"messages of {' and of '.join(names)}: what is processed together is of one topic "
                "at one broker group"
            )
        for held, bits in taken:
            held.reported |= bits
        return next(iter(sources)), taken


class OwnedCommits:
    """Commits of messages of queues that a member owns and consumes in order; in the client loop.

    Args:
        engine: Core of the consumer.
        commits: Commits of the member.
    """

    def __init__(self, engine: ConsumerEngine[PushSink], commits: ProcessedCommits) -> None:
        self._engine = engine
        self._commits = commits

    def commit(self, messages: list[StoredMessage], outputs: Made, on_done: OnCommitted) -> None:
        """Commit the progress of a queue and store outputs of its messages."""
        engine, offsets = self._engine, self._engine.offsets
        first, last = messages[0], messages[-1]
        queue = first.message_queue
        state = engine.assigned.get(queue)
        sink = None if state is None else state.sink
        if state is None or sink is None:
            on_done(StaleGeneration(f"{queue} was given away while its messages were processed"))
            return
        end = last.queue_offset + 1
        found = [one.queue_offset for one in messages]
        one_of_each_batch = {id(one.batch): one for one in messages}.values()
        is_own = all(one.message_queue == queue for one in one_of_each_batch)
        if not is_own or found != sorted(found) or found[0] != sink.commit_offset():
            on_done(InvalidArgument("processed are the messages of a call, from its first one on"))
            return

        def done(error: MQMeshError | None) -> None:
            if error is None:
                sink.finish(first.queue_offset, last.queue_offset)
                offsets.note_processed(queue, end)
            elif isinstance(error, SendInDoubt | StaleGeneration):
                # The broker knows where to begin.
                engine.begin_anew(queue, error)
            else:
                offsets.processing.discard(queue)
            on_done(error)

        place = ProcessedOffset(
            queue.queue_id,
            offsets.known(queue),
            end,
            first.info.fencing_token,
            offsets.epochs.get(queue, 0),
        )
        request = CommitProcessedRequest(
            engine.group, queue.topic, engine.client.client_id, b"", offsets=[place]
        )
        offsets.processing.add(queue)
        self._commits.begin(Commit(queue.broker_name, request, outputs, _for_long, done))


def check_outputs(
    client: ClientEngine, consumed: Sequence[str], topics: Sequence[str], timeout_ms: int
) -> None:
    """Check that outputs can be stored where their messages are; from other threads.

    Args:
        client: Connections.
        consumed: Topics of the messages; those that are not there yet are passed over.
        topics: Topics of their outputs.
        timeout_ms: Longest wait for a route.

    Raises:
        NoRoute: It cannot; names topic and broker group.
    """
    for topic in topics:
        route = client.wait_route(topic, timeout_ms)
        for one in consumed:
            for broker_name in client.routes.brokers_of(one):
                if places_of(route, broker_name) is None:
                    raise NoRoute(not_there(topic, broker_name, one))


def _for_long() -> int:
    """Return the end of an owner's time with a queue: none, as long as no other member has it."""
    return 2**63

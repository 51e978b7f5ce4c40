"""Commits of processed messages on their way: repeated until a broker has answered."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import pack_due_times
from mqmesh.batch.payload import COMPRESS_OVER_BYTES
from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    NotMaster,
    SendInDoubt,
    SequenceConflict,
    SystemBusy,
)
from mqmesh.message import MessageQueue
from mqmesh.message_checks import check_messages
from mqmesh.producer_key import new_key
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.processing import MAX_COMMIT_BYTES, CommitProcessedRequest
from mqmesh.protocol.route import Perm, TopicRoute
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.consumer.outputs import Made, PlacesOfTopic, batches_of
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.producer.send_buffer import AT_TIMES

MOST_AT_ONCE: Final = 32
"""Commits of one consumer under way. Each is of a producer of its own, whose sequences say whether
it was stored."""
MOST_PRODUCERS: Final = 48
"""Producers of one consumer: those of commits under way, and of doubtful ones. Brokers take 64 a
connection (``max_producers_per_connection``)."""
REQUEST_MS: Final = 3_000
RETRY_MS: Final = 200
PATIENCE_MS: Final = 60_000
"""Longest time that a commit waits for its turn and is repeated."""
DOUBT_MS: Final = 2 * PATIENCE_MS
"""For so long the producer of a doubtful commit rests: none of its requests is on its way then."""

OnCommitted = Callable[[MQMeshError | None], None]


class Commit(msgspec.Struct, eq=False):
    """Messages that are done, and those that were made of them.

    Attributes:
        broker_name: Broker group that has, and gets, all of them.
        request: Messages that are done; producer and number of batches are filled in.
        outputs: Messages that were made of them.
        until_ms: Returns the time until which the messages are this member's, monotonic clock.
        on_done: Called with None, or why nothing is stored: ``SendInDoubt`` if that is not known.
        codec: Producer of the outputs.
        parts: Outputs, encoded.
        give_up_ms: It is repeated no longer than until then, monotonic clock.
        doubt: Why it may be stored already.
    """

    broker_name: str
    request: CommitProcessedRequest
    outputs: Made
    until_ms: Callable[[], int]
    on_done: OnCommitted
    codec: BatchCodec | None = None
    parts: list[bytes] = []
    give_up_ms: int = 0
    doubt: MQMeshError | None = None


class ProcessedCommits:
    """Commits of one consumer; in the client loop.

    Args:
        client: Connections.
    """

    def __init__(self, client: ClientEngine) -> None:
        self._client = client
        self._lock = ranked_lock(LockRank.LEAF)
        self._places: dict[tuple[str, str], PlacesOfTopic] = {}
        self._open: dict[Commit, None] = {}
        self._waiting: deque[Commit] = deque()
        self._free: list[BatchCodec] = []
        self._producers = self._under_way = 0
        self._turn = client.transport.random.getrandbits(16)

    def begin(self, commit: Commit) -> None:
        """Have messages committed; ``on_done`` is called once."""
        self._open[commit] = None
        commit.give_up_ms = self._now_ms() + PATIENCE_MS
        self._check_places(
            commit, [one for one in commit.outputs.topics if not self._is_placed(commit, one)]
        )

    def end_all(self) -> None:
        """End all commits; their outcomes stay unknown, because the client loop has ended."""
        while self._open:
            commit, _ = self._open.popitem()
            commit.on_done(ClientClosed("the consumer was closed before a broker had answered"))

    def _check_places(self, commit: Commit, missing: list[str]) -> None:
        """Look for topics whose queues are not known, and let the commit wait for its turn."""
        left = len(missing)

        def found(topic: str, route: TopicRoute | MQMeshError) -> None:
            nonlocal left
            if left == 0:
                return
            if self._is_placed(commit, topic):
                left -= 1
                if left == 0:
                    self._add(commit)
                return
            left = 0
            why = f" ({route})" if isinstance(route, MQMeshError) else ""
            where = not_there(topic, commit.broker_name, commit.request.topic)
            self._report(commit, NoRoute(where + why))

        if not missing:
            self._add(commit)
        for topic in missing:
            self._client.finder.find(topic, partial(found, topic), anew=True)

    def _add(self, commit: Commit) -> None:
        self._waiting.append(commit)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._under_way < MOST_AT_ONCE:
            commit = self._waiting.popleft()
            has_producer = self._free or self._producers < MOST_PRODUCERS
            if not has_producer or self._now_ms() >= commit.give_up_ms:
                resting = self._producers - len(self._free) - self._under_way
                why = f"{self._under_way} are under way, and {resting} ended in doubt of late"
                self._report(commit, SystemBusy(f"too many commits of one consumer: {why}"))
                continue
            self._under_way += 1
            commit.codec = codec = self._free.pop() if self._free else self._new_codec()
            try:
                self._encode(commit, codec)
            except MQMeshError as error:
                self._end(commit, error)
            else:
                self._send(commit)

    def _new_codec(self) -> BatchCodec:
        self._producers += 1
        key, namespace = new_key(self._client.transport.random), self._client.namespace
        return BatchCodec(key, COMPRESS_OVER_BYTES, namespace=namespace)

    def _encode(self, commit: Commit, codec: BatchCodec) -> None:
        """Encode outputs under the next sequences of their producer.

        Raises:
            InvalidArgument: They are too many, or too large.
        """
        transport = self._client.transport

        def make(queue: MessageQueue) -> PendingBatch:
            return PendingBatch(
                lock=self._lock,
                transport=transport,
                queue=queue,
                deadline_ms=0,
                bound=True,
                explicit_count=0,
                retries=0,
                wait_store=True,
            )

        def places(topic: str) -> PlacesOfTopic:
            return self._places[topic, commit.broker_name]

        self._turn += 1
        batches = batches_of(commit.outputs, places, self._turn, make)
        wall_ms = self._client.loop.clock.wall_ms()
        for one in batches:
            _add_payload(one, codec)
        commit.parts = [part for one in batches for part in codec.encode(one, wall_ms)]
        size = sum(map(len, commit.parts))
        if size > MAX_COMMIT_BYTES:
            raise InvalidArgument(
                f"outputs of {size} bytes; what is stored together may have {MAX_COMMIT_BYTES}"
            )
        commit.request = msgspec.structs.replace(
            commit.request, producer_key=codec.key, batch_count=len(batches)
        )

    def _send(self, commit: Commit) -> None:
        self._client.request(
            commit.broker_name,
            RequestCode.COMMIT_PROCESSED,
            lambda answer: self._answered(commit, answer),
            *commit.parts,
            header=encode_header(commit.request),
            timeout_ms=REQUEST_MS,
        )

    def _answered(self, commit: Commit, answer: Command | MQMeshError) -> None:
        if isinstance(answer, MQMeshError):
            if _is_open(answer):
                commit.doubt = answer
            elif not answer.retriable:
                # This holds for earlier tries, too: nothing is stored under these sequences.
                commit.doubt = None
            pause_ms = self._pause_ms(commit, answer)
            if pause_ms is not None:
                self._client.call_later(pause_ms, partial(self._send, commit))
                return
            if commit.doubt is not None and not isinstance(answer, ClientClosed):
                answer = SendInDoubt(
                    f"what was made of messages of {commit.request.topic!r} may be stored or not: "
                    f"broker {commit.broker_name} did not say so in {PATIENCE_MS} ms, or as long "
                    f"as the messages were this member's ({commit.doubt})"
                )
        self._end(commit, answer if isinstance(answer, MQMeshError) else None)
        self._send_waiting()

    def _pause_ms(self, commit: Commit, error: MQMeshError) -> int | None:
        """Return when to repeat a commit, from now on; None for not at all."""
        if isinstance(error, ClientClosed) or not (_is_open(error) or error.retriable):
            return None
        pause_ms = max(getattr(error, "retry_after_ms", 0), RETRY_MS)
        if isinstance(error, NotMaster) and self._client.routes.follow(error, commit.broker_name):
            pause_ms = 0
        until_ms = min(commit.give_up_ms, commit.until_ms())
        return pause_ms if self._now_ms() + pause_ms < until_ms else None

    def _end(self, commit: Commit, error: MQMeshError | None) -> None:
        assert commit.codec is not None
        if isinstance(error, SendInDoubt | SequenceConflict):
            self._client.call_later(DOUBT_MS, partial(self._free.append, commit.codec))
        else:
            self._free.append(commit.codec)
        self._under_way -= 1
        commit.parts = []
        self._report(commit, error)

    def _report(self, commit: Commit, error: MQMeshError | None) -> None:
        if commit in self._open:
            del self._open[commit]
            commit.on_done(error)

    def _is_placed(self, commit: Commit, topic: str) -> bool:
        """Return whether queues of a topic are known at the broker group of a commit.

        Queues that were known once are not forgotten while their broker is away.
        """
        key = (topic, commit.broker_name)
        found = places_of(self._client.routes.route(topic), commit.broker_name)
        if found is not None:
            self._places[key] = found
        return key in self._places

    def _now_ms(self) -> int:
        return self._client.loop.clock.monotonic_ms()


def places_of(route: TopicRoute | None, broker_name: str) -> PlacesOfTopic | None:
    """Return the queues of a topic at a broker group; None for none that may be written to."""
    for one in () if route is None else route.queues:
        if one.broker_name == broker_name and one.perm & Perm.WRITE and one.write_queue_nums:
            assert route is not None
            queues = [
                MessageQueue(route.topic, broker_name, number)
                for number in range(one.write_queue_nums)
            ]
            return PlacesOfTopic(queues, one.priorities)
    return None


def not_there(topic: str, broker_name: str, consumed: str) -> str:
    """Return the sentence for a topic of outputs that has no queue where it needs one."""
    return (
        f"topic {topic!r} has no queue that may be written to at broker group {broker_name!r}, "
        f"where {consumed!r} is consumed: what is made of its messages is stored there"
    )


def _add_payload(batch: PendingBatch, codec: BatchCodec) -> None:
    """Check the messages of a batch, and encode them.

    Raises:
        InvalidArgument: A message is illegal, or they are too many.
    """
    batch.payload = codec.at_once(batch.messages, MAX_COMMIT_BYTES, is_one=True)
    if batch.payload is None:
        batch.messages = check_messages(batch.messages, max_message_size=MAX_COMMIT_BYTES)
        batch.payload = codec.payload(batch.messages)
    if batch.delay == AT_TIMES:
        batch.due_times = pack_due_times([one.deliver_at_ms for one in batch.messages])


def _is_open(error: MQMeshError) -> bool:
    """Return whether a request may have been carried out, or may be yet."""
    if not isinstance(error, BrokerError) or isinstance(error, BrokerNotAvailable):
        return True
    # It is in the log, perhaps, and not safe.
    return type(error) is BrokerError and error.code == ResponseCode.SYSTEM_ERROR

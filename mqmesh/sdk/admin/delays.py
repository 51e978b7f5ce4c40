"""Delayed messages that wait: a list of them, and cancelling by their ids."""

import heapq
from collections.abc import Iterator
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import (
    RECORD_QUEUE,
    SCHEDULE_QUEUES,
    due_times,
    read_delayed_meta,
)
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import BatchHeader, check_stored, decode_messages
from mqmesh.batch.schedule_record import decode_record
from mqmesh.errors import (
    BrokerError,
    CancelRefused,
    CorruptBatch,
    InvalidArgument,
    MQMeshError,
    TopicNotFound,
    TransportError,
)
from mqmesh.message import SCHEDULE_TOPIC, StoredMessage, parse_message_id
from mqmesh.namespaces import drop_namespace
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.protocol.schedule import CancelDelayedRequest
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.queries import GROUP
from mqmesh.units import MIB

READ_BYTES: Final = 1 * MIB
MAX_WAITING: Final = 1_000_000
"""Most messages that one call lists."""

_Place = tuple[int, int]
"""Commit-log offset of a batch, and which message of it."""
_Batches = Iterator[tuple[BatchHeader, memoryview]]


class DelayedMessage(msgspec.Struct, frozen=True):
    """A message that waits for its time.

    Attributes:
        due_ms: When it is delivered, wall clock.
        real_topic: Physical topic that it goes to: its own, or the retry topic of a group that
            failed to consume it.
        broker_name: Broker group where it waits.
        message: The message.
    """

    due_ms: int
    real_topic: str
    broker_name: str
    message: StoredMessage


class DelayClient(AdminClient):
    """Client that lists and cancels delayed messages, a request at a time, in the caller's thread.

    If you have the ``SendResult``, use ``Producer.cancel_delayed``, which sends a
    request to one broker and not to all. Arguments as of ``AdminClient``.
    """

    def waiting(self, topic: str = "", *, max_count: int = 1_000) -> list[DelayedMessage]:
        """Return delayed messages that wait, those that are due next first.

        It reads all delayed messages that brokers still have, delivered ones too, so it is for
        people and not for a program's loop. Messages that are delivered or cancelled meanwhile
        may still be in the answer.

        Args:
            topic: Only those that go to this physical topic.
            max_count: Most messages, 1 to 1,000,000.

        Raises:
            InvalidArgument: ``max_count`` is out of bounds.
            TransportError, BrokerError: A name server or broker does not answer, or refuses.
        """
        if type(max_count) is not int or not 1 <= max_count <= MAX_WAITING:
            raise InvalidArgument(
                f"max_count must be an int of 1 to {MAX_WAITING}, not {max_count!r:.100}"
            )
        found = (
            one
            for name, endpoint in self._masters().items()
            for one in self._waiting_at(name, endpoint)
            if topic in ("", one.real_topic)
        )
        return heapq.nsmallest(max_count, found, key=lambda one: one.due_ms)

    def cancel(self, message_id: str) -> list[str]:
        """Cancels a message wherever it waits.

        Args:
            message_id: 32 hex digits.

        Returns:
            Broker groups at which it waited: one, unless a send was repeated at another.

        Raises:
            InvalidArgument: It is no message id.
            CancelRefused: It was delivered or cancelled before, or is being delivered.
            BrokerError: No broker knows it.
            TransportError: A broker did not answer, and no other had it.
        """
        producer_id, sequence = parse_message_id(message_id)
        header = encode_header(CancelDelayedRequest(producer_id, sequence))
        cancelled: list[str] = []
        errors: list[MQMeshError] = []
        for name, endpoint in self._masters().items():
            try:
                self._request(endpoint, RequestCode.CANCEL_DELAYED, header)
                cancelled.append(name)
            except (BrokerError, TransportError) as error:
                errors.append(error)
        if not cancelled and errors:
            # A broker that knows it says most, one that does not, least.
            raise min(errors, key=_rank)
        return cancelled

    def _waiting_at(self, broker_name: str, endpoint: str) -> Iterator[DelayedMessage]:
        over = set(self._over(endpoint))
        for queue_id in range(RECORD_QUEUE):
            for header, data in self._batches(endpoint, queue_id):
                yield from _left(broker_name, header, data, over, self.namespace)

    def _over(self, endpoint: str) -> Iterator[_Place]:
        """Yield the places of messages that were delivered, cancelled or written anew."""
        for header, data in self._batches(endpoint, RECORD_QUEUE):
            for record in decode_messages(data, header):
                for commitlog_offset, first, count in decode_record(record.body)[1]:
                    for ordinal in range(first, first + count):
                        yield commitlog_offset, ordinal

    def _batches(self, endpoint: str, queue_id: int) -> _Batches:
        assert 0 <= queue_id < SCHEDULE_QUEUES
        place = 0
        while True:
            request = PullRequest(GROUP, SCHEDULE_TOPIC, queue_id, place, READ_BYTES)
            try:
                answer = self._request(endpoint, RequestCode.PULL_MESSAGE, encode_header(request))
            except TopicNotFound:
                return  # nothing was ever delayed there
            pulled = decode_header(PullResponse, answer.header)
            if pulled.status == PullStatus.FOUND:
                yield from iter_batches(answer.body, check_stored)
            if pulled.next_queue_offset <= place:
                return
            place = pulled.next_queue_offset


def _left(
    broker_name: str, header: BatchHeader, data: memoryview, over: set[_Place], namespace: str
) -> Iterator[DelayedMessage]:
    """Yield the messages of a batch, if it is of the namespace, that still wait.

    A damaged batch yields none: it cannot be delivered.
    """
    ordinals = [n for n in range(header.message_count) if (header.commitlog_offset, n) not in over]
    if not ordinals:
        return
    try:
        meta = read_delayed_meta(data, header)
        real_topic = drop_namespace(namespace, meta.real_topic)
        messages = decode_messages(data, header, broker_name=broker_name, namespace=namespace)
    except CorruptBatch:
        return
    if real_topic is None:
        return
    times = due_times(meta, header)
    for ordinal in ordinals:
        due_ms = times[ordinal] if len(times) > 1 else times[0]
        yield DelayedMessage(due_ms, real_topic, broker_name, messages[ordinal])


def _rank(error: MQMeshError) -> int:
    if isinstance(error, CancelRefused):
        return 0
    unknown = isinstance(error, BrokerError) and error.code == ResponseCode.QUERY_NOT_FOUND
    return 2 if unknown else 1

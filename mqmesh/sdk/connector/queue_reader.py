"""Reader of stretches of queues by their offsets, without a place in a group."""

import logging
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from mqmesh.batch.record_batch import BatchHeader, check_stored, decode_messages
from mqmesh.errors import ConfigError, CorruptBatch, RemoteProtocolError
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import (
    OffsetResponse,
    PullRequest,
    PullResponse,
    PullStatus,
    SearchOffsetRequest,
)
from mqmesh.sdk.connector.patient_client import PatientClient
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.units import MAX_OFFSET, MIB

GROUP: Final = "mqmesh-spark"
"""Consumer group that pulls are made for; nothing is committed for it."""
CORRUPT_TRIES: Final = 5
SHORT_TRIES: Final = 3
"""Reads in which a queue may end too early before that is believed."""
SHORT_PAUSE_S: Final = 0.5

OnLoss = Callable[[str], None]
"""Callback for missing messages, with a text that describes them; raise, or go on without them."""
Found = Iterator[tuple[BatchHeader, list[StoredMessage]]]

_log = logging.getLogger(__name__)


class QueueEdges(msgspec.Struct, frozen=True):
    """Begin and end of a queue.

    Attributes:
        first: Queue offset of its first message.
        end: Behind its last one.
        epoch: Of the broker's log now; 0 if the store does not know.
    """

    first: int
    end: int
    epoch: int


class Stretch(msgspec.Struct, frozen=True):
    """Messages of a queue that are to be read.

    Attributes:
        queue: Queue to read.
        start: Queue offset of the first.
        end: Behind the last.
        epoch: Of the log when these offsets were right; 0 if that is not known.
    """

    queue: MessageQueue
    start: int
    end: int
    epoch: int = 0


class QueueReader(PatientClient):
    """Reader of queues and of stretches of them; in memory is one answer of a broker at a time.

    Attributes:
        group: Consumer group named in pulls, which may be refused to it.
    """

    group = GROUP

    def edges(self, queue: MessageQueue) -> QueueEdges:
        """Return where a queue begins and ends.

        Raises:
            RequestTimeout: Its broker was away for too long.
            BrokerError: The broker refuses, or has no such queue.
        """
        found, _ = self._pull(queue, MAX_OFFSET)
        return QueueEdges(found.min_queue_offset, found.max_queue_offset, found.epoch)

    def cut(self, queue: MessageQueue, offset: int, epoch: int) -> int | None:
        """Return where a queue's messages differ from those of an epoch of its broker's log.

        Args:
            queue: Queue to look at.
            offset: Only messages lost before it are reported.
            epoch: From a look at the queue at that time; 0 for unknown.

        Returns:
            Queue offset of the first message that was lost; None if none before ``offset`` was.
        """
        found, _ = self._pull(queue, offset, epoch=epoch)
        return found.next_queue_offset if found.status == PullStatus.OFFSET_CUT else None

    def offset_of_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at or after a time; the end if none."""
        header = encode_header(SearchOffsetRequest(queue.topic, queue.queue_id, timestamp_ms))
        code = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
        answer = self.ask(queue.broker_name, code, header)
        return decode_header(OffsetResponse, answer.header).queue_offset

    def read(
        self,
        stretch: Stretch,
        *,
        selector: MessageSelector | None = None,
        max_bytes: int = MIB,
        on_loss: OnLoss,
    ) -> Found:
        """Yield the messages of a stretch, batch by batch.

        Args:
            stretch: Offsets to read.
            selector: Filter of messages; the broker leaves the others out.
            max_bytes: Size of one answer; at least one batch comes, of any size.
            on_loss: Called with a sentence about messages that the broker does not have any more.

        Raises:
            RequestTimeout: The broker was away for too long.
            CorruptBatch: A batch is damaged, also after retries.
            ConfigError: An administrator moves the group.
            BrokerError: The broker refuses.
        """
        selector = selector or MessageSelector()
        position, tries, corrupt = stretch.start, 0, 0
        while position < stretch.end:
            found, answer = self._pull(
                stretch.queue,
                position,
                epoch=stretch.epoch,
                max_bytes=max_bytes,
                selector=selector,
                verify=corrupt > 0,
            )
            status = found.status
            if status == PullStatus.FOUND:
                try:
                    for header, messages in _batches(
                        answer, stretch, position, selector, on_loss, self.namespace
                    ):
                        position = header.next_queue_offset
                        if messages:
                            yield header, messages
                except CorruptBatch as error:
                    corrupt += 1
                    if corrupt == CORRUPT_TRIES:
                        raise
                    _log.warning("%s: asking again: %s", _named(stretch.queue), error)
                    continue
                corrupt = tries = 0
                if not selector.selects_all:
                    position = max(position, found.next_queue_offset)
            elif status in (PullStatus.NO_MATCHED_MSG, PullStatus.MESSAGES_LOST):
                if found.next_queue_offset <= position:
                    raise RemoteProtocolError(
                        f"{_named(stretch.queue)}: messages from {position} to "
                        f"{found.next_queue_offset} were passed over"
                    )
                if status == PullStatus.MESSAGES_LOST:
                    on_loss(
                        f"{_named(stretch.queue)}: messages {position} to "
                        f"{found.next_queue_offset - 1} are lost to damage at the broker"
                    )
                position = found.next_queue_offset
            elif status == PullStatus.OFFSET_ILLEGAL and position < found.min_queue_offset:
                on_loss(_gone(stretch.queue, position, found.min_queue_offset))
                position = found.min_queue_offset
            elif status in (PullStatus.NO_NEW_MSG, PullStatus.OFFSET_ILLEGAL):
                tries += 1
                if tries == SHORT_TRIES:
                    on_loss(
                        f"{_named(stretch.queue)} ends at {found.max_queue_offset}; it went to "
                        f"{stretch.end} when this was planned"
                    )
                    return
                self._transport.pause(SHORT_PAUSE_S)
            elif status == PullStatus.OFFSET_CUT:
                on_loss(cut_text(stretch.queue, found.next_queue_offset, position))
                return
            else:
                raise ConfigError(
                    f"an administrator moves group {self.group!r} in {_named(stretch.queue)}; "
                    "Spark keeps offsets by itself: set option group to a name of its own"
                )

    def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        epoch: int = 0,
        max_bytes: int = 1,
        selector: MessageSelector | None = None,
        verify: bool = False,
    ) -> tuple[PullResponse, Command]:
        wanted = selector or MessageSelector()
        request = PullRequest(
            self.group,
            queue.topic,
            queue.queue_id,
            offset,
            max_bytes,
            0,
            wanted.expression,
            wanted.expression_type,
            verify=verify,
            epoch=epoch,
        )
        answer = self.ask(queue.broker_name, RequestCode.PULL_MESSAGE, encode_header(request))
        return decode_header(PullResponse, answer.header), answer


def cut_text(queue: MessageQueue, cut: int, offset: int) -> str:
    """Return the sentence for a log whose end is lost."""
    return (
        f"{_named(queue)}: the broker lost messages {cut} to {offset - 1} in a power cut; other "
        "messages stand there now, or will"
    )


def _batches(
    answer: Command,
    stretch: Stretch,
    position: int,
    selector: MessageSelector,
    on_loss: OnLoss,
    namespace: str,
) -> Found:
    """Yield the batches of an answer, each with those of its messages that are wanted."""
    tags = selector.wanted_tags()
    body, at, began = answer.body, 0, position
    while at < len(body) and position < stretch.end:
        header = check_stored(body, at)
        if header.queue_id != stretch.queue.queue_id:
            raise RemoteProtocolError(
                f"{_named(stretch.queue)}: a batch of queue {header.queue_id}"
            )
        if header.next_queue_offset > position:
            if header.base_queue_offset > position and selector.selects_all:
                on_loss(_gone(stretch.queue, position, header.base_queue_offset))
            messages = decode_messages(
                body,
                header,
                position=at,
                broker_name=stretch.queue.broker_name,
                namespace=namespace,
            )
            if header.base_queue_offset < position or header.next_queue_offset > stretch.end:
                messages = [one for one in messages if position <= one.queue_offset < stretch.end]
            if tags is not None:
                # The broker compared hashes of tags.
                messages = [one for one in messages if one.tag in tags]
            position = header.next_queue_offset
            yield header, messages
        at += header.total_size
    if position == began:
        raise RemoteProtocolError(f"{_named(stretch.queue)}: an answer without offset {began}")


def _gone(queue: MessageQueue, offset: int, first: int) -> str:
    return (
        f"{_named(queue)}: messages {offset} to {first - 1} are not there any more (retention, or "
        "the topic was made anew)"
    )


def _named(queue: MessageQueue) -> str:
    return f"{queue.topic} {queue.broker_name}:{queue.queue_id}"

"""Record batches that were pulled and checked, and are decoded when their messages are due.

Decoded messages take several times the memory of the batch they come from, and memory that
grows and shrinks is what costs most when messages are made. So only those are decoded that
a listener or a poll is about to get.
"""

from bisect import bisect_left
from typing import Final

import msgspec

from mqmesh.batch.record_batch import Attributes, BatchHeader, decode_messages, read_sparse_meta
from mqmesh.message import StoredMessage

_SPARSE: Final = int(Attributes.SPARSE)


class PullSource(msgspec.Struct, frozen=True):
    """Source of batches.

    Attributes:
        broker_name: Broker group.
        store_host: Address of the broker, for the messages' facts.
        tags: Tags that are wanted, to be looked at again; None if that is not necessary.
        filtered: The broker leaves messages out.
        namespace: Of the client; "" for none.
    """

    broker_name: str
    store_host: str = ""
    tags: frozenset[str] | None = None
    filtered: bool = False
    namespace: str = ""


class PulledBatch:
    """A batch as it was received; it passed ``check_stored``.

    Args:
        source: Its source.
        body: The answer that it is part of.
        position: Byte position in the answer.
        header: Its header.
        first: Queue offset of the first message wanted; earlier ones are left out.

    Attributes:
        first: As above.
        end: Queue offset behind its last message.
        offsets: Queue offsets of the messages from ``first`` on; None if none is left out.
        count: Number of messages.

    Raises:
        CorruptBatch: A cut batch does not say which messages it has.
    """

    __slots__ = ("_body", "_header", "_position", "_source", "count", "end", "first", "offsets")

    def __init__(
        self,
        source: PullSource,
        body: memoryview,
        position: int,
        header: BatchHeader,
        first: int,
    ) -> None:
        self.first = first
        self.end: int = header.next_queue_offset
        self._source = source
        self._body = body
        self._position = position
        self._header = header
        self.offsets: list[int] | None = None
        self.count = self.end - first
        if header.attributes & _SPARSE:
            base: int = header.base_queue_offset
            ordinals = read_sparse_meta(body, header, position)[1]
            self.offsets = [base + at for at in ordinals[bisect_left(ordinals, first - base) :]]
            self.count = len(self.offsets)

    def decode(self, fencing_token: int = 0) -> list[StoredMessage]:
        """Return its messages from ``first`` on that are wanted, in order.

        Args:
            fencing_token: Of the lock that they are consumed under, 0 for none.

        Raises:
            CorruptBatch: The producer wrote messages that cannot be decoded.
        """
        source, header = self._source, self._header
        messages = decode_messages(
            self._body,
            header,
            position=self._position,
            broker_name=source.broker_name,
            store_host=source.store_host,
            fencing_token=fencing_token,
            namespace=source.namespace,
        )
        if self.count < len(messages):
            del messages[: len(messages) - self.count]
        tags = source.tags
        if tags is None:
            return messages
        # The broker compared hashes of tags.
        return [message for message in messages if message.tag in tags]

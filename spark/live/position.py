"""Position of a stream: where it begins, and where its next batch ends. No Spark in it."""

from collections.abc import Mapping
from typing import Any, Final

from mqmesh.errors import ConfigError, OffsetIllegal
from mqmesh.message import MessageQueue
from mqmesh.sdk.connector.queue_reader import QueueEdges, QueueReader

from .options import LiveOptions, Place, Places, from_json, queue_name, to_json
from .planning import bounded, capped, latest_places, messages_between, queues_of, resolve

CHECKPOINT: Final = "the checkpoint"
_ONE_BATCH: Final = (
    "Trigger.AvailableNow with option maxOffsetsPerTrigger would end after one batch: Spark 4.1 "
    "takes one batch of a source written in Python. Leave the option out, or run the stream by "
    "mqmesh.spark.streams.drain, with option endingOffsets 'latest'"
)


class StreamPosition:
    """Position of a stream, as far as the reader that plans its batches knows it.

    With ``Trigger.AvailableNow`` Spark asks for the end before it says where the stream is, and
    asks again before it plans a batch; it reads up to the first answer, in one batch.
    """

    def __init__(self, options: LiveOptions) -> None:
        """Starts without a position."""
        self._options = options
        self._initial: Places | None = None
        self._places: Places | None = None
        # The places in the form in which Spark has them. While they stay it must stay, too.
        self._shown: dict[str, Any] = {}
        self._first_edges: dict[MessageQueue, QueueEdges] = {}
        self._target: Places | None = None
        self._looks = 0
        self._is_planned = True
        self._batch_ms: int | None = None

    def initial(self, client: QueueReader) -> Places:
        """Returns where a new query begins.

        Raises:
            MQMeshError: An option is wrong, or a broker does not answer.
        """
        if self._initial is None:
            options = self._options
            # Ends that an answer has named already are the ones that "latest" means.
            self._initial = {
                queue: resolve(
                    client,
                    options.starting,
                    queue,
                    self._first_edges.get(queue) or client.edges(queue),
                )
                for queue in queues_of(client, options)
            }
        return self._initial

    def advance(self, client: QueueReader, now_ms: int) -> dict[str, Any]:
        """Returns the end of the next batch, for a checkpoint; the position if none is due.

        Args:
            client: Reader of queues.
            now_ms: Time of a clock that does not jump, in ms.

        Raises:
            ConfigError: Spark would end the stream before ``maxOffsetsPerTrigger`` allows it.
            MQMeshError: The same as for ``initial``.
        """
        options = self._options
        if self._looks == 1 and not self._is_planned and options.max_offsets:
            raise ConfigError(_ONE_BATCH)
        self._looks += 1
        queues = queues_of(client, options, self._places or ())
        latest, edges = latest_places(client, queues, self._places or {})
        self._first_edges = self._first_edges or edges
        known = self._places
        if known is None:
            is_limited = options.max_offsets or options.min_offsets or options.ending is not None
            known = self.initial(client) if is_limited else {}
        # New queues are read from their first message on.
        start = {queue: Place(found.first) for queue, found in edges.items()} | known
        ends = self._bounded(client, known, latest, edges)
        if self._is_too_early(start, ends, now_ms):
            ends = known
        else:
            ends = capped(start, ends, options.max_offsets)
        self._is_planned = ends == known
        if not self._is_planned:
            self._batch_ms = now_ms
        if self._places is None or not self._is_planned:
            self._places, self._shown = ends, to_json(ends, latest)
        return self._shown

    def plan(self, start: Mapping[str, Any], end: dict[str, Any]) -> tuple[Places, Places]:
        """Returns where a batch begins and ends, and takes its end for the position if it has none.

        Args:
            start: Beginning, of a checkpoint.
            end: End; like ``start`` where Spark only says where the stream is.

        Raises:
            ConfigError: The same as for ``advance``.
            OffsetIllegal: A queue that the stream has read is not known any more.
        """
        begins, ends = from_json(start, CHECKPOINT), from_json(end, CHECKPOINT)
        if self._places is None:
            self._places, self._shown = ends, end
        elif self._looks == 1 and begins == ends != self._initial and self._options.max_offsets:
            raise ConfigError(_ONE_BATCH)
        if begins != ends:
            self._is_planned = True
        for queue in begins:
            if queue not in ends:
                raise OffsetIllegal(
                    f"queue {queue_name(queue)} of topic {queue.topic!r}, which the stream has "
                    "read, was not found when the query began; start it again when its broker is "
                    "there"
                )
        return begins, ends

    def _bounded(
        self,
        client: QueueReader,
        known: Places,
        latest: Places,
        edges: dict[MessageQueue, QueueEdges],
    ) -> Places:
        """Returns the ends up to which the stream may be read: the queues', or its own."""
        ending = self._options.ending
        if ending is None:
            return latest
        if self._target is None:
            # Queues of a broker that is away are read only up to their known ends.
            self._target = {
                queue: resolve(client, ending, queue, edges[queue]) if queue in edges else place
                for queue, place in latest.items()
            }
        return bounded(known, latest, self._target)

    def _is_too_early(self, start: Places, ends: Places, now_ms: int) -> bool:
        """Returns True if a batch waits for more messages."""
        options = self._options
        if not options.min_offsets or options.ending is not None or self._batch_ms is None:
            return False
        if now_ms - self._batch_ms >= options.max_delay_ms:
            return False
        return sum(messages_between(start, ends).values()) < options.min_offsets

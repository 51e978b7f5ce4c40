"""Streams of topics: run until all is read, and how far behind they are."""

import json
from typing import TYPE_CHECKING, Final

from mqmesh.errors import ConfigError

from .failures import NOT_STARTED, errors_of_libraries
from .live.options import LATEST, from_json

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

TRIES: Final = 10
"""Starts of a query, when Spark cannot start a process in time."""


def drain(writer: "DataStreamWriter", path: str | None = None) -> "StreamingQuery":
    """Runs a stream batch by batch until nothing is left to read, and ends it.

    It takes the place of ``Trigger.AvailableNow`` where ``maxOffsetsPerTrigger`` is set. A stream
    whose source has the option ``endingOffsets`` ``latest`` reads what was there when it began;
    without it, the first moment in which nothing is left counts, which on a busy topic may not
    come.

    Args:
        writer: Stream with its sink and its checkpoint; its trigger is set here.
        path: Path of the sink, as for ``writer.start``.

    Returns:
        The query, which has ended; ``recentProgress`` has its batches.

    Raises:
        MQMeshError: The query failed; one line with the cause.
    """
    writer = writer.trigger(processingTime="0 seconds")
    with errors_of_libraries():
        for attempt in range(1, TRIES + 1):
            query = writer.start(path)
            try:
                query.processAllAvailable()
                break
            except Exception as error:
                # The checkpoint has all batches that are done, so a new start goes on behind them.
                if attempt == TRIES or NOT_STARTED not in str(error):
                    raise
            finally:
                query.stop()
    return query


def offsets_behind(progress: "StreamingQueryProgress") -> dict[str, float]:
    """Returns how far a stream was behind the ends of its queues when a batch was planned.

    Args:
        progress: Progress of a query, as ``query.lastProgress`` or the one of a listener's event.

    Returns:
        Messages a queue that the batch left, under the names of Kafka's metrics:
        ``minOffsetsBehindLatest``, ``maxOffsetsBehindLatest``, ``avgOffsetsBehindLatest``; empty
        if no source of the query reads a topic of mqmesh.
    """
    behind = []
    for source in json.loads(progress.json)["sources"]:
        offsets = source["endOffset"]
        try:
            places = from_json(offsets, "the progress") if isinstance(offsets, dict) else {}
        except ConfigError:
            continue  # another kind of source
        behind += [
            offsets[queue.topic][f"{queue.broker_name}:{queue.queue_id}"].get(LATEST, place.offset)
            - place.offset
            for queue, place in places.items()
        ]
    if not behind:
        return {}
    return {
        "minOffsetsBehindLatest": float(min(behind)),
        "maxOffsetsBehindLatest": float(max(behind)),
        "avgOffsetsBehindLatest": sum(behind) / len(behind),
    }

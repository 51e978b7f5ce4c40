"""Writes of the broker's own: retries, dead letters, due and committed messages.

It goes the way of every send: gathered during the tick, written at once with the
others, answered when it is stored and safe.
"""

from collections.abc import Sequence

from mqmesh.batch.record_batch import read_header, read_meta
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.storing.staging import OpenSend, Outcomes
from mqmesh.roles.broker.features.topics.topics import Topic
from mqmesh.storage.interface import BatchToPut


def ensure_topic(context: BrokerContext, name: str, queues: int = 1) -> Topic:
    """A topic of the broker's own, created if it is missing, beyond ``max_topics``, too.

    What was acknowledged may need it. Whoever asks sees to it that not anybody can have any
    number of them made.

    Args:
        context: The broker.
        name: System topics are allowed.
        queues: To write and to read, when it is new.

    Raises:
        SystemBusy: There are more topics than a broker may have at all.
    """
    topic = context.topics.get(name)
    if topic is None:
        topic = context.topics.set(TopicConfig(name, queues, queues), context.clock.wall_ms())
    return topic


def inner_send(context: BrokerContext, batches: Sequence[bytes], on_stored: Outcomes) -> None:
    """Has whole, right batches stored; see ``inner_put``."""
    inner_put(context, [batch_to_put(data) for data in batches], on_stored)


def inner_put(context: BrokerContext, batches: Sequence[BatchToPut], on_stored: Outcomes) -> None:
    """Has batches of the broker's own stored with the sends of this tick.

    They are not refused for a topic's permission. The store may refuse them (full, too slow),
    and a stopping broker never calls back for them: who must have them written tries again. In a
    group that elects its master they are stored once they are confirmed, however long that takes;
    a master that is deposed refuses them.

    Args:
        context: The broker.
        batches: At least one; a missing topic is created.
        on_stored: Called on the event loop, later, with an outcome for each batch.

    Raises:
        SystemBusy: A topic is missing, and there are more than a broker may have at all.
    """
    for batch in batches:
        ensure_topic(context, batch.topic, batch.queue_id + 1)
    outcomes: list[BatchOutcome | None] = [None] * len(batches)
    context.stage.batches += batches
    context.stage.sends.append(OpenSend(None, outcomes, on_stored=on_stored))
    context.stage.staged_bytes += sum(batch.header.total_size for batch in batches)


def batch_to_put(data: bytes) -> BatchToPut:
    """What the store needs to know of a whole, right batch."""
    header = read_header(data)
    meta = read_meta(data, header)
    return BatchToPut(meta.topic, header.queue_id, header, data, meta.tag_hashes)

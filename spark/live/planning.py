"""Which stretches of which queues are read: the steps between options and tasks."""

import logging
import re
from collections.abc import Callable, Iterable

from mqmesh.errors import ConfigError, MQMeshError, OffsetIllegal, TopicNotFound
from mqmesh.message import MessageQueue, is_system_topic
from mqmesh.sdk.connector.queue_reader import QueueEdges, QueueReader, Stretch, cut_text

from .options import END, FIRST, Bound, LiveOptions, Place, Places, queue_name

HOW_TO_GO_ON = "option failOnDataLoss 'false' goes on without what is lost, and logs it"

_log = logging.getLogger(__name__)


def on_loss(fail: bool) -> Callable[[str], None]:
    """Returns the handler of lost messages.

    Args:
        fail: Value of option ``failOnDataLoss``.

    Returns:
        A function of a sentence; it raises ``OffsetIllegal``, or logs the sentence.
    """

    def lost(text: str) -> None:
        if fail:
            raise OffsetIllegal(f"{text}; {HOW_TO_GO_ON}")
        _log.warning("%s; going on", text)

    return lost


def queues_of(
    client: QueueReader, options: LiveOptions, known: Iterable[MessageQueue] = ()
) -> list[MessageQueue]:
    """Returns the queues that the options mean now, sorted.

    Args:
        client: Reader of queues.
        options: Options of the reader.
        known: Queues of a stream so far; name servers forget a topic while its brokers are away,
            and so may miss queues that exist.

    Raises:
        TopicNotFound: A topic that was named does not exist.
        ConfigError: An assigned queue does not exist, or there is no queue at all.
        MQMeshError: The name servers do not answer.
    """
    topics = {one.topic for one in options.assigned}
    names = [topic for topic in options.topics if not topic.endswith("*")]
    topics.update(names)
    if options.pattern or len(names) < len(options.topics):
        begins = tuple(topic[:-1] for topic in options.topics if topic.endswith("*"))
        wanted = re.compile(options.pattern)
        for topic in client.patiently(client.topics, "the name server"):
            fits = wanted.fullmatch(topic) if options.pattern else topic.startswith(begins)
            if fits and not is_system_topic(topic):
                topics.add(topic)
    found: list[MessageQueue] = []
    before = {queue.topic for queue in known}
    for topic in sorted(topics):
        try:
            found += client.readable_queues(topic)
        except TopicNotFound as error:
            if topic in before:
                _log.warning("topic %s is passed over this time: %s", topic, error)
                continue
            raise TopicNotFound(f"{error}; create it, or take it out of the options") from error
    if options.assigned:
        for queue in options.assigned:
            if queue not in found and queue not in known:
                raise ConfigError(
                    f"option assign: topic {queue.topic!r} has no queue {queue_name(queue)}; it "
                    f"has {', '.join(queue_name(one) for one in found if one.topic == queue.topic)}"
                )
        return list(options.assigned)
    if names and not found and not before:
        raise ConfigError(f"no queue of {', '.join(sorted(topics))} may be read")
    return sorted(found)


def resolve(client: QueueReader, bound: Bound, queue: MessageQueue, edges: QueueEdges) -> Place:
    """Returns the place that options mean.

    Args:
        client: Reader of queues, for lookups by time.
        bound: Bound that the options set.
        queue: Queue of the place.
        edges: Beginning and end of the queue.

    Raises:
        ConfigError: An end that the queue has not reached, or the options do not name this queue.
        MQMeshError: The broker does not answer.
    """
    moment = bound.time_of(queue)
    if moment >= 0:
        return Place(client.offset_of_time(queue, moment), edges.epoch)
    place = bound.place(queue)
    if place.offset == FIRST:
        return Place(edges.first, edges.epoch)
    if place.offset == END:
        return Place(edges.end, edges.epoch)
    if place.offset > edges.end and not place.epoch:
        raise ConfigError(
            f"option {bound.name}: {place.offset} of queue {queue_name(queue)} of topic "
            f"{queue.topic!r} lies behind its end, {edges.end}"
        )
    return place


def stretch_of(
    client: QueueReader,
    queue: MessageQueue,
    start: Place,
    end: Place,
    lost: Callable[[str], None],
) -> Stretch | None:
    """Returns the rest of a stretch that was planned, perhaps long ago.

    A broker that lost the end of its log in a power cut fills those offsets with other messages.
    So a stretch that begins behind the cut begins at the cut instead, and one that was planned to
    end behind it ends at the cut: the next one begins there. Neither reads a message twice.

    Args:
        client: Reader of the queue's broker.
        queue: Queue of the stretch.
        start: Planned beginning.
        end: Planned end.
        lost: Called with a sentence about missing messages, see ``on_loss``.

    Returns:
        None if nothing is to be read.

    Raises:
        OffsetIllegal: Raised by ``lost``.
        MQMeshError: The broker does not answer.
    """
    if start == end:
        return None
    edges = client.edges(queue)
    low, high = start.offset, end.offset
    if 0 < end.epoch < edges.epoch and (cut := client.cut(queue, high, end.epoch)) is not None:
        lost(cut_text(queue, cut, high))
        high = cut
    if 0 < start.epoch < edges.epoch and (cut := client.cut(queue, low, start.epoch)) is not None:
        lost(cut_text(queue, cut, low))
        low = cut
    if low >= high:
        return None
    if low > edges.end:
        lost(
            f"{queue.topic} {queue_name(queue)} ends at {edges.end}, before {low}, where it was to "
            "be read on: was the topic made anew?"
        )
        low = edges.first
    if low < edges.first:
        lost(
            f"{queue.topic} {queue_name(queue)}: messages {low} to "
            f"{min(edges.first, high) - 1} are removed by retention"
        )
        low = edges.first
    return Stretch(queue, low, high, edges.epoch) if low < high else None


def split(stretches: Iterable[Stretch], least: int) -> list[Stretch]:
    """Cuts stretches so that there are about so many.

    Args:
        stretches: A task each.
        least: Tasks that are wanted; 0 for as they are.
    """
    whole = list(stretches)
    if len(whole) >= least:
        return whole
    total = sum(one.end - one.start for one in whole)
    size = max(-(-total // least), 1)
    return [
        Stretch(one.queue, start, min(start + size, one.end), one.epoch)
        for one in whole
        for start in range(one.start, one.end, size)
    ]


def messages_between(start: Places, end: Places) -> dict[MessageQueue, int]:
    """Returns how many messages each queue has from a position to another; 0 if it is behind it.

    Args:
        start: Position; a queue that is not there begins at 0.
        end: Position of the queues that are counted.
    """
    return {
        queue: max(place.offset - start.get(queue, Place(0)).offset, 0)
        for queue, place in end.items()
    }


def bounded(start: Places, latest: Places, target: Places) -> Places:
    """Returns ends that are not behind a target, and not before the start.

    Args:
        start: Position of the stream.
        latest: Ends of the queues.
        target: End of all that is to be read; a queue that is not there is read no further.
    """
    found = dict(start)
    for queue, place in latest.items():
        end = target.get(queue)
        if end is not None:
            place = place if place.offset <= end.offset else end
            if queue not in start or place.offset > start[queue].offset:
                found[queue] = place
    return found


def capped(start: Places, latest: Places, most: int) -> Places:
    """Returns ends that are so many messages behind the start at most, each queue by its share.

    Args:
        start: Position of the stream; a queue that is not there begins at 0.
        latest: Ends of the queues.
        most: Messages; 0 for no limit.
    """
    waiting = messages_between(start, latest)
    total = sum(waiting.values())
    if not most or total <= most:
        return latest
    shares = {queue: count * most // total for queue, count in waiting.items()}
    left = most - sum(shares.values())
    for queue in sorted(shares):
        more = min(left, waiting[queue] - shares[queue], 1)
        shares[queue] += more
        left -= more
    return {
        queue: place
        if shares[queue] >= waiting[queue]
        else Place(start.get(queue, Place(0)).offset + shares[queue], place.epoch)
        for queue, place in latest.items()
    }


def latest_places(
    client: QueueReader, queues: Iterable[MessageQueue], known: Places
) -> tuple[Places, dict[MessageQueue, QueueEdges]]:
    """Returns the present ends of queues; with brokers that are away, the ends known before.

    Args:
        client: Reader of queues; a broker that has known queues only gets one request.
        queues: The options' at present.
        known: Position of the stream.

    Raises:
        MQMeshError: The broker of a queue that is not known does not answer.
    """
    places = dict(known)
    edges = {}
    away: set[str] = set()
    patience_ms = client.patience_ms
    for queue in queues:
        if queue.broker_name in away and queue in known:
            continue
        try:
            client.patience_ms = 0 if queue in known else patience_ms
            edges[queue] = client.edges(queue)
            places[queue] = Place(edges[queue].end, edges[queue].epoch)
        except MQMeshError as error:
            if queue not in known or not error.retriable:
                raise
            away.add(queue.broker_name)
            _log.warning("broker %s is passed over this time: %s", queue.broker_name, error)
        finally:
            client.patience_ms = patience_ms
    return places, edges

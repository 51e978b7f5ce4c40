"""Forced losses: what consumer groups missed because messages were removed before their time."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from mqmesh.storage.interface import QueueMove
from mqmesh.units import QueueOffset


class Loss(msgspec.Struct, frozen=True, order=True):
    """Messages that a group had not consumed, and never will.

    Attributes:
        group: Consumer group that lost messages.
        topic: Topic of the messages.
        messages: Number of messages.
    """

    group: str
    topic: str
    messages: int


def losses(
    moves: Iterable[QueueMove],
    groups_of_topic: Callable[[str], Sequence[str]],
    committed: Callable[[str, str, int], QueueOffset],
) -> list[Loss]:
    """Which groups lost how much.

    A group that never committed anything in a queue is not said to have lost what was there: nobody
    knows where it would have begun.

    Args:
        moves: How the beginnings of queues were moved.
        groups_of_topic: Groups with an offset in a topic.
        committed: Next offset that a group wants of a queue, -1 for none.

    Returns:
        One loss a group and topic, sorted.
    """
    found: dict[tuple[str, str], int] = {}
    groups: dict[str, Sequence[str]] = {}
    for move in moves:
        if move.topic not in groups:
            groups[move.topic] = groups_of_topic(move.topic)
        for group in groups[move.topic]:
            offset = committed(group, move.topic, move.queue_id)
            lost = move.first - max(move.first_before, offset)
            if offset >= 0 and lost > 0:
                found[group, move.topic] = found.get((group, move.topic), 0) + lost
    return sorted(Loss(group, topic, lost) for (group, topic), lost in found.items())


def sentences(moves: Sequence[QueueMove], found: Sequence[Loss], most: int) -> Iterator[str]:
    """Yield sentences for administrators: how much went, and then each group's loss.

    Args:
        moves: Moves of the first offsets of queues.
        found: Losses by group and topic.
        most: Groups and topics that are named at most.
    """
    messages = sum(move.first - move.first_before for move in moves)
    yield (
        f"{messages} messages in {len(moves)} queues were removed before their time, since the "
        "disk is full (clean_file_forcibly_enable)"
    )
    for loss in found[:most]:
        yield (
            f"group {loss.group!r} lost {loss.messages} messages of topic {loss.topic!r} that it "
            "had not consumed"
        )
    if len(found) > most:
        rest = found[most:]
        lost = sum(one.messages for one in rest)
        yield f"and {len(rest)} more groups and topics, {lost} messages"

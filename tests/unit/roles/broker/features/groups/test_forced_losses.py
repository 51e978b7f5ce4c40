"""Who lost what when messages were removed before their time."""

from __future__ import annotations

from mqmesh.roles.broker.features.groups.forced_losses import Loss, losses, sentences
from mqmesh.storage.interface import QueueMove

MOVES = [
    QueueMove("t", 0, 10, 30),
    QueueMove("t", 1, 0, 5),
    QueueMove("u", 0, 0, 7),
    QueueMove("nobody's", 0, 0, 100),
]
OFFSETS = {
    ("early", "t", 0): 4,
    ("half", "t", 0): 25,
    ("half", "t", 1): 2,
    ("done", "t", 0): 30,
    ("done", "t", 1): 5,
    ("early", "u", 0): 0,
}


def found():
    return losses(
        MOVES,
        lambda topic: sorted({group for group, of, _ in OFFSETS if of == topic}),
        lambda *place: OFFSETS.get(place, -1),
    )


def test_a_group_loses_what_it_had_not_consumed_and_what_was_there():
    assert found() == [Loss("early", "t", 20), Loss("early", "u", 7), Loss("half", "t", 8)]


def test_people_are_told_how_much_went_and_who_lost_it():
    first, *others = sentences(MOVES, found(), most=2)
    assert first.startswith("132 messages in 4 queues were removed before their time")
    assert "clean_file_forcibly_enable" in first
    assert others == [
        "group 'early' lost 20 messages of topic 't' that it had not consumed",
        "group 'early' lost 7 messages of topic 'u' that it had not consumed",
        "and 1 more groups and topics, 8 messages",
    ]

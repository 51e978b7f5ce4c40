"""What is remembered of messages that were sent back."""

from mqmesh.batch.record_batch import check_batch, decode_messages
from mqmesh.roles.broker.features.retries.sent_back_marks import (
    DEAD,
    RETRIED,
    UNDER_WAY,
    SentBackMark,
    SentBackMarks,
    encode_marks,
)


def runs(marks: SentBackMarks, first: int, stop: int, group: str = "g", place: int = 100):
    return list(marks.runs(group, place, first, stop))


def test_messages_are_divided_by_what_became_of_them() -> None:
    marks = SentBackMarks()
    marks.settle(SentBackMark("g", 100, 2, 2))
    marks.settle(SentBackMark("g", 100, 4, 1, True))
    marks.begin(SentBackMark("g", 100, 6, 1))
    assert runs(marks, 0, 8) == [
        (0, 2, None),
        (2, 4, RETRIED),
        (4, 5, DEAD),
        (5, 6, None),
        (6, 7, UNDER_WAY),
        (7, 8, None),
    ]
    assert runs(marks, 3, 4) == [(3, 4, RETRIED)]
    assert runs(marks, 3, 3) == []
    assert runs(marks, 0, 8, group="h") == runs(marks, 0, 8, place=101) == [(0, 8, None)]


def test_what_could_not_be_written_is_taken_back() -> None:
    marks = SentBackMarks()
    mark = SentBackMark("g", 100, 0, 3)
    marks.begin(mark)
    marks.withdraw(mark)
    assert runs(marks, 0, 3) == [(0, 3, None)]
    assert len(marks) == 0


def test_the_oldest_are_forgotten_first_and_no_more_remembered_than_allowed() -> None:
    marks = SentBackMarks(most=3)
    for place in range(5):
        marks.settle(SentBackMark("g", place, 0, 1))
    assert len(marks) == 3
    assert [runs(marks, 0, 1, place=place)[0][2] for place in range(5)] == [None, None, 0, 0, 0]


def test_a_group_whose_offsets_were_moved_begins_anew() -> None:
    marks = SentBackMarks()
    for group in ("g", "h"):
        marks.settle(SentBackMark(group, 100, 0, 1))
    assert marks.forget_group("g")
    assert not marks.forget_group("g")
    assert runs(marks, 0, 1) == [(0, 1, None)]
    assert runs(marks, 0, 1, group="h") == [(0, 1, RETRIED)]


def test_a_mark_on_disk_never_changes() -> None:
    mark = SentBackMark("g", 100, 2, 3, True)
    data = encode_marks([mark], producer_id=1, now_ms=2)
    (message,) = decode_messages(data, check_batch(data))
    assert message.body.hex() == "95a167640203c3"
    assert message.topic == "RMQ_SYS_SENT_BACK_TOPIC"

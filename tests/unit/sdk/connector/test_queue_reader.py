"""What becomes of each answer to a pull when a stretch of a queue is read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mqmesh.batch.record_batch import check_batch, encode_batch, stamp
from mqmesh.errors import ConfigError, CorruptBatch, RemoteProtocolError
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.sdk.connector.queue_reader import SHORT_PAUSE_S, QueueReader, Stretch
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector

QUEUE = MessageQueue("orders", "broker-a", 0)


def batch(first, count, tags=("a",)):
    """A stored batch: messages from a queue offset on."""
    messages = [
        Message("orders", str(first + number).encode(), tags[number % len(tags)])
        for number in range(count)
    ]
    sent = encode_batch(
        messages, topic="orders", queue_id=0, producer_id=7, first_sequence=first, born_timestamp=5
    )
    header = check_batch(sent)
    part = stamp(
        header,
        commitlog_offset=first * 100,
        base_queue_offset=first,
        store_timestamp=6,
        epoch=1,
        store_id=2,
    )
    return part + sent[len(part) :]


class Broker(QueueReader):
    """Answers pulls with what a test prepared; it has no socket."""

    def __init__(self, *answers) -> None:
        super().__init__(transport=SimpleNamespace(pause=self._pause))
        self.answers = list(answers)
        self.pauses_s = []
        self.asked = []

    def _pause(self, duration_s):
        self.pauses_s.append(duration_s)

    def ask(self, broker_name, code, header, parts=()):
        pull = decode_header(PullRequest, memoryview(header))
        self.asked.append((pull.queue_offset, pull.epoch, pull.verify))
        status, next_offset, first, end, body = self.answers.pop(0)
        answer = PullResponse(int(status), next_offset, first, end, 0, 1)
        return Command(int(code), 1, 1, memoryview(encode_header(answer)), memoryview(body))


def found(next_offset, *batches):
    return (PullStatus.FOUND, next_offset, 0, 100, b"".join(batches))


def read(broker, start, end, **options):
    losses = []
    stretch = Stretch(QUEUE, start, end, 1)
    got = [
        int(message.body)
        for _, messages in broker.read(stretch, on_loss=losses.append, **options)
        for message in messages
    ]
    assert not broker.answers
    return got, losses


def test_just_the_stretch_is_read():
    broker = Broker(found(20, batch(0, 10), batch(10, 10)), found(30, batch(20, 10)))
    assert read(broker, 3, 25) == (list(range(3, 25)), [])
    assert broker.asked == [(3, 1, False), (20, 1, False)]


def test_tags_are_compared_again_and_gaps_of_a_filter_are_none():
    only = MessageSelector.by_tag("a")
    broker = Broker(
        (PullStatus.NO_MATCHED_MSG, 10, 0, 100, b""), found(30, batch(15, 6, ("a", "b")))
    )
    assert read(broker, 0, 25, selector=only) == ([15, 17, 19], [])


def test_what_is_missing_is_told():
    broker = Broker(
        (PullStatus.OFFSET_ILLEGAL, 0, 10, 100, b""),
        found(20, batch(10, 5), batch(17, 3)),
        (PullStatus.MESSAGES_LOST, 25, 10, 100, b""),
        found(30, batch(25, 5)),
    )
    got, losses = read(broker, 0, 30)
    assert got == [*range(10, 15), *range(17, 20), *range(25, 30)]
    assert [text.split(": ")[1].split(" are")[0] for text in losses] == [
        "messages 0 to 9",
        "messages 15 to 16",
        "messages 20 to 24",
    ]


def test_messages_that_have_expired_are_not_lost():
    expired = (PullStatus.NO_MATCHED_MSG, 5, 0, 100, b"")
    assert read(Broker(expired, found(10, batch(5, 5))), 0, 10) == ([*range(5, 10)], [])


def test_a_queue_that_ends_too_early_is_asked_again_and_then_believed():
    short = (PullStatus.NO_NEW_MSG, 10, 0, 10, b"")
    broker = Broker(found(10, batch(0, 10)), short, short, found(20, batch(10, 10)))
    assert read(broker, 0, 20) == (list(range(20)), [])
    assert broker.pauses_s == [SHORT_PAUSE_S] * 2
    behind = (PullStatus.OFFSET_ILLEGAL, 10, 0, 5, b"")
    got, losses = read(Broker(short, behind, short), 10, 20)
    assert got == []
    assert "ends at 10; it went to 20" in losses[0]


@pytest.mark.parametrize("next_offset", [8, 3])
def test_messages_that_are_passed_over_bring_the_reader_further_or_are_an_error(next_offset):
    broker = Broker(*[(PullStatus.NO_MATCHED_MSG, next_offset, 0, 30, b"")] * 2)
    with pytest.raises(RemoteProtocolError, match="messages from 8 to"):
        read(broker, 8, 20)
    assert len(broker.asked) == 1


def test_a_cut_ends_the_stretch():
    broker = Broker((PullStatus.OFFSET_CUT, 4, 0, 6, b""))
    got, losses = read(broker, 8, 20)
    assert got == []
    assert "lost messages 4 to 7" in losses[0]


def test_damage_is_asked_for_again_and_nothing_is_skipped():
    good, bad = batch(0, 10), bytearray(batch(10, 10))
    bad[-1] ^= 1
    broker = Broker(found(20, good, bytes(bad)), found(20, batch(10, 10)))
    assert read(broker, 0, 20) == (list(range(20)), [])
    assert broker.asked[1] == (10, 1, True)
    broker = Broker(*[found(20, bytes(bad))] * 5)
    with pytest.raises(CorruptBatch):
        read(broker, 10, 20)


def test_answers_that_are_none_are_refused():
    broker = Broker(found(20, batch(0, 5)))
    with pytest.raises(RemoteProtocolError, match="without offset 10"):
        read(broker, 10, 20)
    broker = Broker((PullStatus.OFFSET_RESET, 4, 0, 6, b""))
    with pytest.raises(ConfigError, match="option group"):
        read(broker, 8, 20)

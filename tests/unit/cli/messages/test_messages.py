"""The pure parts of `mqmesh send` and `mqmesh consume`."""

from __future__ import annotations

import io

import pytest

from mqmesh.cli.messages.send import _lines, _paced, properties_of
from mqmesh.cli.messages.shown_message import parts_of
from mqmesh.cli.render import StyledLines
from mqmesh.errors import ConfigError
from mqmesh.message import BatchInfo, StoredMessage

NOW_MS = 1_767_225_600_000
BATCH = BatchInfo(
    topic="orders",
    queue_id=2,
    broker_name="broker-a",
    base_queue_offset=10,
    commitlog_offset=0,
    store_size=1,
    born_timestamp=NOW_MS,
    store_timestamp=NOW_MS + 1,
    born_host="h:1",
    store_host="h:2",
    producer_id=1,
    first_sequence=0,
    payload_crc=0,
)


def stored(body, **fields):
    return StoredMessage("orders", body, queue_offset=11, batch=BATCH, **fields)


def test_a_message_for_people_has_parts():
    message = stored(b"two\nlines \x1b[2J", tag="new", keys=["1", "2"], properties={"a": "b"})
    assert [text for text, _ in parts_of(message)] == [
        "00:00:00.001",
        "broker-a/2@11",
        "new",
        "1,2",
        "a=b",
        "two\nlines \x1b[2J",
    ]


def test_a_message_for_people_is_one_line(capsys):
    StyledLines().say(parts_of(stored(b"two\nlines \x1b[2J", tag="\x1b")))
    assert capsys.readouterr().out == ("00:00:00.001  broker-a/2@11  \\x1b  two\\nlines \\x1b[2J\n")


def test_a_body_that_is_no_text_is_shown_as_its_beginning():
    shown = parts_of(stored(b"\xff" * 100))[-1][0]
    assert shown == f"<100 bytes> {'ff' * 64}…"


def test_lines_are_bodies_and_empty_ones_are_none():
    assert list(_lines(io.BytesIO(b"a\r\n\n b\nc"))) == [b"a", b" b", b"c"]


def test_properties_are_pairs():
    assert properties_of(("a=b", "c=d=e")) == {"a": "b", "c": "d=e"}
    assert properties_of(()) is None
    with pytest.raises(ConfigError, match="--property 'a': must have the form NAME=VALUE"):
        properties_of(("a",))


class FakeInterrupt:
    """Counts the waits, and comes after some of them."""

    def __init__(self, after=1_000):
        self.waits = []
        self.after = after

    def __bool__(self):
        return len(self.waits) >= self.after

    def wait(self, seconds):
        self.waits.append(seconds)


def test_messages_are_paced():
    interrupt = FakeInterrupt()
    assert list(_paced(iter(range(4)), 0.001, interrupt)) == [0, 1, 2, 3]
    assert [round(seconds / 1_000) for seconds in interrupt.waits] == [0, 1, 2, 3]


def test_without_a_rate_nothing_waits():
    interrupt = FakeInterrupt()
    assert list(_paced(iter(range(4)), None, interrupt)) == [0, 1, 2, 3]
    assert interrupt.waits == []


def test_a_signal_ends_the_sending():
    assert list(_paced(iter(range(4)), 1.0, FakeInterrupt(after=3))) == [0, 1]

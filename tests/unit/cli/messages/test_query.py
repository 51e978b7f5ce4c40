"""How `mqmesh query` shows what it found."""

from __future__ import annotations

import pytest

from mqmesh.cli.messages import query
from mqmesh.cli.messages.query import body_lines, fields_of
from mqmesh.errors import ConfigError
from mqmesh.message import BatchInfo, StoredMessage

INFO = BatchInfo(
    topic="%RETRY%billing",
    queue_id=3,
    broker_name="broker-a",
    base_queue_offset=40,
    commitlog_offset=4096,
    store_size=500,
    born_timestamp=1_600_000_000_000,
    store_timestamp=1_600_000_000_001,
    born_host="vm:1",
    store_host="127.0.0.1:10911",
    producer_id=1,
    first_sequence=2,
    payload_crc=3,
)


def message(**fields) -> StoredMessage:
    fields = {"topic": "orders", "body": b"body", "queue_offset": 42, "batch": INFO, **fields}
    return StoredMessage(**fields)


def test_json_is_indented():
    assert body_lines(b'{"a":[1,"\xc3\xbc"]}') == [
        "{",
        '  "a": [',
        "    1,",
        '    "ü"',
        "  ]",
        "}",
    ]


def test_text_is_shown_as_it_stands():
    assert body_lines("two\nlines of ünicode".encode()) == ["two", "lines of ünicode"]
    assert body_lines(b"{not json") == ["{not json"]
    assert body_lines(b"5") == ["5"]


@pytest.mark.parametrize(
    "body", [b"\x1b[31mred", b"bell\x07", b'{"a": "\\u001b"}', b"\xe2\x80\xa8"]
)
def test_nothing_can_command_the_terminal(body):
    for line in body_lines(body):
        assert not any(ord(character) < 32 or ord(character) == 0x2028 for character in line)


def test_anything_else_is_dumped():
    lines = body_lines(bytes(range(20)) + b"text\xff")
    assert lines[0] == "00000000  " + bytes(range(16)).hex(" ") + "  ................"
    assert lines[1].startswith("00000010  10 11 12 13 74 65 78 74 ff ")
    assert lines[1].endswith("....text.")
    long = body_lines(b"\xff" * 10_000)
    assert len(long) == 257
    assert long[-1] == "… and 5,904 bytes more"


def test_deep_json_is_text():
    assert body_lines(b"[" * 100_000) == ["[" * 100_000]


def test_every_field_is_shown_and_empty_ones_left_out():
    fields = dict(fields_of(message(tag="t", keys=("a", "b"), properties={"p": "v"}, flag=7)))
    assert fields["message id"] == f"{1:016X}{4:016X}"
    assert fields["offset id"] == "127.0.0.1:10911#1000#2"
    assert fields["topic"] == "orders"
    assert fields["stored in topic"] == "%RETRY%billing"
    assert fields["queue"] == "broker-a/3@42"
    assert (fields["tag"], fields["keys"], fields["property p"]) == ("t", "a, b", "v")
    assert fields["flag"] == "7"
    assert "sharding key" not in fields
    assert "delay level" not in fields


def test_times_are_read_and_the_option_is_named_when_they_are_none():
    assert query.time_option("--to", None, 5, 77) == 77
    assert query.time_option("--to", "10s", 20_000, 0) == 10_000
    with pytest.raises(ConfigError, match="--to 'soon'"):
        query.time_option("--to", "soon", 0, 0)

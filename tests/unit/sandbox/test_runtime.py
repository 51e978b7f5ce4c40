"""Filters are loaded and asked, and their authors are told what is wrong."""

from __future__ import annotations

import pytest

from mqmesh.batch.record_batch import decode_messages, encode_batch, read_header
from mqmesh.message import Message
from mqmesh.sandbox.runtime import FilterError, load_filter, match_all


def messages(*bodies: bytes, **fields):
    """Stored messages as a worker sees them."""
    data = encode_batch(
        [Message("flights", body, **fields) for body in bodies],
        topic="flights",
        queue_id=3,
        producer_id=7,
        first_sequence=1,
        born_timestamp=1_000,
    )
    return decode_messages(data, read_header(data), broker_name="broker-a")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def match(m):\n return m.body == b'b'", b"\x00\x01\x00"),
        ("def match(m): return m.queue_offset == 2", b"\x00\x00\x01"),
        ("def match(m): return m.tag == 'UA'", b"\x01\x01\x01"),
        ("def match(m): return m.property('a') == '1' and m.topic == 'flights'", b"\1\1\1"),
        ("def match(m): return m.queue_id == 3 and m.broker_name == 'broker-a'", b"\1\1\1"),
        ("import re\nmatch = lambda m: re.match(b'[ac]', m.body) is not None", b"\1\0\1"),
        ("import json, math, datetime\ndef match(m): return math.pi > 3", b"\1\1\1"),
        ("class F:\n def __call__(self, m):\n  return False\nmatch = F()", b"\0\0\0"),
        ("n = 0\ndef match(m):\n global n\n n += 1\n return n % 2 == 1", b"\1\0\1"),
    ],
)
def test_a_filter_answers(source, expected):
    given = messages(b"a", b"b", b"c", tag="UA", properties={"a": "1"})
    assert match_all(load_filter(source), given) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def match(m)\n return True", ["SyntaxError", "line 1"]),
        ("x = 1", ["no function match"]),
        ("match = 3", ["no function match"]),
        ("\n\n1 / 0", ["ZeroDivisionError", "line 3"]),
        ("import os\ndef match(m): return True", ["may import", "not os", "line 1"]),
        ("open('/etc/passwd')", ["NameError", "open"]),
        ("raise SystemExit(3)", ["SystemExit: 3"]),
        ("x = '\x00'", ["null bytes"]),
    ],
)
def test_a_filter_that_cannot_be_loaded_says_why(source, words):
    with pytest.raises(FilterError) as caught:
        load_filter(source)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def match(m): pass", ["NoneType", "True or False", "offset 0"]),
        ("def match(m): return 1", ["int, not True or False"]),
        ("def match(m):\n return {}['x']", ["KeyError: 'x'", "line 2", "queue 3"]),
        ("def match(m, n): return True", ["TypeError"]),
        ("def f(): return f()\ndef match(m): return f()", ["RecursionError"]),
        (
            "class E(Exception):\n def __str__(s): return 3\ndef match(m): raise E",
            ["E: (it cannot"],
        ),
        ("def match(m): raise KeyboardInterrupt", ["KeyboardInterrupt"]),
        ("def match(m): raise ValueError('x' * 10**6)", ["ValueError: xxx"]),
    ],
)
def test_a_filter_that_fails_says_where(source, words):
    with pytest.raises(FilterError) as caught:
        match_all(load_filter(source), messages(b"a", b"b"))
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 600

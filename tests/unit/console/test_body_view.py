"""Views of bodies: whatever bytes come, text comes out."""

from __future__ import annotations

import random

import msgspec
import pytest

from mqmesh.console.body_view import (
    MAX_CHARACTERS,
    MAX_SHOWN_BYTES,
    hex_dump,
    preview,
    view_body,
)


@pytest.mark.parametrize(
    ("body", "kinds", "text"),
    [
        (b"hello", ("text", "bytes"), "hello"),
        (b'{"a": [1]}', ("json", "text", "bytes"), '{\n  "a": [\n    1\n  ]\n}'),
        (b'["\\ud800"]', ("json", "text", "bytes"), '[\n  "\\ud800"\n]'),
        (b'{"a": ', ("text", "bytes"), '{"a": '),
        (b"", ("text", "bytes"), ""),
        ("grün".encode(), ("text", "bytes"), "grün"),
        (b"<b>hi</b><script>", ("text", "bytes"), "<b>hi</b><script>"),
        (b"\x00\x01z", ("bytes",), hex_dump(b"\x00\x01z")),
    ],
)
def test_a_body_is_read_as_what_it_is(body, kinds, text):
    view = view_body(body)
    assert (view.kind, view.kinds, view.text) == (kinds[0], kinds, text)
    assert (view.size, view.cut) == (len(body), False)


def test_msgpack_is_read_with_its_bytes():
    view = view_body(msgspec.msgpack.encode({"id": 7, "raw": b"\xff\x00"}))
    assert view.kind == "msgpack"
    assert '"raw": "<2 bytes: ff 00>"' in view.text


def test_another_kind_is_shown_if_it_is_one_of_the_body():
    assert view_body(b"hello", "bytes").kind == "bytes"
    assert view_body(b"hello", "msgpack").kind == "text"


def test_a_large_body_is_cut_between_characters():
    body = ("é" * 600_000).encode()
    view = view_body(b"x" + body)
    assert view.cut
    assert view.kind == "text"
    assert view.size == len(body) + 1
    assert len(view.text.encode()) <= MAX_SHOWN_BYTES


def test_bytes_are_lines_of_sixteen():
    assert hex_dump(b"0123456789abcdefg") == (
        "00000000  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66  0123456789abcdef\n"
        "00000010  67                                               g"
    )


def test_deep_documents_are_text():
    assert view_body(b"[" * 10_000 + b"]" * 10_000).kinds == ("text", "bytes")


def test_any_bytes_have_a_view():
    chance = random.Random(7)
    for _ in range(3_000):
        body = chance.randbytes(chance.randrange(60))
        if chance.random() < 0.3:
            body = chance.choice([b"{", b"[", b'"', b"\x82", b"\x93"]) + body
        view = view_body(body)
        assert view.size == len(body)
        assert len(view.text) <= MAX_CHARACTERS
        view.text.encode("utf-8")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"a\n\tb  c", "a b c"),
        (b"\x00\x01z", "00 01 7a"),
        (b"", ""),
        (b"x" * 199 + "é".encode(), "x" * 199),
        (b"<b>" * 1_000, "<b>" * 66 + "<b"),
    ],
)
def test_a_preview_is_one_line_of_the_beginning(body, line):
    assert preview(body) == line

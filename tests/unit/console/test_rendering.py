"""Texts of others are shown as texts, and numbers as people read them."""

from __future__ import annotations

import random
import unicodedata

import pytest
from harness.console import ConsoleWorld, open_console
from markupsafe import Markup

from mqmesh.console.json_answers import encode_json
from mqmesh.console.queries.topics import TopicsArguments
from mqmesh.console.rendering import (
    again_link,
    byte_size,
    environment,
    link,
    moment,
    number,
    segment,
    span,
    visible,
)
from mqmesh.protocol.route import TopicConfig

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a\x00b\x1b[31mc\x7f",
    "\u202eevil\u2066.\u200b",
    "{{ 7 * 7 }}",
    "x" * 1_000_000,
    "\ud800 half",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda one: repr(one[:12]))
def test_hostile_texts_are_texts(text):
    shown = environment().from_string("<p title='{{ text }}'>{{ text }}</p>").render(text=text)
    shown.encode()  # it can be sent
    inner = shown[len("<p title='") : -len("</p>")]
    assert "<script" not in inner
    assert "<img" not in inner
    assert "49" not in inner
    assert not set(inner) & set("\x00\x1b\x7f\u202e\u2066\u200b")


def test_a_topic_of_any_name_is_a_row_of_text():
    name = "<b>x</b>\u202e"
    world = ConsoleWorld({"topic_configs": {"broker-a": [TopicConfig(name)]}})
    page = open_console(world).get("/topics").text
    assert "&lt;b&gt;x&lt;/b&gt;⟨U+202E⟩" in page
    assert "<b>x" not in page
    assert f'href="/topics/{segment(name)}"' in page


def test_characters_that_do_something_are_pictures():
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("\x00\x1f\x7f") == "␀␟␡"
    assert visible("שלום grün") == "שלום grün"
    chance = random.Random(3)
    for _ in range(2_000):
        text = "".join(chr(chance.randrange(0x30000)) for _ in range(8))
        kinds = {unicodedata.category(one) for one in visible(text) if one not in "\n\t"}
        assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.04, "0"), (3.25, "3.2"), (12_345.6, "12,346"), (1_000_000, "1,000,000")],
)
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (61_000, "1 min 1 s"),
        (7_200_000, "2 h"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_durations(value_ms, text):
    assert span(value_ms) == text


def test_sizes_and_what_is_not_known():
    assert (byte_size(1_023), byte_size(1_536), byte_size(3 << 30)) == (
        "1,023 B",
        "1.5 KiB",
        "3.0 GiB",
    )
    assert (number(None), span(None), moment(0)) == ("–", "–", Markup("–"))


def test_moments_are_elements_that_browsers_localize():
    assert moment(1_700_000_000_000) == (
        '<time datetime="2023-11-14T22:13:20Z" title="2023-11-14 22:13:20 UTC">'
        "2023-11-14 22:13:20</time>"
    )
    assert moment(1 << 62) == f"{1 << 62} ms"


def test_links_keep_what_does_not_change():
    asked = TopicsArguments(kind="retry", sort="-queues", search="a b", page=3)
    path, _, query = again_link("/topics", asked, (), page=None).partition("?")
    assert path == "/topics"
    assert set(query.split("&")) == {"kind=retry", "sort=-queues", "search=a+b"}
    assert link("/x", a="", b=1, c=None) == "/x?b=1"


def test_json_keeps_large_numbers_exact():
    assert encode_json({"a": 1 << 53, "b": [(1 << 53) - 1, -(1 << 60), True]}) == (
        b'{"a":"9007199254740992","b":[9007199254740991,"-1152921504606846976",true]}'
    )

"""Keys that are indexed as they are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import CorruptRecord
from mqmesh.storage.index.entries import key_entries
from mqmesh.storage.index.texts import KeyText, TextMaker, text_key

TOPICS = ["t", "u"]
KEYS = st.one_of(st.text(min_size=1, max_size=3), st.text(min_size=1, max_size=255))
BATCHES = st.lists(
    st.tuples(st.sampled_from(TOPICS), st.lists(st.lists(KEYS, max_size=3), min_size=1)),
    min_size=1,
    max_size=12,
)


def text_of(batches) -> KeyText:
    maker = TextMaker()
    for place, (topic, keys) in enumerate(batches):
        raw = b"".join(map(msgspec.msgpack.encode, keys))
        maker.add(topic, raw, len(keys), place * 100)
    key, value = maker.encode(9)
    assert key == text_key(9)
    return KeyText(9, value)


def test_texts_on_disk_never_change():
    maker = TextMaker()
    maker.add("orders", b"\x91\xa1a\x92\xa1b\xa1c", 2, 40)
    maker.add("flights", b"\x91\xa1a", 1, 140)
    key, value = maker.encode(3)
    assert key.hex() == "0000000000000003"
    assert value.hex() == (
        "c464d5409392a66f7264657273a7666c696768747392942800080294cc8c010b01c40b91a16192a162a16391a161"
    )


@given(BATCHES, KEYS)
def test_a_text_finds_what_is_in_it_and_nothing_else(batches, stranger):
    text = text_of(batches)
    asked = {stranger, *(key for _, keys in batches for some in keys for key in some)}
    for topic in TOPICS:
        for key in asked:
            expected = [
                place * 100
                for place, (other, keys) in enumerate(batches)
                if other == topic and any(key in some for some in keys)
            ]
            assert text.places(topic, key, below=10_000) == expected[::-1]
            assert text.places(topic, key, below=300) == [p for p in expected[::-1] if p < 300]


@given(BATCHES)
def test_a_text_has_the_entries_of_its_batches(batches):
    expected = [
        entry
        for place, (topic, keys) in enumerate(batches)
        for entry in key_entries(topic, {key for some in keys for key in some}, place * 100)
    ]
    assert sorted(text_of(batches).entries()) == sorted(expected)


@pytest.mark.parametrize("size", [1, 31, 32, 200, 255])
@pytest.mark.parametrize("form", ["short", "8", "16", "32"])
def test_a_key_is_found_in_every_form_of_its_length(size, form):
    key = "k" * size
    lengths = {
        "short": bytes([0xA0 | size]) if size < 32 else b"\xd9" + bytes([size]),
        "8": b"\xd9" + bytes([size]),
        "16": b"\xda" + size.to_bytes(2, "big"),
        "32": b"\xdb" + size.to_bytes(4, "big"),
    }
    maker = TextMaker()
    maker.add("t", b"\x92\xa1x" + lengths[form] + key.encode(), 1, 5)
    assert KeyText(1, maker.encode(1)[1]).places("t", key, below=10) == [5]


@pytest.mark.parametrize("form", [b"\xda", b"\xdb\0\0"])
def test_a_key_of_many_bytes_is_found_in_every_form_of_its_length(form):
    key = "ü" * 200
    maker = TextMaker()
    maker.add("t", b"\x91" + form + (400).to_bytes(2, "big") + key.encode(), 1, 5)
    assert KeyText(1, maker.encode(1)[1]).places("t", key, below=10) == [5]


def test_a_key_inside_of_another_one_is_none():
    assert text_of([("t", [["x\xa1a"], ["b\x01a"]])]).places("t", "a", below=10) == []


def test_a_batch_whose_keys_are_none_hides_no_other():
    maker = TextMaker()
    maker.add("t", b"\x91\xa1a", 1, 10)
    maker.add("t", b"\xc1\xa1a", 1, 20)
    maker.add("t", b"\x91\xa1a", 1, 30)
    text = KeyText(1, maker.encode(1)[1])
    assert text.places("t", "a", below=100) == [30, 10]
    assert text.entries() == key_entries("t", ["a"], 10) + key_entries("t", ["a"], 30)


def test_damage_is_noticed():
    maker = TextMaker()
    maker.add("t", b"\x91\xa1a", 1, 10)
    _, value = maker.encode(1)
    for position in range(len(value)):
        changed = bytearray(value)
        changed[position] ^= 4
        with pytest.raises(CorruptRecord):
            KeyText(1, bytes(changed))
    with pytest.raises(CorruptRecord):
        KeyText(2, value)
    with pytest.raises(CorruptRecord):
        KeyText(1, None)

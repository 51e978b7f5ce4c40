"""Runs and blocks: what is looked for is found, and damage never goes unnoticed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import CorruptRecord
from mqmesh.storage.index.blocks import (
    BEYOND,
    BLOCK_ENTRIES,
    LOWEST,
    RunReader,
    block_entries,
    block_high,
    encode_run,
)
from mqmesh.storage.index.entries import id_hash
from mqmesh.storage.lmdb.env import LmdbEnv

# Few different hashes, so that equal ones fill blocks; the ends of the range included.
HASHES = st.sampled_from([bytes(16), b"\xff" * 16, *(bytes([n]) * 16 for n in (1, 2, 127, 128))])
ENTRIES = st.lists(
    st.tuples(HASHES, st.integers(0, 2**32 - 41)), min_size=1, max_size=900, unique=True
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[LmdbEnv]:
    env = LmdbEnv(tmp_path / "env", map_size=1 << 20)
    yield env
    env.close()


def entry(hash_: bytes, place: int) -> bytes:
    return hash_ + place.to_bytes(4, "big")


def test_blocks_on_disk_never_change():
    entries = sorted(entry(id_hash(1, number, 0), number) for number in range(203))
    pairs = encode_run(7, entries)
    content = b"".join(key + value for key, value in pairs)
    assert hashlib.sha256(content).hexdigest() == (
        "20ed486eca314322b6bb0917c1eed7dee22c49459f07f33f27c9c74b0f6f784b"
    )
    assert [len(value) for _, value in pairs] == [24 + BLOCK_ENTRIES * 20, 24 + 20]


def test_a_full_block_fills_a_page():
    (pair,) = encode_run(1, [entry(bytes(16), n) for n in range(BLOCK_ENTRIES)])
    assert len(pair[1]) <= 4096 - 16 < len(pair[1]) + 20


def test_blocks_tile_all_there_is():
    entries = sorted(entry(id_hash(1, number, 0), number) for number in range(1000))
    pairs = encode_run(3, entries)
    lows = [key[4:] for key, _ in pairs]
    assert lows[0] == LOWEST
    assert [block_high(value) for _, value in pairs] == [*lows[1:], BEYOND]
    assert b"".join(map(block_entries, pairs)) == b"".join(entries)


@given(found=ENTRIES, wanted=HASHES, below=st.integers(1, 2**32 - 1), most=st.integers(1, 300))
def test_a_run_finds_the_last_places_of_a_hash(tmp_path_factory, found, wanted, below, most):
    env = LmdbEnv(tmp_path_factory.mktemp("env"), map_size=1 << 20)
    entries = sorted(itertools.starmap(entry, found))
    env.write([*encode_run(1, entries), *encode_run(2, [entry(wanted, 7)])])
    expected = sorted((p for h, p in found if h == wanted and p < below), reverse=True)
    places = RunReader(env).places(1, wanted, below=below, most=most)
    assert places == expected[:most]
    env.close()


@given(found=ENTRIES, low=st.binary(min_size=20, max_size=20))
def test_a_stretch_of_a_run_has_what_lies_between(tmp_path_factory, found, low):
    env = LmdbEnv(tmp_path_factory.mktemp("env"), map_size=1 << 20)
    entries = sorted(itertools.starmap(entry, found))
    env.write(encode_run(1, entries))
    reader = RunReader(env)
    assert reader.entries(1, LOWEST, BEYOND) == entries
    assert reader.entries(1, LOWEST, low) == [one for one in entries if one < low]
    assert reader.entries(1, low, BEYOND) == [one for one in entries if one >= low]
    env.close()


def test_entries_that_only_look_like_the_hash_are_none(env):
    # The end of one entry and the beginning of the next spell what is looked for.
    first, second = entry(bytes(8) + b"\1" * 8, 0x01010101), entry(b"\1" * 4 + bytes(12), 0)
    env.write(encode_run(1, [first, second]))
    assert RunReader(env).places(1, b"\1" * 16, below=2**32 - 1, most=10) == []


@pytest.mark.parametrize("position", [0, 3, 4, 23, 24, 40, -1])
def test_a_changed_block_is_noticed(env, position):
    pairs = encode_run(1, [entry(id_hash(1, n, 0), n) for n in range(5)])
    ((key, value),) = pairs
    changed = bytearray(value)
    changed[position] ^= 1
    env.write([(key, bytes(changed))])
    with pytest.raises(CorruptRecord):
        RunReader(env).places(1, id_hash(1, 3, 0), below=2**32 - 1, most=10)


def test_a_missing_or_misplaced_block_is_noticed_also_by_who_finds_nothing(env):
    entries = sorted(entry(id_hash(1, number, 0), number) for number in range(1000))
    pairs = encode_run(1, entries)
    env.write([*pairs[:2], *pairs[3:]])
    reader = RunReader(env)
    gone = pairs[2][0][4:20]
    with pytest.raises(CorruptRecord):
        reader.places(1, gone[:15] + b"\xff", below=2**32 - 1, most=1)
    with pytest.raises(CorruptRecord):
        reader.places(2, gone, below=2**32 - 1, most=1)
    env.write([(pairs[2][0], pairs[3][1])])
    with pytest.raises(CorruptRecord):
        reader.places(1, gone, below=2**32 - 1, most=1)
    with pytest.raises(CorruptRecord):
        reader.entries(1, LOWEST, BEYOND)


def test_an_empty_stretch_is_one_empty_block(env):
    env.write(encode_run(1, [], low=LOWEST, high=BEYOND))
    reader = RunReader(env)
    assert reader.entries(1, LOWEST, BEYOND) == []
    assert reader.places(1, bytes(16), below=5, most=5) == []

"""The index of one segment: head, runs, texts, times."""

from __future__ import annotations

import random

import msgspec
import pytest
from harness.index_parts import next_slice

from mqmesh.errors import CorruptRecord
from mqmesh.storage.index import part as message_index_part
from mqmesh.storage.index.entries import id_entries, id_hash, key_entries, key_hash
from mqmesh.storage.index.merge import MERGED_AT_ONCE, TIER_BITS, merge_runs, runs_to_merge
from mqmesh.storage.index.part import (
    SPAN_BYTES,
    Deletion,
    IndexPart,
    PartHead,
    SortedRun,
    TimeSpan,
    decode_head,
    encode_head,
)
from mqmesh.storage.index.seal import check_seal, load_seal, seal_part
from mqmesh.storage.index.texts import TextMaker


def add_keys(part: IndexPart, *keys: str, size: int = 100, **fields) -> int:
    """Append a batch with keys; return its place."""
    place = part.head.through
    part.append(next_slice(part, size, entries=key_entries("t", keys, place), **fields))
    return place


def add_text(part: IndexPart, *keys: str) -> int:
    place = part.head.through
    texts = TextMaker()
    texts.add("t", msgspec.msgpack.encode(keys), 1, place)
    part.append(next_slice(part, texts=texts))
    return place


def found(part: IndexPart, key: str, below: int = 2**32 - 1, most: int = 1000) -> list[int]:
    return part.key_places("t", key, below=below, most=most)[0]


def test_heads_on_disk_never_change():
    head = PartHead(
        store_id=5,
        boot_id=b"b" * 16,
        segment_start=1024,
        through=200,
        epoch=2,
        last_place=140,
        last_mark=b"MQB1abcd",
        widths=3,
        next_run=2,
        runs=[SortedRun(1, 4, 0, 200, 3)],
        spans=[TimeSpan(200, 10, 20)],
        deletions=[Deletion(1100, "orders")],
        batches=2,
    )
    value = encode_head(head)
    assert value.hex() == (
        "3486eef3dc00110205c41062626262626262626262626262626262cd0400ccc8c202cc8cc4084d5142"
        "316162636403029195010400ccc80300909193ccc80a149192cd044ca66f726465727302"
    )
    assert decode_head(value) == head


def test_a_damaged_or_unknown_head_is_refused():
    value = encode_head(PartHead(store_id=1, boot_id=b"", segment_start=0))
    for position in range(len(value)):
        changed = bytearray(value)
        changed[position] ^= 1
        with pytest.raises(CorruptRecord):
            decode_head(bytes(changed))
    newer = encode_head(PartHead(version=3, store_id=1, boot_id=b"", segment_start=0))
    for bad in (None, b"", b"1234", newer):
        with pytest.raises(CorruptRecord):
            decode_head(bad)


def test_head_and_entries_come_together(part, tmp_path):
    place = add_keys(part, "a", "b", epoch=3, last_mark=b"12345678", widths=4, batches=1)
    part.close()
    again = IndexPart.open(tmp_path / "part", map_size=1 << 20)
    assert again.head == part.head
    assert again.head.through == 100
    assert (again.head.last_place, again.head.last_mark) == (0, b"12345678")
    assert found(again, "a") == [place]
    again.close()


def test_a_slice_without_a_batch_moves_the_head_only(part):
    part.append(next_slice(part, oldest_ms=2**63 - 1, newest_ms=-1))
    assert part.head.through == 100
    assert part.head.runs == []
    assert part.windows(0, 2**62) == []


def at_rest(part: IndexPart) -> None:
    while runs := runs_to_merge(part.head.runs):
        for _ in merge_runs(part, runs):
            pass


def test_runs_stay_few_whatever_their_sizes(part):
    expected = []
    for number in range(300):
        expected += [add_keys(part, "common") for _ in range(5)]
        expected.append(add_keys(part, "common", *(f"{number}-{n}" for n in range(number % 40))))
        if number % 3 == 0:
            expected.append(add_text(part, "common"))
            part.tidy()
        at_rest(part)
        tiers = (sum(run.count for run in part.head.runs).bit_length() - 1) // TIER_BITS + 1
        assert len(part.head.runs) < MERGED_AT_ONCE * tiers
    assert found(part, "common", most=3_000) == expected[::-1]


def test_texts_and_runs_are_searched_together_last_first(part):
    expected = [
        add_keys(part, "a"),
        add_text(part, "a"),
        add_text(part, "a"),
        add_keys(part, "a"),
        add_text(part, "b"),
    ]
    places = expected[3::-1]
    assert found(part, "a") == places
    assert found(part, "a", below=300) == places[1:]
    assert part.key_places("t", "a", below=1000, most=2) == (places[:2], places[1])
    runs = len(part.head.runs)
    assert not part.tidy()
    assert not part.tidy()
    assert part.head.texts == []
    assert len(part.head.runs) == runs + 1
    assert found(part, "a") == places
    assert found(part, "b") == [expected[4]]


def test_texts_become_runs_of_a_bounded_size(part, monkeypatch):
    monkeypatch.setattr(message_index_part, "MOST_TIDIED_ENTRIES", 2)
    places = [add_text(part, "a") for _ in range(5)]
    assert part.tidy()
    assert part.tidy()
    assert not part.tidy()
    assert [run.count for run in part.head.runs] == [2, 2, 1]
    assert [(run.start, run.stop) for run in part.head.runs] == [(0, 200), (200, 400), (400, 500)]
    assert found(part, "a") == places[::-1]


@pytest.mark.parametrize("seed", range(5))
def test_places_are_right_whatever_was_added_merged_and_tidied(part, seed):
    chance = random.Random(seed)
    expected: dict[str, list[int]] = {}
    for _ in range(250):
        keys = {f"k{chance.randrange(9)}" for _ in range(chance.randrange(1, 4))}
        add = chance.choice([add_keys, add_keys, add_text])
        place = add(part, *keys)
        for key in keys:
            expected.setdefault(key, []).insert(0, place)
        if chance.random() < 0.1:
            part.tidy()
            at_rest(part)
    for key, places in expected.items():
        below, most = chance.randrange(part.head.through), chance.randrange(1, 20)
        assert found(part, key) == places
        assert found(part, key, below, most) == [p for p in places if p < below][:most]


def test_ids_of_all_widths_are_found(part):
    from mqmesh.batch.record_batch import check_batch
    from mqmesh.testing.store_contract import make_batch

    header = check_batch(make_batch().data)
    places = {}
    for count in (1, 2, 3, 64, 65, 5000, 65_536):
        first = 7 + count * 100_000
        one = msgspec.structs.replace(header, first_sequence=first, message_count=count)
        place = part.head.through
        width = (count - 1).bit_length()
        part.append(next_slice(part, entries=id_entries(one, place), widths=1 << width))
        places[first, count] = place
    for (first, count), place in places.items():
        for sequence in (first, first + count // 2, first + count - 1):
            candidates, floor = part.id_places(1, sequence, below=2**32 - 1, most=64)
            assert place in candidates
            assert floor == 0


def test_times_narrow_down_where_to_look(part):
    for number in range(4):
        add_keys(part, "a", size=SPAN_BYTES, oldest_ms=number * 10, newest_ms=number * 10 + 5)
    assert [span.stop for span in part.head.spans] == [SPAN_BYTES * n for n in (1, 2, 3, 4)]
    assert part.windows(0, 100) == [(0, 4 * SPAN_BYTES)]
    assert part.windows(15, 20) == [(SPAN_BYTES, 3 * SPAN_BYTES)]
    assert part.windows(5, 5) == [(0, SPAN_BYTES)]
    assert part.windows(6, 9) == part.windows(36, 50) == []
    both = part.windows(0, 5) + part.windows(30, 30)
    assert part.windows(30, 30) == [(3 * SPAN_BYTES, 4 * SPAN_BYTES)]
    assert both[0] == (0, SPAN_BYTES)


def test_short_stretches_share_a_span(part):
    for number in range(50):
        add_keys(part, "a", size=SPAN_BYTES // 10, oldest_ms=number, newest_ms=number)
    assert len(part.head.spans) == 5
    assert part.head.spans[0] == TimeSpan(SPAN_BYTES // 10 * 10, 0, 9)


def test_a_sealed_part_has_one_run_of_everything(part, tmp_path):
    keys = [f"k{n}" for n in range(3000)]
    for start in range(0, 3000, 10):
        add_keys(part, *keys[start : start + 10], "hot")
    add_keys(part, complete=True)
    steps = sum(1 for _ in seal_part(part, tmp_path / "new", map_size=64 * 1024))
    assert steps >= 3
    sealed = IndexPart.open(tmp_path / "new", map_size=1 << 20)
    assert [run.count for run in sealed.head.runs] == [3300]
    assert sealed.head.boot_id == b""
    assert found(sealed, "hot") == found(part, "hot")
    assert all(found(sealed, key) == found(part, key) for key in keys[::37])
    assert sealed.head.spans == part.head.spans
    sealed.close()
    list(check_seal(tmp_path / "new"))
    with open(tmp_path / "new" / "data.mdb", "r+b") as file:
        file.seek(10_000)
        file.write(b"x")
    with pytest.raises(CorruptRecord):
        list(check_seal(tmp_path / "new"))


def test_an_empty_part_can_be_sealed(part, tmp_path):
    part.append(next_slice(part, complete=True, oldest_ms=2**63 - 1, newest_ms=-1))
    list(seal_part(part, tmp_path / "new", map_size=64 * 1024))
    sealed = IndexPart.open(tmp_path / "new", map_size=1 << 20)
    assert found(sealed, "a") == []
    sealed.close()


def test_sealing_notices_damage(part, tmp_path):
    for number in range(500):
        add_keys(part, f"k{number}")
    add_keys(part, complete=True)
    run = part.head.runs[0]
    (pair, *_) = part.env.range(run.number.to_bytes(4, "big"), b"\xff", most=1)
    part.env.write([], [pair[0]])
    with pytest.raises(CorruptRecord):
        list(seal_part(part, tmp_path / "new", map_size=64 * 1024))


def test_a_seal_that_is_gone_or_garbled_is_none(tmp_path):
    with pytest.raises(CorruptRecord):
        load_seal(tmp_path)
    (tmp_path / "seal").write_bytes(b"not a document")
    with pytest.raises(CorruptRecord):
        load_seal(tmp_path)


def test_hashes_of_ids_and_keys_are_told_apart():
    assert key_hash("t", "a") != id_hash(1, 1, 0)

"""Whatever happens to the index or to the log below it, the index ends up equal to a scan."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.indexed_store import IndexedStore
from harness.store_files import SEGMENT_BYTES

from mqmesh.message import Message
from mqmesh.storage.index.blocks import BEYOND, LOWEST, encode_run
from mqmesh.storage.index.search import KeyQuery
from mqmesh.testing.store_contract import NOW

COPIES = 24
"""Damaged copies that one process looks at."""


@pytest.fixture
def indexed(tmp_path: Path) -> Iterator[IndexedStore]:
    """A store with an index: three full segments and a bit, all indexed and sealed."""
    indexed = IndexedStore(tmp_path / "store")
    fill(indexed, 3 * SEGMENT_BYTES)
    indexed.catch_up()
    yield indexed
    indexed.close()


def fill(indexed: IndexedStore, to_bytes: int) -> None:
    number = indexed.sequence
    while indexed.store.stats().max_commitlog_offset < to_bytes:
        number += 1
        some = [
            Message("topic", bytes(400), keys=(f"k{number}", f"common{number % 5}"))
            for _ in range(number % 4 + 1)
        ]
        indexed.put(some, stored_ms=NOW + number)


def image(indexed: IndexedStore, name: str) -> Path:
    """What is there after the death of the process, log and index."""
    target = indexed.files.directory.with_name(name)
    shutil.copytree(indexed.files.directory, target)
    return target


def reopened(directory: Path) -> IndexedStore:
    return IndexedStore(directory)


def check_image(directory: Path) -> None:
    copy = reopened(directory)
    try:
        copy.catch_up()
        copy.check()
    finally:
        copy.close()


def check_in_other_process(directories: list[Path]) -> int:
    """Check damaged copies as a broker would: a process that dies by a signal is started again.

    Returns how often that was needed.
    """
    deaths = 0
    left = [str(directory) for directory in directories]
    suspect: list[str] = []
    while left:
        command = [sys.executable, "-m", "harness.index_check", *suspect, *left]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        finished = done.stdout.splitlines()
        left = [name for name in left if name not in finished]
        if done.returncode == 0:
            assert not left
        else:
            # Only a signal is an excuse, and only once.
            assert done.returncode < 0, done.stderr
            assert not suspect or finished, done.stderr
            deaths += 1
            first, *others = left
            command = [sys.executable, "-m", "harness.index_check", "--suspect", first]
            again = subprocess.run(command, capture_output=True, text=True, check=False)
            assert again.returncode == 0, again.stderr
            left = others
    return deaths


def test_killed_at_any_step_it_goes_on(tmp_path):
    indexed = IndexedStore(tmp_path / "store", step_bytes=16 * 1024)
    fill(indexed, 2 * SEGMENT_BYTES + 10_000)
    indexed.tell()
    step = 0
    while indexed.step():
        check_image(image(indexed, f"killed-{step}"))
        step += 1
    assert step > 10
    indexed.close()


def test_killed_between_the_pages_and_the_head_of_a_commit_it_has_the_state_before(tmp_path):
    indexed = IndexedStore(tmp_path / "store")
    fill(indexed, 20_000)
    indexed.catch_up()
    (file,) = indexed.data_files()
    before = file.read_bytes()[: 2 * 4096]
    position = indexed.dispatcher.position
    fill(indexed, 30_000)
    indexed.tell()
    indexed.dispatcher.step(0)
    assert indexed.dispatcher.position > position
    directory = image(indexed, "killed")
    with open(directory / "index" / file.parent.name / file.name, "r+b") as copy:
        copy.write(before)
    check_image(directory)
    indexed.close()


def test_killed_around_the_renaming_of_a_sealed_part_it_keeps_one_of_both(tmp_path):
    indexed = IndexedStore(tmp_path / "store")
    fill(indexed, SEGMENT_BYTES + 1000)
    indexed.tell()
    while indexed.dispatcher.missing_bytes:
        indexed.step()
    live = image(indexed, "live")
    indexed.catch_up()
    assert indexed.index.is_sealed(0)
    both = image(indexed, "both")
    name = f"{0:020d}"
    shutil.copytree(live / "index" / f"{name}.live", both / "index" / f"{name}.live")
    check_image(both)
    half = live / "index" / f"{name}.new"
    shutil.copytree(both / "index" / f"{name}.sealed", half)
    (half / "seal").unlink()
    check_image(live)
    indexed.close()


def test_an_older_copy_of_the_index_catches_up(indexed, tmp_path):
    indexed.close_index()
    old = indexed.copy_index("old")
    indexed.open_index()
    fill(indexed, 5 * SEGMENT_BYTES)
    indexed.store.delete_topic("topic")
    fill(indexed, 5 * SEGMENT_BYTES + 5_000)
    indexed.catch_up()
    indexed.close_index()
    indexed.restore_index(old)
    indexed.open_index()
    indexed.catch_up()
    assert indexed.index.discarded == 0
    indexed.check()


@pytest.mark.parametrize("further", [0, 3_000, 2 * SEGMENT_BYTES])
def test_an_index_ahead_of_its_log_lets_go_of_what_the_log_lost(indexed, further):
    old = image(indexed, "old-log")
    fill(indexed, 5 * SEGMENT_BYTES)
    indexed.catch_up()
    indexed.close_index()
    ahead = indexed.copy_index("ahead")
    indexed.open_index()

    shutil.rmtree(old / "index")
    shutil.copytree(ahead, old / "index")
    lost = IndexedStore(old)
    # Other messages now stand where the lost ones stood.
    lost.sequence = 1_000_000
    fill(lost, lost.store.stats().max_commitlog_offset + further)
    lost.catch_up()
    assert lost.index.discarded > 0
    lost.check()
    lost.close()


def batch_ends(indexed: IndexedStore) -> list[int]:
    """Where the log may be cut, from its beginning on."""
    return sorted({int(message.commitlog_offset) for message in indexed.scan()})


def test_a_cut_behind_what_was_read_is_followed(indexed, caplog):
    through = indexed.dispatcher.position
    fill(indexed, through + 2 * SEGMENT_BYTES)
    indexed.tell()  # it may read that, and has not yet
    indexed.store.truncate(through)
    fill(indexed, through + SEGMENT_BYTES)
    indexed.catch_up()
    indexed.check()
    assert "where the index had read it" not in caplog.text
    assert indexed.dispatcher.stats().discarded == 0


@pytest.mark.parametrize(
    ("back", "grows_by"),
    [
        (1, -SEGMENT_BYTES),
        (1, 0),
        (SEGMENT_BYTES // 2, -SEGMENT_BYTES),
        (SEGMENT_BYTES // 2, 100),
        (SEGMENT_BYTES, 3 * SEGMENT_BYTES),
    ],
)
def test_a_cut_of_what_was_read_is_told_and_mended(indexed, caplog, back, grows_by):
    through = indexed.dispatcher.position
    end = next(end for end in reversed(batch_ends(indexed)) if end <= through - back)
    indexed.store.truncate(end)
    indexed.sequence += 1_000
    fill(indexed, through + grows_by)
    indexed.catch_up()
    indexed.check()
    assert "was cut where the index had read it" in caplog.text


def test_a_segment_that_retention_takes_is_no_cut(indexed, caplog):
    indexed.tell()
    number = len(indexed.dispatcher.segments)
    assert number > 3
    for path in sorted((indexed.files.directory / "commitlog").iterdir())[:number]:
        if int(path.name) < indexed.dispatcher.position:
            path.unlink()
    indexed.dispatcher.advance(indexed.dispatcher.position + 1, 0, indexed.now_ms)
    assert "where the index had read it" not in caplog.text


def test_topics_that_were_deleted_in_what_is_cut_are_there_again(indexed):
    end = batch_ends(indexed)[-1]
    indexed.store.delete_topic("topic")
    indexed.catch_up()
    assert indexed.by_key("k1") == []
    indexed.store.truncate(end)
    indexed.catch_up()
    indexed.check()
    assert indexed.by_key("k1")


def test_after_a_restart_of_the_system_only_what_was_synced_is_believed(indexed):
    fill(indexed, 3 * SEGMENT_BYTES + 30_000)
    indexed.catch_up()
    indexed.close_index()
    indexed.boot_id = b"another boot id!"
    indexed.open_index()
    indexed.catch_up()
    assert indexed.index.discarded == 1
    indexed.check()


def test_the_index_of_another_store_is_not_believed(indexed, tmp_path):
    other = IndexedStore(tmp_path / "other")
    fill(other, 2 * SEGMENT_BYTES)
    other.catch_up()
    other.close_index()
    copy = other.copy_index("foreign")
    other.open_index()
    other.close()
    indexed.close_index()
    indexed.restore_index(copy)
    indexed.open_index()
    indexed.catch_up()
    assert indexed.index.discarded == 3
    indexed.check()


@pytest.mark.parametrize("keep", [0, 100, 4096, 3 * 4096, 0.5, -1])
def test_a_file_that_was_cut_is_made_again(indexed, keep):
    indexed.close_index()
    for file in indexed.data_files():
        size = file.stat().st_size
        with open(file, "r+b") as data:
            data.truncate(int(size * keep) if isinstance(keep, float) else keep % size)
    indexed.open_index()
    indexed.catch_up()
    assert indexed.index.discarded == 4
    indexed.check()


def test_a_file_that_is_gone_is_made_again(indexed):
    indexed.close_index()
    for file in indexed.data_files():
        file.unlink()
    indexed.open_index()
    indexed.catch_up()
    indexed.check()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_flipped_bits_never_hide_a_message(indexed):
    chance = random.Random(0)
    indexed.close_index()
    copies = []
    for number in range(COPIES):
        directory = image(indexed, f"flipped-{number}")
        for file in sorted(directory.glob("index/*/data.mdb")):
            _flip(file, chance, chance.choice([1, 1, 8]))
        copies.append(directory)
    indexed.open_index()
    check_in_other_process(copies)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_zeroed_and_garbled_pages_never_hide_a_message(indexed):
    chance = random.Random(7)
    indexed.close_index()
    copies = []
    for number in range(COPIES):
        directory = image(indexed, f"garbled-{number}")
        for file in sorted(directory.glob("index/*/data.mdb")):
            pages = file.stat().st_size // 4096
            with open(file, "r+b") as data:
                data.seek(chance.randrange(pages) * 4096)
                data.write(bytes(4096) if number % 2 else chance.randbytes(4096))
        copies.append(directory)
    indexed.open_index()
    check_in_other_process(copies)


def test_after_a_fault_everything_is_checked_before_it_is_used(indexed):
    fill(indexed, 3 * SEGMENT_BYTES + 30_000)
    indexed.catch_up()
    indexed.close_index()
    first, second, *_ = indexed.data_files()
    _flip(first, random.Random(1), 1)
    indexed.open_index(suspect=True)
    indexed.tell()
    # The live part cannot be checked; sealed ones can, and are not looked into before.
    assert len(indexed.index.suspects) == 3
    assert indexed.dispatcher.missing_bytes > 3 * SEGMENT_BYTES
    indexed.catch_up()
    assert indexed.index.suspects == []
    assert indexed.index.discarded == 2
    indexed.check()
    assert second.exists()


def test_damage_that_a_search_comes_upon_is_mended_and_told(indexed):
    part = indexed.index.part(0)
    assert part is not None
    (key, value), *_ = part.env.range(b"\0\0\0\1", b"\0\0\0\2", most=1)
    part.env.write([(key, value[:-1] + bytes([value[-1] ^ 1]))])
    searches = [indexed.search(KeyQuery("topic", f"common{n}")) for n in range(5)]
    assert indexed.index.discarded == 1
    assert any(search.missing_bytes >= SEGMENT_BYTES for search in searches)
    indexed.catch_up()
    indexed.check()


def test_a_lying_index_leads_to_no_wrong_message(indexed):
    """Entries of another segment: every hit is compared with the log."""
    fill(indexed, 3 * SEGMENT_BYTES + 30_000)
    indexed.catch_up()
    newest = indexed.index.starts[-1]
    other = indexed.index.part(SEGMENT_BYTES)
    assert other is not None
    foreign = other.reader.entries(1, LOWEST, BEYOND)
    part = indexed.index.part(newest)
    assert part is not None
    for run in part.head.runs:
        part.env.write(encode_run(run.number, foreign))
    mismatches = 0
    for number in range(1, 400):
        search = indexed.search(KeyQuery("topic", f"k{number}"))
        mismatches += search.mismatches
        assert all(f"k{number}" in message.keys for message in search.messages)
    assert mismatches > 0


def test_damage_in_the_log_is_passed_over(indexed):
    fill(indexed, 3 * SEGMENT_BYTES + 20_000)
    messages = [m for m in indexed.scan() if m.commitlog_offset > 3 * SEGMENT_BYTES]
    bad = messages[4].commitlog_offset
    indexed.files.flip(bad + 300)
    indexed.catch_up()
    assert indexed.dispatcher.stats().skipped_bytes == messages[4].store_size
    for message in messages:
        found = indexed.by_id(1, message.info.first_sequence)
        good = [] if message.commitlog_offset == bad else [(message.commitlog_offset, 0)]
        assert found == good
    # What is damaged later is found in the index, and not in the log.
    later = messages[8]
    indexed.files.flip(later.commitlog_offset + 300)
    search = indexed.search(KeyQuery("topic", later.keys[0]))
    assert (search.messages, search.mismatches) == ([], 1)


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_index_only_as_long_as_it_is_full(tmp_path):
    indexed = IndexedStore(tmp_path / "store", step_bytes=SEGMENT_BYTES)
    fill(indexed, 10_000)
    indexed.catch_up()
    fill(indexed, 2 * SEGMENT_BYTES)
    indexed.tell()
    with _largest_file(20_000):
        for _ in range(50):
            indexed.dispatcher.step(indexed.now_ms)
            indexed.now_ms += 500
        assert indexed.dispatcher.stats().waiting
        assert indexed.by_key("k1")
    indexed.now_ms += 2_000
    indexed.catch_up()
    assert indexed.dispatcher.stats().waiting == ""
    indexed.check()
    indexed.close()


def _flip(file: Path, chance: random.Random, count: int) -> None:
    with open(file, "r+b") as data:
        size = file.stat().st_size
        for _ in range(count):
            position = chance.randrange(size)
            data.seek(position)
            byte = data.read(1)[0] ^ (1 << chance.randrange(8))
            data.seek(position)
            data.write(bytes([byte]))

"""What a disk changes in a log at rest is found, and put right from another copy of the log."""

from __future__ import annotations

import msgspec
import pytest
from harness.log_copies import log_of, replicate, state_of
from harness.store_files import StoreFiles

from mqmesh.errors import CorruptRecord, OffsetOutOfRange, StorageError
from mqmesh.storage.interface import LogChunk
from mqmesh.testing.store_contract import NOW, make_batch

BATCHES, BODY = 40, 4_000
STEPS = 10
"""They look through more than there is."""


class Copies:
    """A leader's store, and a follower's that has all of it."""

    def __init__(self, files: StoreFiles) -> None:
        files.open().close()
        self.files = files.copy()
        self.leader, self.follower = files.open(), self.files.open()
        self.places = [self._put(number) for number in range(BATCHES)]
        replicate(self.leader, self.follower, 100_000)

    def _put(self, number: int) -> int:
        body = f"{number}" + "x" * BODY
        batch = make_batch(
            [body], queue_id=number % 2, producer_id=7, first_sequence=number, tags=["a"]
        )
        return int(self.leader.put([batch], NOW)[0].commitlog_offset)

    def found(self) -> list[tuple[int, int]]:
        """The damage that is found by looking through everything."""
        for _ in range(STEPS):
            self.follower.repair.look()
        return [(one.start_offset, one.end_offset) for one in self.follower.repair.damaged()]

    def good(self, start: int, end: int) -> LogChunk:
        return self.leader.read_raw(start, max_bytes=end - start)

    def mend(self) -> None:
        while found := self.follower.repair.damaged():
            one = found[0]
            self.follower.repair.put_back(self.good(one.start_offset, one.end_offset))

    def assert_equal(self) -> None:
        assert log_of(self.leader) == log_of(self.follower)
        assert state_of(self.leader) == state_of(self.follower)


@pytest.fixture
def copies(files: StoreFiles):
    copies = Copies(files)
    yield copies
    copies.files.close()


def test_of_a_good_log_nothing_is_damaged(copies):
    assert copies.found() == []


@pytest.mark.parametrize("at", [0, 20, 1_000])
@pytest.mark.parametrize("number", [0, 15, BATCHES - 1])
def test_a_bit_that_changed_is_found_and_put_right(copies, number, at):
    copies.files.flip(copies.places[number] + at)
    ((start, end),) = copies.found()
    assert start == copies.places[number]
    assert log_of(copies.leader) != log_of(copies.follower)
    copies.follower.repair.put_back(copies.good(start, end))
    assert copies.follower.repair.damaged() == []
    copies.assert_equal()
    copies.follower.close()
    copies.follower = copies.files.open()
    assert copies.follower.stats().damaged == []
    assert copies.found() == []


@pytest.mark.parametrize("numbers", [[3], [3, 4, 5], [4, 20], [BATCHES - 2, BATCHES - 1]])
def test_what_was_lost_when_the_store_was_opened_is_in_its_queues_again(copies, numbers):
    copies.follower.close()
    for path in copies.files.directory.glob("queue-table*"):
        path.unlink()
    for number in numbers:
        copies.files.flip(copies.places[number] + 100)
    copies.follower = copies.files.open()
    assert copies.follower.repair.damaged(), "so it was read"
    assert state_of(copies.leader) != state_of(copies.follower)
    copies.mend()
    assert log_of(copies.leader) == log_of(copies.follower)
    assert state_of(copies.leader)[0] == state_of(copies.follower)[0]


def test_a_wide_range_is_put_right_piece_by_piece(copies):
    for number in (2, 3, 4):
        copies.files.write(copies.places[number], bytes(200))
    ((start, end),) = copies.found()
    assert (start, end) == (copies.places[2], copies.places[5])
    copies.follower.repair.put_back(copies.good(start, copies.places[3]))
    assert copies.found() == [(copies.places[3], end)]
    copies.mend()
    copies.assert_equal()


def test_bytes_that_are_not_good_are_not_written(copies):
    copies.files.flip(copies.places[3] + 100)
    ((start, end),) = copies.found()
    good, before = copies.good(start, end), log_of(copies.follower)
    changed = bytearray(good.data)
    changed[100] ^= 4
    for changes in (
        {"data": bytes(changed)},
        {"data": bytes(good.data)[:-1]},
        {"data": b"", "end": start},
        {"segment_end": good.segment_end + 1},
        {"end": good.segment_end},
    ):
        with pytest.raises(StorageError):
            copies.follower.repair.put_back(msgspec.structs.replace(good, **changes))
    elsewhere = copies.good(copies.places[5], copies.places[6])
    with pytest.raises(OffsetOutOfRange, match="not damaged"):
        copies.follower.repair.put_back(elsewhere)
    with pytest.raises(CorruptRecord):
        copies.follower.repair.put_back(msgspec.structs.replace(elsewhere, start=start))
    assert log_of(copies.follower) == before
    assert copies.found() == [(start, end)]

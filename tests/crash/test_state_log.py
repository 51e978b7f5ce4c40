"""The broker dies while topics, groups and offsets change, or messages move the log on.

What a start finds is what was true after one of the writes, with the messages that it tells of.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.kill_points import KillPoints
from harness.served import KeptState
from harness.store_files import SEGMENT_BYTES, StoreFiles, settle

from mqmesh.batch.record_batch import Attributes, encode_batch, read_header
from mqmesh.message import Message
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.config import BrokerConfig, BrokerStoreConfig
from mqmesh.storage.interface import BatchToPut, StoreConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.units import QueueOffset

CONFIG = BrokerConfig(storage=BrokerStoreConfig(mapped_file_size_commit_log=SEGMENT_BYTES))


class Life:
    """The tables of a broker on files."""

    def __init__(self, files: StoreFiles) -> None:
        self.store = files.open()
        self.tables = KeptState(CONFIG, ManualClock(), self.store)
        self.tables.load()
        self.tables.state.write()
        self.sent = self.store.queue_bounds("t", 0)[1]

    def send(self, size: int = 1_000) -> None:
        data = encode_batch(
            [Message("t", bytes(size))],
            topic="t",
            queue_id=0,
            producer_id=1,
            first_sequence=0,
            born_timestamp=1,
            attributes=Attributes.REDELIVERED,
        )
        self.store.put([BatchToPut("t", 0, read_header(data), data)], 1)  # type: ignore[arg-type]
        self.sent += 1

    def change(self, number: int) -> None:
        """Each kind of change, and what belongs together in one write."""
        tables = self.tables
        tables.topics.set(TopicConfig("t", 1, 1), 1)  # type: ignore[arg-type]
        tables.topics.set(TopicConfig(f"t{number}", 1, 1), 1)  # type: ignore[arg-type]
        if number > 1:
            tables.topics.delete(f"t{number - 2}", 1)  # type: ignore[arg-type]
        tables.groups.update(GroupConfig("g", retry_max_times=number))
        tables.offsets.commit("g", "t", 0, QueueOffset(self.sent))
        tables.offsets.sent_back.forget("g", number)
        tables.state.write()

    def facts(self) -> Any:
        tables = self.tables
        group = tables.groups.get("g")
        return (
            sorted(config.topic for config in tables.topics.configs()),
            None if group is None else group.retry_max_times,
            tables.offsets.query("g", "t", 0),
            tables.offsets.sent_back.counts_from("g"),
        )


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFiles]:
    files = StoreFiles(
        tmp_path / "store",
        StoreConfig(
            mapped_file_size_commit_log=SEGMENT_BYTES,
            checkpoint_interval_ms=1_000,
            flush_interval_commitlog_ms=600_000,
        ),
    )
    yield files
    files.close()


@pytest.mark.timeout(180)
def test_at_every_kill_point_the_state_is_one_that_was_written(
    files: StoreFiles, kill_points: KillPoints
) -> None:
    life = Life(files)
    life.tables.topics.set(TopicConfig("t", 1, 1), 1)  # type: ignore[arg-type]
    life.tables.state.write()
    told = [life.facts()]
    kill_points.start(files, lambda: len(told))
    for number in range(5):
        life.send(SEGMENT_BYTES // 2)  # so that snapshots are made, too
        life.change(number)
        told.append(life.facts())
    life.store.close()
    life = Life(files)
    assert life.facts() == told[-1]
    life.store.close()
    seen = set()
    for copy, count in kill_points.stop():
        started = Life(copy)
        found = started.facts()
        # A kill costs nothing that was written; what was being written is there, or it is not.
        assert found in told[count - 1 : count + 1]
        assert started.sent >= found[2]
        seen.add(told.index(found))
        started.store.close()
    assert seen == set(range(len(told)))


@pytest.mark.usefixtures("another_boot")
@pytest.mark.parametrize("kept", range(9))
def test_what_a_power_cut_takes_from_the_log_it_takes_with_all_that_tells_of_it(
    files: StoreFiles, kept: int
) -> None:
    life = Life(files)
    settle(life.store)
    told, ends = [life.facts()], [life.store.stats().max_commitlog_offset]
    for number in range(8):
        life.send()
        life.change(number)
        told.append(life.facts())
        ends.append(life.store.stats().max_commitlog_offset)
    after = files.copy()
    after.write(ends[kept], bytes(ends[-1] - ends[kept]))
    started = Life(after)
    assert started.facts() == told[kept]
    assert started.sent == kept
    # It goes on from there.
    started.send()
    started.change(kept)
    started.store.close()
    again = Life(after)
    assert again.facts() == started.facts()

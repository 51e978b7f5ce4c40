"""CommitLogStore: what consumers may see, and the whole against a model."""

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.store_files import SEGMENT_BYTES, StoreFiles, settle
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mqmesh.errors import OffsetOutOfRange
from mqmesh.message import tag_hash
from mqmesh.storage.commitlog.machine import Machine
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import FlushDiskType, GetStatus, PutStatus, StoreConfig
from mqmesh.storage.log.commitlog import VIEW_BYTES, CommitLog
from mqmesh.storage.queues import consume_queues
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW, bodies_in, make_batch, read_queue

PATIENCE = 10


class SlowDisk:
    """Syncs wait until the test opens the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.woken = threading.Event()

    def sync(self, fd: int) -> None:
        assert self.gate.wait(PATIENCE)

    def finish(self, store: CommitLogStore, end: int) -> None:
        """Lets all syncs through and waits until an offset is durable."""
        self.gate.set()
        while store.durable_offset() < end:
            assert self.woken.wait(PATIENCE)
            self.woken.clear()


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def store(tmp_path: Path, disk: SlowDisk) -> Iterator[CommitLogStore]:
    disk.gate.set()
    store = CommitLogStore.open(
        tmp_path / "store",
        StoreConfig(
            flush_disk_type=FlushDiskType.SYNC_FLUSH, mapped_file_size_commit_log=SEGMENT_BYTES
        ),
        clock=ManualClock(),
        wake=disk.woken.set,
        on_progress=lambda progress: None,
        machine=Machine(sync=disk.sync),
    )
    disk.gate.clear()
    yield store
    disk.gate.set()
    store.close()


def test_consumers_see_only_what_is_durable(store: CommitLogStore, disk: SlowDisk) -> None:
    first, second = store.put([make_batch(["a", "b"]), make_batch(["c"], queue_id=1)], NOW)
    assert store.durable_offset() < first.end_offset
    assert store.queue_bounds("topic", 0) == (0, 0)
    assert store.get("topic", 0, 0, max_bytes=1000).max_queue_offset == 0
    assert store.offset_by_time("topic", 0, NOW) == 0
    with pytest.raises(OffsetOutOfRange):
        store.read_at(first.commitlog_offset)
    disk.finish(store, second.end_offset)
    assert store.queue_bounds("topic", 0) == (0, 2)
    assert read_queue(store) == ["a", "b"]
    assert read_queue(store, queue_id=1) == ["c"]
    assert store.read_at(first.commitlog_offset)


def test_a_duplicate_waits_for_the_same_sync(store: CommitLogStore, disk: SlowDisk) -> None:
    (first,) = store.put([make_batch(["a"])], NOW)
    (again,) = store.put([make_batch(["a"])], NOW)
    assert again.status is PutStatus.DUPLICATE
    assert again.end_offset == first.end_offset > store.durable_offset()
    disk.finish(store, again.end_offset)


def test_rolling_over_many_segments_stays_durable(store: CommitLogStore, disk: SlowDisk) -> None:
    disk.gate.set()
    end = 0
    for number in range(30):
        (result,) = store.put([make_batch(["x" * 20_000], first_sequence=number)], NOW)
        end = result.end_offset
        store.tick(number)
    disk.finish(store, end)
    store.put([make_batch(["y"], first_sequence=30)], NOW)
    assert store.stats().segments >= 10
    # Descriptors of segments that are full and synced are given back.
    assert sum(segment.fd >= 0 for segment in store._log.segments) <= 4
    assert len(read_queue(store)) >= 30


@pytest.mark.parametrize("in_memory", [True, False])
def test_small_batches_far_apart_are_taken_from_memory_or_else_read_one_by_one(
    store: CommitLogStore, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    disk.gate.set()
    end = 0
    for number in range(20):
        for queue_id, body in enumerate([f"wanted {number}", "x" * 7_000]):
            batch = make_batch([body], queue_id=queue_id, first_sequence=number)
            (result,) = store.put([batch], NOW)
            end = result.end_offset
        store.tick(number)
    disk.finish(store, end)
    sizes = []
    read = CommitLog.read
    monkeypatch.setattr(CommitLog, "read", lambda *args: sizes.append(args[-1]) or read(*args))
    if not in_memory:
        monkeypatch.setattr(CommitLog, "view_in_memory", lambda *_: None)
    assert read_queue(store) == [f"wanted {number}" for number in range(20)]
    assert len(sizes) == 20 if not in_memory else len(sizes) < 5  # those alone in their segment
    assert max(sizes, default=0) < VIEW_BYTES


def test_an_idle_store_does_nothing(tmp_path: Path) -> None:
    files = StoreFiles(tmp_path / "store")
    store = files.open()
    store.put([make_batch(["a"])], NOW)
    now_ms = settle(store)
    sequence = store._checkpointer._file._sequence
    for later in range(now_ms, now_ms + 100_000, 100):
        assert not store.tick(later)
    assert store._checkpointer._file._sequence == sequence
    files.close()


def test_tags_are_there_again_after_a_crash(tmp_path: Path) -> None:
    files = StoreFiles(tmp_path / "store")
    store = files.open()
    batch = make_batch(["a", "b"], tags=["red", None])
    store.put([batch], NOW)
    crashed = files.copy()
    recovered = crashed.open()
    entry = recovered._queues.by_topic["topic"][0].read(recovered._files, 0, 1)
    assert entry[12:] == batch.tag_hashes[:8]
    crashed.close()
    files.close()


@pytest.mark.parametrize("written", [False, True])
def test_the_log_is_not_read_for_batches_without_a_wanted_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    store = StoreFiles(tmp_path).open()
    body = "x" * 5_000  # so long that nobody reads on through it to the next one
    tags = ["A", "B", "C", "C", "C", "B", "A", "C"]
    for number, tag in enumerate(tags):
        store.put([make_batch([body] * 2, tags=[tag] * 2, first_sequence=2 * number)], NOW)
    if written:
        settle(store)
    reads: list[int] = []
    read = CommitLog.read

    def note(log: CommitLog, offset: int, size: int) -> bytes:
        reads.append(size)
        return read(log, offset, size)

    monkeypatch.setattr(CommitLog, "read", note)
    unknown, wanted = frozenset([tag_hash("X")]), frozenset([tag_hash("A")])
    missed = store.get("topic", 0, 0, max_bytes=1 << 20, tag_hashes=unknown)
    assert (missed.status, missed.next_queue_offset, reads) == (
        GetStatus.NO_MATCHED_MESSAGE,
        16,
        [],
    )
    found = store.get("topic", 0, 0, max_bytes=1 << 20, tag_hashes=wanted)
    assert found.message_count == 4
    assert len(reads) == 2
    assert sum(reads) == sum(map(len, found.data))
    store.close()


class StoreMachine(RuleBasedStateMachine):
    """Puts, reads, ticks, deletions, crashes and clean stops, against lists."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[tuple[str, int], list[str]] = {}
        self.sequence = 0
        self.now_ms = 0

    @initialize(slow=st.booleans())
    def start(self, slow: bool) -> None:
        # On a slow disk a step gives up after one queue.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(consume_queues, "MOST_WRITING_NS", -1 if slow else 1 << 40)

        self.temporary = tempfile.TemporaryDirectory()
        self.files = StoreFiles(
            Path(self.temporary.name) / "store",
            StoreConfig(
                mapped_file_size_commit_log=SEGMENT_BYTES,
                mapped_file_size_consume_queue=16,
                consume_queue_tail_bytes=65_536,
                checkpoint_interval_ms=100,
                max_open_files=8,
            ),
        )
        self.store = self.files.open()

    @rule(
        shapes=st.lists(
            st.tuples(
                st.sampled_from(["t", "u"]),
                st.integers(0, 5),
                st.integers(1, 40),
                st.sampled_from([1, 300, 2000]),
            ),
            min_size=1,
            max_size=4,
        ),
        repeated=st.booleans(),
    )
    def put(self, shapes: list[tuple[str, int, int, int]], repeated: bool) -> None:
        batches = []
        for topic, queue_id, count, size in shapes:
            count = min(count, 40_000 // size)
            bodies = [f"{self.sequence + index}." + "x" * size for index in range(count)]
            batches.append(
                make_batch(bodies, topic=topic, queue_id=queue_id, first_sequence=self.sequence)
            )
            queue = self.model.setdefault((topic, queue_id), [])
            queue += bodies
            self.sequence += count
        for result in self.store.put(batches, NOW):
            assert result.status is PutStatus.PUT_OK
        if repeated:
            (again,) = self.store.put(batches[-1:], NOW)
            assert again.status is PutStatus.DUPLICATE

    @rule(topic=st.sampled_from(["t", "u"]))
    def delete(self, topic: str) -> None:
        self.store.delete_topic(topic)
        self.model = {key: bodies for key, bodies in self.model.items() if key[0] != topic}

    @rule(milliseconds=st.integers(1, 200))
    def tick(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.store.tick(self.now_ms)

    @rule()
    def stop_in_order(self) -> None:
        self.store.close()
        self.store = self.files.open()
        assert self.store.stats().recovered_bytes == 0

    @rule()
    def crash(self) -> None:
        crashed = self.files.copy()
        self.files.close()
        self.files = crashed
        self.store = self.files.open()
        assert not self.store.stats().damaged
        assert self.store.stats().cut_bytes == 0

    @rule(data=st.data())
    def read_somewhere(self, data: st.DataObject) -> None:
        if self.model:
            topic, queue_id = data.draw(st.sampled_from(sorted(self.model)))
            bodies = self.model[topic, queue_id]
            start = data.draw(st.integers(0, len(bodies) - 1))
            result = self.store.get(
                topic, queue_id, start, max_bytes=data.draw(st.integers(1, 9000))
            )
            found = bodies_in(result, start)
            assert found
            assert found == bodies[start : start + len(found)]

    @invariant()
    def everything_is_there(self) -> None:
        for (topic, queue_id), bodies in self.model.items():
            assert self.store.queue_bounds(topic, queue_id) == (0, len(bodies))
            assert read_queue(self.store, topic, queue_id, max_bytes=50_000) == bodies

    def teardown(self) -> None:
        self.patch.undo()
        self.files.close()
        self.temporary.cleanup()


TestModel = StoreMachine.TestCase
TestModel.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestModel.pytestmark = [pytest.mark.timeout(180)]

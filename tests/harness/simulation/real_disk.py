"""The real store of one node, on a disk that outlives the process as a disk does.

Each life of a broker opens a copy of the files that the one before it left, since that one's maps
and descriptors stay until the simulation ends. The helper threads of the store are steps of the
simulation.
"""

import errno
import os
import random
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from harness.simulation.disk import Disk
from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.clock import Clock
from mqmesh.message import StoredMessage
from mqmesh.storage.commitlog.log_copy import begin_copy
from mqmesh.storage.commitlog.machine import Machine
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.files.chores import Chores
from mqmesh.storage.files.disk_space import Space
from mqmesh.storage.interface import (
    BatchToPut,
    LogStart,
    MessageStore,
    OnProgress,
    PutResult,
    StoreConfig,
    Wake,
)
from mqmesh.storage.log.flush import Flusher, Sync
from mqmesh.transport.simulated.node import SimulatedNode
from mqmesh.transport.simulated.simulation import Event
from mqmesh.units import GIB, KIB, MIB, TimestampMs

PAGE: Final = 4 * KIB
SECTOR: Final = 512
"""A disk writes this as a whole."""
SEGMENT_BYTES: Final = 64 * KIB
LARGEST_READ_BYTES: Final = 1 * MIB
SLOWEST_CHORE_MS: Final = 5
SMALL_FILES: Final[dict[str, Any]] = {
    "mapped_file_size_commit_log": SEGMENT_BYTES,
    "mapped_file_size_consume_queue": 64,
    "checkpoint_interval_ms": 1_000,
    "commit_log_window_bytes": 0,
    "allocate_ahead_bytes": SEGMENT_BYTES,
    "disk_reserve_bytes": 0,
}
"""Settings under which a store makes many small files, and starts no thread for pages."""

_T = TypeVar("_T")


class RealDisk(Disk):
    """Disk of a broker with files, which outlives its processes.

    Args:
        folder: Folder for the files of each life.
        seed: Decides how long chores take, apart from everything else.

    Attributes:
        synced_offset: End of the log that is on the disk.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self._folder = folder
        self.synced_offset = 0
        self._lives = 0
        self._boots = 1
        self._stores: list[_WatchedStore] = []
        self._synced: dict[str, bytes] = {}
        self._chance = random.Random(seed)

    @property
    def files(self) -> Path:
        """Files of the life that runs, or ran last."""
        return self._folder / f"store-{self._lives}"

    @property
    def store(self) -> CommitLogStore:
        """Store of the life that runs, or ran last."""
        return self._stores[-1]

    def opener_for(self, node: SimulatedNode) -> Callable[..., MessageStore]:
        """Implement ``Disk.opener_for``."""

        def open_it(
            backend: str,
            directory: Path,
            config: StoreConfig,
            *,
            clock: Clock,
            wake: Wake,
            on_progress: OnProgress,
        ) -> MessageStore:
            before = self.files
            self._lives += 1
            if before.exists():
                shutil.copytree(before, self.files, ignore=shutil.ignore_patterns("lock"))
            self.sync_fails = False
            store = _WatchedStore.open(
                self.files,
                config,
                clock=clock,
                wake=wake,
                on_progress=on_progress,
                machine=self._machine(node),
            )
            assert isinstance(store, _WatchedStore)
            store.disk = self
            self._stores.append(store)
            return store

        return open_it

    def copier(
        self, directory: Path, beginning: LogStart, *, now_ms: int, keeps: bool = True
    ) -> Path | None:
        """Begins a copy of this life's files, whatever the directory; see ``begin_copy``."""
        return begin_copy(self.files, beginning, now_ms=now_ms, keeps=keeps)

    def lose_power(self, chance: Callable[[int], int]) -> None:
        """Keeps what was synced of log and consume queues, and any part of the rest.

        Args:
            chance: A number from 0 to below its argument.
        """
        self._boots += 1
        self._lose_queues(chance)
        for path in sorted((self.files / "commitlog").iterdir()):
            start = int(path.name)
            data = bytearray(path.read_bytes())
            for page in range(0, len(data), PAGE):
                first = max(page, self.synced_offset - start)
                if first < page + PAGE and chance(2):
                    data[first : page + PAGE] = bytes(page + PAGE - first)
            _replace(path, data)

    def _lose_queues(self, chance: Callable[[int], int]) -> None:
        for path in sorted((self.files / "consumequeue").glob("*/*-*")):
            synced = self._synced.get(_place(path), b"")
            data = bytearray(path.read_bytes())
            if chance(2):
                del data[len(synced) :]  # nor was its length
            for sector in range(0, len(data), SECTOR):
                if chance(2):
                    end = min(sector + SECTOR, len(data))
                    data[sector:end] = synced[sector:end].ljust(end - sector, b"\0")
            _replace(path, data)

    def messages(self, topic: str, broker_name: str) -> list[StoredMessage]:
        """Implement ``Disk.messages``."""
        store, found = self.store, list[StoredMessage]()
        for queue_id in store.queues(topic):
            low, end = store.queue_bounds(topic, queue_id)
            offset = int(low)
            while offset < end:
                got = store.get(topic, queue_id, offset, max_bytes=LARGEST_READ_BYTES, verify=True)
                for buffer in got.data:
                    data, position = memoryview(buffer), 0
                    while position < len(data):  # of one batch or of several
                        header = check_stored(data, position)
                        batch = bytes(data[position : position + header.total_size])
                        found += decode_messages(batch, header, broker_name=broker_name)
                        position += header.total_size
                assert got.next_queue_offset > offset, "a read that does not get on"
                offset = got.next_queue_offset
        return found

    def release(self) -> None:
        """Closes what dead lives still hold."""
        for store in self._stores:
            store.close()

    def _machine(self, node: SimulatedNode) -> Machine:
        def make_flusher(**arguments: Any) -> SteppedFlusher:
            return SteppedFlusher(node, self, **arguments)

        return Machine(
            sync=self.sync,
            space_of=self._space,
            boot_id=self._boots.to_bytes(16, "big"),
            make_chores=lambda name: SteppedChores(node, self._chance),
            make_flusher=make_flusher,
        )

    def sync(self, fd: int) -> None:
        """Makes a file of the store durable, unless the disk fails."""
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if self.sync_fails and path.parent.name == "commitlog":
            self.on_failure()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if path.parent.parent.name == "consumequeue":
            self._synced[_place(path)] = path.read_bytes()

    def _space(self, directory: Path) -> Space:
        return Space(GIB, 0) if self.full else Space(0, GIB)


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"  # the same in each life


def _replace(path: Path, data: bytearray) -> None:
    # Not in place, where the dead process has it mapped.
    new = path.with_name(path.name + ".lost")
    new.write_bytes(data)
    new.replace(path)


class _WatchedStore(CommitLogStore):
    disk: RealDisk

    def put(
        self,
        batches: Sequence[BatchToPut],
        store_timestamp: TimestampMs,
        *,
        despite_full: bool = False,
    ) -> list[PutResult]:
        results = super().put(batches, store_timestamp, despite_full=despite_full)
        if results and self.disk.on_write is not None:
            self.disk.on_write()
        return results


class SteppedFlusher(Flusher):
    """Flusher whose syncs are steps of a node.

    Args:
        node: The process.
        disk: Disk whose slowness counts.
        durable_offset, at_once, interval_ms, wake, sync, note: The same as for ``Flusher``.
    """

    def __init__(
        self,
        node: SimulatedNode,
        disk: RealDisk,
        *,
        durable_offset: int,
        at_once: bool,
        interval_ms: int,
        wake: Wake,
        sync: Sync,
        note: Callable[[int], None],
    ) -> None:
        self.durable_offset = durable_offset
        self.error = None
        self.flushes = 0
        self._node = node
        self._disk = disk
        self._wait_ms = 0 if at_once else interval_ms
        self._wake = wake
        self._sync = sync
        self._note = note
        self._end = disk.synced_offset = durable_offset
        self._fds = []
        self._planned: Event | None = None
        self._is_hurried = False

    def written(self, end: int, fds: list[int], *, urgent: bool = False) -> None:
        """Implement ``Flusher.written``."""
        self._end, self._fds = end, fds
        if urgent and not self._is_hurried and self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self._planned is None:
            self._is_hurried = urgent
            self._plan(0 if urgent else self._wait_ms)

    def close(self) -> None:
        """Implement ``Flusher.close``; a killed node does nothing more."""
        if self._node.alive and self.error is None and self._end != self.durable_offset:
            self._flush()

    def _plan(self, delay_ms: int) -> None:
        slow_ms = self._node.random.randint(1, self._disk.slowest_sync_ms)
        self._planned = self._node.after(delay_ms + slow_ms, self._step)

    def _step(self) -> None:
        self._planned = None
        self._is_hurried = False
        if self.error is None and self._end != self.durable_offset:
            self._flush()

    def _flush(self) -> None:
        end = self._end
        try:
            for fd in self._fds:
                self._sync(fd)
        except OSError as error:
            self.error = error
        else:
            self.durable_offset = self._disk.synced_offset = end
            self.flushes += 1
            self._note(end)
        self._wake()


class SteppedChores(Chores):
    """Chores that are steps of a node; a caller that waits for one does it.

    Args:
        node: The process.
        chance: Source of chance for how long each takes.
    """

    def __init__(self, node: SimulatedNode, chance: random.Random) -> None:
        self._node = node
        self._chance = chance
        self._waiting: deque[tuple[_Chore[Any], Callable[[], Any]]] = deque()

    def submit(self, task: Callable[[], _T]) -> "Future[_T]":
        """Implement ``Chores.submit``."""
        chore: _Chore[_T] = _Chore(self)
        self._waiting.append((chore, task))
        self._node.after(self._chance.randint(1, SLOWEST_CHORE_MS), self.step)
        return chore

    def close(self) -> None:
        """Implement ``Chores.close``."""
        while self._waiting:
            self.step()

    def step(self) -> None:
        """Does one, if one waits."""
        if not self._waiting:
            return
        chore, task = self._waiting.popleft()
        try:
            chore.set_result(task())
        except Exception as error:
            chore.set_exception(error)


class _Chore(Future[_T]):
    def __init__(self, chores: SteppedChores) -> None:
        super().__init__()
        self._chores = chores

    def result(self, timeout: float | None = None) -> _T:
        while not self.done():
            self._chores.step()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        while not self.done():
            self._chores.step()
        return super().exception(0)

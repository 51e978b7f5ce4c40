"""Makes the message index of a stopped store anew from its log."""

from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import StorageError
from mqmesh.storage.commitlog.checkpoint import read_boot_id
from mqmesh.storage.index.config import IndexConfig
from mqmesh.storage.index.dispatcher import BUSY_MS, Dispatcher
from mqmesh.storage.index.message_index import MessageIndex
from mqmesh.storage.interface import OnProgress, RecoveryProgress
from mqmesh.storage.tools.stopped_store import StoppedCommitLog
from mqmesh.units import MIB

STEP_BYTES: Final = 16 * MIB
MOST_OPEN: Final = 4


def rebuild_index(
    store: StoppedCommitLog, directory: Path, *, clock: Clock, on_progress: OnProgress
) -> int:
    """Removes an index and makes it anew.

    Args:
        store: The store.
        directory: Directory of the index.
        clock: Source of time.
        on_progress: Called after every step.

    Returns:
        Log bytes that the index covers.

    Raises:
        StoreLocked: A process has the index open.
        StorageError: The log cannot be read, or the index cannot be written.
    """
    end = store.synced_through
    for item in store.items(end):
        end = item.end
    index = MessageIndex(directory, map_size=IndexConfig().live_map_size, most_open=MOST_OPEN)
    try:
        for start in index.starts:
            index.remove(start)
        if store.store_id is None:
            return 0
        dispatcher = Dispatcher(
            store.log_directory,
            index,
            key=store.key,
            store_id=store.store_id,
            boot_id=read_boot_id(),
            step_bytes=STEP_BYTES,
            room=lambda: True,
        )
        try:
            dispatcher.advance(end, store.start, clock.monotonic_ms())
            total = end - store.start
            # No other work uses this store: no step has to wait for its turn.
            while dispatcher.step(clock.monotonic_ms() + BUSY_MS) is not None:
                stats = dispatcher.stats()
                if stats.waiting:
                    break
                on_progress(
                    RecoveryProgress("indexing", max(0, total - stats.missing_bytes), total)
                )
            waiting = dispatcher.stats().waiting
        finally:
            dispatcher.close()
    finally:
        index.close()
    if waiting:
        raise StorageError(f"the index cannot be made: {waiting}")
    return total

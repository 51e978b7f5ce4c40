"""Backends of stores: their kinds, by the names that configuration uses.

Besides the three built in, any package may offer one: an entry point of the
group ``mqmesh.storage`` whose object is called like ``CommitLogStore.open``.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from mqmesh.clock import Clock
from mqmesh.errors import ConfigError, StorageError
from mqmesh.storage.commitlog.store import CommitLogStore
from mqmesh.storage.interface import MessageStore, OnProgress, StoreConfig, Wake
from mqmesh.storage.lmdb.opening import DIRECTORY as LMDB_DIRECTORY
from mqmesh.storage.lmdb.store import LmdbStore
from mqmesh.storage.memory import MemoryStore

OpenStore = Callable[..., MessageStore]
"""Opens a store of one backend; called like ``open_store``."""

ENTRY_POINT_GROUP: Final = "mqmesh.storage"

_DIRECTORIES: Final = {"commitlog": "commitlog", "lmdb": LMDB_DIRECTORY}
"""Backend -> directory that it alone makes in the store's directory."""


def open_store(
    backend: str,
    directory: Path,
    config: StoreConfig,
    *,
    clock: Clock,
    wake: Wake,
    on_progress: OnProgress,
) -> MessageStore:
    """Opens a store, recovering it first if its last stop was not an orderly one.

    Args:
        backend: ``commitlog``, ``lmdb``, ``memory``, or the name of an entry point.
        directory: Directory of the files; made if need be.
        config: Settings.
        clock: Source of time.
        wake: Called from a helper thread when ``durable_offset`` has moved, or the store
            has stopped; must not raise.
        on_progress: Called now and then while recovery goes on, on this thread.

    Raises:
        ConfigError: No such backend.
        StoreLocked: Another process has the store open.
        StorageError: The store cannot be opened; the message gives the reason.
    """
    if backend == "memory":
        return MemoryStore(config, clock=clock)
    present = backend_of(directory)
    if present is not None and present != backend:
        raise StorageError(
            f"{directory} holds a store of the backend {present!r}, not {backend!r}: its messages "
            f"would not be seen; set storage.backend, or use another directory"
        )
    opener: Callable[..., MessageStore]
    if backend == "commitlog":
        opener = CommitLogStore.open
    elif backend == "lmdb":
        opener = LmdbStore.open
    else:
        found = entry_points(group=ENTRY_POINT_GROUP, name=backend)
        if not found:
            others = sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})
            known = ", ".join(["commitlog", "lmdb", "memory", *others])
            raise ConfigError(f"storage backend {backend!r} is unknown; there are: {known}")
        opener = next(iter(found)).load()
    return opener(directory, config, clock=clock, wake=wake, on_progress=on_progress)


def backend_of(directory: Path) -> str | None:
    """Return the name of the built-in backend of a directory's store; None if there is none."""
    for backend, name in _DIRECTORIES.items():
        if (directory / name).is_dir():
            return backend
    return None

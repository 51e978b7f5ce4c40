"""The machine below a store: its disk, and threads for long calls."""

from collections.abc import Callable
from dataclasses import dataclass

from mqmesh.storage.files.chores import Chores
from mqmesh.storage.files.disk_space import SpaceOf, system_space
from mqmesh.storage.log.flush import SYSTEM_SYNC, Flusher, Sync


@dataclass(frozen=True)
class Machine:
    """The real one; tests replace a part of it.

    Attributes:
        sync: Makes a descriptor's data durable.
        space_of: Measures the free space of the disk, on any thread.
        boot_id: Identity of this run of the system, None for the one that the system reports;
            unsynced data outlives a process, but not this run.
        make_chores: Starts the thread for long calls.
        make_flusher: Starts the thread that syncs the log.
    """

    sync: Sync = SYSTEM_SYNC
    space_of: SpaceOf = system_space
    boot_id: bytes | None = None
    make_chores: Callable[[str], Chores] = Chores
    make_flusher: Callable[..., Flusher] = Flusher


REAL_MACHINE = Machine()

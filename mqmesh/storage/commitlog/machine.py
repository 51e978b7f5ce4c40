"""The machine below a store: its disk, and threads for what takes long."""

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
        space_of: Looks at the disk, on any thread.
        boot_id: Which run of the system this is, None for what the system says; what was not
            synced outlives a process, but not that.
        make_chores: Starts the thread for calls that take long.
        make_flusher: Starts the thread that syncs the log.
    """

    sync: Sync = SYSTEM_SYNC
    space_of: SpaceOf = system_space
    boot_id: bytes | None = None
    make_chores: Callable[[str], Chores] = Chores
    make_flusher: Callable[..., Flusher] = Flusher


REAL_MACHINE = Machine()

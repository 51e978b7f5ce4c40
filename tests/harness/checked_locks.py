"""Locks that see whether threads take them in their order."""

import threading

from mqmesh.sdk.client.lock_order import LockRank


class LockWatch:
    """Makes locks, and keeps what was done wrong with them.

    Attributes:
        faults: A line for each.
        nested: Ranks that were taken under one another.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.nested: set[tuple[LockRank, LockRank]] = set()
        self._own = threading.local()

    def lock(self, rank: LockRank) -> "CheckedLock":
        """Makes a lock that is watched."""
        return CheckedLock(self, rank)

    def held(self) -> list[LockRank]:
        """Returns the ranks of the calling thread's locks, outermost first."""
        if not hasattr(self._own, "ranks"):
            self._own.ranks = []
        ranks: list[LockRank] = self._own.ranks
        return ranks

    def on_acquire(self, rank: LockRank) -> None:
        """Checks the order before a thread waits for a lock."""
        held = self.held()
        self.nested.update((outer, rank) for outer in held)
        if held and max(held) >= rank:
            self.faults.append(f"{rank.name} was taken under {max(held).name}")


class CheckedLock:
    """A lock as ``threading.Lock``."""

    def __init__(self, watch: LockWatch, rank: LockRank) -> None:
        self._watch = watch
        self._rank = rank
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes the lock; a caller that does not wait may take locks in any order."""
        if blocking:
            self._watch.on_acquire(self._rank)
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._watch.held().append(self._rank)
        return taken

    def release(self) -> None:
        """Gives it back."""
        self._watch.held().remove(self._rank)
        self._lock.release()

    def locked(self) -> bool:
        """Returns True while a thread holds the lock."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()

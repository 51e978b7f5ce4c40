"""Retention: the choice of log segments to remove, and the limit at which writes are refused.

Pure: ages, hours and the room on the disk are given. Three rules, in this order:

1. With ``clean_file_forcibly_enable``, at or past ``disk_space_clean_forcibly_ratio``, the
   oldest segments are removed whatever their age, as many as bring the disk below that limit.
2. Segments older than ``file_reserved_time`` are removed at once at or past
   ``disk_max_used_space_ratio``, else in the hours of ``delete_when``.
3. No pass removes more than ``delete_files_batch_max``: in case of an error an administrator
   can still intervene.

Ages are measured by the wall clock, because they go on while the broker does not
run. A clock that is set forward would make everything old at once; see ``AgeClock``.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.errors import DiskFull
from mqmesh.storage.files.disk_space import Space
from mqmesh.storage.interface import StoreConfig

HOUR_MS: Final = 3_600_000
JUMP_MS: Final = 60_000
"""Largest gain of the wall clock on the monotonic one between two readings that is no leap."""
RESUME_BELOW_PERCENT: Final = 1
"""Distance below the limit at which writing goes on: else writes would flicker on and off."""


class SealedFile(msgspec.Struct, frozen=True, gc=False):
    """A log segment that is not written to any more.

    Attributes:
        size: Size of its blocks on the disk, in bytes.
        modified_ms: Wall-clock time of its last write.
    """

    size: int
    modified_ms: int


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """Decision about the segments to remove now.

    Attributes:
        count: Number of the oldest segments to remove.
        reason: Reason for the decision, for people.
        forced: The segments are removed before their time, since the disk is full.
    """

    count: int
    reason: str = ""
    forced: bool = False


def files_to_delete(
    files: Sequence[SealedFile], space: Space, *, now_ms: int, hour: int, config: StoreConfig
) -> Verdict:
    """Decides about one pass.

    Args:
        files: All sealed segments, oldest first.
        space: Room of their file system.
        now_ms: Time to measure ages with, see ``AgeClock``.
        hour: Hour of the day, local time, 0 to 23.
        config: Limits and times.
    """
    percent = space.used_percent
    reserved_ms = config.file_reserved_time * HOUR_MS
    expired = count_older(files, now_ms - reserved_ms)
    if config.clean_file_forcibly_enable and percent >= config.disk_space_clean_forcibly_ratio:
        count = _enough_files(files, space, config.disk_space_clean_forcibly_ratio)
        reason = (
            f"the disk is {percent:.1f} % full (disk_space_clean_forcibly_ratio = "
            f"{config.disk_space_clean_forcibly_ratio})"
        )
    else:
        count = expired
        reason = f"older than {config.file_reserved_time} h (file_reserved_time)"
        if percent < config.disk_max_used_space_ratio and hour not in hours_of(config.delete_when):
            count = 0
    count = min(count, config.delete_files_batch_max)
    return Verdict(count, reason, count > expired) if count else Verdict(0)


def count_older(files: Sequence[SealedFile], limit_ms: int) -> int:
    """Count the files, from the oldest, that were last written at or before a time.

    A file is at least as old as those that follow it, whatever its own time is: a file
    that was written while the clock was ahead would otherwise hold back all others for ever.
    """
    for index in range(len(files), 0, -1):
        if files[index - 1].modified_ms <= limit_ms:
            return index
    return 0


def _enough_files(files: Sequence[SealedFile], space: Space, percent: int) -> int:
    """Count the oldest files whose removal brings the disk below a limit; at most all."""
    too_much = space.used - (space.used + space.available) * percent / 100
    for count, file in enumerate(files, 1):
        too_much -= file.size
        if too_much < 0:
            return count
    return len(files)


def hours_of(delete_when: str) -> frozenset[int]:
    """Hours of the day in a setting like ``04`` or ``04;16``."""
    return frozenset(map(int, delete_when.split(";")))


class AgeClock:
    """The wall clock, without its leaps.

    Time by which it gains on the monotonic clock, and time in which the broker did not
    run, does not make files older until files were kept for ``reserved_ms`` once more:
    then all files from before the leap are old by any clock.

    Attributes:
        jumps: Leaps, forward or back, that were noticed while running.
        reserved_ms: Time for which files are kept.
    """

    def __init__(
        self, monotonic_ms: int, wall_ms: int, *, reserved_ms: int, last_alive_ms: int | None
    ) -> None:
        """Start the clock.

        Args:
            monotonic_ms: Monotonic clock.
            wall_ms: Wall clock.
            reserved_ms: Time for which files are kept.
            last_alive_ms: Wall-clock time of the last sign of life of the run before; None if
                there was none.
        """
        self.reserved_ms = reserved_ms
        self._monotonic_ms = monotonic_ms
        self._wall_ms = wall_ms
        self._since_ms = monotonic_ms
        rested_ms = 0 if last_alive_ms is None else wall_ms - last_alive_ms
        self._lead_ms = rested_ms if rested_ms > JUMP_MS else 0
        self.jumps = 0

    def look(self, monotonic_ms: int, wall_ms: int) -> int:
        """Return the time to measure ages with; to be called often."""
        gained_ms = (wall_ms - self._wall_ms) - (monotonic_ms - self._monotonic_ms)
        self._monotonic_ms, self._wall_ms = monotonic_ms, wall_ms
        if abs(gained_ms) > JUMP_MS:
            self.jumps += 1
            self._lead_ms = max(0, self._lead_ms + gained_ms)
            if gained_ms > 0:
                self._since_ms = monotonic_ms
        if self._lead_ms and monotonic_ms - self._since_ms >= self.reserved_ms:
            self._lead_ms = 0
        return wall_ms - self._lead_ms


class WriteGate:
    """Refuses writes while the disk is too full, and lets them in again by itself.

    Attributes:
        refusal: Text of the error for producers; None while writes are allowed.
    """

    def __init__(self, limit_percent: int) -> None:
        """Starts open.

        Args:
            limit_percent: Used part of the disk at or past which writes are refused.
        """
        self._limit_percent = limit_percent
        self.refusal: str | None = None

    def check(self) -> None:
        """Refuses a write while the gate is closed.

        Raises:
            DiskFull: It is closed; the message names the used part of the disk and the setting.
        """
        if self.refusal is not None:
            raise DiskFull(self.refusal)

    def look(self, space: Space) -> bool:
        """Updates the gate for the room on the disk; True if it has opened or closed."""
        percent, limit = space.used_percent, self._limit_percent
        was_closed = self.refusal is not None
        if percent >= limit - (RESUME_BELOW_PERCENT if was_closed else 0):
            self.refusal = (
                f"the disk is {percent:.1f} % full, and from {limit} % on nothing is written "
                f"(disk_space_warning_level_ratio); {space.available} bytes are available"
            )
        else:
            self.refusal = None
        return was_closed is not (self.refusal is not None)

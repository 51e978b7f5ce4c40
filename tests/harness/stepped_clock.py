"""A role whose wall clock a test sets: ``python -m harness.stepped_clock FILE ROLE …``.

The role runs as always, in a process of its own; only what it takes for the time of day is off
by what stands in the file.
"""

import os
import runpy
import struct
import sys
import time
from pathlib import Path
from typing import Final

from mqmesh.clock import SystemClock
from mqmesh.units import TimestampMs

PROGRAM: Final = ("-m", "harness.stepped_clock")
"""Before the file's name, in place of ``-m mqmesh.cli``."""

_OFFSET: Final = struct.Struct("<q")


def step_clock(file: Path, offset_ms: int) -> None:
    """Sets the clock of the processes that look at a file; before their start, and at any time.

    Args:
        file: Made if need be.
        offset_ms: Time by which their clock is ahead of the right one; negative: behind.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, _OFFSET.pack(offset_ms), 0)  # a reader sees all of it, or nothing
    finally:
        os.close(descriptor)


def main() -> None:
    """Runs a role with the clock of the file that is the first argument."""
    descriptor = os.open(sys.argv.pop(1), os.O_RDONLY)

    def wall_ms(_: SystemClock) -> TimestampMs:
        (offset_ms,) = _OFFSET.unpack(os.pread(descriptor, _OFFSET.size, 0))
        return TimestampMs(time.time_ns() // 1_000_000 + offset_ms)

    def wall_ns() -> int:
        return wall_ms(SystemClock()) * 1_000_000

    SystemClock.wall_ms = wall_ms  # type: ignore[method-assign, assignment]
    SystemClock.wall_ns = staticmethod(wall_ns)
    runpy.run_module("mqmesh.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

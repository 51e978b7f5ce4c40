"""Memory that the machine really has, before a measurement begins."""

import os
from typing import Final

from mqmesh.units import MIB

LEVEL_BYTES: Final = 1_024 * MIB
"""More than any row's run takes, but those that are run only by name."""


def level_memory(scale: float) -> None:
    """Takes as much memory as a run may need, and gives it back at once.

    Under a hypervisor, memory that was free for some seconds may belong to the host again, and
    a page of it costs 12 µs instead of 2.5 where this was measured: up to half a processor, for
    both sides of a row, and by chance for one more than for the other. What was used a moment
    ago is there.

    Args:
        scale: Of the row; half of what is free is taken at most.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Not zeros: those would be promised only, not written.
    taken = bytearray(b"\1") * min(int(LEVEL_BYTES * scale), free // 2)
    del taken

"""Whether a worker is busy or waits. Pure."""

from typing import Final

BUSY_S: Final = 0.002
"""So much processor time tells."""
WINDOW_S: Final = 0.02
"""If there was less in so much time, that tells as well."""
WAITING_FACTOR: Final = 3
"""Who took more than so many times the processor time waits. A busy one waits, too, for a processor
and for the interpreter: on two processors with three busy processes it takes twice as long."""


class WorkerPace:
    """Tells listeners that compute from those that wait for a disk, a service or a lock.

    Side by side, the former are no faster: they share an interpreter. The latter are.

    Attributes:
        waits: What the last stretch of work says; True before the first one is over.
    """

    __slots__ = ("_cpu_s", "_took_s", "waits")

    def __init__(self) -> None:
        self.waits = True
        self._took_s = 0.0
        self._cpu_s = 0.0

    def note(self, took_s: float, cpu_s: float) -> None:
        """Takes note of a piece of work.

        Args:
            took_s: How long it took.
            cpu_s: Processor time of the worker's thread meanwhile.
        """
        self._took_s += took_s
        self._cpu_s += cpu_s
        if self._cpu_s >= BUSY_S or self._took_s >= WINDOW_S:
            self.waits = self._took_s > WAITING_FACTOR * self._cpu_s
            self._took_s = self._cpu_s = 0.0

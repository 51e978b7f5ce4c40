"""Changes that a master has stored, in memory until they are confirmed and in the rows."""

from collections import deque
from typing import Final

from mqmesh.roles.broker.features.tables.row_store import RowsStep
from mqmesh.units import MIB

SETTLE_AT: Final = 256
"""Changes that are written into the rows at once, at the end of a turn; fewer wait for a tick."""
MOST_UNSETTLED_BYTES: Final = 64 * MIB
"""Memory of changes that are not in the rows; with more the tables take none."""
_CHANGE_BYTES: Final = 500
"""Memory of a change beside its key and value."""
_MOST_WRITTEN: Final = 1_000
"""Changes of one write of rows; those of one batch stay together."""


class UnsettledChanges:
    """Queue of the changes that the store has and the rows do not have, in the order of the log.

    Each batch is a step. A table has the newest of its unsettled revisions of each key at hand, so
    that a write is compared with them.

    Attributes:
        count: Changes.
        size_bytes: Memory of the changes, about.
        carried_batches: Batches of carried messages.
    """

    def __init__(self) -> None:
        self._steps: deque[RowsStep] = deque()
        self.count = self.size_bytes = 0
        self.carried_batches = 0

    @property
    def first(self) -> RowsStep | None:
        """The oldest step, None if all changes are in the rows."""
        return self._steps[0] if self._steps else None

    def clear(self) -> None:
        """Forget all changes: the rows will get them from the log."""
        self._steps.clear()
        self.count = self.size_bytes = 0
        self.carried_batches = 0

    def add(self, step: RowsStep) -> None:
        """Add the changes of a stored batch."""
        self._steps.append(step)
        self._count(step, 1)
        if step.table is not None:
            for table, change in step.changes:
                table.newest[change.key] = (change.revision, step.end_offset)

    def has_confirmed(self, limit: int) -> bool:
        """Return whether a step ends at or before a commit-log offset."""
        return bool(self._steps) and self._steps[0].end_offset <= limit

    def confirmed(self, limit: int) -> list[RowsStep]:
        """Return the oldest steps that end at or before a commit-log offset, for one write."""
        found: list[RowsStep] = []
        changes = 0
        for step in self._steps:
            if step.end_offset > limit or changes >= _MOST_WRITTEN:
                break
            found.append(step)
            changes += len(step.changes)
        return found

    def remove(self, steps: list[RowsStep]) -> None:
        """Remove the oldest steps, which the rows have now."""
        for step in steps:
            self._steps.popleft()
            self._count(step, -1)
            if step.table is None:
                continue
            for table, change in step.changes:
                known = table.newest.get(change.key)
                if known is not None and known[0].revision == change.revision.revision:
                    del table.newest[change.key]

    def _count(self, step: RowsStep, sign: int) -> None:
        sizes = [_CHANGE_BYTES + len(one.key) + len(one.value) for _, one in step.changes]
        self.count += sign * len(sizes)
        self.size_bytes += sign * sum(sizes)
        self.carried_batches += sign * (step.table is None)

"""Delivery windows of all groups; kept in the log, see ``state_log``, as records of changes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from mqmesh.namespaces import namespace_of
from mqmesh.roles.broker.delivery_state.runs import NOBODY, Run, RunState, stretches
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow, HeldMessages, LeaseNumbers
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.state_log import PlannedChange
from mqmesh.roles.broker.state_records import DeliveryRecord, DeliveryRun
from mqmesh.units import QueueOffset

WindowKey = tuple[str, str, int]
"""Group, physical topic and queue id."""

MOST_RUNS_PER_RECORD: Final = 1_000
MOST_CHANGES: Final = 1_000
"""Changes of a window that are noted one by one; with more it is written as a whole."""


class Changes(msgspec.Struct):
    """Changes of a window that are not in the log yet.

    Attributes:
        previous_offset: ``next_offset`` in the log.
        is_whole: The window is written as a whole.
        spans: First offset and end of what changed.
        bits: Messages that changed, by the queue offset of bit 0.
        runs: Runs that have those of them that are open, and others that have none any more.
    """

    previous_offset: int
    is_whole: bool = False
    spans: dict[int, int] = {}
    bits: dict[int, int] = {}
    runs: dict[Run, None] = {}

    def cleared(self, floor: int) -> list[tuple[int, int]]:
        """Return the spans that changed, in order, those that touch as one; none before a floor."""
        spans = list(self.spans.items())
        for first, bits in self.bits.items():
            spans += [(low, low + count) for low, count in stretches(first, bits)]
        found: list[tuple[int, int]] = []
        for first, end in sorted(spans):
            low = max(first, floor)
            if low >= end:
                continue
            if found and low <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((low, end))
        return found


class DeliveryWindows:
    """Windows of all groups in all queues, and what of them is not in the log yet.

    The floor of a window is the committed offset of its group.

    Args:
        numbers: Numbers of leases.
        committed: Committed offsets of all groups.
        wall_offset_ms: Returns the wall clock minus the monotonic clock.

    Attributes:
        numbers: See above.
        changed: Of each window, what changed.
    """

    def __init__(
        self,
        numbers: LeaseNumbers,
        committed: CommittedOffsets,
        wall_offset_ms: Callable[[], int],
    ) -> None:
        self.numbers = numbers
        self.changed: dict[WindowKey, Changes] = {}
        self._committed = committed
        self._wall_offset_ms = wall_offset_ms
        self._windows: dict[WindowKey, DeliveryWindow] = {}
        self._of_group: dict[str, dict[WindowKey, DeliveryWindow]] = {}
        # By namespace; each as long as one of its windows is there.
        self._held: WeakValueDictionary[str, HeldMessages] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._windows)

    def find(self, key: WindowKey) -> DeliveryWindow | None:
        """Return a window, or None."""
        return self._windows.get(key)

    def of_group(self, group: str) -> dict[WindowKey, DeliveryWindow]:
        """Return the windows of a group; not to be changed."""
        return self._of_group.get(group, {})

    def unsettled_of(self, namespace: str) -> int:
        """Return messages that were handed out to groups of a namespace and are not settled."""
        held = self._held.get(namespace)
        return 0 if held is None else held.count

    def items(self) -> Iterable[tuple[WindowKey, DeliveryWindow]]:
        """Return all windows."""
        return self._windows.items()

    def begin(self, key: WindowKey, start: int) -> DeliveryWindow:
        """Make a window, which has none of the leases that an earlier one may have given out.

        Args:
            key: Of a queue in which the group has no window.
            start: Queue offset at which it begins.

        Raises:
            SystemBusy: There are too many committed offsets.
        """
        self._committed.commit(*key, QueueOffset(start))
        window = self._make(key, start)
        window.valid_from = self.numbers.last + 1
        self.changed[key] = Changes(start, True)
        return window

    def drop(self, key: WindowKey) -> None:
        """Forget a window: the committed offset of its group stays where it is."""
        window = self._forget(key)
        if window is not None:
            window.drop()
            self.changed[key] = Changes(0, True)

    def drop_group(self, group: str) -> None:
        """Forget the windows of a group."""
        for key in list(self.of_group(group)):
            self.drop(key)

    def drop_topic(self, topic: str) -> None:
        """Forget the windows in the queues of a topic."""
        for key in [key for key in self._windows if key[1] == topic]:
            self.drop(key)

    def resume(
        self, end_of: Callable[[str, int], int], now_ms: int, wall_ms: int, quiet_ms: int
    ) -> int:
        """Begin to serve, with what the log says.

        Args:
            end_of: Of a topic and queue, the offset behind its last message.
            now_ms: Monotonic clock.
            wall_ms: Wall clock.
            quiet_ms: Members have so long to show what they hold.

        Returns:
            Number of windows that ended behind the end of their queue, and end there now.
        """
        bounded = 0
        for (_, topic, queue_id), window in self._windows.items():
            bounded += window.bound(end_of(topic, queue_id))
            window.resume(now_ms, wall_ms, quiet_ms)
        return bounded

    # ---- The log ---------------------------------------------------------------------

    def state_keys(self) -> list[WindowKey]:
        """Keys of all windows."""
        return list(self._windows)

    def records_of(self, key: WindowKey) -> Iterator[DeliveryRecord]:
        """Yield the state records that say all of a window, which may not be there any more."""
        return self._records(key, Changes(0, True))

    def changes_of(self, key: WindowKey) -> Iterator[DeliveryRecord]:
        """Yield the state records of what has changed in a window."""
        return self._records(key, self.changed[key])

    def plan_settled(self, settled: Mapping[WindowKey, Mapping[Run, int]]) -> PlannedChange:
        """Return the change that settles messages.

        Args:
            settled: Messages, by run, from its first one on, of windows of which the log knows all.
        """

        def apply() -> None:
            for key, runs in settled.items():
                for run, bits in runs.items():
                    self._windows[key].settle(run, bits)
                del self.changed[key]

        return PlannedChange([self._settled(key, runs) for key, runs in settled.items()], apply)

    def _settled(self, key: WindowKey, settled: Mapping[Run, int]) -> DeliveryRecord:
        """Return the state record of messages that are settled, while they are not yet."""
        assert key not in self.changed
        window = self._windows[key]
        changes = Changes(window.next_offset, bits={run.first: 0 for run in settled})
        for run, bits in settled.items():
            changes.bits[run.first] |= bits
        floor = window.floor_without(settled)
        return DeliveryRecord(
            *key,
            floor,
            window.next_offset,
            window.valid_from,
            changes.cleared(floor),
            adds=True,
            previous_offset=window.next_offset,
        )

    def apply(self, record: DeliveryRecord) -> None:
        """Take over what a record says."""
        key = (record.group, record.topic, record.queue_id)
        floor = record.floor
        window = self._windows.get(key)
        # A change of a window that was begun anew since: the record of that is damaged.
        is_other = window is not None and window.valid_from != record.valid_from
        if window is not None and (floor is None or not record.adds or is_other):
            window.drop()
            self._forget(key)
            window = None
        if floor is None:
            return
        if window is None:
            window = self._make(key, floor)
        if record.adds:
            window.miss(record.previous_offset)
        window.valid_from = record.valid_from
        window.next_offset = window.noted_offset = record.next_offset
        for first, end in record.cleared:
            window.clear(first, end)
        for run in record.runs:
            bits = (1 << run.held) - 1 if isinstance(run.held, int) else _bits(run.held)
            if bits:
                window.restore(run.first, bits, run.attempt, run.due_ms, run.lease)
        window.clear_before(floor)
        self._committed.place(*key, QueueOffset(floor))

    def _records(self, key: WindowKey, changes: Changes) -> Iterator[DeliveryRecord]:
        group, topic, queue_id = key
        window = self._windows.get(key)
        if window is None:
            yield DeliveryRecord(group, topic, queue_id)
            return
        floor, adds = window.floor, not changes.is_whole
        assert floor >= 0  # else no later record could be read
        runs = [
            self._notify(window, run) for run in (changes.runs if adds else window.runs) if run.bits
        ]
        cleared = changes.cleared(floor) if adds else []
        previous_offset = changes.previous_offset if adds else 0
        for start in range(0, len(runs) or 1, MOST_RUNS_PER_RECORD):
            part = runs[start : start + MOST_RUNS_PER_RECORD]
            yield DeliveryRecord(
                group,
                topic,
                queue_id,
                floor,
                window.next_offset,
                window.valid_from,
                cleared if start == 0 else [],
                part,
                adds or start > 0,
                previous_offset,
            )
            previous_offset = window.next_offset

    def _notify(self, window: DeliveryWindow, run: Run) -> DeliveryRun:
        shift = run.low - run.first
        bits = run.bits >> shift
        size = bits.bit_length()
        is_whole = bits.bit_count() == size
        due_ms = 0
        if run.state is not RunState.LEASED and not window.is_resumed:
            due_ms = run.since_ms or 1  # see ``restore``
        elif run.state is not RunState.LEASED:
            # A reader of the record hands out messages that are due, or are sent back, at once.
            due_ms = run.until_ms + self._wall_offset_ms() if run.until_ms else 1
        return DeliveryRun(
            run.first + shift,
            size if is_whole else bits.to_bytes((size + 7) // 8, "little"),
            run.attempt,
            due_ms,
            run.noted or (run.lease if window.is_strict else NOBODY),
        )

    # ---- Helpers ---------------------------------------------------------------------

    def _make(self, key: WindowKey, start: int) -> DeliveryWindow:
        def note(first: int, end: int, bits: int, run: Run | None) -> None:
            self._note(key, window, first, end, bits, run)

        held = self._held.setdefault(namespace_of(key[0]), HeldMessages())
        window = DeliveryWindow(start, self.numbers, note, held)
        self._windows[key] = window
        self._of_group.setdefault(key[0], {})[key] = window
        return window

    def _forget(self, key: WindowKey) -> DeliveryWindow | None:
        window = self._windows.pop(key, None)
        if window is not None:
            of_group = self._of_group[key[0]]
            del of_group[key]
            if not of_group:
                del self._of_group[key[0]]
        return window

    def _note(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        first: int,
        end: int,
        bits: int,
        run: Run | None,
    ) -> None:
        self._committed.place(*key, QueueOffset(window.floor))
        changes = self.changed.get(key)
        if changes is None:
            changes = self.changed[key] = Changes(window.noted_offset)
        window.noted_offset = window.next_offset
        if changes.is_whole:
            return
        if run is not None:
            changes.runs[run] = None
        if bits < 0:
            changes.spans[first] = max(changes.spans.get(first, 0), end)
        else:
            changes.bits[first] = changes.bits.get(first, 0) | bits
        if max(len(changes.spans) + len(changes.bits), len(changes.runs)) > MOST_CHANGES:
            self.changed[key] = Changes(changes.previous_offset, True)


def _bits(data: bytes) -> int:
    return int.from_bytes(data, "little")

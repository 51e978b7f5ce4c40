"""Times of check-backs of half messages, and messages whose check-backs are used up. Pure.

Half messages of a producer group without members are not due until the group has a member again.
Messages are parked after ``check_max`` check-backs, and those of groups without members when too
many wait.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from mqmesh.protocol.request import Peer
from mqmesh.roles.broker.features.transactions.half_batches import HalfBatch

CHECK_BYTES_A_TICK: Final = 4 * 1024 * 1024
"""A producer that died with many open transactions must not make a flood of its checks."""
REJOIN_MS: Final = 1_000
"""Between looks whether groups without members have some again."""
PARKS_A_TICK: Final = 1_000
UNSWEPT: Final = 10_000

Members = Callable[[str], Sequence[Peer]]
"""Connections of the members of a producer group that are there."""


class TransactionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timings and limits; see ``BrokerConfig``."""

    timeout_ms: int = 6_000
    check_interval_ms: int = 30_000
    check_max: int = 15
    pending_max: int = 200_000
    parked_max: int = 10_000
    busy_retry_after_ms: int = 100


class Watch(msgspec.Struct, eq=False):
    """Messages of a half batch that are asked about together.

    Attributes:
        batch: Theirs.
        ordinals: Which ones.
        checks: How often they were asked about.
        due_ms: When they are next, monotonic.
        parking: They are being parked.
    """

    batch: HalfBatch
    ordinals: Sequence[int]
    checks: int
    due_ms: int
    parking: bool = False

    def __lt__(self, other: "Watch") -> bool:
        return self.due_ms < other.due_ms


class CheckedMessages(msgspec.Struct, frozen=True):
    """Check of consecutive messages of a batch, as the log has it.

    Attributes:
        first: Ordinal of the first one.
        count: How many.
        checks: How often they had been asked about by then.
        due_ms: When they are next, monotonic.
    """

    first: int
    count: int
    checks: int
    due_ms: int


class Check(msgspec.Struct, frozen=True):
    """Effect: ask a member of the group."""

    peer: Peer
    batch: HalfBatch
    ordinals: list[int]
    check_times: int


class Park(msgspec.Struct, frozen=True):
    """Effect: note that messages were asked about in vain, and copy them to where it is seen."""

    watch: Watch
    ordinals: list[int]

    @property
    def batch(self) -> HalfBatch:
        """Theirs."""
        return self.watch.batch

    @property
    def check_times(self) -> int:
        """Number of times that the messages were asked about."""
        return self.watch.checks


def joined_parks(parks: Iterable[Park]) -> list[Park]:
    """Return parks, of which those of one watch that are neighbours became one."""
    joined: list[Park] = []
    for park in parks:
        if joined and joined[-1].watch is park.watch:
            joined[-1].ordinals.extend(park.ordinals)
        else:
            joined.append(park)
    return joined


class CheckTimetable:
    """All watches of a broker.

    Args:
        settings: Timings and limits; others may take their place.
    """

    def __init__(self, settings: TransactionSettings) -> None:
        self.settings = settings
        self._watches: list[Watch] = []
        self._lonely: dict[str, list[Watch]] = {}
        self._rejoin_ms = self._parking = 0
        self._unswept = UNSWEPT

    def add(self, batch: HalfBatch, ordinals: Sequence[int], due_ms: int) -> None:
        """Messages were stored that are asked about from then on, monotonic."""
        heapq.heappush(self._watches, Watch(batch, ordinals, 0, due_ms))

    def tick(self, now_ms: int, members: Members, pending_count: int) -> list[Check | Park]:
        """Return what is due: checks of half messages, and messages to park after enough checks.

        Args:
            now_ms: Monotonic clock.
            members: Finds whom to ask.
            pending_count: Messages that nobody has decided about and that are not parked.

        Returns:
            Effects. A check counts only when somebody was there to be asked.
        """
        self._sweep()
        self._rejoin(now_ms, members)
        effects = self._crowded(now_ms, pending_count)
        size = 0
        peers_of: dict[str, Sequence[Peer]] = {}
        while self._watches and self._watches[0].due_ms <= now_ms and size < CHECK_BYTES_A_TICK:
            watch = heapq.heappop(self._watches)
            batch = watch.batch
            ordinals = batch.open_ordinals(watch.ordinals)
            if not ordinals:
                if batch.is_staged(watch.ordinals):
                    # A decision is being written; if that fails, check-backs go on.
                    self._push(watch, now_ms + self.settings.check_interval_ms)
                continue
            watch.ordinals = ordinals
            if watch.checks >= self.settings.check_max:
                if not watch.parking:
                    watch.parking = True
                    self._parking += len(ordinals)
                    size += batch.size
                    effects.append(Park(watch, ordinals))
                self._push(watch, now_ms + self.settings.check_interval_ms)
                continue
            peers = peers_of.get(batch.group)
            if peers is None:
                peers = peers_of[batch.group] = members(batch.group)
            if not peers:
                self._lonely.setdefault(batch.group, []).append(watch)
                continue
            # Another member each time: the last one may hang.
            peer = peers[(batch.base + watch.checks) % len(peers)]
            watch.checks += 1
            size += batch.size
            effects.append(Check(peer, batch, ordinals, watch.checks))
            self._push(watch, now_ms + self.settings.check_interval_ms)
        return effects

    def parked_or_not(self, park: Park, *, stored: bool) -> None:
        """Finish a park: it is in the log, or could not be written and is tried again."""
        self._parking -= len(park.ordinals)
        if not stored:
            park.watch.parking = False

    def replay(self, found: Mapping[int, Sequence[CheckedMessages]]) -> None:
        """Take over checks that were found in the log.

        Args:
            found: Check-backs of each batch, by queue offset.
        """
        for watch in self._watches:
            for one in found.get(watch.batch.base, ()):
                if one.checks > watch.checks and any(
                    one.first <= ordinal < one.first + one.count for ordinal in watch.ordinals
                ):
                    watch.checks, watch.due_ms = one.checks, one.due_ms
        heapq.heapify(self._watches)

    def watches(self) -> Iterator[Watch]:
        """Yield all watches with check-backs to come, in no order."""
        yield from self._watches
        for watches in self._lonely.values():
            yield from watches

    def _push(self, watch: Watch, due_ms: int) -> None:
        watch.due_ms = due_ms
        heapq.heappush(self._watches, watch)

    def _sweep(self) -> None:
        # Drop watches of ended batches: their immunity, or their group's absence, may be long.
        lonely = self._lonely.items()
        if len(self._watches) + sum(len(watches) for _, watches in lonely) > self._unswept:
            self._watches = [one for one in self._watches if one.batch.left]
            heapq.heapify(self._watches)
            left = [(name, [one for one in some if one.batch.left]) for name, some in lonely]
            self._lonely = {name: some for name, some in left if some}
            self._unswept = UNSWEPT + 2 * sum(1 for _ in self.watches())

    def _rejoin(self, now_ms: int, members: Members) -> None:
        # Transactions of a group without members are asked about as soon as it has one.
        if now_ms < self._rejoin_ms or not self._lonely:
            return
        self._rejoin_ms = now_ms + min(REJOIN_MS, self.settings.check_interval_ms)
        for group in [group for group in self._lonely if members(group)]:
            for watch in self._lonely.pop(group):
                self._push(watch, now_ms)

    def _crowded(self, now_ms: int, pending_count: int) -> list[Check | Park]:
        """Parks what waits for groups that nobody is in, so that it does not keep out others."""
        effects: list[Check | Park] = []
        excess = pending_count - self._parking - self.settings.pending_max // 2
        while excess > 0 and self._lonely and len(effects) < PARKS_A_TICK:
            group = next(iter(self._lonely))
            watch = self._lonely[group].pop(0)
            if not self._lonely[group]:
                del self._lonely[group]
            ordinals = watch.batch.open_ordinals(watch.ordinals)
            if not ordinals:
                continue
            watch.ordinals, watch.parking = ordinals, True
            excess -= len(ordinals)
            self._parking += len(ordinals)
            effects.append(Park(watch, ordinals))
            # Comes again only if it could not be parked.
            self._push(watch, now_ms + self.settings.check_interval_ms)
        return effects

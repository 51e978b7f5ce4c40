"""Records of messages that are acknowledged one by one, and how they are judged.

==== ==================================================================================
D1   what is settled was acknowledged or rejected, was sent back, or is not wanted
D2   nothing is delivered behind an answered acknowledgement
D3   nobody gets, and nobody but the holder settles, what a member holds whose lease goes on
D4   with order by key a message is leased only when all before it of its key are settled, or have
     the same lease, and settled only behind them, by the lease that has it; no member is given one
     behind one that it refused; and what may go out does not wait while a member waits
D5   a message is handed out as often as its group allows; each time counts as an attempt, also
     behind a failover, unless the member gave it back
D6   members hold no more than the group may, and what a window counts is what it has
==== ==================================================================================

The windows of the broker that serves are looked at all the time: who has what until when.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from harness.history import ACKED, RETURNED, Delivery, History, MessageKey
from harness.simulation.books import RECEIVE, UNWANTED, Books, key_of, tag_of
from harness.simulation.key_books import (
    JOBS,
    MAX_UNSETTLED,
    KeyBooks,
    Place,
    has_waiting,
    place_of,
)
from mqmesh.message import StoredMessage, retry_topic
from mqmesh.protocol.delivery import DeliveryMode, SettleAction
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.delivery_state.runs import NOBODY, Run
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import WindowKey

MAX_RETRIES: Final = 5
MOST_PENDING: Final = 100
"""Looks at what was handed out that wait until the log is safe so far."""


class Holder(msgspec.Struct, frozen=True):
    """Holder of a message, as its broker has it.

    Attributes:
        lease: Number of the lease.
        member: Client id.
        until_ms: End of the lease.
        epoch: Of the broker that was looked at.
        attempt: How often it was handed out.
    """

    lease: int
    member: str
    until_ms: int
    epoch: int
    attempt: int


class HandedOut(msgspec.Struct, frozen=True):
    """Message of which the log says that it was handed out.

    Attributes:
        last_lease: Number of the last lease of the broker then.
        attempt: How often it was handed out.
    """

    last_lease: int
    attempt: int


class DeliveryBooks(Books):
    """Everything that was seen of receives.

    Args:
        now_ms: The simulation's clock.
        serving: Returns the broker of a name that serves now; None if none does.
        dead: Returns the keys of all dead letters.
        in_order: The group goes by sharding keys.

    Attributes:
        in_order: See above.
        is_strict: Answered messages are safe.
    """

    def __init__(
        self,
        now_ms: Callable[[], float],
        serving: Callable[[str], BrokerFeatures | None],
        dead: Callable[[], set[MessageKey]],
        *,
        in_order: bool = False,
    ) -> None:
        super().__init__(now_ms, (JOBS,), {RECEIVE: (JOBS,)})
        self.in_order = in_order
        self.is_strict = True
        self._serving = serving
        self._dead = dead
        self._settled: dict[Place, int] = {}
        self._reported: set[Place] = set()
        self._given_up: dict[Place, int] = {}
        self._sent: dict[tuple[Place, int], Holder | None] = {}
        self._returned: Counter[Place] = Counter()
        self._given_back: set[tuple[Place, int]] = set()
        self._holders: dict[str, dict[Place, Holder]] = {}
        self._lives: dict[str, BrokerFeatures] = {}
        self._pending: dict[str, list[tuple[int, dict[Place, HandedOut]]]] = {}
        self._safe: dict[Place, HandedOut] = {}
        # Of each message the leases by which a caller got it, with the attempt of each.
        self._got: dict[Place, dict[int, int]] = {}
        self._judged: dict[tuple[str, WindowKey], set[int]] = {}
        self._unexplained: dict[Place, None] = {}
        self._leaving: set[str] = set()
        self._order = KeyBooks(
            in_order, now_ms, lambda what: self._wrong("D4", what), self._given_up
        )

    @property
    def delivery(self) -> DeliveryMode:
        """Mode of the group."""
        return DeliveryMode.FIFO if self.in_order else DeliveryMode.MESSAGE

    # ---- Members ---------------------------------------------------------------------

    def received(self, message: StoredMessage, consumer: str) -> None:
        """Notes that a member got a message."""
        place, info = place_of(message), message.info
        if message.reconsume_times == 0 and info.topic == JOBS:
            self.delivered(RECEIVE, message, consumer)
        if message.tag == UNWANTED:
            self._wrong("D1", f"{place} was delivered, and nobody wants it")
        if not self.is_strict:
            return
        lease = info.fencing_token
        before = self._order.received(message, place)
        if lease > self._settled.get(place, lease):
            self._wrong("D2", f"{place} was delivered by lease {lease:x} after it was settled")
        holder = self._holder(place)
        if (
            holder is not None
            and lease > holder.lease
            and lease >> 32 == holder.epoch
            and holder.until_ms >= self._now_ms()
            # That lease or a later one; it may have had several since the last look.
            and self._given_up.get(place, NOBODY) < holder.lease
            # Messages behind one that was given up are taken back.
            and not any(self._given_up.get(one, NOBODY) >= holder.lease for one in before)
        ):
            self._wrong(
                "D3", f"{place} was delivered by lease {lease:x}, and {holder} had it still"
            )
        for other, attempt in self._got.get(place, {}).items():
            if info.attempt <= attempt and self._counts(place, other, attempt, lease, before):
                self._wrong(
                    "D5",
                    f"attempt {info.attempt} of {place} by lease {lease:x} follows attempt "
                    f"{attempt} by lease {other:x}",
                )
        self._got.setdefault(place, {})[lease] = info.attempt
        if info.attempt > MAX_RETRIES + 1 + len(self.kills_ms) + self._returned[place]:
            self._wrong("D5", f"attempt {info.attempt} of {place}")

    def _counts(
        self, place: Place, other: int, attempt: int, lease: int, before: list[Place]
    ) -> bool:
        """Returns whether an attempt by another lease counts when a message is delivered."""
        safe = self._safe.get(place)
        # A new master does not know changes that the log does not have yet.
        is_safe = safe is not None and other <= safe.last_lease < lease and attempt <= safe.attempt
        return (
            other < lease
            and (other >> 32 == lease >> 32 or is_safe)
            and (place, other) not in self._given_back
            # With order by key brokers take back what is behind a refusal, and no attempt counts.
            and not any(self._given_up.get(one, NOBODY) >= other for one in before)
        )

    def reports(self, message: StoredMessage, action: SettleAction) -> None:
        """Notes that a member is about to report on a message."""
        place, lease = place_of(message), message.info.fencing_token
        key = key_of(message.body)
        if action in (SettleAction.NACK, SettleAction.REJECT):
            self._given_up[place] = lease
        if action != SettleAction.EXTEND:
            self._reported.add(place)
        self._order.reports(place, lease, action, self._serving(place[0]))
        if action == SettleAction.ACK:
            self.done[RECEIVE].add(key)
            self._sent[place, lease] = self._holder(place)

    def gives_back(self, place: Place, lease: int) -> None:
        """Notes that a member is about to give back a message, as if it had never had it."""
        self._given_up[place] = max(self._given_up.get(place, NOBODY), lease)
        self._given_back.add((place, lease))
        self._returned[place] += 1

    def leaves(self, member: str) -> None:
        """Notes that a member gives back all that it holds."""
        self._leaving.add(member)
        for holders in self._holders.values():
            for place, holder in holders.items():
                if holder.member == member:
                    self._given_up[place] = holder.lease

    def answered(
        self, message: StoredMessage, action: SettleAction, error: BaseException | None
    ) -> None:
        """Notes the answer to a report."""
        place, lease = place_of(message), message.info.fencing_token
        before = self._sent.get((place, lease))
        if error is not None or action not in (SettleAction.ACK, SettleAction.REJECT):
            return
        broker = self._serving(place[0])
        if action == SettleAction.ACK and self.is_strict:
            self._order.acknowledged(place, lease, broker)
        known = self._lives.get(place[0])
        if broker is not None:
            self._settled[place] = broker.state.windows.numbers.last
        elif known is not None:
            self._settled[place] = (known.core.epoch + 1) << 32
        holder = self._holder(place)
        if (
            before is not None
            and before == holder
            and holder.lease > lease
            and holder.until_ms >= self._now_ms()
            and self._given_up.get(place) != holder.lease
            and (place, holder.lease) not in self._sent
            and self.is_strict
        ):
            self._wrong("D3", f"{place} was settled by lease {lease:x}, and {holder} had it")

    def _holder(self, place: Place) -> Holder | None:
        return self._holders.get(place[0], {}).get(place)

    def _wrong(self, name: str, what: str) -> None:
        self.wrong[name].append(f"{what}, at {self._now_ms():.0f} ms")

    # ---- Brokers ---------------------------------------------------------------------

    def look(self, name: str, *, is_awake: bool = True) -> None:
        """Looks at the windows of a broker.

        Args:
            name: Its name.
            is_awake: Its process does not stand still.
        """
        broker = self._serving(name)
        if broker is None or not self.is_strict:
            self._holders.pop(name, None)
            return
        if self._lives.get(name) is not broker:
            self._lives[name] = broker
            self._pending[name] = []
        windows = broker.state.windows
        holders: dict[Place, Holder] = {}
        handed: dict[Place, HandedOut] = {}
        free: list[Place] = []
        for key, window in windows.items():
            open_ = self._look_at(name, broker, key, window, holders)
            free += self._order.look(name, broker, key, window, open_)
            if key not in windows.changed:
                handed.update(
                    (place, HandedOut(windows.numbers.last, run.attempt))
                    for place, run in open_.items()
                    if run.member not in self._leaving
                )
        self._holders[name] = holders
        self._order.look_at_free(name, free if is_awake and has_waiting(broker) else [])
        if sum(len(one.runs) for _, one in windows.items()) != windows.numbers.runs:
            self._wrong("D6", f"{name} counts {windows.numbers.runs} leases")
        pending = self._pending[name]
        pending.append((int(broker.core.store.stats().max_commitlog_offset), handed))
        del pending[:-MOST_PENDING]
        while pending and broker.core.commit_point.is_safe(pending[0][0]):
            self._safe.update(pending.pop(0)[1])

    def _look_at(
        self,
        name: str,
        broker: BrokerFeatures,
        key: WindowKey,
        window: DeliveryWindow,
        holders: dict[Place, Holder],
    ) -> dict[Place, Run]:
        """Judges a window; returns its messages that are not settled, and adds who has them."""
        group, topic, queue_id = key
        members = broker.state.groups.find(group)
        connected = set() if members is None else set(members.members) - self._leaving
        open_: dict[Place, Run] = {}
        own, numbers = 0, broker.state.windows.numbers
        for place, run in _open_of(name, key, window):
            own += run.lease > numbers.first
            if place in open_:
                self._wrong("D6", f"{place} stands in two leases")
            open_[place] = run
            if run.lease != NOBODY and run.member in connected:
                holders[place] = Holder(
                    run.lease, run.member, run.until_ms, broker.core.epoch, run.attempt
                )
        if len(open_) != window.unsettled:
            self._wrong("D6", f"{key} of {name} has {len(open_)} open, counts {window.unsettled}")
        # A new master takes over what its log does not know, too, when members show it.
        held = window.unsettled - window.passed * self.in_order
        if own > MAX_UNSETTLED or held > 2 * MAX_UNSETTLED:
            self._wrong("D6", f"{key} of {name} has {held} given out, {own} of them by itself")
        offsets = {place[-1] for place in open_}
        floor = min([*offsets, window.next_offset])
        committed = broker.state.committed.query(group, topic, queue_id)
        if not floor == window.floor == committed:
            self._wrong("D6", f"{key} of {name}: floor {window.floor}, {committed} not {floor}")
        judged = self._judged.setdefault((name, key), set())
        for offset in set(range(window.next_offset)) - offsets - judged:
            judged.add(offset)
            place = (name, topic, queue_id, offset)
            if place not in self._reported:
                self._unexplained[place] = None
        return open_

    # ---- In the end --------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Implement ``Books.missing``: all that is wanted is done, or a dead letter."""
        over = self.done[RECEIVE] | self._dead()
        left = [key for key in self._expected(JOBS) if key not in over and _is_wanted(key)]
        return [f"{len(left)} of {JOBS} for {RECEIVE}, as {left[0]}"] if left else []

    def judge_settled(self, names: dict[Place, MessageKey]) -> None:
        """Judges what was settled without a report.

        Args:
            names: Keys of all stored messages, those of retries, too.
        """
        dead = self._dead()
        for place in self._unexplained:
            key = names.get(place)
            if key is None or place in self._reported or key in dead:
                continue
            if _is_wanted(key) or place[1] == retry_topic(RECEIVE):
                self._wrong("D1", f"{place}, {key}, was settled, and nobody did that")

    def _history(self, group: str, topic: str, stored: list[Delivery]) -> History:
        history = super()._history(group, topic, stored)
        history.attempts = [
            replace(one, outcome=RETURNED)
            if one.outcome == ACKED and not _is_wanted((one.producer, one.number))
            else one
            for one in history.attempts
        ]
        return history


def _is_wanted(key: MessageKey) -> bool:
    return tag_of(key[1]) != UNWANTED


def _open_of(name: str, key: WindowKey, window: DeliveryWindow) -> Iterator[tuple[Place, Run]]:
    for run in window.runs:
        bits, offset = run.bits, run.first
        while bits:
            if bits & 1:
                yield (name, key[1], key[2], offset), run
            bits >>= 1
            offset += 1

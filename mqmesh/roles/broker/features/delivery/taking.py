"""Leases of messages for one receive: what waits in a window first, then what is new."""

import logging
from typing import Final

from mqmesh.errors import CorruptRecord, MQMeshError
from mqmesh.message import retry_topic
from mqmesh.protocol.delivery import MAX_RECEIVED, DeliveryMode, MessageLease
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.pulling import MAX_PULL_BYTES
from mqmesh.roles.broker.delivery_state.key_order import KeyOrder
from mqmesh.roles.broker.delivery_state.runs import MAX_RUN, Run
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows, WindowKey
from mqmesh.roles.broker.features.delivery.lease_reader import Expiry, LeaseReader, Piece, Read
from mqmesh.roles.broker.features.delivery.receive_hold import HeldReceive
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls

MAX_PASSED: Final = 10_000
"""Messages of a queue that wait for others of their keys; beyond, it is held up."""
LEAST_ADMITTED: Final = 64
"""Messages that are let in at a time, with order by key, if there are as many."""
NOT_READ_MS: Final = 1_000
"""A message that could not be read is handed out again after so long."""

_log = logging.getLogger(__name__)


class Taking:
    """Leases that are taken for one receive.

    Attributes:
        leases: Taken so far.
        taken: Their windows and numbers.
        pieces: Batches of their messages.
        size: Bytes of the pieces.
        messages: Messages taken.
        redelivered: Messages that were handed out before.
        counted, counted_bytes: Messages and bytes since they were counted for a topic.
        passed: Messages were passed over, and there may be more behind them.
        expired: Messages that no member gets, since they have expired.
        buried: Those of them that become dead letters.
    """

    def __init__(
        self,
        reader: LeaseReader,
        windows: DeliveryWindows,
        by_group: GroupPulls,
        held: HeldReceive,
        most: int,
        lease_ms: int,
        max_unsettled: int,
        max_bytes: int,
        now_ms: int,
    ) -> None:
        self.leases: list[MessageLease] = []
        self.taken: list[tuple[WindowKey, int]] = []
        self.pieces: list[Piece] = []
        self.size = self.messages = self.redelivered = self.counted = self.counted_bytes = 0
        self.passed = False
        self.expired = 0
        self.buried: list[tuple[WindowKey, DeliveryWindow, Run]] = []
        self._reader = reader
        self._numbers = windows.numbers
        self._by_group = by_group
        self._held = held
        self._most = most
        self._lease_ms = lease_ms
        self._max_unsettled = max_unsettled
        self._max_bytes = max_bytes
        self._now_ms = now_ms

    @property
    def is_full(self) -> bool:
        """True when nothing more may be taken."""
        return (
            self.messages >= self._most
            or self.size >= self._max_bytes
            or len(self.leases) >= MAX_RECEIVED
            or self._numbers.is_full
            or bool(self.buried)  # one batch a turn: each is written anew
        )

    @property
    def has_enough(self) -> bool:
        """True when no other queue is looked at for the few messages that may be missing."""
        return self.messages >= self._most - self._most // 8 or self.is_full

    def take(
        self, key: WindowKey, window: DeliveryWindow, is_retry: bool, expiry: Expiry | None
    ) -> None:
        """Take what waits in a window, then what is new."""
        if window.order is not None:
            self._take_in_order(key, window, window.order, expiry)
            return
        while not self.is_full and (run := window.due()) is not None:
            found = self._read_again(key, window, run, run.bits, expiry)
            if found is not None and found.bits:
                self._hand_out_again(key, window, run, found, is_retry)
            elif found is not None and not found.gone:
                break  # not to be seen yet
        while not self.is_full and window.unsettled < self._max_unsettled:
            if not self._take_new(key, window, is_retry, expiry):
                break

    def _take_new(
        self, key: WindowKey, window: DeliveryWindow, is_retry: bool, expiry: Expiry | None
    ) -> bool:
        """Take the next messages of a queue; False where others have their turn now."""
        most, max_bytes = self._left()
        start = window.next_offset
        found = self._reader.read_new(
            key[1:],
            start,
            min(most, self._max_unsettled - window.unsettled),
            max_bytes,
            None if is_retry else self._held.filter,
            least=(self._most + 1) // 2 - self.messages,
            verify=self._held.wanted.verify,
            expiry=expiry,
        )
        self.expired += found.expired
        if found.end <= start:
            return False  # nothing new; where the store knows less than the log, all stays
        lease = (self._held.wanted.member, self._now_ms, self._lease_ms)
        if found.first > start:
            window.hand_out(found.first, 0, *lease)
        run = window.hand_out(found.end, found.bits, *lease)
        if run is None:
            # A filter may pass over all of a long queue.
            self.passed = True
            return False
        self._note(key, window, run, found, is_retry)
        return True

    def take_again(
        self, key: WindowKey, window: DeliveryWindow | None, lease: int, expiry: Expiry
    ) -> None:
        """Take what is left of a lease whose answer was lost."""
        run = None if window is None else window.held(lease)
        if window is not None and run is not None and run.member == self._held.wanted.member:
            found = self._reader.read_again(
                key[1:], run.first, run.bits, MAX_RUN, MAX_PULL_BYTES, expiry=expiry
            )
            if found.bits:
                self._note(key, window, run, found, key[1] == self._held.topics[1])

    def _take_in_order(
        self, key: WindowKey, window: DeliveryWindow, order: KeyOrder, expiry: Expiry | None
    ) -> None:
        """Take the first messages of their keys, and let in new ones until there are enough."""
        is_open = True
        while is_open and not self.is_full:
            most = self._left()[0]
            free: dict[Run, int] = {}
            if window.unsettled - window.passed >= self._max_unsettled:
                window.free_stuck()
            count = window.take_free(most, free, only_again=True)
            # The others are new to the group, which may hold so many.
            most = min(most, count + self._max_unsettled - (window.unsettled - window.passed))
            try:
                if count < most and window.passed < 2 * most:
                    self._admit(key, window, order)  # so that several of a key go together
                count += window.take_free(most - count, free)
                # All that there is at once: each run is a lease by itself.
                while count < most and self._admit(key, window, order):
                    count += window.take_free(most - count, free)
            except MQMeshError:
                # Messages that were read before the error go out.
                window.take_free(most - count, free)
                if not free:
                    raise
            if not free:
                return
            for run, bits in free.items():
                is_open = self._take_free(key, window, run, bits, expiry) and is_open

    def _take_free(
        self, key: WindowKey, window: DeliveryWindow, run: Run, bits: int, expiry: Expiry | None
    ) -> bool:
        """Take messages that are free; False if not all could be read."""
        found = Read(run.first, run.first)
        if not self.is_full:
            again = self._read_again(key, window, run, bits, expiry)
            if again is None:
                return True
            found = again
        left = bits & ~found.bits & ~found.gone
        # A filter may pass over them slowly: others have their turn first.
        self.passed = self.passed or bool(left and found.gone)
        if found.bits:
            self._hand_out_again(key, window, run, found, is_retry=False)
        window.offer(run, left)
        return not left

    def _read_again(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        run: Run,
        bits: int,
        expiry: Expiry | None,
    ) -> Read | None:
        """Read messages of a run that waits; None if they are damaged, and wait on."""
        is_retry = key[1] == self._held.topics[1]
        wanted = None if run.passed_filter or is_retry else self._held.filter
        try:
            found = self._reader.read_again(
                key[1:],
                run.first,
                bits,
                *self._left(),
                wanted=wanted,
                verify=self._held.wanted.verify,
                expiry=expiry,
            )
        except CorruptRecord as error:
            _log.error("messages of group %s cannot be handed out: %s", key[0], error)
            window.leave(run)
            window.wait(run, self._now_ms + NOT_READ_MS)
            return None
        if found.gone:
            window.settle(run, found.gone)
        self.expired += found.expired
        return found

    def _hand_out_again(
        self, key: WindowKey, window: DeliveryWindow, run: Run, found: Read, is_retry: bool
    ) -> None:
        """Lease messages of a run that waited."""
        if run.attempt and not found.is_expired:
            self.redelivered += found.bits.bit_count()
        leased = window.hand_out_again(
            run, found.bits, self._held.wanted.member, self._now_ms, self._lease_ms
        )
        self._note(key, window, leased, found, is_retry)

    def _admit(self, key: WindowKey, window: DeliveryWindow, order: KeyOrder) -> bool:
        """Let new messages wait for their turn; False if there are none, or no more may wait."""
        most = min(max(2 * self._left()[0], LEAST_ADMITTED), MAX_PASSED - window.passed)
        if most <= 0:
            return False
        start = window.next_offset
        some, end = order.take_ahead(start, most, MAX_RUN)
        if not some:
            keys, end = self._reader.read_keys(
                key[1:],
                start,
                self._left()[1],
                self._held.filter,
                verify=self._held.wanted.verify,
            )
            if end <= start:
                return False
            order.read(keys, end)
            if keys:
                some, end = order.take_ahead(start, most, MAX_RUN)
        window.admit(end, some)
        # A filter may pass over all of a long queue: others have their turn first.
        self.passed = self.passed or not some
        return bool(some)

    def _left(self) -> tuple[int, int]:
        return self._most - self.messages, self._max_bytes - self.size

    def _note(
        self, key: WindowKey, window: DeliveryWindow, run: Run, found: Read, is_retry: bool
    ) -> None:
        """Add a lease to the answer, or to what is buried."""
        if found.is_expired:
            self.buried.append((key, window, run))
            self.expired += run.count
            self.passed = True
            return
        self.taken.append((key, run.lease))
        self.leases.append(
            MessageLease(
                run.lease,
                key[2],
                run.first,
                run.end,
                found.bits.bit_count(),
                run.attempt,
                max(run.until_ms - self._now_ms, 0),
                is_retry,
            )
        )
        self.pieces += found.pieces
        self.size += found.size
        self.messages += run.count
        self.counted += run.count
        self.counted_bytes += found.size
        self._by_group.note(*key, run.end, run.count, found.size, self._now_ms)


def follow_mode(
    key: WindowKey, window: DeliveryWindow, config: GroupConfig, reader: LeaseReader
) -> None:
    """Have a window follow the mode of its group; after a restart the keys are read anew."""
    window.is_strict = is_ordered(config, key)
    if window.is_strict and window.order is None:
        offsets = (offset for run in window.runs for offset in run.offsets())
        window.begin_order(reader.keys_of(key[1:], offsets))
    elif window.order is not None and not window.is_strict:
        window.end_order()


def is_ordered(config: GroupConfig, key: WindowKey) -> bool:
    """Return whether messages of a queue go out to a group in the order of their keys."""
    group, topic, _ = key
    return config.delivery == DeliveryMode.FIFO and topic != retry_topic(group)


def is_blocked(window: DeliveryWindow) -> bool:
    """Return whether one key holds up a queue: no more messages may wait for others of theirs."""
    return window.order is not None and window.passed >= MAX_PASSED and window.due() is None

"""Answers on their way to the peers of a ROUTER: counted, kept while they wait, or given up."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import zmq

from mqmesh.errors import SystemBusy
from mqmesh.transport.interface import ServerLimits, Timer
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.loop import EventLoop
from mqmesh.transport.zmq.memory_accounting import MARK_BYTES, Mark, PeerMemory, room_of_one
from mqmesh.units import KIB, MIB

BUSY_RETRY_AFTER_MS: Final = 100
RETRY_MS: Final = 10
"""Interval at which waiting answers are tried again."""
SWEEP_MS: Final = 10
"""Shortest time between two updates of all accounts, each of which precedes a refusal."""
HEAD_BYTES: Final = 1 * KIB
"""Bytes of an answer beside its body."""
LEAST_ROOM_BYTES: Final = 1 * MIB
"""Bytes that a peer without held answers may have, if any peer may have some."""

MOST_UNTAKEN_MS: Final = 60_000
"""Time after which a peer that does not take a marked frame is reported: the frame may be a view of
a removed file, whose room on the disk is freed only when the frame has left."""
UNTAKEN_EVERY_MS: Final = 5_000

_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_SNDMORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class PeerOutbox:
    """Sends frames to peers, and counts the bytes that are held for each.

    Args:
        socket: The ROUTER.
        loop: Event loop of the socket.
        limits: Limits for the peers.
        accounts: Accounts of living peers, by routing id.
        on_excess: Called soon after the held bytes exceeded the budget of all peers.
        on_deaf: Called soon with a peer that does not read: an answer for it was dropped, or one
            was not taken for ``MOST_UNTAKEN_MS``.

    Attributes:
        accounts: As given.
        held: Bytes held for all of them.
        dropped: Answers that were dropped because their peer was gone, or did not read.
    """

    def __init__(
        self,
        socket: sockets.Socket,
        loop: EventLoop,
        limits: ServerLimits,
        accounts: Mapping[bytes, PeerMemory],
        *,
        on_excess: Callable[[], None],
        on_deaf: Callable[[PeerMemory], None],
    ) -> None:
        self._socket = socket
        self._loop = loop
        self._limits = limits
        self._most_room = max(room_of_one(0, limits) - HEAD_BYTES, LEAST_ROOM_BYTES)
        self._on_excess = on_excess
        self._on_deaf = on_deaf
        self._waiting: dict[PeerMemory, None] = {}
        self._deaf: set[PeerMemory] = set()
        self._excess_reported = False
        self._swept_ms = 0
        self._retry: Timer | None = None
        self._untaken: Timer | None = None
        self.accounts = accounts
        self.held = 0
        self.dropped = 0

    def forget(self, account: PeerMemory) -> None:
        """Forget a lost peer, and the answers that were held for it."""
        self._waiting.pop(account, None)
        self._deaf.discard(account)
        self.held -= account.clear()

    def close(self) -> None:
        """Stops all planned work."""
        for timer in (self._retry, self._untaken):
            if timer is not None:
                timer.cancel()

    def has_room(self, account: PeerMemory, size: int) -> bool:
        """Return True if a large answer may be held: one a peer, within the budget of all."""
        if account.held:
            self.held -= account.sweep()
        if self._fits(account, size):
            return True
        self._look_again()
        return self._fits(account, size)

    def room(self, account: PeerMemory) -> int:
        """Return the bytes that an answer's body may have; 0 or less if there is no room."""
        if not self.held:
            return self._most_room  # nearly always
        if account.held:
            self.held -= account.sweep()
        room = self._room(account)
        if room < LEAST_ROOM_BYTES:
            self._look_again()
            room = self._room(account)
        return room

    def _room(self, account: PeerMemory) -> int:
        room = room_of_one(self.held, self._limits) - HEAD_BYTES
        if account.held:
            return room - account.held
        # One answer may be held for any peer, within the budget of all.
        return max(room, LEAST_ROOM_BYTES) if self._fits(account, 0) else 0

    def _look_again(self) -> None:
        now_ms = self._loop.clock.monotonic_ms()
        if now_ms - self._swept_ms >= SWEEP_MS:
            self._swept_ms = now_ms
            self.sweep()
        if self.held > self._limits.max_total_pending_bytes:
            self._report_excess()

    def _fits(self, account: PeerMemory, size: int) -> bool:
        if not account.held:
            return self.held <= self._limits.max_total_pending_bytes
        return account.held + size <= room_of_one(self.held, self._limits)

    def sweep(self) -> None:
        """Forgets frames that have left, so that ``held`` is exact."""
        for account in self.accounts.values():
            if account.in_zmq:
                self.held -= account.sweep()

    def send(self, account: PeerMemory, *frames: bytes | memoryview) -> None:
        """Sends a message, now or when the peer can take it; drops it if the peer is gone.

        Args:
            account: The receiver.
            frames: The message. If it has to wait, it becomes a single frame.
        """
        if account.is_gone:
            self.dropped += 1
        elif account.frames or not self._hand_over(account, frames):
            self._keep(account, b"".join(frames))

    def probe(self, peer: bytes, frame: bytes) -> Mark | None:
        """Sends a peer a frame; returns its tracker, or None if the frame would have to wait."""
        account = self.accounts.get(peer)
        if account is None or account.frames:
            return None
        self._loop.touch(self._socket)
        try:
            self._socket.send(peer, _NOBLOCK_SNDMORE)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return None
        account.loose += len(frame)
        return self._socket.send(frame, _NOBLOCK, copy=False, track=True)

    def send_to_unknown(self, peer: bytes, frame: bytes) -> None:
        """Sends a frame to a peer without an account, or drops it."""
        try:
            self._loop.touch(self._socket)
            self._socket.send(peer, _NOBLOCK_SNDMORE)
            self._socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.dropped += 1

    def no_room(self, account: PeerMemory) -> SystemBusy:
        """Return the error for a peer that reads too slowly, or whose neighbours do."""
        limits = self._limits
        return SystemBusy(
            f"{account.held} bytes of answers wait for this client, {self.held} for all "
            f"(max_pending_bytes = {limits.max_pending_bytes}, "
            f"max_total_pending_bytes = {limits.max_total_pending_bytes}); read them first",
            retry_after_ms=BUSY_RETRY_AFTER_MS,
        )

    def _hand_over(self, account: PeerMemory, frames: Sequence[bytes | memoryview]) -> bool:
        size = sum(map(len, frames))
        if account.loose + size >= MARK_BYTES and account.held > self._limits.max_pending_bytes:
            self.held -= account.sweep()
            if account.in_zmq and account.held > self._limits.max_pending_bytes:
                return False
        try:
            self._loop.touch(self._socket)
            self._socket.send(account.id, _NOBLOCK_SNDMORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.dropped += 1  # the peer is gone: its request has a deadline of its own
            return True
        # A peer that has room for the first frame has room for all of a message.
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            flags = _NOBLOCK if number == last else _NOBLOCK_SNDMORE
            if account.loose + len(frame) < MARK_BYTES:
                self._socket.send(frame, flags)
                account.loose += len(frame)
            else:
                mark = self._socket.send(frame, flags, copy=False, track=True)
                self._hold(account.mark(mark, len(frame), self._loop.clock.monotonic_ms()))
                if self._untaken is None:
                    self._untaken = self._loop.call_later(UNTAKEN_EVERY_MS, self._report_untaken)
        return True

    def _report_untaken(self) -> None:
        """Reports peers that leave a frame untaken for too long."""
        self._untaken = None
        self.sweep()
        now_ms = self._loop.clock.monotonic_ms()
        waiting = False
        for account in list(self.accounts.values()):
            since_ms = account.waiting_since_ms
            if since_ms is not None:
                waiting = True
                if now_ms - since_ms >= MOST_UNTAKEN_MS:
                    self._on_deaf(account)
        if waiting:
            self._untaken = self._loop.call_later(UNTAKEN_EVERY_MS, self._report_untaken)

    def _keep(self, account: PeerMemory, frame: bytes) -> None:
        if account.held + len(frame) > 2 * self._limits.max_pending_bytes:
            self.dropped += 1
            if account not in self._deaf:
                self._deaf.add(account)
                self._loop.call_later(0, partial(self._on_deaf, account))
            return
        account.keep(frame)
        self._waiting[account] = None
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_MS, self._flush)
        self._hold(len(frame))

    def _hold(self, size: int) -> None:
        self.held += size
        if self.held > self._limits.max_total_pending_bytes:
            self._report_excess()

    def _report_excess(self) -> None:
        # Not at once: the sender may be in the middle of its work.
        if not self._excess_reported:
            self._excess_reported = True
            self._loop.call_later(0, self._excess)

    def _excess(self) -> None:
        self._excess_reported = False
        self._on_excess()

    def _flush(self) -> None:
        self._retry = None
        for account in list(self._waiting):
            while account.frames and self._hand_over(account, [account.frames[0]]):
                self.held -= account.release()
            if not account.frames:
                self._waiting.pop(account, None)
        if self._waiting:
            self._retry = self._loop.call_later(RETRY_MS, self._flush)

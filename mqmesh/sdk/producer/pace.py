"""Pace of senders, which share one interpreter with the client loop."""

from typing import Final

from mqmesh.sdk.client.outbox import Turns
from mqmesh.transport.interface import Transport

MAX_REQUEST_BYTES: Final = 512 * 1024
"""A request takes no further batch beyond it. With more, one request would take all that is ready,
and the broker would have nothing to do from its answer to the next one."""
GIVE_WAY_BYTES: Final = 256 * 1024
"""Bytes of single messages ahead of the client loop after which a sender gives way to it. With
less, requests get smaller than they need to be."""
GIVE_WAY_BATCH_BYTES: Final = 2 * MAX_REQUEST_BYTES
"""The same of batches that senders make, which come to the client loop encoded."""
GIVE_WAY_MESSAGES: Final = 512
"""Single messages of a batch after which it is seen whether that is due; a power of two."""
GIVE_WAY_S: Final = 0.001


class SendPace(Turns):
    """Pace of senders against the client loop, so that both get the interpreter.

    Args:
        transport: The client's.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._loop = transport.loop
        self._ahead_bytes = 0
        self._turns = 0
        self._turned = transport.flag()
        self._turned.set()
        self._loop.at_tick_end(self._on_turn)

    def end(self) -> None:
        """Mark the pump as ended; nothing is ahead of it any more."""
        super().end()
        self._ahead_bytes = 0

    def give_way(self, size: int, most_ahead: int = GIVE_WAY_BYTES) -> None:
        """Lets the client loop have the interpreter when it needs it; from any thread.

        A thread that makes messages without a pause keeps the interpreter for 5 ms at a time,
        in which the client loop can neither send what there is nor see an answer, and the
        broker has nothing to do. So a caller that finds it in the middle of its work waits until
        its turn is over, or for ``GIVE_WAY_S`` at most; a caller ahead of it by ``most_ahead`` also
        if there is work that it has not begun. It never waits for the broker.

        Args:
            size: Bytes that were added to the buffer since the last call, about.
            most_ahead: ``GIVE_WAY_BYTES``, or ``GIVE_WAY_BATCH_BYTES`` for batches.
        """
        self._ahead_bytes += size
        loop = self._loop
        if loop.in_loop_thread:
            return
        turns = self._turns
        is_ahead = self._ahead_bytes >= most_ahead
        if self.pumping or (is_ahead and (self.planned or loop.has_news())):
            self._turned.clear()
            # It may have ended its turn since it was looked at.
            if self._turns == turns:
                self._turned.wait(GIVE_WAY_S)

    def _on_turn(self) -> None:
        self._turns += 1
        if not self._turned.is_set():
            self._turned.set()

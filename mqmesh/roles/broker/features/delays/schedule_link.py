"""Link of a broker to its schedule service: the service's session, and open cancellations.

Pure: handlers report events to it, and carry out its answers.
"""

import itertools
from typing import Final

import msgspec

from mqmesh.errors import BrokerNotAvailable
from mqmesh.log_identity import first_number
from mqmesh.protocol.request import Peer, PendingReply
from mqmesh.roles.broker.features.delays.opened_batches import OpenedBatches
from mqmesh.roles.broker.group_state.retry_board import RetryBoard
from mqmesh.storage.interface import BatchToPut, PutResult

CANCEL_TIMEOUT_MS: Final = 3_000
MAX_CANCELS: Final = 10_000
"""Cancellations that wait for the service at a time."""


class OpenCancel(msgspec.Struct, frozen=True, eq=False):
    """A CANCEL_DELAYED that was not answered yet."""

    pending: PendingReply
    message_id: str


class ScheduleLink:
    """The schedule service's session, and the cancellations on their way.

    Args:
        epoch: Of the master; sessions of a later epoch are above all of an earlier one.

    Attributes:
        session: Of the service, 0 before the first.
        service: Its connection, None while there is none.
        timer_changed: Something was stored in the schedule topic since the service was notified.
        pending: Messages that wait, as the service says; -1 for unknown.
        retries: Messages that wait for a retry, by consumer group, as far as they are known.
        keep_from: Commit-log offset from which the log must be kept; None for unknown.
        known_end: Commit-log offset before which the service knows everything.
        opened: Batches that more may be wanted of.
        storing: Requests of the service that are written, and not safe yet.
        delivered, cancelled, rolled, gone: Messages, since the broker was started.
        sessions: Services that came, since the broker was started.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._sessions = itertools.count(first_number(epoch) + 1)
        self._tickets = itertools.count(1)
        self._cancels: dict[int, OpenCancel] = {}
        self.session = 0
        self.service: Peer | None = None
        self.timer_changed = False
        self.pending = -1
        self.retries = RetryBoard()
        self.keep_from: int | None = None
        self.known_end = 0
        self.opened = OpenedBatches()
        self.storing = 0
        self.delivered = self.cancelled = self.rolled = self.gone = 0
        self.sessions = 0

    def open(self, peer: Peer) -> int:
        """A service begins; what an earlier one has on its way counts no more.

        Returns:
            Its session.

        Raises:
            BrokerNotAvailable: Writes of the service before are not safe yet: the next service
                would not see them, and repeat them.
        """
        if self.storing:
            raise BrokerNotAvailable(
                f"{self.storing} deliveries of an earlier session are not safe yet"
            )
        self.session = next(self._sessions)
        self.service = peer
        self.retries.is_current = False
        self.timer_changed = False
        self.sessions += 1
        # Reports of the service before about the log hold until this one has caught up.
        return self.session

    def on_stored(self, batch: BatchToPut, result: PutResult, now_ms: int) -> None:
        """Implement ``StoredListener``."""

    def on_visible(self) -> None:
        """More delayed messages can be seen: the schedule service is to be notified."""
        self.timer_changed = True

    def check(self, session: int) -> None:
        """Check that a request is of the present session.

        Raises:
            BrokerNotAvailable: It is not.
        """
        if session != self.session:
            raise BrokerNotAvailable("this session is over: another schedule service has begun")

    def on_disconnect(self, peer: Peer) -> list[PendingReply]:
        """A connection broke.

        Returns:
            The cancellations that nobody will answer, if it was the service's.
        """
        if peer is not self.service:
            return []
        self.service = None
        self.retries.is_current = False
        return self._take(list(self._cancels))

    def add_cancel(self, pending: PendingReply, message_id: str) -> int:
        """A client wants a message cancelled.

        Returns:
            The ticket that the service will answer under.

        Raises:
            BrokerNotAvailable: There is no service, or too many wait for it.
        """
        if self.service is None:
            raise BrokerNotAvailable("this broker has no schedule service now")
        if len(self._cancels) >= MAX_CANCELS:
            raise BrokerNotAvailable(f"{MAX_CANCELS} cancellations wait already")
        ticket = next(self._tickets)
        self._cancels[ticket] = OpenCancel(pending, message_id)
        return ticket

    def find_cancel(self, ticket: int) -> OpenCancel | None:
        """The cancellation of a ticket that still waits."""
        return self._cancels.get(ticket)

    def take_cancel(self, ticket: int) -> OpenCancel | None:
        """The cancellation of a ticket, once."""
        return self._cancels.pop(ticket, None)

    def tick(self, now_ms: int) -> list[PendingReply]:
        """Cancellations that the service did not answer in time."""
        late = []
        for ticket, cancel in self._cancels.items():
            if cancel.pending.deadline_ms > now_ms:
                break  # they stand in the order in which they came
            late.append(ticket)
        return self._take(late)

    def _take(self, tickets: list[int]) -> list[PendingReply]:
        return [self._cancels.pop(ticket).pending for ticket in tickets]

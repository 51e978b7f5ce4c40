"""The end of a turn of the event loop: what is written together, in which order, and what follows.

Requests of a turn only stage what they want written. At its end everything is put into the store
at once; nobody is answered before the store has it, and the commit point says that it is safe.
"""

from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import BrokerTurn
from mqmesh.roles.broker.features.delays.feature import DelaysFeature
from mqmesh.roles.broker.features.delays.schedule_link import ScheduleLink
from mqmesh.roles.broker.features.delivery.feature import DeliveryFeature
from mqmesh.roles.broker.features.groups.membership import MembershipFeature
from mqmesh.roles.broker.features.pulling.feature import PullingFeature
from mqmesh.roles.broker.features.replication.feature import ReplicationFeature
from mqmesh.roles.broker.features.tables.tables import Tables
from mqmesh.roles.broker.features.tables.unsettled import SETTLE_AT
from mqmesh.roles.broker.features.transactions.feature import TransactionsFeature
from mqmesh.roles.broker.features.transactions.half_messages import PendingHalfMessages
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.writing.send_admission import SendAdmission
from mqmesh.roles.broker.writing.writes import Writes


class WriteTurn:
    """The program of a master at the end of each turn of the loop.

    A turn with a single message is as long as its steps: those that nearly always have nothing to
    do are called only when the state that they work on says that there is something.

    Args:
        core: The core of the broker.
        halves: Half messages: decisions about them.
        groups: Consumer groups: those that have changed.
        schedule: The schedule service: what it does not know yet.
        writes: Staged batches.
        admission: Decides which sends have waited for too long.
        transactions: Decisions about half messages become batches.
        pulling: Pulls that wait for messages, or for another turn.
        delivery: Receives that wait for messages.
        membership: Notices to members of groups that have changed.
        delays: The schedule service.
        replication: Followers.
        tables: Rows of what is confirmed.
    """

    def __init__(
        self,
        core: Core,
        halves: PendingHalfMessages,
        groups: ConsumerGroups,
        schedule: ScheduleLink,
        writes: Writes,
        admission: SendAdmission,
        transactions: TransactionsFeature,
        pulling: PullingFeature,
        delivery: DeliveryFeature,
        membership: MembershipFeature,
        delays: DelaysFeature,
        replication: ReplicationFeature,
        tables: Tables,
    ) -> None:
        self._now_ns = core.clock.monotonic_ns
        self._halves = halves
        self._groups = groups
        self._schedule = schedule
        self._writes = writes
        self._admission = admission
        self._transactions = transactions
        self._pulling = pulling
        self._pulls = pulling.turns
        self._delivery = delivery
        self._receives = delivery.receives
        self._membership = membership
        self._delays = delays
        self._replication = replication
        self._tables = tables
        self._followers = replication.followers.by_peer
        self._is_elected = core.leadership is not None

    def end(self, turn: BrokerTurn) -> bool:
        """Writes and answers what the requests of a turn wanted.

        Returns:
            True if the next turn has to come at once.
        """
        # 1. Decide: decisions about half messages become batches of this turn.
        halves = self._halves
        if halves.table.runs or halves.ops or halves.parks:
            self._transactions.finish()
        # 2. Put, acknowledge, wake pulls: one write for everything that was staged.
        self._admission.readable_ms = turn.readable_ms
        self._writes.write()
        # 3. Answer pulls and receives that waited for this turn, as many as a turn may.
        pulls_left = self._pulls.begin() and self._pulling.answer_waiting()
        receives_left = self._receives.is_used and self._delivery.serve()
        # 4. Notify members of groups, and the schedule service.
        if self._groups.changed or self._groups.returned:
            self._membership.send_notices()
        if self._schedule.timer_changed:
            self._delays.notify_service()
        # 5. Replicate: followers get what the turn has stored.
        log_left = False
        if self._is_elected or self._followers:
            log_left = self._replication.feed()
        # 6. Rows of tables: what is confirmed; a few changes wait for a tick, or for a reader.
        if self._tables.unsettled.count >= SETTLE_AT:
            self._tables.settle()
        self._admission.tick_ended(self._now_ns() // 1_000_000, turn.drained_ms)
        return pulls_left or receives_left or log_left

    def durable(self) -> None:
        """Answers what waited for the disk: the log was synced further."""
        self._writes.answer_confirmed()
        self._delivery.serve()
        self._delays.notify_service()
        self._replication.note_durable()

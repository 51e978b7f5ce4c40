"""Messages that members acknowledge one by one: hooks, leases for administrators, metrics."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from mqmesh.metrics import counter, gauge
from mqmesh.protocol.command import Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    MAX_LEASES_PER_ANSWER,
    LeaseInfo,
    LeaseList,
    ListLeasesRequest,
    ReleasedLeases,
    ReleaseLeasesRequest,
)
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.request import NO_DEADLINE, Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.runs import Run, RunState
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows, WindowKey
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.delivery.failed_messages import (
    FailedMessages,
    RunToSendBack,
    SendsBack,
)
from mqmesh.roles.broker.features.delivery.lease_reader import LeaseReader
from mqmesh.roles.broker.features.delivery.member_peers import MemberPeers
from mqmesh.roles.broker.features.delivery.queue_order import QueueOrder
from mqmesh.roles.broker.features.delivery.receive_hold import ReceiveHold
from mqmesh.roles.broker.features.delivery.receives import Receives
from mqmesh.roles.broker.features.delivery.settlements import Settlements
from mqmesh.roles.broker.features.delivery.taking import is_blocked
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_limits import GroupLimits
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.broker.writing.writes import StoredListener
from mqmesh.roles.dispatch import Handler

QUIET_MS: Final = 3_000
"""After a start members have so long to show what they hold."""
NOTE_EVERY_MS: Final = 2
"""Hand-outs are noted in the log at the end of a turn, but no more often: a record of some hundred
bytes each turn would be most of what a busy broker writes."""
FORGET_MS: Final = 60_000
"""Members that left are forgotten so often."""
TICK_MS: Final = 100
"""Ticks come that often: leases and waits that end sooner are not left to them."""
KEY_REPORT_MS: Final = 60_000
"""A key that holds up its queue is named in the log each time so much has passed."""

_log = logging.getLogger(__name__)


class DeliveryFeature(Feature):
    """Leases of messages: handed out, settled, and handed out again.

    Args:
        core: The core of the broker.
        topics: Topics.
        groups: Members of groups.
        group_table: Settings of groups.
        offsets: Committed offsets.
        windows: Messages that groups hold.
        by_group: Messages and bytes handed out to each group.
        limits: Pauses and rates of groups.
        metas: Batch metas decoded before.
        back: Makes retries and dead letters.
        listeners: Listeners of what is stored, by topic.

    Attributes:
        receives: Receives of members.
        settlements: Reports of members.
        queues: Queues in which they look.
        hold: Receives that wait.
        on_due: Called with a time, monotonic clock, at which ``tick`` is due sooner than by itself.
        peers: Connections of members.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        offsets: CommittedOffsets,
        windows: DeliveryWindows,
        by_group: GroupPulls,
        limits: GroupLimits,
        metas: MetaCache,
        back: SendsBack,
        listeners: dict[str, StoredListener],
    ) -> None:
        config = core.settings.now
        reader = LeaseReader(core.store, metas)
        self._core = core
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._windows = windows
        self._split = reader.split
        self.hold = hold = ReceiveHold(config.max_held_pulls, config.busy_retry_after_ms, listeners)
        self.queues = queues = QueueOrder(core, topics, groups, offsets, windows)
        self.peers = MemberPeers(groups, group_table, windows, hold)
        self._failed = FailedMessages(core, group_table, windows, reader, hold, back)
        self.settlements = Settlements(
            core,
            topics,
            groups,
            group_table,
            windows,
            reader,
            hold,
            self.peers,
            self._failed,
            back,
        )
        self.receives = Receives(
            core,
            topics,
            groups,
            group_table,
            windows,
            by_group,
            limits,
            reader,
            hold,
            queues,
            self.peers,
            self._failed,
            self.settlements,
        )
        self._expired = 0
        self.on_due: Callable[[int], None] = _ignore
        self._note_ms = self._forget_ms = self._planned_ms = 0
        # Queues that are held up by a key: when that was reported last.
        self._block_reported: dict[WindowKey, int] = {}

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.RECEIVE_MESSAGE: self.receives.receive,
            RequestCode.SETTLE_MESSAGES: self.settlements.settle,
            RequestCode.LIST_LEASES: self.list_leases,
            RequestCode.RELEASE_LEASES: self.release_leases,
        }

    # ---- Hooks -----------------------------------------------------------------------

    def opened(self) -> None:
        """Begin to serve what the log says of windows; members show what they hold."""
        store = self._store
        bounded = self._windows.resume(
            lambda topic, queue_id: store.queue_bounds(topic, queue_id)[1],
            self._clock.monotonic_ms(),
            self._clock.wall_ms(),
            QUIET_MS,
        )
        if bounded:
            _log.warning("%d delivery windows ended behind the end of the log", bounded)

    def configured(self) -> None:
        """Take over how many receives may wait."""
        self.hold.most = self._settings.now.max_held_pulls

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forget the receives of a connection; its members keep their leases for a while."""
        self.receives.peer_gone(peer)
        self.peers.lose(peer, now_ms)

    def topic_deleted(self, topic: str) -> None:
        """Forget the windows of a topic, and fail the receives that wait for it."""
        self._windows.drop_topic(topic)
        self._split.forget(topic)
        self.queues.topic_deleted(topic)
        self.receives.topic_deleted(topic)

    def group_deleted(self, group: str) -> None:
        """Forget the windows of a group."""
        self._windows.drop_group(group)
        self.queues.forget_group(group)

    def stopping(self) -> None:
        """Fail all receives that wait: the broker stops."""
        self.receives.stopping()

    def tick(self, now_ms: int) -> None:
        """End leases, and the waits of receives whose time is over; note hand-outs in the log."""
        leaving: dict[str, list[RunToSendBack]] = {}
        for key, window in self._windows.items():
            if not window.unsettled:
                continue
            if expired := window.tick(now_ms):
                self._expired += sum(run.count for run in expired)
                reason = "its lease ended before it was settled"
                some = self._failed.judge_all(key, window, expired, reason)
                leaving.setdefault(key[0], []).extend(some)
            if is_blocked(window):
                self._report_block(key, window, now_ms)
            elif window.due() is not None:
                self.hold.stir(key[1])
        for some in leaving.values():
            self._failed.send_back(some)
        for member in self.peers.take_lost(now_ms):
            self.receives.forget(member)
            self._failed.release(*member, "its member lost its connection")
        if now_ms >= self._forget_ms:
            self._forget_ms = now_ms + FORGET_MS
            for member in self.peers.forget_gone():
                self.receives.forget(member)
            self._block_reported = {
                key: at for key, at in self._block_reported.items() if self._windows.find(key)
            }
        self.receives.tick(now_ms)
        self._windows.numbers.due_ms = self.next_ms() or NO_DEADLINE
        # The next tick plans messages that are due later.
        self._planned_ms = now_ms + TICK_MS
        if self._windows.changed:
            self._core.state.save()

    def next_ms(self) -> int | None:
        """Return when a lease ends next, or a wait, monotonic clock; None for never."""
        due = (window.next_ms() for _, window in self._windows.items() if window.unsettled)
        return min((at for at in due if at is not None), default=None)

    def sample(self) -> None:
        """Let all that wait look again: offsets may have been moved, or limits."""
        self.hold.stir_all()

    def serve(self) -> bool:
        """Answer receives for which something came, and note hand-outs; the end of each turn.

        Returns:
            True if some wait for the next turn.
        """
        is_left = self.receives.serve()
        now_ms = self._clock.monotonic_ms()
        state = self._core.state
        if self._windows.changed and now_ms >= self._note_ms and state.failure is None:
            # A new master hands out the messages of a lease that the log lacks a second time,
            # unless the member that holds the lease reports first.
            self._note_ms = now_ms + NOTE_EVERY_MS
            self._core.write_state()
        due_ms = min(self._windows.numbers.due_ms, self.hold.due_ms)
        if due_ms < self._planned_ms:
            self._planned_ms = due_ms
            self.on_due(due_ms)
        return is_left

    # ---- Leases, for administrators --------------------------------------------------

    def list_leases(self, request: Request, query: ListLeasesRequest) -> LeaseList:
        """Return who holds messages of a group, in pages."""
        check_client_group(query.group)
        now_ms = self._clock.monotonic_ms()
        after = (query.after_topic, query.after_queue_id, query.after_first)
        found: list[LeaseInfo] = []
        for key, window in sorted(self._windows.of_group(query.group).items()):
            if (query.topic and key[1] != query.topic) or key[1:] < after[:2]:
                continue
            for run in sorted(window.runs, key=_low_of):
                if (*key[1:], run.low) <= after:
                    continue
                if len(found) == MAX_LEASES_PER_ANSWER:
                    return LeaseList(found, True)
                found.append(_info_of(key, run, now_ms))
        return LeaseList(found)

    def release_leases(self, request: Request, wanted: ReleaseLeasesRequest) -> Reply | None:
        """Take from a member what it holds; answered once that is in the log."""
        check_client_group(wanted.group)
        count = self._failed.release(wanted.group, wanted.member, "an administrator released it")
        self._core.reply_when_saved(request, ReleasedLeases(count))
        return None

    # ---- Helpers ---------------------------------------------------------------------

    def _report_block(self, key: WindowKey, window: DeliveryWindow, now_ms: int) -> None:
        """Report now and then that one key holds up a queue."""
        if now_ms - self._block_reported.get(key, -KEY_REPORT_MS) < KEY_REPORT_MS:
            return
        assert window.order is not None
        self._block_reported[key] = now_ms
        name, count = window.order.longest()
        _log.warning(
            "group %s: queue %d of %s is held up: %d messages wait for others of their "
            "sharding keys, %d of them for %r",
            key[0],
            key[2],
            key[1],
            window.passed,
            count,
            name,
        )

    def _blocked(self) -> int:
        return sum(is_blocked(window) for _, window in self._windows.items())

    def _waiting(self) -> int:
        return sum(window.unsettled - window.leased for _, window in self._windows.items())

    def _oldest_s(self) -> float:
        now_ms = self._clock.monotonic_ms()
        oldest = (window.oldest_since(now_ms) for _, window in self._windows.items())
        return (now_ms - min(oldest, default=now_ms)) / 1_000

    metrics = (
        gauge(
            "delivery_waiting_messages",
            "messages that wait to be handed out again",
            lambda feature: feature._waiting(),
            unit="messages",
        ),
        gauge(
            "delivery_blocked_queues",
            "queues that a sharding key holds up, whose messages are not settled",
            lambda feature: feature._blocked(),
        ),
        gauge(
            "delivery_leases",
            "leases and waiting runs of messages that are acknowledged one by one",
            lambda feature: feature._windows.numbers.runs,
        ),
        counter(
            "delivery_expired_total",
            "messages whose lease ended before they were settled",
            lambda feature: feature._expired,
            unit="messages",
        ),
        counter(
            "delivery_redelivered_total",
            "messages that were handed out again",
            lambda feature: feature.receives.redelivered,
            unit="messages",
        ),
        counter(
            "delivery_stale_total",
            "settlements that came after somebody else had got the messages",
            lambda feature: feature.settlements.stale,
        ),
        gauge(
            "delivery_oldest_lease_seconds",
            "age of the oldest lease",
            lambda feature: feature._oldest_s(),
            unit="s",
        ),
    )


def _info_of(key: WindowKey, run: Run, now_ms: int) -> LeaseInfo:
    return LeaseInfo(
        key[1],
        key[2],
        run.low,
        run.count,
        run.attempt,
        run.state.value,
        run.member,
        max(now_ms - run.since_ms, 0) if run.since_ms else 0,
        max(run.until_ms - now_ms, 0) if run.state is not RunState.LEAVING else 0,
    )


def _low_of(run: Run) -> int:
    return run.low


def _ignore(due_ms: int) -> None:
    """Do nothing: the next tick will do."""

"""RECEIVE_MESSAGE and SETTLE_MESSAGES: messages that members acknowledge one by one."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from mqmesh.batch.delayed_batch import parse_delay_levels
from mqmesh.errors import (
    BrokerNotAvailable,
    CorruptRecord,
    GroupNotFound,
    InvalidArgument,
    MQMeshError,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import check_topic, retry_topic
from mqmesh.metrics import counter, gauge
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import (
    BY_SCHEDULE,
    MAX_LEASES_PER_ANSWER,
    MAX_RECEIVED,
    MIN_INVISIBLE_MS,
    DeliveryMode,
    LeaseInfo,
    LeaseList,
    ListLeasesRequest,
    MessageLease,
    ReceiveRequest,
    ReceiveResponse,
    ReleasedLeases,
    ReleaseLeasesRequest,
    SettleAction,
    Settlement,
    SettleRequest,
    SettleResponse,
)
from mqmesh.protocol.groups import GroupConfig, check_client_group
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.protocol.policies import parse_retry_delays
from mqmesh.protocol.pulling import MAX_PULL_BYTES
from mqmesh.protocol.request import Peer, Request
from mqmesh.protocol.retries import (
    DEFAULT_MAX_RECONSUME_TIMES,
    FIRST_RETRY_LEVEL,
    TO_DEAD_LETTERS,
    SendBackEntry,
    SendBackRequest,
    SendBackResult,
)
from mqmesh.protocol.route import OnExpired
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.key_order import KeyOrder
from mqmesh.roles.broker.delivery_state.runs import MAX_RUN, NOBODY, Run, RunState, stretches
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow, Settled
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows, WindowKey
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.delivery.lease_reader import Expiry, LeaseReader, Piece, Read
from mqmesh.roles.broker.features.delivery.receive_hold import HeldReceive, ReceiveHold
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_limits import GroupLimits
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.reading.meta_cache import MetaCache
from mqmesh.roles.broker.reading.pull_filter import MAX_VERIFIED_BYTES, pull_filter
from mqmesh.roles.broker.reading.store_times import store_time
from mqmesh.roles.broker.topic_state.topic_retention import shown_bounds
from mqmesh.roles.broker.topic_state.topic_table import Topic, TopicTable
from mqmesh.roles.broker.writing.writes import StoredListener
from mqmesh.roles.dispatch import Handler
from mqmesh.units import KIB, MIB

QUIET_MS: Final = 3_000
"""After a start members have so long to show what they hold."""
SHORT_NACK_MS: Final = 30_000
"""A message that comes again sooner waits in the window, others in the schedule service."""
NOTE_EVERY_MS: Final = 2
"""Hand-outs are noted in the log at the end of a turn, but no more often: a record of some hundred
bytes each turn would be most of what a busy broker writes."""
MAX_PASSED: Final = 10_000
"""Messages of a queue that wait for others of their keys; beyond, it is held up."""
FORGET_MS: Final = 60_000
"""Members that left are forgotten so often."""
KEY_REPORT_MS: Final = 60_000
"""A key that holds up its queue is named in the log each time so much has passed."""
NOT_SENT_BACK_MS: Final = 1_000
"""A message that could not be sent back is handed out again after so long."""
TURN_BYTES: Final = 4 * MIB
"""Given out in one turn of the loop."""
LEAST_ADMITTED: Final = 64
"""Messages that are let in at a time, with order by key, if there are as many."""
LEAST_BYTES: Final = 64 * KIB
MAX_RETRIES: Final = 2**31
"""Limit of retries in place of the consumer's: this feature decides what is a dead letter."""

_OK: Final = int(ResponseCode.SUCCESS)
_STALE: Final = int(ResponseCode.STALE_RECEIPT)
_BUSY: Final = int(ResponseCode.SYSTEM_BUSY)
_ILLEGAL: Final = int(ResponseCode.MESSAGE_ILLEGAL)
_CODE_OF: Final = {
    Settled.OK: _OK,
    Settled.BEFORE: _OK,
    Settled.STALE: _STALE,
    Settled.LEAVING: _BUSY,
    Settled.FULL: _BUSY,
}

_log = logging.getLogger(__name__)


class SendsBack(Protocol):
    """The neighbour that makes retries and dead letters."""

    def send_back_now(
        self, back: SendBackRequest, on_done: Callable[[list[SendBackResult]], None]
    ) -> None:
        """Plan the next try of messages, or make them dead letters.

        Args:
            back: Which messages.
            on_done: Called with a result for each entry, once that is stored.
        """

    def is_sent_back(self, group: str, queue: tuple[str, int], offsets: Iterable[int]) -> bool:
        """Return whether one of some messages was sent back, and comes again or is a dead letter.

        Args:
            group: Consumer group.
            queue: Topic and queue id.
            offsets: Queue offsets of the messages.

        Raises:
            CorruptRecord, CorruptBatch: Marks or messages cannot be read.
        """


class Leaving(msgspec.Struct, frozen=True):
    """A run that waits, and is to be sent back.

    Attributes:
        key: Of its window.
        window: Its window.
        run: The run.
        reason: What went wrong.
        failures: How often it failed, this time not included.
        level: Delay level, or ``TO_DEAD_LETTERS``; 0 for ``delay_ms``.
        delay_ms: When it comes again, from now on.
    """

    key: WindowKey
    window: DeliveryWindow
    run: Run
    reason: str
    failures: int
    level: int = TO_DEAD_LETTERS
    delay_ms: int = 0


class DeliveryCounts(msgspec.Struct):
    """Counters of deliveries since the start.

    Attributes:
        expired: Messages whose lease ended.
        redelivered: Messages that were handed out again.
        stale: Settlements that came too late.
    """

    expired: int = 0
    redelivered: int = 0
    stale: int = 0


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
        is_used: False until somebody receives: ``serve`` has nothing to do before.
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
        self._core = core
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._offsets = offsets
        self._windows = windows
        self._by_group = by_group
        self._limits = limits
        self._back = back
        self._reader = LeaseReader(core.store, metas)
        self._hold = ReceiveHold(config.max_held_pulls, config.busy_retry_after_ms, listeners)
        self._bytes_left = TURN_BYTES
        self.is_used = False
        self._turns: dict[tuple[str, str], int] = {}
        # Receives that were answered with messages, of groups with priority_fairness.
        self._served: dict[tuple[str, str], int] = {}
        self._peers: dict[tuple[str, str], Peer] = {}
        self._members: dict[Peer, dict[tuple[str, str], None]] = {}
        self._lost: dict[tuple[str, str], int] = {}
        self._note_ms = self._forget_ms = 0
        self._counts = DeliveryCounts()
        # Groups and topics whose receives look again in the next turn, whatever comes.
        self._passed: dict[tuple[str, str], None] = {}
        # Members that hold most, of windows that are full, as of the last tick.
        self._most_held: dict[WindowKey, tuple[str, int]] = {}
        # Leases of the last answer to each member, of each topic.
        self._answered: dict[tuple[str, str], dict[str, _Answered]] = {}
        # Topics of which groups are paused, or have had what a second may bring.
        self._held_back: dict[str, None] = {}
        # Queues that are held up by a key; and when that was reported last.
        self._blocked: set[WindowKey] = set()
        self._block_reported: dict[WindowKey, int] = {}

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.RECEIVE_MESSAGE: self.receive,
            RequestCode.SETTLE_MESSAGES: self.settle,
            RequestCode.LIST_LEASES: self.list_leases,
            RequestCode.RELEASE_LEASES: self.release_leases,
        }

    # ---- Hooks -----------------------------------------------------------------------

    def loaded(self) -> None:
        """Begin to serve what the log says of windows; members show what they hold."""
        if self._core.is_follower:
            return
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
        self._hold.most = self._settings.now.max_held_pulls

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forget the receives of a connection; its members keep their leases for a while."""
        for held in self._hold.of_peer(peer):
            self._hold.release(held)
        for member in self._members.pop(peer, ()):
            del self._peers[member]
            self._lost[member] = now_ms + self._config(member[0]).lost_grace_ms

    def topic_deleted(self, topic: str) -> None:
        """Forget the windows of a topic, and fail the receives that wait for it."""
        self._windows.drop_topic(topic)
        self._reader.split.forget(topic)
        for held in self._hold.of_topic(topic):
            if held.wanted.topic == topic and self._hold.release(held):
                held.pending.fail(TopicNotFound(f"topic {topic!r} was deleted"))

    def group_deleted(self, group: str) -> None:
        """Forget the windows of a group."""
        self._windows.drop_group(group)
        for name in [key for key in self._turns if key[0] == group]:
            del self._turns[name]
            self._served.pop(name, None)

    def stopping(self) -> None:
        """Fail all receives that wait: the broker stops."""
        error = BrokerNotAvailable(f"broker {self._settings.now.broker_name} is stopping")
        for held in self._hold.all():
            self._hold.release(held)
            held.pending.fail(error)

    def tick(self, now_ms: int) -> None:
        """End leases, and the waits of receives whose time is over; note hand-outs in the log."""
        leaving: list[Leaving] = []
        self._blocked.clear()
        for key in [key for key in self._block_reported if self._windows.find(key) is None]:
            del self._block_reported[key]
        for key, window in self._windows.items():
            if not window.unsettled:
                continue
            for run in window.tick(now_ms):
                self._counts.expired += run.count
                leaving += self._judge(key, window, run, "its lease ended before it was settled")
                window.hold_back(run)
            self._look_for_block(key, window, now_ms)
            if window.due() is not None:
                self._stir(key)
        for member in [one for one, at in self._lost.items() if at <= now_ms]:
            del self._lost[member]
            self._answered.pop(member, None)
            leaving += self._release(*member, "its member lost its connection")
        if leaving:
            self._send_back(leaving, _nobody)
        if now_ms >= self._forget_ms:
            self._forget_ms = now_ms + FORGET_MS
            self._forget_members()
        for topic in self._held_back:
            self._hold.stir(topic)
        self._held_back.clear()
        self._most_held.clear()
        self.serve()
        for held in self._hold.expired(now_ms):
            if not self._try(held) and held.key not in self._passed:
                self._hold.release(held)
                self._answer_nothing(held)
        if self._windows.changed:
            self._core.state.save()

    def next_ms(self) -> int | None:
        """Return when a lease ends next, or a wait, monotonic clock; None for never."""
        due = (window.next_ms() for _, window in self._windows.items() if window.unsettled)
        return min((at for at in due if at is not None), default=None)

    def sample(self) -> None:
        """Let all that wait look again: offsets may have been moved, or limits."""
        self._hold.stir_all()

    def serve(self) -> bool:
        """Answer receives for which something came, and note hand-outs; the end of each turn.

        Returns:
            True if some wait for the next turn.
        """
        is_left = self._serve()
        now_ms = self._clock.monotonic_ms()
        state = self._core.state
        if self._windows.changed and now_ms >= self._note_ms and state.failure is None:
            # What a new master does not know goes out twice, unless its holder is quicker.
            self._note_ms = now_ms + NOTE_EVERY_MS
            self._core.write_state()
        return is_left

    def _serve(self) -> bool:
        self._bytes_left = TURN_BYTES
        if not self._hold.stirred and not self._passed:
            return False  # nearly always
        waiting = dict.fromkeys((*self._passed, *self._hold.take_stirred()))
        self._passed.clear()
        for key in waiting:
            for held in self._hold.of_key(key):
                if self._bytes_left <= 0:
                    self._passed[key] = None
                    break
                # Where there is nothing for one there is nothing for all behind it.
                if not self._try(held):
                    break
        return bool(self._passed)

    # ---- Receive ---------------------------------------------------------------------

    def receive(self, request: Request, wanted: ReceiveRequest) -> Reply | None:
        """Lease messages to a member, or hold the request until there are some."""
        check_client_group(wanted.group)
        check_topic(wanted.topic)
        if wanted.settle:

            def settled(codes: list[int]) -> None:
                held = HeldReceive(request.later(), wanted, None, (wanted.topic, ""), codes)
                taken = False
                if not request.peer.is_gone:  # else its member may be lost by now
                    try:
                        held = self._checked(request, wanted, codes)
                        taken = self._bytes_left > 0 and self._take(held)
                    except MQMeshError:
                        pass  # the next receive names it
                if not taken:
                    self._answer(held, ReceiveResponse([], codes))

            self._settle(request, wanted.group, wanted.topic, wanted.member, wanted.settle, settled)
            return None
        held = self._checked(request, wanted, [])
        if self._bytes_left > 0 and self._take(held):
            return None
        if not wanted.suspend_timeout_ms and self._bytes_left > 0 and held.key not in self._passed:
            self._answer_nothing(held)
            return None
        self._hold.hold(held)
        if self._bytes_left <= 0:
            self._passed[held.key] = None
        return None

    def _checked(self, request: Request, wanted: ReceiveRequest, codes: list[int]) -> HeldReceive:
        """Check whether a member may receive."""
        self._check_receives(wanted.group)
        self._topics.require_readable(wanted.topic, 0)
        group = self._groups.require_member(wanted.group, wanted.member)
        first = next(iter(group.members.values()))
        for one in first.subscriptions:
            same = (wanted.expression, wanted.expression_type)
            if one.topic == wanted.topic and (one.expression, one.expression_type) != same:
                raise InvalidArgument(
                    f"group {wanted.group!r} subscribes to {wanted.topic!r} with "
                    f"{one.expression!r}, not with {wanted.expression!r}: all members share its "
                    "messages, so all must want the same"
                )
        self._meet(request.peer, wanted.group, wanted.member, reports=bool(wanted.settle))
        self.is_used = True
        wait_ms = min(wanted.suspend_timeout_ms, self._settings.now.long_polling_max_ms)
        return HeldReceive(
            request.later(self._clock.monotonic_ms() + wait_ms),
            wanted,
            pull_filter(wanted.expression, wanted.expression_type),
            (wanted.topic, retry_topic(wanted.group)),
            codes,
        )

    def _answer(
        self, held: HeldReceive, found: ReceiveResponse, pieces: Sequence[Piece] = ()
    ) -> None:
        """Answer a receive; once what it settled is in the log, and safe."""
        reply = Reply(encode_header(found), pieces)
        if held.codes:
            self._core.answer_when_saved(held.pending, reply)
        else:
            held.pending.done(reply)

    def _try(self, held: HeldReceive) -> bool:
        """Answer a receive that waits, if there is something for it."""
        try:
            self._check_receives(held.wanted.group)
            if not self._take(held):
                return False
        except MQMeshError as error:
            held.pending.fail(error)
        self._hold.release(held)
        return True

    def _take(self, held: HeldReceive) -> bool:
        """Lease what there is for a receive, and answer it; False if there is nothing."""
        wanted = held.wanted
        config = self._config(wanted.group)
        is_limited = bool(config.paused_until or config.paused_topics or config.max_messages_per_s)
        most = wanted.max_messages
        if is_limited:
            if self._limits.is_held(config, wanted.topic):
                self._limits.held_back += 1
                self._held_back[wanted.topic] = None
                return False
            most = min(self._limits.most_messages(config) or most, most)
        peer, now_ms = held.pending.peer, self._clock.monotonic_ms()
        taking = _Taking(
            self._core,
            self._reader,
            self._windows,
            self._by_group,
            held,
            most,
            max(wanted.invisible_ms or config.invisible_ms, MIN_INVISIBLE_MS),
            config.max_unsettled,
            min(
                wanted.max_bytes,
                peer.room(),
                max(self._bytes_left, LEAST_BYTES),
                MAX_VERIFIED_BYTES if wanted.verify else MAX_PULL_BYTES,
            ),
            now_ms,
        )
        last = self._answered.get((wanted.group, wanted.member), {}).get(wanted.topic)
        if last is not None and last.attempt_id == wanted.attempt_id:
            for key, lease in last.leases:
                taking.take_again(key, self._windows.find(key), lease)
        if not taking.leases:
            self._take_of_queues(held, config, taking)
        if not taking.leases:
            return False
        if is_limited:
            self._limits.note(config, taking.messages)
        self._bytes_left -= taking.size
        total = self._core.stats.total
        total.get_messages += taking.messages
        total.get_bytes += taking.size
        if wanted.attempt_id:
            answers = self._answered.setdefault((wanted.group, wanted.member), {})
            answers[wanted.topic] = _Answered(wanted.attempt_id, taking.taken)
        self._answer(held, ReceiveResponse(taking.leases, held.codes), taking.pieces)
        return True

    def _take_of_queues(self, held: HeldReceive, config: GroupConfig, taking: "_Taking") -> None:
        """Lease messages of all queues of the topic and of the retry topic, in turn.

        Raises:
            MQMeshError: Nothing could be leased, because of this.
        """
        wanted = held.wanted
        fairness = config.priority_fairness
        error: MQMeshError | None = None
        main = self._topics.get(wanted.topic)
        buries = main is not None and main.config.on_expired == OnExpired.DEAD_LETTER
        expiry = Expiry(self._clock.wall_ms(), buries)
        for known, queue_id, is_retry in self._places(held, fairness):
            if taking.has_enough:
                break
            topic = held.topics[is_retry]
            key = (wanted.group, topic, queue_id)
            try:
                window = self._windows.find(key) or self._begin(key, wanted, is_retry)
                self._order(key, window, config)
                if known.retains:
                    window.pass_over(self._bounds(topic, queue_id)[0])
                taking.take(key, window, is_retry, expiry if known.expires else None)
            except MQMeshError as caught:
                error = error or caught  # other queues have their turn all the same
            known.get_messages += taking.counted
            known.get_bytes += taking.counted_bytes
            taking.counted = taking.counted_bytes = 0
        self._counts.redelivered += taking.redelivered
        self._core.stats.total.expired_messages += taking.expired
        if taking.buried:
            self._bury(taking.buried)
        if not taking.leases:
            if error is not None:
                raise error
            if taking.passed:
                self._passed[held.key] = None
        elif fairness:
            self._served[held.key] = self._served.get(held.key, 0) + 1

    def _bury(self, expired: list[tuple[WindowKey, DeliveryWindow, Run]]) -> None:
        """Make dead letters of messages that have expired."""
        leaving = []
        for key, window, run in expired:
            waiting = window.nack(run.lease, run.first, run.bits)
            if isinstance(waiting, Run):
                reason = "its time to live was over"
                leaving.append(self._leaving(key, window, waiting, reason))
        self._send_back(leaving, _nobody)

    def _places(self, held: HeldReceive, fairness: int) -> Iterator[tuple[Topic, int, bool]]:
        """Yield the queues in which a receive looks, in order, and whether they have retries.

        Topic and retries come in turn; of a topic with priorities the higher ones first.
        """
        turn = self._turns.get(held.key, 0)
        self._turns[held.key] = turn + 1
        sides = [
            (known, is_retry)
            for is_retry in ((False, True) if turn % 2 else (True, False))
            if (known := self._topics.get(held.topics[is_retry])) is not None
        ]
        priorities = max((known.config.priorities for known, _ in sides), default=0)
        if not priorities:
            for known, is_retry in sides:
                count = known.readable_queues
                for step in range(count):
                    yield known, (turn // 2 + step) % count, is_retry
            return
        found = [
            (known, queue_id, is_retry)
            for known, is_retry in sides
            for queue_id in range(known.readable_queues)
        ]
        found.sort(key=_priority_of, reverse=True)
        if fairness and self._served.get(held.key, 0) % fairness == fairness - 1:
            yield from self._oldest(held.wanted, found)
        yield from found

    def _oldest(
        self, wanted: ReceiveRequest, places: list[tuple[Topic, int, bool]]
    ) -> list[tuple[Topic, int, bool]]:
        """Return the queue whose first message was stored first; none if none has a message."""
        oldest: list[tuple[Topic, int, bool]] = []
        oldest_ms = 0
        for place in places:
            topic, queue_id = place[0].config.topic, place[1]
            key = (wanted.group, topic, queue_id)
            window = self._windows.find(key) or self._begin(key, wanted, place[2])
            run = window.due()
            if run is None and window.unsettled >= self._config(wanted.group).max_unsettled:
                continue
            first = window.next_offset if run is None else run.low
            stored_ms = store_time(self._store, topic, queue_id, first)
            if stored_ms and (not oldest or stored_ms < oldest_ms):
                oldest, oldest_ms = [place], stored_ms
        return oldest

    def _begin(self, key: WindowKey, wanted: ReceiveRequest, is_retry: bool) -> DeliveryWindow:
        """Make the window of a group that receives from a queue for the first time.

        With ``LAST_OFFSET`` all queues of a topic begin together: one that is added later is read
        from its first message, and so is a topic that was made after the member subscribed.
        """
        group, topic, queue_id = key
        low, high = self._bounds(topic, queue_id)
        start: int = self._offsets.query(group, topic, queue_id)
        if start < 0:
            known = self._groups.require_member(group, wanted.member).members[wanted.member]
            is_last = known.consume_from_where == ConsumeFromWhere.LAST_OFFSET
            start = low
            is_last = is_last and not is_retry and not wanted.is_earlier
            if is_last and topic not in self._offsets.topics(group):
                start = high
                for other in range(self._topics.require(topic).readable_queues):
                    if other != queue_id:
                        self._windows.begin((group, topic, other), self._bounds(topic, other)[1])
        return self._windows.begin(key, min(max(start, low), high))

    def _bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        return shown_bounds(self._store, self._topics, self._clock, topic, queue_id)

    def _answer_nothing(self, held: HeldReceive) -> None:
        """Answer a receive that waited in vain, and say so if its group may hold no more."""
        group = held.wanted.group
        most = self._config(group).max_unsettled
        for key, window in self._windows.of_group(group).items():
            _, topic, queue_id = key
            if topic in held.topics and key in self._blocked and window.order is not None:
                name, count = window.order.longest()
                held.pending.fail(
                    SystemBusy(
                        f"{window.passed} messages of queue {queue_id} of {topic!r} wait for "
                        f"others of their sharding keys, {count} of them for {name!r}; no more "
                        f"may ({MAX_PASSED})",
                        retry_after_ms=self._settings.now.busy_retry_after_ms,
                    )
                )
                return
            if topic not in held.topics or window.unsettled - window.passed < most:
                continue
            if window.next_offset < self._store.queue_bounds(topic, queue_id)[1]:
                if key not in self._most_held:
                    self._most_held[key] = window.holder_of_most()
                member, count = self._most_held[key]
                held.pending.fail(
                    SystemBusy(
                        f"members of group {group!r} hold {window.unsettled} messages of queue "
                        f"{queue_id} of {topic!r}, {member or 'nobody'} most of them, {count}; no "
                        f"more may be handed out (max_unsettled = {most})",
                        retry_after_ms=self._settings.now.busy_retry_after_ms,
                    )
                )
                return
        if self._windows.numbers.is_full:
            held.pending.fail(
                SystemBusy(
                    f"{self._windows.numbers.most} leases are given out by this broker, no more "
                    "may",
                    retry_after_ms=self._settings.now.busy_retry_after_ms,
                )
            )
            return
        held.pending.done(ReceiveResponse())

    # ---- Settle ----------------------------------------------------------------------

    def settle(self, request: Request, wanted: SettleRequest) -> Reply | None:
        """Take a member's report on messages; answered once that is in the log, and safe."""
        check_client_group(wanted.group)

        def settled(codes: list[int]) -> None:
            if all(one.action == SettleAction.EXTEND for one in wanted.settlements):
                request.later().done(SettleResponse(codes))  # no promise that has to be kept
            else:
                self._core.reply_when_saved(request, SettleResponse(codes))

        self._settle(
            request, wanted.group, wanted.topic, wanted.member, wanted.settlements, settled
        )
        return None

    def _settle(
        self,
        request: Request,
        group: str,
        topic: str,
        member: str,
        settlements: list[Settlement],
        on_settled: Callable[[list[int]], None],
    ) -> None:
        """Settle messages; call back with a code for each, which are not in the log yet."""
        self._topics.require(topic)
        config = self._check_mode(group)
        known = self._groups.find(group)
        # Not any name, since tables are bounded.
        if (known is not None and member in known.members) or (group, member) in self._lost:
            self._meet(request.peer, group, member, reports=True)
        now_ms = self._clock.monotonic_ms()
        codes: list[int] = []
        leaving: list[Leaving] = []
        owners: list[int] = []
        for index, one in enumerate(settlements):
            key = (group, retry_topic(group) if one.is_retry else topic, one.queue_id)
            code = self._settle_one(key, config, member, one, now_ms, leaving)
            owners += [index] * (len(leaving) - len(owners))
            self._counts.stale += code == _STALE
            codes.append(code)
            self._stir(key)
        if not leaving:
            on_settled(codes)
            return

        def stored(results: list[int]) -> None:
            for index, code in zip(owners, results, strict=True):
                codes[index] = codes[index] or code
            on_settled(codes)
            self._core.write_state()  # this turn has written already

        self._send_back(leaving, stored)

    def _settle_one(
        self,
        key: WindowKey,
        config: GroupConfig,
        member: str,
        one: Settlement,
        now_ms: int,
        leaving: list[Leaving],
    ) -> int:
        """Settle messages, and add to what is to be sent back; return the code."""
        window = self._windows.find(key)
        if window is None or self._is_cut(key, one):
            return _STALE
        bits = int.from_bytes(one.bits, "little")
        if not bits:
            return _ILLEGAL
        window.is_strict = _is_ordered(config, key)
        if one.first + bits.bit_length() > window.next_offset:
            end = self._store.queue_bounds(key[1], key[2])[1]
            window.meet(one.lease, one.first, bits, end, config.max_unsettled)
        if one.action == SettleAction.ACK:
            settled = window.ack(one.lease, one.first, bits)
            if settled is Settled.BEFORE:
                # A repeat, mostly; or late work on what another member sent back meanwhile.
                return _STALE if self._is_sent_back(key, Run(one.first, bits, 0)) else _OK
            return _CODE_OF[settled]
        if one.action == SettleAction.EXTEND:
            length_ms = max(one.delay_ms, MIN_INVISIBLE_MS)
            return _CODE_OF[window.extend(one.lease, one.first, bits, member, now_ms, length_ms)]
        self._order(key, window, config)
        if one.action == SettleAction.RETURN:
            return _CODE_OF[window.give_back(one.lease, one.first, bits)]
        run = window.nack(one.lease, one.first, bits)
        if isinstance(run, Settled):
            return _CODE_OF[run]
        if one.action == SettleAction.REJECT:
            leaving.append(self._leaving(key, window, run, one.reason))
        else:
            leaving += self._judge(key, window, run, one.reason, one.delay_ms)
            window.hold_back(run)
        return _OK

    def _is_sent_back(self, key: WindowKey, run: Run) -> bool:
        try:
            return self._back.is_sent_back(key[0], key[1:], run.offsets())
        except MQMeshError as error:
            _log.error("what group %s sent back cannot be read: %s", key[0], error)
            return False

    def _judge(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        run: Run,
        reason: str,
        delay_ms: int = 0,
    ) -> Iterator[Leaving]:
        """Decide about a run that failed: its messages wait here, or are sent back."""
        group, topic, queue_id = key
        by_failures = {0: run.bits}
        if topic == retry_topic(group):
            # Each has failed by itself before.
            by_failures = self._reader.failures_of((topic, queue_id), run.first, run.bits)
            if self._windows.numbers.is_full:
                by_failures = {min(by_failures): run.bits}
        for failures, bits in by_failures.items():
            part = window.split(run, bits)
            yield from self._judge_part(
                key, window, part, part.attempt - 1 + failures, reason, delay_ms
            )

    def _judge_part(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        run: Run,
        failures: int,
        reason: str,
        delay_ms: int,
    ) -> Iterator[Leaving]:
        """Decide about messages that failed so often before."""
        group, topic, queue_id = key
        limit = self._group_table.retry_limit(group, DEFAULT_MAX_RECONSUME_TIMES)
        if failures >= limit:
            yield self._leaving(key, window, run, reason, failures)
            return
        levels = parse_delay_levels(self._settings.now.message_delay_level)
        config = self._config(group)
        if delay_ms == BY_SCHEDULE:
            own = parse_retry_delays(config.retry_delays)
            delay_ms = levels[min(FIRST_RETRY_LEVEL + failures, len(levels)) - 1]
            if own is not None:
                delay_ms = own.delay_ms(failures, f"{topic}/{queue_id}/{run.low}")
        is_crowded = window.unsettled > config.max_unsettled * 3 // 4
        if not window.is_strict and (delay_ms > SHORT_NACK_MS or (delay_ms and is_crowded)):
            level = levels.index(delay_ms) + 1 if delay_ms in levels else 0
            yield self._leaving(key, window, run, reason, failures, level, delay_ms)
        elif delay_ms:
            window.leave(run)
            window.wait(run, self._clock.monotonic_ms() + delay_ms)

    def _leaving(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        run: Run,
        reason: str,
        failures: int = 0,
        level: int = TO_DEAD_LETTERS,
        delay_ms: int = 0,
    ) -> Leaving:
        window.leave(run)
        failures = max(failures, run.attempt - 1)
        return Leaving(key, window, run, reason, failures, level, delay_ms)

    def _send_back(self, leaving: list[Leaving], on_done: Callable[[list[int]], None]) -> None:
        """Have runs stored as retries or dead letters; they are settled then.

        Args:
            leaving: Runs, all of one group.
            on_done: Called with a response code for each run.
        """
        by_group: dict[str, list[Leaving]] = {}
        for one in leaving:
            by_group.setdefault(one.key[0], []).append(one)
        if len(by_group) > 1:
            for some in by_group.values():
                self._send_back(some, _nobody)
            return
        entries: list[SendBackEntry] = []
        owners: list[int] = []
        for index, one in enumerate(leaving):
            for first, count in stretches(one.run.first, one.run.bits):
                entries.append(
                    SendBackEntry(
                        one.key[1],
                        one.key[2],
                        first,
                        count,
                        one.reason,
                        one.level,
                        one.failures,
                        one.delay_ms,
                    )
                )
                owners.append(index)

        def done(results: list[SendBackResult]) -> None:
            codes = [_OK] * len(leaving)
            for index, result in zip(owners, results, strict=True):
                codes[index] = codes[index] or result.code
            due_ms = self._clock.monotonic_ms() + NOT_SENT_BACK_MS
            for one, code in zip(leaving, codes, strict=True):
                if code == _OK:
                    one.window.gone(one.run)
                else:
                    one.window.wait(one.run, due_ms)
                    one.window.hold_back(one.run)
                self._stir(one.key)
            on_done(codes)

        back = SendBackRequest(leaving[0].key[0], entries, MAX_RETRIES)
        try:
            self._back.send_back_now(back, done)
        except MQMeshError as error:
            _log.error("messages of group %s cannot be sent back: %s", back.group, error)
            done([SendBackResult(int(code_of(error)))] * len(entries))

    def _is_cut(self, key: WindowKey, one: Settlement) -> bool:
        """Return whether the log lost its end before the messages, since the lease was given."""
        epoch = one.lease >> 32
        if not 0 < epoch < self._store.epoch():
            return False
        cut = self._store.cut_offset(key[1], key[2], epoch)
        return cut is not None and one.first >= cut

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
        windows = self._windows.of_group(wanted.group).values()
        runs = [run for one in windows for run in one.runs if run.member == wanted.member]
        messages = sum(run.count for run in runs)
        leaving = self._release(wanted.group, wanted.member, "an administrator released it")
        if leaving:
            self._send_back(leaving, _nobody)
        self._core.reply_when_saved(request, ReleasedLeases(messages))
        return None

    def _release(self, group: str, member: str, reason: str) -> list[Leaving]:
        leaving: list[Leaving] = []
        for key, window in self._windows.of_group(group).items():
            for run in window.release(member):
                leaving += self._judge(key, window, run, reason)
                window.hold_back(run)
                self._stir(key)
        return leaving

    # ---- Helpers ---------------------------------------------------------------------

    def _config(self, group: str) -> GroupConfig:
        return self._group_table.get(group) or GroupConfig(group)

    def _check_mode(self, group: str) -> GroupConfig:
        config = self._group_table.get(group)
        if config is None:
            raise GroupNotFound(f"no consumer group {group!r}; its members have not joined yet")
        # The heartbeat says it as a matter of rights; here it is one of the request.
        mode = DeliveryMode.MESSAGE if config.delivery == DeliveryMode.QUEUE else config.delivery
        if sentence := self._group_table.other_delivery(group, mode):
            raise InvalidArgument(sentence)
        return config

    def _check_receives(self, group: str) -> None:
        """Check that a group may receive; what it holds it may settle in any case."""
        self._check_mode(group)
        self._group_table.check_consumes(group)

    @property
    def known_members(self) -> int:
        """Return the number of members whose connection is noted."""
        return len(self._peers)

    def _forget_members(self) -> None:
        """Forget members that left and hold nothing; a gateway's connection outlives them."""
        gone = [one for one in self._peers if self._groups.client(one[1]) is None]
        holders = {
            (group, run.member)
            for group in {group for group, _ in gone}
            for window in self._windows.of_group(group).values()
            for run in window.runs
            if run.lease != NOBODY
        }
        for one in gone:
            if one not in holders:
                peer = self._peers.pop(one)
                del self._members[peer][one]
                if not self._members[peer]:
                    del self._members[peer]
                self._answered.pop(one, None)

    def _meet(self, peer: Peer, group: str, member: str, *, reports: bool) -> None:
        """Note by which connection a member comes: it is not lost, or not any more.

        A report may come by a connection of its own: what the member holds lasts as long as that
        of its heartbeats.
        """
        key = (group, member)
        known = self._peers.get(key)
        if known is peer:
            return  # nearly always
        if reports and (peer := self._groups.peer_of(member) or peer) is known:
            return
        if known is not None:
            del self._members[known][key]
            # What waits there has nobody who would get it.
            for held in self._hold.of_peer(known):
                if (held.wanted.group, held.wanted.member) == key:
                    self._hold.release(held)
        self._peers[key] = peer
        self._members.setdefault(peer, {})[key] = None
        self._lost.pop(key, None)

    def _order(self, key: WindowKey, window: DeliveryWindow, config: GroupConfig) -> None:
        """Have a window follow the mode of its group; after a restart the keys are read anew."""
        window.is_strict = _is_ordered(config, key)
        if window.is_strict and window.order is None:
            offsets = (offset for run in window.runs for offset in run.offsets())
            window.begin_order(self._reader.keys_of(key[1:], offsets))
        elif window.order is not None and not window.is_strict:
            window.end_order()

    def _look_for_block(self, key: WindowKey, window: DeliveryWindow, now_ms: int) -> None:
        """Note and report when one key holds up a queue."""
        if window.order is None or window.passed < MAX_PASSED or window.due() is not None:
            return
        self._blocked.add(key)
        if now_ms - self._block_reported.get(key, -KEY_REPORT_MS) >= KEY_REPORT_MS:
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

    def _stir(self, key: WindowKey) -> None:
        self._hold.stir(key[1])

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
            lambda feature: len(feature._blocked),
        ),
        gauge(
            "delivery_leases",
            "leases and waiting runs of messages that are acknowledged one by one",
            lambda feature: feature._windows.numbers.runs,
        ),
        counter(
            "delivery_expired_total",
            "messages whose lease ended before they were settled",
            lambda feature: feature._counts.expired,
            unit="messages",
        ),
        counter(
            "delivery_redelivered_total",
            "messages that were handed out again",
            lambda feature: feature._counts.redelivered,
            unit="messages",
        ),
        counter(
            "delivery_stale_total",
            "settlements that came after somebody else had got the messages",
            lambda feature: feature._counts.stale,
        ),
        gauge(
            "delivery_oldest_lease_seconds",
            "age of the oldest lease",
            lambda feature: feature._oldest_s(),
            unit="s",
        ),
    )


class _Answered(msgspec.Struct, frozen=True):
    """Answer to a receive.

    Attributes:
        attempt_id: Of the request.
        leases: Windows and numbers.
    """

    attempt_id: int
    leases: list[tuple[WindowKey, int]]


class _Taking:
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
        core: Core,
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
        self._core = core
        self._reader = reader
        self._numbers = windows.numbers
        self._by_group = by_group
        self._held = held
        self._verify = held.wanted.verify
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
        member = self._held.wanted.member
        while not self.is_full and (run := window.due()) is not None:
            try:
                found = self._reader.read_again(
                    key[1:],
                    run.first,
                    run.bits,
                    *self._left(),
                    wanted=None if run.attempt or is_retry else self._held.filter,
                    verify=self._verify,
                    expiry=expiry,
                )
            except CorruptRecord as error:
                _log.error("messages of group %s cannot be handed out again: %s", key[0], error)
                window.leave(run)
                window.wait(run, self._now_ms + NOT_SENT_BACK_MS)
                continue
            if found.gone:
                window.lose(run, found.gone)
            self.expired += found.expired
            if found.is_expired:
                again = window.hand_out_again(run, found.bits, member, self._now_ms, self._lease_ms)
                self._bury(key, window, again)
            elif found.bits:
                self.redelivered += found.bits.bit_count()
                again = window.hand_out_again(run, found.bits, member, self._now_ms, self._lease_ms)
                self._note(key, again, found, is_retry)
            elif not found.gone:
                break  # not to be seen yet
        while not self.is_full and window.unsettled < self._max_unsettled:
            most, max_bytes = self._left()
            most = min(most, self._max_unsettled - window.unsettled)
            wanted = None if is_retry else self._held.filter
            start = window.next_offset
            found = self._reader.read_new(
                key[1:],
                start,
                most,
                max_bytes,
                wanted,
                least=(self._most + 1) // 2 - self.messages,
                verify=self._verify,
                expiry=expiry,
            )
            self.expired += found.expired
            if found.end <= start:
                break  # nothing new; where the store knows less than the log, nothing is moved back
            if found.first > start:
                window.hand_out(found.first, 0, member, self._now_ms, self._lease_ms)
            run = window.hand_out(found.end, found.bits, member, self._now_ms, self._lease_ms)
            if run is not None and found.is_expired:
                self._bury(key, window, run)
            elif run is not None:
                self._note(key, run, found, is_retry)
            if not found.bits:
                # A filter may pass over all of a long queue: others have their turn first.
                self.passed = True
                break

    def take_again(self, key: WindowKey, window: DeliveryWindow | None, lease: int) -> None:
        """Take what is left of a lease whose answer was lost."""
        run = None if window is None else window.held(lease)
        if run is not None and run.member == self._held.wanted.member:
            expiry = Expiry(self._core.clock.wall_ms(), False)
            found = self._reader.read_again(
                key[1:], run.first, run.bits, MAX_RUN, MAX_PULL_BYTES, expiry=expiry
            )
            if found.bits:
                self._note(key, run, found, key[1] == self._held.topics[1])

    def _bury(self, key: WindowKey, window: DeliveryWindow, run: Run) -> None:
        self.buried.append((key, window, run))
        self.expired += run.count
        self.passed = True

    def _take_in_order(
        self, key: WindowKey, window: DeliveryWindow, order: KeyOrder, expiry: Expiry | None
    ) -> None:
        """Take the first messages of their keys, and let in new ones until there are enough."""
        is_open = True
        while is_open and not self.is_full:
            most = min(self._left()[0], self._max_unsettled - (window.unsettled - window.passed))
            if most <= 0:
                return
            free: dict[Run, int] = {}
            count = 0
            try:
                if window.passed < 2 * most:
                    self._admit(key, window, order)  # so that several of a key go together
                count = window.take_free(most, free)
                # All that there is at once: each run is a lease by itself.
                while count < most and self._admit(key, window, order):
                    count += window.take_free(most - count, free)
            except MQMeshError:
                # What is read already goes out, whatever is behind it.
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
            try:
                found = self._reader.read_again(
                    key[1:],
                    run.first,
                    bits,
                    *self._left(),
                    verify=self._verify,
                    expiry=expiry,
                )
            except CorruptRecord as error:
                _log.error("messages of group %s cannot be handed out: %s", key[0], error)
                window.leave(run)
                window.wait(run, self._now_ms + NOT_SENT_BACK_MS)
                return True
        left = bits & ~found.bits & ~found.gone
        if found.gone:
            window.lose(run, found.gone)
        self.expired += found.expired
        if found.bits:
            is_again = run.attempt > 0
            leased = window.hand_out_again(
                run, found.bits, self._held.wanted.member, self._now_ms, self._lease_ms
            )
            if found.is_expired:
                self._bury(key, window, leased)
            else:
                self.redelivered += leased.count * is_again
                self._note(key, leased, found, is_retry=False)
        window.offer(run, left)
        return not left

    def _admit(self, key: WindowKey, window: DeliveryWindow, order: KeyOrder) -> bool:
        """Let new messages wait for their turn; False if there are none, or no more may wait."""
        most = min(max(2 * self._left()[0], LEAST_ADMITTED), MAX_PASSED - window.passed)
        if most <= 0:
            return False
        start = window.next_offset
        some, end = order.take_ahead(start, most, MAX_RUN)
        if not some:
            keys, end = self._reader.read_keys(
                key[1:], start, self._left()[1], self._held.filter, verify=self._verify
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

    def _note(self, key: WindowKey, run: Run, found: Read, is_retry: bool) -> None:
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


def _is_ordered(config: GroupConfig, key: WindowKey) -> bool:
    """Return whether messages of a queue go out to a group in the order of their keys."""
    group, topic, _ = key
    return config.delivery == DeliveryMode.FIFO and topic != retry_topic(group)


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


def _priority_of(place: tuple[Topic, int, bool]) -> int:
    return place[1]


def _low_of(run: Run) -> int:
    return run.low


def _nobody(codes: list[int]) -> None:
    """Do nothing: nobody waits for the outcome."""

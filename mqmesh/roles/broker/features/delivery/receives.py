"""RECEIVE_MESSAGE: messages are leased to members, who wait until there are some."""

from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.errors import (
    BrokerNotAvailable,
    InvalidArgument,
    MQMeshError,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import check_topic, retry_topic
from mqmesh.namespaces import namespace_of
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.delivery import MIN_INVISIBLE_MS, ReceiveRequest, ReceiveResponse
from mqmesh.protocol.groups import GroupConfig, check_client_group
from mqmesh.protocol.pulling import MAX_PULL_BYTES
from mqmesh.protocol.request import Peer, Request
from mqmesh.protocol.route import OnExpired
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.runs import Run
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows, WindowKey
from mqmesh.roles.broker.features.delivery.failed_messages import FailedMessages
from mqmesh.roles.broker.features.delivery.lease_reader import Expiry, LeaseReader, Piece
from mqmesh.roles.broker.features.delivery.member_peers import Member, MemberPeers
from mqmesh.roles.broker.features.delivery.queue_order import QueueOrder
from mqmesh.roles.broker.features.delivery.receive_hold import HeldReceive, ReceiveHold
from mqmesh.roles.broker.features.delivery.settlements import Settlements
from mqmesh.roles.broker.features.delivery.taking import MAX_PASSED, Taking, follow_mode, is_blocked
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_limits import GroupLimits
from mqmesh.roles.broker.group_state.group_pulls import GroupPulls
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.reading.pull_filter import MAX_VERIFIED_BYTES, pull_filter
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.security.quotas import over_quota
from mqmesh.units import KIB, MIB

TURN_BYTES: Final = 4 * MIB
"""Given out in one turn of the loop."""
LEAST_BYTES: Final = 64 * KIB


class Receives:
    """Receives of members: answered with messages, or held until there are some.

    Args:
        core: The core of the broker.
        topics: Topics.
        groups: Members of groups.
        group_table: Settings of groups.
        windows: Messages that groups hold.
        by_group: Messages and bytes handed out to each group.
        limits: Pauses and rates of groups.
        reader: Reads messages.
        hold: Receives that wait.
        queues: Order of the queues.
        peers: Connections of members.
        failed: Messages that failed.
        settlements: Reports that come with receives.

    Attributes:
        is_used: False until somebody receives: there is nothing to serve before.
        redelivered: Messages that were handed out again, since the start.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        windows: DeliveryWindows,
        by_group: GroupPulls,
        limits: GroupLimits,
        reader: LeaseReader,
        hold: ReceiveHold,
        queues: QueueOrder,
        peers: MemberPeers,
        failed: FailedMessages,
        settlements: Settlements,
    ) -> None:
        self.is_used = False
        self.redelivered = 0
        self._core = core
        self._settings = core.settings
        self._clock = core.clock
        self._quotas = core.quotas
        self._store = core.store
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._windows = windows
        self._by_group = by_group
        self._limits = limits
        self._reader = reader
        self._hold = hold
        self._queues = queues
        self._peers = peers
        self._failed = failed
        self._settlements = settlements
        self._bytes_left = TURN_BYTES
        # Groups and topics whose receives look again in the next turn, whatever comes.
        self._passed: dict[tuple[str, str], None] = {}
        # Members that hold most, of windows that are full, as of the last tick.
        self._most_held: dict[WindowKey, tuple[str, int]] = {}
        # Leases of the last answer to each member, of each topic.
        self._answered: dict[Member, dict[str, _Answered]] = {}
        # Topics of which groups are paused, or have had what a second or their namespace allows.
        self._held_back: dict[str, None] = {}

    # ---- Events ----------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Let those look again that were held back, and answer those whose time is over."""
        for topic in self._held_back:
            self._hold.stir(topic)
        self._held_back.clear()
        self._most_held.clear()
        self.serve()
        for held in self._hold.expired(now_ms):
            if not self._try(held) and held.key not in self._passed:
                self._hold.release(held)
                self._answer_nothing(held)
        if now_ms >= self._hold.due_ms:
            self._hold.expect_next()

    def serve(self) -> bool:
        """Answer receives for which something came; True if some wait for the next turn."""
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

    def forget(self, member: Member) -> None:
        """Forget a member."""
        self._answered.pop(member, None)

    def peer_gone(self, peer: Peer) -> None:
        """Forget the receives of a connection."""
        for held in self._hold.of_peer(peer):
            self._hold.release(held)

    def topic_deleted(self, topic: str) -> None:
        """Fail the receives that wait for a topic."""
        for held in self._hold.of_topic(topic):
            if held.wanted.topic == topic and self._hold.release(held):
                held.pending.fail(TopicNotFound(f"topic {topic!r} was deleted"))

    def stopping(self) -> None:
        """Fail all receives that wait: the broker stops."""
        error = BrokerNotAvailable(f"broker {self._settings.now.broker_name} is stopping")
        for held in self._hold.all():
            self._hold.release(held)
            held.pending.fail(error)

    # ---- Receive ---------------------------------------------------------------------

    def receive(self, request: Request, wanted: ReceiveRequest) -> Reply | None:
        """Lease messages to a member, or hold the request until there are some."""
        check_client_group(wanted.group)
        check_topic(wanted.topic)
        if wanted.settle:
            codes = self._settlements.take(
                request.peer, wanted.group, wanted.topic, wanted.member, wanted.settle
            )
            held = HeldReceive(request.later(), wanted, None, (wanted.topic, ""), codes)
            taken = False
            try:
                held = self._checked(request, wanted, codes)
                taken = self._bytes_left > 0 and self._take(held)
            except MQMeshError:
                pass  # the next receive names it
            if not taken:
                self._answer(held, ReceiveResponse([], codes))
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
        self._check(wanted.group)
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
        member = (wanted.group, wanted.member)
        self._peers.meet(request.peer, member, reports=bool(wanted.settle))
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
            self._check(held.wanted.group)
            if not self._take(held):
                return False
        except MQMeshError as error:
            held.pending.fail(error)
        self._hold.release(held)
        return True

    def _take(self, held: HeldReceive) -> bool:
        """Lease what there is for a receive, and answer it; False if there is nothing."""
        wanted = held.wanted
        config = self._group_table.settings(wanted.group)
        is_limited = bool(config.paused_until or config.paused_topics or config.max_messages_per_s)
        most = wanted.max_messages
        if is_limited:
            if self._limits.is_held(config, wanted.topic):
                self._limits.held_back += 1
                self._held_back[wanted.topic] = None
                return False
            most = min(self._limits.most_messages(config) or most, most)
        max_unsettled = config.max_unsettled
        room = self._room_of(wanted.group) if self._quotas.namespaces else None
        if room is not None:
            # Redelivered messages were counted when they were handed out first.
            most, max_unsettled = (min(most, room), max_unsettled) if room > 0 else (most, 0)
        peer, now_ms = held.pending.peer, self._clock.monotonic_ms()
        taking = Taking(
            self._reader,
            self._windows,
            self._by_group,
            held,
            most,
            max(wanted.invisible_ms or config.invisible_ms, MIN_INVISIBLE_MS),
            max_unsettled,
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
            expiry = Expiry(self._clock.wall_ms(), False)
            for key, lease in last.leases:
                taking.take_again(key, self._windows.find(key), lease, expiry)
        if not taking.leases:
            self._take_of_queues(held, config, taking)
        if not taking.leases:
            if room is not None and room <= 0:
                self._held_back[wanted.topic] = None
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

    def _room_of(self, group: str) -> int | None:
        """Return how many messages more the namespace of a group may hold; None for any number."""
        namespace = namespace_of(group)
        quota = self._quotas.namespaces.get(namespace)
        if quota is None or quota.unsettled_messages is None:
            return None
        return quota.unsettled_messages - self._windows.unsettled_of(namespace)

    def _take_of_queues(self, held: HeldReceive, config: GroupConfig, taking: Taking) -> None:
        """Lease messages of all queues of the topic and of the retry topic, in turn.

        Raises:
            MQMeshError: Nothing could be leased, because of this.
        """
        wanted = held.wanted
        error: MQMeshError | None = None
        main = self._topics.get(wanted.topic)
        buries = main is not None and main.config.on_expired == OnExpired.DEAD_LETTER
        expiry = Expiry(self._clock.wall_ms(), buries)
        for known, queue_id, is_retry in self._queues.places(held, config):
            if taking.has_enough:
                break
            topic = held.topics[is_retry]
            key = (wanted.group, topic, queue_id)
            try:
                window = self._queues.window(key, wanted, is_retry)
                follow_mode(key, window, config, self._reader)
                if known.retains:
                    window.pass_over(self._queues.bounds(topic, queue_id)[0])
                taking.take(key, window, is_retry, expiry if known.expires else None)
            except MQMeshError as caught:
                error = error or caught  # other queues have their turn all the same
            known.get_messages += taking.counted
            known.get_bytes += taking.counted_bytes
            taking.counted = taking.counted_bytes = 0
        self.redelivered += taking.redelivered
        self._core.stats.total.expired_messages += taking.expired
        if taking.buried:
            self._bury(taking.buried)
        if not taking.leases:
            if error is not None:
                raise error
            if taking.passed:
                self._passed[held.key] = None
        elif config.priority_fairness:
            self._queues.note_served(held)

    def _bury(self, expired: list[tuple[WindowKey, DeliveryWindow, Run]]) -> None:
        """Make dead letters of messages that have expired."""
        leaving = []
        for key, window, run in expired:
            waiting = window.nack(run.lease, run.first, run.bits)
            if isinstance(waiting, Run):
                reason = "its time to live was over"
                leaving.append(self._failed.leaving(key, window, waiting, reason))
        self._failed.send_back(leaving)

    def _answer_nothing(self, held: HeldReceive) -> None:
        """Answer a receive that waited in vain, and say so if its group may hold no more."""
        if sentence := self._why_nothing(held):
            retry_ms = self._settings.now.busy_retry_after_ms
            held.pending.fail(SystemBusy(sentence, retry_after_ms=retry_ms))
        else:
            held.pending.done(ReceiveResponse())

    def _why_nothing(self, held: HeldReceive) -> str:
        """Return which limit keeps messages from a receive; empty if none does."""
        group = held.wanted.group
        room = self._room_of(group)
        if room is not None and room <= 0:
            namespace = namespace_of(group)
            limit = self._quotas.namespaces[namespace].unsettled_messages or 0
            return over_quota(namespace, "unsettled_messages", limit - room, limit)
        most = self._group_table.settings(group).max_unsettled
        for key, window in self._windows.of_group(group).items():
            _, topic, queue_id = key
            if topic not in held.topics:
                continue
            if window.order is not None and is_blocked(window):
                name, count = window.order.longest()
                return (
                    f"{window.passed} messages of queue {queue_id} of {topic!r} wait for others of "
                    f"their sharding keys, {count} of them for {name!r}; no more may ({MAX_PASSED})"
                )
            if window.unsettled - window.passed < most:
                continue
            if window.next_offset < self._store.queue_bounds(topic, queue_id)[1]:
                if key not in self._most_held:
                    self._most_held[key] = window.holder_of_most()
                member, count = self._most_held[key]
                return (
                    f"members of group {group!r} hold {window.unsettled} messages of queue "
                    f"{queue_id} of {topic!r}, {member or 'nobody'} most of them, {count}; no more "
                    f"may be handed out (max_unsettled = {most})"
                )
        numbers = self._windows.numbers
        if numbers.is_full:
            return f"{numbers.most} leases are given out by this broker, no more may"
        return ""

    def _check(self, group: str) -> None:
        """Check that a group may receive; what it holds it may settle in any case."""
        self._group_table.check_acknowledges(group)
        self._group_table.check_consumes(group)


class _Answered(msgspec.Struct, frozen=True):
    """Answer to a receive.

    Attributes:
        attempt_id: Of the request.
        leases: Windows and numbers.
    """

    attempt_id: int
    leases: list[tuple[WindowKey, int]]

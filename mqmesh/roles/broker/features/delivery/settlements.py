"""SETTLE_MESSAGES: reports of members on messages that they hold."""

import logging
from typing import Final

from mqmesh.errors import InvalidArgument, MQMeshError, StaleReceipt
from mqmesh.message import retry_topic
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import Reply
from mqmesh.protocol.delivery import (
    MIN_INVISIBLE_MS,
    SettleAction,
    Settlement,
    SettleRequest,
    SettleResponse,
)
from mqmesh.protocol.groups import GroupConfig, check_client_group
from mqmesh.protocol.processing import CommitProcessedRequest
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.runs import Run
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow, Settled
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows, WindowKey
from mqmesh.roles.broker.features.delivery.failed_messages import (
    FailedMessages,
    RunToSendBack,
    SendsBack,
)
from mqmesh.roles.broker.features.delivery.lease_reader import LeaseReader
from mqmesh.roles.broker.features.delivery.member_peers import MemberPeers
from mqmesh.roles.broker.features.delivery.receive_hold import ReceiveHold
from mqmesh.roles.broker.features.delivery.taking import follow_mode, is_ordered
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.state_log import PlannedChange
from mqmesh.roles.broker.topic_state.topic_table import TopicTable

_OK: Final = int(ResponseCode.SUCCESS)
_STALE: Final = int(ResponseCode.STALE_RECEIPT)
_BUSY: Final = int(ResponseCode.SYSTEM_BUSY)
_ILLEGAL: Final = int(ResponseCode.MESSAGE_ILLEGAL)
_FREES_NOTHING: Final = (SettleAction.ACK, SettleAction.EXTEND)
"""Outcomes after which there is no more for others, unless members held all that they may."""
_CODE_OF: Final = {
    Settled.OK: _OK,
    Settled.BEFORE: _OK,
    Settled.STALE: _STALE,
    Settled.LEAVING: _BUSY,
    Settled.FULL: _BUSY,
}

_log = logging.getLogger(__name__)


class Settlements:
    """Reports of members: messages are done, failed, extended or given back.

    Args:
        core: The core of the broker.
        topics: Topics.
        groups: Members of groups.
        group_table: Settings of groups.
        windows: Messages that groups hold.
        reader: Reads keys of messages.
        hold: Receives that wait.
        peers: Connections of members.
        failed: Messages that failed.
        back: Makes retries and dead letters.

    Attributes:
        stale: Settlements that came too late, since the start.
    """

    def __init__(
        self,
        core: Core,
        topics: TopicTable,
        groups: ConsumerGroups,
        group_table: GroupTable,
        windows: DeliveryWindows,
        reader: LeaseReader,
        hold: ReceiveHold,
        peers: MemberPeers,
        failed: FailedMessages,
        back: SendsBack,
    ) -> None:
        self.stale = 0
        self._core = core
        self._clock = core.clock
        self._store = core.store
        self._topics = topics
        self._groups = groups
        self._group_table = group_table
        self._windows = windows
        self._reader = reader
        self._hold = hold
        self._peers = peers
        self._failed = failed
        self._back = back

    def settle(self, request: Request, wanted: SettleRequest) -> Reply | None:
        """Take a member's report on messages; answered once that is in the log, and safe."""
        check_client_group(wanted.group)
        codes = self.take(
            request.peer, wanted.group, wanted.topic, wanted.member, wanted.settlements
        )
        if all(one.action == SettleAction.EXTEND for one in wanted.settlements):
            request.later().done(SettleResponse(codes))  # no promise that has to be kept
        else:
            self._core.reply_when_saved(request, SettleResponse(codes))
        return None

    def take(
        self,
        peer: Peer,
        group: str,
        topic: str,
        member: str,
        settlements: list[Settlement],
    ) -> list[int]:
        """Settle messages.

        Args:
            peer: Connection of the member.
            group: Consumer group.
            topic: Physical topic that was received from.
            member: Client id.
            settlements: Its report.

        Returns:
            A response code for each; what they say may not be in the log yet, nor safe.

        Raises:
            TopicNotFound, GroupNotFound: There is none.
            InvalidArgument: The group is in another delivery mode.
        """
        config = self._begin(peer, group, topic, member)
        now_ms = self._clock.monotonic_ms()
        codes: list[int] = []
        leaving: list[RunToSendBack] = []
        owners: list[int] = []
        for index, one in enumerate(settlements):
            key = (group, retry_topic(group) if one.is_retry else topic, one.queue_id)
            try:
                code = self._settle_one(key, config, member, one, now_ms, leaving)
            except MQMeshError as error:
                # Messages that earlier settlements send back are sent back all the same.
                _log.error("a report of %s for group %s has failed: %s", member, group, error)
                code = int(code_of(error))
            owners += [index] * (len(leaving) - len(owners))
            self.stale += code == _STALE
            codes.append(code)
        for index, code in zip(owners, self._failed.send_back(leaving), strict=True):
            codes[index] = codes[index] or code
        return codes

    def plan_processed(self, peer: Peer, wanted: CommitProcessedRequest) -> PlannedChange:
        """Return the change that settles messages of which a member has made others.

        Args:
            peer: Connection of the member.
            wanted: Its commit; all of it counts, or nothing.

        Raises:
            TopicNotFound, GroupNotFound, InvalidArgument: As for ``take``; or a settlement is no
                acknowledgement.
            StaleReceipt: A message is somebody else's by now, or is settled already.
            StorageError: The log does not take what it has to know before.
        """
        group, topic = wanted.group, wanted.topic
        config = self._begin(peer, group, topic, wanted.member)
        acks: list[tuple[WindowKey, DeliveryWindow, Settlement, int]] = []
        for one in wanted.settlements:
            key = (group, retry_topic(group) if one.is_retry else topic, one.queue_id)
            window, bits = self._windows.find(key), int.from_bytes(one.bits, "little")
            if one.action != SettleAction.ACK or not bits:
                raise InvalidArgument("what was processed is acknowledged, one message at least")
            if window is None or self._is_cut(key, one):
                raise self._stale(key, one)
            self._look_at(key, window, config, one, bits)
            acks.append((key, window, one, bits))
        if not self._windows.changed.keys().isdisjoint([ack[0] for ack in acks]):
            # Marks of the acks may begin only where the log has all changes before them.
            self._core.require_state()
        settled: dict[WindowKey, dict[Run, int]] = {}
        for key, window, one, bits in acks:
            claimed = window.claim(one.lease, one.first, bits)
            if isinstance(claimed, Settled):
                raise self._stale(key, one)
            # Without outputs it is an acknowledgement, which may be repeated.
            if sum(mask.bit_count() for _, mask in claimed) < bits.bit_count() and (
                wanted.batch_count or self._is_sent_back(key, Run(one.first, bits, 0))
            ):
                raise self._stale(key, one)
            for run, mask in claimed:
                of_window = settled.setdefault(key, {})
                of_window[run] = of_window.get(run, 0) | mask

        return self._windows.plan_settled(settled)

    def _begin(self, peer: Peer, group: str, topic: str, member: str) -> GroupConfig:
        """Check a report, and note its member's connection; return the settings of its group."""
        self._topics.require(topic)
        config = self._group_table.check_acknowledges(group)
        known = self._groups.find(group)
        # Not any name, since tables are bounded.
        is_known = known is not None and member in known.members
        if is_known or self._peers.is_lost((group, member)):
            self._peers.meet(peer, (group, member), reports=True)
        return config

    def _settle_one(
        self,
        key: WindowKey,
        config: GroupConfig,
        member: str,
        one: Settlement,
        now_ms: int,
        leaving: list[RunToSendBack],
    ) -> int:
        """Settle messages, and add to what is to be sent back; return the code."""
        window = self._windows.find(key)
        if window is None or self._is_cut(key, one):
            return _STALE
        bits = int.from_bytes(one.bits, "little")
        if not bits:
            return _ILLEGAL
        self._look_at(key, window, config, one, bits)
        if one.action == SettleAction.ACK:
            settled = window.ack(one.lease, one.first, bits)
            if settled is Settled.BEFORE:
                # A repeat, mostly; or late work on what another member sent back meanwhile.
                return _STALE if self._is_sent_back(key, Run(one.first, bits, 0)) else _OK
            return _CODE_OF[settled]
        if one.action == SettleAction.EXTEND:
            length_ms = max(one.delay_ms, MIN_INVISIBLE_MS)
            return _CODE_OF[window.extend(one.lease, one.first, bits, member, now_ms, length_ms)]
        follow_mode(key, window, config, self._reader)
        if one.action == SettleAction.RETURN:
            return _CODE_OF[window.give_back(one.lease, one.first, bits)]
        run = window.nack(one.lease, one.first, bits)
        if isinstance(run, Settled):
            return _CODE_OF[run]
        if one.action == SettleAction.REJECT:
            leaving.append(self._failed.leaving(key, window, run, one.reason))
        else:
            leaving += self._failed.judge(key, window, run, one.reason, one.delay_ms)
        return _OK

    def _look_at(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        config: GroupConfig,
        one: Settlement,
        bits: int,
    ) -> None:
        """Prepare a window for a settlement, and have those look for whom it may free messages."""
        window.is_strict = is_ordered(config, key)
        is_shown = one.first + bits.bit_length() > window.next_offset
        is_full = window.unsettled >= config.max_unsettled or self._windows.numbers.is_full
        if is_full or is_shown or window.order is not None or one.action not in _FREES_NOTHING:
            self._hold.stir(key[1])
        if is_shown:
            end = self._store.queue_bounds(key[1], key[2])[1]
            window.meet(one.lease, one.first, bits, end, config.max_unsettled)

    def _is_sent_back(self, key: WindowKey, run: Run) -> bool:
        try:
            return self._back.is_sent_back(key[0], key[1:], run.offsets())
        except MQMeshError as error:
            _log.error("what group %s sent back cannot be read: %s", key[0], error)
            return False

    def _is_cut(self, key: WindowKey, one: Settlement) -> bool:
        """Return whether the log lost one of the messages since the lease was given."""
        epoch = one.lease >> 32
        if not 0 < epoch < self._store.epoch():
            return False
        cut = self._store.cut_offset(key[1], key[2], epoch)
        last = one.first + int.from_bytes(one.bits, "little").bit_length() - 1
        return cut is not None and last >= cut

    def _stale(self, key: WindowKey, one: Settlement) -> StaleReceipt:
        """Return why messages that were processed cannot be settled, and count it."""
        self.stale += 1
        group, topic, queue_id = key
        return StaleReceipt(
            f"messages of group {group!r} from offset {one.first} on in queue {queue_id} of "
            f"{topic}: one was settled before, or is somebody else's by now; of what was made of "
            "them nothing is stored"
        )

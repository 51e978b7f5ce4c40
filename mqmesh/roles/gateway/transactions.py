"""Transactions of RocketMQ's producers: decisions about half messages, and check-backs."""

import itertools
import logging
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.half_batch import read_half_meta
from mqmesh.batch.record_batch import check_batch, decode_messages
from mqmesh.errors import MQMeshError, ProtocolError
from mqmesh.protocol.command import Command, decode_header
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.transactions import CheckTransactionState, Decision, EndOutcome
from mqmesh.roles.gateway.members import GatewayMembers, broker_of
from mqmesh.roles.gateway.messages import UNIQ_KEY, log_offset, offset_message_id, to_record
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.sends import Stored
from mqmesh.roles.gateway.session import Handler, RemotingSession, number_field
from mqmesh.roles.gateway.upstream import REQUEST_MS, Upstream
from mqmesh.sdk.transactions.transaction_ends import EndSender, HalfPlace, OnEnded

MOST_HALVES: Final = 65_536
"""Half messages whose place is remembered. One that is not is checked back when its time comes."""
MOST_GROUPS: Final = 1_000

CHECKED: Final = 1 << 62
"""Bit of the offsets of half messages that a broker checks, which are those of the half topic;
no log is so long."""

COMMIT: Final = 8
ROLLBACK: Final = 12
"""Values of ``commitOrRollback``; all others mean that the producer does not know yet."""

_DECISIONS: Final = {COMMIT: Decision.COMMIT, ROLLBACK: Decision.ROLLBACK}
_log = logging.getLogger(__name__)


class _Half(msgspec.Struct, frozen=True):
    """A half message, and what proves that its end may be decided here."""

    place: HalfPlace
    ordinal: int
    group: str

    @property
    def queue_offset(self) -> int:
        """Its place in the half topic, which clients repeat."""
        return self.place.base_queue_offset + self.ordinal


class GatewayTransactions:
    """Half messages of the gateway's clients.

    Args:
        upstream: Way to the brokers.
        members: Producers that may be queried.
        ports: Addresses of broker groups.
        producer_id: Producer id of the gateway; for brokers the half messages are its own.
        key: Key of the gateway as a producer, which proves that.
    """

    def __init__(
        self,
        upstream: Upstream,
        members: GatewayMembers,
        ports: BrokerPorts,
        producer_id: int,
        key: bytes,
    ) -> None:
        self._upstream = upstream
        self._members = members
        self._ports = ports
        self._producer_id = producer_id
        self._key = key
        self._halves: dict[tuple[str, int], _Half] = {}
        self._senders: dict[str, EndSender] = {}
        self._turn: Iterator[int] = itertools.count()

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of requests about transactions."""
        return {RemotingCode.END_TRANSACTION: self._end}

    def note_sent(self, broker_name: str, offset: int, group: str, stored: Stored) -> None:
        """Note a half message that was stored; its producer names it by its offset in the log."""
        place = HalfPlace(
            broker_name,
            stored.base_queue_offset,
            self._producer_id,
            stored.first_sequence,
            self._key,
        )
        self._note((broker_name, offset), _Half(place, stored.ordinal, group))

    def on_check(self, broker_name: str, command: Command) -> None:
        """Ask a producer of the group how transactions ended.

        Raises:
            ProtocolError: The command cannot be read.
            CorruptBatch: Its batch is damaged.
        """
        check = decode_header(CheckTransactionState, command.header)
        producers = [
            one
            for one in self._members.all()
            if one.broker_name == broker_name and check.group in one.heartbeat.producer_groups
        ]
        if not producers:
            return  # another member is queried, or later
        batch = bytes(command.body)
        header = check_batch(batch)
        read_half_meta(batch, header)
        messages = decode_messages(batch, header, broker_name=broker_name)
        place = HalfPlace(
            broker_name,
            check.base_queue_offset,
            header.producer_id,
            header.first_sequence - check.first_ordinal,
            check.token,
        )
        address = self._ports.address(broker_name)
        producer = producers[next(self._turn) % len(producers)]
        for ordinal in check.ordinals:
            number = ordinal - check.first_ordinal
            if not 0 <= number < len(messages):
                continue
            message = messages[number]
            # A part of a batch does not say where the batch is, and clients only repeat the number.
            offset = CHECKED | log_offset(check.base_queue_offset, ordinal)
            self._note((broker_name, offset), _Half(place, ordinal, check.group))
            unique = message.property(UNIQ_KEY, "") or message.message_id
            fields = {
                "topic": message.topic,
                "tranStateTableOffset": str(message.queue_offset),
                "commitLogOffset": str(offset),
                "msgId": unique,
                "transactionId": unique,
                "offsetMsgId": offset_message_id(address, offset),
                "bname": broker_name,
            }
            record = to_record(message, address, check.group)
            producer.session.notify(RemotingCode.CHECK_TRANSACTION_STATE, fields, record)

    def end(
        self, group: str, place: HalfPlace, ordinal: int, decision: Decision, on_ended: OnEnded
    ) -> None:
        """Decide about a half message.

        Args:
            group: Its producer group.
            place: Its batch.
            ordinal: Its place in that.
            decision: The decision.
            on_ended: Called once with the outcome, never before this returns.
        """
        deadline_ms = self._upstream.loop.clock.monotonic_ms() + REQUEST_MS
        self._sender(group).add(place, ordinal, decision, deadline_ms, on_ended)

    def close(self, error: MQMeshError) -> None:
        """End decisions that have no outcome."""
        for sender in self._senders.values():
            sender.end_all(error)

    def _end(self, session: RemotingSession, request: RemotingCommand) -> None:
        decision = _DECISIONS.get(number_field(request, "commitOrRollback"))
        key = (broker_of(session), number_field(request, "commitLogOffset"))
        half = self._halves.get(key)
        named = (request.fields.get("producerGroup"), number_field(request, "tranStateTableOffset"))
        if half is not None and named != (half.group, half.queue_offset):
            _log.warning("an end of a transaction names another message than is there: %s", named)
            half = None
        if decision is None or half is None:
            # Unknown to the producer, or to a gateway that was restarted: the producer is queried.
            session.answer(request)
            return

        def ended(outcome: EndOutcome | MQMeshError) -> None:
            if isinstance(outcome, MQMeshError):
                session.fail(request, outcome)
                return
            if outcome <= EndOutcome.ENDED_BEFORE:
                self._halves.pop(key, None)
            else:
                _log.warning("a transaction of group %s: %s", half.group, outcome.name)
            session.answer(request)

        self.end(half.group, half.place, half.ordinal, decision, ended)

    def _sender(self, group: str) -> EndSender:
        sender = self._senders.get(group)
        if sender is None:
            if len(self._senders) >= MOST_GROUPS:
                oldest = self._senders.pop(next(iter(self._senders)))
                self._upstream.loop.call_later(2 * REQUEST_MS, partial(oldest.end_all, _GIVEN_UP))
            sender = self._senders[group] = EndSender(self._upstream, group)
        return sender

    def _note(self, key: tuple[str, int], half: _Half) -> None:
        self._halves.pop(key, None)
        if len(self._halves) >= MOST_HALVES:
            del self._halves[next(iter(self._halves))]
        self._halves[key] = half


_GIVEN_UP: Final = ProtocolError("the gateway serves too many producer groups")

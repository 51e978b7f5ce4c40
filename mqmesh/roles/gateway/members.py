"""Members of consumer groups that came by the gateway: heartbeats, generations, claims and locks.

The broker keeps each client of RocketMQ as a member of its own, many on the gateway's connection.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from mqmesh.errors import (
    GroupNotFound,
    InvalidArgument,
    MQMeshError,
    RemoteProtocolError,
    TransportError,
)
from mqmesh.filtering.sql92 import parse_sql
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import (
    ConsumeFromWhere,
    ConsumerData,
    ConsumerIdsChanged,
    ConsumerList,
    ConsumerListRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
    MessageModel,
    Subscription,
    UnlockBatchRequest,
    UnregisterClientRequest,
)
from mqmesh.protocol.pulling import ExpressionType
from mqmesh.protocol.remoting import bodies
from mqmesh.protocol.remoting.bodies import (
    CheckClientBody,
    ConsumerIds,
    HeartbeatData,
    LockBody,
    LockedBody,
    decode_body,
    encode_body,
)
from mqmesh.protocol.remoting.codes import LANGUAGES, RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.messages import tag_expression
from mqmesh.roles.gateway.session import Handler, RemotingSession, text_field
from mqmesh.roles.gateway.upstream import Upstream

LEAVE_MS: Final = 1_000
"""So long after its connection ended a client leaves its groups, unless it came back."""
NOTICE_MS: Final = 10
"""A broker sends notice of a change once for each member of the gateway's connection; those that
come within this time are passed on as one."""
FAREWELL_MS: Final = 100
"""So long after its farewell a client leaves a consumer group: clients of 5 send their last commits
by another thread, a few milliseconds behind the farewell."""
RENEW_AGAIN_MS: Final = 300
RENEWALS: Final = 10
"""Number of tries to renew a lock, which last as long as a new master keeps it."""
MOST_CLAIMS: Final = 65_536
"""Queues of one member whose generation is kept."""

_FROM: Final = "CONSUME_FROM_"
_log = logging.getLogger(__name__)

QueueKey = tuple[str, str, int]
"""Group, topic and queue."""


class GatewayMember(msgspec.Struct, eq=False):
    """A client of RocketMQ at one broker group.

    Attributes:
        broker_name: Broker group.
        client_id: The client.
        session: Newest connection of the member.
        heartbeat: The last one, as it is passed on.
        generations: Of its groups, as the broker said last.
        claims: Generation in which each queue was claimed.
        epochs: Epoch of the log at the last pull of each queue.
        tokens: Tokens of its locks.
        is_known: The broker has taken a heartbeat of it.
        beats: Heartbeats that came.
    """

    broker_name: str
    client_id: str
    session: RemotingSession
    heartbeat: HeartbeatRequest
    generations: dict[str, int] = {}
    claims: dict[QueueKey, int] = {}
    epochs: dict[QueueKey, int] = {}
    tokens: dict[QueueKey, int] = {}
    is_known: bool = False
    beats: int = 0

    def consumes(self, group: str) -> bool:
        """Return True if it is a member of a consumer group."""
        return any(one.group == group for one in self.heartbeat.consumers)

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """Return its subscription to a topic."""
        for consumer in self.heartbeat.consumers:
            if consumer.group == group:
                return next((one for one in consumer.subscriptions if one.topic == topic), None)
        return None


class GatewayMembers:
    """All clients of RocketMQ that are connected.

    Args:
        upstream: Way to the brokers.
        max_members: Clients at broker groups; further ones are refused by closing their
            connection.
    """

    def __init__(self, upstream: Upstream, max_members: int) -> None:
        self._upstream = upstream
        self._max_members = max_members
        self._members: dict[tuple[str, str], GatewayMember] = {}
        self._changed: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of requests about membership."""
        return {
            RemotingCode.HEART_BEAT: self._heartbeat,
            RemotingCode.UNREGISTER_CLIENT: self._unregister,
            RemotingCode.CHECK_CLIENT_CONFIG: self._check_client,
            RemotingCode.GET_CONSUMER_LIST_BY_GROUP: self._consumer_list,
            RemotingCode.LOCK_BATCH_MQ: self._lock,
            RemotingCode.UNLOCK_BATCH_MQ: self._unlock,
        }

    def of(self, session: RemotingSession) -> GatewayMember | None:
        """Return the member that a connection speaks for."""
        return self._members.get((session.broker_name, session.client_id))

    def find(self, broker_name: str, client_id: str) -> GatewayMember | None:
        """Return a client at a broker group."""
        return self._members.get((broker_name, client_id))

    def address_of(self, client_id: str) -> str:
        """Return the address of a client that is connected; "" for others."""
        found = [one.session.peer for one in self._members.values() if one.client_id == client_id]
        return found[0] if found else ""

    def all(self) -> Iterable[GatewayMember]:
        """Return all members."""
        return self._members.values()

    def consumers(self, group: str) -> Iterable[GatewayMember]:
        """Return the members of a consumer group, of all brokers."""
        return [one for one in self._members.values() if one.consumes(group)]

    def on_broker_up(self, broker_name: str) -> None:
        """Send heartbeats and locks of all members again: the broker may know nothing of them."""
        for member in self._members.values():
            if member.broker_name == broker_name:
                self._send_heartbeat(member, partial(self._renew_locks, member))

    def on_changed(self, broker_name: str, command: Command) -> None:
        """Pass on to the members of a group that members came or went.

        Raises:
            RemoteProtocolError: The command cannot be read.
        """
        changed = (broker_name, decode_header(ConsumerIdsChanged, command.header).group)
        if changed not in self._changed:
            self._changed.add(changed)
            self._upstream.loop.call_later(NOTICE_MS, partial(self._pass_on, *changed))

    def notify_changed(self, member: GatewayMember, group: str) -> None:
        """Have a member look at its group anew."""
        fields = {"consumerGroup": group}
        member.session.notify(RemotingCode.NOTIFY_CONSUMER_IDS_CHANGED, fields)

    def session_ended(self, session: RemotingSession) -> None:
        """Have the client leave its groups soon, unless it comes back."""
        member = self.of(session)
        if member is not None and member.session is session:
            self._upstream.loop.call_later(LEAVE_MS, partial(self._leave_if_gone, member))

    def leave_all(self) -> None:
        """Have all clients leave: the gateway stops."""
        for member in list(self._members.values()):
            self._leave(member)

    def _pass_on(self, broker_name: str, group: str) -> None:
        self._changed.discard((broker_name, group))
        for member in self._members.values():
            if member.broker_name == broker_name and member.consumes(group):
                self.notify_changed(member, group)

    # ---- Heartbeats ----------------------------------------------------------------------

    def _heartbeat(self, session: RemotingSession, request: RemotingCommand) -> None:
        data = decode_body(HeartbeatData, request.body)
        heartbeat = HeartbeatRequest(
            data.client_id,
            [one.group_name for one in data.producers],
            [_consumer(one) for one in data.consumers],
            _language(request.language),
            str(request.version),
        )
        encode_header(heartbeat)
        if not session.broker_name:
            session.answer(request)  # a name server keeps no members
            return
        key = (session.broker_name, data.client_id)
        former = self.of(session)
        if former is not None and former.client_id != data.client_id:
            self._leave(former)  # a connection speaks for one client
        member = self._members.get(key)
        if member is None:
            if len(self._members) >= self._max_members:
                _log.error("%d clients are the limit (max_connections)", self._max_members)
                session.close()
                return
            member = GatewayMember(*key, session, heartbeat)
            self._members[key] = member
        session.client_id = data.client_id
        member.session, member.heartbeat = session, heartbeat
        member.beats += 1

        def done(error: MQMeshError | None) -> None:
            if error is None:
                session.answer(request)
                return
            is_final = not (error.retriable or isinstance(error, TransportError))
            is_first = not member.is_known and member.heartbeat is heartbeat
            if is_final and is_first and self._members.get(key) is member:
                del self._members[key]
            session.fail(request, error)

        self._send_heartbeat(member, done)

    def _send_heartbeat(
        self, member: GatewayMember, on_done: Callable[[MQMeshError | None], None]
    ) -> None:
        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(HeartbeatResponse, answer.header)
            except MQMeshError as error:
                on_done(error)
                return
            member.is_known = True
            for one in found.memberships:
                member.generations[one.group] = one.generation
            on_done(None)

        header = encode_header(member.heartbeat)
        self._upstream.ask(member.broker_name, RequestCode.HEART_BEAT, header, done)

    def _check_client(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Check the expression of a consumer that starts: a wrong one ends it."""
        subscription = decode_body(CheckClientBody, request.body).subscription_data
        try:
            if subscription.expression_type == ExpressionType.SQL92.value:
                parse_sql(subscription.sub_string or "")
        except InvalidArgument as error:
            session.fail(request, error, RemotingStatus.SUBSCRIPTION_PARSE_FAILED)
        else:
            session.answer(request)

    def _unregister(self, session: RemotingSession, request: RemotingCommand) -> None:
        client_id = text_field(request, "clientID")
        member = self._members.get((session.broker_name, client_id))
        if member is None or member.session is not session:
            session.answer(request)
            return
        produced = request.fields.get("producerGroup")
        producers = [one for one in member.heartbeat.producer_groups if one != produced]
        self._stay_with(member, member.heartbeat.consumers, producers)
        consumed, beats = request.fields.get("consumerGroup"), member.beats

        def leave() -> None:
            if member.beats == beats:  # else it is there again, or has said what is left
                heartbeat = member.heartbeat
                consumers = [one for one in heartbeat.consumers if one.group != consumed]
                self._stay_with(member, consumers, heartbeat.producer_groups)
            session.answer(request)

        if consumed is not None and member.consumes(consumed):
            self._upstream.loop.call_later(FAREWELL_MS, leave)
        else:
            session.answer(request)

    def _stay_with(
        self, member: GatewayMember, consumers: list[ConsumerData], producer_groups: list[str]
    ) -> None:
        """Have a client leave all groups but these."""
        if not consumers and not producer_groups:
            self._leave(member)
            return
        left = msgspec.structs.replace(
            member.heartbeat, consumers=consumers, producer_groups=producer_groups
        )
        if left != member.heartbeat:
            member.heartbeat = left
            self._send_heartbeat(member, _ignore)

    def _leave_if_gone(self, member: GatewayMember) -> None:
        if member.session.is_closed:
            self._leave(member)

    def _leave(self, member: GatewayMember) -> None:
        key = (member.broker_name, member.client_id)
        if self._members.get(key) is not member:
            return
        del self._members[key]
        header = encode_header(UnregisterClientRequest(member.client_id))
        self._upstream.ask(
            member.broker_name, RequestCode.UNREGISTER_CLIENT, header, _ignore_answer
        )

    def _renew_locks(self, member: GatewayMember, error: MQMeshError | None) -> None:
        """Lock a member's queues again: RocketMQ's clients renew each 20 s, which is too late."""
        if error is not None:
            _ignore(error)
            return
        for group in {key[0]: None for key in member.tokens}:
            self._renew(member, group, RENEWALS)

    def _renew(self, member: GatewayMember, group: str, tries: int) -> None:
        entries = [
            LockEntry(topic, queue_id, token)
            for (of, topic, queue_id), token in member.tokens.items()
            if of == group
        ]

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(LockBatchResponse, answer.header).queues
            except MQMeshError as error:
                _log.info("locks of %s could not be renewed: %s", member.client_id, error)
                key = (member.broker_name, member.client_id)
                if tries > 1 and self._members.get(key) is member:
                    again = partial(self._renew, member, group, tries - 1)
                    self._upstream.loop.call_later(RENEW_AGAIN_MS, again)
                return
            for entry in found:
                queue = (group, entry.topic, entry.queue_id)
                if entry.token > 0 and queue in member.tokens:
                    member.tokens[queue] = entry.token

        header = encode_header(LockBatchRequest(group, member.client_id, entries))
        self._upstream.ask(member.broker_name, RequestCode.LOCK_BATCH_MQ, header, done)

    # ---- Lists and locks -----------------------------------------------------------------

    def _consumer_list(self, session: RemotingSession, request: RemotingCommand) -> None:
        group = text_field(request, "consumerGroup")

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(ConsumerList, answer.header)
            except GroupNotFound as error:
                # No error that a client takes for "you are alone": it keeps its queues.
                session.answer(request, RemotingStatus.SYSTEM_ERROR, remark=str(error))
            except MQMeshError as error:
                session.fail(request, error)
            else:
                session.answer(request, body=encode_body(ConsumerIds(found.client_ids)))

        header = encode_header(ConsumerListRequest(group))
        self._upstream.ask(broker_of(session), RequestCode.GET_CONSUMER_LIST_BY_GROUP, header, done)

    def _lock(self, session: RemotingSession, request: RemotingCommand) -> None:
        lock_body = decode_body(LockBody, request.body)
        member = self._member(session, lock_body.client_id)
        group = lock_body.consumer_group
        entries = [
            LockEntry(
                one.topic, one.queue_id, member.tokens.get((group, one.topic, one.queue_id), 0)
            )
            for one in lock_body.mq_set
        ]

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(LockBatchResponse, answer.header).queues
            except MQMeshError as error:
                session.fail(request, error)
                return
            locked = []
            for queue, entry in zip(lock_body.mq_set, found, strict=False):
                key = (group, entry.topic, entry.queue_id)
                if entry.token > 0 and len(member.tokens) < MOST_CLAIMS:
                    member.tokens[key] = entry.token
                    locked.append(queue)
                else:
                    member.tokens.pop(key, None)
            session.answer(request, body=encode_body(LockedBody(locked)))

        header = encode_header(LockBatchRequest(group, member.client_id, entries))
        self._upstream.ask(member.broker_name, RequestCode.LOCK_BATCH_MQ, header, done)

    def _unlock(self, session: RemotingSession, request: RemotingCommand) -> None:
        lock_body = decode_body(LockBody, request.body)
        member = self._member(session, lock_body.client_id)
        group = lock_body.consumer_group
        for one in lock_body.mq_set:
            key = (group, one.topic, one.queue_id)
            member.tokens.pop(key, None)
            member.claims.pop(key, None)
        entries = [LockEntry(one.topic, one.queue_id) for one in lock_body.mq_set]

        def done(answer: Command | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                session.fail(request, answer)
            else:
                session.answer(request)

        header = encode_header(UnlockBatchRequest(group, member.client_id, entries))
        self._upstream.ask(member.broker_name, RequestCode.UNLOCK_BATCH_MQ, header, done)

    def _member(self, session: RemotingSession, client_id: str) -> GatewayMember:
        member = self._members.get((session.broker_name, client_id))
        if member is None:
            raise RemoteProtocolError(f"client {client_id!r:.100} has sent no heartbeat here")
        return member


def _subscription(topic: str, text: str, expression_type: str) -> Subscription:
    return Subscription(topic, tag_expression(text, expression_type), expression_type)


def _consumer(data: bodies.ConsumerBody) -> ConsumerData:
    where = data.consume_from_where.removeprefix(_FROM)
    model = data.message_model
    return ConsumerData(
        data.group_name,
        model if model in set(MessageModel) else MessageModel.CLUSTERING.value,
        where if where in set(ConsumeFromWhere) else ConsumeFromWhere.LAST_OFFSET.value,
        [
            _subscription(one.topic, one.sub_string or "*", one.expression_type or "TAG")
            # In one order: a client in Go says them by chance, and each change is a record.
            for one in sorted(data.subscription_data_set, key=lambda one: one.topic)
        ],
        divides_by_number=True,
    )


def broker_of(session: RemotingSession) -> str:
    """Return the broker group whose port a request came to.

    Raises:
        RemoteProtocolError: It came to the port of the name server.
    """
    if not session.broker_name:
        raise RemoteProtocolError("a request for a broker at the port of the name server")
    return session.broker_name


def _language(name: str) -> str:
    """Return RocketMQ's name of a client's language, which headers may give as a number."""
    if name.isascii() and name.isdecimal() and int(name[:4]) < len(LANGUAGES):
        return LANGUAGES[int(name[:4])]
    return name[:32]


def _ignore(error: MQMeshError | None) -> None:
    if error is not None:
        _log.info("a heartbeat was refused: %s", error)


def _ignore_answer(answer: Command | MQMeshError) -> None:
    """Ignore what became of a farewell."""

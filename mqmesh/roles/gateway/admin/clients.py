"""Queries of administrators to one consumer: its state, and to consume one message at once.

The broker hands a question on to the connection of the consumer; for RocketMQ's consumers that is
the gateway's, which queries them and answers for them.
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import (
    BrokerError,
    ClientNotOnline,
    InvalidArgument,
    MQMeshError,
    OffsetIllegal,
)
from mqmesh.message import StoredMessage
from mqmesh.protocol.client_rpc import (
    MAX_STACKS_LENGTH,
    NEVER,
    AskClient,
    ClientAnswer,
    HandedOver,
    HandedResult,
    HandToRequest,
    RunningInfo,
    RunningInfoRequest,
    RunningQueue,
)
from mqmesh.protocol.codes import code_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import ConsumerOffsetReset
from mqmesh.protocol.membership import Subscription, TopicConsumption
from mqmesh.protocol.remoting.admin_bodies import (
    ConsumeStatusBody,
    HandedBody,
    ProcessQueueBody,
    ResetBody,
    RunningInfoAnswer,
    RunningInfoBody,
    SubscribedBody,
)
from mqmesh.protocol.remoting.bodies import QueueName, decode_body, encode_body
from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.protocol.remoting.loose_json import encode_table, strict_json
from mqmesh.roles.gateway.admin.jobs import Job, JobAnswer, JobHandler
from mqmesh.roles.gateway.members import GatewayMember, GatewayMembers
from mqmesh.roles.gateway.messages import ORDINALS, offset_message_id, to_record
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.units import MIB

if TYPE_CHECKING:
    # It needs packages of an extra.
    from mqmesh.roles.gateway.grpc.service import GrpcService

QUESTION_MS: Final = 10_000
"""Time for a client's answer; the broker waits two seconds longer."""
ANSWER_MS: Final = 13_000
"""Time for the broker's answer about a client."""
MOST_RESETS: Final = 1_000

_PASSIVELY: Final = "CONSUME_PASSIVELY"
_RESULTS: Final = {
    "CR_SUCCESS": HandedResult.SUCCESS,
    "CR_COMMIT": HandedResult.SUCCESS,
    "CR_LATER": HandedResult.RECONSUME_LATER,
    "CR_ROLLBACK": HandedResult.RECONSUME_LATER,
}
_NAMES: Final = {
    HandedResult.SUCCESS.value: "CR_SUCCESS",
    HandedResult.RECONSUME_LATER.value: "CR_LATER",
}
_log = logging.getLogger(__name__)


class ClientJobs:
    """Questions to consumers, from both sides.

    Args:
        upstream: Way to the brokers.
        members: Clients that are connected here.
        ports: Addresses of broker groups.
    """

    def __init__(self, upstream: Upstream, members: GatewayMembers, ports: BrokerPorts) -> None:
        self._upstream = upstream
        self._members = members
        self._ports = ports
        self._resets: set[tuple[str, bytes]] = set()

    def jobs(self) -> Mapping[int, JobHandler]:
        """Return the jobs by request code."""
        return {
            RemotingCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RemotingCode.CONSUME_MESSAGE_DIRECTLY: self._hand_over,
        }

    # ---- From administrators -------------------------------------------------------------

    async def _running_info(self, job: Job) -> JobAnswer:
        header = RunningInfoRequest(
            job.text("consumerGroup"), job.text("clientId"), job.flag("jstackEnable")
        )
        code = RequestCode.GET_CONSUMER_RUNNING_INFO
        found = await job.ask(code, header, RunningInfo, timeout_ms=ANSWER_MS)
        return JobAnswer(_to_java(found))

    async def _hand_over(self, job: Job) -> JobAnswer:
        message_id = job.text("msgId")
        try:
            offset = int(message_id[16:], 16) if len(message_id) == 32 else -1
        except ValueError:
            offset = -1
        start, ordinal = divmod(offset, ORDINALS)
        if offset < 0:
            raise InvalidArgument(
                f"{message_id!r:.100} is no offset id of a message: 32 hex digits"
            )
        header = HandToRequest(job.text("consumerGroup"), job.text("clientId"), start, ordinal)
        code = RequestCode.CONSUME_MESSAGE_DIRECTLY
        found = await job.ask(code, header, HandedOver, timeout_ms=ANSWER_MS)
        if found.result == HandedResult.TIMEOUT:
            text = f"consumer {header.client_id}: {found.text}"
            raise BrokerError(text, code=RemotingStatus.CONSUME_MSG_TIMEOUT)
        result = _NAMES.get(found.result, "CR_THROW_EXCEPTION")
        return JobAnswer(HandedBody(result, found.text or None, found.took_ms))

    # ---- From brokers --------------------------------------------------------------------

    def on_ask(
        self, broker_name: str, command: Command, by_grpc: "GrpcService | None" = None
    ) -> None:
        """Ask a client, and answer the broker.

        Args:
            broker_name: Broker group.
            command: Its question.
            by_grpc: Asks clients by gRPC.

        Raises:
            RemoteProtocolError: The question cannot be read.
        """
        inquiry = decode_header(AskClient, command.header)

        def answered(answer: msgspec.Struct | MQMeshError) -> None:
            if isinstance(answer, MQMeshError):
                header = ClientAnswer(inquiry.token, code_of(answer), str(answer)[:1_024])
                body = b""
            else:
                header, body = ClientAnswer(inquiry.token), encode_header(answer)
            code = RequestCode.ANSWER_OF_CLIENT
            self._upstream.oneway(broker_name, code, encode_header(header), body)

        try:
            if inquiry.code == RequestCode.GET_CONSUMER_RUNNING_INFO:
                question = decode_header(RunningInfoRequest, memoryview(inquiry.question))
                if by_grpc is not None and by_grpc.knows(question.client_id):
                    by_grpc.questions.running_info(question, answered)
                else:
                    self._ask_running_info(broker_name, question, answered)
            elif inquiry.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
                to_hand = decode_header(HandToRequest, memoryview(inquiry.question))
                message = _message_of(to_hand, bytes(command.body), broker_name)
                if by_grpc is not None and by_grpc.knows(to_hand.client_id):
                    by_grpc.questions.hand_over(to_hand.client_id, message, answered)
                else:
                    self._ask_to_consume(broker_name, to_hand, message, answered)
        except MQMeshError as error:
            answered(error)

    def on_reset(self, broker_name: str, command: Command) -> None:
        """Pass on to the members of a group that their offsets were moved.

        Raises:
            RemoteProtocolError: The command cannot be read.
        """
        moved = decode_header(ConsumerOffsetReset, command.header)
        # The broker sends one for each member of the gateway's connection.
        key = (broker_name, bytes(command.header))
        if key in self._resets or len(self._resets) >= MOST_RESETS:
            return
        self._resets.add(key)
        self._upstream.loop.call_later(0, lambda: self._resets.discard(key))
        topics: dict[str, list[tuple[object, object]]] = {}
        for one in moved.queues:
            queue = QueueName(one.topic, broker_name, one.queue_id)
            topics.setdefault(one.topic, []).append((queue, one.queue_offset))
        for member in self._members.consumers(moved.group):
            for topic, pairs in topics.items():
                if member.broker_name != broker_name:
                    continue
                fields = {"topic": topic, "group": moved.group, "timestamp": "0", "isForce": "true"}
                body = encode_body(ResetBody(encode_table(pairs)))
                code = RemotingCode.RESET_CONSUMER_CLIENT_OFFSET
                member.session.notify(code, fields, body)

    def _ask_running_info(
        self,
        broker_name: str,
        question: RunningInfoRequest,
        on_done: Callable[[RunningInfo | MQMeshError], None],
    ) -> None:
        now_ms = self._upstream.loop.clock.wall_ms()

        def read(answer: RemotingCommand) -> RunningInfo:
            found = decode_body(RunningInfoBody, strict_json(answer.body))
            return _from_java(question, found, now_ms)

        fields = {
            "consumerGroup": question.group,
            "clientId": question.client_id,
            "jstackEnable": "true" if question.with_stacks else "false",
        }
        code = RemotingCode.GET_CONSUMER_RUNNING_INFO
        member = self._member(broker_name, question.client_id)
        self._ask(member, code, fields, b"", read, on_done)

    def _ask_to_consume(
        self,
        broker_name: str,
        question: HandToRequest,
        message: StoredMessage,
        on_done: Callable[[HandedOver | MQMeshError], None],
    ) -> None:
        address = self._ports.address(broker_name)
        offset = question.commitlog_offset * ORDINALS + question.ordinal

        def read(answer: RemotingCommand) -> HandedOver:
            found = decode_body(HandedBody, answer.body)
            result = _RESULTS.get(found.consume_result or "", HandedResult.EXCEPTION)
            text = (found.remark or "")[:4_096]
            return HandedOver(result, text, found.spent_time_mills)

        fields = {
            "consumerGroup": question.group,
            "clientId": question.client_id,
            "msgId": offset_message_id(address, offset),
            "brokerName": broker_name,
            "topic": message.info.topic,
        }
        code = RemotingCode.CONSUME_MESSAGE_DIRECTLY
        member = self._member(broker_name, question.client_id)
        self._ask(member, code, fields, to_record(message, address), read, on_done)

    def _member(self, broker_name: str, client_id: str) -> GatewayMember:
        member = self._members.find(broker_name, client_id)
        if member is None:
            raise ClientNotOnline(f"client {client_id[:300]!r} is not connected to the gateway")
        return member

    def _ask(
        self,
        member: GatewayMember,
        code: RemotingCode,
        fields: dict[str, str],
        body: bytes,
        read: Callable[[RemotingCommand], msgspec.Struct],
        on_done: Callable[..., None],
    ) -> None:
        """Query a client; its answer is read, and handed on."""

        def answered(answer: RemotingCommand | None) -> None:
            timer.cancel()
            if answer is None:
                on_done(ClientNotOnline(f"client {member.client_id} did not answer"))
                return
            try:
                if answer.code != RemotingStatus.SUCCESS:
                    raise ClientNotOnline(f"client {member.client_id} refused: {answer.remark}")
                found = read(answer)
            except MQMeshError as error:
                on_done(error)
            else:
                on_done(found)

        give_up = member.session.ask(code, fields, body, answered)
        timer = self._upstream.loop.call_later(QUESTION_MS, give_up)


def _message_of(question: HandToRequest, batch: bytes, broker_name: str) -> StoredMessage:
    messages = decode_messages(batch, check_stored(batch), broker_name=broker_name)
    if question.ordinal >= len(messages):
        raise OffsetIllegal(f"the batch has no message {question.ordinal}")
    return messages[question.ordinal]


def _from_java(question: RunningInfoRequest, found: RunningInfoBody, now_ms: int) -> RunningInfo:
    settings = {
        name[:255]: str(value)[:1_024]
        for name, value in found.properties.items()
        if value is not None
    }
    started = settings.get("PROP_CONSUMER_START_TIMESTAMP", "")
    queues: list[RunningQueue] = []
    for key, one in found.mq_table.items():
        queue = decode_body(QueueName, key.encode())
        pulled_ms = one.last_pull_timestamp
        queues.append(
            RunningQueue(
                queue.topic,
                queue.broker_name,
                queue.queue_id,
                "paused" if one.droped else "pulling",
                one.cached_msg_max_offset + 1 if one.cached_msg_count else one.commit_offset,
                one.cached_msg_min_offset if one.cached_msg_count else one.commit_offset,
                one.commit_offset,
                one.cached_msg_count,
                one.cached_msg_size_in_mib * MIB,
                since_pull_ms=max(now_ms - pulled_ms, 0) if pulled_ms else NEVER,
            )
        )
    return RunningInfo(
        question.client_id,
        question.group,
        "push" if settings.get("PROP_CONSUME_TYPE") == _PASSIVELY else "pull",
        int(started) if started.isascii() and started.isdecimal() and len(started) < 16 else 0,
        settings,
        [
            Subscription(one.topic, one.sub_string or "*", one.expression_type or "TAG")
            for one in found.subscription_set
        ],
        queues,
        [
            TopicConsumption(
                question.group,
                topic,
                one.ok_per_s,
                one.failed_per_s,
                one.failed,
                one.consume_ms,
                one.pull_per_s,
                one.pull_ms,
            )
            for topic, one in found.status_table.items()
        ],
        stacks=(found.jstack or "")[:MAX_STACKS_LENGTH],
    )


def _to_java(info: RunningInfo) -> RunningInfoAnswer:
    settings = info.properties | {
        "PROP_CONSUMER_START_TIMESTAMP": str(info.started_ms),
        "PROP_CONSUME_TYPE": _PASSIVELY if info.kind == "push" else "CONSUME_ACTIVELY",
    }
    settings.setdefault("PROP_CONSUMEORDERLY", "false")
    settings.setdefault("PROP_CLIENT_VERSION", "mqmesh")
    pairs = [
        (
            QueueName(one.topic, one.broker_name, one.queue_id),
            ProcessQueueBody(
                max(one.committed_offset, 0),
                one.done_offset,
                max(one.next_offset - 1, 0),
                one.cached_messages,
                one.cached_bytes // MIB,
            ),
        )
        for one in info.queues
    ]
    return RunningInfoAnswer(
        settings,
        [
            SubscribedBody(one.topic, one.expression, one.expression_type)
            for one in info.subscriptions
        ],
        encode_table(pairs),
        {
            one.topic: ConsumeStatusBody(
                one.pull_wait_ms,
                one.pulled_per_s,
                one.handling_ms,
                one.ok_per_s,
                one.failed_per_s,
                one.failed_last_hour,
            )
            for one in info.topics
        },
        info.stacks,
    )

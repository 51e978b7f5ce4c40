"""Requests of administrators to consumers, which the broker relays with their responses.

The broker checks that the consumer is connected, and answers by itself when the consumer
disconnects or does not respond. It does not look into the requests.
"""

from collections.abc import Mapping
from typing import Final

from mqmesh.batch.half_batch import is_half
from mqmesh.batch.record_batch import Attributes, read_header, read_meta
from mqmesh.errors import (
    ClientNotOnline,
    CorruptRecord,
    InvalidArgument,
    MessageIllegal,
    OffsetOutOfRange,
)
from mqmesh.namespaces import is_within
from mqmesh.protocol.client_rpc import (
    MAX_ANSWER_BYTES,
    AskClient,
    ClientAnswer,
    HandToRequest,
    RunningInfoRequest,
)
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.request import Peer, PendingReply, Request
from mqmesh.roles.broker.core import Core, no_message_at
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.open_replies import ReplyTable
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler
from mqmesh.units import MAX_OFFSET, CommitLogOffset

MAX_OPEN_QUESTIONS: Final = 1_000
QUESTION_TIMEOUT_MS: Final = 12_000
"""A consumer that has not answered a question by then will not; it has itself 10 s for most."""


class ClientRpcFeature(Feature):
    """Questions of administrators to consumers, handed on to them, and their answers.

    The broker checks that the consumer is connected, and answers by itself when the consumer goes
    away or does not answer. Only the consumer knows what the question means.
    """

    def __init__(self, core: Core, topics: TopicTable, groups: ConsumerGroups) -> None:
        self._clock = core.clock
        self._store = core.store
        self._permit = core.dispatch.permit
        self._topics = topics
        self._groups = groups
        self._open = ReplyTable("questions of administrators")

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.get_running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            RequestCode.ANSWER_OF_CLIENT: self.answer_of_client,
        }

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Fail questions to a client whose connection broke."""
        self._give_up(self._open.on_disconnect(peer), "went away before it answered")

    def tick(self, now_ms: int) -> None:
        """Give up questions that were not answered in time."""
        self._give_up(self._open.expire(now_ms), "did not answer in time")

    def stopping(self) -> None:
        """Give up all questions: answers will not be taken any more."""
        late = self._open.expire(MAX_OFFSET)
        self._give_up(late, "had no time to answer: this broker stops, or leads no more")

    def get_running_info(self, request: Request, header: RunningInfoRequest) -> Reply | None:
        """Relay a request for running information to a member."""
        self._ask(request, header.group, header.client_id, encode_header(header))
        return None

    def consume_directly(self, request: Request, wanted: HandToRequest) -> Reply | None:
        """Relay a message to a member, which consumes it at once and responds.

        Raises:
            InvalidArgument: The group broadcasts, or the message waits for something else.
            NoPermission: Its topic does not permit reading.
            OffsetIllegal: There is no message, or it is of another namespace.
        """
        group = self._groups.group(check_client_group(wanted.group))
        data = group.members.get(wanted.client_id)
        if data is not None and data.message_model == MessageModel.BROADCASTING:
            raise InvalidArgument(
                f"group {wanted.group!r} broadcasts: every member gets every message by itself"
            )
        try:
            batch = self._store.read_at(CommitLogOffset(wanted.commitlog_offset))
        except (CorruptRecord, OffsetOutOfRange) as error:
            raise no_message_at(wanted.commitlog_offset) from error
        header = read_header(batch)
        topic = read_meta(batch, header).topic
        if not is_within(request.peer.principal.namespace, topic):
            raise no_message_at(wanted.commitlog_offset)
        if header.attributes & Attributes.HAS_DELAY or is_half(header):
            raise InvalidArgument(
                "the message waits for its time or its transaction; hand over what came of it"
            )
        self._permit(request.peer, request.command.code, topic)
        self._topics.check_readable(topic)
        self._ask(request, wanted.group, wanted.client_id, encode_header(wanted), batch)
        return None

    def answer_of_client(self, request: Request, client_answer: ClientAnswer) -> Reply:
        """A member answers; what is not open any more is ignored."""
        asker = self._open.on_acknowledged(request.peer, client_answer.token)
        if asker is None:
            return Reply()
        body = request.command.body
        if client_answer.code != ResponseCode.SUCCESS:
            asker.fail(error_of(client_answer.code, client_answer.remark))
        elif len(body) > MAX_ANSWER_BYTES:
            asker.fail(
                MessageIllegal(
                    f"the member answered {len(body):,} bytes (limit {MAX_ANSWER_BYTES:,})"
                ),
            )
        else:
            asker.done(Reply(bytes(body)))
        return Reply()

    def _ask(
        self,
        request: Request,
        group: str,
        client_id: str,
        question: bytes,
        body: bytes = b"",
    ) -> None:
        """Hands a question on.

        Raises:
            GroupNotFound: No member of the group is here.
            ClientNotOnline: The client is no member, or not connected now.
            SystemBusy: Too many questions are under way.
        """
        members = self._groups.group(check_client_group(group)).members
        client = self._groups.client(client_id) if client_id in members else None
        if client is None:
            raise ClientNotOnline(
                f"client {client_id[:300]!r} is no member of {group} at this broker"
            )
        if client.peer is None or client.lost_at_ms is not None:
            raise ClientNotOnline(f"the connection of {client_id[:300]} is broken at present")
        deadline_ms = self._clock.monotonic_ms() + QUESTION_TIMEOUT_MS
        token = self._open.open(request.later(deadline_ms), client.peer, MAX_OPEN_QUESTIONS)
        code = RequestCode(request.command.code)
        asking = encode_header(AskClient(token, code, question))
        client.peer.notify(RequestCode.ASK_CLIENT, asking, body)

    def _give_up(self, late: list[PendingReply], why: str) -> None:
        for pending in late:
            pending.fail(ClientNotOnline(f"the member {why}"))

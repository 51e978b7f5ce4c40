"""An administrator asks a consumer by way of the broker, which hands question and answer on.

The broker looks up whether the consumer is there, and answers by itself when it goes away or says
nothing. What the question means is the consumer's.
"""

from typing import Final

from mqmesh.batch.half_batch import is_half
from mqmesh.batch.record_batch import Attributes, read_header, read_meta
from mqmesh.errors import ClientNotOnline, InvalidArgument, MessageIllegal
from mqmesh.protocol.asking import (
    MAX_ANSWER_BYTES,
    AskClient,
    ClientAnswer,
    HandToRequest,
    RunningInfoRequest,
)
from mqmesh.protocol.codes import RequestCode, ResponseCode, error_of
from mqmesh.protocol.command import Reply, Request, encode_header
from mqmesh.protocol.groups import check_client_group
from mqmesh.protocol.membership import MessageModel
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.units import MAX_OFFSET, CommitLogOffset

MAX_OPEN_QUESTIONS: Final = 1_000


def get_running_info(
    context: BrokerContext, request: Request, asked: RunningInfoRequest
) -> Reply | None:
    """Asks a member how it is; the answer comes from it."""
    _ask(context, request, asked.group, asked.client_id, encode_header(asked))
    return None


def consume_directly(
    context: BrokerContext, request: Request, asked: HandToRequest
) -> Reply | None:
    """Has a member consume one message; the answer comes from it.

    Raises:
        InvalidArgument: The group broadcasts, or the message waits for something else.
        NoPermission: Its topic does not permit reading.
        OffsetOutOfRange: There is no message.
    """
    group = context.groups.group(check_client_group(asked.group))
    data = group.members.get(asked.client_id)
    if data is not None and data.message_model == MessageModel.BROADCASTING:
        raise InvalidArgument(
            f"group {asked.group!r} broadcasts: every member gets every message by itself"
        )
    batch = context.store.read_at(CommitLogOffset(asked.commitlog_offset))
    header = read_header(batch)
    if header.attributes & Attributes.HAS_DELAY or is_half(header):
        raise InvalidArgument(
            "the message waits for its time or its transaction; hand over what came of it"
        )
    topic = read_meta(batch, header).topic
    context.wire.permit(request, topic)
    context.topics.check_readable(topic)
    _ask(context, request, asked.group, asked.client_id, encode_header(asked), batch)
    return None


def answer_of_client(context: BrokerContext, request: Request, told: ClientAnswer) -> Reply:
    """A member answers; what is not open any more is ignored."""
    asker = context.questions.on_acknowledged(request.peer, told.token)
    if asker is None:
        return Reply()
    body = request.command.body
    if told.code != ResponseCode.SUCCESS:
        context.wire.fail(asker, error_of(told.code, told.remark))
    elif len(body) > MAX_ANSWER_BYTES:
        context.wire.fail(
            asker,
            MessageIllegal(f"the member answered {len(body):,} bytes (limit {MAX_ANSWER_BYTES:,})"),
        )
    else:
        context.wire.reply(asker, Reply(bytes(body)))
    return Reply()


def on_client_lost(context: BrokerContext, peer: bytes) -> None:
    """A connection broke: who asked by it hears it now."""
    _give_up(context, context.questions.on_disconnect(peer), "went away before it answered")


def answer_expired_questions(context: BrokerContext, now_ms: int) -> None:
    """Gives up questions that were not answered in time."""
    _give_up(context, context.questions.expire(now_ms), "did not answer in time")


def give_up_questions(context: BrokerContext) -> None:
    """The broker stops, or leads no more: answers will not be taken any more."""
    late = context.questions.expire(MAX_OFFSET)
    _give_up(context, late, "had no time to answer: this broker stops, or leads no more")


def _ask(
    context: BrokerContext,
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
    members = context.groups.group(check_client_group(group)).members
    client = context.groups.client(client_id) if client_id in members else None
    if client is None:
        raise ClientNotOnline(f"client {client_id[:300]!r} is no member of {group} at this broker")
    if client.lost_at_ms is not None:
        raise ClientNotOnline(f"the connection of {client_id[:300]} is broken at present")
    token = context.questions.open(
        request.without_frame(), client.peer, context.clock.monotonic_ms(), MAX_OPEN_QUESTIONS
    )
    code = RequestCode(request.command.code)
    asking = encode_header(AskClient(token, code, question))
    context.wire.notify(client.peer, RequestCode.ASK_CLIENT, asking, body)


def _give_up(context: BrokerContext, requests: list[Request], why: str) -> None:
    for request in requests:
        context.wire.fail(request, ClientNotOnline(f"the member {why}"))

"""Questions of administrators to one client, which it answers by its Telemetry stream."""

import itertools
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from mqmesh.errors import ClientNotOnline, SystemBusy
from mqmesh.message import StoredMessage
from mqmesh.protocol.client_rpc import (
    MAX_STACKS_LENGTH,
    HandedOver,
    HandedResult,
    RunningInfo,
    RunningInfoRequest,
)
from mqmesh.protocol.grpc.codes import ClientType, ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, GrpcMessage
from mqmesh.roles.gateway.grpc.clients import GrpcClient, GrpcClients
from mqmesh.roles.gateway.grpc.converting import write_message
from mqmesh.roles.gateway.session import MOST_QUESTIONS
from mqmesh.roles.gateway.upstream import Upstream

QUESTION_MS: Final = 10_000
"""Time for a client's answer; the broker waits two seconds longer."""
NO_STACKS: Final = "not given by this client"

_RESULTS: Final = {
    int(ReplyCode.OK): HandedResult.SUCCESS,
    int(ReplyCode.FAILED_TO_CONSUME_MESSAGE): HandedResult.RECONSUME_LATER,
}

OnReply = Callable[[GrpcMessage | ClientNotOnline], None]


class _Question(msgspec.Struct, eq=False):
    """A question without an answer."""

    client: GrpcClient
    on_reply: OnReply


class GrpcQuestions:
    """Questions to clients by gRPC.

    Args:
        upstream: Its loop ends questions that are not answered.
        clients: Clients.
    """

    def __init__(self, upstream: Upstream, clients: GrpcClients) -> None:
        self._upstream = upstream
        self._clients = clients
        self._open: dict[str, _Question] = {}
        self._nonces: Iterator[int] = itertools.count(1)

    def running_info(
        self,
        question: RunningInfoRequest,
        on_done: Callable[[RunningInfo | ClientNotOnline], None],
    ) -> None:
        """Report what a client does, as the gateway knows it, and the stacks that the client gives.

        Raises:
            ClientNotOnline: It has no Telemetry stream.
            SystemBusy: Too many questions are under way.
        """
        client = self._client(question.client_id)
        info = RunningInfo(
            client.client_id,
            question.group,
            "push" if client.kind == ClientType.PUSH_CONSUMER else "pull",
            0,
            {"language": client.language, "PROP_CLIENT_VERSION": client.version},
            list(client.subscriptions.values()),
            [],
            [],
        )
        if not question.with_stacks:
            on_done(info)
            return

        def replied(reply: GrpcMessage | ClientNotOnline) -> None:
            if not isinstance(reply, ClientNotOnline):
                stacks = reply.thread_stack_trace.thread_stack_trace[:MAX_STACKS_LENGTH]
            elif client.streams:
                stacks = NO_STACKS
            else:
                on_done(reply)
                return
            on_done(msgspec.structs.replace(info, stacks=stacks))

        nonce = self._note(client, replied)
        command = CLASSES["PrintThreadStackTraceCommand"](nonce=nonce)
        next(iter(client.streams)).send(print_thread_stack_trace_command=command)

    def hand_over(
        self,
        client_id: str,
        message: StoredMessage,
        on_done: Callable[[HandedOver | ClientNotOnline], None],
    ) -> None:
        """Have a client consume a message.

        Raises:
            ClientNotOnline: It has no Telemetry stream.
            SystemBusy: Too many questions are under way.
        """
        client = self._client(client_id)
        begun_ms = self._now_ms()

        def replied(reply: GrpcMessage | ClientNotOnline) -> None:
            if isinstance(reply, ClientNotOnline):
                on_done(reply)
                return
            result = _RESULTS.get(reply.status.code, HandedResult.EXCEPTION)
            took_ms = self._now_ms() - begun_ms
            on_done(HandedOver(result, reply.status.message[:4_096], took_ms))

        stream = next(iter(client.streams))
        namespace = stream.headers.get("x-mq-namespace", "")
        system = {"delivery_attempt": message.delivery_attempt}
        command = CLASSES["VerifyMessageCommand"](message=write_message(message, system, namespace))
        command.nonce = self._note(client, replied)
        stream.send(verify_message_command=command)

    def on_reply(self, client: GrpcClient, reply: GrpcMessage) -> None:
        """Give a reply of a client's Telemetry stream to the question with its nonce."""
        nonce = reply.thread_stack_trace.nonce or reply.verify_message_result.nonce
        found = self._open.get(nonce)
        if found is not None and found.client is client:
            del self._open[nonce]
            found.on_reply(reply)

    def _client(self, client_id: str) -> GrpcClient:
        client = self._clients.find(client_id)
        if client is None or not client.streams:
            raise ClientNotOnline(f"client {client_id[:300]!r} has no Telemetry stream")
        if len(self._open) >= MOST_QUESTIONS:
            raise SystemBusy(f"{MOST_QUESTIONS} questions to clients by gRPC are under way")
        return client

    def _note(self, client: GrpcClient, on_reply: OnReply) -> str:
        """Return the number of a question, whose answer is waited for from now on."""
        nonce = str(next(self._nonces))
        self._open[nonce] = _Question(client, on_reply)

        def late() -> None:
            if self._open.pop(nonce, None) is not None:
                on_reply(ClientNotOnline(f"client {client.client_id} did not answer"))

        self._upstream.loop.call_later(QUESTION_MS, late)
        return nonce

    def _now_ms(self) -> int:
        return self._upstream.loop.clock.monotonic_ms()

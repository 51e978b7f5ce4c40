"""Questions that administrators ask a consumer, by way of its brokers; in the client loop."""

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import MQMeshError, UnsupportedCommand
from mqmesh.protocol.client_rpc import AskClient, ClientAnswer
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.client.namespaced import ClientNames

MAX_REMARK: Final = 1_000

OnAnswer = Callable[[msgspec.Struct | MQMeshError], None]
Answerer = Callable[[str, bytes, memoryview, OnAnswer], None]
"""Handler of a request, now or later: broker, header, body, and the callback for the answer."""

_log = logging.getLogger(__name__)


class Questions:
    """The questions that one consumer answers.

    Args:
        client: The way to brokers.
        answerers: By request code.
    """

    def __init__(self, client: ClientEngine, answerers: dict[int, Answerer]) -> None:
        self._client = client
        self._names = ClientNames(client.namespace)
        self._answerers = answerers

    def on_ask(self, broker_name: str, command: Command) -> None:
        """Answer a question that a broker hands on.

        Raises:
            RemoteProtocolError: The frame is not a valid question.
        """
        header = decode_header(AskClient, command.header)

        def answer(found: msgspec.Struct | MQMeshError) -> None:
            self._send(broker_name, header.token, found)

        answerer = self._answerers.get(header.code)
        if answerer is None:
            answer(UnsupportedCommand(f"this consumer does not answer question {header.code}"))
            return
        try:
            question = self._names.question(header.code, header.question)
            answerer(broker_name, question, command.body, answer)
        except MQMeshError as error:
            answer(error)

    def _send(self, broker_name: str, token: int, found: msgspec.Struct | MQMeshError) -> None:
        body = b""
        if isinstance(found, MQMeshError):
            client_answer = ClientAnswer(token, code_of(found), str(found)[:MAX_REMARK])
        else:
            client_answer = ClientAnswer(token, ResponseCode.SUCCESS)
            body = encode_header(self._names.added(found))
        try:
            self._client.brokers.connection(broker_name).oneway(
                RequestCode.ANSWER_OF_CLIENT, body, header=encode_header(client_answer)
            )
        except MQMeshError as error:
            # The caller gets an error: there was no answer.
            _log.info("a question by way of broker %s was not answered: %s", broker_name, error)

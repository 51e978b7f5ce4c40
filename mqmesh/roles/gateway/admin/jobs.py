"""Jobs of administrators: coroutines that await one answer after another.

A job has no loop of its own: it goes on when the answer comes, in the gateway's loop.
"""

import logging
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import TypeVar

import msgspec

from mqmesh.errors import MQMeshError
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.remoting.bodies import encode_body
from mqmesh.protocol.remoting.codes import RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.members import broker_of
from mqmesh.roles.gateway.session import Handler, RemotingSession, number_field, text_field
from mqmesh.roles.gateway.upstream import REQUEST_MS, Upstream

OnAnswer = Callable[[Command | MQMeshError], None]
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Asked:
    """A question under way; a job awaits its answer.

    Args:
        start: Asks; calls back with the answer, or why there is none, after it returned.
    """

    def __init__(self, start: Callable[[OnAnswer], None]) -> None:
        self.start = start

    def __await__(self) -> Generator["Asked", Command, Command]:
        """Wait for the answer."""
        return (yield self)


class JobAnswer(msgspec.Struct):
    """Answer of a job.

    Attributes:
        body: Encoded as JSON unless it is bytes.
        fields: Fields of the header.
        code: ``RemotingStatus``.
        remark: Why that is no success.
    """

    body: object = b""
    fields: dict[str, str] = {}
    code: int = RemotingStatus.SUCCESS
    remark: str = ""


class Job:
    """One job: a request, and questions to brokers and name servers.

    Args:
        upstream: Way to the brokers.
        session: Connection of the administrator.
        request: The request.

    Attributes:
        request: The request.
    """

    def __init__(
        self, upstream: Upstream, session: RemotingSession, request: RemotingCommand
    ) -> None:
        self._upstream = upstream
        self._session = session
        self.request = request

    @property
    def broker_name(self) -> str:
        """Broker group whose port the request came to.

        Raises:
            RemoteProtocolError: It came to the port of the name server.
        """
        return broker_of(self._session)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field of the request.

        Raises:
            RemoteProtocolError: It has none, and there is no default.
        """
        if default is not None:
            return self.request.fields.get(name) or default
        return text_field(self.request, name)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a field of the request, as a number.

        Raises:
            RemoteProtocolError: It has none, and there is no default; or it is no number.
        """
        return number_field(self.request, name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field of the request, as a truth value."""
        return self.text(name, str(default)).lower() == "true"

    async def ask(
        self,
        code: int,
        header: msgspec.Struct,
        kind: type[_T],
        broker_name: str = "",
        timeout_ms: int = REQUEST_MS,
    ) -> _T:
        """Ask a broker group's master.

        Args:
            code: Request code of mqmesh.
            header: Header of the question.
            kind: Type of the answer's header.
            broker_name: Broker group; by default that of the request.
            timeout_ms: Longest wait for the answer.

        Raises:
            MQMeshError: It refuses, or does not answer.
        """
        name, encoded = broker_name or self.broker_name, encode_header(header)

        def start(on_answer: OnAnswer) -> None:
            self._upstream.request(name, code, on_answer, header=encoded, timeout_ms=timeout_ms)

        return decode_header(kind, (await Asked(start)).header)

    async def change(self, code: int, header: msgspec.Struct, broker_name: str = "") -> None:
        """Ask a broker group's master for a change, whose answer says no more than that it is done.

        Raises:
            MQMeshError: It refuses, or does not answer.
        """
        name = broker_name or self.broker_name
        await Asked(partial(self._upstream.ask, name, code, encode_header(header)))

    async def ask_namesrv(self, code: int, header: msgspec.Struct, kind: type[_T]) -> _T:
        """Ask a name server.

        Raises:
            MQMeshError: It refuses, or none answers.
        """
        start = partial(self._upstream.ask_namesrv, code, encode_header(header))
        return decode_header(kind, (await Asked(start)).header)

    async def change_namesrvs(self, code: int, header: msgspec.Struct) -> Command:
        """Ask every name server for a change; return the answer of one.

        Raises:
            MQMeshError: One refuses, or none answers.
        """
        return await Asked(partial(self._upstream.ask_namesrvs, code, encode_header(header)))


JobHandler = Callable[[Job], Coroutine[Asked, Command, JobAnswer]]


def job_handler(upstream: Upstream, handle: JobHandler) -> Handler:
    """Return the handler of a request that is served by a job.

    Args:
        upstream: Way to the brokers.
        handle: Makes the job's coroutine.
    """

    def serve(session: RemotingSession, request: RemotingCommand) -> None:
        _JobRun(session, request, handle(Job(upstream, session, request))).go_on(None)

    return serve


class _JobRun:
    """A job on its way: from one question to the next."""

    def __init__(
        self,
        session: RemotingSession,
        request: RemotingCommand,
        steps: Coroutine[Asked, Command, JobAnswer],
    ) -> None:
        self._session = session
        self._request = request
        self._steps = steps

    def go_on(self, answer: Command | MQMeshError | None) -> None:
        """Take the next step, with the answer that the job waits for; None for the first step."""
        if self._session.is_closed:
            self._steps.close()  # no caller waits for the next call
            return
        try:
            if isinstance(answer, MQMeshError):
                next_step = self._steps.throw(answer)
            else:
                next_step = self._steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            done: JobAnswer = end.value
            body = done.body if isinstance(done.body, bytes) else encode_body(done.body)
            self._session.answer(
                self._request, done.code, done.fields, body=body, remark=done.remark
            )
        except MQMeshError as error:
            self._session.fail(self._request, error)
        except Exception as error:
            _log.exception("a job of an administrator failed")
            self._session.fail(self._request, error)
        else:
            try:
                next_step.start(self.go_on)
            except MQMeshError as error:
                self.go_on(error)

"""Client of etcd's JSON gateway: queries one member, and another one when that one fails."""

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar

import msgspec

from mqmesh.clock import Clock
from mqmesh.coordination.etcd.http_line import HttpAnswer
from mqmesh.coordination.etcd.members import Members
from mqmesh.coordination.etcd.messages import (
    REFUSALS,
    WATCH,
    ErrorAnswer,
    HasHeader,
    WatchAnswer,
    WatchResult,
)
from mqmesh.coordination.interface import CoordinatorUnavailable, OutcomeUnknown
from mqmesh.errors import EndpointUnreachable, MQMeshError, RemoteProtocolError, TransportError

MIN_TRY_MS: Final = 300
"""Shortest time for a member, if as much is left."""
ROUND_PAUSE_MS: Final = 100
"""Pause after all members failed."""

_T = TypeVar("_T")
_Answer = TypeVar("_Answer", bound=HasHeader)


class EtcdRefusal(MQMeshError):
    """Raised when etcd refuses a request.

    Attributes:
        code: Code of gRPC.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Line(Protocol):
    """Interface of ``mqmesh.coordination.etcd.http_line.HttpLine``."""

    def post(self, path: str, body: bytes, timeout_ms: int) -> HttpAnswer:
        """Sends a request and waits for its answer."""

    def stream(self, path: str, body: bytes, timeout_ms: int) -> Iterator[bytes]:
        """Sends requests and yields the lines of the answer as they arrive."""

    def interrupt(self) -> None:
        """Ends the wait of another thread."""

    def close(self) -> None:
        """Closes the connection."""


class Gateway:
    """Client of one member, and of the next one when it fails; for one thread.

    Args:
        members: Members of the cluster.
        open_line: Makes a connection to an address.
        clock: Clock for deadlines.
        pause: Lets the thread sleep for so many seconds.
        timeout_ms: Time of a request at all members together.
    """

    def __init__(
        self,
        members: Members,
        open_line: Callable[[str], Line],
        clock: Clock,
        pause: Callable[[float], None],
        timeout_ms: int,
    ) -> None:
        self._members = members
        self._open_line = open_line
        self._clock = clock
        self._pause = pause
        self._try_ms = max(timeout_ms // len(members.addresses), MIN_TRY_MS)
        self._address = members.addresses[0]
        self._line: Line | None = None

    def ask(
        self,
        path: str,
        request: dict[str, Any],
        kind: type[_Answer],
        deadline_ms: int,
        *,
        changes: bool = False,
    ) -> _Answer:
        """Sends a request to one member after the other until one answers.

        Args:
            path: Path of the call.
            request: JSON of the request; bytes become base64.
            kind: Type of the answer.
            deadline_ms: Monotonic clock at which the tries end.
            changes: It must not be done twice: it is sent to one member, and to none if no
                member can be reached now.

        Raises:
            CoordinatorUnavailable: No member answers; with ``changes`` nothing was done.
            OutcomeUnknown: The request may have been carried out; only with ``changes``.
            EtcdRefusal: Nothing was done.
        """
        body = msgspec.json.encode(request)
        failures: dict[str, str] = {}
        tries = 0
        while (left_ms := deadline_ms - self._clock.monotonic_ms()) > 0:
            address = self._address
            try:
                return self._ask_member(path, body, kind, min(self._try_ms, left_ms))
            except (TransportError, RemoteProtocolError) as error:
                self.leave()
                failures[address] = str(error)
                if changes and not isinstance(error, EndpointUnreachable):
                    raise OutcomeUnknown(
                        f"whether etcd made the change is unknown: {address}: {error}"
                    ) from error
            tries += 1
            if tries % len(self._members.addresses) == 0:
                if changes:
                    break
                self._pause(min(ROUND_PAUSE_MS, left_ms) / 1_000)
        why = "; ".join(f"{address}: {failure}" for address, failure in failures.items())
        raise CoordinatorUnavailable(f"etcd cannot be asked: {why or 'it is too late to begin'}")

    def watch(self, requests: list[dict[str, Any]], silence_ms: int) -> Iterator[WatchResult]:
        """Yield the changes of some ranges, as the watched member reports them.

        Args:
            requests: See ``watch_of``.
            silence_ms: A member that sends nothing for so long has failed.

        Raises:
            TransportError, RemoteProtocolError: The watch ended; ``leave`` this member.
        """
        body = b"\n".join(map(msgspec.json.encode, requests))
        for line in self._current_line().stream(WATCH, body, silence_ms):
            answer = _decode(line, WatchAnswer)
            if answer.result is None:
                why = answer.error.message if answer.error is not None else "an empty line"
                raise RemoteProtocolError(f"the watch ended: {why}")
            self._members.check(self._address, answer.result.header)
            if answer.result.canceled:
                why = (
                    answer.result.cancel_reason or f"kept from {answer.result.compact_revision} on"
                )
                raise RemoteProtocolError(f"the watch was cancelled: {why}")
            yield answer.result

    def interrupt(self) -> None:
        """Ends the thread's wait; from any thread."""
        line = self._line
        if line is not None:
            line.interrupt()

    def leave(self) -> None:
        """Leaves this member: the next one is queried from now on."""
        self.close()
        self._address = self._members.after(self._address)

    def close(self) -> None:
        """Closes the connection; the next request makes another one."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _current_line(self) -> Line:
        if self._line is None:
            self._line = self._open_line(self._address)
        return self._line

    def _ask_member(self, path: str, body: bytes, kind: type[_Answer], timeout_ms: int) -> _Answer:
        response = self._current_line().post(path, body, timeout_ms)
        if response.status != HTTPStatus.OK:
            raise _failure_of(response)
        answer = _decode(response.body, kind)
        self._members.check(self._address, answer.header)
        return answer


def _failure_of(response: HttpAnswer) -> MQMeshError:
    try:
        error = _decode(response.body, ErrorAnswer)
    except RemoteProtocolError as no_answer:
        if response.status == HTTPStatus.NOT_FOUND:
            return EndpointUnreachable(
                "it has no JSON gateway under /v3: etcd 3.4 or newer, with --enable-grpc-gateway"
            )
        return RemoteProtocolError(f"HTTP {response.status}: {no_answer}")
    if error.code in REFUSALS:
        return EtcdRefusal(f"etcd refuses: {error.message} (code {error.code})", error.code)
    return RemoteProtocolError(f"{error.message} (code {error.code})")


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"no answer of etcd but {data[:80]!r}") from error

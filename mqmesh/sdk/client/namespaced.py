"""Transport of a client with a namespace: adds it to all names that leave, and takes it off others.

Inside the client all names are without it. Headers are changed here, by the types of their fields;
batches are encoded and decoded with it (``batch_codec.py``, ``decode_messages``).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec

from mqmesh.errors import MQMeshError, RemoteProtocolError
from mqmesh.message import AUTO_CREATE_TOPIC
from mqmesh.namespaces import add_namespace, drop_namespace, shown_name
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import COMMANDS, RequestCode
from mqmesh.protocol.groups import only_looks
from mqmesh.protocol.names import NameKind, has_names, renamed
from mqmesh.protocol.policies import DROP, KEEP
from mqmesh.security.keys import KeyRing
from mqmesh.transport.interface import Channel, Connection, OnDone, Transport


class ClientNames:
    """Names of topics and groups in headers, as brokers have them and as the client does.

    Args:
        namespace: Of the client; "" for none: nothing is changed.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def added(self, header: msgspec.Struct) -> Any:
        """Return a header with the namespace in front of its names."""
        return renamed(header, self._add) if self._namespace else header

    def dropped(self, header: msgspec.Struct) -> Any:
        """Return a header without the namespace, and without items of others in its lists."""
        return renamed(header, self._drop) if self._namespace else header

    def request(self, code: int, header: bytes) -> bytes:
        """Return the header of a request as brokers want it."""
        kind = COMMANDS[RequestCode(code)].request
        if not self._namespace or kind is None or not has_names(kind):
            return header
        return encode_header(self.added(decode_header(kind, memoryview(header))))

    def answer(self, code: int, answer: Command) -> Command:
        """Return the answer to a request as the client wants it."""
        return self._changed(COMMANDS[RequestCode(code)].reply, answer)

    def command(self, command: Command) -> Command:
        """Return a server's own command as the client wants it."""
        if command.code not in COMMANDS:
            return command
        return self._changed(COMMANDS[RequestCode(command.code)].request, command)

    def question(self, code: int, header: bytes) -> bytes:
        """Return the header of a request that a broker hands on."""
        kind = COMMANDS[RequestCode(code)].request if code in COMMANDS else None
        if not self._namespace or kind is None:
            return header
        return encode_header(self.dropped(decode_header(kind, memoryview(header))))

    def _changed(self, kind: type[msgspec.Struct] | None, command: Command) -> Command:
        if kind is None or not has_names(kind):
            return command
        try:
            header = encode_header(self.dropped(decode_header(kind, command.header)))
        except RemoteProtocolError:
            return command  # who reads it says so
        return msgspec.structs.replace(command, header=memoryview(header))

    def _add(self, kind: NameKind, name: str) -> str:
        return name if _is_shared(kind, name) else add_namespace(self._namespace, name)

    def _drop(self, kind: NameKind, name: str) -> str | None:
        if kind == "dead letters":
            return shown_name(self._namespace, name)  # a group is the client's, wherever they go
        return name if _is_shared(kind, name) else drop_namespace(self._namespace, name)


def _is_shared(kind: NameKind, name: str) -> bool:
    """Return True for names that are the same in all namespaces."""
    return (
        name == AUTO_CREATE_TOPIC
        or (kind == "group" and only_looks(name))
        or (kind == "dead letters" and name in (KEEP, DROP))
    )


def in_namespace(transport: Transport, namespace: str) -> Transport:
    """Return a transport whose connections are in a namespace; the same one for ""."""
    return cast(Transport, _Transport(transport, namespace)) if namespace else transport


class _Delegate:
    """Stand-in for an object that has the rest of its attributes."""

    def __init__(self, inner: Any, names: ClientNames) -> None:
        self._inner = inner
        self._names = names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Transport(_Delegate):
    """Transport of a client with a namespace; see ``Transport``."""

    def __init__(self, inner: Transport, namespace: str) -> None:
        super().__init__(inner, ClientNames(namespace))
        self._namespace = namespace

    def connect(
        self,
        endpoint: str,
        *,
        on_command: Callable[[Command], None] | None = None,
        on_connection: Callable[[bool], None] | None = None,
        by_loop: bool = False,
    ) -> Connection:
        names, take = self._names, on_command

        def taken(command: Command) -> None:
            assert take is not None
            take(names.command(command))

        inner = self._inner.connect(
            endpoint,
            on_command=None if take is None else taken,
            on_connection=on_connection,
            by_loop=by_loop,
        )
        return cast(Connection, _Connection(inner, names))

    def channel(self, endpoint: str, *, busy_poll_us: int = 0) -> Channel:
        inner = self._inner.channel(endpoint, busy_poll_us=busy_poll_us)
        return cast(Channel, _Channel(inner, self._names))

    def watch(self, channel: Channel, callback: Callable[[], None]) -> None:
        assert isinstance(channel, _Channel)
        self._inner.watch(channel._inner, callback)

    def with_keys(self, ring: KeyRing) -> Transport:
        return in_namespace(self._inner.with_keys(ring), self._namespace)


class _Connection(_Delegate):
    """Connection of a client with a namespace; see ``Connection``."""

    def request(
        self,
        code: int,
        on_done: OnDone,
        *parts: bytes | memoryview,
        header: bytes = b"",
        timeout_ms: int = 3_000,
    ) -> None:
        header = self._names.request(code, header)
        done = partial(self._done, code, on_done)
        self._inner.request(code, done, *parts, header=header, timeout_ms=timeout_ms)

    def oneway(self, code: int, *parts: bytes | memoryview, header: bytes = b"") -> None:
        self._inner.oneway(code, *parts, header=self._names.request(code, header))

    def _done(self, code: int, on_done: OnDone, answer: Command | MQMeshError) -> None:
        on_done(answer if isinstance(answer, MQMeshError) else self._names.answer(code, answer))


class _Channel(_Delegate):
    """Channel of a client with a namespace; see ``Channel``."""

    _posted = 0

    def request(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> Command:
        header = self._names.request(code, header)
        answer = self._inner.request(code, *parts, header=header, timeout_ms=timeout_ms)
        return self._names.answer(code, answer)

    def post(
        self, code: int, *parts: bytes | memoryview, header: bytes = b"", timeout_ms: int
    ) -> bool:
        self._posted = code
        header = self._names.request(code, header)
        there: bool = self._inner.post(code, *parts, header=header, timeout_ms=timeout_ms)
        return there

    def take(self) -> Command | None:
        answer = self._inner.take()
        return None if answer is None else self._names.answer(self._posted, answer)

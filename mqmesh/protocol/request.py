"""A request as a server's handlers see it: the peer that sent it, and the answer it waits for.

Handlers know nothing of sockets: the server of a protocol gives its requests a ``Peer``, one object
a connection, which takes their answers.
"""

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from mqmesh.errors import LocalProtocolError
from mqmesh.protocol.codes import code_of
from mqmesh.protocol.command import ONEWAY, Answer, Command, Principal, Reply, encode_header
from mqmesh.units import MAX_TIMESTAMP_MS

NO_DEADLINE: Final = MAX_TIMESTAMP_MS
"""Deadline of an answer that may take as long as it likes."""


class Peer(Protocol):
    """One connection of a client; hashable, and equal only to itself.

    Attributes:
        principal: User that the connection proves; rights are given to principals.
        is_gone: The connection broke, or its server is closed: frames for it are dropped.
    """

    principal: Principal
    is_gone: bool

    @property
    def address(self) -> str:
        """Address of the client: ``host:port``, ``unix``, or "" for unknown."""

    def reply(self, opaque: int, flags: int, reply: Reply) -> None:
        """Answers a request; nothing is sent for a oneway one.

        Args:
            opaque: Of the request.
            flags: Of the request.
            reply: Answer. There is an error instead where it is too large or has no room.
        """

    def fail(self, opaque: int, flags: int, error: Exception) -> None:
        """Answers a request with an error, which is counted also where nothing is sent."""

    def notify(self, code: int, header: bytes, *parts: bytes | memoryview) -> None:
        """Sends a oneway command; ``parts`` is the body in pieces."""

    def room(self) -> int:
        """Return the bytes that an answer may have now, at least 1, to look for no more.

        Raises:
            SystemBusy: There is no room, because this client or the clients together read their
                answers too slowly.
        """


def _count_nothing(pending: "PendingReply", code: int) -> None:
    """Stand in for the count of answers where they are not counted."""


Answered = Callable[["PendingReply", int], None]
"""Function that counts a late answer; it gets the pending reply and the response code."""


class PendingReply(msgspec.Struct, eq=False):
    """An answer that a request waits for; given once, by ``done`` or by ``fail``.

    Nothing of the request's frame is kept in memory.

    Attributes:
        peer: Connection that the request came by.
        code: Request code.
        opaque: Number that joins the answer to the request.
        flags: Of the request.
        deadline_ms: When its owner gives it up, monotonic clock.
        received_ns: When the request came to its handler, monotonic clock.
        on_answer: Counts the answer.
    """

    peer: Peer
    code: int
    opaque: int
    flags: int
    deadline_ms: int = NO_DEADLINE
    received_ns: int = 0
    on_answer: Answered = _count_nothing

    @property
    def is_oneway(self) -> bool:
        """True if the client waits for no answer: nothing is sent."""
        return bool(self.flags & ONEWAY)

    def done(self, answer: Answer) -> None:
        """Gives the answer; once the peer is gone it is dropped."""
        try:
            reply = answer if isinstance(answer, Reply) else Reply(encode_header(answer))
        except LocalProtocolError as error:
            self.fail(error)
            return
        self.on_answer(self, reply.code)
        self.peer.reply(self.opaque, self.flags, reply)

    def fail(self, error: Exception) -> None:
        """Answers with an error."""
        self.on_answer(self, code_of(error))
        self.peer.fail(self.opaque, self.flags, error)


class Request(msgspec.Struct):
    """A request as a server's handler sees it.

    Attributes:
        peer: Connection that it came by; good for answering, not an identity of the client.
        command: The decoded frame.
        received_ns: When it came to its handler, monotonic clock; 0 before.
        on_answer: Counts its answer, if that comes later.
    """

    peer: Peer
    command: Command
    received_ns: int = 0
    on_answer: Answered = _count_nothing

    def later(self, deadline_ms: int = NO_DEADLINE) -> PendingReply:
        """Return the answer that is to come, for a handler that returns None.

        Args:
            deadline_ms: When its owner will give it up, monotonic clock.
        """
        command = self.command
        return PendingReply(
            self.peer,
            command.code,
            command.opaque,
            command.flags,
            deadline_ms,
            self.received_ns,
            self.on_answer,
        )

"""Peers of handlers that are tested without a transport: each keeps what it is sent."""

from __future__ import annotations

from collections.abc import Callable

from mqmesh.protocol.command import ANYBODY, ONEWAY, Principal, Reply
from mqmesh.protocol.pulling import MAX_PULL_BYTES

Notice = tuple[bytes | memoryview | int, ...]
"""Name of a peer, code, header and pieces of the body of a oneway command."""


class KeptAnswers:
    """Answers and oneway commands that peers of one test were sent.

    Attributes:
        answers: By opaque; an answer that is there already is a fault.
        notices: Oneway commands, in order.
    """

    def __init__(self) -> None:
        self.answers: dict[int, Reply | Exception] = {}
        self.notices: list[Notice] = []
        self._peers: dict[bytes, KeptPeer] = {}

    def peer(self, name: bytes) -> KeptPeer:
        """Return the peer of a name, always the same object."""
        if name not in self._peers:
            self._peers[name] = KeptPeer(name, self)
        return self._peers[name]


class KeptPeer:
    """A peer of one name.

    Attributes:
        room: Returns the bytes that an answer may have now.
    """

    def __init__(
        self, name: bytes, kept: KeptAnswers | None = None, principal: Principal = ANYBODY
    ) -> None:
        self.name = name
        self.principal = principal
        self.is_gone = False
        self.address = ""
        self.kept = kept or KeptAnswers()
        self.room: Callable[[], int] = lambda: MAX_PULL_BYTES

    def reply(self, opaque: int, flags: int, reply: Reply) -> None:
        """Implement ``Peer.reply``."""
        self._keep(opaque, flags, reply)

    def fail(self, opaque: int, flags: int, error: Exception) -> None:
        """Implement ``Peer.fail``."""
        self._keep(opaque, flags, error)

    def notify(self, code: int, header: bytes, *parts: bytes | memoryview) -> None:
        """Implement ``Peer.notify``."""
        self.kept.notices.append((self.name, code, header, *parts))

    def _keep(self, opaque: int, flags: int, answer: Reply | Exception) -> None:
        if flags & ONEWAY:
            return  # as the command server does
        assert opaque not in self.kept.answers, "answered twice"
        self.kept.answers[opaque] = answer

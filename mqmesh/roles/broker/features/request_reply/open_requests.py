"""Replies that were handed to the client that asked, and not acknowledged yet. Pure."""

from typing import Final

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.protocol.command import Request

ACKNOWLEDGE_TIMEOUT_MS: Final = 2_000
"""A client that does not acknowledge a reply for so long has probably not got it."""


class OpenReply(msgspec.Struct, frozen=True):
    """One reply under way.

    Attributes:
        request: The replier's request, without its frame.
        peer: Connection of the client that asked.
        deadline_ms: When it is given up.
    """

    request: Request
    peer: bytes
    deadline_ms: int


class ReplyTable:
    """Replies under way, known by a number each; questions to clients likewise.

    Args:
        timeout_ms: How long each waits for its acknowledgement.
        what: They are, and by which setting they are bounded.
    """

    def __init__(
        self,
        timeout_ms: int = ACKNOWLEDGE_TIMEOUT_MS,
        what: str = "replies (max_open_replies)",
    ) -> None:
        self._timeout_ms = timeout_ms
        self._what = what
        # All wait equally long, so they stand in the order of their deadlines.
        self._open: dict[int, OpenReply] = {}
        self._tokens: dict[bytes, set[int]] = {}
        self._last_token = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Request, peer: bytes, now_ms: int, most: int) -> int:
        """Notes a reply that is about to be pushed.

        Args:
            request: The replier's request, without its frame.
            peer: Connection of the client that asked.
            now_ms: Monotonic clock.
            most: Replies that may be under way.

        Returns:
            The token of the push.

        Raises:
            SystemBusy: There are ``most`` already.
        """
        if len(self._open) >= most:
            raise SystemBusy(f"{most} are under way to clients, no more may: {self._what}")
        self._last_token += 1
        token = self._last_token
        self._open[token] = OpenReply(request, peer, now_ms + self._timeout_ms)
        self._tokens.setdefault(peer, set()).add(token)
        return token

    def on_acknowledged(self, peer: bytes, token: int) -> Request | None:
        """A client says that it got a push; the request to answer, None for what is not open."""
        reply = self._open.get(token)
        if reply is None or reply.peer != peer:
            return None
        return self._close(token).request

    def on_disconnect(self, peer: bytes) -> list[Request]:
        """A connection broke: the requests whose replies it may not have got."""
        return [self._close(token).request for token in sorted(self._tokens.get(peer, ()))]

    def expire(self, now_ms: int) -> list[Request]:
        """The requests whose replies were not acknowledged in time."""
        late = []
        while self._open:
            token, reply = next(iter(self._open.items()))
            if now_ms < reply.deadline_ms:
                break
            late.append(self._close(token).request)
        return late

    def _close(self, token: int) -> OpenReply:
        reply = self._open.pop(token)
        tokens = self._tokens[reply.peer]
        tokens.discard(token)
        if not tokens:
            del self._tokens[reply.peer]
        return reply

"""Replies that were handed to the client that asked, and not acknowledged yet. Pure."""

from typing import Final

import msgspec

from mqmesh.errors import SystemBusy
from mqmesh.protocol.request import Peer, PendingReply

ACKNOWLEDGE_TIMEOUT_MS: Final = 2_000
"""A client that does not acknowledge a reply for so long has probably not got it."""


class OpenReply(msgspec.Struct, frozen=True):
    """One reply under way.

    Attributes:
        pending: Answer that the replier waits for, and until when.
        peer: Connection of the client that asked.
    """

    pending: PendingReply
    peer: Peer


class ReplyTable:
    """Replies under way, known by a number each; questions to clients likewise.

    Args:
        what: They are, and by which setting they are bounded.
    """

    def __init__(self, what: str = "replies (max_open_replies)") -> None:
        self._what = what
        # All wait equally long, so they stand in the order of their deadlines.
        self._open: dict[int, OpenReply] = {}
        self._tokens: dict[Peer, set[int]] = {}
        self._last_token = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, pending: PendingReply, peer: Peer, most: int) -> int:
        """Notes a reply that is about to be pushed.

        Args:
            pending: Answer that the replier waits for; all of a table wait equally long.
            peer: Connection of the client that asked.
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
        self._open[token] = OpenReply(pending, peer)
        self._tokens.setdefault(peer, set()).add(token)
        return token

    def on_acknowledged(self, peer: Peer, token: int) -> PendingReply | None:
        """Return what a client's acknowledgement answers; None for what is not open."""
        reply = self._open.get(token)
        if reply is None or reply.peer != peer:
            return None
        return self._close(token).pending

    def on_disconnect(self, peer: Peer) -> list[PendingReply]:
        """Return the answers of replies that a connection which broke may not have got."""
        return [self._close(token).pending for token in sorted(self._tokens.get(peer, ()))]

    def expire(self, now_ms: int) -> list[PendingReply]:
        """Return the answers of replies that were not acknowledged in time."""
        late = []
        while self._open:
            token, reply = next(iter(self._open.items()))
            if now_ms < reply.pending.deadline_ms:
                break
            late.append(self._close(token).pending)
        return late

    def _close(self, token: int) -> OpenReply:
        reply = self._open.pop(token)
        tokens = self._tokens[reply.peer]
        tokens.discard(token)
        if not tokens:
            del self._tokens[reply.peer]
        return reply

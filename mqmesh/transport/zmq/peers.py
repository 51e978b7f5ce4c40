"""Peers and their connections: the owner of each, so that a broken one names the peer. Pure.

A ROUTER names peers by routing ids, its monitor names connections by descriptors,
and only a frame has both. The two report events by different ways, so that

* frames may still be read after the event that their connection broke,
* a descriptor may have a new owner by then.

Two facts resolve both. ZeroMQ numbers routing ids upwards in the order in which connections were
made (one I/O thread; clients may not choose their own), so of two peers with one descriptor the
larger one came later. And a connection's event precedes its first frame: the reader of a first
frame has the event.
"""

from typing import Final

ROUTING_ID_BYTES: Final = 5
_HALF: Final = 1 << 31
_MASK: Final = (1 << 32) - 1


class PeerTable:
    """Living peers of one ROUTER.

    Attributes:
        living: Descriptor by routing id.
    """

    def __init__(self) -> None:
        self.living: dict[bytes, int] = {}
        self._owner: dict[int, bytes | None] = {}
        self._last_owner: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Return the number of connections, including those that have sent no frame yet."""
        return len(self._owner)

    def connections(self) -> list[tuple[int, bytes | None]]:
        """Return descriptor and peer of each; None if the peer has sent no frame yet."""
        return list(self._owner.items())

    def accept(self, descriptor: int) -> bytes | None:
        """Note a connection that was made.

        Returns:
            The descriptor's owner till now, if the event of its end was lost.
        """
        gone = self.disconnect(descriptor)
        self._owner[descriptor] = None
        return gone

    def disconnect(self, descriptor: int) -> bytes | None:
        """Note a connection that broke.

        Returns:
            The lost peer; None if it never sent a frame.
        """
        peer = self._owner.pop(descriptor, None)
        if peer is not None:
            self._last_owner[descriptor] = peer
            del self.living[peer]
        return peer

    def meet(self, peer: bytes, descriptor: int) -> bytes | None:
        """Note a frame of a peer that is not among the living.

        All events of the monitor must have been read before.

        Args:
            peer: Routing id of the peer, for which ``is_automatic`` holds.
            descriptor: Connection by which the frame arrived.

        Returns:
            A lost peer: this one, if its connection broke before the frame was read; or one that
            had been taken for the owner of the connection.
        """
        last = self._last_owner.get(descriptor)
        if descriptor not in self._owner:
            if last is None or _is_newer(peer, last):
                self._last_owner[descriptor] = peer
            return peer
        owner = self._owner[descriptor]
        latest = owner or last
        if latest is not None and not _is_newer(peer, latest):
            return peer
        self._owner[descriptor] = peer
        self.living[peer] = descriptor
        if owner is None:
            return None
        del self.living[owner]
        self._last_owner[descriptor] = owner
        return owner


def is_automatic(peer: bytes) -> bool:
    """Return True for a routing id that ZeroMQ gave; peers' own choices never begin with a zero."""
    return len(peer) == ROUTING_ID_BYTES and peer[0] == 0


def _is_newer(one: bytes, other: bytes) -> bool:
    # The numbers wrap around.
    distance = int.from_bytes(one[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < (distance & _MASK) < _HALF

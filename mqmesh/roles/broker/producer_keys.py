"""Keys of producers: a client is the producer whose id's key it shows. Pure."""

import hmac
import struct
from hashlib import blake2b
from random import Random
from typing import Final

from mqmesh.errors import NoPermission, SystemBusy
from mqmesh.producer_key import new_key, producer_id_of
from mqmesh.protocol.request import Peer
from mqmesh.protocol.transactions import End

_HALF: Final = struct.Struct("<qQQ")
_TOKEN_SIZE: Final = 16


class ProducerKeys:
    """The keys that each connection has shown.

    A connection may show only a few, so that nobody can fill the memory of repetitions with
    producers that send nothing any more.

    Args:
        most: Keys a connection.

    Attributes:
        of_peer: Producer ids of the keys that each connection has shown.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.of_peer: dict[Peer, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self.of_peer)

    def show(self, peer: Peer, key: bytes) -> int:
        """A connection shows a key.

        Args:
            peer: The connection.
            key: From the request.

        Returns:
            The producer id that it may use now.

        Raises:
            SystemBusy: It has shown too many others.
        """
        known = self.of_peer.get(peer)
        if known is None:
            known = self.of_peer[peer] = {}
        producer_id = known.get(key)
        if producer_id is None:
            if len(known) >= self._most:
                raise SystemBusy(
                    f"{self._most} producers sent by this connection, no more may "
                    "(max_producers_per_connection)"
                )
            producer_id = known[key] = producer_id_of(key)
        return producer_id

    def on_disconnect(self, peer: Peer) -> None:
        """A connection broke."""
        self.of_peer.pop(peer, None)


class EndProofs:
    """Proofs of who may decide about half messages: their producer, and who was asked about them.

    Tokens are for this life of the broker: who was asked in an earlier one is asked again.

    Args:
        chance: Makes the secret of the tokens.
    """

    def __init__(self, chance: Random) -> None:
        self._secret = new_key(chance)

    def token(self, base_queue_offset: int, producer_id: int, first_sequence: int) -> bytes:
        """Return the token that a producer group's member gets with a half batch's check."""
        place = _HALF.pack(base_queue_offset, producer_id, first_sequence)
        return blake2b(place, digest_size=_TOKEN_SIZE, key=self._secret).digest()

    def holds(self, end: End) -> bool:
        """True when an end proves that its sender may decide."""
        if producer_id_of(end.proof) == end.producer_id:
            return True
        token = self.token(end.base_queue_offset, end.producer_id, end.first_sequence)
        return hmac.compare_digest(end.proof, token)


def not_its_own(producer_id: int, shown_id: int) -> NoPermission:
    """Why a batch is refused whose producer is not the one whose key was shown."""
    return NoPermission(
        f"the batch is of producer {producer_id:016X}, and the request shows the key of "
        f"{shown_id:016X}"
    )

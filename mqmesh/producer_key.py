"""Instance keys: the secrets behind the ids of producers.

The id of a producer instance stands in every message id, so every reader knows it. Only the
instance and the brokers that it sends to know the key that the id is made of: 16 random bytes
that travel in send requests and in decisions about half messages, and are neither stored
nor logged. A broker accepts a batch only from a client with the key of the id in its header, so
no client can send, or end transactions, under the id of another one.
"""

import hashlib
import random
from functools import lru_cache
from typing import Final

KEY_SIZE: Final = 16


def new_key(chance: random.Random) -> bytes:
    """Make a new key of 16 random bytes; outside of tests they come from the system's source."""
    return chance.randbytes(KEY_SIZE)


@lru_cache(maxsize=4_096)
def producer_id_of(key: bytes) -> int:
    """Return the producer id that a key stands for.

    Args:
        key: Any bytes.

    Returns:
        The first 8 bytes of the key's BLAKE2b hash, little endian, as they stand in batches.
    """
    return int.from_bytes(hashlib.blake2b(key).digest()[:8], "little")

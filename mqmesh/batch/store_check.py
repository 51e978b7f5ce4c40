"""The check in a stored batch that proves that this store wrote the batch at this place.

The store makes the check (``mqmesh.storage.log.store_key``); this module defines the bytes that it
covers. All of them are within the first 56 bytes of a batch, which are the same in every version.
"""

from collections.abc import Callable
from typing import Final

from mqmesh.batch.payload import Buffer

CHECK_SIZE: Final = 8
"""Bytes of a check."""

NO_CHECK: Final = bytes(CHECK_SIZE)
"""Check of batches whose store keeps no key."""

StoreCheck = Callable[[bytes], bytes]
"""Makes the ``CHECK_SIZE`` bytes of the check from the fields that it covers."""

_BEFORE: Final = slice(8, 40)  # the broker's part
_CHECK: Final = slice(40, 48)
_BEHIND: Final = slice(48, 56)  # producer_crc and total_size


def bears_check(buffer: Buffer, store_check: StoreCheck, position: int = 0) -> bool:
    """Return True when a stored batch bears a store's check, so that this store wrote it there.

    It compares no checksum: ``check_stored`` checks that the other bytes are unchanged.

    Args:
        buffer: Bytes that hold at least a header.
        store_check: Check of the store.
        position: Position at which the batch begins.
    """
    part = bytes(memoryview(buffer)[position : position + _BEHIND.stop])
    return store_check(part[_BEFORE] + part[_BEHIND]) == part[_CHECK]

"""Mapped segments of the log, and given-up maps that live on while reads use them."""

import logging
import os
from typing import Final

from mqmesh.errors import StorageError
from mqmesh.storage.log.mapped_file import LeftMap, MappedFile
from mqmesh.storage.log.segments import Segment

log = logging.getLogger(__name__)

MOST_MAPPED: Final = 16
"""Segments mapped at once; each map costs a descriptor, and page tables for its pages."""


class LogMaps:
    """Maps of segments; the least recently used one is given up when there are too many."""

    def __init__(self, most: int = MOST_MAPPED) -> None:
        """Maps nothing yet.

        Args:
            most: Segments to map at once.
        """
        assert most > 1
        self._most = most
        self._maps: dict[Segment, MappedFile] = {}
        self._cut: set[Segment] = set()
        self._left: list[LeftMap] = []

    def __len__(self) -> int:
        return len(self._maps)

    @property
    def mapped_bytes(self) -> int:
        """Size of the maps that are in use."""
        return sum(mapped.size for mapped in self._maps.values())

    @property
    def held_bytes(self) -> int:
        """Size of the maps that were given up, but live on because views of them are in use."""
        return sum(one.size for one in self._living())

    @property
    def views(self) -> int:
        """Views that are in use."""
        used = sum(mapped.views for mapped in self._maps.values())
        return used + sum(one.views for one in self._living())

    def _living(self) -> list[LeftMap]:
        self._left = [one for one in self._left if one.views]
        return self._left

    def get(self, segment: Segment) -> MappedFile | None:
        """Return the map of a segment, made if need be; None if it cannot be mapped, or was cut."""
        mapped = self._maps.pop(segment, None)
        if mapped is None:
            return None if segment in self._cut else self._make(segment)
        self._maps[segment] = mapped  # the last one now
        return mapped

    def forget(self, segment: Segment) -> None:
        """Gives up the map of a segment, after its file was removed; views keep theirs."""
        self._cut.discard(segment)
        mapped = self._maps.pop(segment, None)
        if mapped is not None and mapped.views:
            self._left.append(mapped.leave())

    def check(self, written: Segment) -> None:
        """Checks that the files of all maps are still there in full.

        From now on calls read a segment that was cut, and raise for bytes that are missing.

        Args:
            written: The segment that the log ends in.

        Raises:
            StorageError: ``written`` was cut or removed: bytes stored in it would not last.
        """
        reason = _what_is_wrong(written)
        if reason is not None:
            raise StorageError(
                f"{written.path}, which is being written, {reason}; nobody but the broker may "
                f"change its files; start it again to learn what is lost"
            )
        for segment, mapped in list(self._maps.items()):
            reason = _what_is_wrong(segment)
            mapped.look_again()
            if reason is not None:
                log.error("%s %s; what is missing cannot be read any more", segment.path, reason)
                self.forget(segment)
                self._cut.add(segment)

    def close(self) -> None:
        """Gives up all maps."""
        for segment in list(self._maps):
            self.forget(segment)

    def _make(self, segment: Segment) -> MappedFile | None:
        if len(self._maps) >= self._most:
            self.forget(next(iter(self._maps)))
        try:
            mapped = MappedFile(segment.path, segment.size)
        except OSError:
            return None  # a reader's call gets the error
        self._maps[segment] = mapped
        return mapped


def _what_is_wrong(segment: Segment) -> str | None:
    try:
        size = os.stat(segment.path).st_size
    except FileNotFoundError:
        return "was removed from outside"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if size < segment.size:
        return f"was cut from outside: it has {size} bytes instead of {segment.size}"
    return None

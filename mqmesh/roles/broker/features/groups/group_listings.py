"""Lists of groups that pages are made of."""

from collections.abc import Callable
from typing import Final

LISTINGS: Final = 4
"""So many lists of groups are kept: for exporters that ask at the same time."""


class GroupListings:
    """Names of groups as they were at the first page, so that no page has to sort them."""

    def __init__(self) -> None:
        self._kept: dict[int, list[str]] = {}
        self._last = 0

    def open(self, listing: int, names: Callable[[], set[str]]) -> tuple[int, list[str]]:
        """A listing that was made before, or a new one.

        Args:
            listing: Which one.
            names: All groups at present.

        Returns:
            Its number, and the groups.
        """
        kept = self._kept.get(listing)
        if kept is not None:
            return listing, kept
        self._last += 1
        made = self._kept[self._last] = list(names())
        if len(self._kept) > LISTINGS:
            del self._kept[next(iter(self._kept))]
        return self._last, made

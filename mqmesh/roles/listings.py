"""Contents of listings, kept from one page to the next."""

from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

LISTINGS: Final = 16
"""Limit of listings kept of a kind: for exporters that read at the same time."""


class Listings(Generic[_T]):
    """Listings that are sent in pages, by user and number; the one used least lately goes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], _T] = {}
        self._last = 0

    def take(self, user: str, listing: int) -> _T | None:
        """Removes and returns a listing; None if it is not kept, or is another user's."""
        return self._kept.pop((user, listing), None)

    def keep(self, user: str, listing: int, value: _T) -> int:
        """Keeps a listing for the next page.

        Args:
            user: Name of the user that gets it.
            listing: Number of the listing, 0 if it has none.
            value: Contents of the listing.

        Returns:
            Its number.
        """
        if not listing:
            self._last += 1
            listing = self._last
        self._kept[user, listing] = value
        if len(self._kept) > LISTINGS:
            del self._kept[next(iter(self._kept))]
        return listing

"""Refusals of a server: counted by code, and logged in few lines. Pure."""

import msgspec


class _Fresh(msgspec.Struct):
    count: int
    last: str


class Refusals:
    """Refusals of one server.

    Attributes:
        counts: How often it refused so far, by the name of the response code.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._fresh: dict[str, _Fresh] = {}

    def note(self, name: str, remark: str) -> None:
        """Counts a refusal.

        Args:
            name: Of the response code.
            remark: Text that the client gets.
        """
        self.counts[name] = self.counts.get(name, 0) + 1
        fresh = self._fresh.get(name)
        if fresh is None:
            self._fresh[name] = _Fresh(1, remark)
        else:
            fresh.count += 1
            fresh.last = remark

    def take_lines(self) -> list[str]:
        """Return a line for each code that was answered since the last call."""
        fresh, self._fresh = self._fresh, {}
        return [
            f"refused with {name}: {one.count} ({self.counts[name]} so far), the last: {one.last}"
            for name, one in fresh.items()
        ]

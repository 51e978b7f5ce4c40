"""Offsets that an administrator moved under running consumers. Pure.

The consumer of such a queue holds messages of the old place, and will commit them. So, until it
has followed, its commits are refused, and its pulls are answered with the new offset. It has
followed when it pulls there after such an answer: what it sent before came before, since a
connection keeps the order.

::

              begin                    on_pull, any offset             on_pull at the target
    (none) ----------->  PENDING  ----------------------->   SENT   ------------------------> (none)
                         commits refused                     commits refused
                                                             other pulls are sent there
"""

import msgspec


class _Reset(msgspec.Struct):
    target: int
    notified: bool = False


class OffsetResets:
    """Resets that consumers have not followed yet, by group, topic and queue."""

    def __init__(self) -> None:
        self._resets: dict[tuple[str, str, int], _Reset] = {}
        self._moved: set[tuple[str, str, int]] = set()

    def __len__(self) -> int:
        return len(self._resets)

    def begin(self, group: str, topic: str, queue_id: int, target: int) -> None:
        """The group goes on elsewhere in a queue; a former reset of it is over."""
        self._resets[group, topic, queue_id] = _Reset(target)

    def note_moved(self, group: str, topic: str, queue_id: int) -> None:
        """An administrator moved a group in a queue, whether or not anybody consumes there."""
        self._moved.add((group, topic, queue_id))

    def was_moved(self, group: str, topic: str, queue_id: int) -> bool:
        """Return whether the group's offset in a queue was moved since this master began."""
        return (group, topic, queue_id) in self._moved

    def on_pull(self, group: str, topic: str, queue_id: int, queue_offset: int) -> int | None:
        """A consumer of the group pulls, or has a pull waiting.

        Returns:
            Where it must go on instead; None if it may have what it asks for.
        """
        if not self._resets:
            return None  # nearly always: this is asked with every pull
        key = (group, topic, queue_id)
        reset = self._resets.get(key)
        if reset is None:
            return None
        if reset.notified and queue_offset == reset.target:
            del self._resets[key]
            return None
        reset.notified = True
        return reset.target

    def holds_commit(self, group: str, topic: str, queue_id: int) -> bool:
        """True while commits in a queue come from before the reset."""
        return bool(self._resets) and (group, topic, queue_id) in self._resets

    def forget(self, group: str) -> None:
        """The group is gone."""
        self._resets = {key: one for key, one in self._resets.items() if key[0] != group}
        self._moved = {key for key in self._moved if key[0] != group}

    def forget_topic(self, topic: str) -> None:
        """The topic is gone."""
        self._resets = {key: one for key, one in self._resets.items() if key[1] != topic}
        self._moved = {key for key in self._moved if key[1] != topic}

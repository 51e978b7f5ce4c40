"""Reasons why a consumer gets no messages: logged at once and each minute, and raised."""

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import MQMeshError, NoPermission, TopicNotFound

REPORT_MS: Final = 60_000
"""Interval of log lines about a lasting hindrance."""

_log = logging.getLogger(__name__)


class _Hindrance(msgspec.Struct):
    why: Callable[[], MQMeshError]
    due_ms: int
    is_topic: bool
    fatal: MQMeshError | None = None


class Hindrances:
    """Reasons why a consumer gets no messages at present. For the client loop, unless stated.

    Args:
        group: Consumer group.
        now_ms: Monotonic clock.
        call_later: Calls once, not before so many ms.
        topic_wait_ms: A topic that does not exist is nothing to report for so long.
        topic_must_exist: A topic that does not exist after that is fatal.
        on_missing: Called once with each topic that does not exist after that.
        on_fatal: Called when ``fatal`` has a reason.
    """

    def __init__(
        self,
        group: str,
        now_ms: Callable[[], int],
        call_later: Callable[[int, Callable[[], None]], object],
        *,
        topic_wait_ms: int,
        topic_must_exist: bool,
        on_missing: Callable[[str], None],
        on_fatal: Callable[[], None],
    ) -> None:
        self._group = group
        self._now_ms = now_ms
        self._call_later = call_later
        self._topic_wait_ms = topic_wait_ms
        self._topic_must_exist = topic_must_exist
        self._on_missing = on_missing
        self._on_fatal = on_fatal
        self._found: dict[str, _Hindrance] = {}
        self._reported: set[str] = set()
        self._planned_ms: int | None = None

    @property
    def fatal(self) -> MQMeshError | None:
        """Error because of which the consumer cannot work as things are; from any thread."""
        errors = [one.fatal for one in self._found.copy().values()]
        return next((error for error in errors if error is not None), None)

    @property
    def waits_for_topics(self) -> bool:
        """True while a topic does not exist, and ``topic_wait_ms`` is not over; from any thread."""
        waiting = self._found.copy().items()
        return any(one.is_topic and what not in self._reported for what, one in waiting)

    def note(self, what: str, error: MQMeshError, wait_ms: int = 0) -> None:
        """Note that something cannot be done.

        Args:
            what: Words for the log; the same each time.
            error: Why not. ``NoPermission`` is fatal.
            wait_ms: Until it is reported first.
        """
        known = self._found.get(what)
        if known is None:
            due_ms = self._now_ms() + wait_ms
            known = self._found[what] = _Hindrance(lambda: error, due_ms, False)
        known.why = lambda: error
        known.fatal = error if isinstance(error, NoPermission) else None
        self._look()

    def miss(self, topic: str, why: Callable[[], MQMeshError], wait_ms: int | None = None) -> None:
        """Note that a topic has no route.

        Args:
            topic: Topic.
            why: Makes the error when it is reported; ``TopicNotFound`` if it does not exist.
            wait_ms: Until it is reported first; ``topic_wait_ms`` by default.
        """
        if topic not in self._found:
            wait_ms = self._topic_wait_ms if wait_ms is None else wait_ms
            self._found[topic] = _Hindrance(why, self._now_ms() + wait_ms, True)
            self._look()

    def end(self, what: str) -> None:
        """Note that something can be done now, or that a topic is there."""
        if self._found.pop(what, None) is not None and what in self._reported:
            self._reported.discard(what)
            _log.info("group %s: over: %s", self._group, what)

    def _look(self) -> None:
        now_ms = self._now_ms()
        for what, one in list(self._found.items()):
            if one.due_ms <= now_ms:
                one.due_ms = now_ms + REPORT_MS
                self._report(what, one)
        if self.fatal is not None:
            self._on_fatal()
        if self._found:
            self._plan(min(one.due_ms for one in self._found.values()), now_ms)

    def _report(self, what: str, one: _Hindrance) -> None:
        error = one.why()
        words = f"topic {what} is missing" if one.is_topic else what
        _log.warning("group %s: %s: %s", self._group, words, error)
        is_first = what not in self._reported
        self._reported.add(what)
        if one.is_topic and isinstance(error, TopicNotFound):
            if self._topic_must_exist:
                one.fatal = TopicNotFound(f"topic {what}: {error}")
            if is_first:
                self._on_missing(what)

    def _plan(self, due_ms: int, now_ms: int) -> None:
        if self._planned_ms is not None and self._planned_ms <= due_ms:
            return
        self._planned_ms = due_ms

        def run() -> None:
            if self._planned_ms == due_ms:
                self._planned_ms = None
            self._look()

        self._call_later(due_ms - now_ms, run)

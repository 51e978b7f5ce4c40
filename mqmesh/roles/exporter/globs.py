"""Choice of topics and consumer groups by globs: ``*`` stands for any characters. Pure."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from mqmesh.message import DLQ_PREFIX, RETRY_PREFIX, is_system_topic
from mqmesh.metrics import OTHER
from mqmesh.roles.exporter.families import Series

ANY: Final = "*"
REMEMBERED: Final = 65_536
"""Results that are kept in memory: a page needs the same names again and again."""
_TOPIC: Final = "topic"
_GROUPS: Final = ("consumer_group", "group")
"""Labels that name a consumer group."""


@lru_cache(REMEMBERED)
def matches(glob: str, name: str) -> bool:
    """True if a name is of the form of a glob.

    Each part between two ``*`` is looked for once, behind the one before it: nothing is tried
    again, so that no glob takes long.

    Args:
        glob: Characters, of which ``*`` stands for any number of any; "" matches every name.
        name: The whole name.
    """
    if not glob:
        return True
    first, *middle = glob.split(ANY)
    if not middle:
        return name == glob
    last = middle.pop()
    if len(name) < len(first) + len(last):
        return False
    if not name.startswith(first) or not name.endswith(last):
        return False
    position, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return True


class Globs:
    """Filter for the series of some topics and groups.

    Series without a topic and a consumer group are kept, and so are sums that a broker reports as
    one series.

    Args:
        topic_glob: Glob of topics. Topics that mqmesh itself uses are kept in any case, except
            retry topics and those of dead letters, which are kept together with their groups.
        group_glob: Glob of consumer groups.
    """

    def __init__(self, topic_glob: str, group_glob: str) -> None:
        self._topic_glob = topic_glob
        self._group_glob = group_glob

    def takes_topic(self, topic: str) -> bool:
        """Return True if a topic is exported."""
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            if topic.startswith(prefix):
                return self.takes_group(topic.removeprefix(prefix))
        is_own = topic == OTHER or is_system_topic(topic)
        return is_own or matches(self._topic_glob, topic)

    def takes_group(self, group: str) -> bool:
        """Return True if a consumer group is exported."""
        return group == OTHER or matches(self._group_glob, group)

    def kept(self, series: Iterable[Series]) -> Iterable[Series]:
        """Return the series of the topics and groups that are exported."""
        return self._kept(series) if self._topic_glob or self._group_glob else series

    def _kept(self, series: Iterable[Series]) -> Iterator[Series]:
        for one in series:
            named = zip(one.exported.labels, one.labels, strict=True)
            if all(self._takes(label, value) for label, value in named):
                yield one

    def _takes(self, label: str, value: str) -> bool:
        if label == _TOPIC:
            return self.takes_topic(value)
        return label not in _GROUPS or self.takes_group(value)

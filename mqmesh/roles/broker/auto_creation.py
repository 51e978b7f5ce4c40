"""Rate limits on what clients create by first use: topics, queues, groups. Pure.

Where users have names, all connections of one are one client. A bucket for each: full at
first, one piece for each thing, and filled again over a minute.
"""

from typing import Final

from mqmesh.errors import SystemBusy
from mqmesh.metrics import LabelValues, Measured, counter
from mqmesh.protocol.command import ANYBODY
from mqmesh.protocol.request import Peer

MINUTE_MS: Final = 60_000
MAX_CLIENTS: Final = 65_536
"""Clients whose buckets are kept; of more, the one that made none for longest is forgotten."""


Client = Peer | str
"""A connection, or the name of a user; see ``client_of``."""


class CreationRate:
    """The buckets for one kind of thing.

    Args:
        kind: ``topics``, ``queues`` or ``groups``.
        per_minute: Most that one client may create; the setting ``auto_{kind}_per_minute``.

    Attributes:
        made: Number created, for all clients.
        refused: Number refused.
    """

    def __init__(self, kind: str, per_minute: int) -> None:
        self._kind = kind
        self._per_minute = per_minute
        self._spent: dict[Client, tuple[float, int]] = {}
        self.made = 0
        self.refused = 0

    def __len__(self) -> int:
        return len(self._spent)

    def check(self, client: Client, now_ms: int, count: int = 1) -> None:
        """Refuses a client that made too many; asked only before something is made.

        Args:
            client: See ``client_of``.
            now_ms: Monotonic clock.
            count: How many are to be made.

        Raises:
            SystemBusy: It has to wait.
        """
        spent, most = self._left_of(client, now_ms), self._per_minute
        # More at once than a minute's share are made when the bucket is full, and paid for later.
        over = spent + min(count, most) - most
        if over > 0:
            self.refused += 1
            raise SystemBusy(
                f"this client made {spent:.0f} {self._kind} lately by using unknown ones, and it "
                f"may make {most} a minute (auto_{self._kind}_per_minute); create them "
                "beforehand, wait, or raise the setting",
                retry_after_ms=int(over * MINUTE_MS / most) + 1,
            )

    def note(self, client: Client, now_ms: int, count: int = 1) -> None:
        """A client made so many."""
        spent = self._left_of(client, now_ms)
        self.made += count
        self._spent.pop(client, None)
        self._spent[client] = (spent + count, now_ms)
        if len(self._spent) > MAX_CLIENTS:
            del self._spent[next(iter(self._spent))]

    def forget(self, client: Client) -> None:
        """Forget a client that is gone: its connection does not come back."""
        self._spent.pop(client, None)

    def _left_of(self, client: Client, now_ms: int) -> float:
        """Return the pieces that a client has spent and that have not been filled up again."""
        spent, at_ms = self._spent.get(client, (0.0, now_ms))
        return max(0.0, spent - (now_ms - at_ms) * self._per_minute / MINUTE_MS)


class AutoCreation:
    """Rate limits of automatic creation, for each client.

    Args:
        topics: A minute, of each client (``auto_topics_per_minute``).
        queues: Of these topics (``auto_queues_per_minute``).
        groups: Consumer groups (``auto_groups_per_minute``).

    Attributes:
        topics, queues, groups: The buckets.
    """

    def __init__(self, topics: int, queues: int, groups: int) -> None:
        self.topics = CreationRate("topics", topics)
        self.queues = CreationRate("queues", queues)
        self.groups = CreationRate("groups", groups)

    def check_topic(self, client: Client, queues: int, now_ms: int) -> None:
        """Refuses a client one more topic with so many queues.

        Raises:
            SystemBusy: It has to wait.
        """
        self.topics.check(client, now_ms)
        self.queues.check(client, now_ms, queues)

    def note_topic(self, client: Client, queues: int, now_ms: int) -> None:
        """A client made a topic with so many queues."""
        self.topics.note(client, now_ms)
        self.queues.note(client, now_ms, queues)

    def forget(self, peer: Peer) -> None:
        """Forget a connection that broke; what a user has made is remembered."""
        for rate in (self.topics, self.queues, self.groups):
            rate.forget(peer)

    def metrics(self, name: str) -> dict[LabelValues, int]:
        """``made`` or ``refused``, by kind."""
        kinds = {"topics": self.topics, "queues": self.queues, "groups": self.groups}
        return {(kind,): getattr(rate, name) for kind, rate in kinds.items()}


def client_of(peer: Peer) -> Client:
    """Return the key that is counted: the user, or the connection where users have no names."""
    return peer if peer.principal == ANYBODY else peer.principal.name


AUTO_CREATION_METRICS: Final[tuple[Measured[AutoCreation], ...]] = (
    counter(
        "auto_created_total",
        "topics, their queues, and groups that were made because a client used them",
        lambda creation: creation.metrics("made"),
        labels=("kind",),
    ),
    counter(
        "auto_creation_refusals_total",
        "those that were not, because the client made too many in a minute",
        lambda creation: creation.metrics("refused"),
        labels=("kind",),
    ),
)

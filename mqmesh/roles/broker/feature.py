"""The parts that a broker is made of: each serves commands, and is called at events.

A feature is one subject: its state, its commands, its metrics. It is built from the core and from
those of its neighbours that its constructor names. ``all_features.py`` builds all of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from mqmesh.metrics import Measured
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.request import Peer
from mqmesh.roles.dispatch import Handler


class BrokerTurn(msgspec.Struct, frozen=True):
    """The work of the command server in one turn of the event loop.

    Attributes:
        readable_ms: When the server last had something to read, monotonic clock.
        drained_ms: When nothing was left after that; None if frames were left.
    """

    readable_ms: int
    drained_ms: int | None


class Feature:
    """One feature of a running broker; hooks that it does not need do nothing.

    Hooks are called in the order in which ``all_features.py`` lists the features.

    Attributes:
        metrics: Metrics of the feature, read from its instance.
        works_at_followers: A follower calls its hooks, too, and serves ``follower_commands``.
    """

    metrics: ClassVar[Sequence[Measured[Any]]] = ()
    works_at_followers: ClassVar[bool] = False

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Return the handlers of a master."""
        return {}

    def follower_commands(self) -> Mapping[RequestCode, Handler]:
        """Return the handlers of a follower, which only reads."""
        return {}

    def loaded(self) -> None:
        """Take over what the state log says; the log and its tables are read."""

    def opened(self) -> None:
        """Serve clients of a master from now on: what it inherited is confirmed."""

    def tick(self, now_ms: int) -> None:
        """Check deadlines; called some ten times a second with the monotonic clock in ms."""

    def sample(self) -> None:
        """Do what is done each second."""

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forget a connection that broke; monotonic clock in ms."""

    def topic_deleting(self, topic: str) -> None:
        """Prepare for the deletion of a topic; an error keeps the topic."""

    def topic_deleted(self, topic: str) -> None:
        """Forget a topic."""

    def group_deleting(self, group: str) -> None:
        """Prepare for the deletion of a consumer group; an error keeps the group."""

    def group_deleted(self, group: str) -> None:
        """Forget a consumer group."""

    def configured(self) -> None:
        """Take over settings that were changed."""

    def stopping(self) -> None:
        """Finish what was begun, and answer clients that wait for messages."""

    def stopped(self) -> None:
        """Answer everybody who still waits: nothing becomes durable any more."""

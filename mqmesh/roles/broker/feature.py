"""Features of the broker: what each gives to it, commands and hooks that the server calls.

Each folder of ``features/`` has one, in its ``feature.py``; ``all_features.py`` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from mqmesh.figures import Measured
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Reply, Request
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.snapshots.snapshot_desk import OnDone
from mqmesh.roles.broker.ha.replica_figures import ReplicaCounts
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.live_settings import LiveSettings

BrokerHandler = Callable[[BrokerContext, Request, Any], Reply | None]
"""Serves a command; None means that it answers later, through ``context.wire``."""
Hook = Callable[[BrokerContext], None]
TimedHook = Callable[[BrokerContext, int], None]
RunAside = Callable[[Callable[[], Any], OnDone], None]


class Beginning(msgspec.Struct, frozen=True):
    """What a role begins with, for features that build their own parts of the context.

    Attributes:
        settings: Settings.
        now_ms: Monotonic clock.
        chance: Of the process.
        root: Directory of everything that the broker keeps.
        run_aside: Has another thread do something.
        replication: What followers and links count, over all roles.
        epoch: Of a master: numbers that it gives out begin with it.
        was_elected: A master that others may not know of yet.
        has_past: There were messages before, so that somebody may be at work on them.
        memory_bytes: Of the machine; 0 if that is not known.
        lease_ttl_ms: So long a master that was lost may go on that asks nobody.
    """

    settings: LiveSettings[BrokerConfig]
    now_ms: int
    chance: Random
    root: Path
    run_aside: RunAside
    replication: ReplicaCounts
    epoch: int
    was_elected: bool
    has_past: bool
    memory_bytes: int = 0
    lease_ttl_ms: int = 0

    @property
    def config(self) -> BrokerConfig:
        """Settings in force."""
        return self.settings.now


class BrokerTurn(msgspec.Struct, frozen=True):
    """What the command server did in a turn of the loop.

    Attributes:
        readable_ms: When there was something to take last, monotonic clock.
        drained_ms: When nothing was left then; None if frames were.
    """

    readable_ms: int
    drained_ms: int | None


def _nothing(*arguments: Any) -> None:
    return None


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """One feature; what it does not need is left out.

    Attributes:
        commands: Its handlers.
        turn_ended: A turn of the loop is over; True if the next has to come at once.
        turn_over: The same, once ``turn_ended`` of all features was called.
        durable: The log was synced further.
        tick: Some ten times a second, with the monotonic clock in ms.
        sample: Now and then, each few seconds.
        client_gone: A connection broke: its routing id, and the monotonic clock in ms.
        topic_deleting: A topic is about to be deleted: its name.
        topic_deleted: A topic is no more: its name.
        configured: Settings were changed: what keeps some of its own takes them anew.
        stopping: The broker stops: what was begun is finished, who waits for messages is told.
        stopped: Nothing becomes durable any more: who still waits for that is told.
        figures: What it counts and measures.
    """

    commands: Mapping[RequestCode, BrokerHandler] = {}
    turn_ended: Callable[[BrokerContext, BrokerTurn], bool | None] = _nothing
    turn_over: Callable[[BrokerContext, BrokerTurn], None] = _nothing
    durable: Hook = _nothing
    tick: TimedHook = _nothing
    sample: Hook = _nothing
    client_gone: Callable[[BrokerContext, bytes, int], None] = _nothing
    topic_deleting: Callable[[BrokerContext, str], None] = _nothing
    topic_deleted: Callable[[BrokerContext, str], None] = _nothing
    configured: Hook = _nothing
    stopping: Hook = _nothing
    stopped: Hook = _nothing
    figures: Sequence[Measured[BrokerContext]] = ()


class Features:
    """All features of a running broker; their hooks are called in the order of the list.

    Args:
        features: In order.
        context: What they may use.

    Attributes:
        handlers: Of all their commands, for ``Dispatch.open``.
    """

    def __init__(self, features: Sequence[Feature], context: BrokerContext) -> None:
        self._context = context
        self.handlers: dict[RequestCode, Handler] = {
            code: partial(handler, context)
            for feature in features
            for code, handler in feature.commands.items()
        }

        def those(name: str) -> list[Any]:
            hooks = [getattr(feature, name) for feature in features]
            return [hook for hook in hooks if hook is not _nothing]

        # Turns come by the thousand a second, so that those who want nothing are not called.
        self._turn_ended = those("turn_ended")
        self._turn_over = those("turn_over")
        self._durable = those("durable")
        self._tick = those("tick")
        self._sample = those("sample")
        self._client_gone = those("client_gone")
        self._topic_deleting = those("topic_deleting")
        self._topic_deleted = those("topic_deleted")
        self._stopping = those("stopping")
        self._stopped = those("stopped")
        context.topics.on_deleting = self._topic_goes
        context.topics.on_deleted = self._forget_topic

    def turn_ended(self, turn: BrokerTurn) -> bool:
        """A turn of the loop is over.

        Returns:
            True if the next has to come at once.
        """
        again = [hook(self._context, turn) for hook in self._turn_ended]
        for hook in self._turn_over:
            hook(self._context, turn)
        return any(again)

    def durable(self) -> None:
        """The log was synced further."""
        for hook in self._durable:
            hook(self._context)

    def tick(self, now_ms: int) -> None:
        """Time went on; monotonic clock."""
        for hook in self._tick:
            hook(self._context, now_ms)

    def sample(self) -> None:
        """It is time for what is done now and then."""
        for hook in self._sample:
            hook(self._context)

    def client_gone(self, peer: bytes, now_ms: int) -> None:
        """A connection broke; monotonic clock."""
        for hook in self._client_gone:
            hook(self._context, peer, now_ms)

    def stopping(self) -> None:
        """The broker stops."""
        for hook in self._stopping:
            hook(self._context)

    def stopped(self) -> None:
        """Nothing becomes durable any more."""
        for hook in self._stopped:
            hook(self._context)

    def _topic_goes(self, topic: str) -> None:
        for hook in self._topic_deleting:
            hook(self._context, topic)

    def _forget_topic(self, topic: str) -> None:
        for hook in self._topic_deleted:
            hook(self._context, topic)

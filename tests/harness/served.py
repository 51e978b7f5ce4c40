"""The commands of a broker without a process, behind the dispatch that a real one has."""

from __future__ import annotations

from typing import Any, Final

from mqmesh.errors import NoPermission
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Principal
from mqmesh.protocol.commands import CommandSpec, ServedBy
from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Features
from mqmesh.roles.dispatch import Dispatch, Serve

OF_THE_PROCESS: Final = frozenset({RequestCode.GET_BROKER_CONFIG, RequestCode.UPDATE_BROKER_CONFIG})
"""Commands that the process serves whatever its role is: no feature has them."""


class Guard:
    """Permits everything but what a test forbids.

    Attributes:
        forbidden: Topics.
        told: What was looked up: names of commands, and topics.
    """

    def __init__(self) -> None:
        self.forbidden: set[str] = set()
        self.told: list[tuple[str, str]] = []

    def check(self, principal: Principal, spec: CommandSpec, header: Any) -> None:
        """See ``Authorizer.check``."""
        if header is not None and spec.request is not None:
            for topic in spec.topic_names(header):
                self.check_topic(principal, spec, topic)

    def check_creation(self, principal: Principal, topic: str) -> None:
        """Everybody may have topics made here."""

    def check_topic(self, principal: Principal, spec: CommandSpec, topic: str) -> None:
        """See ``Authorizer.check_topic``."""
        self.told.append((spec.code.name, topic))
        if topic in self.forbidden:
            raise NoPermission(f"planned: nothing of {topic!r} for you")


def dispatched(context: BrokerContext, guard: Guard | None = None) -> Dispatch:
    """The dispatch of a broker.

    Args:
        context: What its handlers use.
        guard: Looks up rights.
    """
    dispatch = Dispatch(ServedBy.BROKER, context.clock.monotonic_ns, guard)
    dispatch.open(Features(FEATURES, context).handlers)
    return dispatch


def served(context: BrokerContext) -> dict[int, Serve]:
    """By request code, all but PING."""
    return dispatched(context).handlers

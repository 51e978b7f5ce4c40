"""The commands of a broker without a process, behind the dispatch that a real one has."""

from __future__ import annotations

from mqmesh.protocol.commands import ServedBy
from mqmesh.roles.broker.all_features import FEATURES
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Features
from mqmesh.roles.dispatch import Dispatch, Serve


def served(context: BrokerContext) -> dict[int, Serve]:
    """By request code, all but PING."""
    dispatch = Dispatch(ServedBy.BROKER, context.clock.monotonic_ns)
    dispatch.open(Features(FEATURES, context).handlers)
    return dispatch.handlers

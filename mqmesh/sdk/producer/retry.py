"""Retry decisions for sends that failed. Pure."""

import enum
from typing import Final

from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    EndpointUnreachable,
    MessageIllegal,
    MQMeshError,
    NoPermission,
    NoRoute,
    NotMaster,
    ProtocolError,
    RequestTimeout,
    SequenceConflict,
    SystemBusy,
    TransportError,
)

BACKOFF_MS: Final = 100
"""Pause before a send is repeated at a broker that refused it."""


class SendFailure(enum.Enum):
    """Reaction to a failed send."""

    GIVE_UP = enum.auto()
    """Trying again would not help, or is not allowed."""
    TRY_AGAIN = enum.auto()
    """Another try, counted."""
    WAIT = enum.auto()
    """The broker is starting, stopping or away: try again, not counted, until the deadline."""
    FOLLOW = enum.auto()
    """Its group has another master: repeat it there, not counted, until the deadline."""


def judge(error: MQMeshError, *, attempts: int, retries: int) -> SendFailure:
    """Decides about a failed send.

    Args:
        error: Why it failed.
        attempts: Number of tries, the failed one included.
        retries: Number of tries allowed after the first.

    Source: semantics, chapter 5: flow-control refusals are not retried.
    """
    if isinstance(error, SystemBusy | MessageIllegal | NoPermission | SequenceConflict):
        return SendFailure.GIVE_UP
    if isinstance(error, NotMaster):
        # No further try but the same one: the new master knows the batch if the old one had it.
        return SendFailure.FOLLOW
    if isinstance(error, BrokerNotAvailable | NoRoute):
        return SendFailure.WAIT if retries else SendFailure.GIVE_UP
    if isinstance(error, RequestTimeout | EndpointUnreachable | BrokerError):
        return SendFailure.TRY_AGAIN if attempts <= retries else SendFailure.GIVE_UP
    return SendFailure.GIVE_UP


def leaves_doubt(error: MQMeshError) -> bool:
    """Return True when after such an error a broker may, or may not, have stored the messages.

    A deposed master answers ``NotMaster`` also to sends that it, or its followers, have stored.
    """
    return isinstance(error, TransportError | ProtocolError | NotMaster)

from __future__ import annotations

import pytest

from mqmesh import errors
from mqmesh.errors import (
    BrokerError,
    BrokerNotAvailable,
    ClientClosed,
    CorruptBatch,
    EndpointUnreachable,
    InvalidArgument,
    MessageIllegal,
    NoPermission,
    NoRoute,
    NotMaster,
    QueueFull,
    RemoteProtocolError,
    RequestTimeout,
    SequenceConflict,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.sdk.producer.retry import SendFailure, judge, leaves_doubt

AGAIN, WAIT, GIVE_UP = SendFailure.TRY_AGAIN, SendFailure.WAIT, SendFailure.GIVE_UP


@pytest.mark.parametrize("error", [RequestTimeout, EndpointUnreachable, BrokerError, TopicNotFound])
def test_what_may_go_better_is_tried_as_often_as_allowed(error) -> None:
    verdicts = [judge(error("x"), attempts=attempts, retries=2) for attempts in (1, 2, 3, 4)]
    assert verdicts == [AGAIN, AGAIN, GIVE_UP, GIVE_UP]
    assert judge(error("x"), attempts=1, retries=0) is GIVE_UP


@pytest.mark.parametrize(
    "error",
    [
        SystemBusy,
        MessageIllegal,
        NoPermission,
        SequenceConflict,
        InvalidArgument,
        ClientClosed,
        RemoteProtocolError,
        QueueFull,
    ],
)
def test_what_will_not_go_better_or_must_not_be_repeated_is_given_up(error) -> None:
    assert judge(error("x"), attempts=1, retries=100) is GIVE_UP


@pytest.mark.parametrize("error", [BrokerNotAvailable, NoRoute])
def test_who_is_away_is_waited_for_unless_nothing_may_be_repeated(error) -> None:
    assert judge(error("x"), attempts=99, retries=1) is WAIT
    assert judge(error("x"), attempts=1, retries=0) is GIVE_UP


def test_another_master_is_followed_also_by_what_must_not_be_tried_again() -> None:
    assert judge(NotMaster("x"), attempts=99, retries=0) is SendFailure.FOLLOW


def test_only_a_clear_refusal_leaves_no_doubt() -> None:
    for name in dir(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, BrokerError | NoRoute | InvalidArgument):
            assert leaves_doubt(kind("x")) is (kind is NotMaster), name
    for kind in (RequestTimeout, EndpointUnreachable, RemoteProtocolError, CorruptBatch):
        assert leaves_doubt(kind("x"))

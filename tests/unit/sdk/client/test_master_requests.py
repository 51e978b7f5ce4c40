"""Requests to masters that are not masters any more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mqmesh.errors import NotMaster
from mqmesh.protocol.command import Command
from mqmesh.protocol.commands import RequestCode
from mqmesh.sdk.client.master_requests import NO_MASTER_MS, MasterRequests
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.testing.clock import ManualClock

DONE = Command(0, 0, 0, memoryview(b""), memoryview(b""))


@pytest.mark.parametrize(
    ("code", "follows"),
    [
        (RequestCode.SETTLE_MESSAGES, True),
        (RequestCode.SEND_MESSAGE, False),
        (RequestCode.COMMIT_PROCESSED, False),
    ],
)
def test_who_may_be_stored_hears_of_a_lost_master(code, follows):
    answers, outcomes, later = [NotMaster("deposed"), DONE], [], []
    loop = SimpleNamespace(
        clock=ManualClock(), call_later=lambda delay_ms, call: later.append((delay_ms, call))
    )
    broker = SimpleNamespace(
        request=lambda code, done, *parts, header, timeout_ms: done(answers.pop(0))
    )
    brokers = SimpleNamespace(connection=lambda name: broker)
    requests = MasterRequests(loop, RouteCache(), brokers, lambda: False)
    requests.request("broker-a", code, outcomes.append, header=b"", timeout_ms=1_000)
    if not follows:
        assert [type(one) for one in outcomes] == [NotMaster]
        assert later == []
        return
    ((delay_ms, call),) = later
    call()
    assert (delay_ms, outcomes) == (NO_MASTER_MS, [DONE])

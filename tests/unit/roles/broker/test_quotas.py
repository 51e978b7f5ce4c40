"""Users that are over their quota wait."""

from __future__ import annotations

import pytest
from harness.keys import credentials, user

from mqmesh.errors import SystemBusy
from mqmesh.protocol.command import ANYBODY
from mqmesh.security.access_list import Quota


def limit(stage, **limits) -> None:
    stage.features.core.quotas.put([user(credentials(ANYBODY.name), quota=Quota(**limits))])


def test_sends_over_the_quota_are_refused_until_it_is_paid(stage):
    limit(stage, send_messages_per_s=2)
    assert [one.code for one in stage.send(stage.batch(bodies=(b"x",) * 6))] == [0]
    with pytest.raises(SystemBusy) as caught:
        stage.send(stage.batch())
    assert caught.value.retry_after_ms == 2_001
    assert stage.features.core.stats.total.busy_refusals == 1
    stage.clock.advance(2_001)
    assert [one.code for one in stage.send(stage.batch())] == [0]


def test_reads_over_the_quota_are_refused_also_those_that_waited(stage):
    stage.send(stage.batch(bodies=(b"x",) * 6))
    limit(stage, read_messages_per_s=2)
    assert len(stage.pull()[1]) == 6
    with pytest.raises(SystemBusy):
        stage.pull(queue_offset=0)
    stage.clock.advance(2_001)
    held = stage.begin_pull(queue_offset=6, suspend_timeout_ms=5_000)
    stage.end_tick()
    assert held not in stage.answers
    assert len(stage.pull(queue_offset=0)[1]) == 6
    stage.send(stage.batch())
    stage.end_tick()
    assert isinstance(stage.answers[held], SystemBusy)

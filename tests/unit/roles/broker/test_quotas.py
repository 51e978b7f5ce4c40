"""Users that are over their quota wait."""

from __future__ import annotations

from functools import partial

import pytest
from harness.keys import credentials, user

from mqmesh.errors import SystemBusy
from mqmesh.protocol.command import ANYBODY
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import DeleteGroupRequest, GroupConfig, UpdateGroupRequest
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    Subscription,
    UnregisterClientRequest,
)
from mqmesh.protocol.replay import ReplayRequest, ReplayRun
from mqmesh.protocol.retries import (
    TO_DEAD_LETTERS,
    ResendRequest,
    SendBackEntry,
    SendBackRequest,
    SendBackResponse,
)
from mqmesh.security.access_list import AccessList, Namespace, NamespaceQuota, Quota


def limit(stage, **limits) -> None:
    stage.features.core.quotas.put(
        AccessList(1, [user(credentials(ANYBODY.name), quota=Quota(**limits))])
    )


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


def limit_namespace(stage, **limits) -> None:
    own = user(credentials(ANYBODY.name), namespace="ns")
    limits = [Namespace("ns", NamespaceQuota(**limits))]
    stage.features.core.quotas.put(AccessList(1, [own], limits))


def test_a_namespace_sends_no_more_than_its_quota(stage):
    limit_namespace(stage, send_bytes_per_s=100)
    stage.send(stage.batch("ns%t"))
    with pytest.raises(SystemBusy, match="all users of namespace 'ns' together"):
        stage.send(stage.batch("ns%t", 1))


def test_what_a_namespace_sends_back_and_replays_is_counted_and_does_not_wait(stage):
    limit_namespace(stage, send_bytes_per_s=1)
    stage.send(stage.batch("ns%t"))
    flow = stage.features.core.quotas.sending_of_namespaces["ns"]
    sent = flow.size

    def send_back(level: int) -> None:
        entries = [SendBackEntry("ns%t", 0, 0, 1, "", level)]
        back = SendBackRequest(f"ns%g{level}", entries)
        stage.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back, SendBackResponse)

    steps = (
        partial(send_back, 3),
        partial(send_back, TO_DEAD_LETTERS),
        lambda: stage.ask(
            RequestCode.RESEND_DEAD_LETTERS, ResendRequest(f"ns%g{TO_DEAD_LETTERS}", [0])
        ),
        lambda: stage.ask(
            RequestCode.REPLAY_MESSAGES, ReplayRequest("ns%t", 0, [ReplayRun(0, 1)], group="ns%g3")
        ),
    )
    for number, step in enumerate(steps, 2):
        step()
        assert flow.messages == number
        assert flow.size >= number * sent


def test_a_namespace_has_no_more_groups_than_its_quota(stage):
    limit_namespace(stage, groups=1)

    def make(group: str):
        update = UpdateGroupRequest(GroupConfig(group))
        return stage.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, update)

    def join(group: str):
        data = ConsumerData(group, "CLUSTERING", "FIRST_OFFSET", [Subscription("ns%t")])
        return stage.ask(RequestCode.HEART_BEAT, HeartbeatRequest("c", consumers=[data]))

    def send_back(group: str):
        entries = [SendBackEntry("ns%t", 0, 0, 1, "")]
        return stage.ask(RequestCode.CONSUMER_SEND_MSG_BACK, SendBackRequest(group, entries))

    make("ns%a")
    make("ns%a")
    join("ns%a")
    for step in (make, join, send_back):
        with pytest.raises(SystemBusy, match="'ns' has 1 of 1 groups at this broker"):
            step("ns%b")
    make("other%b")
    stage.ask(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c"))
    stage.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroupRequest("ns%a"))
    make("ns%b")

"""How much users may send, read and connect."""

from __future__ import annotations

import pytest
from harness.keys import credentials, user
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import SystemBusy
from mqmesh.security.access_list import AccessList, Namespace, NamespaceQuota, Quota
from mqmesh.security.quotas import MAX_WAIT_MS, METRICS, Flow, Quotas
from mqmesh.token_bucket import TokenBucket

SHOP = credentials("shop")


def quotas(**limits) -> Quotas:
    made = Quotas()
    made.put(AccessList(1, [user(SHOP, quota=Quota(**limits))]))
    return made


def wait_of(flow: Flow, now_ms: int) -> int:
    with pytest.raises(SystemBusy) as caught:
        flow.check(now_ms)
    return caught.value.retry_after_ms


@given(
    rate=st.integers(1, 10_000),
    wants=st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 5_000)), max_size=50),
)
def test_nobody_gets_more_than_the_rate_and_one_request(rate, wants):
    bucket, now_ms, taken, largest = TokenBucket(rate), 1_000_000, 0, 0
    for later_ms, pieces in wants:
        now_ms += later_ms
        wait_ms = bucket.wait_ms(now_ms)
        assert bucket.wait_ms(now_ms + wait_ms) == 0  # what it is told is enough
        now_ms += wait_ms
        bucket.take(pieces)
        taken, largest = taken + pieces, max(largest, pieces)
    seconds = (now_ms - 1_000_000) / 1_000
    assert taken <= rate * (seconds + 1) + largest + 1e-3


def test_a_batch_over_the_quota_passes_and_the_next_one_waits():
    flow = quotas(send_messages_per_s=100).sending["shop"]
    flow.check(5_000)
    flow.note(400, 1)
    assert wait_of(flow, 5_000) == 3_001
    assert wait_of(flow, 7_000) == 1_001
    flow.check(8_001)


def test_bytes_count_too_and_the_error_names_the_setting():
    flow = quotas(read_bytes_per_s=1_000).reading["shop"]
    flow.check(0)
    flow.note(1, 3_000)
    with pytest.raises(SystemBusy, match=r"1000 bytes a second .*quota\.read_bytes_per_s"):
        flow.check(0)


def test_nobody_is_told_to_wait_for_ever():
    flow = quotas(send_bytes_per_s=1).sending["shop"]
    flow.check(0)
    flow.note(1, 1 << 40)
    assert wait_of(flow, 0) == MAX_WAIT_MS


def test_what_is_not_said_is_not_limited():
    made = quotas(send_bytes_per_s=10)
    assert not made.reading
    assert not made.connections
    flow = made.sending["shop"]
    flow.note(1_000_000, 1)
    flow.check(0)


def test_another_list_changes_only_what_it_says():
    made = quotas(send_messages_per_s=1)
    flow = made.sending["shop"]
    flow.check(0)
    flow.note(5, 5)
    made.put(AccessList(1, [user(SHOP, quota=Quota(send_messages_per_s=1, connections=2))]))
    assert wait_of(made.sending["shop"], 0) > 0
    made.put(AccessList(1, [user(SHOP, quota=Quota(send_messages_per_s=1_000))]))
    made.sending["shop"].check(0)
    made.put(AccessList(1, [user(SHOP)]))
    assert not made.sending


def test_a_user_has_so_many_connections():
    made = quotas(connections=2)
    made.check_connection("shop", 1)
    made.check_connection("other", 1_000)
    with pytest.raises(SystemBusy, match=r"2 connections .*quota\.connections"):
        made.check_connection("shop", 2)
    assert made.refused_connections == {"shop": 1}


def test_metrics_tell_who_used_what():
    made = quotas(send_messages_per_s=1, read_bytes_per_s=1, connections=1)
    made.sending["shop"].check(0)
    made.sending["shop"].note(3, 700)
    wait_of(made.sending["shop"], 0)
    told = {one.metric.name: one.read(made) for one in METRICS}
    assert told == {
        "quota_messages_total": {("shop", "in"): 3, ("shop", "out"): 0},
        "quota_bytes_total": {("shop", "in"): 700, ("shop", "out"): 0},
        "quota_refusals_total": {("shop", "in"): 1, ("shop", "out"): 0},
        "quota_connection_refusals_total": {("shop",): 0},
        "namespace_bytes_total": {},
        "namespace_refusals_total": {},
    }


def test_users_of_a_namespace_share_what_it_may_send():
    made = Quotas()
    users = [user(credentials(one), namespace="ns") for one in ("a", "b")]
    users[0] = user(credentials("a"), namespace="ns", quota=Quota(send_messages_per_s=1))
    limits = [Namespace("ns", NamespaceQuota(send_bytes_per_s=100))]
    made.put(AccessList(1, [*users, user(SHOP)], limits))
    own, shared = made.send_limits["a"]
    assert made.send_limits == {"a": (own, shared), "b": (shared,)}
    shared.note(1, 300)
    with pytest.raises(SystemBusy, match="all users of namespace 'ns' together may send 100 bytes"):
        shared.check(0)
    own.check(0)
    told = {one.metric.name: one.read(made) for one in METRICS}
    assert told["namespace_bytes_total"] == {("ns",): 300}
    assert told["namespace_refusals_total"] == {("ns", "send_bytes_per_s"): 1}
    made.put(AccessList(2, [*users, user(SHOP)], limits))
    assert made.send_limits["b"] == (shared,), "what was used is remembered"


def test_a_namespace_has_no_more_than_its_quota():
    made = Quotas()
    made.put(AccessList(1, [], [Namespace("ns", NamespaceQuota(topics=3, queues=0))]))
    made.check_namespace("ns", {"topics": 1}, {"topics": 2, "groups": 9})
    made.check_namespace("other", {"topics": 9}, {"topics": 9})
    made.check_namespace("ns", {"topics": 9}, {"topics": 0})
    sentence = r"namespace 'ns' has 2 of 3 topics at this broker \(topics in \[namespace.quota\]"
    with pytest.raises(SystemBusy, match=sentence):
        made.check_namespace("ns", {"topics": 2}, {"topics": 2})
    with pytest.raises(SystemBusy, match="0 of 0 queues"):
        made.check_namespace("ns", {}, {"queues": 1})
    assert made.refusals_of_namespaces() == {("ns", "topics"): 1, ("ns", "queues"): 1}

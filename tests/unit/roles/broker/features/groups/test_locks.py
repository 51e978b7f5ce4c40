"""Locks, claims and generations, as members meet them at a broker."""

from __future__ import annotations

import pytest

from mqmesh.coordination.interface import AckReplicas, GroupState, MemberIncarnation, StateRecord
from mqmesh.errors import (
    BrokerNotAvailable,
    CorruptRecord,
    InvalidArgument,
    NotMaster,
    StaleGeneration,
    SystemBusy,
)
from mqmesh.message import STATE_TOPIC
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import (
    LOCK_HELD_BY_OTHER,
    LOCK_PENDING,
    ConsumerData,
    HeartbeatRequest,
    HeartbeatResponse,
    LockBatchRequest,
    LockBatchResponse,
    LockEntry,
    UnlockBatchRequest,
    UnregisterClientRequest,
)
from mqmesh.protocol.pulling import (
    ConsumerOffsets,
    QueryConsumerOffsetRequest,
    QueueOffsetEntry,
    UpdateConsumerOffsetRequest,
)
from mqmesh.roles.broker.ha.confirm import AckPolicy
from mqmesh.roles.broker.ha.leadership import Leadership


class Member:
    """A client of group g, which reads topic t."""

    def __init__(self, stage, name):
        self.stage = stage
        self.name = name
        self.peer = name.encode()
        self.generation = 0

    def beat(self):
        data = ConsumerData("g", "CLUSTERING", "LAST_OFFSET", [])
        answer = self.stage.ask(
            RequestCode.HEART_BEAT,
            HeartbeatRequest(self.name, consumers=[data]),
            HeartbeatResponse,
            peer=self.peer,
        )
        self.generation = answer.memberships[0].generation
        return answer.memberships[0]

    def lose(self):
        peer, now_ms = self.stage.peer(self.peer), self.stage.clock.monotonic_ms()
        self.stage.features.state.queue_locks.on_disconnect(peer, now_ms)
        self.stage.features.state.groups.on_disconnect(peer, now_ms)
        self.stage.clock.advance(1_000)
        self.stage.features.state.groups.tick(self.stage.clock.monotonic_ms())

    def leave(self):
        self.stage.ask(
            RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest(self.name), peer=self.peer
        )

    def lock(self, *queue_ids, token=0, topic="t"):
        request = LockBatchRequest("g", self.name, [LockEntry(topic, n, token) for n in queue_ids])
        answer = self.stage.ask(
            RequestCode.LOCK_BATCH_MQ, request, LockBatchResponse, peer=self.peer
        )
        assert answer.lease_ms == 60_000
        return [one.token for one in answer.queues]

    def unlock(self, *queue_ids):
        request = UnlockBatchRequest("g", self.name, [LockEntry("t", n) for n in queue_ids])
        self.stage.ask(RequestCode.UNLOCK_BATCH_MQ, request, peer=self.peer)

    def claim(self, *queue_ids):
        request = QueryConsumerOffsetRequest(
            "g", [QueueOffsetEntry("t", n) for n in queue_ids], self.name
        )
        answer = self.stage.ask(RequestCode.QUERY_CONSUMER_OFFSET, request, ConsumerOffsets)
        self.generation = answer.generation
        return [one.queue_offset for one in answer.queues]

    def commit(self, queue_id, offset, generation=None):
        update = UpdateConsumerOffsetRequest(
            "g",
            self.name,
            [QueueOffsetEntry("t", queue_id, offset)],
            self.generation if generation is None else generation,
        )
        self.stage.ask(RequestCode.UPDATE_CONSUMER_OFFSET, update)

    def pull(self):
        return self.stage.pull("t", 0, 0, generation=self.generation)[1]


@pytest.fixture
def filled(stage):
    """A broker with ten messages in queue 0 of topic t."""
    stage.send(stage.batch(bodies=[b"%d" % number for number in range(10)]))
    return stage


@pytest.fixture
def a(filled):
    """A member that was there first."""
    member = Member(filled, "a")
    member.beat()
    return member


@pytest.fixture
def b(filled, a):
    """A member that came later."""
    member = Member(filled, "b")
    member.beat()
    return member


def offset(stage):
    return stage.features.state.committed.query("g", "t", 0)


# ---- Locks ----------------------------------------------------------------------------


def test_a_member_locks_queues_and_gives_them_back(a, b):
    assert all(token > 0 for token in a.lock(0, 1))
    assert b.lock(0, 1, 2)[:2] == [LOCK_HELD_BY_OTHER] * 2
    a.unlock(0)
    tokens = b.lock(0, 1)
    assert tokens[0] > 0
    assert tokens[1] == LOCK_HELD_BY_OTHER


def test_who_is_no_member_gets_no_lock(filled, a):
    with pytest.raises(StaleGeneration, match="no member"):
        Member(filled, "stranger").lock(0)


def test_queues_that_are_not_there_cannot_be_locked(a):
    assert a.lock(99) == [LOCK_HELD_BY_OTHER]
    assert a.lock(0, topic="unknown") == [LOCK_HELD_BY_OTHER]


def test_a_bad_group_name_is_refused(filled):
    for kind, code in [
        (LockBatchRequest, RequestCode.LOCK_BATCH_MQ),
        (UnlockBatchRequest, RequestCode.UNLOCK_BATCH_MQ),
    ]:
        with pytest.raises(InvalidArgument):
            filled.ask(code, kind("no group!", "a", []))


def test_a_crashed_member_blocks_its_queues_for_a_moment_only(filled, a, b):
    a.lock(0)
    a.lose()
    assert b.lock(0) == [LOCK_HELD_BY_OTHER]
    filled.clock.advance(2_000)
    assert b.lock(0)[0] > 0


def test_a_member_that_leaves_with_a_listener_running_keeps_its_lock(filled, a, b):
    a.lock(0)
    a.leave()
    filled.features.state.queue_locks.on_disconnect(filled.peer(b"a"), filled.clock.monotonic_ms())
    filled.clock.advance(59_000)
    assert b.lock(0) == [LOCK_HELD_BY_OTHER]
    filled.clock.advance(1_000)
    assert b.lock(0)[0] > 0


# ---- Locks that copies confirm ---------------------------------------------------------


FOLLOWER = MemberIncarnation(2, 1)


class Led:
    """A broker that was elected, and a follower that has what the test says."""

    def __init__(self, stage):
        self.stage = stage
        self.lead(stage.epoch + 1)

    def lead(self, epoch, *, owners_from=0, opens=True):
        me = MemberIncarnation(1, 1)
        mode = AckReplicas.ALL
        state = GroupState(
            log_id=1, epoch=epoch, master=1, in_sync=(me, FOLLOWER), mode=mode, copies=2
        )
        self.stage.epoch = epoch
        self.stage.leadership = self.leadership = Leadership(
            StateRecord(7, state),
            me,
            AckPolicy(mode),
            marker_end=0,
            log_end=self.end,
            lag_max_ms=3_000,
            counts_synced=False,
            owners_from=owners_from,
        )
        self.stage.restart()
        self.stage.features.load()
        self.stage.features.core.state.save()
        self.stage.features.core.write_state()
        if opens:
            self.stage.features.opened()

    def end(self):
        return self.stage.store.stats().max_commitlog_offset

    def confirm(self):
        end = self.end()
        self.leadership.on_own(end)
        self.leadership.on_opened(FOLLOWER, end, end, 0)
        self.stage.features.writes.answer_confirmed()

    def lock(self, member, *queue_ids, token=0):
        """Asks for locks; returns the number of the request."""
        entries = [LockEntry("t", one, token) for one in queue_ids]
        opaque = self.stage.begin(
            RequestCode.LOCK_BATCH_MQ, LockBatchRequest("g", member.name, entries), peer=member.peer
        )
        self.tick()
        return opaque

    def tick(self):
        self.stage.features.core.write_state()
        self.stage.features.tick(self.stage.clock.monotonic_ms())
        self.stage.end_tick()

    def tokens(self, opaque):
        answer = self.stage.answer(opaque, LockBatchResponse)
        assert answer.lease_ms == 3_000
        return [one.token for one in answer.queues]


@pytest.fixture
def led(make_stage):
    """A broker that was elected, with a topic and a store that keeps everything."""
    stage = make_stage(is_kept=True)
    stage.send(stage.batch(bodies=[b"0"]))
    return Led(stage)


@pytest.fixture
def members(led):
    """Two members of its group."""
    found = [Member(led.stage, name) for name in "ab"]
    for member in found:
        member.beat()
    return found


def test_a_lock_is_granted_and_renewed_when_a_record_of_it_is_confirmed(led, members):
    a, _ = members
    asked = led.lock(a, 0)
    assert asked not in led.stage.answers
    led.confirm()
    (token,) = led.tokens(asked)
    renewed = led.lock(a, 0, token=token)
    assert renewed not in led.stage.answers
    led.confirm()
    assert led.tokens(renewed) == [token]


def test_renewals_of_a_tenth_of_a_second_are_confirmed_by_one_record(led, members):
    asked = [led.lock(member, number) for number, member in enumerate(members)]
    led.confirm()
    tokens = [led.tokens(one)[0] for one in asked]
    before = led.stage.features.core.state.records_written
    for number, member in enumerate(members):
        request = LockBatchRequest("g", member.name, [LockEntry("t", number, tokens[number])])
        led.stage.begin(RequestCode.LOCK_BATCH_MQ, request, peer=member.peer)
    led.tick()
    assert led.stage.features.core.state.records_written == before + 1


def test_the_next_master_knows_members_and_owners(led, members):
    a, b = members
    asked = led.lock(a, 0)
    led.confirm()
    (token,) = led.tokens(asked)
    led.lead(led.stage.epoch + 1)
    groups = led.stage.features.state.groups
    assert sorted(groups.group("g").members) == ["a", "b"]
    back, free, owned = (led.lock(a, 0, token=token), led.lock(b, 1), led.lock(b, 0))
    led.confirm()
    assert led.tokens(back) == [token]
    assert led.tokens(free)[0] > token
    assert led.tokens(owned) == [LOCK_HELD_BY_OTHER]


def test_an_owner_or_member_that_does_not_come_back_after_an_election_is_waited_for(led, members):
    _, b = members
    led.lock(members[0], 0)
    led.confirm()
    led.lead(led.stage.epoch + 1)
    b.beat()
    led.stage.clock.advance(2_999)
    early = led.lock(b, 0)
    assert sorted(led.stage.features.state.groups.group("g").members) == ["a", "b"]
    led.stage.clock.advance(1)
    late = led.lock(b, 0)
    led.confirm()
    assert led.tokens(early) == [LOCK_HELD_BY_OTHER]
    assert led.tokens(late)[0] > 0
    assert sorted(led.stage.features.state.groups.group("g").members) == ["b"]


def test_a_master_whose_log_may_lack_owners_grants_nothing_before_they_have_shown_up(led, members):
    a, b = members
    asked = led.lock(a, 0)
    led.confirm()
    (token,) = led.tokens(asked)
    led.lead(led.stage.epoch + 1, owners_from=led.stage.epoch + 1)
    for member in members:
        member.beat()
    early = [led.lock(a, 0, token=token), led.lock(b, 1), led.lock(a, 1, token=token + 1)]
    led.confirm()
    led.stage.clock.advance(3_000)
    late = [led.lock(a, 0, token=token), led.lock(a, 1, token=token + 1), led.lock(b, 1)]
    led.confirm()
    assert [led.tokens(one) for one in early] == [[LOCK_PENDING]] * 3
    found = [led.tokens(one)[0] for one in late]
    assert min(found[:2]) > token + 1, "new tokens: others may have had them"
    assert found[2] == LOCK_HELD_BY_OTHER, "the log did not know this owner"


@pytest.mark.parametrize(("grace_ms", "kept_ms"), [(0, 3_000), (30_000, 30_000)])
def test_leases_are_as_long_as_the_next_master_keeps_locks_whatever_its_settings(
    make_stage, grace_ms, kept_ms
):
    stage = make_stage(is_kept=True, rebalance_lock_lost_grace_ms=grace_ms)
    stage.send(stage.batch(bodies=[b"0"]))
    led = Led(stage)
    a, b = Member(stage, "a"), Member(stage, "b")
    a.beat()
    led.lock(a, 0)
    led.confirm()
    led.lead(stage.epoch + 1)
    b.beat()
    found = []
    for wait_ms in (kept_ms - 1, 1):
        stage.clock.advance(wait_ms)
        asked = led.lock(b, 0)
        led.confirm()
        found += led.tokens(asked)
    assert found[0] == LOCK_HELD_BY_OTHER
    assert found[1] > 0


def test_the_grace_of_restored_members_and_owners_begins_when_the_master_serves(led, members):
    a, b = members
    asked = led.lock(a, 0)
    led.confirm()
    (token,) = led.tokens(asked)
    led.lead(led.stage.epoch + 1, opens=False)
    for _ in range(100):
        led.stage.clock.advance(100)
        led.tick()
    led.stage.features.opened()
    led.stage.clock.advance(2_999)
    b.beat()
    early, back = led.lock(b, 0), led.lock(a, 0, token=token)
    led.confirm()
    assert led.tokens(early) == [LOCK_HELD_BY_OTHER]
    assert led.tokens(back) == [token]


def test_a_snapshot_of_a_master_that_does_not_serve_yet_has_members_and_owners(led, members):
    led.lock(members[0], 0)
    led.confirm()
    owners = led.stage.features.state.owners
    expected = {key: owners.records_of(key) for key in owners.state_keys()}
    assert len(expected) == 4
    led.lead(led.stage.epoch + 1, opens=False)
    owners = led.stage.features.state.owners
    assert {key: owners.records_of(key) for key in owners.state_keys()} == expected


def test_an_election_within_the_waits_of_a_master_that_does_not_know_begins_them_anew(led, members):
    a, b = members
    led.lock(a, 0)
    led.confirm()
    unknown = led.stage.epoch + 1
    for _ in range(3):
        led.lead(led.stage.epoch + 1, owners_from=unknown)
        b.beat()
        led.stage.clock.advance(2_999)
        early = led.lock(b, 0)
        led.confirm()
        assert led.tokens(early) == [LOCK_PENDING]
    led.stage.clock.advance(1)
    led.tick()
    granted = led.lock(b, 0)
    led.confirm()
    (token,) = led.tokens(granted)
    led.lead(led.stage.epoch + 1, owners_from=unknown)
    back = led.lock(b, 0, token=token)
    led.confirm()
    assert led.tokens(back) == [token], "from the end of the waits on the log knows all owners"


def test_a_first_master_knows_that_nobody_owns_a_queue_and_so_does_the_next_one(make_stage):
    stage = make_stage(is_kept=True)
    led = Led(stage)
    for _ in range(2):
        assert stage.features.locks.knows_owners
        led.tick()
        led.lead(stage.epoch + 1, owners_from=1)


@pytest.mark.parametrize("is_marked", [False, True])
def test_where_a_record_is_damaged_owners_count_as_unknown_until_they_had_time_to_show_up(
    led, members, monkeypatch, is_marked
):
    a, b = members
    state = led.stage.features.core.state
    led.tick()
    place = led.stage.store.queue_bounds(STATE_TOPIC, 0)[1]
    led.lock(a, 0)  # the record that will be damaged
    led.confirm()
    if is_marked:
        led.stage.features.state.owners.note_known(led.stage.epoch)
    b.beat()
    led.tick()
    assert state.records_written > 1
    get = led.stage.store.get

    def damaged(topic, queue_id, queue_offset, **options):
        if topic == STATE_TOPIC:
            options["max_bytes"] = 1
            if queue_offset == place:
                raise CorruptRecord("planned")
        return get(topic, queue_id, queue_offset, **options)

    monkeypatch.setattr(led.stage.store, "get", damaged)
    led.lead(led.stage.epoch + 1, owners_from=1)
    assert led.stage.features.locks.knows_owners is is_marked


@pytest.mark.parametrize("renews", [False, True])
def test_a_lock_that_is_not_confirmed_within_its_lease_gets_an_error_and_waits_no_more(
    led, members, renews
):
    token = 0
    if renews:
        asked = led.lock(members[0], 0)
        led.confirm()
        (token,) = led.tokens(asked)
    late = led.lock(members[0], 0, token=token)
    led.stage.clock.advance(2_999)
    led.tick()
    assert late not in led.stage.answers
    led.stage.clock.advance(1)
    led.tick()
    with pytest.raises(BrokerNotAvailable, match="3000 ms"):
        led.stage.answer(late)
    led.confirm()  # it is answered once
    renewed = led.lock(members[0], 0, token=token)
    led.confirm()
    assert led.tokens(renewed)[0] > 0


def test_requests_for_locks_that_wait_for_copies_are_bounded(make_stage):
    stage = make_stage(is_kept=True, max_sync_flush_waits=2, busy_retry_after_ms=30)
    stage.send(stage.batch(bodies=[b"0"]))
    led = Led(stage)
    led.confirm()
    a = Member(stage, "a")
    a.beat()
    wanted = LockBatchRequest("g", a.name, [LockEntry("t", 0)])
    asked = [stage.begin(RequestCode.LOCK_BATCH_MQ, wanted, peer=a.peer) for _ in range(3)]
    with pytest.raises(
        SystemBusy, match=r"2 requests for locks wait.*no more may \(max_sync_flush_waits\)"
    ) as refused:
        stage.answer(asked[2])
    assert refused.value.retry_after_ms == 30
    led.tick()
    led.confirm()
    assert led.tokens(asked[0]) == led.tokens(asked[1])
    again = led.lock(a, 0)
    led.confirm()
    assert led.tokens(again) == led.tokens(asked[0])


def test_what_was_given_back_is_nobodys_at_the_next_master(led, members):
    a, b = members
    led.lock(a, 0)
    a.claim(0)
    led.confirm()
    a.unlock(0)
    a.leave()
    led.tick()
    led.stage.features.core.write_state()
    led.lead(led.stage.epoch + 1)
    assert sorted(led.stage.features.state.groups.group("g").members) == ["b"]
    asked = led.lock(b, 0)
    led.confirm()
    assert led.tokens(asked)[0] > 0


def test_a_master_that_cannot_confirm_grants_and_renews_nothing(led, members):
    asked = led.lock(members[0], 0)
    led.confirm()
    (token,) = led.tokens(asked)
    led.leadership.is_cut_off = True
    for wanted in (token, 0):
        with pytest.raises(BrokerNotAvailable):
            led.stage.answer(led.lock(members[0], 0, token=wanted))
    led.leadership.is_cut_off, led.leadership.is_isolated = False, True
    with pytest.raises(NotMaster):
        led.stage.answer(led.lock(members[0], 0, token=token))


# ---- Claims and generations -----------------------------------------------------------


def test_a_replaced_member_neither_commits_nor_pulls(filled, a, b):
    a.claim(0)
    a.lose()
    b.beat()
    assert b.claim(0) == [-1]
    b.commit(0, 7)
    for generation in (a.generation, a.generation + 99):
        with pytest.raises(StaleGeneration):
            a.commit(0, 3, generation)
    with pytest.raises(StaleGeneration):
        a.pull()
    before = a.generation
    a.beat()
    with pytest.raises(StaleGeneration, match="was removed"):
        a.commit(0, 3, before)
    with pytest.raises(StaleGeneration, match="was given to b"):
        a.commit(0, 3)
    assert offset(filled) == 7


def test_a_member_that_came_back_after_the_others_left_knows_that_it_was_replaced(filled, a, b):
    joined = a.beat().joined
    a.claim(0)
    a.lose()
    b.beat()
    b.claim(0)
    b.commit(0, 9)
    b.leave()
    stale = a.generation
    assert a.beat().joined > joined
    with pytest.raises(StaleGeneration, match="was removed"):
        a.commit(0, 2, stale)
    with pytest.raises(StaleGeneration, match="was given to b"):
        a.commit(0, 2)
    assert offset(filled) == 9


def test_a_member_that_was_removed_goes_on_with_what_nobody_else_was_given(filled, a):
    a.claim(0)
    joined, stale = a.beat().joined, a.generation
    a.lose()
    with pytest.raises(StaleGeneration, match="no member"):
        a.commit(0, 3)
    assert a.beat().joined > joined
    a.commit(0, 3)
    assert offset(filled) == 3
    a.generation = stale  # pulls carry the generation of the claim
    assert len(a.pull()) == 10


def test_one_queue_has_one_member_in_one_generation(a, b):
    a.beat()
    a.claim(0)
    with pytest.raises(StaleGeneration, match="is with a"):
        b.claim(0)
    a.unlock(0)
    b.claim(0)


def test_who_is_no_member_claims_nothing_but_may_look_and_commit(filled, a):
    stranger = Member(filled, "stranger")
    with pytest.raises(StaleGeneration):
        stranger.claim(0)
    a.claim(0)
    stranger.commit(0, 5, 0)  # an administrator, or queues assigned by hand
    assert offset(filled) == 5


def test_claims_end_with_the_topic(filled, a, b):
    a.claim(0)
    a.lock(0)
    filled.features.state.queue_locks.remove_topic("t")
    filled.features.state.groups.claims.remove_topic("t")
    assert b.lock(0)[0] > 0
    b.claim(0)

"""Contract tests of coordination engines: derive a class that has the fixture ``site``.

For an engine of one's own::

    class TestMyEngine(CoordinatorContract):
        @pytest.fixture
        def site(self):
            ...
            yield my_site
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.coordination.interface import (
    AckReplicas,
    Conflict,
    Coordinator,
    GroupState,
    GroupView,
    LiveReplica,
    MemberIncarnation,
    Presence,
    SessionId,
    SessionLost,
    SettingsRecord,
    SettingValue,
    StateRecord,
)
from mqmesh.errors import MQMeshError

GROUP: Final = "broker-a"
TTL_MS: Final = 2_000
PATIENCE_MS: Final = 20_000
SLACK_MS: Final = 6_000
"""Time beyond its TTL that a session may live in any engine."""


class CoordinatorSite(Protocol):
    """Environment of an engine and its clients.

    Attributes:
        clock: Clock of the clients.
    """

    @property
    def clock(self) -> Clock:
        """Clock of the clients."""

    def open(self, cluster: str = "c1") -> Coordinator:
        """Opens another client of the same engine; closed with the site."""

    def until(self, is_so: Callable[[], object], limit_ms: int = PATIENCE_MS) -> None:
        """Lets time pass until a condition is met.

        Raises:
            AssertionError: The condition did not become true in time.
        """


def ask(site: CoordinatorSite, method: Callable[..., None], *arguments: Any) -> Any:
    """Calls a method and waits for its value.

    Raises:
        MQMeshError: The call failed with this error.
    """
    outcomes: list[Any] = []
    method(*arguments, outcomes.append)
    assert not outcomes, "the outcome came before the call had returned"
    site.until(lambda: outcomes)
    (outcome,) = outcomes
    if isinstance(outcome, MQMeshError):
        raise outcome
    return outcome


def failure(site: CoordinatorSite, method: Callable[..., None], *arguments: Any) -> MQMeshError:
    """Calls a method that fails, and waits for its error."""
    try:
        value = ask(site, method, *arguments)
    except MQMeshError as error:
        return error
    raise AssertionError(f"it did not fail, but gave {value!r}")


def wait(site: CoordinatorSite, duration_ms: int) -> None:
    """Lets time pass."""
    end_ms = site.clock.monotonic_ms() + duration_ms
    site.until(lambda: site.clock.monotonic_ms() >= end_ms)


def state(epoch: int = 1, master: int | None = 1) -> GroupState:
    """Makes a group's state."""
    members = (MemberIncarnation(1, 0), MemberIncarnation(2, 7))
    return GroupState(
        log_id=5, epoch=epoch, master=master, in_sync=members, mode=AckReplicas.ALL, copies=2
    )


def presence(replica_id: int = 1, group: str = GROUP, end_offset: int = 0) -> Presence:
    """Returns a presence record of a replica."""
    return Presence(group=group, replica_id=replica_id, identity="id", end_offset=end_offset)


def members(site: CoordinatorSite, coordinator: Coordinator) -> tuple[LiveReplica, ...]:
    """Returns the live replicas of the group."""
    found: tuple[LiveReplica, ...] = ask(site, coordinator.presences, GROUP)
    return found


class Seen:
    """Views that a watch reported of one group.

    Args:
        site: Site of the engine.
        coordinator: Coordinator to watch.
        group: Broker group.

    Attributes:
        views: All views, in their order.
    """

    def __init__(self, site: CoordinatorSite, coordinator: Coordinator, group: str = GROUP) -> None:
        self._site = site
        self.views: list[GroupView] = []
        self.watch = coordinator.watch([group], self.views.append)
        site.until(lambda: self.views)

    def until(self, is_so: Callable[[GroupView], object], limit_ms: int = PATIENCE_MS) -> None:
        """Waits until the last view fulfils a condition."""
        self._site.until(lambda: is_so(self.views[-1]), limit_ms)


class CoordinatorContract:
    """The suite; ``site`` is a fixture that gives a ``CoordinatorSite`` without any records."""

    def test_a_group_that_nobody_wrote_has_version_0(self, site: CoordinatorSite) -> None:
        """An unwritten group has no state, which is no error."""
        assert ask(site, site.open().read, GROUP) == StateRecord(0, None)

    def test_what_is_changed_is_read_by_all(self, site: CoordinatorSite) -> None:
        """A read that begins behind the answer of a change sees it."""
        one, other = site.open(), site.open()
        session = ask(site, one.begin_session, TTL_MS, presence())
        first = ask(site, one.change, GROUP, 0, state(1), session)
        assert ask(site, other.read, GROUP) == StateRecord(first, state(1))
        second = ask(site, one.change, GROUP, first, state(2, None), session)
        assert second != first
        assert ask(site, other.read, GROUP) == StateRecord(second, state(2, None))

    def test_a_change_of_another_version_is_a_conflict(self, site: CoordinatorSite) -> None:
        """The error has the newer state, and nothing is changed."""
        one = site.open()
        session = ask(site, one.begin_session, TTL_MS, presence())
        first = ask(site, one.change, GROUP, 0, state(1), session)
        second = ask(site, one.change, GROUP, first, state(2), session)
        for old in (0, first, second + 1_000):
            error = failure(site, one.change, GROUP, old, state(9), session)
            assert isinstance(error, Conflict)
            assert error.record == StateRecord(second, state(2))
        assert ask(site, one.read, GROUP) == StateRecord(second, state(2))

    def test_a_group_that_is_not_there_has_no_other_version(self, site: CoordinatorSite) -> None:
        """The error says so."""
        one = site.open()
        session = ask(site, one.begin_session, TTL_MS, presence())
        error = failure(site, one.change, GROUP, 1, state(), session)
        assert isinstance(error, Conflict)
        assert error.record == StateRecord(0, None)

    def test_only_who_has_a_session_of_the_group_changes_it(self, site: CoordinatorSite) -> None:
        """One that has ended, or belongs to another group, does not count."""
        one = site.open()
        ended = ask(site, one.begin_session, TTL_MS, presence())
        ask(site, one.end_session, ended)
        another = ask(site, one.begin_session, TTL_MS, presence(1, "broker-b"))
        for session in (ended, another):
            error = failure(site, one.change, GROUP, 0, state(), session)
            assert isinstance(error, SessionLost)
        assert ask(site, one.read, GROUP) == StateRecord(0, None)

    def test_of_two_who_change_the_same_version_one_wins(self, site: CoordinatorSite) -> None:
        """The loser gets a conflict with the winner's record."""
        one, other = site.open(), site.open()
        sessions = [
            ask(site, who.begin_session, 60_000, presence(number))
            for number, who in ((1, one), (2, other))
        ]
        version = 0
        for epoch in range(1, 11):
            outcomes: dict[int, Any] = {}
            for number, who in ((1, one), (2, other)):
                note = outcomes.__setitem__
                who.change(
                    GROUP,
                    version,
                    state(epoch, number),
                    sessions[number - 1],
                    lambda outcome, number=number, note=note: note(number, outcome),  # type: ignore[misc]
                )
            site.until(lambda outcomes=outcomes: len(outcomes) == 2)  # type: ignore[misc]
            (winner,) = (number for number, outcome in outcomes.items() if isinstance(outcome, int))
            version = outcomes[winner]
            lost = outcomes[3 - winner]
            assert isinstance(lost, Conflict)
            assert lost.record == StateRecord(version, state(epoch, winner))

    def test_the_deadline_counts_from_when_it_was_asked(self, site: CoordinatorSite) -> None:
        """The boot clock of the caller counts."""
        one = site.open()
        session = ask(site, one.begin_session, TTL_MS, presence())
        before_ms = site.clock.boot_ms()
        deadline_ms = ask(site, one.keep_alive, session, presence())
        assert before_ms + TTL_MS <= deadline_ms <= site.clock.boot_ms() + TTL_MS

    def test_a_session_that_nobody_renews_ends(self, site: CoordinatorSite) -> None:
        """Expiry comes not before its time, and every watch sees it."""
        one, other = site.open(), site.open()
        session = ask(site, one.begin_session, TTL_MS, presence())
        seen = Seen(site, other)
        seen.until(lambda view: view.members)
        deadline_ms = ask(site, one.keep_alive, session, presence())
        seen.until(lambda view: not view.members, TTL_MS + SLACK_MS)
        assert site.clock.boot_ms() >= deadline_ms
        assert members(site, one) == ()
        assert isinstance(failure(site, one.keep_alive, session, presence()), SessionLost)
        assert isinstance(failure(site, one.change, GROUP, 0, state(), session), SessionLost)

    def test_a_session_that_is_renewed_lives(self, site: CoordinatorSite) -> None:
        """For many times its time."""
        one = site.open()
        session = ask(site, one.begin_session, TTL_MS, presence())
        for number in range(1, 11):
            wait(site, TTL_MS // 4)
            ask(site, one.keep_alive, session, presence(end_offset=number))
        (found,) = members(site, site.open())
        assert found.session == session
        assert found.presence == presence(end_offset=10)

    def test_who_knows_of_a_death_ends_the_session(self, site: CoordinatorSite) -> None:
        """Every watch sees it at once."""
        one, other = site.open(), site.open()
        session = ask(site, one.begin_session, 60_000, presence())
        seen = Seen(site, one)
        seen.until(lambda view: view.members)
        ask(site, other.end_session, session)
        seen.until(lambda view: not view.members)
        assert isinstance(failure(site, one.keep_alive, session, presence()), SessionLost)

    def test_ending_twice_does_no_harm(self, site: CoordinatorSite) -> None:
        """Nor does a call without a callback."""
        one = site.open()
        session = ask(site, one.begin_session, TTL_MS, presence())
        for _ in range(2):
            assert ask(site, one.end_session, session) is None
        one.end_session(session)
        assert members(site, one) == ()

    def test_a_replica_has_one_session(self, site: CoordinatorSite) -> None:
        """The one that began last."""
        one = site.open()
        first = ask(site, one.begin_session, 60_000, presence())
        second = ask(site, one.begin_session, 60_000, presence(end_offset=3))
        (found,) = members(site, one)
        assert (found.session, found.presence.end_offset) == (second, 3)
        assert isinstance(failure(site, one.change, GROUP, 0, state(), first), SessionLost)
        assert isinstance(failure(site, one.keep_alive, first, presence()), SessionLost)
        (found,) = members(site, one)
        assert (found.session, found.presence.end_offset) == (second, 3)
        ask(site, one.end_session, first)
        assert ask(site, one.change, GROUP, 0, state(), second)

    def test_presences_say_how_fresh_they_are(self, site: CoordinatorSite) -> None:
        """At least so old; they come by replica id."""
        one, other = site.open(), site.open()
        first = ask(site, one.begin_session, 60_000, presence(2))
        ask(site, one.begin_session, 60_000, presence(1))
        members(site, other)
        wait(site, 1_000)
        ask(site, one.keep_alive, first, presence(2))
        members(site, other)
        wait(site, 500)
        old, fresh = members(site, other)
        assert (old.presence.replica_id, fresh.presence.replica_id) == (1, 2)
        assert old.age_ms >= 1_400
        assert 400 <= fresh.age_ms <= old.age_ms - 900

    def test_a_watch_tells_what_is_and_what_changes(self, site: CoordinatorSite) -> None:
        """State, presence and session."""
        one, other = site.open(), site.open()
        seen = Seen(site, other)
        assert seen.views[0] == GroupView(GROUP, StateRecord(0, None))
        session = ask(site, one.begin_session, 60_000, presence())
        seen.until(lambda view: view.members)
        assert seen.views[-1].members[0].session == session
        version = ask(site, one.change, GROUP, 0, state(), session)
        seen.until(lambda view: view.record == StateRecord(version, state()))
        ask(site, one.keep_alive, session, presence(end_offset=9))
        seen.until(lambda view: view.members and view.members[0].presence.end_offset == 9)
        ask(site, one.end_session, session)
        seen.until(lambda view: not view.members)
        assert seen.views[-1].record == StateRecord(version, state())

    def test_a_watch_that_is_closed_tells_nothing(self, site: CoordinatorSite) -> None:
        """Others of the same client go on."""
        one = site.open()
        session = ask(site, one.begin_session, 60_000, presence())
        closed, open_ = Seen(site, one), Seen(site, one)
        closed.watch.close()
        closed.watch.close()
        count = len(closed.views)
        version = ask(site, one.change, GROUP, 0, state(), session)
        open_.until(lambda view: view.record.version == version)
        assert len(closed.views) == count

    def test_a_watch_tells_of_its_groups_only(self, site: CoordinatorSite) -> None:
        """Several groups can be watched, each by its name."""
        one = site.open()
        views: dict[str, GroupView] = {}
        one.watch([GROUP, "broker-b"], lambda view: views.update({view.group: view}))
        site.until(lambda: len(views) == 2)
        for group in (GROUP, "broker-b", "broker-bb"):
            session = ask(site, one.begin_session, 60_000, presence(1, group))
            ask(site, one.change, group, 0, state(), session)
        site.until(lambda: all(view.record.version for view in views.values()))
        assert views.keys() == {GROUP, "broker-b"}

    def test_clusters_are_apart(self, site: CoordinatorSite) -> None:
        """Groups of one name are two groups."""
        one, other = site.open("c1"), site.open("c2")
        session = ask(site, one.begin_session, 60_000, presence())
        ask(site, one.change, GROUP, 0, state(), session)
        assert ask(site, other.read, GROUP) == StateRecord(0, None)
        assert members(site, other) == ()
        assert isinstance(failure(site, other.change, GROUP, 0, state(), session), SessionLost)

    def test_settings_are_changed_by_who_has_read_them(self, site: CoordinatorSite) -> None:
        """Settings change as groups do, but without a session."""
        one, other = site.open(), site.open()
        assert ask(site, one.read_settings) == SettingsRecord(0)
        wanted: dict[str, SettingValue] = {"mode": "auto", "lease_ttl_ms": 3_000, "failsafe": True}
        version = ask(site, one.put_settings, 0, wanted)
        assert ask(site, other.read_settings) == SettingsRecord(version, wanted)
        error = failure(site, other.put_settings, 0, {})
        assert isinstance(error, Conflict)
        assert error.record == SettingsRecord(version, wanted)
        assert ask(site, other.put_settings, version, {}) != version
        assert ask(site, site.open("c2").read_settings) == SettingsRecord(0)

    def test_nothing_comes_after_close(self, site: CoordinatorSite) -> None:
        """Neither outcomes nor changes."""
        one, other = site.open(), site.open()
        session = ask(site, other.begin_session, 60_000, presence())
        seen = Seen(site, one)
        count = len(seen.views)
        outcomes: list[Any] = []
        one.read(GROUP, outcomes.append)
        one.close()
        one.close()
        ask(site, other.change, GROUP, 0, state(), session)
        wait(site, 300)
        assert (outcomes, len(seen.views)) == ([], count)

    def test_the_largest_state_fits(self, site: CoordinatorSite) -> None:
        """64 replicas."""
        one = site.open()
        large = msgspec.structs.replace(
            state(2**63 - 1),
            in_sync=tuple(MemberIncarnation(number, 2**63 - 1) for number in range(1, 65)),
            voters=tuple(range(1, 65)),
            reason="é" * 255,
            switched_ms=2**63 - 1,
            paused=True,
        )
        session = ask(site, one.begin_session, 60_000, presence(64))
        version = ask(site, one.change, GROUP, 0, large, SessionId(session))
        assert ask(site, one.read, GROUP) == StateRecord(version, large)

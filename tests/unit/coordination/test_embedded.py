"""The embedded coordinator and its clients when things go wrong, on simulated time and network."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.coordinator_sites import SimulatedSite

from mqmesh.coordination.backends import open_coordinator
from mqmesh.coordination.interface import (
    Conflict,
    CoordinatorUnavailable,
    OutcomeUnknown,
    SessionLost,
    StateRecord,
)
from mqmesh.errors import ConfigError, DiskFull, InvalidArgument, StorageError
from mqmesh.host import ProcessMark, own_process
from mqmesh.testing.coordinator_contract import (
    GROUP,
    TTL_MS,
    Seen,
    ask,
    failure,
    members,
    presence,
    state,
    wait,
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SimulatedSite]:
    site = SimulatedSite(tmp_path)
    yield site
    site.close()


def test_a_change_whose_answer_is_lost_has_an_unknown_outcome(site):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())
    site.network.cut(site.node, site.clients[0])
    error = failure(site, one.change, GROUP, 0, state(), session)
    assert isinstance(error, OutcomeUnknown)
    site.network.heal()
    record = ask(site, one.read, GROUP)
    assert record == StateRecord(1, state()), "it had been made"


def test_a_change_that_was_lost_on_its_way_has_an_unknown_outcome_too(site):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())
    site.network.cut(site.clients[0], site.node)
    assert isinstance(failure(site, one.change, GROUP, 0, state(), session), OutcomeUnknown)


def test_a_change_without_a_connection_was_not_made(site):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())
    site.kill()
    wait(site, 100)
    error = failure(site, one.change, GROUP, 0, state(), session)
    assert isinstance(error, CoordinatorUnavailable)
    site.start()
    assert ask(site, one.read, GROUP) == StateRecord(0, None)


def test_everything_else_says_that_the_coordinator_is_away_in_time(site):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())
    site.kill()
    before_ms = site.clock.monotonic_ms()
    for call, *arguments in (
        (one.begin_session, TTL_MS, presence()),
        (one.keep_alive, session, presence()),
        (one.end_session, session),
        (one.read, GROUP),
        (one.presences, GROUP),
        (one.read_settings,),
    ):
        assert isinstance(failure(site, call, *arguments), CoordinatorUnavailable), call
    assert isinstance(failure(site, one.put_settings, 0, {}), CoordinatorUnavailable)
    assert site.clock.monotonic_ms() - before_ms <= 7 * 2_100
    site.start()


def test_after_a_restart_all_is_there_and_sessions_have_their_whole_time_again(site):
    one = site.open()
    session = ask(site, one.begin_session, 10_000, presence(end_offset=4))
    version = ask(site, one.change, GROUP, 0, state(), session)
    wait(site, 9_000)
    site.kill()
    wait(site, 3_000)
    site.start()
    wait(site, 9_000)
    (found,) = members(site, one)
    assert (found.session, found.presence) == (session, presence(end_offset=4))
    assert ask(site, one.read, GROUP) == StateRecord(version, state())
    assert ask(site, one.change, GROUP, version, state(2), session) == version + 1
    site.until(lambda: not members(site, one))


def test_ended_sessions_stay_ended_after_a_restart(site):
    one = site.open()
    first = ask(site, one.begin_session, 60_000, presence(1))
    second = ask(site, one.begin_session, 60_000, presence(2))
    third = ask(site, one.begin_session, 60_000, presence(2))
    ask(site, one.end_session, first)
    site.restart()
    assert [found.session for found in members(site, one)] == [third]
    for session in (first, second):
        assert isinstance(failure(site, one.keep_alive, session, presence()), SessionLost)


def test_a_watch_reads_again_after_a_restart(site):
    one, other = site.open(), site.open()
    seen = Seen(site, other)
    session = ask(site, one.begin_session, 60_000, presence())
    seen.until(lambda view: view.members)
    site.restart()
    count = len(seen.views)
    site.until(lambda: len(seen.views) > count)
    version = ask(site, one.change, GROUP, 0, state(), session)
    seen.until(lambda view: view.record == StateRecord(version, state()))


def test_a_watch_that_was_cut_off_is_told_the_newest(site):
    one, other = site.open(), site.open()
    seen = Seen(site, other)
    session = ask(site, one.begin_session, 60_000, presence())
    site.network.cut(site.node, site.clients[1])
    version = 0
    for epoch in range(1, 4):
        version = ask(site, one.change, GROUP, version, state(epoch), session)
    wait(site, 5_000)
    site.network.heal()
    seen.until(lambda view: view.record == StateRecord(version, state(3)))


def test_a_partition_ends_the_session_of_who_is_behind_it(site):
    one, other = site.open(), site.open()
    session = ask(site, one.begin_session, TTL_MS, presence(1))
    deadline_ms = ask(site, one.keep_alive, session, presence(1))
    ask(site, other.begin_session, 60_000, presence(2))
    seen = Seen(site, other)
    site.network.cut(site.clients[0], site.node)
    error = failure(site, one.keep_alive, session, presence(1))
    assert isinstance(error, CoordinatorUnavailable)
    seen.until(lambda view: len(view.members) == 1)
    assert site.clock.boot_ms() >= deadline_ms
    site.network.heal()
    assert isinstance(failure(site, one.keep_alive, session, presence(1)), SessionLost)


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_steps_of_the_wall_clock_change_nothing(site, step_ms):
    one = site.open()
    session = ask(site, one.begin_session, TTL_MS, presence())
    for node in (site.node, *site.clients):
        node.clock.step(step_ms)
    wait(site, TTL_MS - 200)
    before_ms = site.clock.boot_ms()
    assert ask(site, one.keep_alive, session, presence()) - before_ms <= TTL_MS + 50
    assert len(members(site, one)) == 1


def test_a_coordinator_that_stood_still_takes_nobody_for_dead(site):
    one = site.open()
    session = ask(site, one.begin_session, TTL_MS, presence())
    site.node.pause()
    wait(site, 900)
    one.keep_alive(session, presence(), lambda outcome: None)
    wait(site, TTL_MS)
    site.node.resume()
    wait(site, 1_000)
    assert ask(site, one.keep_alive, session, presence())


def test_a_session_ends_when_its_process_is_seen_to_be_dead(site):
    one, other = site.open(), site.open()
    own = own_process()
    assert own is not None
    gone = ProcessMark(own.host, own.pid, own.start + 1)
    elsewhere = ProcessMark("elsewhere", own.pid, own.start + 1)
    for number, process in ((1, gone), (2, own), (3, elsewhere)):
        said = presence(number)
        ask(site, one.begin_session, 60_000, type(said)(**_fields(said, process=process)))
    seen = Seen(site, other)
    seen.until(lambda view: len(view.members) == 3)
    site.clients[0].kill()
    seen.until(lambda view: len(view.members) == 2, 3_000)
    wait(site, 5_000)
    left = [found.presence.process for found in members(site, other)]
    assert left == [own, elsewhere]


def _fields(said, **others):
    return {name: getattr(said, name) for name in said.__struct_fields__} | others


def test_what_cannot_be_written_is_not_told(site, monkeypatch):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())

    def full(change):
        raise DiskFull("no room")

    monkeypatch.setattr(site.server._file, "write", full)
    error = failure(site, one.change, GROUP, 0, state(), session)
    assert isinstance(error, CoordinatorUnavailable)
    assert ask(site, one.read, GROUP) == StateRecord(0, None)
    ask(site, one.end_session, session)
    assert members(site, one) == (), "a session may come back, so that its end need not wait"


def test_a_file_that_fails_ends_the_process_before_anybody_is_answered(site, monkeypatch):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())

    def broken(change):
        raise StorageError("the disk is gone")

    monkeypatch.setattr(site.server._file, "write", broken)
    assert isinstance(failure(site, one.change, GROUP, 0, state(), session), OutcomeUnknown)
    assert "the disk is gone" in str(site.transports[0].loop.failure)
    site.restart()
    assert ask(site, one.change, GROUP, 0, state(), session)


def test_two_changes_of_which_one_was_lost_meet_as_a_conflict(site):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())
    site.network.cut(site.node, site.clients[0])
    failure(site, one.change, GROUP, 0, state(1), session)
    site.network.heal()
    error = failure(site, one.change, GROUP, 0, state(2), session)
    while isinstance(error, CoordinatorUnavailable):  # until the connection is back
        wait(site, 100)
        error = failure(site, one.change, GROUP, 0, state(2), session)
    assert isinstance(error, Conflict)
    assert error.record == StateRecord(1, state(1))


def test_names_that_are_too_long_are_refused(site):
    with pytest.raises(InvalidArgument, match="too long"):
        site.open("c" * 300).read("g" * 200, lambda outcome: None)


def test_a_client_watches_so_many_groups_and_no_more(site):
    one = site.open()
    with pytest.raises(InvalidArgument, match="1024"):
        one.watch([f"g{number}" for number in range(1_025)], lambda view: None)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:9870", "no URL"),
        ("zookeeper://127.0.0.1:2181", "embedded"),
        ("embedded://nowhere", "host:port"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(site, url, says):
    with pytest.raises(ConfigError, match=says):
        open_coordinator(url, site.transport("c"), cluster="c1")


def test_a_timeout_out_of_bounds_is_refused(site):
    with pytest.raises(ConfigError, match="timeout_ms"):
        open_coordinator("embedded://h:1", site.transport("c"), cluster="c1", timeout_ms=99)

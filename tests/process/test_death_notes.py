"""A supervisor tells a coordinator that a process is dead, and its session ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from harness.coordinator_sites import RealSite

from mqmesh.host import ProcessMark, own_process
from mqmesh.roles.supervisor.death_notes import DeathNotes, ReplicaSeat
from mqmesh.testing.coordinator_contract import GROUP, Seen, ask, members, presence
from mqmesh.testing.processes import RoleProcess
from mqmesh.transport.zmq.transport import ZmqTransport

TTL_MS = 600_000
SAY_WHO = "from mqmesh.host import own_process; import msgspec, sys;"
WHO = SAY_WHO + "print(msgspec.json.encode(own_process()).decode(), flush=True); sys.stdin.read()"


@pytest.fixture
def coordinator(tmp_path: Path):
    settings = {"data_dir": str(tmp_path / "data"), "listen_port": "0"}
    process = RoleProcess("coordinator", settings, tmp_path / "log")
    yield process
    process.kill()


@pytest.fixture
def site(coordinator):
    site = RealSite(f"embedded://{coordinator.endpoint}")
    yield site
    site.close()


@pytest.fixture
def notes(site, coordinator):
    transport = ZmqTransport()
    url = f"embedded://{coordinator.endpoint}"
    replicas = {f"r{number}": ReplicaSeat(url, "c1", GROUP, number) for number in (1, 2)}
    made = DeathNotes(replicas, transport, transport.loop)
    yield made
    made.close()


def dead() -> ProcessMark:
    """A process that has ended, and was reaped."""
    command = [sys.executable, "-P", "-c", WHO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        mark = msgspec.json.decode(process.stdout.readline(), type=ProcessMark)
        process.kill()
    return mark


def begin(site, one, replica_id: int, process: ProcessMark | None):
    said = msgspec.structs.replace(presence(replica_id), process=process)
    return ask(site, one.begin_session, TTL_MS, said)


def ids(view) -> list[int]:
    return [live.presence.replica_id for live in view.members]


def test_the_session_of_a_dead_process_ends_at_once(site, notes):
    one, mark = site.open(), dead()
    begin(site, one, 1, mark)
    begin(site, one, 2, own_process())
    seen = Seen(site, one)
    seen.until(lambda view: ids(view) == [1, 2])
    notes.report("namesrv-1", mark.pid)
    notes.report("r1", mark.pid)
    seen.until(lambda view: ids(view) == [2])


def test_what_was_started_meanwhile_keeps_its_session(site, notes):
    one, former, own = site.open(), dead(), own_process()
    session = begin(site, one, 1, own)
    begin(site, one, 2, former)
    seen = Seen(site, one)
    seen.until(lambda view: ids(view) == [1, 2])
    notes.report("r1", former.pid)
    notes.report("r1", own.pid)  # which lives
    notes.report("r2", former.pid)  # behind the others
    seen.until(lambda view: ids(view) == [1])
    assert [live.session for live in members(site, one)] == [session]

"""An embedded coordinator as a process of its own, over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from harness.coordinator_sites import RealSite

from mqmesh.coordination.interface import CoordinatorUnavailable, StateRecord
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.testing.coordinator_contract import (
    GROUP,
    CoordinatorContract,
    Seen,
    ask,
    failure,
    members,
    presence,
    state,
)
from mqmesh.testing.processes import RoleProcess

HOLDER = """
import sys
from harness.coordinator_sites import RealSite
from mqmesh.host import own_process
from mqmesh.testing.coordinator_contract import GROUP, ask
from mqmesh.coordination.interface import Presence
site = RealSite(sys.argv[1])
one = site.open()
ask(site, one.begin_session, 60_000, Presence(group=GROUP, replica_id=1, process=own_process()))
print("ready", flush=True)
site.until(lambda: False, 600_000)
"""
"""A process with a session, until it is killed."""


def start(folder, port=0) -> RoleProcess:
    settings = {"data_dir": str(folder / "data"), "listen_port": str(port)}
    return RoleProcess("coordinator", settings, folder / "log")


@pytest.fixture
def coordinator(tmp_path):
    process = start(tmp_path)
    yield process
    process.kill()


@pytest.fixture
def site(coordinator):
    site = RealSite(f"embedded://{coordinator.endpoint}")
    yield site
    site.close()


class TestEmbeddedCoordinatorProcess(CoordinatorContract):
    """The suite over ZeroMQ."""


def test_all_is_there_after_kill_9(site, coordinator, tmp_path):
    one = site.open(timeout_ms=2_000)
    session = ask(site, one.begin_session, 60_000, presence())
    seen = Seen(site, one)
    version = ask(site, one.change, GROUP, 0, state(), session)
    coordinator.kill()
    assert isinstance(failure(site, one.read, GROUP), CoordinatorUnavailable)
    again = start(tmp_path, coordinator.endpoint.rpartition(":")[2])
    try:
        assert ask(site, one.read, GROUP) == StateRecord(version, state())
        (found,) = members(site, one)
        assert found.session == session
        ask(site, one.change, GROUP, version, state(2), session)
        seen.until(lambda view: view.record.state == state(2))
    finally:
        assert again.stop() == ExitCode.OK


def test_the_session_of_a_killed_process_ends_at_once(site, coordinator, peer_process):
    one = site.open()
    with peer_process(HOLDER, site.url) as holder:
        seen = Seen(site, one)
        seen.until(lambda view: view.members)
        os.kill(holder.pid, signal.SIGKILL)
        # Not reaped yet, and dead all the same; its session would last for a minute.
        seen.until(lambda view: not view.members, 10_000)


def test_a_damaged_file_refuses_to_start(tmp_path):
    process = start(tmp_path)
    process.stop()
    path = tmp_path / "data" / "data.mdb"
    data = bytearray(path.read_bytes())
    assert data.count(b"\x91\0") == 1, "the head: no record"
    place = data.index(b"\x91\0")
    data[place + 1] = 5
    path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-m", "mqmesh.cli", "coordinator", "--set", f"data_dir={path.parent}"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == ExitCode.FAILED
    assert "error: coordinator: " in done.stderr
    assert "is damaged: the checksum" in done.stderr
    assert path.read_bytes() == data


def test_it_tells_its_metrics(site, coordinator):
    one = site.open()
    session = ask(site, one.begin_session, 60_000, presence())
    ask(site, one.change, GROUP, 0, state(), session)
    failure(site, one.change, GROUP, 0, state(), session)
    Seen(site, one)
    with AdminClient() as admin:
        info = admin.ping(f"tcp://{coordinator.endpoint}")
        metrics = admin.role_info(f"tcp://{coordinator.endpoint}")
    assert (info.role, info.state) == ("coordinator", "running")
    told = {name: metrics.number(name) for name in ("records", "sessions", "watches")}
    assert told == {"records": 1, "sessions": 1, "watches": 1}
    assert (metrics.number("changes_total"), metrics.number("conflicts_total")) == (1, 1)

"""The page by HTTP."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from mqmesh.figures import FigureKind
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.families import Families, Metric, Series
from mqmesh.roles.exporter.run_files import processes_beside
from mqmesh.roles.exporter.server import MOST_CONNECTIONS, ExporterServer
from mqmesh.roles.supervisor.run_file import RoleEntry, RunRecord, write_record
from mqmesh.testing.clock import ManualClock


class Counting:
    """Tells how often it was asked."""

    def __init__(self):
        self.asked = 0

    def collect(self):
        self.asked += 1
        return Families([Series(Metric("asked", FigureKind.GAUGE, "h", ()), (), self.asked)])

    def close(self):
        pass


@pytest.fixture
def exporter():
    clock = ManualClock()
    server = ExporterServer(ExporterConfig(listen_port=0, min_interval_ms=1_000), clock, Counting())
    yield server.start(), clock
    server.stop()


def get(url):
    with urlopen(url, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_who_asks_often_gets_the_same_page(exporter):
    url, clock = exporter
    kind, text = get(url)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b"\nasked 1.0\n" in text
    clock.advance(999)
    assert get(url)[1] == text
    clock.advance(1)
    assert b"\nasked 2.0\n" in get(url)[1]


def test_processes_that_name_servers_do_not_know_are_found_by_the_run_file(tmp_path):
    roles = [
        RoleEntry(role="broker", name="broker-a", endpoint="tcp://127.0.0.1:1"),
        RoleEntry(role="schedule", name="schedule-broker-a", endpoint="ipc:///s", server_key="k"),
        RoleEntry(role="filtersrv", name="f"),
        RoleEntry(role="broker", name="broker-b", endpoint="tcp://127.0.0.1:2", state="stopped"),
        RoleEntry(role="exporter", name="exporter", endpoint="tcp://127.0.0.1:3"),
    ]
    write_record(tmp_path, RunRecord(pid=1, started_ms=1, namesrv="", roles=roles))
    assert processes_beside(str(tmp_path)) == roles[:2]
    assert processes_beside("") == []


def test_it_says_how_it_is_and_nothing_else(exporter):
    url, _ = exporter
    root = url.removesuffix("/metrics")
    info = json.loads(get(f"{root}/healthz")[1])
    assert (info["role"], info["state"]) == ("exporter", "running")
    with pytest.raises(HTTPError, match="404"):
        get(f"{root}/../etc/passwd")


def test_connections_that_say_nothing_do_not_pile_up(exporter):
    url, _ = exporter
    port = int(url.rpartition(":")[2].partition("/")[0])
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        extra = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        extra.settimeout(10)
        assert extra.recv(1) == b"", "one too many"
        one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert one.makefile("rb").readline().startswith(b"HTTP/1.0 200")

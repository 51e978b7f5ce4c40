"""How `mqmesh up` begins, and what `mqmesh status` shows."""

from __future__ import annotations

import socket

import pytest
from harness.terminal import on_terminal

from mqmesh.cli.processes import cluster
from mqmesh.cli.processes.layout import load_cluster
from mqmesh.cli.processes.start_plan import StartFlags, StartPlan
from mqmesh.errors import ConfigError
from mqmesh.sdk.admin.views.clusters import LocalClusterView, SupervisedProcessView

FOLDER = "/var/lib/a-long-name-of-a-customer/a-long-name-of-a-project/mqmesh-data"


def test_endpoints_are_shown_at_80_columns_also_where_their_paths_are_long(monkeypatch, capsys):
    process = SupervisedProcessView(
        role="schedule",
        name="schedule-broker-a",
        pid=1_234_567,
        state="running",
        endpoint=f"ipc://{FOLDER}/schedule-broker-a/sock",
        uptime_ms=7_800_000,
        restarts=0,
        exits={},
    )
    view = LocalClusterView(data_dir=FOLDER, running=True, pid=1, roles=[process])
    terminal = on_terminal(monkeypatch, 80, "dumb")
    cluster._print_cluster(view)
    head, row = terminal.lines[-2:]
    assert head.split() == ["ROLE", "NAME", "STATE", "ENDPOINT", "ENDED", "BY"]
    assert "  ipc://schedule-broker-a/sock  " in row
    assert "no room for UPTIME, RESTARTS, PID" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_before_what_the_plan_decides(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "plan_start", lambda *_: StartPlan(notes=("a becomes a group",)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = [f"data_dir={tmp_path}", f"namesrv.0.listen_port={port}"]
        with pytest.raises(ConfigError, match=f":{port}"):
            cluster._prepare(load_cluster(None, settings), settings, StartFlags())
    assert capsys.readouterr().err == ""

"""`mqmesh up`, `status` and `down` on real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from urllib.request import urlopen

import pytest
from harness.commands import CommandProcess, free_ports, run_command, up_arguments, wait_until_gone
from harness.patience import until
from harness.stopwatch import Stopwatch

from mqmesh.protocol.remoting.codes import RemotingCode, RemotingStatus
from mqmesh.protocol.remoting.frame import RemotingCommand, RemotingReader, encode_frame
from mqmesh.roles.gateway.server import read_users
from mqmesh.roles.gateway.users import sign
from mqmesh.roles.supervisor.run_file import read_record, supervisor_pid

NAMES = ["namesrv-1", "namesrv-2", "broker-a", "schedule-broker-a"]


class Up:
    """A running `mqmesh up`."""

    def __init__(self, folder, *arguments):
        self.folder = folder
        self.ports = free_ports(3)
        self.command = CommandProcess(*up_arguments(folder, self.ports), *arguments)

    def wait_ready(self):
        seconds = float(self.command.expect(r"cluster is ready in ([\d.]+) s")[1])
        return seconds

    def pids(self):
        return {entry.name: entry.pid for entry in read_record(self.folder).roles}

    def status(self):
        status = run_command("status", "--data-dir", str(self.folder), "--json")
        return status.code, json.loads(status.out[0])


@pytest.fixture
def up(short_tmp_path):
    started = []

    def start(*arguments, folder=short_tmp_path / "the data"):
        started.append(Up(folder, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.command.close()


def test_nobody_else_may_read_what_a_cluster_writes(up):
    cluster = up()
    cluster.wait_ready()
    open_to_others = [
        str(path.relative_to(cluster.folder.parent))
        for path in (cluster.folder, *cluster.folder.rglob("*"))
        if path.lstat().st_mode & 0o077
    ]
    assert list((cluster.folder / "logs").iterdir())
    assert open_to_others == []


def test_local_sockets_are_in_the_data_folder_while_the_cluster_runs(up):
    def sockets():
        return sorted(
            str(path.relative_to(cluster.folder))
            for path in cluster.folder.rglob("*")
            if path.is_socket()
        )

    cluster = up()
    cluster.wait_ready()
    assert {"broker-a/sock", "schedule-broker-a/sock"} <= set(sockets())
    cluster.command.send_signal(signal.SIGTERM)
    assert cluster.command.wait() == 0
    assert sockets() == []


def test_a_cluster_comes_up_is_healed_and_goes_down(up):
    cluster = up()
    watch = Stopwatch()
    for name in NAMES:
        cluster.command.expect(rf" {name} is ready at (tcp://127.0.0.1:\d+|ipc:)", anywhere=True)
    cluster.wait_ready()
    assert watch.seconds < 3.0

    code, status = cluster.status()
    assert code == 0
    assert [(role["name"], role["state"]) for role in status["roles"]] == [
        (name, "running") for name in NAMES
    ]
    before = cluster.pids()

    os.kill(before["broker-a"], signal.SIGKILL)
    cluster.command.expect("broker-a ended: killed by SIGKILL; starting it again in 0.2 s")
    cluster.command.expect("broker broker-a is ready")
    code, status = cluster.status()
    assert code == 0
    assert [role["restarts"] for role in status["roles"]] == [0, 0, 1, 0]
    assert [role["exits"] for role in status["roles"]] == [{}, {}, {"killed by SIGKILL": 1}, {}]
    (ended,) = status["metrics"]["child_exits_total"]["values"]
    assert (ended["labels"]["name"], ended["value"]) == ("broker-a", 1)
    after = cluster.pids()
    assert after["broker-a"] != before["broker-a"]
    assert after["namesrv-1"] == before["namesrv-1"]

    watch = Stopwatch()
    cluster.command.send_signal(signal.SIGINT)
    assert cluster.command.wait() == 0
    assert watch.seconds < 2.0
    assert wait_until_gone(list(after.values()), 0) == []
    assert read_record(cluster.folder) is None
    for name in [*NAMES, "mqmesh"]:
        assert (cluster.folder / "logs" / f"{name}.log").stat().st_size > 0


def test_a_second_start_on_the_same_folder_is_refused(up):
    cluster = up()
    cluster.wait_ready()
    second = run_command(*up_arguments(cluster.folder, free_ports(3)))
    assert second.code == 2
    assert second.out == []
    (line,) = second.err
    assert f"a cluster is running on it already (process {cluster.command.pid})" in line
    assert cluster.status()[0] == 0


def test_down_stops_it_from_outside(up):
    cluster = up()
    cluster.wait_ready()
    pids = list(cluster.pids().values())
    watch = Stopwatch()
    down = run_command("down", "--data-dir", str(cluster.folder))
    assert (down.code, down.err) == (0, [])
    assert cluster.command.wait() == 0
    assert watch.seconds < 3.0
    assert wait_until_gone(pids, 0) == []
    again = run_command("down", "--data-dir", str(cluster.folder), "--json")
    assert again.code == 0
    assert json.loads(again.out[0])["stopped"] is False


def test_one_process_goes_down_alone_and_is_started_again(up):
    cluster = up()
    cluster.wait_ready()
    where = ("--data-dir", str(cluster.folder))
    before = cluster.pids()
    again = run_command("restart", "namesrv-2", *where)
    assert (again.code, again.out) == (0, ["namesrv-2 is running"])
    after = cluster.pids()
    assert {name for name in NAMES if after[name] != before[name]} == {"namesrv-2"}
    down = run_command("down", "namesrv-2", *where, "--json")
    assert json.loads(down.out[0]) == [{"name": "namesrv-2", "state": "stopped", "pid": 0}]
    code, status = cluster.status()
    assert code == 1
    assert {role["name"]: role["state"] for role in status["roles"]} == {
        name: "stopped" if name == "namesrv-2" else "running" for name in NAMES
    }
    unknown = run_command("down", "namesrv-3", *where)
    assert unknown.code == 2
    assert "no process is named namesrv-3; there are broker-a, namesrv-1" in unknown.err[0]


def test_roles_end_when_their_supervisor_is_killed_and_it_can_be_started_again(up):
    cluster = up()
    cluster.wait_ready()
    pids = list(cluster.pids().values())
    cluster.command.send_signal(signal.SIGKILL)
    assert cluster.command.wait() == -signal.SIGKILL
    assert wait_until_gone(pids, 3.0) == []
    assert supervisor_pid(cluster.folder) == 0
    assert read_record(cluster.folder) is not None
    assert cluster.status()[0] == 1
    second = up(folder=cluster.folder)
    second.wait_ready()


def test_down_clears_up_what_a_killed_supervisor_left(up):
    cluster = up()
    cluster.wait_ready()
    broker = cluster.pids()["broker-a"]
    # It hangs, so that it does not notice the end of its supervisor.
    os.kill(broker, signal.SIGSTOP)
    cluster.command.send_signal(signal.SIGKILL)
    cluster.command.wait()
    down = run_command("down", "--data-dir", str(cluster.folder))
    assert down.code == 0
    assert down.out == ["`mqmesh up` was gone; stopped what it left: broker-a"]
    assert wait_until_gone([broker], 0) == []
    assert read_record(cluster.folder) is None


def test_a_role_that_hangs_is_killed_and_everything_is_gone_in_under_two_seconds(up):
    cluster = up()
    cluster.wait_ready()
    pids = cluster.pids()
    os.kill(pids["broker-a"], signal.SIGSTOP)
    watch = Stopwatch()
    cluster.command.send_signal(signal.SIGTERM)
    assert cluster.command.wait() == 0
    assert watch.seconds < 2.0
    assert wait_until_gone(list(pids.values()), 0) == []
    assert any(
        "broker-a has not stopped in time; killing it" in line for line in cluster.command.out
    )


def test_status_tells_of_a_role_that_hangs(up):
    cluster = up()
    cluster.wait_ready()
    pids = cluster.pids()
    os.kill(pids["namesrv-2"], signal.SIGSTOP)
    code, status = cluster.status()
    os.kill(pids["namesrv-2"], signal.SIGCONT)
    assert code == 1
    assert [role["state"] for role in status["roles"]] == [
        "running",
        "down",
        "running",
        "running",
    ]


def test_a_taken_port_is_told_before_anything_starts(short_tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = up_arguments(short_tmp_path / "data", [*free_ports(2), port])
        refused = run_command(*arguments)
    assert (refused.code, refused.out) == (2, [])
    (line,) = refused.err
    assert f"broker-a: cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert list(short_tmp_path.iterdir()) == []


def test_a_role_that_cannot_be_started_ends_everything(up, short_tmp_path):
    path = short_tmp_path / "file"
    path.write_text("no folder")
    cluster = up("--set", f"broker.0.store_path_root_dir={path}/store")
    assert cluster.command.wait() == 2
    errors = [line for line in cluster.command.err if line]
    assert len(errors) == 1
    assert errors[0].startswith("error: broker-a: ")
    assert "Traceback" not in "\n".join(cluster.command.out)
    assert read_record(cluster.folder) is None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--set", "broker.0.listen_prot=1"), "--set: unknown key broker.0.listen_prot; did you"),
        (("-c", "nowhere.toml"), "configuration file nowhere.toml: No such file or directory"),
        (("--data-dir", "/dev/null/data"), "data folder /dev/null/data: Not a directory"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(short_tmp_path, arguments, line):
    # With ports of its own: a cluster of somebody else may have the usual ones.
    refused = run_command(*up_arguments(short_tmp_path, free_ports(3)), *arguments)
    assert (refused.code, refused.out) == (2, [])
    (only,) = refused.err
    assert line in only


def test_a_cluster_file_is_followed(up, short_tmp_path):
    first, second = free_ports(2)
    path = short_tmp_path / "cluster.toml"
    path.write_text(
        f'data_dir = "{short_tmp_path}/data"\nlog_format = "json"\n'
        f'[[namesrv]]\nname = "solo"\nlisten_port = {first}\n'
        f'[[broker]]\nbroker_name = "b|1"\nlisten_port = {second}\n'
    )
    with CommandProcess("up", "-c", str(path), "--json") as command:
        line = command.expect("cluster is ready")
        assert json.loads(line.string)["name"] == "mqmesh"
        status = run_command("status", "-c", str(path))
        assert status.code == 0
        assert [row.split()[:2] for row in status.out[2:]] == [
            ["namesrv", "solo"],
            ["broker", "b|1"],
            ["schedule", "schedule-b|1"],
        ]
        command.send_signal(signal.SIGHUP)
        assert command.wait() == 0
    events = [
        json.loads(event)
        for file in (short_tmp_path / "data" / "logs").iterdir()
        for event in file.read_text().splitlines()
    ]
    names = {(event["role"], event["name"]) for event in events}
    assert names >= {("supervisor", "mqmesh"), ("namesrv", "solo"), ("broker", "b|1")}


def test_a_broker_alone_refuses_the_store_of_another_one(short_tmp_path):
    settings = (
        "--set",
        "listen_port=0",
        "--set",
        f"store_path_root_dir={short_tmp_path}/store",
        "--set",
        "namesrv_addr=[]",
    )
    with CommandProcess("broker", *settings) as first:
        first.expect("READY role=broker name=broker-a endpoint=tcp://127.0.0.1:")
        second = run_command("broker", *settings)
        assert (second.code, second.out) == (2, [])
        (line,) = [line for line in second.err if line.startswith("error: ")]
        assert "open in another process" in line
        assert not any("Traceback" in line for line in second.err)
        watch = Stopwatch()
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 0
        assert watch.seconds < 2.0


@pytest.mark.parametrize("role", ["namesrv", "broker"])
def test_a_role_alone_refuses_a_taken_port(role, short_tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        key = "data_dir" if role == "namesrv" else "store_path_root_dir"
        refused = run_command(
            role, "--set", f"listen_port={port}", "--set", f"{key}={short_tmp_path}/data"
        )
    assert (refused.code, refused.out) == (2, [])
    assert sum(line.startswith("error: ") for line in refused.err) == 1
    assert not any("Traceback" in line for line in refused.err)


def answer_of_gateway(port, user=None):
    """Asks a gateway for the brokers, as mqadmin does; the answer."""
    fields = {} if user is None else {"AccessKey": user.access_key}
    if user is not None:
        fields["Signature"] = sign(fields, b"", user.secret_key.encode()).decode()
    request = RemotingCommand(RemotingCode.GET_BROKER_CLUSTER_INFO, 1, 0, fields)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"".join(encode_frame(request)))
        reader, found = RemotingReader(1 << 20), []
        while not found and (data := connection.recv(65_536)):
            found = list(reader.feed(data))
        return found[0]


def test_a_gateway_an_exporter_and_a_monitor_of_a_secured_cluster(up):
    namesrv, broker = free_ports(2)
    cluster = up(
        "--secure",
        "--metrics",
        "--gateway",
        *("--set", f"gateway.namesrv_port={namesrv}"),
        *("--set", f"gateway.broker_port_base={broker}"),
        *("--set", "gateway.vip_ports=false"),
        *("--set", "gateway.grpc_port=0"),
        *("--set", "exporter.listen_port=0"),
        *("--set", "monitor.enable=true"),
        *("--set", "monitor.interval_s=1"),
        *("--set", 'monitor.rule=[{alarm = "process-down", for_s = 0}]'),
    )
    users = str(cluster.folder / "security" / "gateway-users.toml")
    note = rf"for RocketMQ: 127.0.0.1:{namesrv}; its clients sign with .* of {users}, .*admin"
    cluster.command.expect(rf"cluster is ready in .*{note}")
    (admin,) = read_users(users).values()
    answer = until(
        lambda: b"broker-a" in (found := answer_of_gateway(namesrv, admin)).body and found
    )
    assert answer.code == RemotingStatus.SUCCESS
    assert answer_of_gateway(namesrv).code == RemotingStatus.NO_PERMISSION
    code, status = cluster.status()
    assert code == 0
    roles = {one["name"]: one for one in status["roles"]}
    assert list(roles) == [*NAMES, "exporter", "monitor", "gateway"]
    listed = ("gateway", "clients", "--data-dir", str(cluster.folder))
    for options, out in ((("--json",), ["[]"]), ((), None)):
        clients = run_command(*listed, *options)
        assert (clients.code, clients.err) == (0, [])
        assert out is None or clients.out == out
    assert {one["state"] for one in roles.values()} == {"running"}
    with urlopen(roles["exporter"]["endpoint"]) as answer:
        told = re.findall(
            r'^mqmesh_up\{.*node_type="(\w+)".*\} (\S+)$', answer.read().decode(), re.M
        )
    processes = ("broker", "gateway", "namesrv", "namesrv", "schedule")
    assert sorted(told) == [(role, "1.0") for role in processes]
    with urlopen(roles["exporter"]["endpoint"].replace("/metrics", "/healthz")) as answer:
        assert json.load(answer)["namesrv_answers"] is True

    pid = roles["schedule-broker-a"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        line = r"process-down \(critical\): schedule schedule-broker-a does not answer"
        cluster.command.expect(line, anywhere=True)
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.command.expect("process-down is over: schedule schedule-broker-a")
    assert (cluster.folder / "monitor.json").exists()
    cluster.command.send_signal(signal.SIGTERM)
    assert cluster.command.wait() == 0


def test_a_filter_server_is_started_beside_the_broker_and_healed(up):
    cluster = up("--set", "filter_server.enable=true")
    cluster.wait_ready()
    before = cluster.pids()
    assert list(before) == [*NAMES, "filtersrv-broker-a"]
    code, status = cluster.status()
    assert code == 0
    assert [role["state"] for role in status["roles"]] == ["running"] * len(before)

    os.kill(before["filtersrv-broker-a"], signal.SIGKILL)
    cluster.command.expect("filtersrv-broker-a ended: killed by SIGKILL; starting it again")
    cluster.command.expect("filtersrv filtersrv-broker-a is ready")
    assert cluster.status()[0] == 0

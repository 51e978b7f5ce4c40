"""Replicas, transactions, delays and filters in Python where nobody gets in without a key."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from urllib.request import urlopen

import pytest
from harness.commands import CommandProcess, free_ports_of_replicas, run_command
from harness.etcd_processes import EtcdCluster
from harness.patience import until

from mqmesh.filtering.python_filter import PythonFilter
from mqmesh.message import Message
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.roles.supervisor.run_file import read_record
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener

CLUSTER = """
data_dir = "{folder}"
[[namesrv]]
listen_port = {0}
[coordinator]
listen_port = {1}
[ha]
mode = "auto"
ack_replicas = "all"
min_in_sync_replicas = 2
coordinator = "embedded://127.0.0.1:{1}"
[[broker]]
broker_name = "b"
listen_port = {2}
replicas = 3
transaction_timeout_ms = 400
transaction_check_interval_ms = 200
[filter_server]
enable = true
[exporter]
enable = true
listen_port = 0
[security]
enable = true
"""
ODD = "def match(message):\n    return int(message.body) % 2 == 1\n"


class Undecided(TransactionListener):
    """Knows how a transaction ended only when it is asked."""

    def execute_local_transaction(self, message, arg=None):
        return LocalTransactionState.UNKNOWN

    def check_local_transaction(self, message):
        return LocalTransactionState.COMMIT


@pytest.mark.timeout(200)
def test_a_secured_group_loses_its_master_and_nothing_else(short_tmp_path, monkeypatch):
    folder = short_tmp_path / "d"
    ports = free_ports_of_replicas()
    path = short_tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(*ports, folder=folder))
    namesrv = f"127.0.0.1:{ports[0]}"
    with CommandProcess("up", "-c", str(path)) as up:
        up.expect("cluster is ready", 60)
        monkeypatch.setenv("MQMESH_CREDENTIALS", str(folder / "security" / "client.toml"))
        seen: set[bytes] = set()
        odd: set[bytes] = set()
        first = {"namesrv_addr": namesrv, "consume_from_where": ConsumeFromWhere.FIRST_OFFSET}
        with (
            HaAdmin(namesrv) as admin,
            Producer("plain", namesrv_addr=namesrv) as producer,
            TransactionProducer("tx", Undecided(), namesrv_addr=namesrv) as transactions,
            PushConsumer("all", **first) as consumer,
            PushConsumer("odd", **first) as filtered,
        ):
            consumer.subscribe("t", listener=lambda some: seen.update(m.body for m in some))
            filtered.subscribe(
                "t", PythonFilter(ODD), listener=lambda some: odd.update(m.body for m in some)
            )
            transactions.send_message_in_transaction(Message("t", b"1000"))
            producer.send(Message("t", b"1001").delayed_by(500))
            until(lambda: seen >= {b"1000", b"1001"})
            until(lambda: all(len(one.status.in_sync) == 3 for one in _masters(admin)))
            _everybody_is_asked(folder, namesrv)
            _kill_master(folder, admin)
            for number in range(100):
                producer.send(Message("t", b"%d" % number))
            sent = {b"%d" % number for number in range(100)}
            until(lambda: seen >= sent)
            until(lambda: odd >= {body for body in sent if int(body) % 2})
            assert all(int(body) % 2 for body in odd)
            assert [one.status.epoch for one in _masters(admin)] == [3]
        up.send_signal(signal.SIGTERM)
        assert up.wait() == 0


@pytest.mark.timeout(200)
def test_a_secured_group_whose_coordinator_is_etcd_tells_its_keys_there(
    short_tmp_path, monkeypatch
):
    folder = short_tmp_path / "d"
    ports = free_ports_of_replicas()
    path = short_tmp_path / "cluster.toml"
    with closing(EtcdCluster(short_tmp_path)) as etcd:
        text = CLUSTER.format(*ports, folder=folder).replace("replicas = 3", "replicas = 2")
        path.write_text(text.replace(f"embedded://127.0.0.1:{ports[1]}", etcd.url))
        with CommandProcess("up", "-c", str(path)) as up:
            up.expect("cluster is ready", 60)
            monkeypatch.setenv("MQMESH_CREDENTIALS", str(folder / "security" / "client.toml"))
            namesrv = f"127.0.0.1:{ports[0]}"
            with HaAdmin(namesrv) as admin, Producer("p", namesrv_addr=namesrv) as producer:
                until(lambda: all(len(one.status.in_sync) == 2 for one in _masters(admin)))
                producer.send(Message("t", b"x"))  # both replicas have it


def _everybody_is_asked(folder, namesrv) -> None:
    """By the exporter, the monitor and `mqmesh status`; and the index process, for a key."""
    names = {"b-r1", "b-r2", "b-r3", "schedule-b", "coordinator", namesrv}
    names |= {f"filtersrv-b-r{number}" for number in (1, 2, 3)}
    (page,) = [one.endpoint for one in read_record(folder).roles if one.role == "exporter"]

    def up() -> dict[str, str]:
        with urlopen(page, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        told = [line for line in lines if line.startswith("mqmesh_up{")]
        return {line.split('node_id="')[1].split('"')[0]: line.split()[-1] for line in told}

    until(lambda: up() == dict.fromkeys(names, "1.0"))
    settings = [f'namesrv_addr=["{namesrv}"]', f"data_dir={folder}"]
    settings.append(f"credentials={folder}/security/exporter.toml")
    words = [word for one in settings for word in ("--set", one)]
    told = run_command("monitor", "--once", "--json", *words)
    assert "process-down" not in "".join(told.out)
    assert run_command("status", "--data-dir", str(folder)).code == 0
    with (
        Producer("keyed", namesrv_addr=namesrv) as producer,
        QueryClient(namesrv) as query,
    ):
        sent = producer.send(Message("u", b"x", keys=["k"]))
        until(
            lambda: [one.message_id for one in query.by_key("u", "k").messages] == [sent.message_id]
        )


def _masters(admin: HaAdmin):
    return [one for one in admin.ha_status() if one.status and one.status.role == "MASTER"]


def _kill_master(folder, admin: HaAdmin) -> None:
    (master,) = _masters(admin)
    name = f"b-r{master.status.broker_id}"
    (pid,) = [entry.pid for entry in read_record(folder).roles if entry.name == name]
    os.kill(pid, signal.SIGKILL)

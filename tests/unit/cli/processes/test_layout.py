"""What a cluster file comes to."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from mqmesh.cli.processes.layout import check_ports, load_cluster, role_specs, seats_of_replicas
from mqmesh.cli.processes.secure import make_gateway_user, make_security
from mqmesh.config import load_config, text_override
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import ConfigError
from mqmesh.roles.access_keeper import read_access_file
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.monitor_config import MonitorConfig
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.gateway.server import read_users
from mqmesh.roles.namesrv.config import NamesrvConfig
from mqmesh.roles.supervisor.death_notes import ReplicaSeat
from mqmesh.security.access_list import UserRole
from mqmesh.security.config import SecurityConfig
from mqmesh.security.keys import load_credentials


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return write


def test_without_a_file_there_are_two_name_servers_and_a_broker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_cluster(None)
    assert config.namesrv_addr == "127.0.0.1:9876;127.0.0.1:9877"
    assert [one.name for one in config.namesrv] == ["namesrv-1", "namesrv-2"]
    assert [one.data_dir for one in config.namesrv] == [
        str(tmp_path / "mqmesh-data" / name) for name in ("namesrv-1", "namesrv-2")
    ]
    (broker,) = config.broker
    assert (broker.broker_name, broker.listen_port) == ("broker-a", 10_911)
    assert broker.namesrv_addr == ["127.0.0.1:9876", "127.0.0.1:9877"]
    assert broker.store_path_root_dir == str(tmp_path / "mqmesh-data" / "broker-a")


def test_coordinators_elsewhere_are_to_be_told_of_dead_replicas(write):
    text = '[[broker]]\nreplicas = 3\ncluster_name = "c"\n[ha]\nmode = "auto"\n'
    assert seats_of_replicas(load_cluster(write(text))) == {}, "the one beside them sees it itself"
    url = "etcd://h:2379"
    told = seats_of_replicas(load_cluster(write(f'{text}coordinator = "{url}"\n')))
    assert told == {
        f"broker-a-r{number}": ReplicaSeat(url, "c", "broker-a", number) for number in (1, 2, 3)
    }


def test_brokers_register_with_the_name_servers_of_the_file(write):
    path = write('[[namesrv]]\nlisten_port = 1\n[[broker]]\n[[broker]]\nbroker_name = "b"\n')
    config = load_cluster(path)
    assert [one.namesrv_addr for one in config.broker] == [["127.0.0.1:1"], ["127.0.0.1:1"]]


def test_what_a_file_says_is_not_overruled(write):
    path = write(
        '[[namesrv]]\nname = "ns"\ndata_dir = "/ns"\n'
        '[[broker]]\nnamesrv_addr = ["h:1"]\nstore_path_root_dir = "/b"\n'
    )
    config = load_cluster(path)
    assert (config.namesrv[0].name, config.namesrv[0].data_dir) == ("ns", "/ns")
    assert config.broker[0].namesrv_addr == ["h:1"]
    assert config.broker[0].store_path_root_dir == "/b"


def test_a_file_of_brokers_only_uses_name_servers_elsewhere(write):
    config = load_cluster(write("[[broker]]\n"))
    assert config.namesrv == []
    assert config.namesrv_addr == "127.0.0.1:9876;127.0.0.1:9877"


def test_clients_are_given_the_advertised_host(write):
    path = write('[[namesrv]]\nlisten_host = "127.0.0.2"\nadvertised_host = "here"\n')
    assert load_cluster(path).namesrv_addr == "here:9876"


def test_an_override_reaches_the_default_cluster():
    config = load_cluster(None, ["broker.0.storage.flush_disk_type=SYNC_FLUSH", "data_dir=/x"])
    assert config.broker[0].storage.flush_disk_type.value == "SYNC_FLUSH"
    assert config.broker[0].store_path_root_dir == "/x/broker-a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither [[namesrv]] nor [[broker]]; there is nothing to run"),
        ("[exporter]\nenable = true\n", "begin with a copy of conf/cluster.toml"),
        ("[[broker]]\n[[broker]]\n", "two roles are named 'broker-a'"),
        ("[[brokers]]\n", "unknown key brokers; did you mean broker?"),
        ("[broker]\n", "broker = {}: must be a list up to 1,024 of a table"),
        ("[[broker]]\nlisten_prot = 1\n", "unknown key broker.0.listen_prot; did you mean"),
        ("[[broker]]\nlisten_port = 70000\n", "must be a whole number of 0 to 65,535"),
        ('[[broker]]\nlisten_host = "0.0.0.0"\n', "can be reached from other machines"),
        ('data_dir = ""\n', "data_dir = '': must be text"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_role_gets_its_settings_in_a_file_of_its_own(tmp_path):
    config = load_cluster(None, [f"data_dir={tmp_path}", "broker.0.broker_name=a%2|b"])
    specs = {spec.name: spec for spec in role_specs(config)}
    assert list(specs) == ["namesrv-1", "namesrv-2", "a%2|b", "schedule-a%2|b"]
    broker = specs["a%2|b"]
    assert broker.argv[:4] == [sys.executable, "-P", "-m", "mqmesh.cli"]
    assert broker.argv[4:6] == ["broker", "-c"]
    assert broker.argv[6] == str(tmp_path / "run" / "a%252%7Cb.toml")
    assert broker.argv[7:] == ["--supervised", "--log-format", "text"]
    assert load_config(BrokerConfig, tmp_path / "run" / "a%252%7Cb.toml") == config.broker[0]
    assert load_config(NamesrvConfig, tmp_path / "run" / "namesrv-2.toml") == config.namesrv[1]


@pytest.mark.parametrize("secure", [False, True])
def test_whoever_watches_a_cluster_asks_the_processes_of_its_file(tmp_path, secure):
    settings = [f"data_dir={tmp_path}", "exporter.enable=true", "monitor.enable=true"]
    settings += ["monitor.interval_s=7", f"security.enable={str(secure).lower()}"]
    config = load_cluster(None, settings)
    if secure:
        make_security(config)
    specs = {spec.name: spec for spec in role_specs(config)}
    assert {specs[name].role for name in ("exporter", "monitor")} == {"exporter", "monitor"}
    keys = str(tmp_path / "security" / "exporter.toml") if secure else ""
    for kind, name in ((ExporterConfig, "exporter"), (MonitorConfig, "monitor")):
        told = load_config(kind, tmp_path / "run" / f"{name}.toml")
        assert told.namesrv_addr == ["127.0.0.1:9876", "127.0.0.1:9877"]
        assert (told.data_dir, told.credentials) == (str(tmp_path), keys)
    assert told.interval_s == 7
    assert told.state_file == str(tmp_path / "monitor.json")
    if secure:
        assert load_credentials(Path(keys)).user == "exporter"


def test_the_gateway_of_a_secured_cluster_has_keys_and_a_first_user(tmp_path):
    settings = [f"data_dir={tmp_path}", "gateway.enable=true", "security.enable=true"]
    keys = tmp_path / "security"
    for _ in range(2):  # what is there stays as it is
        config = load_cluster(None, settings)
        make_security(config)
        make_gateway_user(config)
        role_specs(config)
    own = load_config(GatewayConfig, tmp_path / "run" / "gateway.toml")
    assert own.security == SecurityConfig(
        enable=True,
        key_file=str(keys / "gateway.toml"),
        access_list_file=str(keys / "access_list.toml"),
    )
    assert (own.users_file, own.allow_anonymous) == (str(keys / "gateway-users.toml"), False)
    roles = {one.name: one.role for one in read_access_file(keys / "access_list.toml").user}
    assert roles["gateway"] == UserRole.VIEW
    (admin,) = read_users(own.users_file).values()
    assert (admin.access_key, admin.credentials) == ("admin", str(keys / "client.toml"))
    assert len(admin.secret_key) >= 32
    (keys / "gateway-users.toml").write_text("")
    make_gateway_user(config)
    assert read_users(own.users_file) == {}, "a user that was taken out does not come back"


def test_each_worker_of_a_gateway_is_a_process_of_its_own(tmp_path):
    settings = [f"data_dir={tmp_path}", "gateway.enable=true", "gateway.workers=2"]
    specs = {one.name: one for one in role_specs(load_cluster(None, settings))}
    assert [name for name in specs if name.startswith("gateway")] == ["gateway", "gateway-2"]
    one, two = (
        load_config(GatewayConfig, tmp_path / "run" / f"{name}.toml")
        for name in ("gateway", "gateway-2")
    )
    assert (one.worker, two.worker, one.own_folder) == (1, 2, tmp_path / "gateway")
    assert two.own_folder == tmp_path / "gateway" / "worker-2"
    assert one.store_path_root_dir == two.store_path_root_dir
    with pytest.raises(ConfigError, match="worker = 3 is more than there are"):
        load_cluster(None, [*settings, "gateway.worker=3"])


@pytest.mark.parametrize(
    "setting",
    ["gateway.users_file=", "gateway.security.enable=false", "gateway.security.key_file="],
)
def test_a_gateway_of_a_secured_cluster_is_never_open(tmp_path, setting):
    settings = [f"data_dir={tmp_path}", "gateway.enable=true", "security.enable=true", setting]
    with pytest.raises(ConfigError):
        load_cluster(None, settings)


@pytest.mark.parametrize(
    "name", ["a b", '"x"', "true", "a=b;c,d#e", "new\nline", "50%", "\\", "\u00e4"]
)
def test_a_data_folder_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    config = load_cluster(None, [text_override("data_dir", name)])
    assert config.data_dir == name
    role_specs(config)
    again = load_config(BrokerConfig, tmp_path / name / "run" / "broker-a.toml")
    assert again.store_path_root_dir == str(tmp_path / name / "broker-a")


def test_a_path_that_no_file_of_settings_can_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"data_dir.*not UTF-8"):
        load_cluster(None, [text_override("data_dir", "\udcff")])
    (tmp_path / "\udcff").mkdir()
    monkeypatch.chdir("\udcff")
    with pytest.raises(ConfigError, match=r"data_dir.*\\udcff/mqmesh-data.*not UTF-8"):
        load_cluster(None)


def test_brokers_are_stopped_before_name_servers(tmp_path):
    stages = {spec.role: spec.stop_stage for spec in role_specs(_on_ports(tmp_path, 1, 2, 3))}
    assert stages["broker"] < stages["namesrv"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"run: (File exists|Not a directory)"):
        role_specs(load_cluster(None, [f"data_dir={tmp_path}"]))


def test_a_taken_port_is_found_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = _on_ports(tmp_path, 0, 0, port)
        with pytest.raises(ConfigError, match=rf"broker-a: cannot listen on 127.0.0.1:{port}: Add"):
            check_ports(config)


def test_two_roles_on_one_port_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"namesrv-2: 127\.0\.0\.1:65001 is the address of namesrv-1"
    ):
        check_ports(_on_ports(tmp_path, 65_001, 65_001, 0))


def test_free_ports_are_well(tmp_path):
    check_ports(_on_ports(tmp_path, 0, 0, 0))


def _on_ports(tmp_path, first, second, broker):
    return load_cluster(
        None,
        [
            f"data_dir={tmp_path}",
            f"namesrv.0.listen_port={first}",
            f"namesrv.1.listen_port={second}",
            f"broker.0.listen_port={broker}",
        ],
    )


def test_filter_servers_stand_beside_brokers_only_where_they_are_allowed(write):
    brokers = '[[broker]]\nlisten_port = 5\n[[broker]]\nbroker_name = "b"\nlisten_host = "::1"\n'
    plain = load_cluster(write(brokers))
    assert "filtersrv" not in {spec.role for spec in role_specs(plain)}
    assert not any(broker.filter_server_enable for broker in plain.broker)

    allowed = load_cluster(write("[filter_server]\nenable = true\nmax_filters = 3\n" + brokers))
    assert all(broker.filter_server_enable for broker in allowed.broker)
    specs = [spec for spec in role_specs(allowed) if spec.role == "filtersrv"]
    assert [spec.name for spec in specs] == ["filtersrv-broker-a", "filtersrv-b"]
    configs = [load_config(FiltersrvConfig, Path(spec.argv[spec.argv.index("-c") + 1]))
               for spec in specs]  # fmt: skip
    assert [one.broker_addr for one in configs] == ["127.0.0.1:5", "[::1]:10911"]
    assert [one.broker_name for one in configs] == ["broker-a", "b"]
    assert all(one.enable and one.max_filters == 3 for one in configs)


def test_a_broker_may_be_left_without_a_filter_server(write):
    config = load_cluster(
        write("[filter_server]\nenable = true\n[[broker]]\nfilter_server_enable = false\n")
    )
    assert "filtersrv" not in {spec.role for spec in role_specs(config)}


REPLICAS = """
data_dir = "/data"
[[namesrv]]
[ha]
mode = "manual"
ack_replicas = "one"
[[broker]]
listen_port = 10911
replicas = 3
[broker.ha]
slave_timeout_ms = 500
[[broker]]
broker_name = "b"
listen_port = 10951
"""


def test_a_table_with_replicas_is_a_master_and_its_followers(write):
    config = load_cluster(write(REPLICAS))
    found = [
        (one.broker_name, one.broker_id, one.listen_port, one.store_path_root_dir)
        for one in config.broker
    ]
    assert found == [
        ("broker-a", 0, 10_911, "/data/broker-a"),
        ("broker-a", 1, 10_921, "/data/broker-a-r1"),
        ("broker-a", 2, 10_931, "/data/broker-a-r2"),
        ("b", 0, 10_951, "/data/b"),
    ]
    masters = [one.ha.master_addr for one in config.broker]
    assert masters == ["", "127.0.0.1:10911", "127.0.0.1:10911", ""]
    assert {one.ha.ack_replicas for one in config.broker} == {AckReplicas.ONE}
    assert [one.ha.slave_timeout_ms for one in config.broker] == [500, 500, 500, 3_000]


def test_each_replica_is_a_process_and_a_group_has_one_schedule_service(write, tmp_path):
    config = load_cluster(write(REPLICAS.replace("/data", str(tmp_path / "data"))))
    names = [spec.name for spec in role_specs(config)]
    assert sorted(names) == [
        "b",
        "broker-a",
        "broker-a-r1",
        "broker-a-r2",
        "namesrv-1",
        "schedule-b",
        "schedule-broker-a",
    ]
    again = load_config(BrokerConfig, tmp_path / "data" / "run" / "broker-a-r2.toml")
    assert (again.broker_id, again.replicas) == (2, 1)


@pytest.mark.parametrize(
    "said", ["replicas = 2", 'replicas = 2\nbroker_id = 1\n[broker.ha]\nmode = "manual"']
)
def test_replicas_need_a_mode_and_are_said_of_the_master(write, said):
    with pytest.raises(ConfigError, match=r"replicas|broker_id"):
        load_cluster(write(f"[[broker]]\n{said}\n"))


@pytest.mark.parametrize("name", ["2m.toml", "2m-2s-async.toml", "2m-2s-sync.toml"])
def test_the_files_of_layouts_can_be_used(project_root, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    config = load_cluster(project_root / "conf" / "ha" / name)
    assert len(config.broker) == (2 if name == "2m.toml" else 4)
    assert len(role_specs(config)) == len(config.broker) + 4

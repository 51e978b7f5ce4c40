"""What a data folder has, as `mqmesh up` finds it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqmesh.cli.processes.found_cluster import find_cluster, save_last_start
from mqmesh.cli.processes.layout import load_cluster
from mqmesh.cli.processes.start_plan import FoundCluster, LastBroker, LastStart
from mqmesh.errors import CorruptRecord
from mqmesh.private_files import make_folder
from mqmesh.roles.broker.ha.replica_role import ReplicaRole, encode_role
from mqmesh.roles.broker.ha.replica_state import encode_replica_state, first_state
from mqmesh.roles.broker.ha.store_history import StoreHistory
from mqmesh.roles.started_as import StartedAs, remember_start
from mqmesh.security.config import SecurityConfig
from mqmesh.storage.files.atomic_file import save_document

ON = SecurityConfig(enable=True, key_file="k")
STATE = first_state(1, 2, identity="i", boot_id="b", place="p", drawn=3)


def cluster_in(folder, *settings, replicas=None):
    return load_cluster(None, [f"data_dir={folder}", *settings], replicas=replicas)


def test_a_new_folder_has_nothing(tmp_path):
    assert find_cluster(cluster_in(tmp_path / "new")) == FoundCluster()
    tmp_path.joinpath("file").touch()
    elsewhere = cluster_in(tmp_path, f"broker.0.store_path_root_dir={tmp_path}/file/store")
    assert find_cluster(elsewhere) == FoundCluster()


def test_stores_are_found_with_the_roles_that_they_had(tmp_path):
    for name in ("broker-a", "broker-a-r2", "b/r1", "lmdb-one", "snapshots/broker-a.1.2"):
        (tmp_path / name / ("lmdb" if name == "lmdb-one" else "commitlog")).mkdir(parents=True)
    save_document(tmp_path / "broker-a-r2" / "replica-state", encode_replica_state(STATE))
    remember_start(StartedAs(), tmp_path / "broker-a", SecurityConfig(), follows=True)
    make_folder(tmp_path / "broker-a" / "config")
    save_document(tmp_path / "broker-a" / "config" / "replica.json", encode_role(ReplicaRole(3)))
    found = {one.path: one.history for one in find_cluster(cluster_in(tmp_path)).stores}
    assert found == {
        tmp_path / "b" / "r1": StoreHistory(),
        tmp_path / "broker-a": StoreHistory(follows=True, is_promoted=True),
        tmp_path / "broker-a-r2": StoreHistory(replica=STATE),
        tmp_path / "lmdb-one": StoreHistory(),
    }


def test_a_store_of_the_last_start_is_found_wherever_it_is(tmp_path):
    elsewhere = tmp_path / "disk" / "broker-a"
    (elsewhere / "commitlog").mkdir(parents=True)
    folder = tmp_path / "data"
    make_folder(folder / "run")
    before = cluster_in(folder, f"broker.0.store_path_root_dir={elsewhere}")
    save_last_start(before, Path("cluster.toml"))
    found = find_cluster(cluster_in(folder))
    assert [one.path for one in found.stores] == [elsewhere]
    assert found.last == LastStart(
        file=str(Path("cluster.toml").absolute()),
        brokers=(LastBroker(broker_name="broker-a", root=str(elsewhere)),),
    )
    save_last_start(cluster_in(folder, replicas=2), None)
    last = find_cluster(cluster_in(folder)).last
    assert [(one.broker_id, one.total_replicas) for one in last.brokers] == [(1, 2), (2, 2)]
    save_document(folder / "run" / "last-start.json", b"{")
    with pytest.raises(CorruptRecord, match=r"last-start\.json cannot be read"):
        find_cluster(cluster_in(folder))


def test_keys_and_what_ran_secured_are_found(tmp_path):
    make_folder(tmp_path / "security")
    assert not find_cluster(cluster_in(tmp_path)).has_keys
    (tmp_path / "security" / "access_list.toml").touch()
    other = tmp_path / "elsewhere" / "namesrv"
    for folder in (tmp_path / "broker-b", other):
        remember_start(StartedAs(), folder, ON)
    found = find_cluster(cluster_in(tmp_path, f"namesrv.0.data_dir={other}"))
    assert found.has_keys
    assert found.secured == {tmp_path / "broker-b", other}


def test_a_store_itself_is_told_from_a_data_folder(tmp_path):
    assert not find_cluster(cluster_in(tmp_path)).is_store
    (tmp_path / "commitlog").mkdir()
    assert find_cluster(cluster_in(tmp_path)).is_store


def test_a_copied_data_folder_has_its_own_stores_and_not_those_it_was_copied_from(tmp_path):
    folder, copy = tmp_path / "data", tmp_path / "copy"
    (folder / "broker-a" / "commitlog").mkdir(parents=True)
    make_folder(folder / "run")
    save_last_start(cluster_in(folder), None)
    shutil.copytree(folder, copy)
    found = find_cluster(cluster_in(copy))
    assert [one.path for one in found.stores] == [copy / "broker-a"]
    assert [one.root for one in found.last.brokers] == [str(copy / "broker-a")]

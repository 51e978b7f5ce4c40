"""What `mqmesh up` makes of what is in its data folder, by all that may be found and said."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec
import pytest

from mqmesh.cli.processes.layout import load_cluster
from mqmesh.cli.processes.start_plan import (
    INSECURE,
    SECURE,
    FoundCluster,
    FoundStore,
    LastBroker,
    LastStart,
    StartFlags,
    check_stores,
    plan_start,
)
from mqmesh.errors import ConfigError
from mqmesh.roles.broker.ha.replica_state import ReplicaState
from mqmesh.roles.broker.ha.store_history import StoreHistory

DATA = Path("/data")
HERE = "data_dir=/data"


def start(found, *, file=None, **said):
    """How the cluster is started, and the notes."""
    flags = StartFlags(file=file, **said)
    settings = [HERE, *SECURE * flags.secure, *INSECURE * flags.insecure]
    asked = load_cluster(file, settings, replicas=flags.replicas)
    plan = plan_start(asked, found, flags)
    config = load_cluster(file, [*settings, *plan.settings], replicas=plan.replicas)
    return config, [*plan.notes, *check_stores(config, found, flags)]


# ---- Security --------------------------------------------------------------------------

OPEN, SECURED, OPENED, REFUSED = "open", "secured", "opened on purpose", "refused"
SAID = {
    "nothing": "",
    "true": "[security]\nenable = true\n",
    "false": "[security]\nenable = false\n",
}
EXPECTED = {
    # keys, settings, flag: what comes of it
    (False, "nothing", ""): OPEN,
    (False, "nothing", "secure"): SECURED,
    (False, "nothing", "insecure"): OPENED,
    (False, "true", ""): SECURED,
    (False, "true", "secure"): SECURED,
    (False, "true", "insecure"): OPENED,
    (False, "false", ""): OPEN,
    (False, "false", "secure"): SECURED,
    (False, "false", "insecure"): OPENED,
    (True, "nothing", ""): SECURED,
    (True, "nothing", "secure"): SECURED,
    (True, "nothing", "insecure"): OPENED,
    (True, "true", ""): SECURED,
    (True, "true", "secure"): SECURED,
    (True, "true", "insecure"): OPENED,
    (True, "false", ""): REFUSED,
    (True, "false", "secure"): SECURED,
    (True, "false", "insecure"): OPENED,
}


@pytest.mark.parametrize(("keys", "said", "flag"), EXPECTED)
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_was_secured_is_secured_or_the_start_is_refused(tmp_path, keys, said, flag, replicas):
    file = tmp_path / "cluster.toml"
    ha = 'replicas = 3\n[ha]\nmode = "auto"\n' if replicas == 3 else ""
    file.write_text(f"[[namesrv]]\n[[broker]]\n{ha}{SAID[said]}")
    found = FoundCluster(has_keys=keys)
    expected = EXPECTED[keys, said, flag]
    flags = {flag: True} if flag else {}
    if expected == REFUSED:
        with pytest.raises(ConfigError, match=r"security.enable = false would let.*--insecure"):
            start(found, file=file, **flags)
        return
    config, notes = start(found, file=file, **flags)
    roles = [*config.broker, *config.namesrv, config.coordinator]
    assert len(config.broker) == replicas
    assert {one.security.enable for one in roles} == {expected == SECURED}
    assert {one.security.insecure for one in roles} == {expected == OPENED}
    decided = keys and not (said == "true" and flag == "") and flag != "secure"
    assert len(notes) == decided
    assert all("--insecure" in note for note in notes)


def test_what_ran_secured_is_not_opened_where_its_keys_are_gone():
    for name in ("broker-a", "namesrv-2", "schedule-broker-a"):
        found = FoundCluster(secured=frozenset({DATA / name}))
        with pytest.raises(
            ConfigError, match=f"^/data/{name} was used .*nor are there keys.*--ins"
        ):
            start(found)
        assert start(found, secure=True)[0].security.enable
        assert start(found, insecure=True)[0].broker[0].security.insecure
    assert start(FoundCluster(secured=frozenset({DATA / "gone"})))


def test_one_role_is_not_opened_beside_others_by_its_own_settings(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("[[broker]]\n[broker.security]\nenable = false\n")
    found = FoundCluster(has_keys=True, secured=frozenset({DATA / "broker-a"}))
    with pytest.raises(ConfigError, match=r"broker-a was used .* this start has none for it; or"):
        start(found, file=file)


# ---- Stores ----------------------------------------------------------------------------


def _store(name, replica_id=0, *, promised=5, follows=False):
    replica = None
    if replica_id:
        replica = ReplicaState(
            log_id=1,
            replica_id=replica_id,
            identity="i",
            promised_epoch=promised,
            incarnation=1,
            boot_id="b",
            place="p",
        )
    return FoundStore(path=DATA / name, history=StoreHistory(follows=follows, replica=replica))


def _group(*ids, promised=5):
    return tuple(
        _store("broker-a" if one == 1 else f"broker-a-r{one}", one, promised=promised)
        for one in ids
    )


def _last(*ids, total=0):
    return LastStart(
        brokers=tuple(
            LastBroker(broker_name="broker-a", broker_id=one, total_replicas=total, root="/data/x")
            for one in ids
        )
    )


FOUND = {
    "nothing": FoundCluster(),
    "one": FoundCluster(stores=(_store("broker-a"),)),
    "three": FoundCluster(stores=_group(1, 2, 3), last=_last(1, 2, 3, total=3)),
    "three, no last start": FoundCluster(stores=_group(1, 2, 3)),
    "two of three": FoundCluster(stores=_group(1, 2), last=_last(1, 2, 3, total=3)),
    "the third of three": FoundCluster(stores=_group(3), last=_last(1, 2, 3, total=3)),
    "three that wait": FoundCluster(stores=_group(1, 2, 3, promised=0)),
    "elected alone": FoundCluster(stores=_group(1), last=_last(1, total=1)),
    "master and follower": FoundCluster(
        stores=(_store("broker-a"), _store("broker-a-r1", follows=True))
    ),
    "another": FoundCluster(stores=(_store("broker-b"),)),
    "elsewhere": FoundCluster(stores=(FoundStore(path=Path("/disk/broker-a")),)),
    "older layout": FoundCluster(stores=(_store("broker-a/r1", 1), _store("broker-a/r2", 2))),
}
FILES = {
    "file": "",
    "file of three": 'replicas = 3\n[ha]\nmode = "auto"\nack_replicas = "all"\n',
    "file of two by settings": 'replicas = 2\n[ha]\nmode = "manual"\nack_replicas = "one"\n',
    "file of another": 'broker_name = "broker-b"\n',
}
STARTS = {"up": None, "1": 1, "2": 2, "3": 3, "5": 5} | dict.fromkeys(FILES)

GROWS = "was one broker, and becomes a group"
HAS = "has .* in /data, and so it is started"
OUT = "is replica {} of broker-a, which this start leaves out, .*`mqmesh up.*--data-dir /data`"
GONE = "is a broker's store, which this start leaves out: .*`mqmesh up.*`mv /data/{} ELSEWHERE`"
ALONE = "of replica 1 of a group that elects"

# Found, said: how many brokers are started and the note, or why nothing is.
TABLE = {
    "nothing": {
        "up": (1, ""),
        "1": (1, ""),
        "2": (2, ""),
        "3": (3, ""),
        "5": (5, ""),
        "file": (1, ""),
        "file of three": (3, ""),
        "file of two by settings": (2, ""),
        "file of another": (1, ""),
    },
    "one": {
        "up": (1, ""),
        "1": (1, GROWS),
        "2": (2, GROWS),
        "3": (3, GROWS),
        "5": (5, GROWS),
        "file": (1, ""),
        "file of three": (3, GROWS),
        "file of two by settings": (2, ""),
        "file of another": GONE.format("broker-a"),
    },
    "three": {
        "up": (3, HAS),
        "1": OUT.format(2),
        "2": OUT.format(3),
        "3": (3, ""),
        "5": (5, "replica 4 of broker-a is new.*`mqmesh ha add broker-a 4`"),
        "file": OUT.format(2),
        "file of three": (3, ""),
        "file of two by settings": OUT.format(2),
        "file of another": GONE.format("broker-a"),
    },
    "elected alone": {
        "up": (1, HAS),
        "1": (1, ""),
        "2": (2, "replica 2 of broker-a is new"),
        "3": (3, "replica 2 of broker-a is new"),
        "5": (5, "replica 2 of broker-a is new"),
        "file": ALONE,
        "file of three": (3, "replica 2 of broker-a is new"),
        "file of two by settings": ALONE,
        "file of another": GONE.format("broker-a"),
    },
    "master and follower": {
        "up": GONE.format("broker-a-r1"),
        "1": GONE.format("broker-a-r1"),
        "2": GONE.format("broker-a-r1"),
        "3": GONE.format("broker-a-r1"),
        "5": GONE.format("broker-a-r1"),
        "file": GONE.format("broker-a-r1"),
        "file of three": GONE.format("broker-a-r1"),
        "file of two by settings": (2, ""),
        "file of another": GONE.format("broker-a"),
    },
    "another": dict.fromkeys(STARTS, GONE.format("broker-b")) | {"file of another": (1, "")},
    "elsewhere": dict.fromkeys(STARTS, "^/disk/broker-a is a broker's store, which this start"),
    "older layout": dict.fromkeys(STARTS, GONE.format("broker-a/r1")),
}
TABLE["three, no last start"] = TABLE["three"]
# One whose folder is gone belongs to the group as before, and begins anew.
TABLE["two of three"] = TABLE["three"] | {
    "2": (2, ""),
    "5": (5, "replica 4 of broker-a is new"),
}
TABLE["the third of three"] = {
    "up": (3, HAS),
    "1": OUT.format(3),
    "2": OUT.format(3),
    "3": (3, ""),
    "5": (5, "replica 4 of broker-a is new"),
    "file": OUT.format(3),
    "file of three": (3, ""),
    "file of two by settings": OUT.format(3),
    "file of another": GONE.format("broker-a-r3"),
}
# Their group was never made, so what the first one has was there before.
TABLE["three that wait"] = TABLE["three"] | {
    "3": (3, GROWS),
    "5": (5, GROWS),
    "file of three": (3, GROWS),
}


def test_the_table_has_all_that_may_be_found_and_said():
    assert TABLE.keys() == FOUND.keys()
    assert all(row.keys() == STARTS.keys() for row in TABLE.values())


@pytest.mark.parametrize(("found", "said"), list(itertools.product(FOUND, STARTS)))
def test_every_store_is_used_as_what_it_is_or_the_start_is_refused(tmp_path, found, said):
    file = None
    if said in FILES:
        file = tmp_path / "cluster.toml"
        file.write_text(f"[[namesrv]]\n[[broker]]\n{FILES[said]}")
    expected = TABLE[found][said]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            start(FOUND[found], file=file, replicas=STARTS[said])
        return
    count, note = expected
    config, notes = start(FOUND[found], file=file, replicas=STARTS[said])
    assert len(config.broker) == count
    assert config.broker[0].store_path_root_dir.startswith("/data/broker-")
    assert bool(notes) == bool(note)
    assert not note or any(re.search(note, one) for one in notes)


def test_one_layout_has_a_broker_alone_and_each_kind_of_group(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(f"[[broker]]\n{FILES['file of two by settings']}")
    folders = [
        [one.store_path_root_dir for one in start(FoundCluster(), **said)[0].broker]
        for said in ({}, {"replicas": 1}, {"replicas": 3}, {"file": file})
    ]
    first = "/data/broker-a"
    assert folders == [
        [first],
        [first],
        [first, f"{first}-r2", f"{first}-r3"],
        [first, f"{first}-r1"],
    ]


def test_an_error_names_the_start_of_before():
    last = LastStart(file="/etc/my cluster.toml", brokers=_last(0).brokers)
    found = msgspec.structs.replace(FOUND["another"], last=last)
    with pytest.raises(
        ConfigError, match=r"`mqmesh up -c '/etc/my cluster.toml' --data-dir /data`"
    ):
        start(found)


def test_a_replica_on_a_machine_of_its_own_is_started_by_its_file_only():
    here = FoundCluster(
        stores=(_store("broker-a", 2),),
        last=LastStart(file="/etc/machine2.toml", brokers=_last(2, total=3).brokers),
    )
    with pytest.raises(ConfigError, match=r"of replica 2 .*by `mqmesh up -c /etc/machine2.toml"):
        start(here)


def test_a_broker_gets_replicas_on_other_machines(tmp_path):
    file = tmp_path / "machine1.toml"
    file.write_text('[[broker]]\nbroker_id = 1\n[ha]\nmode = "auto"\ntotal_replicas = 3\n')
    config, (note,) = start(FOUND["one"], file=file)
    assert [one.store_path_root_dir for one in config.broker] == ["/data/broker-a"]
    assert "becomes a group of 3 replicas" in note


def test_the_folder_of_a_broker_is_no_data_folder():
    with pytest.raises(ConfigError, match=r"^/data is the store of a broker.*--data-dir /\)"):
        start(FoundCluster(is_store=True))

"""Settings of a cluster stand above a replica's own, and only what it can use."""

from __future__ import annotations

import pytest

from mqmesh.coordination.interface import AckReplicas, SettingsRecord
from mqmesh.errors import InvalidArgument
from mqmesh.protocol.replication import HaSetting, SettingDiffers
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.administration.cluster_settings import (
    ClusterSettings,
    checked,
    settings_of,
)
from mqmesh.roles.broker.ha_config import HaConfig, HaMode


def own(mode=AckReplicas.ALL, **ha):
    config = HaConfig(mode=HaMode.AUTO, ack_replicas=mode, total_replicas=3, **ha)
    return ClusterSettings(BrokerConfig(broker_id=1, ha=config))


def test_what_nobody_has_set_is_each_replicas_own():
    settings = own(lease_ttl_ms=4_000)
    assert not settings.take(SettingsRecord(0))
    assert settings.config.ha.lease_ttl_ms == 4_000
    assert settings.differing() == []


def test_the_cluster_stands_above_and_what_differs_is_told_by_name_and_value():
    settings = own(lease_ttl_ms=4_000, min_in_sync_replicas=2)
    record = SettingsRecord(3, {"lease_ttl_ms": 6_000, "min_in_sync_replicas": 2})
    assert settings.take(record)
    assert not settings.take(record)
    assert settings.config.ha.lease_ttl_ms == 6_000
    assert settings.differing() == [SettingDiffers("lease_ttl_ms", "4000", "6000")]
    assert HaSetting("lease_ttl_ms", "6000") in settings.in_force()
    assert settings.take(SettingsRecord(4, {}))
    assert settings.config.ha.lease_ttl_ms == 4_000


def test_the_group_says_how_many_copies_a_send_waits_for():
    settings = own(AckReplicas.QUORUM)
    settings.on_mode(AckReplicas.ALL)
    settings.take(SettingsRecord(1, {"min_in_sync_replicas": 2}))
    assert settings.config.ha.min_in_sync_replicas == 2
    assert SettingDiffers("ack_replicas", "quorum", "all") in settings.differing()
    settings.on_mode(AckReplicas.ONE)
    assert settings.config.ha.min_in_sync_replicas == 1, "it says something with all only"
    assert settings.problems == {}


def test_what_a_replica_cannot_use_it_leaves_and_says_so():
    settings = own(min_in_sync_replicas=2)
    settings.take(
        SettingsRecord(1, {"min_in_sync_replicas": 4, "lease_ttl_ms": 1, "a_newer_one": "x"})
    )
    ha = settings.config.ha
    assert (ha.min_in_sync_replicas, ha.lease_ttl_ms) == (2, 3_000)
    assert "4 is more than there are" in settings.problems["min_in_sync_replicas"]
    assert "lease_ttl_ms = 1" in settings.problems["lease_ttl_ms"]
    with pytest.raises(InvalidArgument, match="4 is more than there are"):
        settings.check({"min_in_sync_replicas": 4})
    settings.check({"min_in_sync_replicas": 3})


def test_what_is_set_is_kept_with_its_type_and_told_as_it_is_written():
    wanted = [HaSetting("failsafe", "false"), HaSetting("lease_ttl_ms", "5000")]
    kept = checked(wanted)
    assert kept == {"failsafe": False, "lease_ttl_ms": 5_000}
    assert settings_of(SettingsRecord(1, kept)) == wanted


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("coordinator", "etcd://x:1", "no setting of a cluster; there are .*lease_ttl_ms"),
        ("lease_ttl_ms", "1999", "lease_ttl_ms = '1999'.*2000"),
        ("lease_ttl_ms", "soon", "lease_ttl_ms = 'soon'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(name, value, why):
    with pytest.raises(InvalidArgument, match=why):
        checked([HaSetting(name, value)])

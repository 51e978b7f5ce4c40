"""The broker's settings."""

from __future__ import annotations

import re

import pytest

from mqmesh.config import load_config
from mqmesh.errors import ConfigError
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.storage.interface import FlushDiskType


def test_the_defaults_serve_this_machine_only():
    config = BrokerConfig()
    assert (config.listen_host, config.listen_port) == ("127.0.0.1", 10_911)
    assert config.namesrv_addr == ["127.0.0.1:9876", "127.0.0.1:9877"]
    assert config.storage.backend == "commitlog"
    assert config.storage.flush_disk_type is FlushDiskType.ASYNC_FLUSH


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("listen_hots=x", "did you mean listen_host"),
        ("storage.backnd=memory", "did you mean storage.backend"),
        ("listen_host=0.0.0.0", "allow_insecure_bind"),
        ("broker_id=1", "ha.mode"),
        ("broker_id=65", "broker_id"),
        ("broker_name=a b", "broker_name"),
        ("max_message_size=0", "max_message_size"),
        ("max_message_size=999999999", "max_message_size"),
        ("default_topic_queue_nums=0", "default_topic_queue_nums"),
        ("storage.flush_disk_type=SOMETIMES", "SYNC_FLUSH"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_its_name(override, why):
    with pytest.raises(ConfigError, match=why):
        load_config(BrokerConfig, overrides=[override])


THREE = "ha.mode=auto broker_id=1 ha.total_replicas=3"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("ha.ack_replicas=one", 'ha.ack_replicas is set.*(ha.mode).*"manual" or "auto"'),
        ("ha.master_addr=h:1", "ha.master_addr is set, and nobody has a copy"),
        ("ha.mode=manual broker_id=1", "say where it listens (ha.master_addr)"),
        ("ha.mode=manual ha.ack_replicas=all", "ha.ack_replicas = 'all' needs an in-sync set"),
        (
            "ha.mode=manual ha.min_in_sync_replicas=2",
            "ha.min_in_sync_replicas = 2 needs an in-sync",
        ),
        ("ha.mode=auto", "broker_id = 0.*1 to ha.total_replicas = 1"),
        (f"{THREE} broker_id=4", "broker_id = 4.*1 to ha.total_replicas = 3"),
        (f"{THREE} ha.master_addr=h:1", "ha.master_addr = 'h:1' is of ha.mode"),
        (f"{THREE} ha.ack_replicas=all ha.min_in_sync_replicas=4", "= 4 is more than there are"),
        (f"{THREE} ha.ack_replicas=quorum ha.min_in_sync_replicas=2", '= 2 is for.*"all".*quorum'),
        ("ha.mode=auto broker_id=1 ha.ack_replicas=one", "'one' needs another replica"),
        (f"{THREE} storage.backend=memory", "'memory' has no log for replicas (ha.mode)"),
    ],
)
def test_settings_of_replicas_that_do_not_go_together_are_refused_by_name(overrides, why):
    pattern = ".*".join(re.escape(part) for part in why.split(".*"))
    with pytest.raises(ConfigError, match=pattern):
        load_config(BrokerConfig, overrides=overrides.split())


def test_every_setting_is_explained():
    for kind in (BrokerConfig, type(BrokerConfig().storage)):
        documented = "".join(base.__doc__ or "" for base in kind.__mro__)
        missing = [
            name for name in kind.__struct_fields__ if f"\n        {name}: " not in documented
        ]
        assert missing == []

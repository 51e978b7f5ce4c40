"""The broker's settings."""

from __future__ import annotations

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


def test_every_setting_is_explained():
    for kind in (BrokerConfig, type(BrokerConfig().storage)):
        documented = "".join(base.__doc__ or "" for base in kind.__mro__)
        missing = [
            name for name in kind.__struct_fields__ if f"\n        {name}: " not in documented
        ]
        assert missing == []

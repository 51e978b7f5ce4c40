"""What may be changed while a process runs: never what reaches files, sockets or programs."""

from __future__ import annotations

import re

import pytest

from mqmesh.config import key_names
from mqmesh.roles.broker.config import CHANGEABLE, BrokerConfig
from mqmesh.roles.namesrv.config import CHANGEABLE as OF_NAMESRV
from mqmesh.roles.namesrv.config import NamesrvConfig

# The first rule reads every file, which takes a while on a loaded machine.
pytestmark = pytest.mark.timeout(300)

DENIED = re.compile(
    r"path|dir|file(?!_reserved_time|_forcibly)|host|port|addr|bind|socket|ipc|command|key|backend"
    r"|security|secret|filter_server|coordinator|^ha\.(?!max_ha_transfer)|name"
)
# As in RocketMQ's CVE-2023-33246 and CVE-2023-37582.
PLANTED = [
    "store_path_root_dir",
    "storage.backend",
    "listen_host",
    "namesrv_addr",
    "security.key_file",
    "ha.coordinator",
    "filter_server_enable",
    "broker_name",
]


@pytest.mark.parametrize(
    ("keys", "kind"), [(CHANGEABLE, BrokerConfig), (OF_NAMESRV, NamesrvConfig)]
)
def test_every_key_is_one_of_the_struct_and_none_is_denied(keys, kind):
    assert set(keys) <= set(key_names(kind))
    assert [key for key in keys if DENIED.search(key)] == []


@pytest.mark.parametrize("key", PLANTED)
def test_a_planted_key_is_found(key):
    assert key in key_names(BrokerConfig)
    assert DENIED.search(key)

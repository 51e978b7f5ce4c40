"""Settings of the index process."""

from __future__ import annotations

import pytest

from mqmesh.config import load_config
from mqmesh.errors import ConfigError
from mqmesh.roles.indexer.config import IndexerConfig
from mqmesh.storage.index.config import IndexConfig


def test_only_the_endpoint_must_be_said():
    config = load_config(IndexerConfig, None, None, ["endpoint=ipc:///tmp/x.sock"])
    assert config == IndexerConfig(endpoint="ipc:///tmp/x.sock")
    with pytest.raises(ConfigError, match="endpoint"):
        load_config(IndexerConfig, None, None, [])


@pytest.mark.parametrize(
    "setting",
    [
        "index.live_map_size=1",
        "index.step_bytes=1",
        "index.niceness=20",
        "index.max_open_environments=1",
        "index.max_queries=0",
        "index.query_timeout_ms=1",
        "index.unknown=1",
    ],
)
def test_a_setting_out_of_bounds_is_refused(setting):
    with pytest.raises(ConfigError):
        load_config(IndexerConfig, None, None, ["endpoint=ipc:///tmp/x.sock", setting])


def test_an_index_is_kept_unless_it_is_turned_off():
    assert IndexConfig().enable

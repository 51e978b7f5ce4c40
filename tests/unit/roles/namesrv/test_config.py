"""The name server's settings."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.config import load_config
from mqmesh.errors import ConfigError
from mqmesh.hosts import bindable, is_loopback
from mqmesh.roles.namesrv.config import NamesrvConfig


def test_the_defaults_serve_this_machine_only_at_rocketmqs_port():
    config = NamesrvConfig()
    assert is_loopback(config.listen_host)
    assert (config.listen_port, config.publish_port) == (9876, 0)
    assert (config.broker_expire_ms, config.scan_interval_ms) == (120_000, 10_000)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "*", "example.org", "::"])
def test_strangers_are_kept_out_unless_one_insists(host):
    with pytest.raises(ConfigError, match="allow_insecure_bind"):
        NamesrvConfig(listen_host=host)
    NamesrvConfig(listen_host=host, allow_insecure_bind=True, advertised_host="here")


def test_a_wildcard_needs_an_address_to_announce():
    with pytest.raises(ConfigError, match="advertised_host"):
        NamesrvConfig(listen_host="0.0.0.0", allow_insecure_bind=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_loopback_is_allowed(host):
    NamesrvConfig(listen_host=host)


def test_zeromq_is_given_no_names():
    assert bindable("localhost") == "127.0.0.1"
    assert bindable("127.0.0.2") == "127.0.0.2"


@pytest.mark.parametrize(
    "override",
    [
        "listen_port=65536",
        "broker_expire_ms=999",
        "scan_interval_ms=0",
        "max_brokers=0",
        "max_kv_bytes=1",
        "name=a b",
        "name=",
        "publish_port=9876",
        "nonsense=1",
    ],
)
def test_values_out_of_bounds_are_refused_by_name(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(NamesrvConfig, overrides=[override])


def test_every_setting_has_a_meaning_in_the_docstring():
    for field in msgspec.structs.fields(NamesrvConfig):
        assert f"\n        {field.name}: " in (NamesrvConfig.__doc__ or "")

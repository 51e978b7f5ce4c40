"""Settings that are changed while a process runs."""

from __future__ import annotations

import json

import pytest

from mqmesh.config import key_names
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.protocol.admin import ConfigChange
from mqmesh.roles.broker.config import CHANGEABLE, BrokerConfig
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.roles.namesrv.config import CHANGEABLE as OF_NAMESRV
from mqmesh.roles.namesrv.config import NamesrvConfig

START = BrokerConfig(long_polling_max_ms=20_000)


@pytest.fixture
def live():
    return LiveSettings(START, CHANGEABLE, "broker broker-a")


def put(live, unset=(), **settings):
    plan = live.plan({key.replace("__", "."): value for key, value in settings.items()}, unset)
    live.adopt(plan)
    return plan.changes


def test_what_is_set_holds_until_it_is_unset(live):
    changes = put(live, long_polling_max_ms="5000", storage__delete_when="04;16")
    assert changes == [
        ConfigChange("long_polling_max_ms", "20000", "5000"),
        ConfigChange("storage.delete_when", '"04"', '"04;16"'),
    ]
    assert live.now.long_polling_max_ms == 5_000
    assert live.now.storage.delete_when == "04;16"
    assert put(live, long_polling_max_ms="5000") == []
    assert put(live, unset=["long_polling_max_ms", "busy_poll_us"]) == [
        ConfigChange("long_polling_max_ms", "5000", "20000")
    ]
    assert live.overrides == {"storage.delete_when": "04;16"}


def test_the_entries_tell_all_three_values(live):
    put(live, long_polling_max_ms="5000")
    entries = {one.key: one for one in live.entries()}
    assert list(entries) == key_names(BrokerConfig)
    one = entries["long_polling_max_ms"]
    assert (one.value, one.default, one.at_start) == ("5000", "30000", "20000")
    assert (one.is_overridden, one.is_changeable) == (True, True)
    assert not entries["storage.backend"].is_changeable


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "long_polling_max_ms",
            "99999",
            "broker broker-a: long_polling_max_ms = 99999: must be a whole number of 0 to 30,000",
        ),
        ("log_level", "LOUD", "log_level = 'LOUD': must be one of DEBUG, "),
        ("message_delay_level", "1 fortnight", "message_delay_level"),
        ("storage.backend", "memory", "storage.backend cannot be changed while broker broker-a"),
        ("store_path_root_dir", "/", "store_path_root_dir cannot be changed"),
        ("auto_create", "true", "unknown key auto_create; did you mean auto_create_topic_enable?"),
        ("delete_when", "05", "unknown key delete_when; did you mean storage.delete_when?"),
        ("x", "1", "unknown key x; may be: auto_create"),
        ("storage", "{}", "unknown key storage"),
    ],
)
def test_what_may_not_be_set_is_told_and_nothing_changes(live, key, value, told):
    with pytest.raises(InvalidArgument, match=told.split("(", 1)[0].replace("?", r"\?")):
        live.plan({"busy_poll_us": "1", key: value}, ())
    assert (live.now, live.overrides) == (START, {})


def test_a_key_cannot_be_set_and_unset_at_once(live):
    with pytest.raises(InvalidArgument, match="busy_poll_us is to be set and to be unset"):
        live.plan({"busy_poll_us": "1"}, ["busy_poll_us"])


def test_what_is_kept_comes_back_and_what_is_damaged_changes_nothing(live):
    put(live, storage__file_reserved_time="24")
    document = live.dump(live.overrides)
    again = LiveSettings(START, CHANGEABLE)
    again.load(document)
    assert again.now == live.now
    kept = json.loads(document)
    for wrong in (
        {**kept, "version": 3},
        {**kept, "overrides": {"storage.file_reserved_time": "-1"}},
        {**kept, "overrides": {"store_path_root_dir": "/etc"}},
        {**kept, "overrides": {"store_path_root_dir": 1}},
        {**kept, "more": 1},
        [],
    ):
        fresh = LiveSettings(START, CHANGEABLE)
        with pytest.raises(ConfigError):
            fresh.load(json.dumps(wrong).encode())
        assert (fresh.now, fresh.overrides) == (START, {})


def test_name_servers_have_two(live):
    settings = LiveSettings(NamesrvConfig(), OF_NAMESRV, "name server a")
    assert [one.key for one in settings.entries() if one.is_changeable] == [
        "broker_expire_ms",
        "scan_interval_ms",
    ]

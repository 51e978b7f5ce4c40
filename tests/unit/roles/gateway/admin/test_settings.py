import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.protocol.admin import ConfigEntry
from mqmesh.roles.gateway.admin.settings import (
    encode_properties,
    mqmesh_settings,
    parse_properties,
    rocketmq_settings,
)

ENTRIES = [
    ConfigEntry(key, "1", "1", "1", False, True)
    for key in (
        "cluster_name",
        "transaction_timeout_ms",
        "os_page_cache_busy_timeout_mills",
        "storage.file_reserved_time",
        "security.enable",
        "index.enable",
    )
]


def test_settings_have_rocketmqs_names():
    found = rocketmq_settings({one.key: "1" for one in ENTRIES})
    assert found["brokerClusterName"] == found["fileReservedTime"] == found["index.enable"] == "1"
    assert found["traceTopicEnable"] == "true"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("fileReservedTime", "storage.file_reserved_time"),
        ("storage.file_reserved_time", "storage.file_reserved_time"),
        ("transactionTimeOut", "transaction_timeout_ms"),
        ("osPageCacheBusyTimeOutMills", "os_page_cache_busy_timeout_mills"),
    ],
)
def test_a_change_is_one_of_mqmeshs_setting(name, key):
    assert mqmesh_settings({name: "5"}, ENTRIES) == {key: "5"}


def test_an_unknown_setting_is_refused():
    with pytest.raises(InvalidArgument, match="useEpollNativeSelector"):
        mqmesh_settings({"useEpollNativeSelector": "true"}, ENTRIES)


def test_properties_are_lines():
    assert encode_properties({"a": "x\\y\nz", "b": ""}) == b"a=x\\\\y\\nz\nb=\n"
    assert parse_properties(b"a=1\n b = x=y \n") == {"a": "1", "b": "x=y"}
    for wrong in b"nothing\n", b"=1\n", b"".join(b"%d=1\n" % number for number in range(65)):
        with pytest.raises(InvalidArgument):
            parse_properties(wrong)

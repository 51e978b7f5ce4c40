"""Where the page of a process's health is to be."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError
from mqmesh.roles.health import parse_health_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8086", ("127.0.0.1", 8086)),
        ("0.0.0.0:8086", ("0.0.0.0", 8086)),
        ("[::]:0", ("::", 0)),
        ("localhost:65535", ("localhost", 65_535)),
    ],
)
def test_a_port_is_of_this_machine_and_a_host_may_be_named(text, address):
    assert parse_health_address(text) == address


@pytest.mark.parametrize("text", ["", "x", ":8086", "65536", "a:", "a:b", "-1", "８０"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"--health .*: must be a port"):
        parse_health_address(text)

from __future__ import annotations

import os
from random import SystemRandom

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.sdk.client.options import (
    DEFAULT_NAMESRV,
    ClientOptions,
    born_host,
    client_options,
    new_client_id,
)


@pytest.mark.parametrize(
    "given",
    [
        " a.example:1 ; 10.0.0.7:65535;; [::1]:9876 ",
        "a.example:1,10.0.0.7:65535, [::1]:9876",
        "a.example:1;10.0.0.7:65535,[::1]:9876",
        ["a.example:1", " 10.0.0.7:65535", "[::1]:9876"],
        ("a.example:1", "10.0.0.7:65535", "[::1]:9876"),
    ],
)
def test_addresses_come_as_a_list_or_as_a_text(given) -> None:
    options = ClientOptions(namesrv_addr=given)
    assert options.namesrv_addresses() == ["a.example:1", "10.0.0.7:65535", "[::1]:9876"]


def test_what_is_said_beside_the_options_of_a_connection_goes_first() -> None:
    client = ClientOptions(namesrv_addr="a:1", instance_name="x")
    assert client_options(client, None) == client
    assert client_options(client, ["b:2"]) == ClientOptions(namesrv_addr=["b:2"], instance_name="x")
    assert client_options(None, None).namesrv_addresses() == DEFAULT_NAMESRV.split(";")


@pytest.mark.parametrize(
    "address",
    [
        "",
        ";",
        "host",
        "host:",
        ":9876",
        "host:0",
        "host:65536",
        "host:99999999999",
        "host:x",
        "ho st:1",
        "host:1:2",
        "tcp://host:1",
        "host:1 host:2",
        "höst:1",
        "[::1]",
        "::1:9876",
        "[::x]:9876",
        "[127.0.0.1]:9876",
        "[]:9876",
        [],
        ["a:1", None],
        [["a:1"]],
        b"a:1",
        ["a:1"] * 17,
        None,
        9876,
    ],
)
def test_what_is_no_address_is_refused_before_a_socket_sees_it(address) -> None:
    with pytest.raises(InvalidArgument):
        ClientOptions(namesrv_addr=address).namesrv_addresses()


def test_client_ids_differ_and_name_host_process_and_instance() -> None:
    options = ClientOptions(instance_name="billing")
    ids = {new_client_id(options, SystemRandom()) for _ in range(100)}
    assert len(ids) == 100
    assert all(one.startswith(born_host() + "@billing#") for one in ids)
    assert born_host().endswith(f":{os.getpid()}")

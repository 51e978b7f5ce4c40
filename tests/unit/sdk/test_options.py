from __future__ import annotations

import os

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.sdk.options import DEFAULT_NAMESRV, ClientOptions, born_host, new_client_id


def test_addresses_are_separated_by_semicolons() -> None:
    assert ClientOptions().namesrv_addresses() == DEFAULT_NAMESRV.split(";")
    options = ClientOptions(namesrv_addr=" a.example:1 ; 10.0.0.7:65535;; my-host_2:9876 ")
    assert options.namesrv_addresses() == ["a.example:1", "10.0.0.7:65535", "my-host_2:9876"]


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
        None,
        9876,
    ],
)
def test_what_is_no_address_is_refused_before_a_socket_sees_it(address) -> None:
    with pytest.raises(InvalidArgument):
        ClientOptions(namesrv_addr=address).namesrv_addresses()


def test_client_ids_differ_and_name_host_process_and_instance() -> None:
    options = ClientOptions(instance_name="billing")
    ids = {new_client_id(options) for _ in range(100)}
    assert len(ids) == 100
    assert all(one.startswith(born_host() + "@billing#") for one in ids)
    assert born_host().endswith(f":{os.getpid()}")

"""A role's access list: taken from administrators, its file, and name servers."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from harness.keys import TODAY, credentials, user

from mqmesh.errors import ConfigError, MessageIllegal, RequestTimeout
from mqmesh.protocol.admin import AccessListInfo, GetAccessListRequest, UpdateAccessListRequest
from mqmesh.protocol.command import Command, Principal, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import BrokerAddress, DataVersion, RegisterBrokerResponse
from mqmesh.roles.access_keeper import AccessKeeper, read_access_file
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.namesrv_links import NamesrvLinks
from mqmesh.security.access_list import AccessList, UserRole, write_access_list
from mqmesh.security.guard import Guard
from mqmesh.testing.clock import ManualClock

ADMIN = user(credentials("ann"), UserRole.ADMIN)
NEWER = AccessList(7, [ADMIN, user(credentials("shop"))])


@pytest.fixture
def keeper(tmp_path):
    return AccessKeeper(Guard(AccessList(3, [ADMIN]), lambda: TODAY, tmp_path / "acl.toml"))


def test_a_newer_list_of_a_name_server_is_kept_and_in_force(keeper, tmp_path):
    keeper.catch_up(write_access_list(NEWER))
    assert keeper.version == 7
    assert keeper.take_changes()
    assert not keeper.take_changes()
    assert read_access_file(tmp_path / "acl.toml") == NEWER


@pytest.mark.parametrize("text", ["", write_access_list(AccessList(3, NEWER.user))])
def test_an_older_one_or_none_changes_nothing(keeper, tmp_path, text):
    keeper.catch_up(text)
    assert keeper.version == 3
    assert not keeper.take_changes()
    assert not (tmp_path / "acl.toml").exists()


def test_who_is_behind_takes_what_is_made_of_a_newer_list_and_who_is_ahead_does_not(keeper):
    update = keeper.handlers[RequestCode.UPDATE_ACCESS_LIST]
    request = SimpleNamespace(peer=SimpleNamespace(principal=Principal("ann", "k")))
    update(request, UpdateAccessListRequest(write_access_list(NEWER), 6))
    assert keeper.version == 7
    other = write_access_list(AccessList(8, [ADMIN]))
    with pytest.raises(MessageIllegal, match="is version 7 here, yours is version 8, made from 6"):
        update(request, UpdateAccessListRequest(other, 6))
    assert keeper.version == 7


def test_one_that_is_wrong_changes_nothing(keeper):
    with pytest.raises(ConfigError, match="no enabled user of role admin"):
        keeper.catch_up(write_access_list(AccessList(8, [])))
    assert keeper.version == 3


class NameServer:
    """Plays a connection to a name server that has this list."""

    connected = True
    in_flight = 0

    def __init__(self, told: AccessList | None) -> None:
        self.told = told
        self.asked: list[object] = []

    def connect(self, address, on_connection):
        self.on_connection = on_connection
        return self

    def request(self, code, on_done, *, header, timeout_ms):
        if code == RequestCode.REGISTER_BROKER:
            version = self.told.version if self.told else 9
            answer = RegisterBrokerResponse(access_version=version)
        else:
            self.asked.append(decode_header(GetAccessListRequest, header))
            if self.told is None:
                return on_done(RequestTimeout("planned"))
            answer = AccessListInfo(self.told.version, "", write_access_list(self.told))
        return on_done(Command(0, 0, 0, memoryview(encode_header(answer)), memoryview(b"")))


class Core(msgspec.Struct):
    """As much of a broker's core as registers."""

    config: BrokerConfig


def register(keeper, server) -> None:
    links = NamesrvLinks(
        BrokerConfig(namesrv_addr=["127.0.0.1:1"]),
        BrokerAddress("h:1"),
        1,
        broker_id=0,
        connect=server.connect,
        clock=ManualClock(),
        call_soon=lambda callback: None,
        on_stale=lambda error: None,
        access=keeper,
    )

    class Topics:
        version = DataVersion(1, 1)

    links.follow(Core(BrokerConfig()), Topics())
    server.on_connection(True)


def test_a_broker_that_was_down_catches_up_with_its_first_registration(keeper):
    server = NameServer(NEWER)
    register(keeper, server)
    assert server.asked == [GetAccessListRequest(3)]
    assert keeper.version == 7


def test_a_broker_asks_nobody_who_has_no_newer_one(keeper):
    server = NameServer(AccessList(3, [ADMIN]))
    register(keeper, server)
    assert server.asked == []


def test_a_name_server_that_does_not_tell_is_asked_again_later(keeper, caplog):
    register(keeper, NameServer(None))
    assert keeper.version == 3
    assert "127.0.0.1:1 is not taken: planned" in caplog.text

from types import SimpleNamespace

import pytest

from mqmesh.errors import ConfigError, NoPermission
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.grpc.authorization import sign_date
from mqmesh.roles.gateway.user_backends import IDLE_MS, UserBackends
from mqmesh.roles.gateway.users import ACCESS_KEY, SIGNATURE, GatewayUser, sign
from mqmesh.testing.clock import ManualClock

NAMES = ("shop", "bank", "keyless")
USERS = {
    name: GatewayUser(access_key=name, secret_key=f"secret of {name}", credentials=name)
    for name in NAMES
}


class Backend:
    """A backend that counts."""

    def __init__(self, name: str) -> None:
        self.handlers = {1: name}
        self.sends = SimpleNamespace(messages=3)
        self.given_messages = 5
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


class Users:
    """Backends of three users, one of which has no keys."""

    def __init__(self, anonymous: Backend | None = None) -> None:
        self.clock = ManualClock()
        self.made: list[Backend] = []
        self.backends = UserBackends(USERS, self._make, anonymous, self.clock.monotonic_ms)

    def _make(self, user: GatewayUser) -> Backend:
        if user.access_key == "keyless":
            raise ConfigError("no file")
        self.made.append(Backend(user.access_key))
        return self.made[-1]


def session() -> SimpleNamespace:
    return SimpleNamespace(access_key=None)


def signed(name: str = "") -> RemotingCommand:
    fields = {ACCESS_KEY: name, "topic": "t"} if name else {"topic": "t"}
    if name:
        fields[SIGNATURE] = sign(fields, b"", USERS[name].secret_key.encode()).decode()
    return RemotingCommand(10, fields=fields)


def test_a_user_has_one_backend_for_all_its_connections():
    users = Users()
    one, other = session(), session()
    for connection in one, one, other:
        assert users.backends.admit(connection, signed("shop")) == {1: "shop"}
    assert len(users.made) == 1
    assert users.backends.of(one) is users.made[0]
    assert users.backends.of(session()) is None


def test_calls_by_grpc_have_the_same_backends():
    users = Users()
    connection, date = session(), "20260101T000000Z"

    def called(name: str) -> dict[str, str]:
        signature = sign_date(date, USERS[name].secret_key)
        text = f"MQv2-HMAC-SHA1 Credential={name}, SignedHeaders=x-mq-date-time, Signature="
        return {"authorization": text + signature, "x-mq-date-time": date}

    assert users.backends.admit_call(connection, called("shop")).handlers == {1: "shop"}
    assert users.backends.admit(session(), signed("shop")) == {1: "shop"}
    assert len(users.made) == 1
    with pytest.raises(NoPermission, match="speaks for 'shop'"):
        users.backends.admit_call(connection, called("bank"))
    with pytest.raises(NoPermission, match="not signed"):
        users.backends.admit_call(session(), {})


def test_a_connection_speaks_for_one_user():
    users = Users(Backend("anybody"))
    connection = session()
    users.backends.admit(connection, signed("shop"))
    for request in signed("bank"), signed():
        with pytest.raises(NoPermission, match="speaks for 'shop'"):
            users.backends.admit(connection, request)


def test_an_unsigned_request_needs_leave():
    with pytest.raises(NoPermission, match="not signed"):
        Users().backends.admit(session(), signed())
    anybody = Backend("anybody")
    users = Users(anybody)
    connection = session()
    assert users.backends.admit(connection, signed()) == {1: "anybody"}
    assert users.backends.of(connection) is anybody


def test_a_user_without_keys_is_refused():
    with pytest.raises(NoPermission, match="keys of user 'keyless'"):
        Users().backends.admit(session(), signed("keyless"))


def test_users_that_are_changed_or_gone_are_stopped():
    users = Users()
    for name in "shop", "bank":
        users.backends.admit(session(), signed(name))
    changed = GatewayUser(access_key="bank", secret_key="another one", credentials="bank")
    assert users.backends.put({"shop": USERS["shop"], "bank": changed}) == {"bank", "keyless"}
    assert [one.stopped for one in users.made] == [0, 1]
    with pytest.raises(NoPermission):
        users.backends.admit(session(), signed("bank"))
    assert (users.backends.sent_before, users.backends.given_before) == (3, 5)


def test_a_user_without_a_connection_for_long_has_no_connections_to_brokers():
    users = Users()
    one, other = session(), session()
    users.backends.admit(one, signed("shop"))
    users.backends.admit(other, signed("bank"))
    users.clock.advance(IDLE_MS)
    users.backends.tidy([one])
    assert [made.stopped for made in users.made] == [0, 0]
    users.clock.advance(1)
    users.backends.tidy([one])
    assert [made.stopped for made in users.made] == [0, 1]
    users.backends.stop()
    assert [made.stopped for made in users.made] == [1, 1]

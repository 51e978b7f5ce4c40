import pytest

from mqmesh.errors import ConfigError, NoPermission
from mqmesh.protocol.remoting.frame import RemotingCommand
from mqmesh.roles.gateway.users import ACCESS_KEY, SIGNATURE, find_user, parse_users, sign

TEXT = """
[[user]]
access_key = "rocketmq2"
secret_key = "12345678"
credentials = "/etc/mqmesh/shop.toml"
"""
USERS = parse_users(TEXT, "users.toml")
# Made by AclClientRPCHook of RocketMQ 4.9.8.
BY_JAVA = ({"AccessKey": "rocketmq2", "topic": "größe", "queueId": "3"}, b"body")


def signed(fields: dict[str, str], body: bytes = b"", secret: bytes = b"12345678"):
    both = {**fields, SIGNATURE: sign(fields, body, secret).decode()}
    return RemotingCommand(10, fields=both, body=body)


def test_a_signed_request_is_of_its_user():
    fields = {ACCESS_KEY: "rocketmq2", "topic": "t"}
    found = find_user(signed(fields, b"x"), USERS)
    assert found is USERS["rocketmq2"]
    assert "12345678" not in repr(found)
    late = signed(fields)
    late.fields["_UNIQUE_KEY_QUERY"] = "true"
    assert find_user(late, USERS) is found, "clients add it behind the signature"
    assert find_user(RemotingCommand(10, fields={"topic": "t"}), USERS) is None


@pytest.mark.parametrize(
    "request_",
    [
        RemotingCommand(10, fields={ACCESS_KEY: "rocketmq2"}),
        RemotingCommand(10, fields={ACCESS_KEY: "rocketmq2", SIGNATURE: "größe"}),
        signed({ACCESS_KEY: "rocketmq2"}, secret=b"12345679"),
        signed({ACCESS_KEY: "nobody"}),
        signed({ACCESS_KEY: "nobody"}, secret=b""),
    ],
)
def test_a_wrong_signature_is_refused(request_):
    with pytest.raises(NoPermission, match="not signed by a user"):
        find_user(request_, USERS)


def test_everything_but_the_signature_is_signed():
    command = signed({ACCESS_KEY: "rocketmq2", "topic": "t"}, b"x")
    for other in ({"topic": "u"}, {"queue": "1"}):
        changed = RemotingCommand(10, fields={**command.fields, **other}, body=b"x")
        with pytest.raises(NoPermission):
            find_user(changed, USERS)
    with pytest.raises(NoPermission):
        find_user(RemotingCommand(10, fields=command.fields, body=b"y"), USERS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TEXT + TEXT, "two users"),
        (TEXT.replace("12345678", "short"), "secret_key is no text"),
        (TEXT.replace("secret_key", "secret"), "secret"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text, why):
    with pytest.raises(ConfigError, match=why) as caught:
        parse_users(text, "users.toml")
    assert "short" not in str(caught.value)

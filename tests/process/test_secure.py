"""A cluster that lets nobody in without a key, as people run it."""

from __future__ import annotations

import asyncio
import datetime
import json
import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from harness.commands import CommandProcess, free_ports, run_command, up_arguments
from harness.key_soak import soak
from harness.patience import until

from mqmesh import App, aio
from mqmesh.cli.processes.layout import load_cluster
from mqmesh.cli.processes.secure import make_security
from mqmesh.errors import AuthenticationFailed, EndpointUnreachable, NoPermission, SystemBusy
from mqmesh.message import Message, MessageQueue
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.route import BrokerAddress, DataVersion, RegisterBrokerRequest
from mqmesh.roles.access_keeper import read_access_file, write_access_file
from mqmesh.sdk.admin.access import AccessClient
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.security.access_list import write_access_list
from mqmesh.security.keys import KeyRing, load_credentials
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel

READY_S = 30.0
FAR = datetime.date(2999, 1, 1)
JSON_COMMANDS = [
    ("acl", "show"),
    ("user", "show", "client"),
    ("acl", "check", "client", "PUB", "t"),
    ("user", "enable", "client"),
]


FOLLOWED = """
data_dir = "{folder}"
[[namesrv]]
listen_port = {0}
[security]
enable = true
[ha]
mode = "manual"
[[broker]]
listen_port = {1}
[[broker]]
broker_id = 1
listen_port = {2}
store_path_root_dir = "{folder}/follower"
ha.master_addr = "127.0.0.1:{1}"
security.access_list_file = "{own}"
"""


class Registrar:
    """Speaks to a server, as a broker does to a name server."""

    def __init__(self, address, path, server_key=""):
        self._context = sockets.new_context()
        own = load_credentials(path)
        keys = KeyRing(own, *([server_key] if server_key else own.namesrv_keys))
        self._channel = BlockingChannel(self._context, f"tcp://{address}", ring=keys)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()
        self._context.destroy(linger=0)

    def register(self, broker_name, server_key):
        where = BrokerAddress("127.0.0.1:1", server_key=server_key)
        asked = RegisterBrokerRequest("c", broker_name, 0, where, DataVersion())
        return self.ask(RequestCode.REGISTER_BROKER, asked)

    def ask(self, code, asked):
        return self._channel.request(code, header=encode_header(asked), timeout_ms=60_000)


def fail_always(messages):
    raise ValueError("planned")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Runs `mqmesh up --secure`; returns the name servers and the folder of keys."""
    folder = tmp_path_factory.mktemp("s")
    ports = free_ports(3)
    with CommandProcess(*up_arguments(folder, ports), "--secure") as process:
        process.expect("cluster is ready", READY_S)
        yield f"127.0.0.1:{ports[0]}", folder / "security"


@pytest.fixture
def run(cluster, monkeypatch):
    address, keys = cluster
    monkeypatch.setenv("MQMESH_CREDENTIALS", str(keys / "client.toml"))

    def run(*arguments):
        done = run_command(*arguments, "--namesrv", address)
        return done.code, done.out, done.err

    return run


def test_a_user_sends_what_it_may_until_it_is_disabled(cluster, run, tmp_path):
    address, _ = cluster
    keys = str(tmp_path / "shop.toml")
    code, out, _ = run("user", "add", "shop", "--pub", "orders*", "--create", "orders*", "-o", keys)
    assert (code, out) == (0, [f"user shop is added; its keys are in {keys}"])
    with Producer("shop", namesrv_addr=address, credentials=keys, msg_trace=1) as producer:
        producer.send(Message("orders", b"traced"))
        until(lambda: producer.metrics().number("trace_records_total", "sent") == 1)
    with Producer("shop", namesrv_addr=address, credentials=keys) as producer:
        assert producer.send(Message("orders", b"x")).message_id
        with pytest.raises(NoPermission, match=r"user 'shop' may not PUB topic 'audit'"):
            producer.send(Message("audit", b"x"))
        code, out, _ = run("user", "quota", "shop", "--send-messages", "1")
        assert (code, out) == (0, ["user shop has this quota"])
        burst = [Message("orders", b"x")] * 200
        with pytest.raises(SystemBusy, match=r"user 'shop' may send 1 messages a second") as busy:
            for _ in range(1_000):
                producer.send_batch(burst)
        assert busy.value.retry_after_ms > 0
        assert run("user", "quota", "shop", "--none")[1] == ["user shop has no quota"]
        assert run("user", "disable", "shop")[0] == 0
    with (
        pytest.raises(AuthenticationFailed, match="is user 'shop' in its access list"),
        Producer("shop", namesrv_addr=address, credentials=keys) as producer,
    ):
        producer.send(Message("orders", b"x"))
    code, out, _ = run("acl", "check", "shop", "PUB", "audit")
    assert code == 1
    assert "shop may not PUB topic audit: no such user, or one that is not enabled" in out


def test_an_access_list_that_is_shown_can_be_added_to_and_applied(run, tmp_path):
    keys, file = tmp_path / "tenant.toml", tmp_path / "acl.toml"
    add = ("user", "add", "tenant", "--within", "tenants", "--pub", "tenants%*", "-o", str(keys))
    code, _, (err,) = run(*add)
    assert (code, "there is no [[namespace]] with name = 'tenants'" in err) == (2, True)
    assert not keys.exists(), "a file without a user would be in the way of the next try"
    _, lines, _ = run("acl", "show")
    file.write_text("\n".join([*lines, "[[namespace]]", 'name = "tenants"']))
    assert run("acl", "apply", str(file))[0] == 0
    assert run(*add)[0] == 0
    assert keys.exists()


def test_what_administrators_do_and_who_is_refused_is_written_down(
    cluster, run, tmp_path, monkeypatch
):
    keys = cluster[1]
    own = str(tmp_path / "auditor.toml")
    assert run("user", "add", "auditor", "--role", "view", "-o", own)[0] == 0
    assert run("topic", "create", "audited")[0] == 0
    assert run("broker", "set", "broker-a", "busy_poll_us=150")[0] == 0
    monkeypatch.setenv("MQMESH_CREDENTIALS", own)
    code, _, err = run("topic", "create", "refused")
    assert code == 1
    assert "needs the right admin" in err[-1]
    lines = [json.loads(line) for line in (keys / "audit.jsonl").read_text().splitlines()]
    (made,) = (one for one in lines if one.get("topics") == ["audited"] and one["user"] == "client")
    assert (made["server"], made["result"]) == ("broker broker-a", "SUCCESS")
    (told,) = (one for one in lines if one["command"] == "UPDATE_BROKER_CONFIG")
    assert (told["user"], told["what"]) == ("client", "busy_poll_us: 200 -> 150")
    refused = [one for one in lines if one["user"] == "auditor"]
    assert {one["result"] for one in refused} == {"NO_PERMISSION"}
    assert {one["address"] for one in refused} <= {"unix"} or "127.0.0.1:" in refused[0]["address"]
    assert any(one["command"] == "UPDATE_ACCESS_LIST" for one in lines)


def test_the_list_is_the_same_everywhere_and_an_older_one_is_refused(run, tmp_path):
    code, out, _ = run("acl", "status", "--json")
    (states,) = map(json.loads, out)
    assert code == 0
    assert len({(one["version"], one["digest"]) for one in states}) == 1
    assert len(states) >= 2
    told = [json.loads(run(*words, "--json")[1][0]) for words in JSON_COMMANDS]
    assert told[1]["user"][0] in told[0]["user"]
    assert told[2] == {
        "user": "client",
        "action": "PUB",
        "checks": [{"what": "topic t", "allowed": True, "reason": "role admin"}],
    }
    assert told[3]["done"] == "user client is enabled"
    assert (told[3]["version"], told[3]["failed"]) == (told[0]["version"] + 1, [])
    edited = tmp_path / "acl.toml"
    edited.write_text("\n".join(run("acl", "show")[1]))
    assert run("acl", "apply", str(edited))[0] == 0
    assert run("user", "add", "late", "-o", str(tmp_path / "late.toml"))[0] == 0
    code, _, err = run("acl", "apply", str(tmp_path / "gone.toml"))
    reason = "the access list cannot be read: No such file or directory"
    assert (code, err) == (2, [f"error: {tmp_path / 'gone.toml'}: {reason}"])
    code, _, err = run("acl", "apply", str(edited))
    assert code == 1
    assert "edit again" in err[-1]


def test_what_mqadmin_does_with_access_lists_is_told_to_people_and_programs(run, tmp_path):
    """updateAclConfig, deleteAclConfig, clusterAclConfigVersion."""
    edited = tmp_path / "acl.toml"
    for options in ((), ("--json",)):
        assert run("user", "add", "gone", "-o", str(tmp_path / f"{len(options)}.toml"))[0] == 0
        edited.write_text("\n".join(run("acl", "show")[1]))
        code, applied, _ = run("acl", "apply", str(edited), *options)
        assert code == 0
        code, deleted, _ = run("user", "delete", "gone", "--yes", *options)
        assert code == 0
        code, states, _ = run("acl", "status", *options)
        assert code == 0
        code, users, _ = run("user", "list", *options)
        assert code == 0
        if options:
            applied, deleted, states, users = (
                json.loads(one) for (one,) in (applied, deleted, states, users)
            )
            version = applied["version"]
            assert applied == {
                "done": f"the access list is version {version}",
                "version": version,
                "failed": [],
            }
            assert deleted == {"done": "user gone is deleted", "version": version + 1, "failed": []}
            assert {one["version"] for one in states} == {version + 1}
            names = {one["name"] for one in users}
        else:
            (line,) = applied
            version = int(line.removeprefix("the access list is version "))
            assert deleted == ["user gone is deleted"]
            assert states[0].split() == ["ADDRESS", "VERSION", "DIGEST", "PROBLEM"]
            assert {row.split()[1] for row in states[1:]} == {str(version + 1)}
            names = {row.split()[0] for row in users[1:]}
        assert "client" in names
        assert "gone" not in names
    assert run("user", "delete", "gone", "--yes")[0] == 2


def test_an_export_has_the_access_list_and_no_secret(cluster, run, tmp_path):
    path = tmp_path / "cluster.json"
    assert run("cluster", "export", str(path))[0] == 0
    text = path.read_text(encoding="utf-8")
    access_list = tomllib.loads(json.loads(text)["access_list"])
    assert "client" in {one["name"] for one in access_list["user"]}
    files = [one for one in cluster[1].glob("*.toml") if one.name != "access_list.toml"]
    assert len(files) > 2
    assert not [one for one in files if load_credentials(one).secret_key in text]
    code, out, _ = run("cluster", "import", str(path), "--dry-run", "--json")
    assert (code, json.loads(out[0])["steps"]) == (0, [])


def test_a_broker_that_was_down_takes_the_newer_list_of_a_name_server(tmp_path):
    folder, own = tmp_path / "c", tmp_path / "broker" / "access_list.toml"
    config = load_cluster(None, [f"data_dir={folder}", "security.enable=true"])
    make_security(config)
    shared = folder / "security" / "access_list.toml"
    own.parent.mkdir()
    shutil.copy(shared, own)
    former = read_access_file(shared)
    newer = former.with_user(msgspec.structs.replace(former.find("client"), expires=FAR))
    write_access_file(shared, newer)
    setting = f"broker.0.security.access_list_file={own}"
    with CommandProcess(
        *up_arguments(folder, free_ports(3)), "--secure", "--set", setting
    ) as process:
        process.expect("cluster is ready", READY_S)
        until(lambda: read_access_file(own) == newer)


def test_a_follower_takes_a_new_list_as_its_master_does(tmp_path):
    ports, own = free_ports(3), tmp_path / "follower" / "access_list.toml"
    file, folder = tmp_path / "cluster.toml", tmp_path / "c"
    file.write_text(FOLLOWED.format(*ports, folder=folder, own=own))
    make_security(load_cluster(file))
    own.parent.mkdir()
    shutil.copy(folder / "security" / "access_list.toml", own)
    former = read_access_file(own)
    newer = former.with_user(msgspec.structs.replace(former.find("client"), expires=FAR))
    with CommandProcess("up", "-c", str(file)) as process:
        process.expect("cluster is ready", READY_S)
        keys = str(folder / "security" / "client.toml")
        with AccessClient(f"127.0.0.1:{ports[0]}", credentials=keys) as client:
            assert client.put_access_list(write_access_list(newer), former.version) == []
            assert read_access_file(own) == newer
            assert {one.version for one in client.access_states()} == {newer.version}


def test_a_route_has_the_key_that_a_broker_proves_whatever_it_says(cluster, run, tmp_path):
    address, keys = cluster
    own = tmp_path / "x.toml"
    added = run("user", "add", "x", "--role", "broker", "--broker", "x", "-o", str(own))
    assert added[0] == 0
    claims = load_credentials(keys / "client.toml").public_key
    with Registrar(address, own) as channel:
        channel.register("x", claims)
        with AdminClient(address, credentials=str(own)) as admin:
            (told,) = [one for one in admin.cluster().brokers if one.broker_name == "x"]
        assert told.addresses[0].server_key == load_credentials(own).public_key
        with pytest.raises(NoPermission, match="user 'x' may not speak for broker 'broker-a'"):
            channel.register("broker-a", claims)


def test_a_pull_that_waits_ends_when_its_user_is_disabled(cluster, run, tmp_path):
    address, keys = cluster
    own = tmp_path / "reader.toml"
    assert run("topic", "create", "parked")[0] == 0
    added = run("user", "add", "reader", "--sub", "parked", "--group", "g", "-o", str(own))
    assert added[0] == 0
    with AdminClient(address, credentials=str(keys / "client.toml")) as admin:
        (broker,) = admin.cluster().brokers
        place = broker.addresses[0]
        asked = PullRequest("g", "parked", 0, 0, suspend_timeout_ms=30_000)
        with (
            Registrar(place.tcp, own, place.server_key) as channel,
            ThreadPoolExecutor(1) as pool,
        ):
            waits = pool.submit(channel.ask, RequestCode.PULL_MESSAGE, asked)
            until(lambda: admin.runtime_info()["broker-a"].number("held_pulls"))
            assert run("user", "disable", "reader")[0] == 0
            until(waits.done, patience_s=20)
            # The request broke; one that is asked now does not get in.
            assert isinstance(waits.exception(), EndpointUnreachable | AuthenticationFailed)
            with pytest.raises(AuthenticationFailed, match="is user 'reader' in its access list"):
                channel.ask(RequestCode.PULL_MESSAGE, asked)


def test_members_look_after_their_group_with_the_keys_of_a_context(
    cluster, run, tmp_path, monkeypatch
):
    address, keys = cluster
    own = str(tmp_path / "biller.toml")
    rights = ("--sub", "payments", "--group", "billing")
    assert run("user", "add", "biller", *rights, "-o", own)[0] == 0
    failing = PushConsumer(
        "billing",
        namesrv_addr=address,
        credentials=own,
        max_reconsume_times=0,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
    )
    admin = str(keys / "client.toml")
    with Producer("p", namesrv_addr=address, credentials=admin) as producer:
        sent = producer.send(Message("payments", b"x"))
    failing.subscribe("payments", listener=fail_always)
    with failing, AdminClient(address, credentials=admin) as client:
        until(lambda: client.runtime_info()["broker-a"].number("dead_letters_total") == 1)
    monkeypatch.delenv("MQMESH_CREDENTIALS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    # The file names no name servers that these commands could fall back to.
    added = run_command(
        "context", "add", "own", "--namesrv", address, "--credentials", own, "--use"
    )
    assert added.code == 0

    def told(*arguments):
        done = run_command(*arguments, "--json")
        return done.code, [json.loads(line) for line in (*done.out, *done.err)]

    code, listed = told("dlq", "list", "billing")
    assert code == 0
    assert sent.message_id in str(listed)
    for command in (
        ("dlq", "show", "billing", sent.message_id),
        ("dlq", "resend", "billing", "--all"),
        ("group", "progress", "billing"),
        ("group", "show", "billing"),
        ("group", "reset-offset", "billing", "--topic", "payments", "--to-first", "--dry-run"),
        ("topic", "stats", "payments"),
    ):
        assert told(*command)[0] == 0, command
    for command in (
        ("dlq", "list", "other"),
        ("dlq", "resend", "billing", "--all", "--force", "--target", "topic"),
        ("group", "progress", "other"),
        ("group", "list"),
        ("topic", "stats", "parked"),
    ):
        code, answers = told(*command)
        assert code == 1, (command, answers)
    _, (refusal,) = told("dlq", "list", "other")
    assert "may not SUB group 'other' (no rule" in refusal["error"]


@pytest.fixture(scope="module")
def bystander(cluster, tmp_path_factory):
    """Keys of a user who may send to a topic that exists, and consume nothing."""
    address, keys = cluster
    own = str(tmp_path_factory.mktemp("bystander") / "bystander.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MQMESH_CREDENTIALS", str(keys / "client.toml"))
        for command in (
            ("topic", "create", "seen"),
            ("user", "add", "bystander", "--pub", "seen", "-o", own),
        ):
            assert run_command(*command, "--namesrv", address).code == 0
    return own


NO_RIGHT = "user 'bystander' may not SUB"


@pytest.mark.parametrize("kind", ["pull", "push", "ordered", "assigned", "app"])
def test_a_consumer_without_the_right_does_not_start(cluster, bystander, kind):
    where = {"namesrv_addr": cluster[0], "credentials": bystander}
    if kind in ("pull", "assigned"):
        consumer = PullConsumer("g", **where)
        if kind == "pull":
            consumer.subscribe("seen")
        else:
            consumer.assign([MessageQueue("seen", "broker-a", 0)])
    elif kind == "app":
        consumer = App("a", **where)
        consumer.subscriber("seen", group="g")(lambda_of_bytes)
    else:
        consumer = PushConsumer("g", consume_orderly=kind == "ordered", **where)
        consumer.subscribe("seen", listener=print)
    with pytest.raises(NoPermission, match=NO_RIGHT):
        consumer.start()


def lambda_of_bytes(body: bytes) -> None:
    """Handles nothing."""


def test_a_poll_says_that_the_right_is_missing(cluster, bystander):
    where = {"namesrv_addr": cluster[0], "credentials": bystander}
    with PullConsumer("g", **where) as consumer:
        consumer.subscribe("seen")
        with pytest.raises(NoPermission, match=NO_RIGHT):
            consumer.poll(20_000)

    async def iterate():
        async with aio.PullConsumer("g", **where) as consumer:
            await consumer.subscribe("seen")
            async for _ in consumer:
                pass

    with pytest.raises(NoPermission, match=NO_RIGHT):
        asyncio.run(asyncio.wait_for(iterate(), 20))


def test_a_topic_that_may_not_be_seen_is_reported_as_missing(cluster, bystander, caplog):
    where = {"namesrv_addr": cluster[0], "credentials": bystander}
    consumer = PullConsumer("g", **where)
    consumer.subscribe("hidden")
    with consumer:
        assert "topic hidden is missing: it does not exist, or this client may not see it" in (
            caplog.text
        )


def test_a_user_expires_by_command(run, tmp_path):
    own = str(tmp_path / "guest.toml")
    assert run("user", "add", "guest", "--expires", "2999-01-01", "-o", own)[0] == 0
    assert "2999-01-01" in "".join(run("user", "show", "guest")[1])
    assert run("user", "expire", "guest", "--never")[1] == ["user guest does not expire"]
    assert run("user", "expire", "guest", "2020-01-01")[1] == ["user guest expires on 2020-01-01"]
    code, out, _ = run("acl", "check", "guest", "PUB", "orders")
    assert (code, out) == (
        1,
        ["guest may not PUB topic orders: no such user, or one that is not enabled"],
    )
    assert run("user", "expire", "guest")[0] == 2


def test_nobody_gets_in_without_a_key(cluster, monkeypatch):
    monkeypatch.delenv("MQMESH_CREDENTIALS", raising=False)
    with (
        pytest.raises(AuthenticationFailed, match="wants CURVE; pass credentials"),
        Producer("shop", namesrv_addr=cluster[0]) as producer,
    ):
        producer.send(Message("orders", b"x"))


def test_access_lists_change_and_keys_are_rotated_while_everything_goes_on(short_tmp_path):
    """The short form of scripts/chaos --keys."""
    result = soak(short_tmp_path, seconds=1.0, every_s=0.1)
    assert (result.failures, result.unconsumed) == ([], 0)
    assert result.rotations > 0
    assert result.reloads > result.rotations
    assert len(result.took_ms) > result.reloads

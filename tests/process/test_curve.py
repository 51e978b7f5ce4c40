"""Nobody gets in without a key: real sockets that speak CURVE, and whoever does not."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import zmq
from harness.keys import credentials, guard, ring, user

from mqmesh.errors import AuthenticationFailed, ConfigError, EndpointUnreachable, SystemBusy
from mqmesh.message import Message
from mqmesh.protocol.command import ANYBODY, Command, Reply, encode_frame
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.security.access_list import AccessList, Quota
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel
from mqmesh.transport.zmq.hints import HintSubscriber
from mqmesh.transport.zmq.plain_channel import PlainChannel
from mqmesh.transport.zmq.server import CommandServer
from mqmesh.transport.zmq.transport import ZmqTransport

WHO, HOLD = 1, 2
SERVER = credentials("server")
SHOP = credentials("shop", SERVER)
THIEF = credentials("thief", SERVER)


class Scene:
    """A server that lets the shop in, and tells whoever asks who he is."""

    def __init__(self, wires):
        self.guard = guard(user(SHOP))
        self.wire = wires(ring(SERVER), self.guard)
        self.gone: list[bytes] = []
        self.server = self.wire.closing(
            self.wire.transport.serve(
                {
                    WHO: lambda request: Reply(request.peer.principal.name.encode()),
                    HOLD: lambda _: None,
                },
                self.gone.append,
            )
        )
        self.endpoint = self.server.bind("tcp://127.0.0.1:0")

    def client(self, own, endpoint=None):
        keys = None if own is None else ring(own)
        return self.wire.client(endpoint or self.endpoint, ring=keys)

    def who(self, own, endpoint=None) -> str:
        return bytes(self.wire.ask(self.client(own, endpoint), WHO).header).decode()

    def is_deaf_to(self, socket) -> None:
        """Nothing that a plain socket of ZeroMQ's says becomes a request."""
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.endpoint)
        socket.send(encode_frame(WHO, 1), zmq.NOBLOCK)
        self.wire.turn_for(0.1)
        assert not socket.poll(0)
        assert self.server.requests == 0
        socket.close()


def asked(scene, channel) -> list[Command | AuthenticationFailed]:
    """What a channel is answered, in a thread of its own."""
    outcomes: list[Command | AuthenticationFailed] = []

    def ask() -> None:
        try:
            outcomes.append(channel.request(WHO, timeout_ms=3_000))
        except AuthenticationFailed as error:
            outcomes.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    scene.wire.until(lambda: outcomes)
    thread.join()
    return outcomes


@pytest.fixture
def scene(wires):
    return Scene(wires)


def test_whoever_has_a_key_is_known_by_it(scene):
    assert scene.who(SHOP) == "shop"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (THIEF, "does not accept the key .*; is user 'thief' in its access list and enabled"),
        (credentials("shop", THIEF), "does not have the server key"),
        (None, "wants CURVE; pass credentials"),
    ],
)
def test_whoever_has_none_is_told_so_within_a_second(scene, own, said):
    began = time.monotonic()
    with pytest.raises(AuthenticationFailed, match=said):
        scene.who(own)
    assert time.monotonic() - began < 1
    assert scene.server.requests == 0


@pytest.mark.parametrize("first", ["right", "wrong"])
def test_a_server_whose_key_is_replaced_is_met_by_either(scene, first):
    keys = [SERVER.public_key, THIEF.public_key]
    keys = keys if first == "right" else keys[::-1]
    both = msgspec.structs.replace(SHOP, namesrv_server_key=keys)
    assert scene.who(both) == "shop"
    context = sockets.new_context()
    channel = BlockingChannel(context, scene.endpoint, ring=ring(both))
    (answer,) = asked(scene, channel)
    assert bytes(answer.header) == b"shop"
    channel.close()
    context.destroy(linger=0)


def test_a_server_that_has_neither_of_two_keys_is_told_within_a_second(scene):
    others = [THIEF.public_key, credentials("other").public_key]
    began = time.monotonic()
    with pytest.raises(AuthenticationFailed, match=r"server key \S+ or \S+, or speaks no CURVE"):
        scene.who(msgspec.structs.replace(SHOP, namesrv_server_key=others))
    assert time.monotonic() - began < 1


def test_who_learns_the_right_key_after_a_refusal_tries_it_at_once(scene):
    keys = ring(credentials("shop", THIEF))
    scene.guard.put(AccessList(2, [user(keys.own)]))
    client = scene.wire.client(scene.endpoint, ring=keys)
    with pytest.raises(AuthenticationFailed, match="does not have the server key"):
        scene.wire.ask(client, WHO)
    keys.learn(scene.endpoint, SERVER.public_key)
    assert bytes(scene.wire.ask(client, WHO).header) == b"shop"


def test_a_secured_client_does_not_talk_to_a_plain_server(wire, scene):
    server, endpoint = wire.server({WHO: lambda request: Reply()})
    client = wire.client(endpoint, ring=ring(SHOP))
    with pytest.raises(AuthenticationFailed, match="speaks no CURVE"):
        wire.ask(client, WHO)
    assert server.requests == 0


def test_a_request_after_the_refusal_is_refused_at_once(scene):
    client = scene.client(THIEF)
    for _ in range(2):
        with pytest.raises(AuthenticationFailed):
            scene.wire.ask(client, WHO)


def test_a_refused_client_tries_again_by_itself(scene, monkeypatch):
    monkeypatch.setattr("mqmesh.transport.zmq.client.TRY_AGAIN_MS", 50)
    client = scene.client(THIEF)
    with pytest.raises(AuthenticationFailed):
        scene.wire.ask(client, WHO)
    scene.guard.put(AccessList(2, [user(THIEF)]))
    scene.wire.until(lambda: client.connected)
    assert bytes(scene.wire.ask(client, WHO).header) == b"thief"


def test_a_local_client_is_held_to_the_rights_of_its_user(scene, short_tmp_path):
    local = scene.server.bind(f"ipc://{short_tmp_path}/s")
    assert scene.who(SHOP, local) == "shop"
    with pytest.raises(AuthenticationFailed, match="does not accept the key"):
        scene.who(THIEF, local)
    with pytest.raises(AuthenticationFailed, match="pass credentials"):
        scene.who(None, local)


def test_the_order_of_binds_opens_nothing(wires, short_tmp_path):
    scene = Scene(wires)
    scene.server.bind(f"ipc://{short_tmp_path}/s")
    for endpoint in (scene.endpoint, scene.server.bind("tcp://127.0.0.1:0")):
        with pytest.raises(AuthenticationFailed, match="wants CURVE"):
            scene.who(None, endpoint)
        with pytest.raises(AuthenticationFailed, match="does not accept"):
            scene.who(THIEF, endpoint)


def test_who_is_disabled_loses_the_connection_and_what_waits(scene):
    client = scene.client(SHOP)
    scene.wire.ask(client, WHO)
    parked = []
    client.request(HOLD, parked.append, timeout_ms=60_000)
    scene.wire.until(lambda: scene.server.requests == 2)
    scene.guard.put(AccessList(2, []))
    scene.server.review()
    took = scene.wire.until(lambda: parked)
    assert isinstance(parked[0], EndpointUnreachable)
    assert took < 2
    assert len(scene.gone) == 1
    with pytest.raises(AuthenticationFailed):
        scene.wire.ask(client, WHO)


def test_who_stays_in_the_list_stays_connected(scene):
    client = scene.client(SHOP)
    scene.wire.ask(client, WHO)
    scene.guard.put(AccessList(2, [user(SHOP, expires=None), user(THIEF)]))
    scene.server.review()
    assert bytes(scene.wire.ask(client, WHO).header) == b"shop"
    assert scene.server.peer_count == 1


def test_a_user_with_a_quota_of_connections_has_no_more(scene):
    scene.guard.put(AccessList(2, [user(SHOP, quota=Quota(connections=1))]))
    first, second = scene.client(SHOP), scene.client(SHOP)
    assert bytes(scene.wire.ask(first, WHO).header) == b"shop"
    for _ in range(2):
        with pytest.raises(SystemBusy, match=r"1 connections .*quota\.connections"):
            scene.wire.ask(second, WHO)
    assert bytes(scene.wire.ask(first, WHO).header) == b"shop"
    first.close()
    scene.wire.until(lambda: scene.server.peer_count == 0)
    assert bytes(scene.wire.ask(second, WHO).header) == b"shop"


def test_who_was_let_in_and_disabled_before_his_first_word_is_not_served(scene):
    client = scene.client(SHOP)
    scene.wire.until(lambda: client.connected)
    scene.guard.put(AccessList(2, []))
    with pytest.raises((EndpointUnreachable, AuthenticationFailed)):
        scene.wire.ask(client, WHO)
    assert scene.server.requests == 0


# ---- The four ways in which CURVE fails open -----------------------------------------


def test_without_an_authenticator_nobody_gets_in(wire):
    """A context in which nobody answers ZAP lets in every key, but for ZAP_ENFORCE_DOMAIN."""
    server = wire.closing(
        CommandServer(
            wire.context, wire.loop, {WHO: lambda request: Reply()}, own=SERVER, guard=guard()
        )
    )
    client = wire.client(server.bind("tcp://127.0.0.1:0"), ring=ring(SHOP))
    with pytest.raises((EndpointUnreachable, AuthenticationFailed)):
        wire.ask(client, WHO, timeout_ms=500)
    assert server.requests == 0


def test_when_the_authenticator_has_ended_nobody_gets_in(scene):
    scene.wire.transport._zap.close()
    with pytest.raises((EndpointUnreachable, AuthenticationFailed)):
        scene.wire.ask(scene.client(SHOP), WHO, timeout_ms=500)
    assert scene.server.requests == 0


def test_options_are_set_before_bind(scene):
    """A plain socket of ZeroMQ's gets nothing in, of any kind, by any endpoint."""
    with zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.REQ):
            scene.is_deaf_to(context.socket(kind))


def test_a_plain_channel_learns_that_keys_are_wanted_and_gets_nothing(scene, short_tmp_path):
    for endpoint in (scene.endpoint, scene.server.bind(f"ipc://{short_tmp_path}/s")):
        channel = scene.wire.closing(PlainChannel(endpoint))
        (refused,) = asked(scene, channel)
        assert "wants CURVE; pass credentials" in str(refused)
    assert scene.server.requests == 0


def test_a_transport_with_keys_makes_nothing_plain(scene):
    assert isinstance(scene.server, CommandServer)
    channel = scene.wire.closing(scene.wire.transport.channel(scene.endpoint))
    assert isinstance(channel, BlockingChannel)


def test_a_plain_socket_asks_too_who_may_connect(wires, short_tmp_path, monkeypatch):
    """Without a domain a Unix socket never asks ZAP; here it does: another user is refused."""
    scene = Scene(wires)
    local = scene.server.bind(f"ipc://{short_tmp_path}/s")
    monkeypatch.setattr("mqmesh.transport.zmq.zap.os.geteuid", lambda: 4_000_000)
    monkeypatch.setattr("mqmesh.transport.zmq.zap.ROOT", 4_000_001)
    with pytest.raises(AuthenticationFailed, match="does not accept"):
        scene.who(SHOP, local)


def test_a_transport_with_keys_and_no_access_list_serves_nobody():
    transport = ZmqTransport(ring(SERVER))
    with pytest.raises(ConfigError, match="access list"):
        transport.serve({})
    with pytest.raises(ConfigError, match="access list"):
        transport.publish()
    transport.close()


def test_an_access_list_without_keys_is_refused():
    with pytest.raises(ConfigError, match="needs keys"):
        ZmqTransport(None, guard())


def test_keys_that_do_not_belong_together_are_refused():
    mixed = msgspec.structs.replace(SHOP, secret_key=THIEF.secret_key)
    with pytest.raises(ConfigError, match="is not that of public_key"):
        ZmqTransport(ring(mixed))


# ---- Clients -------------------------------------------------------------------------


def test_a_client_of_two_name_servers_that_refuse_it_leaves_them_alone(scene, wires):
    twin = Scene(wires)
    addresses = [one.endpoint.removeprefix("tcp://") for one in (scene, twin)]
    running = [threading.Thread(target=one.wire.loop.run) for one in (scene, twin)]
    for thread in running:
        thread.start()
    producer = Producer("thief", namesrv_addr=addresses, credentials=THIEF)
    consumer = PushConsumer("thief", namesrv_addr=addresses, credentials=THIEF)
    consumer.subscribe("t", listener=lambda _: None)
    producer.start()
    for act in (*[lambda: producer.send(Message("t", b"x"))] * 50, consumer.start):
        began = time.monotonic()
        with pytest.raises(AuthenticationFailed, match="is user 'thief' in its access list"):
            act()
        assert time.monotonic() - began < 1
    producer.close()
    assert consumer.closed
    for one, thread in zip((scene, twin), running, strict=True):
        one.wire.loop.stop()
        thread.join()
    # Two clients at two name servers, and perhaps once more, after TRY_AGAIN_MS.
    refused = [one.wire.transport.guard.refused_connections for one in (scene, twin)]
    assert 2 <= sum(refused) <= 8


# ---- Channels and hints --------------------------------------------------------------


def test_a_channel_is_refused_within_a_second_and_tries_again(scene, monkeypatch):
    monkeypatch.setattr("mqmesh.transport.zmq.channel.TRY_AGAIN_MS", 50)
    context = sockets.new_context()
    channel = BlockingChannel(context, scene.endpoint, ring=ring(THIEF))
    began = time.monotonic()
    (refused,) = asked(scene, channel)
    assert isinstance(refused, AuthenticationFailed)
    assert time.monotonic() - began < 1
    scene.guard.put(AccessList(2, [user(THIEF)]))
    scene.wire.turn_for(0.1)
    (answer,) = asked(scene, channel)
    assert bytes(answer.header) == b"thief"
    channel.close()
    context.destroy(linger=0)


def test_hints_are_for_users_until_they_are_disabled(scene):
    publisher = scene.wire.closing(scene.wire.transport.publish())
    endpoint = publisher.bind("tcp://127.0.0.1:0")
    heard: dict[str, list[bytes]] = {"shop": [], "thief": [], "nobody": []}
    joined: list[str] = []
    for name, keys in (("shop", ring(SHOP)), ("thief", ring(THIEF)), ("nobody", None)):
        scene.wire.closing(
            HintSubscriber(
                scene.wire.context,
                scene.wire.loop,
                endpoint,
                on_hint=heard[name].append,
                on_connected=lambda name=name: joined.append(name),
                ring=keys,
            )
        )
    scene.wire.until(lambda: joined)
    scene.wire.turn_for(0.2)
    publisher.publish(b"news")
    scene.wire.until(lambda: heard["shop"])
    scene.guard.put(AccessList(2, []))
    publisher.review()
    scene.wire.turn_for(0.3)
    publisher.publish(b"more")
    scene.wire.turn_for(0.1)
    assert heard == {"shop": [b"news"], "thief": [], "nobody": []}
    assert joined == ["shop"]


def test_without_security_everybody_is_anybody(wire):
    seen = []

    def handle(request):
        seen.append(request.peer.principal)
        return Reply()

    _, endpoint = wire.server({WHO: handle})
    wire.ask(wire.client(endpoint), WHO)
    assert seen == [ANYBODY]

"""Changes at name servers, which know nothing of each other."""

from __future__ import annotations

import pytest

from mqmesh.errors import AuthenticationFailed, RequestTimeout, SystemBusy
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import KvRequest, KvResponse, WipeWritePermRequest, WipeWritePermResponse
from mqmesh.sdk.admin.namesrv_admin import Draining, NamesrvAdmin, NamesrvChange

ONE, TWO = "tcp://ns-1:1", "tcp://ns-2:2"


class Network:
    """The client's transport: what each name server answers, and what it was asked."""

    ring = None

    def __init__(self):
        self.answers = {ONE: b"", TWO: b""}
        self.asked = []

    def channel(self, endpoint):
        network = self

        class Channel:
            def request(self, code, *, header, timeout_ms):
                network.asked.append((endpoint, code, bytes(header)))
                answer = network.answers[endpoint]
                if isinstance(answer, Exception):
                    raise answer
                encoded = answer if isinstance(answer, bytes) else encode_header(answer)
                return Command(0, 1, 1, memoryview(encoded), memoryview(b""))

            def close(self):
                pass

        return Channel()

    def close(self):
        pass


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def admin(network):
    with NamesrvAdmin("ns-1:1,ns-2:2", transport=network) as admin:
        yield admin


def test_a_value_goes_to_every_name_server(network, admin):
    assert admin.put_kv("shop", "currency", "EUR") == NamesrvChange(["ns-1:1", "ns-2:2"], [])
    assert [(endpoint, code) for endpoint, code, _ in network.asked] == [
        (ONE, RequestCode.PUT_KV_CONFIG),
        (TWO, RequestCode.PUT_KV_CONFIG),
    ]
    assert decode_header(KvRequest, network.asked[1][2]) == KvRequest("shop", "currency", "EUR")


def test_who_was_silent_is_told(network, admin):
    network.answers[ONE] = RequestTimeout("silent")
    assert admin.delete_kv("shop", "currency") == NamesrvChange(["ns-2:2"], ["ns-1:1"])
    network.answers[TWO] = RequestTimeout("silent")
    with pytest.raises(RequestTimeout, match=r"no name server answers \(silent; silent\)"):
        admin.delete_kv("shop", "currency")


def test_a_key_that_is_wanted_is_the_reason_for_silence(network, admin):
    network.answers[ONE] = AuthenticationFailed("wants CURVE")
    network.answers[TWO] = RequestTimeout("silent")
    for ask in (admin.delete_kv, admin.has_kv):
        with pytest.raises(AuthenticationFailed, match="wants CURVE"):
            ask("shop", "currency")


def test_a_refusal_says_whose_it_is_and_who_has_the_change(network, admin):
    network.answers[TWO] = SystemBusy("no room")
    with pytest.raises(SystemBusy, match=r"ns-2:2: no room \(done already at ns-1:1\)"):
        admin.put_kv("shop", "currency", "EUR")


def test_values_are_read_from_the_first_that_answers(network, admin):
    network.answers[ONE] = RequestTimeout("silent")
    network.answers[TWO] = KvResponse({"currency": "EUR"}, ["shop", "a"])
    assert admin.get_kv("shop", "currency") == "EUR"
    assert admin.list_kv("shop") == {"currency": "EUR"}
    assert admin.kv_namespaces() == ["a", "shop"]


@pytest.mark.parametrize("restore", [False, True])
def test_draining_tells_how_many_topics_it_concerns(network, admin, restore):
    network.answers = {ONE: WipeWritePermResponse(3), TWO: WipeWritePermResponse(4)}
    done = (admin.undrain if restore else admin.drain)("broker-a")
    assert done == Draining(["ns-1:1", "ns-2:2"], [], 4)
    asked = decode_header(WipeWritePermRequest, network.asked[0][2])
    assert asked == WipeWritePermRequest("broker-a", restore)

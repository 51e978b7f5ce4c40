import ssl

import pytest
from harness.certificates import make_certificate

from mqmesh.certificates import ServerCertificate
from mqmesh.transport.tls_streams import (
    HANDSHAKE_MS,
    MAX_HANDSHAKE_BYTES,
    MOST_HANDSHAKES,
    GuardedStream,
    TlsGate,
)


class Below:
    """The connection below a stream."""

    def __init__(self) -> None:
        self.peer = "10.0.0.1:1"
        self.waiting_bytes = 0
        self.is_closed = self.is_paused = False
        self.sent = b""

    def start(self, handler) -> None:
        pass

    def write(self, *parts) -> None:
        self.sent += b"".join(parts)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.is_closed = True


class Later:
    """A loop whose timers a test runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, object]] = []

    def call_later(self, delay_ms: int, callback) -> None:
        self.calls.append((delay_ms, callback))

    def run(self, delay_ms: int) -> None:
        due = [one for one in self.calls if one[0] <= delay_ms]
        self.calls = [one for one in self.calls if one[0] > delay_ms]
        for _, callback in due:
            callback()


class Owner:
    """The owner of a stream: what it got."""

    def __init__(self) -> None:
        self.got = b""
        self.closed = 0
        self.stuck = []

    def on_bytes(self, data: bytes) -> None:
        self.got += data

    def on_stuck(self) -> None:
        self.stuck.append(True)

    def on_drained(self) -> None:
        self.stuck.append(False)

    def on_closed(self) -> None:
        self.closed += 1


class Client:
    """A client of TLS, in memory."""

    def __init__(self, below: Below, stream: GuardedStream, cert_file: str) -> None:
        self._below, self._stream = below, stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=cert_file)
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    def swap(self, size: int = 7) -> None:
        """Sends what there is in small pieces, and takes what came."""
        data = self._outgoing.read()
        for start in range(0, len(data), size):
            self._stream.on_bytes(data[start : start + size])
        self._incoming.write(self._below.sent)
        self._below.sent = b""

    def shake_hands(self) -> None:
        for _ in range(5):
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.swap()
            else:
                self.swap()
                return
        raise AssertionError("no handshake")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def certificate(files):
    return ServerCertificate(files["tls_cert_file"], files["tls_key_file"])


class Scene:
    """A stream with both of its ends."""

    def __init__(self, gate: TlsGate) -> None:
        self.below, self.loop, self.owner = Below(), Later(), Owner()
        accepted = []
        gate.guard(self.loop, accepted.append)(self.below)
        (self.stream,) = accepted
        self.stream.start(self.owner)


@pytest.fixture
def gate(certificate):
    return TlsGate(certificate, only_tls=False)


def test_tls_is_known_by_its_first_byte_and_goes_both_ways(gate, files):
    scene = Scene(gate)
    client = Client(scene.below, scene.stream, files["tls_cert_file"])
    client.shake_hands()
    assert gate.handshakes == 0
    client.tls.write(b"x" * 40_000)
    client.swap(10_000)
    assert scene.owner.got == b"x" * 40_000
    scene.stream.write(b"y" * 10_000, memoryview(b"z" * 90_000))
    client.swap()
    answer = b""
    while len(answer) < 100_000:
        answer += client.tls.read(100_000)
    assert answer == b"y" * 10_000 + b"z" * 90_000
    scene.stream.close()
    client.swap()
    assert client.tls.read(1) == b"", "the end is said"
    assert scene.below.is_closed
    assert scene.owner.closed == 0


def test_plain_text_passes_as_it_is(gate):
    scene = Scene(gate)
    for piece in b"\0", b"\0\0\x05":
        scene.stream.on_bytes(piece)
    scene.stream.write(b"answer")
    scene.stream.on_stuck()
    scene.stream.on_drained()
    assert scene.owner.got == b"\0\0\0\x05"
    assert scene.below.sent == b"answer"
    assert scene.owner.stuck == [True, False]
    scene.stream.on_closed()
    assert scene.owner.closed == 1


def test_plain_text_may_be_refused(certificate):
    gate = TlsGate(certificate, only_tls=True)
    plain, silent = Scene(gate), Scene(gate)
    plain.stream.on_bytes(b"\0\0\0\x05")
    silent.loop.run(HANDSHAKE_MS)
    for scene in plain, silent:
        assert (scene.below.is_closed, scene.owner.closed, scene.owner.got) == (True, 1, b"")
    assert gate.refused == 2


def test_what_a_paused_owner_does_not_take_waits(gate, files):
    scene = Scene(gate)
    client = Client(scene.below, scene.stream, files["tls_cert_file"])
    client.shake_hands()
    scene.stream.pause()
    client.tls.write(b"later")
    client.swap()
    assert scene.owner.got == b""
    scene.stream.resume()
    scene.loop.run(0)
    assert scene.owner.got == b"later"
    assert not scene.below.is_paused


@pytest.mark.parametrize("data", [b"\x16\x03\x01\xff\xff" + b"x" * 100, b"\x16GET / HTTP/1.1\r\n"])
def test_a_broken_handshake_ends_the_connection(gate, data):
    scene = Scene(gate)
    scene.stream.on_bytes(data)
    if not scene.below.is_closed:  # it may wait for the rest of its record
        scene.stream.on_bytes(b"x" * MAX_HANDSHAKE_BYTES)
    assert scene.below.is_closed
    assert (scene.owner.closed, gate.handshakes, gate.refused) == (1, 0, 1)


def test_handshakes_are_bounded_in_time_and_count(gate):
    scenes = [Scene(gate) for _ in range(MOST_HANDSHAKES + 1)]
    for scene in scenes:
        scene.stream.on_bytes(b"\x16\x03\x01")
    assert [scene.below.is_closed for scene in scenes].count(True) == 1
    assert gate.handshakes == MOST_HANDSHAKES
    scenes[0].stream.on_closed()
    assert gate.handshakes == MOST_HANDSHAKES - 1
    scenes[1].loop.run(HANDSHAKE_MS)
    assert (scenes[1].below.is_closed, scenes[1].owner.closed) == (True, 1)
    assert gate.handshakes == MOST_HANDSHAKES - 2


def test_a_stream_that_breaks_tls_ends(gate, files):
    scene = Scene(gate)
    client = Client(scene.below, scene.stream, files["tls_cert_file"])
    client.shake_hands()
    scene.stream.on_bytes(b"\x17\x03\x03\x00\x20" + b"0" * 32)
    assert scene.below.is_closed
    assert scene.owner.closed == 1


def test_a_renewed_certificate_is_taken_and_a_broken_one_not(tmp_path):
    files = make_certificate(tmp_path)
    certificate = ServerCertificate(files["tls_cert_file"], files["tls_key_file"])
    first = certificate.context
    certificate.look()
    assert certificate.context is first
    (tmp_path / "cert.pem").write_text("none")
    certificate.look()
    assert certificate.context is first
    make_certificate(tmp_path)
    certificate.look()
    assert certificate.context is not first

"""The page by HTTP."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from harness.certificates import make_certificate

from mqmesh.cli.processes.cluster import _ping
from mqmesh.errors import ConfigError, RequestTimeout
from mqmesh.metrics import MetricKind
from mqmesh.roles.exporter.config import ExporterConfig
from mqmesh.roles.exporter.families import ExportedMetric, Families, Series
from mqmesh.roles.exporter.run_files import processes_beside
from mqmesh.roles.exporter.server import LATELY_MS, MOST_CONNECTIONS, ExporterServer, NamesrvHealth
from mqmesh.roles.supervisor.run_file import RoleEntry, RunRecord, write_record
from mqmesh.testing.clock import ManualClock


class Counting:
    """Tells how often it was asked."""

    def __init__(self):
        self.asked = 0

    def collect(self):
        self.asked += 1
        return Families(
            [Series(ExportedMetric("asked", MetricKind.GAUGE, "h", ()), (), self.asked)]
        )

    def close(self):
        pass


class Names:
    """Name servers that answer, or do not."""

    def __init__(self):
        self.asked = 0
        self.is_gone = False

    def ask(self):
        self.asked += 1
        if self.is_gone:
            raise RequestTimeout("no answer")


@pytest.fixture
def names():
    return Names()


@pytest.fixture
def exporter(names):
    clock = ManualClock()
    config = ExporterConfig(listen_port=0, min_interval_ms=1_000)
    server = ExporterServer(config, clock, Counting(), names.ask)
    yield server.start(), clock
    server.stop()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Settings with a certificate for 127.0.0.1 that vouches for itself."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def encrypted(certificate, names):
    config = ExporterConfig(listen_port=0, listen_host="0.0.0.0", **certificate)
    server = ExporterServer(config, ManualClock(), Counting(), names.ask)
    yield server.start().replace("0.0.0.0", "127.0.0.1")
    server.stop()


def port_of(url):
    return int(url.rpartition(":")[2].partition("/")[0])


def get(url, cafile=None):
    context = ssl.create_default_context(cafile=cafile)
    with urlopen(url, timeout=10, context=context) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_who_asks_often_gets_the_same_page(exporter):
    url, clock = exporter
    kind, text = get(url)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b"\nasked 1.0\n" in text
    clock.advance(999)
    assert get(url)[1] == text
    clock.advance(1)
    assert b"\nasked 2.0\n" in get(url)[1]


def test_processes_that_name_servers_do_not_know_are_found_by_the_run_file(tmp_path):
    roles = [
        RoleEntry(role="broker", name="broker-a", endpoint="tcp://127.0.0.1:1"),
        RoleEntry(role="schedule", name="schedule-broker-a", endpoint="ipc:///s", server_key="k"),
        RoleEntry(role="filtersrv", name="f"),
        RoleEntry(role="broker", name="broker-b", endpoint="tcp://127.0.0.1:2", state="stopped"),
        RoleEntry(role="exporter", name="exporter", endpoint="tcp://127.0.0.1:3"),
    ]
    write_record(tmp_path, RunRecord(pid=1, started_ms=1, namesrv="", roles=roles))
    assert processes_beside(str(tmp_path)) == roles[:2]
    assert processes_beside("") == []


def test_it_says_how_it_is_and_nothing_else(exporter):
    url, _ = exporter
    root = url.removesuffix("/metrics")
    info = json.loads(get(f"{root}/healthz")[1])
    assert (info["role"], info["state"]) == ("exporter", "running")
    assert info["namesrv_answers"] is True
    with pytest.raises(HTTPError, match="404"):
        get(f"{root}/../etc/passwd")


def test_connections_that_say_nothing_do_not_pile_up(exporter):
    url, _ = exporter
    port = port_of(url)
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        extra = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        extra.settimeout(10)
        assert extra.recv(1) == b"", "one too many"
        one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert one.makefile("rb").readline().startswith(b"HTTP/1.0 200")


def test_with_a_certificate_the_page_comes_by_https(encrypted, certificate):
    assert encrypted.startswith("https://")
    assert b"\nasked 1.0\n" in get(encrypted, certificate["tls_cert_file"])[1]
    with pytest.raises(OSError):
        get(encrypted.replace("https", "http"))


def test_a_client_without_a_word_of_tls_holds_up_nobody(encrypted, certificate):
    with socket.create_connection(("127.0.0.1", port_of(encrypted))):
        assert b"asked" in get(encrypted, certificate["tls_cert_file"])[1]


def test_tls_before_1_2_is_refused(encrypted, certificate):
    old = ssl.create_default_context(cafile=certificate["tls_cert_file"])
    old.set_ciphers("DEFAULT:@SECLEVEL=0")  # or it would not even try
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", port_of(encrypted))) as plain,
        pytest.raises(ssl.SSLError, match=r"(?i)alert.protocol.version"),
    ):
        old.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.mark.parametrize("fixture", ["exporter", "encrypted"])
def test_status_asks_it_with_tls_and_without(fixture, names, request):
    made = request.getfixturevalue(fixture)
    url = made if isinstance(made, str) else made[0]
    names.is_gone = True
    info = _ping("", url, "")
    assert (info.role, info.state) == ("exporter", "running"), "it lives, whoever else does not"


def test_a_certificate_needs_a_key_and_allows_to_listen_elsewhere():
    with pytest.raises(ConfigError, match="tls_cert_file needs tls_key_file, too"):
        ExporterConfig(tls_cert_file="c")
    with pytest.raises(ConfigError, match="tls_key_file needs tls_cert_file, too"):
        ExporterConfig(tls_key_file="k")
    with pytest.raises(ConfigError, match="set tls_cert_file and tls_key_file"):
        ExporterConfig(listen_host="0.0.0.0")


def test_files_that_are_no_certificate_and_key_are_told_at_the_start(certificate, tmp_path):
    def start(**settings):
        ExporterServer(ExporterConfig(**(certificate | settings)), ManualClock(), Counting())

    with pytest.raises(ConfigError, match=r"tls_key_file .*nowhere: No such file"):
        start(tls_key_file=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"tls_cert_file .* are no certificate and its key"):
        start(tls_key_file=certificate["tls_cert_file"])
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run([*command, "-in", certificate["tls_key_file"]], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="without a passphrase"):
        start(tls_key_file=str(locked))


def test_without_a_name_server_it_is_not_healthy(exporter, names):
    url, clock = exporter
    where = url.replace("/metrics", "/healthz")
    assert json.loads(get(where)[1])["namesrv_answers"] is True
    names.is_gone = True
    clock.advance(LATELY_MS)
    assert json.loads(get(where)[1])["namesrv_answers"] is True, "one answered lately"
    assert names.asked == 1
    clock.advance(1)
    with pytest.raises(HTTPError, match="503") as refused:
        get(where)
    told = json.loads(refused.value.read())
    assert (told["state"], told["namesrv_answers"]) == ("running", False)


def test_a_name_server_that_hangs_holds_a_question_for_health_up_for_a_while_only():
    answer, asked = threading.Event(), []

    def ask():
        asked.append(1)
        assert answer.wait(10)

    health = NamesrvHealth(ask, ManualClock(), wait_ms=1)
    try:
        assert not health.answers()
        assert not health.answers()
    finally:
        answer.set()
        health.close()
    assert health.answers(), "the late answer counts"
    assert len(asked) == 1, "one question at a time"


def ask(url, method, path):
    """Status, headers and body."""
    with closing(HTTPConnection("127.0.0.1", port_of(url), timeout=10)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/elsewhere"])
def test_head_says_what_get_would_and_sends_no_body(exporter, path):
    url, _ = exporter
    status, headers, body = ask(url, "GET", path)
    assert int(headers["Content-Length"]) == len(body) > 0
    assert ask(url, "HEAD", path)[0] == status
    assert ask(url, "HEAD", path)[1]["Content-Type"] == headers["Content-Type"]
    assert ask(url, "HEAD", path)[2] == b""


@pytest.mark.parametrize(
    "method", ["CONNECT", "DELETE", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"]
)
def test_nothing_can_be_changed(exporter, method):
    status, headers, body = ask(exporter[0], method, "/metrics")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert body.decode() == f"{method} is not possible here: GET /metrics or /healthz.\n"


def test_a_port_that_is_taken_is_named_with_the_setting(exporter):
    port = port_of(exporter[0])
    server = ExporterServer(ExporterConfig(listen_port=port), ManualClock(), Counting())
    try:
        with pytest.raises(ConfigError) as refused:
            server.start()
    finally:
        server.stop()
    assert str(refused.value) == (
        f"cannot listen at 127.0.0.1:{port}: Address already in use; set listen_port to another"
    )


def test_an_address_of_another_machine_is_named_with_the_setting():
    config = ExporterConfig(listen_host="192.0.2.1", allow_insecure_bind=True)
    server = ExporterServer(config, ManualClock(), Counting())
    try:
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1:5557: .*; set listen_host to another"):
            server.start()
    finally:
        server.stop()

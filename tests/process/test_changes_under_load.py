"""Brokers are drained, and given other settings, while producers send without a pause."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from harness.commands import CommandProcess, free_ports
from harness.patience import until
from harness.stopwatch import Stopwatch

from mqmesh.cli import main
from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster, RoleProcess

A, B = BROKERS = ("broker-a", "broker-b")
SOON_S = 2
SETTINGS = {
    "long_polling_max_ms": "9000",
    "busy_poll_us": "150",
    "max_held_pulls": "500",
    "wait_time_mills_in_send_queue": "5000",
    "storage.file_reserved_time": "48",
    "message_delay_level": "3s",
}
FILE = """
listen_port = {port}
namesrv_addr = ["{namesrv}"]
store_path_root_dir = "{folder}"
long_polling_max_ms = 8000
"""


class Load:
    """A producer that sends as quickly as one message after the other goes.

    Attributes:
        brokers: Where each message was stored.
        errors: Sends that failed.
    """

    def __init__(self, namesrv_addr: str) -> None:
        self.brokers: list[str] = []
        self.errors: list[Exception] = []
        self._producer = Producer("load", namesrv_addr=namesrv_addr)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="load")

    def _send(self) -> None:
        while not self._stop.is_set():
            try:
                sent = self._producer.send(Message("orders", b"x"))
            except Exception as error:
                self.errors.append(error)
                return
            self.brokers.append(sent.message_queue.broker_name)

    def now(self, count: int = 50) -> set[str]:
        """Who gets the next messages."""
        seen = len(self.brokers)
        until(lambda: self.errors or len(self.brokers) >= seen + count)
        return set(self.brokers[seen:])

    def __enter__(self) -> Load:
        self._producer.start()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("l"), brokers=BROKERS) as cluster:
        with AdminClient(cluster.namesrv_addr) as admin:
            admin.create_topic("orders", queues=2)
        yield cluster


@pytest.fixture
def run(cluster, capsys):
    def run(*arguments: str) -> str:
        code = main.main([*arguments, "--namesrv", cluster.namesrv_addr])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return run


def test_no_send_fails_when_a_broker_is_drained_and_it_is_back_soon(cluster, run):
    with Load(cluster.namesrv_addr) as load:
        assert load.now() == {A, B}
        for command, expected in ((["drain", "--yes"], {A}), (["undrain"], {A, B})):
            run("broker", *command, B)
            watch = Stopwatch()
            until(lambda expected=expected: load.now() == expected)
            assert watch.seconds < SOON_S
    assert load.errors == []


def shown(run, name: str) -> dict[str, list[str]]:
    """The rows of `broker config --changed`, by key."""
    lines = run("broker", "config", name, "--changed").splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_settings_change_under_load_and_back(cluster, run):
    with Load(cluster.namesrv_addr) as load:
        assert load.now() == {A, B}
        run("broker", "set", B, *(f"{key}={value}" for key, value in SETTINGS.items()))
        assert load.now() == {A, B}
        told = shown(run, B)
        assert {key: told[key][0] for key in SETTINGS} == SETTINGS
        run("broker", "set", B, *(f"--unset={key}" for key in SETTINGS))
        assert load.now() == {A, B}
        assert not SETTINGS.keys() & shown(run, B).keys()
    assert load.errors == []


def test_what_was_set_survives_a_kill_and_the_file_of_the_start_stays_as_it_is(tmp_path, capsys):
    namesrv = RoleProcess("namesrv", {"listen_port": "0"}, tmp_path / "namesrv.log")
    path, folder = tmp_path / "broker.toml", tmp_path / "store"
    path.write_text(FILE.format(port=free_ports(1)[0], namesrv=namesrv.endpoint, folder=folder))
    before = path.read_bytes()

    def run(*arguments: str) -> str:
        assert main.main([*arguments, "--namesrv", namesrv.endpoint]) == 0
        return capsys.readouterr().out

    try:
        for is_first in (True, False):
            with CommandProcess("broker", "-c", str(path)) as broker:
                broker.expect("READY role=broker")
                with AdminClient(namesrv.endpoint) as admin:
                    until(lambda admin=admin: admin.cluster().brokers)
                if is_first:
                    run("broker", "set", A, "long_polling_max_ms=9000")
                # Value, default, at the start, whether it was set, whether it may be.
                row = shown(run, A)["long_polling_max_ms"]
                assert row == ["9000", "30000", "8000", "yes", "yes"]
                broker.send_signal(signal.SIGKILL)
                broker.wait()
            assert path.read_bytes() == before
        assert {one.name for one in (folder / "config").glob("overrides*")} >= {"overrides.json"}
    finally:
        namesrv.stop()

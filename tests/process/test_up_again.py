"""`mqmesh up` in a folder that another start has used: nothing is hidden, and nothing is opened."""

from __future__ import annotations

import signal

import pytest
from harness.commands import CommandProcess, free_ports_of_replicas, run_command

from mqmesh.errors import AuthenticationFailed, NoRoute
from mqmesh.message import Message
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.sdk.producer.producer import Producer

READY_S = 60.0
OPEN = ("--set", "security.enable=false")
ALONE = (*OPEN, "--set", "ha={}", "--set", "broker_id=0", "--insecure")


@pytest.fixture
def start(short_tmp_path):
    """Starts a cluster in one folder, ends it, and tells its notes."""
    namesrv, coordinator, broker = free_ports_of_replicas()
    settings = {
        "namesrv": f"[{{listen_port={namesrv}}}]",
        "coordinator.listen_port": coordinator,
        "broker.0.listen_port": broker,
    }
    arguments = ["up", "--data-dir", str(short_tmp_path / "data")]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]

    class Start:
        address = f"127.0.0.1:{namesrv}"
        folder = short_tmp_path / "data"

        def __init__(self, *flags):
            self._command = CommandProcess(*arguments, *flags)

        def __enter__(self):
            self._command.expect("cluster is ready", READY_S)
            return self._command.err

        def __exit__(self, *_):
            self._command.send_signal(signal.SIGTERM)
            assert self._command.wait(READY_S) == 0
            self._command.close()

        @staticmethod
        def refused(*flags):
            command = run_command(*arguments, *flags)
            assert (command.code, command.out) == (2, [])
            return command.err[-1]

    return Start


@pytest.mark.timeout(240)
def test_a_secured_broker_stays_secured_and_keeps_its_messages_when_it_gets_replicas(
    start, monkeypatch
):
    monkeypatch.delenv("MQMESH_CREDENTIALS", raising=False)
    keys = str(start.folder / "security" / "client.toml")

    def bodies(message_id):
        monkeypatch.setenv("MQMESH_CREDENTIALS", keys)
        with QueryClient(start.address) as query:
            found = [one.body for one in query.by_id(message_id).messages]
        monkeypatch.delenv("MQMESH_CREDENTIALS")
        return found

    with start("--secure"), Producer("p", namesrv_addr=start.address, credentials=keys) as producer:
        sent = producer.send(Message("orders", b"kept")).message_id
    for role, name in (("namesrv",) * 2, ("broker", "broker-a"), ("schedule", "schedule-broker-a")):
        error = _refused(start, role, f"{name}-1" if role == name else name)
        assert "was used with security on" in error
        assert error.endswith("or start it with --insecure")

    with start("--replicas", "3") as notes:
        secured, grown = notes[:2]
        assert secured.startswith(f"security is on, since {start.folder}/security has the keys")
        assert grown.startswith("broker-a was one broker, and becomes a group of 3 replicas")
        assert bodies(sent) == [b"kept"]
        with (
            pytest.raises((AuthenticationFailed, NoRoute)),
            Producer("p", namesrv_addr=start.address) as producer,
        ):
            producer.send(Message("orders", b"x"))
    assert _refused(start, "coordinator", "coordinator").endswith("or start it with --insecure")
    # Alone it may lack what the others have.
    error = _refused(start, "broker", "broker-a-r1", *ALONE)
    assert "is the store of replica 1 of a group that elects its master" in error
    error = start.refused("--replicas", "1")
    assert "broker-a-r2 is replica 2 of broker-a, which this start leaves out" in error

    with start("--insecure") as notes:
        assert notes[0].endswith("everybody who reaches it may do everything now (--insecure)")
        assert notes[1].startswith("broker-a has 3 replicas in")
        with QueryClient(start.address) as query:
            assert [one.body for one in query.by_id(sent).messages] == [b"kept"]


def _refused(start, role, name, *options):
    """What a role says that is started alone with the settings of `mqmesh up`, but open."""
    settings = str(start.folder / "run" / f"{name}.toml")
    command = run_command(role, "-c", settings, *(options or OPEN))
    assert (command.code, command.out) == (2, [])
    return command.err[-1]

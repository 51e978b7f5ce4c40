"""What conf/systemd and conf/container start is what really starts, serves, and ends when asked."""

from __future__ import annotations

import configparser
import contextlib
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mqmesh import Message, Producer, PullConsumer
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.testing.processes import RoleProcess

CONF = Path(__file__).parents[2] / "conf"
UNITS = sorted((CONF / "systemd").glob("*.service"))


def read_unit(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_its_role_and_sigterm_ends_it(path: Path, tmp_path: Path) -> None:
    service = read_unit(path)["Service"]
    program, role, flag, config = shlex.split(service["ExecStart"])
    assert program == "/opt/mqmesh/venv/bin/mqmesh"
    assert flag == "-c"

    command = [sys.executable, "-m", "mqmesh.cli", role, flag, str(CONF / Path(config).name)]
    command += ["--set", "namesrv_addr=[]"] if role == "broker" else []
    port = {"gateway": "namesrv_port", "schedule": ""}.get(role, "listen_port")
    command += ["--set", f"{port}=0"] if port else []
    has_store = role in ("broker", "schedule", "gateway")
    command += ["--set", f"store_path_root_dir={tmp_path}"] if has_store else []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(f"READY role={role} ")
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_restarts_crashes_and_no_wrong_configuration(path: Path, tmp_path: Path) -> None:
    service = read_unit(path)["Service"]
    _, role, flag, _ = shlex.split(service["ExecStart"])
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("no_such_key = 1\n")

    command = [sys.executable, "-m", "mqmesh.cli", role, flag, str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(done.returncode)
    assert "no_such_key" in done.stderr


def test_the_services_of_the_compose_file_are_a_cluster(tmp_path: Path) -> None:
    services = yaml.safe_load((CONF / "container" / "compose.yaml").read_text())["services"]
    addresses: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name, service in services.items():
            for other in service.get("depends_on", []):
                assert other in services
            role, *options = service["command"]
            settings = dict(option.removeprefix("--set=").split("=", 1) for option in options)
            assert settings.get("advertised_host", name) == name
            here = _on_loopback(settings, addresses, tmp_path / name)
            if role != "schedule":
                here["listen_port"] = "0"
            (tmp_path / name).mkdir()
            process = RoleProcess(role, here, tmp_path / f"{name}.log")
            stack.callback(process.kill)
            addresses[f"{name}:9876"] = process.endpoint
        namesrvs = ";".join(addresses[f"namesrv-{number}:9876"] for number in (1, 2))
        with Producer("orders", namesrv_addr=namesrvs) as producer:
            producer.send(Message("orders", b"from another container"))
            producer.send(Message("orders", b"later").delayed_by(10))
        seen: list[bytes] = []
        with PullConsumer(
            "audit", namesrv_addr=namesrvs, consume_from_where=ConsumeFromWhere.FIRST_OFFSET
        ) as consumer:
            consumer.subscribe("orders")
            while len(seen) < 2:
                seen += [message.body for message in consumer.poll(timeout_ms=1_000)]
        assert sorted(seen) == [b"from another container", b"later"]


def test_the_image_runs_what_the_command_line_knows() -> None:
    lines = (CONF / "container" / "Containerfile").read_text().splitlines()
    commands = [line for line in lines if line.startswith(("ENTRYPOINT", "CMD"))]
    assert commands == ['ENTRYPOINT ["mqmesh"]', 'CMD ["up", "--data-dir", "/data"]']
    help_text = subprocess.run(
        [sys.executable, "-m", "mqmesh.cli", "up", "--help"], capture_output=True, text=True
    ).stdout
    assert "--data-dir" in help_text


def _on_loopback(
    settings: dict[str, str], addresses: dict[str, str], folder: Path
) -> dict[str, str]:
    """The settings of a container, for a process beside the others on this machine."""
    here = {}
    for key, value in settings.items():
        if key in ("listen_host", "advertised_host"):
            value = "127.0.0.1"
        for name, address in addresses.items():
            value = value.replace(f'"{name}"', f'"{address}"')
        here[key] = value.replace("/data", str(folder), 1)
    return here

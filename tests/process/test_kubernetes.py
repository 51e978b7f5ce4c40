"""The manifests of conf/kubernetes fit together; they start a cluster, and its probes pass."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.commands import free_ports

from mqmesh import Message, Producer, PullConsumer
from mqmesh.testing.processes import RoleProcess

FOLDER = Path(__file__).parents[2] / "conf" / "kubernetes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
SETS = {"single": ("namesrv.yaml", "broker.yaml"), "replicated": ("namesrv.yaml", "replicas.yaml")}
PORTS = {"namesrv": 9876, "broker": 10911, "coordinator": 9870}


def documents(*names: str) -> list[dict[str, Any]]:
    return [one for name in names for one in yaml.safe_load_all((FOLDER / name).read_text())]


def workloads(*names: str) -> list[dict[str, Any]]:
    return [one for one in documents(*names) if one["kind"] in ("StatefulSet", "Deployment")]


def containers(workload: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workload["spec"]["template"]["spec"]["containers"]
    return found


def settings_of(container: Mapping[str, Any]) -> tuple[str, dict[str, str], str]:
    """Role, settings and the address of the page of health."""
    role, *options = container["args"]
    settings = dict(one.removeprefix("--set=").split("=", 1) for one in options if "--set=" in one)
    (health,) = [one.removeprefix("--health=") for one in options if "--health=" in one]
    assert len(settings) + 1 == len(options)
    return role, settings, health


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_is_complete(name: str) -> None:
    for one in documents(name):
        assert one["apiVersion"]
        assert one["metadata"]["name"].startswith("mqmesh")
    for workload in workloads(name):
        spec = workload["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert labels["app"] == "mqmesh", "the network policy selects it"
        if workload["kind"] == "StatefulSet":
            (service,) = [
                other
                for other in documents(name)
                if other["kind"] == "Service" and other["metadata"]["name"] == spec["serviceName"]
            ]
            assert service["spec"]["clusterIP"] == "None", "each pod has a name of its own"
            assert service["spec"]["selector"].items() <= labels.items()
        volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        for container in containers(workload):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) <= volumes
            assert mounts["data"] == "/data"


@pytest.mark.parametrize("name", FILES)
def test_every_container_is_probed_and_confined(name: str) -> None:
    for container in (one for workload in workloads(name) for one in containers(workload)):
        role, settings, health = settings_of(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [container[kind] for kind in container if kind.endswith("Probe")]
        assert container["livenessProbe"] in probes
        for probe in probes:
            assert probe["httpGet"]["path"] == "/healthz"
            assert health == f"0.0.0.0:{ports[probe['httpGet']['port']]}"
        if role in PORTS:
            assert ports["requests"] == PORTS[role]
        paths = [value for value in settings.values() if value.startswith("/")]
        assert paths or role == "console"
        assert all(path.startswith("/data/") for path in paths)
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert container["resources"]["limits"]["memory"]
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= {one["name"] for one in container.get("env", [])}


def pods(files: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Each container as Kubernetes starts it: name of its pod, itself, and its variables."""
    for workload in workloads(*files):
        spec, name = workload["spec"], workload["metadata"]["name"]
        first = spec.get("ordinals", {}).get("start", 0)
        for index in range(first, first + spec["replicas"]):
            pod = f"{name}-{index}"
            variables = {"POD_NAME": pod, "POD_NAMESPACE": "test", "POD_IP": "127.0.0.1"}
            for container in containers(workload):
                yield pod, container, variables | {"POD_INDEX": str(index)}


@pytest.mark.parametrize("kind", SETS)
def test_what_the_manifests_start_is_a_cluster(kind: str, tmp_path: Path) -> None:
    started = list(pods(SETS[kind]))
    ports = iter(free_ports(3 * len(started)))
    # The names of pods, and where they are on this machine.
    addresses: dict[str, str] = {}
    for pod, container, _ in started:
        role = container["args"][0]
        if role in PORTS:
            service = pod.rpartition("-")[0]
            addresses[f"{pod}.{service}:{PORTS[role]}"] = f"127.0.0.1:{next(ports)}"
    pages: list[tuple[str, int, str]] = []
    with contextlib.ExitStack() as stack:
        for pod, container, variables in started:
            role, settings, _ = settings_of(container)
            for key, value in settings.items():
                for variable, text in variables.items():
                    value = value.replace(f"$({variable})", text)
                settings[key] = on_loopback(key, value, addresses, tmp_path / pod)
            (tmp_path / pod).mkdir(exist_ok=True)
            if role in PORTS:
                (own,) = [to for name, to in addresses.items() if name.startswith(f"{pod}.")]
                settings["listen_port"] = own.rpartition(":")[2]
            page, log = next(ports), tmp_path / f"{pod}-{role}.log"
            process = RoleProcess(role, settings, log, options=[f"--health={page}"])
            stack.callback(process.kill)
            pages.append((role, page, settings.get("name", settings.get("broker_name", role))))
        namesrvs = ";".join(to for name, to in addresses.items() if "namesrv" in name)
        with Producer("shop", namesrv_addr=namesrvs, send_msg_timeout_ms=30_000) as producer:
            producer.send(Message("orders", b"now"))
            producer.send(Message("orders", b"later").delayed_by(10))
        seen: list[bytes] = []
        with PullConsumer(
            "audit", namesrv_addr=namesrvs, consume_from_where="FIRST_OFFSET"
        ) as consumer:
            consumer.subscribe("orders")
            while len(seen) < 2:
                seen += [message.body for message in consumer.poll(timeout_ms=1_000)]
        assert sorted(seen) == [b"later", b"now"]
        for role, page, name in pages:
            found = ask(page)
            assert (found["role"], found["state"]) == (role, "running")
            assert found["name"].endswith(name)


def on_loopback(key: str, value: str, addresses: Mapping[str, str], folder: Path) -> str:
    """A setting of a pod, for a process beside the others on this machine."""
    if key in ("listen_host", "advertised_host"):
        return "127.0.0.1"
    if key == "publish_port":
        return "0"
    for name, address in addresses.items():
        value = value.replace(name, address)
    assert "mqmesh-" not in value.replace(folder.name, ""), "the name of a pod that is not there"
    return value.replace("/data", str(folder), 1)


def ask(page: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", page, timeout=30)
    connection.request("GET", "/healthz")
    response = connection.getresponse()
    assert response.status == 200
    found: dict[str, Any] = json.loads(response.read())
    connection.close()
    return found

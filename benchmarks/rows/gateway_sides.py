"""Sides of the rows about a gateway: what it costs to let RocketMQ's clients in."""

import random
import socket
from typing import Final

from rows.processes import BenchError
from rows.sides import Cluster, Conditions, Load, Sample, fill, measure_alone, new_crew

PORTS: Final = range(22_000, 32_000, 4)


def product_gateway(kind: str, load: Load, conditions: Conditions) -> Sample:
    """One client of RocketMQ's kind at a gateway; the value is the gateway's time in us a message.

    Args:
        kind: Program of ``rows.foreign``.
        load: Of the client; one that pulls finds its messages there.
        conditions: Of the call.
    """
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        if kind.startswith("pull"):
            fill(crew, cluster, load, conditions, load.messages)
        port = _free_ports()
        settings = [
            f'namesrv_addr=["{cluster.namesrv}"]',
            f"store_path_root_dir={crew.folder}/gateway",
            f"namesrv_port={port}",
            f"broker_port_base={port + 1}",
            f"grpc_port={port + 2}",
            "vip_ports=false",
        ]
        gateway, _ = crew.role("gateway", settings)
        task = load.task(kind, f"127.0.0.1:{port + (2 if 'grpc' in kind else 1)}", conditions)
        sample = measure_alone("client", crew.client(task), gateway, conditions)
        costs = sample.cpu_s_per_million
        costs["gateway"] = costs.pop("broker")
        sample.extra["msg_per_s"] = sample.value
        sample.value = costs["gateway"]
        return sample


def _free_ports() -> int:
    """Return the first of three ports that are free, below those that the system gives away."""
    for port in random.sample(PORTS, len(PORTS)):
        try:
            for number in range(3):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return port
    raise BenchError("no free ports")

"""FastStream's middlewares for Prometheus and OpenTelemetry beside a real cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pydantic
import pytest
from faststream import FastStream
from harness.open_telemetry import telling
from harness.patience import PATIENCE_S
from opentelemetry import trace

from mqmesh.faststream import MQMeshBroker
from mqmesh.faststream.opentelemetry import MQMeshTelemetryMiddleware

FASTSTREAM = "opentelemetry.instrumentation.faststream"


class Order(pydantic.BaseModel):
    id: int


def run(app):
    async def program():
        async with asyncio.timeout(PATIENCE_S):
            await app.run()

    asyncio.run(program())


@pytest.mark.parametrize("batch", [False, True])
def test_spans_of_the_middleware_and_of_mqmesh_go_together(mqmesh_cluster, batch):
    topic, group = mqmesh_cluster.topic(queues=1), mqmesh_cluster.group()
    inner: list[int] = []
    with telling() as told:
        broker = MQMeshBroker(
            mqmesh_cluster.namesrv_addr,
            tracing={"telemetry": "otel"},
            middlewares=[MQMeshTelemetryMiddleware()],
        )
        app = FastStream(broker, logger=None)

        @broker.subscriber(topic, group=group, batch=batch)
        async def bill(orders: Order | list[Order]) -> None:
            inner.append(trace.get_current_span().get_span_context().span_id)
            app.exit()

        @app.after_startup
        async def send() -> None:
            await broker.publish(Order(id=1), topic)

        run(app)
        outer = {one.name.split()[0]: one for one in told.spans()}
        spans = {
            f"{one.name.split()[1]} {one.kind.name}": one for one in told.spans("", FASTSTREAM)
        }
    created, published = spans["create PRODUCER"], spans["publish PRODUCER"]
    assert outer["send"].parent.span_id == published.context.span_id
    assert published.parent.span_id == created.context.span_id
    # The context that travels is FastStream's; to mqmesh it is one that the user put there.
    for one in outer["send"], outer["process"]:
        assert [link.context.span_id for link in one.links] == [created.context.span_id]
    assert inner == [spans["process CONSUMER"].context.span_id]


def test_who_takes_neither_needs_not_their_packages(tmp_path):
    code = (
        "import sys; sys.modules.update(prometheus_client=None, opentelemetry=None)\n"
        "import mqmesh.faststream"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)

"""The service and its worker beside a real cluster: pytest examples/test_orders_service.py"""

import queue
from importlib import import_module
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from mqmesh.testing.cluster_for_tests import ClusterForTests


def test_an_order_that_is_placed_is_billed(
    mqmesh_cluster: ClusterForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQMESH_NAMESRV", mqmesh_cluster.namesrv_addr)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    service = import_module("orders_service")
    billed: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(service, "print", billed.put, raising=False)

    with TestClient(service.app) as client, service.worker:
        answer = client.post("/orders", json={"id": "1", "item": "apple"})
        assert answer.status_code == 201
        assert len(answer.json()["message_id"]) == 32
        assert billed.get(timeout=30) == "billed order 1: apple"
        assert client.post("/orders", json={"id": "2"}).status_code == 422

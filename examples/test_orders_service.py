"""The service and its worker beside a real cluster: pytest examples/test_orders_service.py"""

import queue
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.testclient import TestClient

from mqmesh.testing.cluster_for_tests import ClusterForTests


@pytest.fixture
def service(mqmesh_cluster: ClusterForTests, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MQMESH_NAMESRV", mqmesh_cluster.namesrv_addr)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "orders_service", raising=False)  # it read the address once
    return import_module("orders_service")


def test_an_order_that_is_placed_is_billed(
    service: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    billed: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(service, "print", billed.put, raising=False)

    with TestClient(service.app) as client, service.worker:
        answer = client.post("/orders", json={"id": "1", "item": "apple"})
        assert answer.status_code == 201
        assert len(answer.json()["message_id"]) == 32
        assert billed.get(timeout=30) == "billed order 1: apple"
        assert client.post("/orders", json={"id": "2"}).status_code == 422


def test_the_service_may_be_started_again(
    service: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    billed: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(service, "print", billed.put, raising=False)

    for order in ("3", "4"):
        with TestClient(service.app) as client, service.worker:
            client.post("/orders", json={"id": order, "item": "pear"})
            assert billed.get(timeout=30) == f"billed order {order}: pear"

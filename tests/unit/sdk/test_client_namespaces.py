"""Every client is in the namespace that it is given, else in that of the environment."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

import mqmesh
import mqmesh.aio
from mqmesh.sdk.client import options

ADMINS = [
    name
    for name in dir(mqmesh)
    if isinstance(kind := getattr(mqmesh, name), type) and issubclass(kind, mqmesh.AdminClient)
]
NAMED = ["App", "KeyValue", "Producer", "PullConsumer", "PushConsumer", "SimpleConsumer"]


class Listener(mqmesh.TransactionListener):
    """A listener that is never called."""

    def execute_local_transaction(self, message, arg): ...

    def check_local_transaction(self, message): ...


class AsyncListener(mqmesh.aio.TransactionListener):
    """A listener of coroutines that is never called."""

    async def execute_local_transaction(self, message, arg): ...

    async def check_local_transaction(self, message): ...


def transactions(kind, listener, **given):
    """Make a transaction producer."""
    return kind("g", listener(), **given)


MAKERS = {
    f"{package.__name__}.{name}": make
    for package, listener in ((mqmesh, Listener), (mqmesh.aio, AsyncListener))
    for name, make in [
        *((name, getattr(package, name)) for name in ADMINS if name not in NAMED),
        *((name, partial(getattr(package, name), "g")) for name in NAMED),
        ("TransactionProducer", partial(transactions, package.TransactionProducer, listener)),
    ]
}


@pytest.fixture
def found(monkeypatch):
    """Namespaces of the connections that clients make."""
    found = []
    real = options.in_namespace

    def note(transport, namespace):
        found.append(namespace)
        return real(transport, namespace)

    monkeypatch.setattr(options, "in_namespace", note)
    return found


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("given", "wanted"),
    [({"namespace": "shop"}, "shop"), ({}, "stage"), ({"namespace": ""}, "")],
    ids=["given", "of the environment", "none"],
)
def test_each_client_is_in_its_namespace(name, given, wanted, found, monkeypatch):
    monkeypatch.setenv(options.NAMESPACE_VARIABLE, "stage")
    client = MAKERS[name](namesrv_addr="127.0.0.1:1", **given)
    closing = client.close()
    if asyncio.iscoroutine(closing):
        asyncio.run(closing)
    assert set(found) == {wanted}

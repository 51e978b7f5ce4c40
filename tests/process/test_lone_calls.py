"""The Python calls of a lone send, and of a lone receive, in a client and a broker in threads."""

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import mqmesh
from mqmesh import Message, Producer, SimpleConsumer
from mqmesh.testing.thread_cluster import ThreadCluster

RUNS: Final = 30
MOST_OF_CLIENT: Final = 40
MOST_OF_BROKER: Final = 60
"""A whole turn of the loop, from the request to the wait for the next one."""
MOST_OF_MEMBER: Final = 108
MOST_OF_LEASES: Final = 215
"""The broker's calls for the acknowledgement of a message and the lease of the next one."""
_PACKAGE: Final = str(Path(mqmesh.__file__).parent)


class CallCount:
    """Calls of functions of mqmesh by thread, from ``begin`` on."""

    def __init__(self) -> None:
        self.calls: Counter[str] | None = None

    def begin(self) -> Counter[str]:
        self.calls = Counter()
        return self.calls

    def profile(self, frame, event, argument) -> None:
        calls = self.calls
        if calls is not None and event == "call":
            if frame.f_code.co_filename.startswith(_PACKAGE):
                calls[threading.current_thread().name] += 1


@pytest.fixture
def count():
    found = CallCount()
    before = sys.getprofile()
    threading.setprofile(found.profile)
    sys.setprofile(found.profile)
    yield found
    sys.setprofile(before)
    threading.setprofile(None)


def test_a_lone_send_makes_few_calls_of_python(count, tmp_path):
    """Timers of a loop may fall into a send, so the least of many counts."""
    found = []
    with (
        ThreadCluster(tmp_path) as cluster,
        Producer("g", namesrv_addr=cluster.namesrv_addr) as one,
    ):
        for _ in range(RUNS):
            calls = count.begin()
            one.send(Message("lone", b"x"))
            count.calls = None
            found.append((calls["MainThread"], calls["mqmesh-broker"]))
    client, broker = map(min, zip(*found, strict=True))
    assert client <= MOST_OF_CLIENT
    assert broker <= MOST_OF_BROKER


def test_a_lone_receive_leaves_and_returns_in_the_thread_of_its_caller(count, tmp_path):
    """An acknowledgement brings the next message along; the client loop sleeps meanwhile."""
    found = []
    with ThreadCluster(tmp_path) as cluster:
        with Producer("g", namesrv_addr=cluster.namesrv_addr) as one:
            one.send_batch([Message("lone", b"x") for _ in range(RUNS + 1)])
        consumer = SimpleConsumer("g", namesrv_addr=cluster.namesrv_addr)
        consumer.subscribe("lone")
        with consumer:
            (message,) = consumer.receive(1)
            for _ in range(RUNS):
                calls = count.begin()
                consumer.ack(message)
                (message,) = consumer.receive(1)
                count.calls = None
                member = calls.pop("MainThread")
                broker = calls.pop("mqmesh-broker")
                found.append((member, broker, calls.total()))
    member, broker, others = map(min, zip(*found, strict=True))
    assert member <= MOST_OF_MEMBER
    assert broker <= MOST_OF_LEASES
    assert others == 0

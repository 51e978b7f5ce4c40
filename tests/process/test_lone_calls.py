"""The Python calls of one acknowledged send, in a client and a broker that are threads."""

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import mqmesh
from mqmesh import Message, Producer
from mqmesh.testing.thread_cluster import ThreadCluster

RUNS: Final = 30
MOST_OF_CLIENT: Final = 44
MOST_OF_BROKER: Final = 60
"""A whole turn of the loop, from the request to the wait for the next one."""
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

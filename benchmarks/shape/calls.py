"""Modules and Python calls that a message passes through, in client, broker and schedule service.

The roles run as threads of this process, so that one profile sees all of them. A loop that wakes by
a timer meanwhile is counted too: each figure is the least of several runs.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import mqmesh
from mqmesh import (
    ConsumeFromWhere,
    LocalTransactionState,
    Message,
    Producer,
    PushConsumer,
    TransactionListener,
    TransactionProducer,
)
from mqmesh.testing.thread_cluster import ThreadCluster

RUNS: Final = 9
WARM_UP: Final = 30
WAIT_S: Final = 10.0
PACKAGE: Final = str(Path(mqmesh.__file__).parent)


class Count:
    """Calls of functions of mqmesh, in all threads, while it is switched on."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls = 0
        self.modules: set[str] = set()
        self._is_ours: dict[CodeType, bool] = {}

    def install(self) -> None:
        """Count in this thread, and in all that are started from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def of(self, work: Callable[[], object]) -> tuple[int, int]:
        """Return the modules and the calls of some work; both are the least of several runs."""
        found = []
        for _ in range(RUNS):
            time.sleep(0.02)  # so that what the run before has left is done
            self.calls, self.modules = 0, set()
            self.is_on = True
            work()
            self.is_on = False
            found.append((len(self.modules), self.calls))
        return min(modules for modules, _ in found), min(calls for _, calls in found)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(PACKAGE)
        if is_ours:
            self.calls += 1
            self.modules.add(code.co_filename)


class _Commit(TransactionListener):
    def execute_local_transaction(self, message: Message, argument: object) -> Any:
        return LocalTransactionState.COMMIT

    def check_local_transaction(self, message: Any) -> Any:
        return LocalTransactionState.UNKNOWN


def measure() -> dict[str, tuple[int, int]]:
    """Return modules and calls of one send, of send to listener, and of one transaction."""
    count, found = Count(), {}
    count.install()
    with tempfile.TemporaryDirectory() as folder, ThreadCluster(Path(folder)) as cluster:
        address = cluster.namesrv_addr
        with Producer("shape", namesrv_addr=address) as producer:
            for _ in range(WARM_UP):
                producer.send(Message("plain", b"x"))
            found["one acknowledged send"] = count.of(lambda: producer.send(Message("plain", b"x")))
            arrived = threading.Event()
            consumer = PushConsumer(
                "shape-group",
                namesrv_addr=address,
                consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            )
            consumer.subscribe("pushed", listener=lambda messages: arrived.set())
            consumer.start()

            def send_and_wait() -> None:
                arrived.clear()
                producer.send(Message("pushed", b"x"))
                assert arrived.wait(WAIT_S)

            for _ in range(WARM_UP):
                send_and_wait()
            found["send until a listener ran"] = count.of(send_and_wait)
            consumer.close()
        with TransactionProducer("shape-tx", _Commit(), namesrv_addr=address) as producer:
            for _ in range(WARM_UP):
                producer.send_message_in_transaction(Message("committed", b"x"))
            found["one committed transaction"] = count.of(
                lambda: producer.send_message_in_transaction(Message("committed", b"x"))
            )
    sys.setprofile(None)
    return found

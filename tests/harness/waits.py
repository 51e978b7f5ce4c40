"""Lock, events and clock for waits of batches without a producer."""

import threading
from types import SimpleNamespace
from typing import Any

from mqmesh.clock import SystemClock
from mqmesh.errors import MQMeshError
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.sdk.producer.lanes import PendingBatch


def make_waits() -> tuple[threading.Lock, Any]:
    """Makes a lock, and a transport with this machine's threads and time: to begin a batch with."""
    return threading.Lock(), SimpleNamespace(flag=threading.Event, clock=SystemClock())


def finish(batch: PendingBatch, result: BatchOutcome | MQMeshError) -> None:
    """Gives a batch without a buffer its result, unless it has one."""
    with batch.lock:
        if batch.done:
            return
        if isinstance(result, BatchOutcome):
            batch.outcome = result
        else:
            batch.error = result
    batch.notify()

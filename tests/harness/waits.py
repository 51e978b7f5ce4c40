"""Lock, events and clock for waits of batches without a producer."""

import threading

from mqmesh.clock import SystemClock
from mqmesh.sdk.producer.send_result import Waits


def make_waits() -> Waits:
    """Makes waits with a lock of their own, and this machine's threads and time."""
    return Waits(threading.Lock(), threading.Event, SystemClock())

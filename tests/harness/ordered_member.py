"""A consumer in a process of its own that writes down what it was called with.

``python -m harness.ordered_member namesrv topic group calls-file share-failing mode``, where the
mode is ``orderly``, ``concurrently`` or ``fifo``.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from harness.ordered_calls import Call
from mqmesh.message import MessageQueue, StoredMessage
from mqmesh.protocol.membership import ConsumeFromWhere
from mqmesh.sdk.client.options import ClientOptions
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.push_consumer import PushConsumer

COMMIT_MS: Final = 100
SUSPEND_MS: Final = 10
NUMBER: Final = "number"
"""Property with the number of a message."""


class Member:
    """One consumer and its file.

    Args:
        path: File for the calls.
        failing: Share of the calls that fail, by chance.
    """

    def __init__(self, path: Path, failing: float) -> None:
        self.name = path.stem
        self.consumer: PushConsumer | None = None
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._failing = failing
        self._chance = random.Random(self.name)
        self._generations: dict[MessageQueue, int] = {}

    def take(self, messages: list[StoredMessage]) -> ConsumeResult:
        """Takes messages as the listener."""
        began_ns = time.monotonic_ns()
        if self._chance.random() < self._failing:
            if self._chance.random() < 0.5:
                raise ValueError("by chance")
            return ConsumeResult.RECONSUME_LATER
        lines = []
        for message in messages:
            queue = message.message_queue
            call = Call(
                self.name,
                f"{queue.broker_name}:{queue.queue_id}",
                message.queue_offset,
                int(message.property(NUMBER) or 0),
                self._generation(queue),
                began_ns,
                time.monotonic_ns(),
            )
            lines.append(call.line())
        os.write(self._file, b"".join(lines))
        return ConsumeResult.SUCCESS

    def _generation(self, queue: MessageQueue) -> int:
        assert self.consumer is not None
        generation = self.consumer.generation(queue)
        if generation is not None:
            self._generations[queue] = generation
        return self._generations.get(queue, 0)


def main(arguments: list[str]) -> int:
    """Consumes until SIGTERM, and closes then."""
    namesrv_addr, topic, group, path, failing, mode = arguments
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    member = Member(Path(path), float(failing))
    member.consumer = PushConsumer(
        group,
        namesrv_addr=namesrv_addr,
        client=ClientOptions(instance_name=member.name),
        consume_orderly=mode == "orderly",
        delivery="fifo" if mode == "fifo" else "queue",
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        suspend_current_queue_time_ms=SUSPEND_MS,
        persist_consumer_offset_interval_ms=COMMIT_MS,
    )
    member.consumer.subscribe(topic, listener=member.take)
    member.consumer.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    stop.wait()
    member.consumer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

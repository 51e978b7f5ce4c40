"""Measures how long messages take, by hooks: neither sends nor listener know of it.

Needs a running ``mqmesh up``.
"""

import threading
import time

from mqmesh import (
    ConsumeContext,
    ConsumeFromWhere,
    Hooks,
    Message,
    Producer,
    PushConsumer,
    SendContext,
    StoredMessage,
)

TOPIC = "hello-hooks"
COUNT = 1_000


class Stopwatch(Hooks):
    """Writes into each message when it was sent, and reads that when it was consumed."""

    def __init__(self) -> None:
        self.sends = 0
        self.calls = 0
        self.late_ms: list[int] = []

    def before_send(self, batch: SendContext) -> None:
        """Marks the messages of a batch."""
        self.sends += 1
        batch.add_properties({"sent_ms": str(batch.began_ms)})

    def after_send(self, batch: SendContext) -> None:
        """Reports a failed batch."""
        if batch.error is not None:
            print(f"{len(batch.messages)} messages may be lost: {batch.error}")

    def after_consume(self, batch: ConsumeContext) -> None:
        """Looks how long the messages took; listeners are called in several threads."""
        now_ms = time.time_ns() // 1_000_000
        self.calls += 1
        self.late_ms += [
            now_ms - int(message.property("sent_ms") or now_ms) for message in batch.messages
        ]


def main() -> None:
    """Sends, receives, and says how long it took."""
    watch = Stopwatch()
    arrived = threading.Semaphore(0)

    def listen(messages: list[StoredMessage]) -> None:
        arrived.release(len(messages))

    consumer = PushConsumer(
        "hello-hooks-group", consume_from_where=ConsumeFromWhere.FIRST_OFFSET, hooks=[watch]
    )
    consumer.subscribe(TOPIC, listener=listen)
    with consumer, Producer("hello-hooks-producer", hooks=[watch]) as producer:
        for number in range(COUNT):
            producer.send_async(Message(TOPIC, b"%d" % number))
        for _ in range(COUNT):
            if not arrived.acquire(timeout=10):
                raise SystemExit("nothing came within 10 s; is `mqmesh up` running?")
    late_ms = sorted(watch.late_ms)
    print(
        f"{COUNT} messages in {watch.sends} batches, {watch.calls} calls of the listener; half of "
        f"them took {late_ms[len(late_ms) // 2]} ms at most, all of them {late_ms[-1]} ms"
    )


if __name__ == "__main__":
    main()

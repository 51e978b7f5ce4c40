"""Keeps the flights of each aircraft in order. Needs a running ``mqmesh up``.

Messages with the same sharding key go to the same queue, in the order they were sent, and two
ordered consumers share the queues: each queue is with one of them, one message at a time. Some
calls fail by chance; then that queue waits and tries again, so order is kept. This sends the
first 5,000 flights and checks the order of each tail number.
"""

import random
import threading
from collections import defaultdict
from itertools import islice

from flights import rows, to_message

from mqmesh import ConsumeResult, Producer, PushConsumer, StoredMessage

TOPIC = "flights-in-order"
COUNT = 5_000


class Logbook:
    """Listener that notes the flights of each aircraft as they come."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flights: dict[str, list[str]] = defaultdict(list)
        self.seen: set[str] = set()
        self.wanted: set[str] | None = None
        self.complete = threading.Event()

    def take(self, messages: list[StoredMessage]) -> ConsumeResult:
        """Called with one message at a time of each queue, and from several threads."""
        if random.random() < 0.01:
            return ConsumeResult.RECONSUME_LATER  # nothing behind it comes before it
        with self.lock:
            for message in messages:
                if message.message_id not in self.seen:
                    self.seen.add(message.message_id)
                    self.flights[message.sharding_key or ""].append(message.message_id)
            self._check()
        return ConsumeResult.SUCCESS

    def expect(self, ids: set[str]) -> None:
        """Says what has to come; earlier runs of this example sent messages of their own."""
        with self.lock:
            self.wanted = ids
            self._check()

    def _check(self) -> None:
        if self.wanted is not None and self.wanted <= self.seen:
            self.complete.set()


def consumer(logbook: Logbook) -> PushConsumer:
    """One of the group's members."""
    member = PushConsumer("ordered-check", consume_orderly=True, suspend_current_queue_time_ms=10)
    member.subscribe(TOPIC, listener=logbook.take)
    return member


def main() -> None:
    """Sends, consumes, compares."""
    logbook = Logbook()
    sent: dict[str, list[str]] = defaultdict(list)
    with consumer(logbook), consumer(logbook), Producer("ordered-producer") as producer:
        messages = [to_message(row, TOPIC) for row in islice(rows(), COUNT)]
        futures = [producer.send_async(message) for message in messages]
        for message, future in zip(messages, futures, strict=True):
            sent[message.sharding_key or ""].append(future.result().message_id)
        wanted = {message_id for ids in sent.values() for message_id in ids}
        logbook.expect(wanted)
        if not logbook.complete.wait(60):
            raise SystemExit(f"{len(wanted - logbook.seen)} messages did not come")
    for tailnum, ids in sent.items():
        came = [message_id for message_id in logbook.flights[tailnum] if message_id in wanted]
        if tailnum and came != ids:  # flights without a tail number have no order to keep
            raise SystemExit(f"the flights of {tailnum} came in another order")
    print(f"{COUNT:,} flights of {len(sent) - 1:,} aircraft came, each aircraft's in order")


if __name__ == "__main__":
    main()

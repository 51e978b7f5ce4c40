"""Keeps the flights of each aircraft in order. Needs a running ``mqmesh up``.

Messages with the same sharding key go to the same queue, in the order they were sent. This
sends the first 5,000 flights, reads them back, and checks the order of each tail number.
"""

from collections import defaultdict
from itertools import islice

from flights import rows, to_message

from mqmesh import ConsumeFromWhere, Producer, PullConsumer

TOPIC = "flights-in-order"
COUNT = 5_000


def main() -> None:
    """Sends, reads back, compares."""
    sent: dict[str, list[bytes]] = defaultdict(list)
    ids: set[str] = set()
    with Producer("ordered-producer") as producer:
        futures = []
        for row in islice(rows(), COUNT):
            message = to_message(row, TOPIC)
            futures.append(producer.send_async(message))
            if message.sharding_key:
                sent[message.sharding_key].append(message.body)
        ids = {future.result().message_id for future in futures}

    received: dict[str, list[bytes]] = defaultdict(list)
    with PullConsumer(
        "ordered-check", consume_from_where=ConsumeFromWhere.FIRST_OFFSET, auto_commit=False
    ) as consumer:
        consumer.subscribe(TOPIC)
        while ids:
            messages = consumer.poll(timeout_ms=5_000, max_messages=1_000)
            if not messages:
                raise SystemExit(f"{len(ids)} messages did not come back")
            for message in messages:
                # Earlier runs of this example left messages of their own in the topic.
                if message.message_id in ids:
                    ids.discard(message.message_id)
                    if message.sharding_key:
                        received[message.sharding_key].append(message.body)
    if received != sent:
        raise SystemExit("some aircraft's flights came back in another order")
    print(f"{COUNT:,} flights of {len(sent):,} aircraft came back, each aircraft's in order")


if __name__ == "__main__":
    main()

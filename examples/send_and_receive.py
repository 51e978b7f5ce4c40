"""Sends three messages in three ways and receives them. Needs a running ``mqmesh up``."""

import threading

from mqmesh import (
    ConsumeFromWhere,
    Message,
    Producer,
    PushConsumer,
    StoredMessage,
)

TOPIC = "hello"


def main() -> None:
    """Sends, receives, and ends."""
    arrived = threading.Semaphore(0)

    def listen(messages: list[StoredMessage]) -> None:
        for message in messages:
            print(f"received {message.body!r} tag={message.tag} id={message.message_id}")
            arrived.release()

    with Producer("hello-producer") as producer:
        result = producer.send(Message(TOPIC, b"one, and I waited for it", tag="sync"))
        print(f"sent {result.message_id} to queue {result.message_queue.queue_id}")
        future = producer.send_async(Message(TOPIC, b"two, a future", tag="async"))
        print(f"sent {future.result().message_id} at offset {future.result().queue_offset}")
        producer.send_oneway(Message(TOPIC, b"three, and I never asked", tag="oneway"))

    consumer = PushConsumer("hello-group", consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    consumer.subscribe(TOPIC, "sync || async || oneway", listener=listen)
    with consumer:
        for _ in range(3):
            if not arrived.acquire(timeout=10):
                raise SystemExit("nothing came within 10 s; is `mqmesh up` running?")


if __name__ == "__main__":
    main()

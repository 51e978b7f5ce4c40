"""RocketMQ's Python client sends or consumes until its input ends: ROLE ENDPOINT MESSAGES."""

from __future__ import annotations

import json
import select
import sys
import time
from importlib import import_module
from typing import Any

rocketmq: Any = import_module("rocketmq")  # in an environment of its own
seen: set[str] = set()


class Listener:
    """Answers of a push consumer, and of a producer of transactions."""

    def consume(self, message: Any) -> Any:
        result = rocketmq.ConsumeResult
        return result.SUCCESS if is_done(message) else result.FAILURE

    def check(self, _message: Any) -> Any:
        return rocketmq.TransactionResolution.COMMIT


def is_done(message: Any) -> bool:
    """Shows a message; False if it is to come again."""
    body, properties = message.body.decode(), message.properties
    shown = (body, message.tag, properties["to"], properties["due"], message.message_group or "")
    # in one piece: threads call this
    sys.stdout.write("\t".join(["got", str(int(time.time() * 1_000)), *shown]) + "\n")
    sys.stdout.flush()
    is_first = body not in seen
    seen.add(body)
    return not (is_first and body.endswith(":again"))


def send(producer: Any, topic: str, body: str, delay_s: int, group: str) -> None:
    """Sends one message, and does with it what its body says."""
    due_s = int(time.time()) + delay_s
    message = rocketmq.Message()
    message.topic, message.body = topic, f"python:{body}".encode()
    message.tag, message.keys = "new", "k1"
    message.add_property("to", "größe")
    message.add_property("due", str(due_s * 1_000))
    if delay_s:
        message.delivery_timestamp = due_s
    if group:
        message.message_group = group
    transaction: Any = producer.begin_transaction() if topic == "bank" else None
    sent = producer.send(message, transaction)
    if body == "recalled":
        producer.recall_message(topic, sent.recall_handle)
    elif body == "committed":
        transaction.commit()
    elif body == "rolled back":
        transaction.rollback()


def receive(consumer: Any) -> None:
    """Receives, acknowledges or refuses, until the input ends."""
    while not select.select([sys.stdin], [], [], 0)[0]:
        for message in consumer.receive(16, 30):
            if is_done(message):
                consumer.ack(message)
            else:
                consumer.change_invisible_duration(message, 10)


def main(role: str, endpoint: str, messages: str) -> None:
    settings = rocketmq.ClientConfiguration(endpoint, rocketmq.Credentials(), request_timeout=20)
    topics = {topic: rocketmq.FilterExpression() for topic in ("plain", "keyed", "bank")}
    if role == "send":
        client = rocketmq.Producer(settings, topics, Listener())
    elif role == "push":
        client = rocketmq.PushConsumer(settings, "python-push", Listener(), topics)
    else:
        client = rocketmq.SimpleConsumer(settings, "python-simple", topics, await_duration=1)
    client.startup()
    if role == "send":
        for message in json.loads(messages):
            send(client, *message)
        print("sent", flush=True)
    elif role == "simple":
        receive(client)
    sys.stdin.read()
    client.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

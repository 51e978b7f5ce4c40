"""Reading a topic to its end."""

from typing import Final

from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.pull_consumer import PullConsumer

WAIT_MS: Final = 10_000
"""Longest time between two messages that are there."""


def read_topic(namesrv_addr: str, topic: str) -> list[StoredMessage]:
    """Returns all messages of a topic, those of a queue in order.

    Args:
        namesrv_addr: Name servers of its cluster.
        topic: Its name.

    Raises:
        AssertionError: A message that must be there does not come.
    """
    found: list[StoredMessage] = []
    with PullConsumer("audit", namesrv_addr=namesrv_addr, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        consumer.seek_to_begin()
        left = sum(consumer.lag().values())
        while len(found) < left:
            some = consumer.poll(WAIT_MS, 1_000)
            assert some, f"{left - len(found)} messages of {topic} cannot be read"
            found += some
    return found

"""The messages that every system of the comparison moves: plain ones, and ordinary ones.

Plain ones are 128 bytes of body and nothing else. Ordinary ones are what programs send: bodies of
32 to 224 bytes, a tag, a business key, two properties.
"""

import random
from typing import Final, NamedTuple

BATCH: Final = 500
"""Messages in an explicit batch, where a system has such."""
WINDOW: Final = 32
"""Batches on their way."""
TOPIC: Final = "peers"
QUEUES: Final = 4
_POOL: Final = 10_000
_STATES: Final = ("new", "paid", "sent", "done")
_REGIONS: Final = ("north", "east", "south", "west")


def topic_names(count: int) -> list[str]:
    """Names of topics; of one it is ``TOPIC``."""
    return [TOPIC, *(f"{TOPIC}-{number}" for number in range(1, count))]


class Order(NamedTuple):
    """One message, of no system's own type.

    Attributes:
        body: 32 to 224 bytes that cannot be compressed.
        tag: "" for none.
        key: "" for none.
        properties: None or two.
    """

    body: bytes
    tag: str = ""
    key: str = ""
    properties: dict[str, str] | None = None


def make_orders(kind: str, count: int = _POOL) -> list[Order]:
    """The same messages in every run.

    Args:
        kind: ``plain`` or ``ordinary``.
        count: How many differ.
    """
    chance = random.Random(count)
    if kind == "plain":
        return [Order(chance.randbytes(128)) for _ in range(count)]
    return [
        Order(
            chance.randbytes(chance.randrange(32, 225)),
            chance.choice(_STATES),
            f"order-{number:08d}",
            {"region": chance.choice(_REGIONS), "customer": str(chance.randrange(100_000))},
        )
        for number in range(count)
    ]

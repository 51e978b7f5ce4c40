"""The messages: orders of 200 bytes of JSON, with a tag, a key and two properties each."""

import random
from typing import Final

from figures import BATCH

from mqmesh.message import Message

TOPIC: Final = "orders"
BODY_BYTES: Final = 200
FILLER: Final = "filler"
_FILLER_BYTES: Final = 4_000
_STATES: Final = ("created", "paid", "sent", "returned")
_CURRENCIES: Final = ("EUR", "USD", "JPY", "CHF")
_PRIME: Final = 999_999_937
_STRIDE: Final = 387_420_489
_TAILS: Final = 20_011
"""Ends of bodies that differ. The same one comes again after 4 MB, so no compressor of a page of a
table, which is a tenth of that, has seen it before."""


def name_of(number: int) -> str:
    """Nine digits, of each order others, in no order: a table sorted by them is not so by time.

    Args:
        number: Of the order, below 999,999,937.
    """
    return f"{number * _STRIDE % _PRIME:09d}"


def key_of(number: int) -> str:
    """The key of an order."""
    return f"order-{name_of(number)}"


class Orders:
    """Makes orders, the same in each run."""

    def __init__(self) -> None:
        chance = random.Random(1)
        self._tails = [_tail(chance) for _ in range(_TAILS)]
        self._properties = [
            {
                "region": f"r-{chance.randrange(40):02d}",
                "customer": f"{chance.randrange(10**6):06d}",
            }
            for _ in range(_TAILS)
        ]

    def batch(self, topic: str, first: int) -> list[Message]:
        """``BATCH`` orders.

        Args:
            topic: Of the messages.
            first: Number of the first one.
        """
        return [self._order(topic, number) for number in range(first, first + BATCH)]

    def _order(self, topic: str, number: int) -> Message:
        at = number % _TAILS
        name = name_of(number)
        head = f'{{"order":"{name}","created":{1_770_000_000_000 + number * 3},'.encode()
        return Message(
            topic,
            head + self._tails[at],
            _STATES[number % 4],
            (f"order-{name}",),
            self._properties[at],
        )


def _tail(chance: random.Random) -> bytes:
    text = (
        f'"customer":{chance.randrange(10**6)},"state":"{chance.choice(_STATES)}",'
        f'"amount":{chance.randrange(10**6) / 100:.2f},"currency":"{chance.choice(_CURRENCIES)}",'
        f'"lines":[{{"sku":"A-{chance.randrange(10**4)}","count":{chance.randrange(1, 9)}}}],'
        f'"reference":"{chance.randbytes(8).hex()}","note":"'
    )
    head = len(b'{"order":"000000000","created":1770000000000,')
    return (text + "." * (BODY_BYTES - head - len(text) - 2) + '"}').encode()


def filler(count: int = BATCH) -> list[Message]:
    """Messages that make a store large: 4,000 bytes each that cannot be compressed."""
    chance = random.Random(2)
    return [Message(FILLER, chance.randbytes(_FILLER_BYTES)) for _ in range(count)]

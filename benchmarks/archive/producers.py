"""Sends messages as quickly as it can: ``python producers.py ADDRESS KIND FIRST COUNT``.

KIND is ``filler``, or the name of a topic for orders. FIRST is the number of the first order.
COUNT is how many messages; 0 sends until the process is ended. Batches of 500, eight in flight.
"""

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from figures import BATCH
from orders import FILLER, Orders, filler

from mqmesh.message import Message
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture
from rows.producers import stored

WINDOW: Final = 8


def main(address: str, kind: str, first: int, count: int) -> int:
    """Sends; the exit code is 1 if a message was not stored."""
    firsts: Iterable[int] = (
        range(first, first + count, BATCH) if count else itertools.count(first, BATCH)
    )
    with Producer("producers", namesrv_addr=address) as producer:
        done = _send(producer, _maker(kind), firsts)
    return 0 if done == count else 1


def _maker(kind: str) -> Callable[[int], list[Message]]:
    if kind == FILLER:
        batch = filler()
        return lambda first: batch
    orders = Orders()
    return lambda first: orders.batch(kind, first)


def _send(producer: Producer, make: Callable[[int], list[Message]], firsts: Iterable[int]) -> int:
    waiting: deque[SendFuture] = deque()
    done = 0
    for first in firsts:
        if len(waiting) >= WINDOW:
            done += stored(waiting.popleft())
        waiting.append(producer.send_batch_async(make(first)))
    return done + sum(map(stored, waiting))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

"""Flights by tag and by SQL92, compared with a plain scan. Needs a running ``mqmesh up``.

Sends all flights (or ``--rows`` of them) with carrier as tag and delay and airports as properties.
Then consumers with different expressions read them, and each must get exactly the rows that a scan
of the file in plain Python gives. The broker leaves out the others: they do not cross the network.
"""

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

from flights import rows, to_message

from mqmesh import (
    ConsumeFromWhere,
    MessageSelector,
    Producer,
    PushConsumer,
    StoredMessage,
)

Row = dict[str, str]
PATIENCE_S = 120.0


def is_late_from_new_york(row: Row) -> bool:
    """Return whether the SQL expression matches a row; in Python."""
    delay = row["dep_delay"]
    return delay not in ("", "NA") and float(delay) > 60 and row["origin"] in ("JFK", "EWR")


CHOICES: dict[str, tuple[MessageSelector, Callable[[Row], bool]]] = {
    "all": (MessageSelector.by_tag("*"), lambda row: True),
    "tags": (MessageSelector.by_tag("UA || DL"), lambda row: row["carrier"] in ("UA", "DL")),
    "sql": (
        MessageSelector.by_sql("dep_delay > 60 AND origin IN ('JFK','EWR')"),
        is_late_from_new_york,
    ),
}


def consume(
    topic: str, selector: MessageSelector, count: int, namesrv: str
) -> tuple[Counter[bytes], float]:
    """Reads so many messages; returns their bodies, and the seconds it took."""
    got: Counter[bytes] = Counter()
    done, lock = threading.Event(), threading.Lock()
    begin_s: list[float] = []

    def listen(messages: Sequence[StoredMessage]) -> None:
        with lock:
            begin_s.append(time.monotonic())
            got.update(message.body for message in messages)
            if got.total() >= count:
                done.set()

    consumer = PushConsumer(
        f"{topic}-{selector.expression_type}-{len(selector.expression)}",
        namesrv_addr=namesrv,
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
        consume_message_batch_max_size=1_024,
    )
    consumer.subscribe(topic, selector, listener=listen)
    with consumer:
        done.wait(PATIENCE_S)
        return got, time.monotonic() - begin_s[0] if begin_s else PATIENCE_S


def main() -> None:
    """Sends, reads with each expression, compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=None, help="so many rows; all by default")
    parser.add_argument("--namesrv", default="127.0.0.1:9876")
    options = parser.parse_args()
    flights = list(islice(rows(), options.rows))
    topic = f"flights-filtered-{time.time_ns():x}"
    with Producer("filter-producer", namesrv_addr=options.namesrv) as producer:
        futures = [producer.send_async(to_message(row, topic)) for row in flights]
        for future in futures:
            future.result()
    print(f"sent {len(flights):,} flights to {topic}")
    for name, (selector, is_wanted) in CHOICES.items():
        expected = Counter(to_message(row).body for row in flights if is_wanted(row))
        got, seconds = consume(topic, selector, expected.total(), options.namesrv)
        if got != expected:
            raise SystemExit(f"{name}: {got.total():,} rows instead of {expected.total():,}")
        rate = len(flights) / seconds
        print(f"{name:5} {got.total():>8,} rows, as scanned; {rate:>10,.0f} messages/s looked at")


if __name__ == "__main__":
    main()

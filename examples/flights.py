"""The flights that left New York City in 2013, as messages.

336,776 rows (see ``examples/data/README.md``). Tag: carrier. Keys: tail number,
and carrier with flight number. Sharding key: tail number, so that all flights of
one aircraft stay in order. Body: the row as JSON.

``python examples/flights.py`` sends all of them to the cluster of ``mqmesh up``.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from mqmesh import Message, Producer

DATA = Path(__file__).parent / "data" / "flights.csv.zst"
TOPIC = "flights"
PROPERTIES = ("origin", "dest", "dep_delay", "distance")
MISSING = ("", "NA")


def rows(path: Path = DATA) -> Iterator[dict[str, str]]:
    """The rows of the file, in its order; column name to text."""
    with path.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file)
        yield from csv.DictReader(io.TextIOWrapper(reader, "utf-8", newline=""))


def to_message(row: dict[str, str], topic: str = TOPIC) -> Message:
    """One row as a message; a missing tail number gives no key and no sharding key."""
    tailnum = row["tailnum"] if row["tailnum"] not in MISSING else None
    flight = row["carrier"] + row["flight"]
    return Message(
        topic,
        msgspec.json.encode(row),
        tag=row["carrier"],
        keys=(tailnum, flight) if tailnum else (flight,),
        properties={name: row[name] for name in PROPERTIES if row[name] not in MISSING},
        sharding_key=tailnum,
    )


def main() -> None:
    """Sends all flights."""
    with Producer("flights-producer") as producer:
        sent = [producer.send_async(to_message(row)) for row in rows()]
        for one in sent:
            one.result()
    print(f"{len(sent):,} flights are in the topic {TOPIC}")


if __name__ == "__main__":
    main()

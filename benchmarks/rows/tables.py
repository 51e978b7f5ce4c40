"""Tables of keys and values: writes in batches, lone reads, reads of many keys.

Run as ``python -m rows.tables TASK``.
"""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from mqmesh.sdk.tables.key_value import KeyValue
from rows.workload import Report, Stopwatch, Task, hand_in, read_task, wait_go

TABLE: Final = "bench-table"
KEYS: Final = 100_000
MANY: Final = 1_000
"""Keys of one read."""
GETS: Final = 3_000


def put_table(task: Task) -> Report:
    """Values of as many keys as a table has, again and again, a batch of them a request."""
    with KeyValue(TABLE, task.address, create=True) as kv:
        wait_go()
        watch = Stopwatch()
        for part in _parts(task, task.message_count):
            kv.put_many(part)
        return watch.report(task.message_count)


def get_table(task: Task) -> Report:
    """One read after the other; the latencies count."""
    with KeyValue(TABLE, task.address, create=True) as kv:
        _fill(kv, task)
        wait_go()
        watch = Stopwatch()
        latencies = []
        for number in range(GETS):
            began = time.monotonic()
            found = kv.get(f"key/{number * 31 % KEYS:08}")
            latencies.append((time.monotonic() - began) * 1e6)
            assert found is not None
        return watch.report(GETS, latencies_us=latencies)


def get_many_table(task: Task) -> Report:
    """Reads of 1,000 keys, in no order."""
    with KeyValue(TABLE, task.address, create=True) as kv:
        _fill(kv, task)
        wait_go()
        watch = Stopwatch()
        read = 0
        while read < task.message_count:
            keys = [f"key/{(read + number) * 7_919 % KEYS:08}" for number in range(MANY)]
            assert len(kv.get_many(keys)) == MANY
            read += MANY
        return watch.report(read)


def _fill(kv: KeyValue, task: Task) -> None:
    for part in _parts(task, KEYS):
        kv.put_many(part)


def _parts(task: Task, count: int) -> Iterator[dict[str, bytes]]:
    value = b"v" * task.body_bytes
    numbers = iter(range(count))
    while part := {f"key/{one % KEYS:08}": value for one in islice(numbers, task.batch_messages)}:
        yield part


PROGRAMS: Final[dict[str, Callable[[Task], Report]]] = {
    "put_table": put_table,
    "get_table": get_table,
    "get_many_table": get_many_table,
}


def main() -> None:
    """Runs the program that the task names."""
    task = read_task()
    hand_in(PROGRAMS[task.kind](task))


if __name__ == "__main__":
    main()

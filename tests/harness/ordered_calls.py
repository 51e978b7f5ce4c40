"""Calls of consumers' listeners, and a check of their order. Pure.

Each consumer writes a line for each message that its listener answered with SUCCESS, with the
times at which the call began and ended. The clock is one for all processes of a machine.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

MOST_TOLD: Final = 5


class Call(msgspec.Struct, frozen=True, gc=False):
    """One message that a listener took.

    Attributes:
        member: The consumer.
        queue: Broker and queue id.
        queue_offset: Queue offset of the message.
        number: Number of the message, counted by its producer from 0.
        generation: Generation in which the consumer was given the queue.
        began_ns: Monotonic clock.
        ended_ns: Monotonic clock.
    """

    member: str
    queue: str
    queue_offset: int
    number: int
    generation: int
    began_ns: int
    ended_ns: int

    def line(self) -> bytes:
        """Encodes the call as a line; written in one call, so that a crash leaves no half of it."""
        return (
            f"{self.member} {self.queue} {self.queue_offset} {self.number} {self.generation} "
            f"{self.began_ns} {self.ended_ns}\n"
        ).encode()


def parse_call(line: bytes) -> Call:
    """Decodes the call of a line."""
    member, queue, *numbers = line.decode().split(" ")
    offset, number, generation, began, ended = map(int, numbers)
    return Call(member, queue, offset, number, generation, began, ended)


class CallLog:
    """Follows the files that consumers write.

    Args:
        folder: Folder of the files, each named ``*.calls``.

    Attributes:
        calls: All that was read, in no order.
    """

    def __init__(self, folder: Path) -> None:
        self.calls: list[Call] = []
        self.numbers: set[int] = set()
        self._folder = folder
        self._read: dict[Path, int] = {}

    def read(self) -> None:
        """Reads what was written since."""
        for path in sorted(self._folder.glob("*.calls")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            found = [parse_call(line) for line in data[:whole].splitlines()]
            self.calls += found
            self.numbers.update(call.number for call in found)


def find_skips(calls: Iterable[Call]) -> list[str]:
    """Returns queues in which a message was consumed before one in front of it.

    Repeats are no skips: after a crash a queue goes back to what was committed.
    """
    found = []
    for queue, some in _by_queue(calls).items():
        highest = min(call.queue_offset for call in some) - 1
        for call in some:
            if call.queue_offset > highest + 1:
                found.append(f"queue {queue}: offset {call.queue_offset} behind {highest}")
            highest = max(highest, call.queue_offset)
    return found


def find_overlaps(calls: Iterable[Call]) -> list[str]:
    """Returns queues in which two calls ran at once."""
    found = []
    for queue, some in _by_queue(calls).items():
        for before, after in pairwise(some):
            if after.began_ns < before.ended_ns and after != before:
                found.append(
                    f"queue {queue}: {after.member} at offset {after.queue_offset} while "
                    f"{before.member} was at {before.queue_offset}"
                )
    return found


def find_key_overlaps(calls: Iterable[Call], keys: Sequence[str]) -> list[str]:
    """Returns keys of which two messages were with listeners at once; see ``find_disorder``."""
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda one: one.began_ns):
        if keys[call.number]:
            by_key[keys[call.number]].append(call)
    return [
        f"key {key}: {after.member} had {after.number} while {before.member} had {before.number}"
        for key, some in by_key.items()
        for before, after in pairwise(some)
        if after.began_ns < before.ended_ns
    ]


def handovers_s(calls: Iterable[Call]) -> list[float]:
    """Returns how many seconds queues rested between two members' calls, sorted."""
    return sorted(
        (after.began_ns - before.ended_ns) / 1e9
        for some in _by_queue(calls).values()
        for before, after in pairwise(some)
        if before.member != after.member
    )


def progress(calls: Iterable[Call], began_ns: int, seconds: int) -> tuple[float, float]:
    """Returns the share of seconds in which a message was consumed, at all and of each queue.

    Args:
        calls: All of them.
        began_ns: Beginning of the first second, monotonic clock.
        seconds: Number of seconds.
    """
    queues = _by_queue(calls)
    busy = {
        (queue, (call.ended_ns - began_ns) // 1_000_000_000)
        for queue, some in queues.items()
        for call in some
        if began_ns <= call.ended_ns < began_ns + seconds * 1_000_000_000
    }
    at_all = len({second for _, second in busy})
    return at_all / seconds, len(busy) / (seconds * max(len(queues), 1))


def longest_pause_s(calls: Iterable[Call], began_ns: int) -> float:
    """Returns the longest time from a beginning on in which nothing was consumed, in seconds."""
    ends = sorted(call.ended_ns for call in calls if call.ended_ns >= began_ns)
    return max((after - before for before, after in pairwise([began_ns, *ends])), default=0) / 1e9


def find_shared(calls: Iterable[Call]) -> list[str]:
    """Returns queues that a member took from another one in one generation.

    It may give a queue back that it claimed before it knew of the other one. Then the other one
    begins behind it, and it does not come back.
    """
    faults: dict[tuple[str, int], str] = {}
    for queue, some in _by_queue(calls).items():
        owned: dict[int, list[Call]] = defaultdict(list)
        for call in some:
            owned[call.generation].append(call)
        for generation, of_one in owned.items():
            for before, after in pairwise(of_one):
                if before.member == after.member:
                    continue
                highest = max(one.queue_offset for one in of_one if one.member == before.member)
                if after.queue_offset <= highest or after.began_ns < before.ended_ns:
                    members = f"{before.member}, {after.member}"
                    faults[queue, generation] = f"queue {queue}, generation {generation}: {members}"
    return list(faults.values())


def find_disorder(calls: Iterable[Call], keys: Sequence[str]) -> list[str]:
    """Returns keys whose messages were not consumed in the order they were sent.

    Args:
        calls: All of them.
        keys: Sharding key of each message by its number; empty for those without a key.

    Returns:
        One text for each key whose sequence, without repeats, differs from what was sent.
    """
    wanted: Mapping[str, list[int]] = defaultdict(list)
    for number, key in enumerate(keys):
        if key:
            wanted[key].append(number)
    seen: dict[str, dict[int, None]] = defaultdict(dict)
    for call in sorted(calls, key=lambda one: one.began_ns):
        if keys[call.number]:
            seen[keys[call.number]].setdefault(call.number)
    return [
        f"key {key}: {list(seen[key])[:MOST_TOLD]}… instead of {numbers[:MOST_TOLD]}…"
        for key, numbers in wanted.items()
        if list(seen[key]) != numbers
    ]


def _by_queue(calls: Iterable[Call]) -> dict[str, list[Call]]:
    queues: dict[str, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda one: one.began_ns):
        queues[call.queue].append(call)
    return queues

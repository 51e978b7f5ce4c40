"""Members that acknowledge each message, and the judgement on what they saw.

A member notes what it got, what it is about to report, and the answers. So ``judge`` knows:

* again: messages that somebody got after an acknowledgement of them was answered;
* twice: messages that somebody got while another living member had them under a lease.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

import msgspec

from harness.patience import until
from mqmesh.errors import ClientClosed, MQMeshError
from mqmesh.message import StoredMessage
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer

GOT, ACKING, ACKED, GIVEN = "got", "acking", "acked", "given"
"""Notes of a member; ``given`` has messages whose lease it has no more, as far as it knows."""
LEASE_MS: Final = 20_000
WAIT_MS: Final = 300
MOST: Final = (1, 32, 200)
HOLD_S: Final = 0.3
"""Messages are held up to so long before they are acknowledged."""
NACK_SHARE: Final = 0.03
NACK_MS: Final = (0, 300, 2_000)
SETTLE_MS: Final = 60_000

Key = tuple[str, int]
Note = Callable[[str, list[StoredMessage]], None]


class Seen(msgspec.Struct, frozen=True):
    """Line of a member's notes.

    Attributes:
        time_ms: When, by a clock that all members share.
        event: ``GOT``, ``ACKING``, ``ACKED`` or ``GIVEN``.
        member: Name of the member.
        keys: Messages.
    """

    time_ms: float
    event: str
    member: str
    keys: list[Key]


class Judgement(msgspec.Struct, frozen=True):
    """Judgement on some notes.

    Attributes:
        got: Messages that somebody got.
        acked: Messages of which an acknowledgement was answered.
        again: Sentences on messages that came after that.
        twice: Sentences on messages that two living members had at a time.
    """

    got: set[Key]
    acked: set[Key]
    again: list[str]
    twice: list[str]


def receive(
    consumer: SimpleConsumer, chance: random.Random, stopping: threading.Event, note: Note
) -> None:
    """Works on messages until it is to stop.

    Args:
        consumer: Started, and subscribed.
        chance: Source of chance.
        stopping: Ends the work, once what is held is reported.
        note: Called with an event and its messages.
    """
    for _ in count():
        if stopping.is_set():
            return
        found = consumer.receive(chance.choice(MOST), LEASE_MS, WAIT_MS)
        if not found:
            continue
        note(GOT, found)
        stopping.wait(chance.random() * HOLD_S)
        failed = [one for one in found if chance.random() < NACK_SHARE]
        done = [one for one in found if one not in failed]
        note(ACKING, done)
        try:
            if chance.randrange(2):
                consumer.ack_many(done)
            else:
                for future in [consumer.ack_async(one) for one in done]:
                    future.result()
            note(ACKED, done)
        except ClientClosed:
            return
        except MQMeshError:
            note(GIVEN, done)  # some may be settled: nothing is promised of the others
        for one in failed:
            note(GIVEN, [one])
            try:
                consumer.nack(one, chance.choice(NACK_MS))
            except MQMeshError:
                continue  # it comes again anyway


class Members:
    """Members of a group, each in a thread of its own.

    Args:
        group: Consumer group.
        topic: Topic; a message's key is its body.
        namesrv_addr: Name server.
        count: Number of members.

    Attributes:
        seen: Notes of all of them.
    """

    def __init__(self, group: str, topic: str, namesrv_addr: str, count: int) -> None:
        self.seen: list[Seen] = []
        self._acked = 0
        self._stopping = threading.Event()
        self._consumers = [
            SimpleConsumer(group, namesrv_addr=namesrv_addr, settle_timeout_ms=SETTLE_MS)
            for _ in range(count)
        ]
        self._threads = []
        for number, consumer in enumerate(self._consumers):
            consumer.subscribe(topic)
            consumer.start()
            arguments = (consumer, random.Random(number), self._stopping, self._note(number))
            self._threads.append(threading.Thread(target=receive, args=arguments))
            self._threads[-1].start()

    def wait_acked(self, more: int) -> None:
        """Waits until so many more acknowledgements are answered."""
        wanted = self._acked + more
        until(lambda: self._acked >= wanted)

    def held(self) -> int:
        """Returns the number of messages that members have now."""
        held: set[Key] = set()
        for one in list(self.seen):
            held = held | set(one.keys) if one.event == GOT else held - set(one.keys)
        return len(held)

    def close(self) -> None:
        """Works on nothing more, and gives back what was not worked on."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        for consumer in self._consumers:
            consumer.close()

    def _note(self, number: int) -> Note:
        def note(event: str, messages: list[StoredMessage]) -> None:
            keys = [("", int(one.body)) for one in messages]
            self._acked += len(keys) * (event == ACKED)
            self.seen.append(Seen(time.monotonic() * 1_000, event, f"member-{number}", keys))

        return note


def judge(notes: Iterable[Seen], dead_ms: dict[str, float] | None = None) -> Judgement:
    """Judges what members noted.

    Args:
        notes: Of all members, in any order.
        dead_ms: When members were killed.
    """
    acked: dict[Key, tuple[float, str]] = {}
    holders: dict[Key, tuple[float, str]] = {}
    found = Judgement(set(), set(), [], [])
    ended_ms = dead_ms or {}
    for one in sorted(notes, key=lambda seen: seen.time_ms):
        for key in one.keys:
            if one.event != GOT:
                if holders.get(key, (0.0, ""))[1] == one.member:
                    del holders[key]
                if one.event == ACKED:
                    acked.setdefault(key, (one.time_ms, one.member))
                    found.acked.add(key)
                continue
            found.got.add(key)
            if key in acked:
                at_ms, who = acked[key]
                found.again.append(
                    f"{one.member} got {key} {one.time_ms - at_ms:.0f} ms after {who} knew that it "
                    "is acknowledged"
                )
            at_ms, who = holders.get(key, (0.0, ""))
            is_held = one.time_ms < min(at_ms + LEASE_MS, ended_ms.get(who, float("inf")))
            if who and who != one.member and is_held:
                found.twice.append(
                    f"{one.member} got {key}, which {who} had for {one.time_ms - at_ms:.0f} ms"
                )
            holders[key] = one.time_ms, one.member
    return found

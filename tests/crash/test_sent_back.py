"""The broker dies while messages are sent back, offsets are moved, or it is started again.

Each delivery that failed has one retry afterwards, and one dead letter at most: what the broker
remembers of that (``retries/sent_back_marks.py``) is on the disk with them, or neither is.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.broker_on_files import BrokerOnFiles
from harness.kill_points import KillPoints
from harness.store_files import SEGMENT_BYTES, StoreFiles, deliverable, settle

from mqmesh.batch.record_batch import Attributes, encode_batch
from mqmesh.message import SCHEDULE_TOPIC, Message
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import ResetOffsetRequest
from mqmesh.protocol.retries import TO_DEAD_LETTERS, SendBackEntry, SendBackRequest
from mqmesh.storage.interface import FlushDiskType, StoreConfig

BODIES = ("a", "b", "c")
RETRY_QUEUE = 2
DLQ = "%DLQ%g"


class Broker(BrokerOnFiles):
    """A broker whose messages fail."""

    def send(self, topic: str = "t") -> None:
        """Stores the messages, in two batches."""
        for bodies in (BODIES[:1], BODIES[1:]):
            batch = encode_batch(
                [Message(topic, body.encode()) for body in bodies],
                topic=topic,
                queue_id=0,
                producer_id=7,
                first_sequence=ord(bodies[0]),
                born_timestamp=1,
                attributes=Attributes.REDELIVERED,
            )
            self.features.writes.put_encoded([batch], lambda outcomes: None)
        self.turn()

    def send_back(self, *, dead: bool = False) -> None:
        """All of them failed."""
        level = TO_DEAD_LETTERS if dead else 0
        entry = SendBackEntry("t", 0, 0, len(BODIES), "no", delay_level=level)
        self.ask(RequestCode.CONSUMER_SEND_MSG_BACK, SendBackRequest("g", [entry]))

    def commit(self) -> None:
        """The group is behind the messages, and that is saved."""
        self.features.state.committed.commit("g", "t", 0, len(BODIES))
        self.features.core.state.save()
        self.turn()

    def reset(self) -> None:
        """An administrator moves the group to the first message."""
        self.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ResetOffsetRequest("g", "t", "FIRST"))

    @property
    def was_reset(self) -> bool:
        return self.features.state.committed.query("g", "t", 0) == 0

    def retries(self) -> Counter[str]:
        """How many retries there are of each message."""
        return Counter(deliverable(self.store, SCHEDULE_TOPIC, RETRY_QUEUE).values())

    def dead_letters(self) -> Counter[str]:
        return Counter(deliverable(self.store, DLQ).values())


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreFiles]:
    files = StoreFiles(
        tmp_path / "store",
        StoreConfig(
            flush_disk_type=FlushDiskType.ASYNC_FLUSH,
            mapped_file_size_commit_log=SEGMENT_BYTES,
            checkpoint_interval_ms=1000,
            flush_interval_commitlog_ms=600_000,
        ),
    )
    yield files
    files.close()


def each(count: int) -> Counter[str]:
    return +Counter(dict.fromkeys(BODIES, count))


@pytest.mark.timeout(180)  # a start at each of some hundred points
@pytest.mark.parametrize("dead", [False, True], ids=["retries", "dead letters"])
def test_what_failed_has_one_retry_whenever_the_broker_dies(
    files: StoreFiles, kill_points: KillPoints, dead: bool
) -> None:
    done: list[str] = []
    broker = Broker(files)
    broker.send()
    broker.commit()

    def found(broker: Broker) -> Counter[str]:
        return broker.dead_letters() if dead else broker.retries()

    kill_points.start(files, lambda: list(done))
    broker.send_back(dead=dead)
    done.append("sent back")
    broker.close()
    broker = Broker(files)
    # The first write of a life is a call; those behind it are stores, and may be torn anywhere.
    broker.send("other")
    broker.send_back(dead=dead)
    broker.reset()
    done.append("reset")
    broker.send_back(dead=dead)
    done.append("sent back again")
    broker.close()
    assert kill_points.stores > 10
    counted: set[tuple[bool, int]] = set()
    for number, (copy, facts) in enumerate(kill_points.stop()):
        started = Broker(copy)
        was_reset = started.was_reset
        assert was_reset or "reset" not in facts
        before = found(started)
        assert before >= each(facts.count("sent back") + facts.count("sent back again"))
        # They come from the same place once more, and fail there.
        started.send_back(dead=dead)
        assert found(started) == each(2 if was_reset else 1)
        started.close()
        if number % 4 == 0:
            again = Broker(copy)
            again.send_back(dead=dead)
            assert found(again) == each(2 if was_reset else 1)
            again.close()
        counted.add((was_reset, sum(before.values())))
    # Also in the middle of each write, of which all or nothing is left.
    assert counted == {(False, 0), (False, 3), (True, 3), (True, 6)}


@pytest.mark.usefixtures("another_boot")
@pytest.mark.parametrize("synced", [False, True], ids=["marks lost", "marks kept"])
def test_a_power_cut_after_a_reset_neither_drops_nor_doubles_what_fails(
    files: StoreFiles, synced: bool
) -> None:
    broker = Broker(files)
    broker.send()
    broker.commit()
    now_ms = settle(broker.store)
    end = broker.store.stats().max_commitlog_offset
    broker.send_back()
    if synced:
        settle(broker.store, now_ms)
        end = broker.store.stats().max_commitlog_offset
    # It stands in the log behind the marks, so that it is lost with them, or before them.
    broker.reset()
    after = files.copy()
    lost = broker.store.stats().max_commitlog_offset - end
    after.write(end, bytes(lost))
    for _ in range(2):
        started = Broker(after)
        assert not started.was_reset
        started.send_back()
        assert started.retries() == each(1)
        started.close()
